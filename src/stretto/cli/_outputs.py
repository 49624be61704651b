"""Check that a file can be written before the work that fills it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, TypeVar

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


class OutputCommand(click.Command):
    """A command that does not write its output over a file that it reads."""

    written: frozenset[str] = frozenset({"output"})
    """Options that are written without `writable` as their callback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises:
            SpecError: an output is also an input, or another output.
        """
        seen: list[tuple[str, str | Path]] = []
        outputs = [p for p in self.params if self._is_output(p)]
        for param in (*(p for p in self.params if p not in outputs), *outputs):
            for value in _files_of(param, ctx):
                for name, other in seen if param in outputs else ():
                    if _is_same(Path(value), Path(other)):
                        raise SpecError(
                            f"{param.opts[-1]} {value}: is the same file as {name}, "
                            "which would be overwritten: name another file"
                        )
                seen.append((f"{param.human_readable_name} {value}", value))
        return super().invoke(ctx)

    def _is_output(self, param: click.Parameter) -> bool:
        return param.callback is writable or param.name in self.written


class OutputCommands(click.Group):
    """A group whose commands are each an `OutputCommand`."""

    command_class = OutputCommand


def _files_of(param: click.Parameter, ctx: click.Context) -> list[str | Path]:
    """Return the names of files that a parameter was given."""
    of_file = isinstance(param.type, click.Path) or "FILE" in (param.metavar or "")
    if not of_file and param.callback is not writable:
        return []
    given = ctx.params.get(param.name or "")
    values = given if isinstance(given, tuple) else (given,)
    return [value for value in values if isinstance(value, str | Path)]


def _is_same(path: Path, other: Path) -> bool:
    """Return whether two names are of one file, which may not exist yet."""
    if path.exists() and not path.is_file():
        return False  # such as /dev/null
    with contextlib.suppress(OSError):
        return path.samefile(other)
    return os.path.realpath(path) == os.path.realpath(other)


plan_output = click.option(
    "-o",
    "--output",
    metavar="PLAN",
    callback=writable,
    help="Write the plan to this file.",
)
"""The option ``-o PLAN`` of commands that make or show a plan."""
