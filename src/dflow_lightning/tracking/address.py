"""Addresses of tracking stores: a file in a folder of any name, and back.

A path that is pasted into `sqlite:///...` is read as a URI: SQLAlchemy ends it at a `?` and, since
its version 2.1, decodes `%41`. Everything that makes such an address, or takes a file out of one,
does it here.
"""

import os
from contextlib import suppress
from pathlib import Path

from dflow_lightning.errors import InputError

PREFIX = "sqlite:///"


def sqlite_uri(path: Path) -> str:
    """The address of an SQLite file that MLflow opens at exactly this path.

    Raises:
        InputError: the installed SQLAlchemy has no way to write such a path.
    """
    plain = f"{PREFIX}{path.resolve()}"
    if not {"%", "?"} & set(plain):  # the usual path needs no parser
        return plain
    quoted = plain.replace("%", "%25").replace("?", "%3F")
    for uri in (plain, quoted):
        if sqlite_file(uri) == path.resolve():
            return uri
    raise InputError(
        f"run_dir: SQLAlchemy before 2.1 cannot open a file in {path.resolve().parent}; choose a "
        "folder without % and ? in its path, or upgrade sqlalchemy"
    )


def sqlite_file(uri: str) -> Path | None:
    """The file that SQLAlchemy would open; None for the address of a server or another database."""
    if not uri.startswith(PREFIX):
        return None
    if not {"%", "?"} & set(uri):
        return Path(uri.removeprefix(PREFIX)).absolute()
    from sqlalchemy.engine import make_url

    return Path(make_url(uri).database or "").absolute()


def remove_stray_folder(uri: str) -> None:
    """Remove the empty folder that MLflow makes beside one with `%` or `?` in its name.

    It makes the parent of the file as the quoted address spells it, and then does not use it.
    """
    file, spelled = sqlite_file(uri), Path(uri.removeprefix(PREFIX)).absolute()
    if file is not None and file != spelled:
        with suppress(OSError):  # not there, or not empty: somebody's own
            os.removedirs(spelled.parent)
