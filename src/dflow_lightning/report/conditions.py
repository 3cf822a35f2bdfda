"""What has to be equal before measured numbers may stand side by side."""

from dflow_lightning.errors import InputError

# What has to be equal before two files may share a table: other values of these change tau.
SAME_CONDITIONS = (
    "target_fingerprint",
    "template_hash",
    "enable_thinking",
    "suite_hash",
    "max_new_tokens",
)


def check_same_conditions(paths: list[str], results: list[dict], field: str = "bench") -> None:
    """Refuse to set numbers side by side that were not measured alike."""
    first = results[0]["environment"]
    for path, result in zip(paths[1:], results[1:], strict=True):
        for key in SAME_CONDITIONS:
            ours, theirs = first.get(key), result["environment"].get(key)
            if ours != theirs:
                raise InputError(
                    f"{field}: {paths[0]} and {path} differ in {key} ({ours} and {theirs}), so "
                    "their numbers cannot be in one table; write a report of each"
                )
