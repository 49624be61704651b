"""Let no rank use a folder before it exists.

A rank that writes its own log in a folder, which the conversion cannot see, would fail
if it came before rank 0 made it. So all ranks make folders where that is no error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._models import reaching_training
from stretto.convert._setup import is_joined
from stretto.convert._tree import argument, arguments_of, dotted, found, is_main_guard

if TYPE_CHECKING:
    from stretto.convert._edit import Work

_CHECKS = ("os.path.exists", "os.path.isdir")
_CHECKING = ("exists", "is_dir")
_PATHS = ("os.path.", "os.getcwd", "os.fspath", "pathlib.Path", "str")
"""Functions that give the same path on all ranks."""

_PATH_METHODS = ("format", "joinpath", "resolve", "absolute", "expanduser", "strip")

_ERRORS = ("OSError", "FileExistsError", "Exception", "os.error", "IOError")


@final
class MadeFolders:
    """The calls of a script that make folders."""

    def __init__(self, work: Work) -> None:
        self._work, self._tree = work, work.tree
        self._removes = any(
            self._tree.called(call) in ("shutil.rmtree", "os.rmdir")
            for call in self._tree.calls
        )

    def made_by_all(self, call: cst.Call) -> bool:
        """Let all ranks make a folder, if it is one and may exist already."""
        path = self._path(call)
        if path is None or self._removes or self._tree.loops(call):
            return False
        if not self._is_equal(path):
            return False
        _, named = arguments_of(call)
        if "exist_ok" in named:
            return self._tree.text(named["exist_ok"].value) == "True"
        if not (self._is_checked(call, path) or self._may_fail(call)):
            return False
        full = self._tree.called(call)
        if full == "os.mkdir":
            if dotted(call.func) != "os.mkdir":
                return False
            self._work.replace(call.func, "os.makedirs")
        self._work.add_argument(call, "exist_ok", "True")
        self._work.done(
            call,
            "every rank makes this folder, unless it exists, so that none uses it "
            "before",
        )
        return True

    def wait_after(self, call: cst.Call) -> None:
        """Let all ranks wait for a folder of rank 0, where all run this line."""
        if self._path(call) is None or self._tree.loops(call):
            return
        scope = self._tree.function(call)
        for above in self._tree.ancestors(call):
            block = isinstance(above, cst.BaseCompoundStatement)
            if above is scope or isinstance(above, cst.ClassDef):
                break
            if block and not (isinstance(above, cst.With) or is_main_guard(above)):
                return
        if scope is not None and scope not in reaching_training(self._work):
            return
        if is_joined(self._work, call):
            self._work.after(self._tree.statement(call), self._work.barrier)

    def _path(self, call: cst.Call) -> cst.BaseExpression | None:
        """Return the path of the folder that a call makes."""
        if self._tree.called(call) in ("os.makedirs", "os.mkdir"):
            return argument(call, 0, "name") or argument(call, 0, "path")
        return self._tree.method_called(call, "mkdir")

    def _is_equal(self, path: cst.BaseExpression) -> bool:
        return all(
            self._tree.called(call).startswith(_PATHS)
            or self._tree.method_called(call, *_PATH_METHODS) is not None
            for call in found(path, cst.Call)
        )

    def _is_checked(self, call: cst.Call, path: cst.BaseExpression) -> bool:
        """Return whether a branch makes a folder because it does not exist."""
        text = self._tree.text(path)
        for above in self._tree.ancestors(call):
            if isinstance(above, cst.FunctionDef):
                return False
            if isinstance(above, cst.If):
                for check in found(above.test, cst.Call):
                    given = self._tree.method_called(check, *_CHECKING)
                    if self._tree.called(check) in _CHECKS and check.args:
                        given = check.args[0].value
                    if given is not None and self._tree.text(given) == text:
                        return True
        return False

    def _may_fail(self, call: cst.Call) -> bool:
        """Return whether the script passes over the error that a folder exists."""
        block = next(
            (a for a in self._tree.ancestors(call) if isinstance(a, cst.Try)), None
        )
        if block is None or not self._tree.within(call, block.body):
            return False
        return all(
            (h.type is None or self._tree.full(h.type) in _ERRORS)
            and self._tree.text(h.body) == "pass"
            for h in block.handlers
        )
