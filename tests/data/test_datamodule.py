"""The data module as a whole, under Lightning's own trainer where that matters."""

import re
from pathlib import Path

import jsonargparse
import pytest
import torch
from conversations import question, user
from lightning.pytorch import Callback, LightningModule, Trainer
from tokenizers import normalizers

from dflow_lightning.data.datamodule import ChatDataModule
from dflow_lightning.data.prompts import read_prompts
from dflow_lightning.data.template import render_prompt
from dflow_lightning.errors import InputError


class Recorder(LightningModule):
    """Trains one number and notes the rows of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []
        self.held_out = 0

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.sample_ids_B.tolist())
        return self.weight * batch.loss_mask_BS.sum()

    def validation_step(self, batch, batch_idx):
        self.held_out += len(batch.sample_ids_B)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveOnce(Callback):
    """Saves a checkpoint after one optimizer step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step
        self.batches = 0

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)
            self.batches = len(pl_module.seen)


def trainer(folder: Path, max_steps: int, **arguments) -> Trainer:
    return Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **arguments,
    )


@pytest.mark.parametrize(
    ("every", "accumulate", "num_workers"),
    [(4, 1, 0), (5, 1, 0), (2, 2, 0), (3, 2, 0), (2, 2, 2)],
)
def test_killed_run_meets_the_same_rows(make_data, tmp_path, every, accumulate, num_workers):
    """5 batches an epoch; the checkpoint falls into one or on its end."""

    def data() -> ChatDataModule:
        return make_data(22, num_workers=num_workers)

    saved = tmp_path / "saved.ckpt"
    saving = SaveOnce(saved, every)
    run = trainer(tmp_path, 10, callbacks=[saving], accumulate_grad_batches=accumulate)
    whole = Recorder()
    run.fit(whole, data())
    resumed = Recorder()
    run = trainer(tmp_path, 10, accumulate_grad_batches=accumulate)
    run.fit(resumed, data(), ckpt_path=saved, weights_only=True)
    rest = len(resumed.seen)
    assert rest
    assert resumed.seen == whole.seen[-rest:]
    assert saving.batches + rest == len(whole.seen)


def test_run_that_reached_its_steps_goes_on_with_the_next_rows(make_data, tmp_path):
    whole = Recorder()
    trainer(tmp_path, 10).fit(whole, make_data(22))
    first = Recorder()
    run = trainer(tmp_path, 4)
    run.fit(first, make_data(22))
    run.save_checkpoint(tmp_path / "end.ckpt")
    second = Recorder()
    trainer(tmp_path, 10).fit(
        second, make_data(22), ckpt_path=tmp_path / "end.ckpt", weights_only=True
    )
    assert first.seen + second.seen == whole.seen


def test_validation_is_optional(make_data, write, tmp_path):
    held_out = write(*map(question, range(100, 107)), name="validation.jsonl")
    model = Recorder()
    run = trainer(tmp_path, 5, num_sanity_val_steps=0)
    run.fit(model, make_data(22, validation=held_out))
    assert model.held_out == 7
    trainer(tmp_path, 1).fit(Recorder(), make_data(22))


def test_test_split(make_data, write, tmp_path):
    rows = [question(n, "math" if n < 105 else "code") for n in range(100, 110)]
    data = make_data(test=write(*rows, name="test.jsonl"), limit_test=2)
    data.setup("test")
    (batch,) = data.test_dataloader()
    assert len(batch.sample_ids_B) == 4
    with pytest.raises(InputError, match=r"data\.validation is not set"):
        data.setup("validate")


def test_prompts(make_data, write, tokenizer):
    rows = [
        question(n, family) for n, family in zip(range(100, 110), ["math", "code"] * 5, strict=True)
    ]
    path = write(*rows, name="validation.jsonl")
    prompts = make_data(validation=path).prompts("validation")
    assert len(prompts) == 10
    by_id = {prompt.id: prompt for prompt in prompts}
    prompt = by_id["row-103"]
    assert prompt.family == "code"
    assert prompt.token_ids == render_prompt(tokenizer, [user("What is 103?")])
    assert tokenizer.decode(prompt.reference_ids) == rows[3]["answer"] + "<|im_end|>"

    some = make_data(validation=path, seed=5).prompts("validation", per_family=3)
    assert [prompt.family for prompt in some] == ["code"] * 3 + ["math"] * 3
    shuffled = write(*reversed(rows), name="shuffled.jsonl")
    assert read_prompts(tokenizer, shuffled, per_family=3) == some
    fewer = make_data(validation=path).prompts("validation", per_family=2)
    assert fewer == some[:2] + some[3:5]


def test_prompts_without_answers(write, tokenizer):
    path = write({"id": "a", "prompt": "Hi"})
    (prompt,) = read_prompts(tokenizer, path)
    assert prompt.reference_ids == []
    with pytest.raises(InputError, match=r"prompts: line 1 of .* tokens, more than 3; shorten it"):
        read_prompts(tokenizer, path, max_length=3)


def test_rows_longer_than_allowed(make_data):
    data = make_data(10, max_length=23)
    with pytest.raises(InputError) as caught:
        data.setup("fit")
    message = str(caught.value)
    longest = max(len(ids) for ids in _row_ids(make_data(10)))
    assert "of 10 rows are longer than data.max_length 23, first data.train: line" in message
    assert f"raise data.max_length to {longest} or shorten" in message
    make_data(10, max_length=longest).setup("fit")


def _row_ids(data: ChatDataModule) -> list[list[int]]:
    data.setup("fit")
    (tokens,) = data._tokens["train"]
    return [
        tokens.tokens[a:b].tolist()
        for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)
    ]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_file_that_repeats_training_prompts(make_data, write, split):
    path = write(
        *(question(n, answer="x", id=f"other-{n}") for n in range(20, 25)), name="held.jsonl"
    )
    with pytest.raises(InputError, match=rf"data\.{split}: 2 of 5 prompts are also in data\.train"):
        make_data(22, **{split: path}).setup("fit")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_length", 1),
        ("batch_size", 0),
        ("num_workers", -1),
        ("seed", -1),
        ("limit_validation", 0),
        ("limit_test", 0),
    ],
)
def test_numbers_out_of_range(make_data, name, value):
    with pytest.raises(InputError, match=rf"data\.{name} is {value}; give"):
        make_data(**{name: value})


@pytest.mark.parametrize("path", ["nowhere", "/nowhere/at/all", "./nowhere", "tests/nowhere"])
def test_missing_target(make_data, path):
    with pytest.raises(InputError, match=rf"model\.target\.path: {path} does not exist; give"):
        make_data(tokenizer=path).setup("fit")


def test_target_without_tokenizer(make_data, tmp_path):
    with pytest.raises(InputError, match=r"the tokenizer of .* could not be loaded"):
        make_data(tokenizer=str(tmp_path)).setup("fit")


def test_target_without_template(make_data, with_template, tmp_path):
    with_template(None).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has no chat template"):
        make_data(tokenizer=str(tmp_path)).setup("fit")


def test_row_the_template_refuses(make_data, with_template, tmp_path):
    refusing = "{% if '7' in messages[0].content %}{{ raise_exception('no seven') }}{% endif %}"
    with_template(refusing + "{% for m in messages %}{{ m.content }}{% endfor %}").save_pretrained(
        tmp_path
    )
    with pytest.raises(InputError, match=r"line 8 of .* \(id 'row-7'\): .* \(no seven\)"):
        make_data(tokenizer=str(tmp_path)).setup("fit")


def test_row_whose_answer_has_no_token(make_data, with_template, tmp_path):
    odd = with_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    odd.backend_tokenizer.normalizer = normalizers.Replace("five", "")
    odd.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"line 1 of .* \(id 'row-0'\): no token is supervised"):
        make_data(tokenizer=str(tmp_path)).setup("fit")


def test_f44_rows_in_which_no_block_can_begin(make_data, with_template, write, tmp_path, capsys):
    """F44: a training on such rows alone finished at a loss of 0.000."""
    with_template("{% for m in messages %}{{ m.content }}{% endfor %}").save_pretrained(tmp_path)
    short = [{"id": f"s{i}", "prompt": f"Is {i} odd?", "response": "y"} for i in range(2)]
    long = {"id": "l", "prompt": "Is 5 odd?", "response": "yes"}
    for rows, bare, first in (([*short], 2, 1), ([long, *short], 2, 2)):
        data = make_data(train=write(*rows, name="answers.jsonl"), tokenizer=str(tmp_path))
        said = rf"data.train: line {first} of .* has no two supervised tokens side by side, .*; "
        said += f"{bare} of {len(rows)} rows are like it; "
        if long in rows:
            data.setup("fit")
            err = " ".join(capsys.readouterr().err.split())
            assert re.search(f"warning: {said}nothing is learned from them", err)
        else:
            with pytest.raises(InputError, match=f"{said}give longer answers"):
                data.setup("fit")


def test_arguments_are_read_from_the_signature(tmp_path):
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(ChatDataModule, "data")
    given = [
        "--data.train=a.jsonl",
        "--data.tokenizer=t",
        "--data.test=null",
        "--data.supervise=last_turn",
    ]
    data = parser.instantiate_classes(parser.parse_args(given)).data
    assert data.paths == {"train": [Path("a.jsonl")], "validation": [], "test": []}
    assert data.supervise == "last_turn"
    assert "at most this many test rows of each family" in " ".join(parser.format_help().split())
