"""Convert one script, depending on its kind."""

from __future__ import annotations

import re

from stretto.convert import _moved, _reading, _single, _support
from stretto.convert._result import Choices, Conversion, Kind, Note, Target
from stretto.errors import SpecError, StrettoError

_MARKED = re.compile(rf"^{re.escape(_support.MARK)} --to (\w+)$", re.MULTILINE)


def convert_source(source: str, *, name: str, choices: Choices) -> Conversion:
    """Convert a script's text; a script that was converted before does not change.

    Raises:
        SpecError: It is not Python 3, contains no training for one device that is
            understood, or was converted for another target.
    """
    after, notes = converted(source, name, choices)
    return Conversion(name=name, before=source, after=after, notes=tuple(notes))


def converted(source: str, name: str, choices: Choices) -> tuple[str, list[Note]]:
    """Return a script's new text, and the list of changes.

    Raises:
        SpecError: As `convert_source`.
        StrettoError: The new text is not Python, which is an error of this package.
    """
    after, notes = _converted(source, name, choices)
    try:
        _reading.compiles(after, name)
    except (SyntaxError, ValueError) as exc:
        raise StrettoError(
            f"{name}: internal error: the converted script is not Python ({exc}): "
            "nothing is written. Report it with the script"
        ) from exc
    return after, notes


def _converted(source: str, name: str, choices: Choices) -> tuple[str, list[Note]]:
    tree = _reading.parsed(source, name)
    marked = _MARKED.search(source)
    if marked is not None:
        if marked[1] != choices.target.value and choices.target is not Target.STRETTO:
            raise SpecError(
                f"{name}: was converted with --to {marked[1]}: convert the original "
                f"script with --to {choices.target.value}"
            )
        note = Note(line=0, kind=Kind.KNOW, text="converted already: nothing to do")
        return source, [note]
    moved = _moved.moved(tree, choices.target, name)
    if moved is not None:
        return moved
    _reading.check_framework(tree, name)
    after, notes = _single.distributed(tree, choices, name)
    return after, sorted(notes)
