"""Puts the embedded default into wheels: it lies at the repository's root, and once in git."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HOME = "dflow_lightning/embedded"
EMBEDDED = (
    *("data/README.md", "data/tiny-qwen3", "data/tiny-drafters"),
    *("recipes", "constraints/cpu.txt"),
)


class EmbeddedDefault(BuildHookInterface):
    """An editable install reads these files where they are."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a wheel; `version` is its kind."""
        if version == "standard":
            build_data["force_include"] |= {path: f"{HOME}/{path}" for path in EMBEDDED}
