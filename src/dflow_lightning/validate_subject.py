"""What `dflow-train validate-export` checks, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from dflow_lightning import integrity
from dflow_lightning.data.prompts import Prompt
from dflow_lightning.decode import SpeculativeDecoder
from dflow_lightning.drafter_folder import LoadedDrafter, load_export
from dflow_lightning.equality import EqualityCheck
from dflow_lightning.target import FrozenTarget

NUM_FEW = 4  # prompts for what takes long, or needs no more


@dataclass(frozen=True)
class Subject:
    """What is checked, and with what."""

    folder: Path
    target: FrozenTarget
    prompts: list[Prompt]
    max_new_tokens: int
    suite: Path
    checkpoint: dict[str, Any] | None

    @cached_property
    def loaded(self) -> LoadedDrafter:
        return load_export(self.folder, self.target)

    @cached_property
    def decoder(self) -> SpeculativeDecoder:
        return SpeculativeDecoder.from_export(self.folder, self.target)

    @cached_property
    def equality(self) -> EqualityCheck:
        return EqualityCheck(self.target)

    @property
    def section(self) -> dict[str, Any]:
        """What the export records about itself; empty for a folder that others published."""
        return self.loaded.config.get(integrity.SECTION) or {}

    @property
    def relay_modes(self) -> list[bool]:
        loaded = self.loaded
        used = loaded.relay is not None or loaded.drafter.carryover is not None
        return [True, False] if used else [False]


def interleaved(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts in an order in which every first few are of as many families as there are."""
    families: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        families.setdefault(prompt.family, []).append(prompt)
    return [one for one in chain(*zip_longest(*families.values())) if one is not None]
