"""Run a converted script in memory, with the original's lines in tracebacks."""

from __future__ import annotations

import ast
import difflib
import linecache
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.convert._notebook import script_of_notebook
from stretto.convert._reading import decoded
from stretto.convert._result import Choices, Kind
from stretto.convert._script import convert_source
from stretto.errors import SpecError
from stretto.main_module import new_script_module

if TYPE_CHECKING:
    from types import CodeType

    from stretto.convert._result import Conversion


def conversion_to_run(path: Path, choices: Choices) -> Conversion:
    """Convert a script, or a notebook's code as one script.

    Raises:
        SpecError: the file cannot be read, or is not understood.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise SpecError(f"{path}: cannot be read: {exc.strerror}") from exc
    text = decoded(data, str(path))
    if path.suffix == ".ipynb":
        text = script_of_notebook(text, name=str(path))
    return convert_source(text, name=str(path), choices=choices)


def run_converted(path: Path, choices: Choices) -> None:
    """Run a script's distributed form as ``python PATH`` would run the script.

    Each line of an error's traceback is the original's. Inserted code has its own file
    name, whose lines tracebacks show too.

    Raises:
        SpecError: the script is not understood.
    """
    conversion = conversion_to_run(path, choices)
    names = new_script_module(str(path))
    if path.suffix == ".ipynb":
        # Its lines are those of the joined cells, which are in no file.
        _remember(str(path), conversion.before)
    for code in compiled(conversion, str(path)):
        exec(code, names)


def open_questions(conversion: Conversion) -> list[str]:
    """Return the notes of a conversion that a person should check."""
    return [str(n) for n in conversion.notes if n.kind is Kind.OPEN]


def compiled(conversion: Conversion, name: str) -> list[CodeType]:
    """Return the code of a converted script, in parts that are run one after another.

    Functions that only the conversion inserted are parts with their own file name.
    """
    ours = f"<put in by stretto convert: {Path(name).name}>"
    _remember(ours, conversion.after)
    lines = _original_lines(conversion.before, conversion.after)
    tree = ast.parse(conversion.after)
    future = 0
    parts: list[tuple[str, list[ast.stmt]]] = []
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            for alias in statement.names:
                feature = getattr(__import__("__future__"), alias.name)
                future |= feature.compiler_flag
        last = statement.end_lineno or statement.lineno
        new = all(lines[n] is None for n in range(statement.lineno, last + 1))
        file = ours if new else name
        if not new:
            _move(statement, lines)
        if parts and parts[-1][0] == file:
            parts[-1][1].append(statement)
        else:
            parts.append((file, [statement]))
    return [
        compile(
            ast.Module(body=body, type_ignores=[]),
            file,
            "exec",
            flags=future,
            dont_inherit=True,
        )
        for file, body in parts
    ]


def _remember(name: str, text: str) -> None:
    """Make tracebacks show the lines of a text that is not in a file."""
    lines = text.splitlines(keepends=True)
    linecache.cache[name] = (len(text), None, lines, name)


def _original_lines(before: str, after: str) -> dict[int, int | None]:
    """Return the earlier line for each later line; ``None`` for an inserted one."""
    old, new = before.splitlines(), after.splitlines()
    out: dict[int, int | None] = {}
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        for place, line in enumerate(range(j1, j2)):
            if kind == "insert":
                out[line + 1] = None
            else:
                out[line + 1] = min(i1 + place, i2 - 1) + 1
    return out


def _move(statement: ast.stmt, lines: dict[int, int | None]) -> None:
    """Set a statement's nodes to the original's lines.

    A line inserted in a block counts as the next original one. Columns are dropped
    where a line changed, so that no marker is misplaced.
    """
    first = statement.lineno
    for node in ast.walk(statement):
        if not isinstance(node, ast.stmt | ast.expr | ast.excepthandler | ast.arg):
            continue
        end = node.end_lineno or node.lineno
        node.lineno, node.end_lineno = (
            _near(node.lineno, first, lines),
            _near(end, first, lines),
        )
        node.end_lineno = max(node.lineno, node.end_lineno)
        node.col_offset = node.end_col_offset = 0


def _near(line: int, first: int, lines: dict[int, int | None]) -> int:
    following = (lines[n] for n in range(line, max(lines) + 1) if lines.get(n))
    before = (lines[n] for n in range(line, first - 1, -1) if lines.get(n))
    return next(following, None) or next(before, None) or 1
