"""Sets of conversations: prepared folders, files of any shape, packed, mixed and resumed."""

import json
import pickle
import tracemalloc
from collections import Counter
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from conversations import assistant, question, user
from test_datamodule import Recorder, SaveOnce, trainer

from dflow_lightning.data.batches import TrainLoader
from dflow_lightning.data.conversations import Conversation
from dflow_lightning.data.order import Order, pack
from dflow_lightning.data.prepared import PreparedRow, PreparedWriter, finish
from dflow_lightning.data.token_rows import (
    ChainedRows,
    PreparedRows,
    TokenRows,
    last_answer,
    sample_id,
)
from dflow_lightning.data.turns import written_rows
from dflow_lightning.errors import InputError


def write_prepared(
    folder: Path, rows: list[PreparedRow], rows_per_file: int = 7, **manifest
) -> Path:
    folder.mkdir()
    writer = PreparedWriter(folder, rows_per_file)
    for row in rows:
        writer.write(row)
    finish(folder, manifest, writer.close())
    return folder


def numbered(count: int, first: int = 0, family: str = "math") -> list[PreparedRow]:
    """Row r has r + 4 tokens, all r, of which the last two are supervised."""
    return [
        PreparedRow(
            f"row-{r}", family, [r % 250] * (r + 4), [False] * (r + 2) + [True] * 2, True, r
        )
        for r in range(first, first + count)
    ]


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_prepared(tmp_path / "prepared", numbered(22))


# ---------------------------------------------------------------- prepared folders


def test_rows_of_a_folder_are_those_that_were_written(folder):
    rows = PreparedRows(folder)
    assert len(rows) == 22
    assert rows.lengths.tolist() == [r + 4 for r in range(22)]
    assert rows.sample_ids.tolist() == [sample_id(f"row-{r}") for r in range(22)]
    for r, wanted in enumerate(numbered(22)):
        tokens, mask = rows.read(r)
        assert (tokens.tolist(), mask.tolist()) == (wanted.input_ids, wanted.loss_mask)
    copied = pickle.loads(pickle.dumps(rows))  # as a worker gets it where processes are spawned
    assert copied.read(20)[0].tolist() == rows.read(20)[0].tolist()
    assert len(pickle.dumps(rows)) < 2000  # not the tokens


def test_memory_does_not_grow_with_the_tokens_of_a_folder(tmp_path):
    """16 MB of tokens, of which 20 batches are read."""
    rows = [
        PreparedRow(str(r), "math", [1] * 4000, [False] * 2000 + [True] * 2000, True, r)
        for r in range(1000)
    ]
    path = write_prepared(tmp_path / "large", rows, rows_per_file=300)
    del rows
    tracemalloc.start()
    try:
        source = PreparedRows(path)
        loader = TrainLoader(source, batch_size=4, seed=0)
        assert sum(1 for _ in islice(loader, 20)) == 20
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_500_000


def test_a_folder_trains_validates_and_gives_prompts(folder, make_data, tmp_path):
    held_out = write_prepared(
        tmp_path / "held",
        [*numbered(6, 100), *numbered(6, 200, "code")],
    )
    data = make_data(train=folder, validation=held_out, limit_validation=3)
    data.setup("fit")
    assert 203 <= data.longest_row <= 209
    seen = sorted(chain(*(batch.sample_ids_B.tolist() for batch in data.train_dataloader())))
    assert len(seen) == 20
    assert set(seen) <= {sample_id(f"row-{r}") for r in range(22)}
    held = [batch.sample_ids_B.tolist() for batch in data.val_dataloader()]
    assert len(list(chain(*held))) == 6
    prompts = data.prompts("validation", per_family=2)
    assert [prompt.family for prompt in prompts] == ["code"] * 2 + ["math"] * 2
    number = int(prompts[0].id.removeprefix("row-"))
    assert prompts[0].token_ids == [number % 250] * (number + 2)
    assert prompts[0].reference_ids == [number % 250] * 2
    assert data.prompts("validation", per_family=1) == [prompts[0], prompts[2]]
    with pytest.raises(InputError, match=r"of 22 rows are longer than data\.max_length 9, first "):
        make_data(train=folder, max_length=9).setup("fit")


@pytest.mark.parametrize("kinds", ["both prepared", "train prepared", "validation prepared"])
def test_overlap_is_found_between_all_kinds(kinds, make_data, write, tmp_path, tokenizer):
    from dflow_lightning.data.template import ChatEncoder, render_prompt

    def as_row(number: int) -> PreparedRow:
        messages = [user(f"What is {number}?"), assistant("five " * number + "five")]
        ((_, row),) = written_rows(
            ChatEncoder(tokenizer), Conversation(str(number), "default", messages)
        )
        encoded = row.tokens
        prompt = render_prompt(tokenizer, messages[:1])
        assert encoded.input_ids[: len(prompt)] == prompt
        return PreparedRow(
            str(number), "math", encoded.input_ids, encoded.loss_mask, True, hash(number)
        )

    train_numbers, held_numbers = range(8), range(6, 12)
    train = write_prepared(tmp_path / "a", [as_row(n) for n in train_numbers])
    held = write_prepared(tmp_path / "b", [as_row(n) for n in held_numbers])
    if kinds == "validation prepared":
        train = write(*map(question, train_numbers), name="a.jsonl")
    if kinds == "train prepared":
        held = write(*map(question, held_numbers), name="b.jsonl")
    with pytest.raises(InputError, match=r"data\.validation: 2 of 6 prompts are also in data\."):
        make_data(train=train, validation=held).setup("fit")
    apart = write_prepared(tmp_path / "c", [as_row(n) for n in range(20, 24)])
    make_data(train=train, validation=apart).setup("fit")


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [([0, 1, 1], (1, 3)), ([0, 1, 0, 1, 1, 0], (3, 5)), ([1, 1], (0, 2)), ([0, 0], (2, 2))],
)
def test_the_last_answer(mask, wanted):
    found = last_answer(np.array(mask, bool))
    assert (found.start, found.stop) == wanted


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"tokenizer_sha256": "0"}, "prepared with another tokenizer than the target's"),
        ({"template_sha256": "0"}, "prepared with another chat template than the target's"),
        ({"enable_thinking": True}, r"data\.enable_thinking is False, but .* prepared with True"),
    ],
)
def test_a_folder_prepared_for_something_else(make_data, tmp_path, manifest, message):
    folder = write_prepared(tmp_path / "other", numbered(9), **manifest)
    with pytest.raises(InputError, match=message):
        make_data(train=folder).setup("fit")


def test_a_directory_that_nobody_prepared(make_data, tmp_path):
    with pytest.raises(InputError, match=r"data\.train: .* is a directory without manifest\.json"):
        make_data(train=tmp_path).setup("fit")


# ---------------------------------------------------------------- files of other shapes


def test_other_shapes_are_read_like_ours(make_data, write, tmp_path):
    said = [("What is 3?", "five " * 3 + "five"), ("What is 4?", "five " * 4 + "five")]
    ours = write(*(question(n) for n in (3, 4)), name="ours.jsonl")
    share = write(
        *(
            {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
            for q, a in said
        ),
        name="share.jsonl",
    )
    alpaca = tmp_path / "alpaca.json"
    alpaca.write_text(json.dumps([{"instruction": q, "output": a} for q, a in said]))
    batches = []
    for path in (ours, share, alpaca):
        data = make_data(train=path, batch_size=2)
        data.setup("fit")
        (batch,) = data.train_dataloader()
        batches.append(sorted(batch.input_ids_BS.tolist()))
    assert batches[0] == batches[1] == batches[2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": [{"from": "human", "value": None}]}, r"line 1 of .* is rejected"),
        ({"instruction": "Add."}, r"line 1 of .* does not end with an answer; add it, or let df"),
    ],
)  # fmt: skip
def test_rows_that_have_to_be_prepared_first(make_data, write, row, message):
    with pytest.raises(InputError, match=rf"data\.train: {message}"):
        make_data(train=write(row)).setup("fit")


# ---------------------------------------------------------------- packing


def test_packing_keeps_every_row_once_and_fills():
    rng = np.random.default_rng(1)
    lengths = rng.integers(5, 300, 5000)
    bins = pack(np.arange(5000), lengths, 512)
    assert sorted(chain(*(one.tolist() for one in bins))) == list(range(5000))
    filled = np.array([lengths[one].sum() for one in bins])
    assert filled.max() <= 512
    assert filled.mean() > 0.97 * 512
    with pytest.raises(ValueError, match="600 tokens does not fit"):
        pack(np.arange(1), np.array([600]), 512)


def test_packed_order_follows_from_seed_and_epoch_and_drops_little():
    lengths = np.random.default_rng(2).integers(5, 60, 3000)

    def order(seed: int, epoch: int):
        found = Order(lengths, (3000,), 4, seed, width=128).batches(epoch)
        return [[row.tolist() for row in batch] for batch in found]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    rows = [row for batch in order(0, 0) for one in batch for row in one]
    assert len(set(rows)) == len(rows) > 2980
    assert all(len(batch) == 4 for batch in order(0, 0))


def test_a_packed_batch_holds_its_documents_one_after_the_other(folder):
    loader = TrainLoader(PreparedRows(folder), batch_size=2, seed=0, pad_id=9, width=40)
    rows = {sample_id(row.id): row for row in numbered(22)}
    seen = Counter()
    for batch in loader:
        assert batch.input_ids_BS.shape == (2, 40)
        for ids, mask, starts, samples in zip(
            batch.input_ids_BS, batch.loss_mask_BS, *batch.documents, strict=True
        ):
            at = 0
            while at < 40 and samples[at] != -1:
                row = rows[int(samples[at])]
                span = slice(at, at + len(row.input_ids))
                assert ids[span].tolist() == row.input_ids
                assert mask[span].tolist() == row.loss_mask
                assert set(starts[span].tolist()) == {at}
                assert set(samples[span].tolist()) == {sample_id(row.id)}
                seen[row.id] += 1
                at = span.stop
            assert not mask[at:].any()
            assert set(ids[at:].tolist()) <= {9}
            assert set(starts[at:].tolist()) <= {at}
    assert set(seen.values()) == {1}
    assert len(seen) > 15


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_killed_packed_run_meets_the_same_documents(make_data, tmp_path, num_workers):
    def data():
        return make_data(40, pack=True, max_length=64, batch_size=2, num_workers=num_workers)

    saving = SaveOnce(tmp_path / "saved.ckpt", 7)
    whole, resumed = Recorder(), Recorder()
    trainer(tmp_path, 12, callbacks=[saving]).fit(whole, data())
    trainer(tmp_path, 12).fit(resumed, data(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    assert resumed.seen == whole.seen[saving.batches :]


def test_packing_cannot_change_on_resume(folder):
    rows = PreparedRows(folder)
    packed, plain = (TrainLoader(rows, batch_size=2, seed=0, width=w) for w in (40, None))
    with pytest.raises(InputError, match=r"data\.pack is None, but the checkpoint .* with 40"):
        plain.load_state_dict(packed.state_dict())
    with pytest.raises(InputError, match=r"data\.pack is 40, but the checkpoint .* with None"):
        packed.load_state_dict(plain.state_dict())


def test_packed_ranks_share_the_batches_evenly(folder):
    rows = PreparedRows(folder)
    options = {"batch_size": 1, "seed": 3, "width": 40}
    ranks = [TrainLoader(rows, **options, rank=rank, world_size=2) for rank in range(2)]
    found = [[batch.sample_ids_B.tolist() for batch in rank] for rank in ranks]
    assert len(found[0]) == len(found[1]) == len(ranks[0])
    whole = [batch.sample_ids_B.tolist() for batch in TrainLoader(rows, **options)]
    assert [*chain(*zip(*found, strict=True))] == whole[: 2 * len(found[0])]


# ---------------------------------------------------------------- mixing


def shares(order: Order, epoch: int) -> list[int]:
    rows = np.concatenate([*chain(order.batches(epoch))]).ravel()
    edges = np.cumsum([0, *order.sizes])
    return [int(((rows >= a) & (rows < b)).sum()) for a, b in pairwise(edges)]


def test_weights_are_the_shares_of_every_epoch():
    order = Order(np.full(600, 5), (500, 100), 1, 0, (1.0, 3.0))
    assert order.quotas() == [150, 450]
    for epoch in range(3):
        assert shares(order, epoch) == [150, 450]
    assert Order(np.full(600, 5), (500, 100), 1, 0).quotas() == [500, 100]


def test_a_set_is_gone_through_before_a_row_comes_again():
    """Set 1 of 100 rows gives 450 an epoch: after two epochs every row came 9 times."""
    order = Order(np.full(600, 5), (500, 100), 1, 0, (1.0, 3.0))
    counts: Counter[int] = Counter()
    for epoch in range(2):
        counts.update(order.batches(epoch).ravel().tolist())
    assert {counts[row] for row in range(500, 600)} == {9}
    assert {counts[row] for row in range(500)} == {0, 1}
    assert sum(counts[row] for row in range(500)) == 300


def test_mixed_sets_train_and_resume(make_data, write, folder, tmp_path):
    path = write(*(question(n, id=f"file-{n}") for n in range(8)), name="file.jsonl")

    def data(**more):
        return make_data(train=[path, folder], train_weights=[3, 1], batch_size=2, **more)

    saving = SaveOnce(tmp_path / "saved.ckpt", 6)
    whole, resumed = Recorder(), Recorder()
    trainer(tmp_path, 20, callbacks=[saving]).fit(whole, data())
    trainer(tmp_path, 20).fit(resumed, data(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    assert resumed.seen == whole.seen[saving.batches :]
    of_file = {sample_id(f"file-{n}") for n in range(8)}
    rows = [*chain(*whole.seen[:15])]  # an epoch of 30 rows
    assert 20 <= sum(row in of_file for row in rows) <= 23
    packed = data(pack=True, max_length=80)
    packed.setup("fit")
    assert all(batch.documents is not None for batch in packed.train_dataloader())


def test_chained_rows_are_read_from_their_own_source():
    one, two = (
        TokenRows(np.arange(6) + b, np.ones(6, bool), np.array([0, 2, 6]), [f"{b}", f"{b}+"])
        for b in (0, 50)
    )
    rows = ChainedRows([one, two])
    assert [rows.read(r)[0].tolist() for r in range(4)] == [
        [0, 1], [2, 3, 4, 5], [50, 51], [52, 53, 54, 55]
    ]  # fmt: skip
    assert rows.lengths.tolist() == [2, 4, 2, 4]
    assert [rows.id(r) for r in range(4)] == ["0", "0+", "50", "50+"]
    assert rows.sample_ids.tolist() == [sample_id(rows.id(r)) for r in range(4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": []}, r"data\.train is empty"),
        ({"train": [Path("a"), Path("a")]}, r"data\.train names a set twice"),
        ({"train": [Path("a"), Path("b")], "train_weights": [1.0]}, "1 numbers for 2 sets"),
        ({"train": [Path("a"), Path("b")], "train_weights": [1.0, 0.0]}, "give positive numbers"),
    ],
)
def test_sets_and_weights_that_do_not_fit(make_data, arguments, message):
    with pytest.raises(InputError, match=message):
        make_data(**arguments)


def test_a_weight_too_small_for_a_row():
    order = Order(np.full(20, 5), (10, 10), 1, 0, (1.0, 1e-6))
    with pytest.raises(InputError, match=r"data\.train_weights are .* leave set 2 no row"):
        order.batches(0)
