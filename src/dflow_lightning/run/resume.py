"""What a resume may change of the recipe: one rule for every key."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dflow_lightning.errors import InputError
from dflow_lightning.tracking.callback import KEY, RUN_ID
from dflow_lightning.tracking.logger import flatten
from dflow_lightning.training.saved import Checkpoint


class Rule(NamedTuple):
    """What a resume does where a key has another value than in the checkpoint.

    Attributes:
        why: of `warned`, what the change means.
    """

    kind: Literal["refused", "warned", "free"]
    why: str = ""


FREE = Rule("free")  # does not reach the weights
REFUSED = Rule("refused")  # the second half would be another training
SCHEDULE = Rule("warned", "the learning rate's schedule follows it from here on")
SCORES = Rule("warned", "best.ckpt is compared with a score that was measured otherwise")
SUMS = Rule("warned", "sums may be rounded otherwise, so the run is no longer repeated bit for bit")
UNKNOWN = Rule("warned", "whether it reaches the weights is not known")
# By key or by what it lies below; the longest name that fits decides. A section as a whole is
# `refused`, so that a new setting of a training is safe before anyone has thought of it.
ON_RESUME: dict[str, Rule] = {
    "seed_everything": REFUSED,
    "method": REFUSED,
    "model": REFUSED,
    "model.init": FREE,  # the weights come from the checkpoint
    "model.init_from": FREE,
    "model.gradient_checkpointing": FREE,
    "model.attention": FREE,
    "model.loss.chunk_blocks": FREE,
    "model.target.attn_implementation": FREE,
    "model.target.shard": FREE,
    "data": REFUSED,
    "data.num_workers": FREE,
    "data.validation": SCORES,
    "data.validation_tasks": SCORES,
    "data.validation_suite_dir": SCORES,
    "data.limit_validation": SCORES,
    "data.test": FREE,
    "data.limit_test": FREE,
    "rollout": REFUSED,
    "validation": SCORES,
    "validation.batch_size": FREE,
    "tracking": FREE,
    "guards": FREE,
    "checkpoint": FREE,
    "checkpoint.monitor": Rule("warned", "the best score so far is forgotten"),
    "checkpoint.mode": Rule("warned", "the best score so far is forgotten"),
    "run_dir": FREE,
    "quiet": FREE,
    "ckpt_path": FREE,
    "weights_only": FREE,
    "trainer.precision": REFUSED,
    "trainer.accumulate_grad_batches": REFUSED,
    "trainer.gradient_clip_val": REFUSED,
    "trainer.gradient_clip_algorithm": REFUSED,
    "trainer.limit_train_batches": REFUSED,
    "trainer.overfit_batches": REFUSED,
    "trainer.use_distributed_sampler": REFUSED,
    "trainer.reload_dataloaders_every_n_epochs": REFUSED,
    "trainer.max_steps": SCHEDULE,
    "trainer.max_epochs": SCHEDULE,
    "trainer.accelerator": SUMS,
    "trainer.strategy": SUMS,
    "trainer.deterministic": SUMS,
    "trainer.benchmark": SUMS,
    "trainer.plugins": UNKNOWN,
    "trainer.callbacks": UNKNOWN,
    "trainer.limit_val_batches": SCORES,
    # How many processes there are is compared by itself, as a number: `Checkpointing`.
    "trainer.devices": FREE,
    "trainer.num_nodes": FREE,
    "trainer.logger": FREE,
    "trainer.fast_dev_run": FREE,
    "trainer.min_epochs": FREE,
    "trainer.min_steps": FREE,
    "trainer.max_time": FREE,
    "trainer.limit_test_batches": FREE,
    "trainer.limit_predict_batches": FREE,
    "trainer.val_check_interval": FREE,
    "trainer.check_val_every_n_epoch": FREE,
    "trainer.num_sanity_val_steps": FREE,
    "trainer.log_every_n_steps": FREE,
    "trainer.enable_checkpointing": FREE,
    "trainer.enable_progress_bar": FREE,
    "trainer.enable_model_summary": FREE,
    "trainer.enable_autolog_hparams": FREE,
    "trainer.inference_mode": FREE,
    "trainer.profiler": FREE,
    "trainer.detect_anomaly": FREE,
    "trainer.barebones": FREE,
    "trainer.sync_batchnorm": FREE,  # there is no such layer
    "trainer.default_root_dir": FREE,
    "trainer.model_registry": FREE,
}
PATH_KEYS = ("model.target.path", "data.train")  # compared by name: folders move
PRECISIONS = {  # Lightning's shorter and older spellings
    "null": "32-true", "32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed",
}  # fmt: skip


def rule_of(key: str) -> Rule | None:
    """The rule of a dotted key; None for one that the table does not have."""
    parts = key.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((ON_RESUME[name] for name in names if name in ON_RESUME), None)


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint tells about the run that wrote it."""

    path: Path
    recipe: dict[str, Any]
    run_id: str | None
    tracking_key: str | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "SavedRun":
        """Read what the tracking callbacks stored beside the weights.

        Raises:
            InputError: the checkpoint holds no recipe.
        """
        path, content = checkpoint.path, checkpoint.content
        if "recipe" not in content:
            raise InputError(
                f"ckpt_path: {path} holds no recipe; `dflow-train fit` did not write it"
            )
        return cls(path, content["recipe"], content.get(RUN_ID), content.get(KEY))

    def compare(self, recipe: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
        """Look for differences between the recipe of a resume and the saved one.

        Args:
            defaults: values of the keys that the release which saved the recipe did not have.

        Returns:
            a warning for each value that the resumed run takes over and a reader should know of.

        Raises:
            InputError: a value differs on which the training depends.
        """
        saved, current = flatten(filled(self.recipe, defaults)), flatten(recipe)
        warnings = []
        for key in sorted(saved.keys() | current.keys()):
            rule = rule_of(key) or UNKNOWN
            old, new = saved.get(key, "null"), current.get(key, "null")
            if rule.kind == "free" or _equal(key, old, new):
                continue
            if rule.kind == "refused":
                raise InputError(
                    f"ckpt_path: {self.path} was trained with {key} = {old}, this command says "
                    f"{new}; resume with the same recipe, or start a new run from exported weights "
                    "with model.init_from"
                )
            warnings.append(f"{key} was {old} and is {new} from here on: {rule.why}")
        return warnings


def _equal(key: str, old: str, new: str) -> bool:
    if key == "trainer.precision":
        return PRECISIONS.get(old, old) == PRECISIONS.get(new, new)
    return old == new or (key in PATH_KEYS and Path(old).name == Path(new).name)


def filled(recipe: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with the keys that it lacks, at all depths; one that is null is not lacking."""
    whole = {**defaults, **recipe}
    for key, value in recipe.items():
        if isinstance(value, Mapping) and isinstance(defaults.get(key), Mapping):
            whole[key] = filled(value, defaults[key])
    return whole
