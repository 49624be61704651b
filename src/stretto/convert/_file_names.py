"""Make the names of files and folders equal on all ranks.

A temporary folder, the time or a random name would differ on each rank, and only rank 0
writes: the other ranks would not find what they then read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._display import SAVES, SAVING_METHODS, is_writer
from stretto.convert._flow import parameters
from stretto.convert._setup import is_joined
from stretto.convert._tree import dotted, found, sets_names

if TYPE_CHECKING:
    from stretto.convert._edit import Work

_FOLDERS = ("tempfile.mkdtemp", "tempfile.mktemp")
_CONTEXT = "tempfile.TemporaryDirectory"
_FILES = ("tempfile.NamedTemporaryFile", "tempfile.mkstemp")
_DIFFERING = (
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.datetime.today",
    "datetime.date.today",
    "time.time",
    "time.time_ns",
    "time.strftime",
    "time.ctime",
    "time.asctime",
    "uuid.uuid1",
    "uuid.uuid4",
    "secrets.token_hex",
    "secrets.token_urlsafe",
    "os.getpid",
    "socket.gethostname",
)
_WRITING_DATA = tuple(m for m in SAVING_METHODS if m != "mkdir")
_PATHS = frozenset(
    [
        *SAVES,
        "os.path.join",
        "os.path.exists",
        "pathlib.Path",
        "open",
        "torch.load",
        "logging.FileHandler",
    ]
)
_DEPTH = 4


def convert(work: Work) -> None:
    """Use rank 0's value where a path is made from a value that differs by rank.

    Raises:
        SpecError: there is no place for it; the error has the line and the next step.
    """
    _EqualNames(work).convert()


@final
class _EqualNames:
    def __init__(self, work: Work) -> None:
        self._work, self._tree = work, work.tree

    def convert(self) -> None:
        for node in found(self._tree.module, cst.If):
            self._found_or_made(node)
        for call in self._tree.calls:
            full = self._tree.called(call)
            if full not in (*_FOLDERS, _CONTEXT, *_FILES, *_DIFFERING):
                continue
            if self._work.is_guarded(call) or self._on_rank_0(call):
                continue
            if full in _FILES:
                raise self._work.job.refuse(
                    call,
                    f"{full}() makes a different file on each rank, and only rank 0 "
                    "writes. Make a folder with tempfile.mkdtemp(), and name a file "
                    "in it",
                )
            if full == _CONTEXT:
                self._context(call)
            elif full in _FOLDERS or self._names_a_path(call, _DEPTH, set()):
                self._value(call, full)

    def _found_or_made(self, node: cst.If) -> None:
        """Let rank 0 say whether a file exists that a branch writes or loads.

        Otherwise rank 0 may have written it already when another rank looks.
        """
        checks = [c for c in found(node.test, cst.Call) if self._is_check(c)]
        scope = self._tree.function(node)
        if (
            not checks
            or not (self._touches_data(node) or self._loads(node))
            or self._work.is_guarded(node)
            or not is_joined(self._work, node)
            or any(
                self._work.job.batches.loop(x) is not None
                for x in self._tree.loops(node)
            )
            or (scope is not None and not self._is_of_all_ranks(scope))
        ):
            return
        if any(sets_names(check) for check in checks):
            self._work.undecided(
                node,
                "each rank looks for this file by itself, because `:=` sets a name in "
                "the call: set it in a line before",
            )
            return
        for check in checks:
            self._around(check, "of_rank0")
        if self._touches_data(node):
            self._work.after(node, self._work.barrier)
        self._work.done(
            node, "rank 0 looks for the file, so that all ranks take the same branch"
        )

    def _loads(self, node: cst.If) -> bool:
        """Return whether a branch loads a file that the script itself writes."""
        saves = any(self._tree.called(c) == "torch.save" for c in self._tree.calls)
        return saves and any(
            self._tree.called(c) == "torch.load" for c in found(node, cst.Call)
        )

    def _is_check(self, call: cst.Call) -> bool:
        if self._tree.called(call) in ("os.path.exists", "os.path.isfile"):
            return True
        return self._tree.method_called(call, "exists", "is_file") is not None

    def _touches_data(self, node: cst.If) -> bool:
        """Return whether a branch writes a file, other than to make a folder."""
        blocks = [node.body, *([node.orelse] if node.orelse is not None else [])]
        return any(
            (self._tree.called(call) in SAVES and "dir" not in self._tree.called(call))
            or self._tree.method_called(call, *_WRITING_DATA) is not None
            for block in blocks
            for call in found(block, cst.Call)
        )

    def _is_of_all_ranks(self, scope: cst.FunctionDef) -> bool:
        """Return whether all ranks call a function, in their main processes."""
        name = scope.name.value
        if name.startswith("__") and name != "__init__":
            return False
        calls = self._work.flow.calls_of(scope)
        return bool(calls) and not any(self._work.is_guarded(c) for c in calls)

    def _context(self, call: cst.Call) -> None:
        if not isinstance(self._tree.parent(call), cst.WithItem):
            raise self._work.job.refuse(
                call,
                "TemporaryDirectory() makes a different folder on each rank, and only "
                "rank 0 writes. Use `with tempfile.TemporaryDirectory() as folder:` "
                "or tempfile.mkdtemp(), which become one folder for all ranks",
            )
        self._check(call)
        self._around(call, "folder_of_rank0")
        self._work.done(
            call,
            "one temporary folder for all ranks, rank 0's: across hosts it must be on "
            "a disk that all ranks see (dir=)",
        )

    def _value(self, call: cst.Call, full: str) -> None:
        around = self._tree.function(call)
        in_data = around is not None and around.name.value in (
            "__getitem__",
            "__iter__",
            "__len__",
        )
        in_batches = any(
            self._work.job.batches.loop(x) is not None for x in self._tree.loops(call)
        )
        if in_data or in_batches:
            self._work.undecided(
                call,
                f"`{self._tree.text(call)[:50]}` differs on each rank, and a path is "
                "made from it: make it once, before the loops",
            )
            return
        self._check(call)
        self._around(call, "of_rank0")
        folder = full in _FOLDERS
        self._work.done(
            call,
            f"`{self._tree.text(call)[:50]}` is rank 0's on all ranks"
            + (
                ": across hosts its disk must be visible to all ranks" if folder else ""
            ),
        )

    def _around(self, call: cst.Call, function: str) -> None:
        func = self._work.expression(function)
        self._work.change(
            call,
            lambda new: cst.Call(
                func=func,
                args=[cst.Arg(cst.Lambda(params=cst.Parameters(), body=new))],
            ),
        )

    def _check(self, call: cst.Call) -> None:
        if sets_names(call):
            raise self._work.job.refuse(
                call,
                f"`{self._tree.text(call)[:50]}` differs on each rank, a path is made "
                "from it, and only rank 0 may evaluate it, but `:=` sets a name in it. "
                "Set the name in a line before",
            )
        if not is_joined(self._work, call):
            raise self._work.job.refuse(
                call,
                f"`{self._tree.text(call)[:50]}` differs on each rank, a path is made "
                "from it, and the ranks are joined only after this line. Move it into "
                "the function that trains, or below `if __name__ ...`",
            )

    def _on_rank_0(self, node: cst.CSTNode) -> bool:
        """Return whether a value is made inside a call that only rank 0 makes."""
        return any(
            isinstance(above, cst.Call) and is_writer(self._tree, above)
            for above in self._tree.ancestors(node)
        )

    # Where a value is used

    def _names_a_path(self, node: cst.CSTNode, depth: int, seen: set[str]) -> bool:
        """Return whether a path is made from a value, as far as the script shows."""
        below = node
        for above in self._tree.ancestors(node):
            if isinstance(above, cst.BinaryOperation) and not isinstance(
                above.operator, cst.Add | cst.Modulo | cst.Divide
            ):
                return False  # a duration
            if isinstance(above, cst.Comparison | cst.Lambda):
                return False
            if isinstance(above, cst.Call) and above.func is not below:
                if self._takes_a_path(above):
                    return True
                if self._is_passed_on(above, below, depth, seen):
                    return True
            if isinstance(above, cst.Assign):
                return any(
                    self._used_as_path(t.target, depth, seen) for t in above.targets
                )
            if isinstance(above, cst.BaseSmallStatement | cst.BaseCompoundStatement):
                return False
            below = above
        return False

    def _takes_a_path(self, call: cst.Call) -> bool:
        full = self._tree.called(call)
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        if full.rpartition(".")[2] == "add_argument" or method == "add_argument":
            return True
        return (
            full in _PATHS
            or full.rpartition(".")[2] in ("Path", "FileHandler")
            or method in (*SAVING_METHODS, "joinpath", "exists")
        )

    def _is_passed_on(
        self, call: cst.Call, given: cst.CSTNode, depth: int, seen: set[str]
    ) -> bool:
        if depth == 0:
            return False
        for function in self._work.flow.local(call):
            for name in parameters(function):
                for caller, value in self._work.flow.passed(function, name):
                    if caller is call and self._tree.within(value, given):
                        return self._used_as_path(
                            cst.Name(name), depth - 1, seen, function.body
                        )
        return False

    def _used_as_path(
        self,
        target: cst.BaseExpression,
        depth: int,
        seen: set[str],
        within: cst.CSTNode | None = None,
    ) -> bool:
        path = dotted(target)
        if path is None or depth == 0 or path in seen:
            return False
        seen = seen | {path}
        kinds = (cst.Name, cst.Attribute)
        return any(
            self._names_a_path(use, depth - 1, seen)
            for use in found(within or self._tree.module, kinds)
            if dotted(use) == path
            and not isinstance(self._tree.parent(use), cst.AssignTarget)
        )
