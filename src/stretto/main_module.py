"""Run a user's script or module as this process's main module.

The module stays in ``sys.modules`` after the last line has run, as it does in plain
Python: functions registered with atexit, threads that still run, and pickle look up the
script's classes there. `runpy.run_path` would put the former main module back.
"""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError

if TYPE_CHECKING:
    from types import CodeType, TracebackType

_PACKAGE = Path(__file__).parent


def new_main_module() -> dict[str, Any]:
    """Replace the main module with an empty one, and return its names."""
    main = ModuleType("__main__")
    names = vars(main)
    names["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    sys.modules["__main__"] = main
    return names


def new_script_module(path: str) -> dict[str, Any]:
    """Replace the main module with an empty one for a script, and return its names.

    Its attributes are those of ``python PATH``: ``__file__`` is absolute, so that a
    script finds its files after it has changed the working directory.
    """
    names = new_main_module()
    file = main_file(path)
    compiled = file.endswith(".pyc")
    loader = SourcelessFileLoader if compiled else SourceFileLoader
    names.update(__file__=file, __cached__=None, __loader__=loader("__main__", file))
    return names


def require_script(path: Path) -> None:
    """Require that a script is a file.

    Raises:
        SpecError: it is missing, or a folder.
    """
    if path.is_dir():
        raise SpecError(f"{path}: is a folder, not a script")
    if not path.is_file():
        raise SpecError(f"{path}: no such script")


def run_file(path: str) -> None:
    """Run a script, a compiled one or a zip archive, as ``python PATH`` does.

    The caller sets ``sys.argv`` and ``sys.path``.
    """
    if pkgutil.get_importer(path) is not None:  # an archive with a __main__.py
        new_main_module()
        _run_as_main("__main__", alter_argv=False)
        return
    names = new_script_module(path)
    exec(_code_of(names["__file__"]), names)


def run_named(module: str) -> None:
    """Run a module or package, as ``python -m MODULE`` does.

    The caller sets ``sys.path`` and ``sys.argv``, whose first element is replaced by
    the module's file.
    """
    new_main_module()
    _run_as_main(module, alter_argv=True)


def _run_as_main(module: str, *, alter_argv: bool) -> None:
    """Call what the interpreter itself calls for ``-m`` and for archives."""
    python: Any = runpy
    python._run_module_as_main(module, alter_argv)  # noqa: SLF001


def show_error(error: BaseException) -> None:
    """Print an error that a program did not catch as plain Python does."""
    error.__traceback__ = _of_program(error)
    sys.excepthook(type(error), error, error.__traceback__)


def _of_program(error: BaseException) -> TracebackType | None:
    """Return the error's traceback without the frames that started the program."""
    trace = error.__traceback__
    while trace is not None and _starts_programs(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):  # in the program's text
        return error.__traceback__
    return trace


def _starts_programs(file: str) -> bool:
    return file.startswith("<frozen importlib") or Path(file).is_relative_to(_PACKAGE)


def main_file(path: str) -> str:
    """Return a script's ``__file__``: absolute, with each ``.`` and ``..`` kept."""
    return os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - see above


def _code_of(file: str) -> CodeType:
    """Return a script's code, without the flags of this file and without a cache."""
    with io.open_code(file) as opened:
        code: CodeType | None = pkgutil.read_code(opened)
    if code is not None:
        return code
    with io.open_code(file) as opened:
        return compile(opened.read(), file, "exec", dont_inherit=True)
