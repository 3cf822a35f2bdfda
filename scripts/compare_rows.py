"""What `compare.py` compares: the rows, what the paper measured for them, and the goals."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

BASE = "dflash"


@dataclass(frozen=True)
class Variant:
    """A row: a recipe, what is changed on its command line, and what it is for."""

    name: str
    recipe: str
    changes: tuple[str, ...] = ()
    equal_time_to: str | None = None
    one_seed: bool = False

    @property
    def path(self) -> Path:
        return Path(f"recipes/{self.recipe}.yaml")

    def read(self) -> Any:
        """The values of the recipe with what is changed, by section."""
        names = [name.removeprefix("--") for name in self.changes[::2]]
        changed = [f"{n}={value}" for n, value in zip(names, self.changes[1::2], strict=True)]
        return OmegaConf.merge(OmegaConf.load(self.path), OmegaConf.from_dotlist(changed))


def variants() -> list[Variant]:
    """All rows, those that matter most first: whatever time is left, they are done."""
    dflow = Variant("dflow", "tiny-dflow")
    domino_dflow = Variant("domino-dflow", "tiny-domino-dflow")
    # As many blocks per step as the mask round and the rollout rounds of DFlow together.
    blocks = ("--model.num_anchors", str(num_blocks(dflow)))
    # Every block of the mask round is rolled out, as recipes/ablations/share-1.yaml has it.
    every = str(dflow.read()["model"]["num_anchors"])
    share_1 = replace(dflow, name="dflow-share-1", changes=("--rollout.num_anchors", every))
    return [
        Variant(BASE, "tiny-dflash"),
        dflow,
        Variant("domino", "tiny-domino"),
        domino_dflow,
        Variant("eagle3", "tiny-eagle3"),
        Variant("dflash-sc", "tiny-dflash-sc"),
        Variant("dflash-equal-blocks", "tiny-dflash", blocks),
        replace(
            domino_dflow,
            name="domino-dflow-teacher-forced",
            changes=("--rollout.mode", "teacher_forced"),
        ),
        replace(
            dflow,
            name="dflow-clean-features",
            changes=("--rollout.mode", "clean_features"),
            one_seed=True,
        ),
        replace(
            domino_dflow,
            name="domino-dflow-clean-features",
            changes=("--rollout.mode", "clean_features"),
            one_seed=True,
        ),
        share_1,
        Variant(
            "dflash-share-1-blocks",
            "tiny-dflash",
            ("--model.num_anchors", str(num_blocks(share_1))),
        ),
        Variant("dflash-equal-time", "tiny-dflash", equal_time_to="dflow", one_seed=True),
    ]


def num_blocks(variant: Variant) -> int:
    """Blocks per row of data that a row learns from: the mask round and all rollouts."""
    read = variant.read()
    rollout = read["rollout"]
    return read["model"]["num_anchors"] + rollout["num_anchors"] * rollout["num_rounds"]


def rolls_out(variant: Variant) -> bool:
    """Whether a step holds rollout rounds, whose cost can be told apart."""
    return bool((variant.read().get("rollout") or {}).get("num_rounds", 0))


# In the order of the printed table: the paper's own, then what the paper does not have.
ORDER = (
    "eagle3",
    "dflash",
    "dflash-equal-blocks",
    "dflash-sc",
    "dflow, relay off",
    "dflow, relay on",
    "domino",
    "domino-dflow-teacher-forced, relay off",
    "domino-dflow-teacher-forced, relay on",
    "domino-dflow, relay off",
    "domino-dflow, relay on",
    "domino-dflow-clean-features, relay off",
    "domino-dflow-clean-features, relay on",
    "dflash-share-1-blocks",
    "dflow-share-1, relay off",
    "dflow-share-1, relay on",
    "dflow-clean-features, relay off",
    "dflow-clean-features, relay on",
    "dflash-equal-time",
)

PAPER_SOURCE = (
    "arXiv 2609.06498, Qwen3-1.7B, 5 drafter layers, blocks of 16, tau over its benchmarks; a dash "
    "where it gives no number"
)
# Row: tau at T=0 and at T=1.
PAPER: dict[str, tuple[float | None, float | None]] = {
    "dflash": (3.56, 2.99),
    "dflash-sc": (3.67, None),
    "dflow, relay off": (3.66, None),
    "dflow, relay on": (3.93, 3.26),
    "domino": (4.02, None),
    "domino-dflow-teacher-forced, relay on": (2.22, None),
    "domino-dflow, relay on": (4.50, None),
}

CLEARLY = None  # the goal "by more than the spread of the seeds"
GOALS: tuple[tuple[str, str, int, float | None], ...] = (  # one, other, temperature, at least
    ("dflow, relay on", "dflash", 0, 1.134),
    ("dflow, relay on", "dflash", 1, 1.124),
    ("dflow-share-1, relay on", "dflash", 0, 1.134),
    ("dflow-share-1, relay on", "dflash", 1, 1.124),
    ("dflow-share-1, relay on", "dflash-share-1-blocks", 0, 1.0),
    ("dflow-share-1, relay on", "dflash-share-1-blocks", 1, 1.0),
    ("dflow, relay on", "dflow, relay off", 0, 1.05),
    ("dflow, relay on", "dflow, relay off", 1, 1.05),
    ("dflow, relay on", "dflash-sc", 0, 1.0),
    ("dflow, relay on", "dflash-sc", 1, 1.0),
    ("dflash-sc", "dflash", 0, 1.0),
    ("dflash-sc", "dflash", 1, 1.0),
    ("dflow, relay on", "dflash-equal-blocks", 0, 1.05),
    ("dflow, relay on", "dflash-equal-blocks", 1, 1.0),
    ("domino", "dflash", 0, 1.0),
    ("domino", "dflash", 1, 1.0),
    ("domino-dflow, relay on", "domino", 0, 1.0),
    ("domino-dflow, relay on", "domino", 1, 1.0),
    ("domino-dflow, relay on", "domino-dflow-teacher-forced, relay on", 0, CLEARLY),
    ("domino-dflow, relay on", "domino-dflow-teacher-forced, relay on", 1, CLEARLY),
    ("domino-dflow, relay on", "domino-dflow-clean-features, relay on", 0, CLEARLY),
    ("domino-dflow, relay on", "domino-dflow-clean-features, relay on", 1, CLEARLY),
    ("dflow, relay on", "dflow-clean-features, relay on", 0, CLEARLY),
    ("dflow, relay on", "dflow-clean-features, relay on", 1, CLEARLY),
    ("dflow, relay on", "dflash-equal-time", 0, 1.0),
    ("dflow, relay on", "dflash-equal-time", 1, 1.0),
)
