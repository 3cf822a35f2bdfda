"""The compiled package of the draft step: the tokens of the eager one, from the export alone."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.decode.package import PACKAGE_FOLDER, PACKAGE_MANIFEST
from dflow_lightning.errors import InputError
from dflow_lightning.export.write import export_drafter
from dflow_lightning.models.relay import Relay


@pytest.fixture(scope="module")
def export(half_trained, tmp_path_factory):
    """An export with its package."""
    module, _ = half_trained
    folder = tmp_path_factory.mktemp("packaged") / "drafter"
    parts = (module.drafter, module.relay, module.target)
    export_drafter(*parts, folder, dtype="float32", compile=True)
    return folder


@pytest.mark.parametrize("relay", [True, False])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_packaged_drafts_equal_eager_ones(half_trained, export, relay, batch_size):
    module, batch = half_trained
    decoder = SpeculativeDecoder.from_export(export, module.target)
    text = batch.input_ids_BS[0].tolist()
    prompts = [text[i : 2 * i + 4] for i in range(7)]
    for temperature in (0.0, 1.0):
        options = {
            "max_new_tokens": 25, "use_rejected": relay, "batch_size": batch_size,
            "temperature": temperature, "stop_token_ids": (),
        }  # fmt: skip
        wanted = decoder.generate(prompts, **options)
        got = decoder.generate(prompts, backend="package", **options)
        assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
        assert [c.accepted for c in got] == [c.accepted for c in wanted]


@pytest.mark.slow
@pytest.mark.codegen
def test_a_relay_of_one_term_is_packaged_as_it_is(half_trained, tmp_path):
    module, batch = half_trained
    relay = Relay(module.drafter.dims.hidden_size, 96, terms="scale")
    with torch.no_grad():
        for parameter in relay.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    parts = (module.drafter, relay, module.target)
    export_drafter(*parts, tmp_path / "drafter", dtype="float32", compile=True)
    decoder = SpeculativeDecoder.from_export(tmp_path / "drafter", module.target)
    text = batch.input_ids_BS[0].tolist()
    answers = [
        decoder.generate([text[:9]], max_new_tokens=25, stop_token_ids=(), backend=backend)[0]
        for backend in ("eager", "package")
    ]
    assert answers[0].accepted == answers[1].accepted
    assert sum(answers[0].accepted) > 0


def test_works_where_the_training_stack_is_missing(export, tiny_target_dir):
    program = f"""
        import sys
        for name in ("lightning", "deepspeed", "mlflow", "datasets", "torchmetrics"):
            sys.modules[name] = None
        from dflow_lightning.decode import SpeculativeDecoder
        decoder = SpeculativeDecoder.from_export({str(export)!r}, {str(tiny_target_dir)!r})
        plain = decoder.generate_plain([[3, 5, 7, 9]], max_new_tokens=20)
        fast = decoder.generate([[3, 5, 7, 9]], max_new_tokens=20, backend="package")
        print(plain[0].token_ids == fast[0].token_ids, sum(fast[0].accepted) > 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("device", "cuda"), ("dtype", "bfloat16"), ("torch", "1.0"), ("relay", False)],
)
def test_a_package_of_elsewhere_is_refused(half_trained, export, name, value):
    module, _ = half_trained
    path = export / PACKAGE_FOLDER / PACKAGE_MANIFEST
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {name: value}))
    decoder = SpeculativeDecoder.from_export(export, module.target)
    with pytest.raises(InputError, match=f"has {name} {value}"):
        decoder.generate([[1, 2]], backend="package")
    path.write_text(before)


def test_no_package(half_trained, tmp_path):
    module, _ = half_trained
    with pytest.raises(InputError, match="load the decoder from an export"):
        module.decoder().generate([[1, 2]], backend="package")
    export_drafter(module.drafter, module.relay, module.target, tmp_path / "d", dtype="float32")
    decoder = SpeculativeDecoder.from_export(tmp_path / "d", module.target)
    with pytest.raises(InputError, match=r"holds no decode/draft\.pt2"):
        decoder.generate([[1, 2]], backend="package")
