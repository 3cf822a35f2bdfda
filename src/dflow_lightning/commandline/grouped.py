"""Commands that take their options in groups, and still name each option on its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

ARGS = "\n    Args:\n"


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose arguments are dataclasses, as a function of all their fields.

    The parser reads the signature and the docstring of the function it calls, so both are made
    here: `--timeout 60` is an option of its own, and arrives as `server.timeout`. A field that
    several groups have is one option, and each of them gets it.
    """
    hints = get_type_hints(command)
    given = inspect.signature(command).parameters.values()
    groups = {one.name: hints[one.name] for one in given if is_dataclass(hints[one.name])}
    options: dict[str, inspect.Parameter] = {}
    described = [inspect.getdoc(command) or ""]
    for one in given:
        if one.name not in groups:
            options[one.name] = one.replace(annotation=hints[one.name])
            continue
        kind = groups[one.name]
        kinds = get_type_hints(kind)
        for field in fields(kind):
            default = field.default
            if field.default_factory is not MISSING:
                default = field.default_factory()
            if default is MISSING:
                default = inspect.Parameter.empty
            options.setdefault(
                field.name,
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=kinds[field.name],
                ),
            )
        described.append((inspect.getdoc(kind) or "").partition("Args:\n")[2].rstrip())

    signature = inspect.Signature(list(options.values()))

    @wraps(command)
    def flat(**chosen: Any) -> None:
        bound = signature.bind(**chosen)
        bound.apply_defaults()
        values = bound.arguments
        made = {
            name: kind(**{field.name: values[field.name] for field in fields(kind)})
            for name, kind in groups.items()
        }
        own = {name: values[name] for name in hints if name in values and name not in groups}
        command(**own, **made)

    flat.__signature__ = signature  # type: ignore[attr-defined]
    flat.__annotations__ = {name: one.annotation for name, one in options.items()}
    flat.__doc__ = "\n".join(described)
    del flat.__wrapped__  # whose signature the parser would read
    return flat
