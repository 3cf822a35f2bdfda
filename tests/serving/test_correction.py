"""The flat batch of an engine against loops over requests and slots.

Shapes: R requests, T rows of all requests, K slots, D hidden.
"""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dflow_lightning.models.relay import Relay, align
from dflow_lightning.serving.vllm.correction import VerifiedBatch, correction, rejected_rows

K, D = 6, 4


def random_batch(seed: int) -> tuple[list[int], list[int]]:
    """Rows of each request, and how many of its drafts were rejected.

    Prompts and chunks of prompts (nothing rejected) among verified blocks, some of them cut short.
    """
    draw = random.Random(seed)
    rows, rejected = [], []
    for _ in range(draw.randint(1, 7)):
        verified = draw.random() < 0.7
        rows.append(draw.randint(2, K) if verified else draw.randint(1, 20))
        rejected.append(draw.randint(0, rows[-1] - 1) if verified else 0)
    return rows, rejected


def ends_of(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows).cumsum(0)


@pytest.mark.parametrize("first_rejected", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_slots_read_the_rows_that_a_loop_reads(seed: int, first_rejected: bool) -> None:
    rows, rejected = random_batch(seed)
    found_RK, valid_RK = rejected_rows(
        ends_of(rows), torch.tensor(rejected), K, first_rejected=first_rejected
    )
    start = 0
    for i, (count, wrong) in enumerate(zip(rows, rejected, strict=True)):
        accepted = count - 1 - wrong
        for slot in range(K):
            wanted = slot >= (1 if first_rejected else 2) and accepted + slot <= count - 1
            wanted = wanted and wrong > 0
            assert bool(valid_RK[i, slot]) == wanted
            if wanted:
                assert int(found_RK[i, slot]) == start + accepted + slot
        start += count
    assert found_RK.min() >= 0
    assert found_RK.max() < sum(rows)


def make_relay(normalize: bool = True) -> Relay:
    torch.manual_seed(0)
    relay = Relay(D, 8, normalize_boundary=normalize)
    for parameter in relay.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return relay


def run(rows: list[int], rejected: list[int], features_TD: torch.Tensor, **changes) -> torch.Tensor:
    """The correction of a batch whose ids are the row numbers."""
    torch.manual_seed(1)
    embedding = torch.nn.Embedding(200, D)
    verified = VerifiedBatch(
        ids_T=torch.arange(sum(rows), dtype=torch.int32),
        ends_R=ends_of(rows).int(),
        num_rejected_R=torch.tensor(rejected, dtype=torch.int32),
        bonus_R=torch.arange(len(rows)) + 100,
        features=lambda index: features_TD[index],
    )
    verified = VerifiedBatch(**vars(verified) | changes)
    with torch.no_grad():
        return correction(make_relay(), verified, K, norm=torch.tanh, embed=embedding)


@pytest.mark.parametrize("seed", range(10))
def test_full_blocks_get_what_the_decoder_gives_them(seed: int) -> None:
    """`align` on `[R, K, D]` and the same relay: the path of training and decoding."""
    torch.manual_seed(seed)
    accepted_R = torch.randint(0, K, (5,))
    features_RKD = torch.randn(5, K, D)
    ids_RK = torch.arange(5 * K).view(5, K)
    aligned_RKD, valid_RK = align(features_RKD.tanh(), accepted_R, K)
    rejected_R = ids_RK.gather(1, (accepted_R + 1).clamp(max=K - 1)[:, None]).squeeze(1)
    torch.manual_seed(1)
    embedding = torch.nn.Embedding(200, D)
    with torch.no_grad():
        wanted = make_relay()(
            aligned_RKD, embedding(torch.arange(5) + 100), embedding(rejected_R), valid_RK
        )
    found = run([K] * 5, (K - 1 - accepted_R).tolist(), features_RKD.flatten(0, 1))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("seed", range(20))
def test_no_row_of_another_request_is_read(seed: int) -> None:
    """All rows but a request's own rejected ones are poisoned; its correction does not notice."""
    rows, rejected = random_batch(seed)
    torch.manual_seed(seed)
    features_TD = torch.randn(sum(rows), D)
    clean_RKD = run(rows, rejected, features_TD)
    ends = ends_of(rows).tolist()
    for i, (end, wrong) in enumerate(zip(ends, rejected, strict=True)):
        poisoned_TD = torch.full_like(features_TD, float("nan"))
        poisoned_TD[end - wrong : end] = features_TD[end - wrong : end]
        torch.testing.assert_close(run(rows, rejected, poisoned_TD)[i], clean_RKD[i])
        if not wrong:
            assert not clean_RKD[i].any()


def test_the_poison_is_noticed_where_rows_are_mixed() -> None:
    """The test above can fail: with the requests' ends exchanged it does."""
    rows, rejected = [K, K], [3, 2]
    features_TD = torch.randn(2 * K, D)
    features_TD[:K] = float("nan")
    assert run(rows, rejected, features_TD)[1].isfinite().all()
    mixed_RKD = run(rows, rejected, features_TD, ends_R=ends_of(rows).flip(0))
    assert not mixed_RKD[1].isfinite().all()


def test_shapes_are_static_and_nothing_waits_for_the_device() -> None:
    """Fake tensors have no values: whatever reads one raises."""
    relay = make_relay()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        verified = VerifiedBatch(
            ids_T=torch.zeros(20, dtype=torch.int32),
            ends_R=torch.zeros(3, dtype=torch.int32),
            num_rejected_R=torch.zeros(3, dtype=torch.int32),
            bonus_R=torch.zeros(3, dtype=torch.int64),
            features=lambda index: torch.zeros(20, D)[index],
        )
        found = correction(
            relay, verified, K, norm=torch.tanh,
            embed=lambda ids: torch.zeros(*ids.shape, D),
        )  # fmt: skip
    assert tuple(found.shape) == (3, K, D)
