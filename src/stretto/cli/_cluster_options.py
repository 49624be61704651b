"""Options shared by the commands of ``stretto cluster``."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stretto import variable_names
from stretto.cluster.folders import Folders, default_root

if TYPE_CHECKING:
    from collections.abc import Callable

_F = TypeVar("_F", bound="Callable[..., Any]")

_SURROGATE = re.compile("[\ud800-\udfff]")


def in_folder(command: _F) -> _F:
    """Add ``--folder``; the command gets ``folders``."""

    @click.option(
        "--folder",
        metavar="FOLDER",
        help="Where the cluster keeps its files.  [default: "
        f"${variable_names.CLUSTER_DIR}, or ~/.local/state/stretto/cluster]",
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
    click.echo(json_text(value, indent=1))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON that any program can read.

    Bytes of file names that are not UTF-8 are U+FFFD there, as in logs: most programs
    refuse a lone surrogate.
    """
    text = json.dumps(value, indent=indent)
    if "\\ud" in text:
        # Without escapes, a pair of surrogates is one character.
        raw = json.dumps(value, ensure_ascii=False)
        value = json.loads(_SURROGATE.sub("\ufffd", raw))
        text = json.dumps(value, indent=indent)
    return text
