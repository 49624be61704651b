"""Check that a file can be written before the work that fills it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import click

from stretto.errors import SpecError

_Path = TypeVar("_Path", str, Path)


def writable(
    _ctx: click.Context, param: click.Parameter, value: _Path | None
) -> _Path | None:
    """Return an option's path; a callback of click.

    Raises:
        SpecError: no file can be written there.
    """
    why = None if value is None else why_not_writable(Path(value))
    if why is not None:
        raise SpecError(f"{param.opts[-1]} {value}: cannot be written: {why}")
    return value


def why_not_writable(path: Path) -> str | None:
    """Return why rank 0 can't write a file, or None if it seems possible.

    Ranks other than 0 write nothing, and their hosts may lack the folder.
    """
    if os.environ.get("RANK", "0") != "0":
        return None
    folder = path.parent
    if path.is_dir():
        return "it is a folder: name a file in it"
    if not folder.is_dir():
        return f"the folder {folder} does not exist: create it first"
    if not os.access(path if path.exists() else folder, os.W_OK):
        return "permission denied"
    return None


plan_output = click.option(
    "-o",
    "--output",
    metavar="PLAN",
    callback=writable,
    help="Write the plan to this file.",
)
"""The option ``-o PLAN`` of commands that make or show a plan."""
