"""Find the lines of the user's code that operations and errors come from."""

from __future__ import annotations

import dis
import inspect
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent.parent)
_PACKAGE = f"{Path(_OWN).parent}{os.sep}"
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = ("site-packages", "dist-packages")


def source_line_in(error: BaseException, otherwise: str) -> str:
    """Return the last line of an error's trace that is the user's."""
    found = otherwise
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_user(file):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def is_raised_by_user(error: BaseException) -> bool:
    """Return whether a ``raise`` or ``assert`` of the user's code made an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not is_user(trace.tb_frame.f_code.co_filename):
        return False
    steps = dis.get_instructions(trace.tb_frame.f_code)
    return any(
        step.offset == trace.tb_lasti and step.opname == "RAISE_VARARGS"
        for step in steps
    )


def is_user(file: str) -> bool:
    """Return whether a file is not PyTorch's, stretto's or the standard library's."""
    if file.startswith((_TORCH, _OWN, "<")):
        return False
    # Packages may be installed within the standard library's folder.
    return not file.startswith(_STANDARD) or any(part in file for part in _INSTALLED)


def line_setting(module: nn.Module, name: str) -> str:
    """Return the last line of a class that assigns or extends an attribute, if any."""
    found = ""
    for kind in reversed(type(module).__mro__):
        if kind.__module__.startswith(("torch", "builtins")):
            continue
        try:
            lines, first = inspect.getsourcelines(kind)
            file = inspect.getsourcefile(kind)
        except (OSError, TypeError):  # made at run time
            continue
        sets = re.compile(rf"\.{re.escape(name)}\b(?!\s*==)(.*=|\.\w+\()")
        for number, line in enumerate(lines, first):
            if sets.search(line):
                found = f"{file}:{number}: "
    return found


def source_line() -> str:
    """Return the line of the user's code that called the caller."""
    frame: Any = sys._getframe(2)  # noqa: SLF001
    while frame is not None:
        if is_user(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an operation of torch"


def line_of_program() -> str:
    """Return the line of the program that runs now, outside of all of stretto."""
    frame: Any = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user(file) and not file.startswith(_PACKAGE):
            return f"{file}:{frame.f_lineno}: "
        frame = frame.f_back
    return ""


def line_where(
    call: Callable[[], object], is_changed: Callable[[], bool], otherwise: str
) -> str:
    """Return the line of the user's code that changes something in a call.

    Args:
        call: is called once more, with each line watched, which is slow.
        is_changed: whether the change has been made.
        otherwise: is returned if no line is found.
    """
    found: list[str] = []
    last = [otherwise]

    def watch(frame: Any, _event: str, _arg: Any) -> Any:
        if not found and is_changed():
            found.append(last[0])
        file = frame.f_code.co_filename
        if not is_user(file):
            return None
        last[0] = f"{file}:{frame.f_lineno}"
        return watch

    was = sys.gettrace()
    sys.settrace(watch)
    try:
        call()
    finally:
        sys.settrace(was)
    return found[0] if found else last[0]


def line_of_forward(module: nn.Module) -> str:
    """Return where a module's forward is written, if it is the user's code."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    if code is None or not is_user(code.co_filename):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}: "
