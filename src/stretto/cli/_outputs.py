"""Check that a file can be written before the work that fills it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.errors import SpecError

if TYPE_CHECKING:
    import click


def writable(
    _ctx: click.Context, param: click.Parameter, value: str | None
) -> str | None:
    """Return an option's path; a callback of click.

    Raises:
        SpecError: no file can be written there.
    """
    if value is None:
        return None
    path = Path(value)
    folder = path.parent
    why = ""
    if path.is_dir():
        why = "it is a folder: name a file in it"
    elif not folder.is_dir():
        why = f"the folder {folder} does not exist: create it first"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "permission denied"
    if why:
        raise SpecError(f"{param.opts[-1]} {value}: cannot be written: {why}")
    return value
