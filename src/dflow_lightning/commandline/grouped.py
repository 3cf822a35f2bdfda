"""Commands that take their options in groups, and still name each option on its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose arguments are dataclasses, as a function of all their fields.

    `--timeout 60` is an option of its own, and arrives as `server.timeout`. A field that several
    groups have is one option, and each of them gets it. Options that are not given take the
    default of their field.

    Raises:
        TypeError: two groups share a field but not its default, of which help could show only one.
    """
    hints = get_type_hints(command)
    parameters = inspect.signature(command).parameters.values()
    groups = {one.name: hints[one.name] for one in parameters if is_dataclass(hints[one.name])}
    options: dict[str, inspect.Parameter] = {}
    # The parser reads signature and docstring of the function it calls, so both are made here.
    docs = [inspect.getdoc(command) or ""]
    for parameter in parameters:
        if parameter.name not in groups:
            options[parameter.name] = parameter.replace(annotation=hints[parameter.name])
            continue
        for option in field_options(groups[parameter.name]):
            if options.setdefault(option.name, option).default != option.default:
                raise TypeError(f"{option.name} has a default of its own in {parameter.name}")
        group_doc = inspect.getdoc(groups[parameter.name]) or ""
        docs.append(group_doc.partition("Args:\n")[2].rstrip())

    signature = inspect.Signature(list(options.values()))

    @wraps(command)
    def flat(**chosen: Any) -> None:
        signature.bind(**chosen)  # refuses unknown options and names a missing one
        # A dataclass fills in what is not given, so that no two calls share a list.
        filled = {
            name: kind(**{one.name: chosen[one.name] for one in fields(kind) if one.name in chosen})
            for name, kind in groups.items()
        }
        own = {name: chosen[name] for name in hints if name in chosen and name not in groups}
        command(**own, **filled)

    flat.__signature__ = signature  # type: ignore[attr-defined]
    flat.__annotations__ = {name: one.annotation for name, one in options.items()}
    flat.__doc__ = "\n".join(docs)
    del flat.__wrapped__  # the parser would read its signature instead
    return flat


def field_options(group: type) -> Iterator[inspect.Parameter]:
    """The fields of a dataclass as keyword-only parameters."""
    types = get_type_hints(group)
    for one in fields(group):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        yield inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=types[one.name],
        )
