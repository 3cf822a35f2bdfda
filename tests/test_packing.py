"""Packed rows: every document learns what it learns alone, and nothing crosses into another."""

import pytest
import torch
from torch import Tensor
from training import make_module

from dflow_lightning.data.datamodule import Batch
from dflow_lightning.tensors.attention import context_visible
from dflow_lightning.tensors.blocks import Documents, draw_anchors, next_anchors, slot_labels
from dflow_lightning.training.step_inputs import BlockLayout, Rollout, RolloutConfig, clean_forward

ROUNDS, K = 2, 4
ROWS = [[19, 8, 30], [23, 31], [9, 5, 17, 11]]  # lengths of the documents of each packed row
WIDTH = 60
PAD = 299


def make_documents(text: list[int]) -> list[tuple[list[int], list[bool]]]:
    """Tokens and masks: stretches of a learned text, so that drafts are accepted, and noise."""
    noise = torch.Generator().manual_seed(3)
    documents = []
    for number, length in enumerate(length for row in ROWS for length in row):
        ids = text[number : number + length]
        if number % 3 == 2:
            ids = torch.randint(0, 256, (length,), generator=noise).tolist()
        supervised = [p >= length // 3 for p in range(length)]
        if number % 2:
            supervised = [p not in (length // 2, 0) for p in range(length)]  # two turns
        documents.append((ids, supervised))
    return documents


def unpacked(documents) -> Batch:
    """A row each, padded on the right."""
    ids = torch.full((len(documents), WIDTH), PAD)
    mask = torch.zeros(len(documents), WIDTH, dtype=torch.bool)
    for b, (tokens, supervised) in enumerate(documents):
        ids[b, : len(tokens)] = torch.tensor(tokens)
        mask[b, : len(tokens)] = torch.tensor(supervised)
    return Batch(ids, mask, torch.arange(10, 10 + len(documents)))


def packed(documents) -> Batch:
    """The same documents end to end in the rows of `ROWS`."""
    B = len(ROWS)
    ids, mask = torch.full((B, WIDTH), PAD), torch.zeros(B, WIDTH, dtype=torch.bool)
    starts, samples = torch.zeros(B, WIDTH, dtype=torch.long), torch.full((B, WIDTH), -1)
    number = 0
    for b, row in enumerate(ROWS):
        at = 0
        for length in row:
            span = slice(at, at + length)
            ids[b, span], mask[b, span] = map(torch.tensor, documents[number])
            starts[b, span], samples[b, span] = at, 10 + number
            at, number = at + length, number + 1
        starts[b, at:] = at
    return Batch(ids, mask, samples[:, 0], Documents(starts, samples))


def only(batch: Batch, number: int) -> Batch:
    """The batch with one document supervised."""
    if batch.documents is None:
        mine = batch.sample_ids_B.unsqueeze(1) == 10 + number
    else:
        mine = batch.documents.sample_ids_BS == 10 + number
    return batch._replace(loss_mask_BS=batch.loss_mask_BS & mine)


@pytest.fixture(scope="module")
def both(half_trained):
    """A trained module, the documents apart and packed."""
    module, text = half_trained
    documents = make_documents(text.input_ids_BS[0].tolist())
    return module, unpacked(documents), packed(documents)


def rounds_of(module, batch: Batch, *, mode="online", reference="data"):
    """A step's inputs with all possible anchors, rolled out."""
    module.num_anchors, kept = WIDTH, module.num_anchors
    try:
        return module.step_inputs(
            batch,
            RolloutConfig(num_rounds=ROUNDS, num_anchors=WIDTH, mode=mode, reference=reference),
        )
    finally:
        module.num_anchors = kept


# ---------------------------------------------------------------- the same losses


@pytest.mark.parametrize(("mode", "reference"), [("online", "data"), ("online", "target"),
                                                 ("off", "data")])  # fmt: skip
@torch.no_grad()
def test_each_document_has_the_losses_it_has_alone(both, mode, reference):
    module, apart, together = both
    blocks = torch.zeros(ROUNDS + 1)
    for number in range(len(apart.sample_ids_B)):
        options = {"mode": mode, "reference": reference}
        _, alone_R4 = module.objective(rounds_of(module, only(apart, number), **options))
        _, inside_R4 = module.objective(rounds_of(module, only(together, number), **options))
        assert torch.equal(alone_R4[:, 2:], inside_R4[:, 2:]), number  # accepted, blocks
        weight_R = alone_R4[:, 1].clamp(min=1e-6)
        difference = (alone_R4[:, 0] - inside_R4[:, 0]).abs() / weight_R
        assert difference.max() <= 1e-5, (number, difference)
        blocks += alone_R4[:, 3]
    assert blocks.min() >= 10, blocks  # every round was compared


def test_gradients_of_a_packed_batch_are_those_of_its_documents(both, tiny_target_dir):
    module, apart, together = both
    module = make_module(tiny_target_dir)
    module.drafter.load_state_dict(both[0].drafter.state_dict())
    module.relay.load_state_dict(both[0].relay.state_dict())
    gradients = []
    for batch in (apart, together):
        module.zero_grad()
        module.objective(rounds_of(module, batch))[0].backward()
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@torch.no_grad()
def test_losses_would_differ_without_the_isolation(both):
    """What the comparison above is worth: neighbours that are seen change the losses."""
    module, apart, together = both
    followers = [1, 2, 4, 6, 7, 8]  # the first of a row has no neighbour before it
    for number in followers:
        alone = module.objective(rounds_of(module, only(apart, number)))[1][0]
        leaking = only(together, number)._replace(documents=None)
        leaked = module.objective(rounds_of(module, leaking))[1][0]
        assert (alone[0] - leaked[0]).abs() > 1e-3 * alone[1], number


@torch.no_grad()
def test_clean_features_of_a_document_end_with_it(both):
    module, _, together = both
    inputs = rounds_of(module, together, mode="clean_features")
    for previous, current in zip(inputs.rounds, inputs.rounds[1:], strict=False):
        rows = Rollout._clean_rows(inputs.taps_BSC, previous.anchors, K)
        positions = previous.anchors.positions_BN.unsqueeze(-1) + torch.arange(K)
        last = (previous.anchors.ends_BN - 1).unsqueeze(-1)
        for b, n in previous.anchors.valid_BN.nonzero().tolist():
            for j in range(K):
                wanted = min(int(positions[b, n, j]), int(last[b, n, 0]))
                assert torch.equal(rows[b, n, j], inputs.taps_BSC[b, wanted])
        assert current.rejected is not None


# ---------------------------------------------------------------- nothing crosses


@torch.no_grad()
@pytest.mark.parametrize("backend", ["dense", "split"])
def test_no_other_document_reaches_a_block(both, backend):
    """Taps, drafts and logits stay bit for bit when all other documents of the rows change."""
    module, apart, together = both
    drafter = module.drafter

    def logits(batch: Batch) -> Tensor:
        inputs = rounds_of(module, batch)
        context = drafter.context_kv(drafter.project(inputs.taps_BSC), inputs.positions_BS)
        parts = []
        for current in inputs.rounds:
            x = module.round_inputs(batch, current)
            a = current.anchors
            hidden = drafter(x, context, a.positions_BN, backend, starts_BN=a.starts_BN)
            parts.append(module.target.head(hidden).masked_fill(~a.valid_BN[..., None, None], 0))
        return torch.cat(parts, dim=1)

    noise = torch.Generator().manual_seed(8)
    for number in range(len(apart.sample_ids_B)):
        batch = only(together, number)
        others = batch.documents.sample_ids_BS != 10 + number
        random = torch.randint(0, 256, batch.input_ids_BS.shape, generator=noise)
        changed = batch._replace(input_ids_BS=batch.input_ids_BS.where(~others, random))
        assert torch.equal(logits(batch), logits(changed)), number


@torch.no_grad()
def test_positions_attention_anchors_and_labels_stay_inside(both):
    """Brute force over every slot of every block of every round."""
    module, _, together = both
    inputs = rounds_of(module, together)
    samples, S = together.documents.sample_ids_BS, WIDTH
    for b, row in enumerate(ROWS):
        wanted = [p for length in [*row, WIDTH - sum(row)] for p in range(length)]
        assert inputs.positions_BS[b].tolist() == wanted
    checked = 0
    for current in inputs.rounds:
        a = current.anchors
        capacity = S + a.positions_BN.shape[1] * K
        layout = BlockLayout.behind(S, capacity, a.positions_BN, K, a.starts_BN)
        seen_BNL = context_visible(a.positions_BN, S, a.starts_BN)
        _, supervised_BNJ = slot_labels(together.input_ids_BS, together.loss_mask_BS, a, K)
        for b, n in a.valid_BN.nonzero().tolist():
            anchor = int(a.positions_BN[b, n])
            mine = samples[b] == samples[b, anchor]
            assert mine[anchor + 1]
            before = mine & (torch.arange(S) < anchor)
            assert torch.equal(seen_BNL[b, n], before)
            for j in range(K):
                visible_L = layout.visible_BQL[b, n * K + j]
                assert torch.equal(visible_L[:S], before)
                own = torch.arange(n * K, n * K + j + 1) + S
                assert visible_L.nonzero().flatten().tolist() == [
                    *before.nonzero().flatten().tolist(), *own.tolist()
                ]  # fmt: skip
                first = int(before.sum())
                assert int(layout.positions_BQ[b, n * K + j]) == first + j
                position = anchor + j
                inside = position < S and bool(mine[position])
                if j:
                    label = inside and bool(together.loss_mask_BS[b, position])
                    assert bool(supervised_BNJ[b, n, j - 1]) == label
            checked += 1
    assert checked > 100


# ---------------------------------------------------------------- anchors


def test_documents_keep_the_anchors_they_have_alone(both):
    """The row's anchors are the first of all its documents' keys; each document keeps its order."""
    _, apart, together = both
    alone = draw_anchors(apart.loss_mask_BS, apart.sample_ids_B, WIDTH, seed=4, step=7)
    row_arguments = (together.loss_mask_BS, together.sample_ids_B)
    options = {"seed": 4, "step": 7, "documents": together.documents}
    for count in (5, 20, WIDTH):
        drawn = draw_anchors(*row_arguments, count, **options)
        number = 0
        for b, row in enumerate(ROWS):
            valid = drawn.valid_BN[b]
            found = drawn.positions_BN[b][valid].tolist()
            eligible = 0
            for length in row:
                start = sum(row[: row.index(length)])
                order = alone.positions_BN[number][alone.valid_BN[number]].tolist()
                eligible += len(order)
                mine = [p - start for p in found if start <= p < start + length]
                assert mine == order[: len(mine)]
                number += 1
            assert len(found) == min(count, eligible)


def test_anchors_of_a_moved_batch_ask_the_host_alone(both):
    """Nothing can be read back from the meta device, as nothing should be from a GPU."""
    _, apart, together = both
    for batch in (apart, together):
        moved = batch.to(torch.device("meta"))
        drawn = draw_anchors(
            moved.loss_mask_BS, moved.sample_ids_B, WIDTH, seed=4, step=7,
            documents=moved.documents, host_documents=moved.host_documents,
        )  # fmt: skip
        assert drawn.positions_BN.device.type == moved.input_ids_BS.device.type == "meta"
        assert moved.sample_ids == batch.sample_ids
        assert moved.tensors().keys() == batch.tensors().keys()


def test_spans_of_the_documents(both):
    _, _, together = both
    ends = together.documents.ends_BS
    for b, row in enumerate(ROWS):
        wanted, at = [], 0
        for length in [*row, WIDTH - sum(row)]:
            at += length
            wanted += [at] * length
        assert ends[b].tolist() == wanted
    anchors = draw_anchors(
        together.loss_mask_BS, together.sample_ids_B, 9, seed=0, step=0,
        documents=together.documents,
    )  # fmt: skip
    taken = anchors.take(4)
    assert taken.starts_BN.shape == taken.ends_BN.shape == (3, 4)
    moved = next_anchors(anchors, torch.zeros_like(anchors.positions_BN), together.loss_mask_BS, K)
    starts = together.documents.starts_BS.gather(1, moved.positions_BN)
    assert torch.equal(moved.starts_BN[moved.valid_BN], starts[moved.valid_BN])
    assert torch.equal(moved.starts_BN[moved.valid_BN], anchors.starts_BN[moved.valid_BN])


@torch.no_grad()
def test_packed_features_are_those_of_each_document_alone(both):
    module, apart, together = both
    layers = module.drafter.dims.target_layer_ids
    alone = clean_forward(module.target, apart, layers, 0).taps_BSC
    inside = clean_forward(module.target, together, layers, 0).taps_BSC
    number = 0
    for b, row in enumerate(ROWS):
        at = 0
        for length in row:
            torch.testing.assert_close(
                inside[b, at : at + length], alone[number, :length], atol=1e-5, rtol=1e-5
            )
            at, number = at + length, number + 1
