from itertools import chain, islice

import numpy as np
import pytest
import torch

from dflow_lightning.data.batches import HeldOutLoader, TrainLoader
from dflow_lightning.data.order import Order
from dflow_lightning.data.template import EncodedRow
from dflow_lightning.data.token_rows import Batches, TokenRows, sample_id
from dflow_lightning.errors import InputError

PAD = 99


def make_rows(count: int) -> TokenRows:
    """Row r has r + 2 tokens, all r, of which the last two are supervised."""
    encoded = [EncodedRow([r] * (r + 2), [False] * r + [True] * 2) for r in range(count)]
    return TokenRows.pack(encoded, [f"row-{r}" for r in range(count)])


def shuffled_batches(lengths, batch_size: int, *, seed: int, epoch: int):
    return Order(lengths, (len(lengths),), batch_size, seed).batches(epoch)


def loader(rows: TokenRows, **arguments) -> TrainLoader:
    return TrainLoader(rows, **{"batch_size": 4, "seed": 0} | arguments)


def ids(batches) -> list[list[int]]:
    return [batch.sample_ids_B.tolist() for batch in batches]


def test_a_batch_is_padded_on_the_right():
    rows = make_rows(5)
    batch = Batches(rows, PAD)[np.array([3, 0])]
    assert batch.input_ids_BS.tolist() == [[3] * 5, [0, 0, PAD, PAD, PAD]]
    assert batch.loss_mask_BS.tolist() == [[False] * 3 + [True] * 2, [True] * 2 + [False] * 3]
    assert batch.sample_ids_B.tolist() == [sample_id("row-3"), sample_id("row-0")]
    assert batch.documents is None
    assert [tensor.dtype for tensor in batch[:3]] == [torch.int64, torch.bool, torch.int64]


def test_tokens_are_kept_small():
    rows = make_rows(5)
    assert (rows.tokens.dtype, rows.loss_mask.dtype) == (np.int32, np.bool_)


def test_sample_id_is_fixed():
    """Checkpoints depend on it: anchors are drawn from it."""
    assert sample_id("row-0") == 2180181314842177874
    assert all(0 <= sample_id(str(n)) < 2**63 for n in range(100))


def test_order_follows_from_seed_and_epoch():
    lengths = make_rows(1000).lengths

    def order(seed: int, epoch: int) -> list[list[int]]:
        return [b.tolist() for b in shuffled_batches(lengths, 4, seed=seed, epoch=epoch)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert sorted(chain(*order(0, 0))) == list(range(1000))


def test_batches_hold_rows_of_like_length():
    lengths = np.random.default_rng(0).integers(10, 500, 2000)
    batches = shuffled_batches(lengths, 8, seed=0, epoch=0)
    padded = sum(lengths[batch].max() * len(batch) for batch in batches)
    assert padded / lengths.sum() < 1.05
    first_lengths = [lengths[batch[0]] for batch in batches]
    assert first_lengths != sorted(first_lengths)


@pytest.mark.parametrize(("count", "sizes"), [(22, [4] * 5), (8, [4, 4]), (3, [3]), (4, [4])])
def test_every_batch_is_full_unless_there_is_only_one(count, sizes):
    batches = shuffled_batches(make_rows(count).lengths, 4, seed=0, epoch=0)
    assert [len(batch) for batch in batches] == sizes


def test_iterations_are_epochs():
    rows = make_rows(22)
    stream = loader(rows)
    assert len(stream) == 5
    first, second = ids(stream), ids(stream)
    assert len(first) == len(second) == 5
    assert first != second
    assert ids(loader(rows)) == first


@pytest.mark.parametrize(("done", "num_workers"), [(1, 0), (4, 0), (5, 0), (7, 0), (4, 2)])
def test_resumed_stream_continues_exactly(done, num_workers):
    rows = make_rows(22)
    whole = loader(rows)
    expected = ids(whole) + ids(whole)

    first = loader(rows, num_workers=num_workers)
    seen: list[list[int]] = []
    while len(seen) < done:
        seen += ids(islice(first, min(done - len(seen), len(first))))
    second = loader(rows, num_workers=num_workers)
    second.load_state_dict(first.state_dict())
    iter(second)  # an iterator that is never used changes nothing
    seen += ids(second) + ids(second)
    assert seen[:10] == expected


def test_shorter_epochs_go_on_where_the_last_stopped():
    rows = make_rows(22)
    stream, short = loader(rows), loader(rows)
    expected = ids(stream) + ids(stream)
    assert [*chain(*(ids(islice(short, 2)) for _ in range(5)))] == expected


def test_ranks_share_the_batches_evenly():
    rows = make_rows(22)
    ranks = [loader(rows, rank=rank, world_size=2) for rank in range(2)]
    assert [len(rank) for rank in ranks] == [2, 2]
    one = ids(loader(rows))
    assert [ids(ranks[0]), ids(ranks[1])] == [[one[0], one[2]], [one[1], one[3]]]


def test_another_number_of_processes_goes_on_in_the_same_order():
    rows = make_rows(40)
    whole = loader(rows)
    expected = ids(whole)
    single = loader(rows)
    seen = ids(islice(single, 3))
    ranks = [loader(rows, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(single.state_dict())
    for pair in zip(*(islice(rank, 3) for rank in ranks), strict=True):
        seen += ids(pair)
    assert seen == expected[:9]


@pytest.mark.parametrize(
    ("other", "field"),
    [({"seed": 1}, "seed"), ({"batch_size": 2}, "batch_size"), ({"rows": make_rows(21)}, "train")],
)
def test_other_data_cannot_resume(other, field):
    state = loader(make_rows(22)).state_dict()
    rows = other.pop("rows", make_rows(22))
    with pytest.raises(InputError, match=rf"data\.{field} is .* but the checkpoint was trained"):
        loader(rows, **other).load_state_dict(state)


def test_state_is_plain_data():
    state = loader(make_rows(22)).state_dict()
    assert all(type(value) in (int, str) for value in state.values())


def test_iterating_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    ids(loader(make_rows(22)))
    assert torch.equal(before, torch.get_rng_state())


def test_too_few_batches_for_the_processes():
    with pytest.raises(InputError, match=r"1 batches of 4 rows for 2 processes; lower data\.batch"):
        loader(make_rows(5), world_size=2)


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_held_out_rows_are_seen_once(world_size):
    rows = make_rows(22)
    ranks = [
        HeldOutLoader(rows, batch_size=4, rank=r, world_size=world_size) for r in range(world_size)
    ]
    batches = [list(rank) for rank in ranks]
    assert len({len(some) for some in batches}) == 1
    counted = [batch for some in batches for batch in some if batch.loss_mask_BS.any()]
    assert sorted(chain(*ids(counted))) == sorted(rows.sample_ids.tolist())
    assert len(batches[0]) == len(ranks[0])
