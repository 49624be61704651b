"""Options shared by the commands of ``stretto cluster``."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stretto.cluster.folders import FOLDER_VARIABLE, Folders, default_root

if TYPE_CHECKING:
    from collections.abc import Callable

_F = TypeVar("_F", bound="Callable[..., Any]")


def in_folder(command: _F) -> _F:
    """Add ``--folder``; the command gets ``folders``."""

    @click.option(
        "--folder",
        metavar="FOLDER",
        help="Where the cluster keeps its files.  [default: "
        f"${FOLDER_VARIABLE}, or ~/.local/state/stretto/cluster]",
    )
    @functools.wraps(command)
    def with_folders(*args: Any, folder: str | None, **options: Any) -> Any:
        root = default_root() if folder is None else Path(folder).absolute()
        folders = Folders(root)
        folders.check_access()
        return command(*args, folders=folders, **options)

    return with_folders  # type: ignore[return-value]


def as_json(command: _F) -> _F:
    """Add ``--json``; the command gets ``is_json``."""
    return click.option("--json", "is_json", is_flag=True, help="Print JSON.")(command)


def put(value: dict[str, Any]) -> None:
    """Print a value as JSON."""
    click.echo(json.dumps(value, indent=1))
