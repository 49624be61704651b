"""Jupyter notebooks: their code cells form one script, with marks between cells.

The rest of the file stays unchanged, including outputs, which are those of the run
before the conversion.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from stretto.convert import _reading
from stretto.convert._edit import CELL
from stretto.convert._result import Choices, Conversion, Kind, Note
from stretto.convert._script import convert_source, converted
from stretto.errors import SpecError

_MAGIC = "# %%stretto magic "
_LINE_MAGIC = re.compile(r"^(\s*)([%!?].*|[\w.]+\?{1,2})$")
_COMMENT_QUOTES_OR_BRACKET = re.compile(r"#|\"\"\"|'''|[\"'()\[\]{}]")
_CELL_WITH_PYTHON = ("%%time", "%%timeit", "%%capture", "%%prun")


def convert_bytes(data: bytes, *, name: str, choices: Choices) -> Conversion:
    """Convert a file: a notebook if its name ends so, otherwise a script.

    Raises:
        SpecError: it is not UTF-8, not Python 3, or not understood.
    """
    text = _reading.decoded(data, name)
    if PurePath(name).suffix == ".ipynb":
        return convert_notebook(text, name=name, choices=choices)
    return convert_source(text, name=name, choices=choices)


def convert_notebook(text: str, *, name: str, choices: Choices) -> Conversion:
    """Convert a notebook.

    Raises:
        SpecError: it is not a notebook, or its code is not understood.
    """
    notebook = _loaded(text, name)
    script, starts = _joined(notebook)
    try:
        after, notes = converted(script, name, choices)
    except SpecError as exc:
        raise SpecError(_in_cells(str(exc), name, starts)) from exc
    notes = [_in_cell(note, starts) for note in notes]
    magics = script.count(_MAGIC)
    if magics:
        kept = f"{magics} lines of magics are kept unchanged"
        notes.append(Note(line=0, kind=Kind.KNOW, text=kept))
    if after == script:
        return Conversion(name=name, before=text, after=text, notes=tuple(notes))
    if any(cell.get("outputs") for cell in _code_cells(notebook)):
        old = "the outputs in the notebook are kept: they are from the run before"
        notes.append(Note(line=0, kind=Kind.KNOW, text=old))
    notes.append(
        Note(
            line=0,
            kind=Kind.KNOW,
            text="in Jupyter the notebook runs as one process; for several ranks: "
            f"stretto run --convert {name}",
        )
    )
    _put_back(notebook, after)
    indent = _indent(text)
    out = json.dumps(notebook, indent=indent, ensure_ascii=False)
    if text.endswith("\n"):
        out += "\n"
    return Conversion(name=name, before=text, after=out, notes=tuple(notes))


def script_of_notebook(text: str, *, name: str) -> str:
    """Return a notebook's code as one script; magics are comments in it.

    Raises:
        SpecError: it is not a notebook.
    """
    return _joined(_loaded(text, name))[0]


def _loaded(text: str, name: str) -> dict[str, Any]:
    try:
        notebook = json.loads(text)
    except json.JSONDecodeError as exc:
        raise SpecError(f"{name}:{exc.lineno}: not a notebook: {exc.msg}") from exc
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise SpecError(
            f"{name}: not a notebook of format 4: it has no list of cells. Save it "
            "with a current Jupyter"
        )
    return notebook


def _code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for c in notebook["cells"] if c.get("cell_type") == "code"]


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


@dataclass
class _Statement:
    """The open brackets and quotes of a statement after the lines read so far."""

    brackets: int = 0
    quotes: str = ""
    backslash: bool = False

    @property
    def goes_on(self) -> bool:
        return bool(self.brackets > 0 or self.quotes or self.backslash)

    def read(self, line: str) -> None:
        """Read one more line."""
        at = 0
        while True:
            if self.quotes:
                text = re.compile(rf"(?:\\.|(?!{self.quotes})[^\\])*").match(line, at)
                at = text.end() if text else at
                if not line.startswith(self.quotes, at):
                    self.backslash = line.endswith("\\")
                    if len(self.quotes) == 1 and not self.backslash:
                        self.quotes = ""
                    return
                at += len(self.quotes)
                self.quotes = ""
            found = _COMMENT_QUOTES_OR_BRACKET.search(line, at)
            if found is None or found[0] == "#":
                self.backslash = found is None and line.endswith("\\")
                return
            at = found.end()
            if found[0] in "([{":
                self.brackets += 1
            elif found[0] in ")]}":
                self.brackets -= 1
            else:
                self.quotes = found[0]


def _joined(notebook: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Return the script, and each cell's first line and number from 1."""
    lines: list[str] = []
    starts: list[tuple[int, int]] = []
    for number, cell in enumerate(notebook["cells"], 1):
        if cell.get("cell_type") != "code":
            continue
        lines.append(f"{CELL}{number}")
        starts.append((len(lines) + 1, number))
        source = _source(cell).split("\n")
        first = source[0].strip()
        foreign = first.startswith("%%") and not first.startswith(_CELL_WITH_PYTHON)
        statement, in_magic = _Statement(), False
        for line in source:
            # A line that continues a statement may begin with `%`, as an operator.
            match = None if statement.goes_on else _LINE_MAGIC.match(line)
            if foreign or in_magic:
                in_magic = line.endswith("\\")
                lines.append(f"{_MAGIC}{line}")
                continue
            in_magic = match is not None and line.endswith("\\")
            if match is None:
                statement.read(line)
                lines.append(line)
            elif match[1]:
                # In its own block it must remain a statement.
                lines.append(f"{match[1]}pass  {_MAGIC}{match[2]}")
            else:
                lines.append(f"{_MAGIC}{line}")
    return "\n".join(lines) + "\n", starts


def _put_back(notebook: dict[str, Any], script: str) -> None:
    parts = re.split(rf"^{re.escape(CELL)}(\d+)\n", script, flags=re.MULTILINE)
    for number, part in zip(parts[1::2], parts[2::2], strict=True):
        cell = notebook["cells"][int(number) - 1]
        lines = [
            re.sub(rf"^(\s*)(?:pass  )?{re.escape(_MAGIC)}(.*)$", r"\1\2", line)
            for line in part.removesuffix("\n").split("\n")
        ]
        text = "\n".join(lines)
        if text == _source(cell):
            continue
        as_list = isinstance(cell.get("source"), list)
        cell["source"] = text.splitlines(keepends=True) if as_list else text


def _in_cell(note: Note, starts: list[tuple[int, int]]) -> Note:
    if not note.line:
        return note
    begun = [s for s in starts if s[0] <= note.line]
    first, number = begun[-1] if begun else (1, 1)
    return replace(note, line=note.line - first + 1, cell=number)


def _in_cells(message: str, name: str, starts: list[tuple[int, int]]) -> str:
    """Return an error with the cell's line in place of the joined script's."""
    match = re.match(rf"{re.escape(name)}:(\d+): ", message)
    if match is None:
        return message
    note = _in_cell(Note(line=int(match[1]), kind=Kind.OPEN, text=""), starts)
    return f"{name}: cell {note.cell}, line {note.line}: {message[match.end() :]}"


def _indent(text: str) -> int:
    match = re.match(r"\{\n( +)", text)
    return len(match[1]) if match else 1
