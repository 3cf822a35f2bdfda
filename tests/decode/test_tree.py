"""A tree of drafts: its nodes, its mask, the path that is accepted, and that nothing is lost."""

import itertools

import pytest
import torch
from training import make_module

from dflow_lightning.decode import Engine, rounds, tree
from dflow_lightning.decode.request import Request
from dflow_lightning.decode.rounds import RoundBackend
from dflow_lightning.errors import InputError


def paths(one, row):
    """Each node's tokens from the anchor's child on, and whether its parent stands before it."""
    found = []
    for node in range(one.tokens_RN.shape[1]):
        parent = int(one.parent_RN[row, node])
        assert node == 0 or parent < node
        above = [] if node == 0 else found[parent]
        found.append([] if node == 0 else [*above, int(one.tokens_RN[row, node])])
        assert len(found[-1]) == int(one.depth_RN[row, node])
    return found


@pytest.mark.parametrize("num_nodes", [2, 3, 5, 6])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_the_nodes_are_the_most_probable_paths(num_nodes, scale):
    generator = torch.Generator().manual_seed(num_nodes)
    logits_RJV = scale * torch.randn(20, 3, 6, generator=generator)
    grown = tree.grow(logits_RJV, torch.arange(20), num_nodes)
    log_RJV = logits_RJV.log_softmax(-1)
    for row in range(20):
        every = {
            path: float(sum(log_RJV[row, slot, token] for slot, token in enumerate(path)))
            for depth in (1, 2, 3)
            for path in itertools.product(range(6), repeat=depth)
        }
        wanted = sorted(every, key=every.__getitem__, reverse=True)[: num_nodes - 1]
        assert [tuple(path) for path in paths(grown, row)[1:]] == wanted
    assert grown.tokens_RN[:, 0].tolist() == list(range(20))


@pytest.mark.parametrize("num_nodes", [2, 4, 9, 16])
def test_equal_probabilities_still_make_a_tree(num_nodes):
    certain = torch.full((1, 3, 16), -1e4)
    certain[..., 5] = 1e4  # a chain of 5s, each as probable as the anchor, and ties below them
    for logits_RJV in (certain, torch.zeros(1, 3, 16)):
        found = paths(tree.grow(logits_RJV, torch.tensor([7]), num_nodes), 0)
        assert len({tuple(path) for path in found}) == num_nodes
    chain = paths(tree.grow(certain, torch.tensor([7]), num_nodes), 0)
    assert [5, 5, 5][: num_nodes - 1] in chain


def test_a_node_sees_the_committed_tokens_and_its_ancestors():
    generator = torch.Generator().manual_seed(1)
    grown = tree.grow(torch.randn(4, 3, 9, generator=generator), torch.zeros(4).long(), 9)
    anchor_R = torch.tensor([0, 3, 5, 11])
    seen_RNT = tree.tree_visible(grown, anchor_R, 20)
    for row, node in itertools.product(range(4), range(9)):
        wanted, above = set(range(int(anchor_R[row]))), node
        while above:
            wanted.add(int(anchor_R[row]) + above)
            above = int(grown.parent_RN[row, above])
        wanted.add(int(anchor_R[row]))
        assert set(seen_RNT[row, node].nonzero().flatten().tolist()) == wanted


def test_the_path_equals_loops():
    generator = torch.Generator().manual_seed(2)
    seen = set()
    for _ in range(60):
        logits_RJV = 2 * torch.randn(5, 3, 4, generator=generator)
        grown = tree.grow(logits_RJV, torch.zeros(5).long(), 4)
        chosen_RN = torch.randint(0, 4, (5, 4), generator=generator)
        path = tree.follow(grown, chosen_RN, 4)
        for row in range(5):
            nodes, accepted, node = [0], 0, 0

            def children(node, row=row, grown=grown):
                return [n for n in range(1, 4) if int(grown.parent_RN[row, n]) == node]

            while True:
                wanted = int(chosen_RN[row, node])
                right = [n for n in children(node) if int(grown.tokens_RN[row, n]) == wanted]
                if not right:
                    break
                (node,) = right
                nodes.append(node)
                accepted += 1
            while children(node):
                node = children(node)[0]
                nodes.append(node)
            assert int(path.num_accepted_R[row]) == accepted
            assert int(path.length_R[row]) == len(nodes)
            assert path.nodes_RK[row, : len(nodes)].tolist() == nodes
            seen.add((accepted, len(nodes)))
    assert {(0, 2), (1, 2), (1, 3), (2, 3)} <= seen


def asked(batch):
    """A text that drafts well, and others of different lengths."""
    ids = batch.input_ids_BS[0].tolist()
    return [ids[:4], ids[:30], ids[5:17], [9, 200, 31]]


@pytest.mark.parametrize(("relay", "tree_nodes"), [(True, 3), (True, 12), (False, 12)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_tokens_as_the_target_alone(half_trained, relay, temperature, tree_nodes):
    module, batch = half_trained
    decoder = module.decoder()
    plain = decoder.generate_plain(asked(batch), max_new_tokens=24, temperature=temperature)
    for batch_size in (1, 3):
        fast = decoder.generate(
            asked(batch), max_new_tokens=24, temperature=temperature, use_rejected=relay,
            batch_size=batch_size, tree_nodes=tree_nodes,
        )  # fmt: skip
        if batch_size == 1:
            single = fast
        for one, other, alone in zip(plain, fast, single, strict=True):
            assert one.token_ids == other.token_ids
            assert one.finish_reason == other.finish_reason
            assert sum(other.accepted) + len(other.accepted) == len(other.token_ids) - 1
            assert other.accepted == alone.accepted
    assert max(max(one.accepted) for one in fast) > 0


def test_nucleus_sampling_and_stop_tokens_in_a_tree(half_trained):
    module, batch = half_trained
    decoder = module.decoder()
    options = {"max_new_tokens": 30, "temperature": 1.0, "top_p": 0.9, "top_k": 40}
    prompt = asked(batch)[:1]
    wanted = decoder.generate_plain(prompt, stop_token_ids=(), **options)[0].token_ids
    fast = decoder.generate(prompt, stop_token_ids=(), tree_nodes=9, **options)[0]
    assert fast.token_ids == wanted
    for stop in wanted[4:9]:
        fast = decoder.generate(prompt, stop_token_ids=(stop,), tree_nodes=9, **options)[0]
        assert fast.token_ids == wanted[: wanted.index(stop) + 1]
        assert fast.finish_reason == "stop"


def test_carried_rows_of_a_tree(tiny_target_dir):
    module = make_module(tiny_target_dir, carryover=True)
    decoder, prompts = module.decoder(), [[3, 5, 7, 9], [40, 2]]
    plain = decoder.generate_plain(prompts, max_new_tokens=20)
    fast = decoder.generate(prompts, max_new_tokens=20, tree_nodes=12)
    assert [one.token_ids for one in plain] == [one.token_ids for one in fast]


def test_a_wider_tree_accepts_more(half_trained):
    module, batch = half_trained
    decoder = module.decoder()

    def num_rounds(tree_nodes):
        completions = decoder.generate(
            asked(batch)[:2], max_new_tokens=40, tree_nodes=tree_nodes, use_rejected=False
        )
        return sum(len(one.accepted) for one in completions)

    assert num_rounds(32) < num_rounds(None)


def test_a_tree_that_is_a_chain_hands_on_what_a_chain_does(half_trained, monkeypatch):
    """With certain slots the tree is the chain: caches, context and relay of all rounds agree."""
    module, batch = half_trained
    decoder = module.decoder()
    grow = tree.grow

    def certain(logits_RJV, anchor_ids_R, num_nodes, pairs_2P=None):
        best_RJ1 = logits_RJV.argmax(-1, keepdim=True)
        sure_RJV = torch.full_like(logits_RJV, -1e4).scatter_(-1, best_RJ1, 1e4)
        return grow(sure_RJV, anchor_ids_R, num_nodes, pairs_2P)

    monkeypatch.setattr(tree, "grow", certain)
    prompt = batch.input_ids_BS[0, :10].tolist()
    size = decoder.drafter.dims.block_size
    engines = [
        Engine(decoder.models(), num_slots=1, max_length=60, tree_nodes=nodes)
        for nodes in (None, size)
    ]
    for engine in engines:
        engine.submit(Request(prompt_ids=prompt, max_new_tokens=45, stop_token_ids=()))
    relayed = 0
    while engines[0].busy:
        ours, theirs = (engine.step() for engine in reversed(engines))
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        chain, grown = (engine.state for engine in engines)
        length = int(chain.length_R[0]) - 1
        for one, other in zip(
            chain.target_cache.buffers(), grown.target_cache.buffers(), strict=True
        ):
            torch.testing.assert_close(one[:, :, :length], other[:, :, :length])
        torch.testing.assert_close(chain.context[0].keys[:, :, :length],
                                   grown.context[0].keys[:, :, :length])  # fmt: skip
        assert torch.equal(chain.rejected.valid_BNK, grown.rejected.valid_BNK)
        there = chain.rejected.valid_BNK
        torch.testing.assert_close(chain.rejected.h_BNKD[there], grown.rejected.h_BNKD[there])
        if there.any():
            assert torch.equal(chain.rejected.rejected_BN, grown.rejected.rejected_BN)
            assert torch.equal(chain.rejected.bonus_BN, grown.rejected.bonus_BN)
            relayed += 1
    assert relayed > 2


def test_the_rows_of_a_tree_are_the_clean_ones(half_trained):
    """Keys and values after compaction are those of reading the answer as plain text."""
    module, batch = half_trained
    decoder = module.decoder()
    prompt = batch.input_ids_BS[0, :10].tolist()
    engine = Engine(decoder.models(), num_slots=1, max_length=60, tree_nodes=12)
    engine.submit(Request(prompt_ids=prompt, max_new_tokens=45, stop_token_ids=()))
    answer = []
    while engine.busy:
        answer += [token for update in engine.step() for token in update.token_ids]
        if len(answer) > 35:
            break
    ids = torch.tensor([[*prompt, *answer]])[:, :-1]
    clean = Engine(decoder.models(), num_slots=1, max_length=60)
    clean.submit(Request(prompt_ids=ids[0].tolist(), max_new_tokens=1, stop_token_ids=()))
    clean.step()
    length = ids.shape[1]
    pairs = list(
        zip(engine.state.target_cache.buffers(), clean.state.target_cache.buffers(), strict=True)
    )
    pairs += [
        (getattr(one, name), getattr(other, name))
        for one, other in zip(engine.state.context, clean.state.context, strict=True)
        for name in ("keys", "values")
    ]
    for one, other in pairs:
        torch.testing.assert_close(one[:, :, :length], other[:, :, :length], atol=1e-4, rtol=1e-4)


def test_relay_rows_end_where_the_path_ends(half_trained):
    module, _ = half_trained
    models = module.decoder().models()
    state = rounds.DecodeState.empty(models, 3, 40, 1, rejection=False)
    state.idle_R.fill_(False)
    size = models.block_size
    h_RKD = torch.arange(3 * size, dtype=torch.float32).view(3, size, 1)
    h_RKD = h_RKD.expand(-1, -1, models.drafter.dims.hidden_size)
    verified = rounds.VerifiedBlock(
        torch.zeros(3, size).long(), torch.tensor([0, 1, 1]), h_RKD, torch.ones(3, size - 1).long(),
        torch.ones(3).bool(), torch.tensor([size, 2, 3]),
    )  # fmt: skip
    rounds.keep_rejected(models, state, verified, h_RKD)
    there = state.rejected.valid_BNK[:, 0].tolist()
    assert there[0] == [False] + [True] * (size - 1)
    assert there[1] == [False] * size  # the accepted node is a leaf
    assert there[2] == [False, True] + [False] * (size - 2)
    assert float(state.rejected.h_BNKD[2, 0, 1, 0]) == 2 * size + 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tree_nodes": 1}, "tree_nodes is 1; give 2 to"),
        ({"tree_nodes": 1000}, "tree_nodes is 1000; give 2 to"),
        ({"tree_nodes": 8, "acceptance": "rejection"}, "acceptance is rejection"),
        ({"tree_nodes": 8, "backend": "compiled"}, "backend is compiled"),
        ({"tree_nodes": 8, "backend": "package"}, "backend is package"),
        ({"tree_nodes": 8, "speculative": False}, "plain decoding drafts nothing"),
    ],
)
def test_what_a_tree_cannot_do_is_refused(half_trained, options, said):
    with pytest.raises(InputError, match=said):
        half_trained[0].decoder().generate([[1, 2]], **options)


def test_models_without_independent_slots_are_refused(half_trained, tiny_target_dir):
    decoder = half_trained[0].decoder()
    chained = make_module(tiny_target_dir, causal_head=True).decoder()
    for models in (decoder.models(speculative=False), chained.models()):
        with pytest.raises(InputError, match="DFlash or DFlow drafter without a causal head"):
            Engine(models, num_slots=1, max_length=20, tree_nodes=8)
    with pytest.raises(InputError, match="backend is made elsewhere"):
        Engine(
            decoder.models(),
            num_slots=1,
            max_length=20,
            tree_nodes=8,
            backend=RoundBackend("eager"),
        )
