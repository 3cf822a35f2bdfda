"""`dflow-train export`: a checkpoint to the folder that engines load."""

from functools import partial
from pathlib import Path
from typing import Any, Literal

from dflow_lightning.commandline.json_output import JsonOutput
from dflow_lightning.errors import InputError
from dflow_lightning.export.write import check_replaceable, export_drafter
from dflow_lightning.models.device import choose_device
from dflow_lightning.models.eagle3 import Eagle3Drafter
from dflow_lightning.terminal import labelled
from dflow_lightning.tracking.registry import register_export
from dflow_lightning.training.saved import load_trained, open_checkpoint


def export_command(
    *,
    checkpoint: Path,
    out: Path,
    format: Literal["dflash", "speculators"] = "dflash",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    compile: bool = False,
    target: str | None = None,
    device: str = "auto",
    register: bool = True,
    register_as: str | None = None,
    json: Path | None = None,
) -> None:
    """Write the folder that SGLang, vLLM and `dflow-train decode` load.

    Args:
        checkpoint: a checkpoint file written by `dflow-train fit`.
        out: folder to write; an earlier export there is replaced in one step.
        format: `dflash` is the layout of published DFlash drafters; `speculators` that of the
            library of this name, which vLLM reads too, but not `dflow-train decode` and SGLang.
        dtype: how the weights are stored.
        compile: add `decode/draft.pt2`, the draft step with relay compiled for the device
            (`dflow-train decode --backend package`); about a minute.
        target: where the target is now, if not where it was trained with.
        device: `cpu`, `cuda`, or one GPU such as `cuda:1`: where the export is checked, and what
            the package of `--compile` is made for; auto is the GPU where there is one.
        register: add it to the tracking store of its run, as a version of a model.
        register_as: the model's name there; by default the experiment's and the target's.
        json: also write what was exported to this file as JSON; without a file name print it on
            standard output and everything else on standard error.
    """
    check_replaceable(out)
    result_json = JsonOutput(json)
    chosen = choose_device(device)
    saved = open_checkpoint(checkpoint)
    write: Any = partial(export_drafter, compile=compile)
    if format == "speculators":
        if compile:
            raise InputError("compile: only the format dflash holds a package; leave one out")
        from dflow_lightning.export.speculators import export_speculators

        write = export_speculators
    module = load_trained(saved, target=target, device=chosen)
    if isinstance(module.drafter, Eagle3Drafter) and (compile or format != "dflash"):
        option = "compile" if compile else f"format {format}"
        raise InputError(
            f"{option}: an EAGLE-3 drafter has one format and no package; leave it out"
        )
    write(
        module.drafter,
        module.relay,
        module.target,
        out,
        dtype=dtype,
        recipe=saved.recipe_and_scores(),
    )
    size = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    drafts = module.drafter.dims.block_size - 1
    facts = {"out": str(out), "format": format, "dtype": dtype, "weight_bytes": size}
    facts |= {"relay": module.relay is not None, "num_speculative_tokens": drafts}
    result_json.write(facts)
    relay = "with relay" if module.relay else "no relay"
    relay += ", with carryover" if module.drafter.carryover is not None else ""
    summary = f"{dtype}, {size / 1e6:.1f} MB, {relay}; num_speculative_tokens is {drafts}"
    text = result_json.text
    print(labelled("", f"exported to {out}: {summary}", text), file=text)
    if register:  # last: the export is good whatever becomes of its record
        register_export(saved, out, register_as, stream=text)
