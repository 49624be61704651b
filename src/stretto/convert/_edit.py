"""Edits collected by node and applied in one pass, and the state that they share."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, final

import libcst as cst

from stretto.convert import _support
from stretto.convert._calls import Calls
from stretto.convert._graph_names import graph_names
from stretto.convert._parentheses import as_one, enclosed
from stretto.convert._result import Choices, Kind, Note, Target
from stretto.convert._split import Split, joined, suite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.convert._job import FoundTraining
    from stretto.convert._tree import ScriptTree

_MARK = "# %%stretto "

CELL = f"{_MARK}cell "
"""Marks where a notebook's cell begins, in a comment of the joined script."""

Line = cst.SimpleStatementLine | cst.BaseCompoundStatement

_THEIRS = "\x00"


def theirs(text: str) -> str:
    """Mark the script's own text in generated text: its names are not generated."""
    return f"{_THEIRS}{text}{_THEIRS}"


class AbstractProofs(Protocol):
    """Proofs about the losses of a script."""

    def degree(self, call: cst.Call) -> int | None:
        """Return 0 for a mean over samples, 1 for a sum, ``None`` for neither."""

    def is_summed(self, node: cst.CSTNode) -> bool:
        """Return whether a loss is proved with a number of samples over all ranks."""

    def number_degree(self, node: cst.CSTNode) -> int | None:
        """Return 0 for a number of a mean over samples, 1 for a sum, else ``None``."""

    def is_mixed(self, call: cst.Call) -> bool:
        """Return whether a loss adds a sum over samples to something else."""

    def is_rowwise(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is shown to treat each sample by itself."""


@final
class Work:
    """A conversion in progress: what was found, what to change, what to report."""

    proofs: AbstractProofs
    """Set once the script's training is known."""

    def __init__(
        self, job: FoundTraining, choices: Choices, splits: Sequence[Split] = ()
    ) -> None:
        self.job = job
        self._splits = splits
        self.tree = job.tree
        self.flow = job.flow
        self.calls = Calls(job.tree, job.flow)
        self.choices = choices
        self.horovod = choices.target is Target.HOROVOD
        self.notes: list[Note] = []
        self.used: set[str] = set()
        self.divided: set[cst.CSTNode] = set()
        """Numbers that became this rank's part of the batch size."""
        self.whole: set[cst.CSTNode] = set()
        """Nodes that give each rank the samples, or the batch size, of all ranks."""
        self.shared: set[cst.CSTNode] = set()
        """Loops over a divided loader that only add up numbers of all its samples."""
        self.passes: dict[cst.CSTNode, str] = {}
        """Loops of which some passes do not train, and the names of their conditions.
        """
        self.written: set[cst.CSTNode] = set()
        """Calls that open a file for writing on rank 0 and nothing on the others."""
        self.guarded: list[cst.CSTNode] = []
        """Statements that only rank 0 executes: they must not contain a collective."""
        self.hoisted: list[cst.BaseExpression] = []
        """Data sets made within a loader's call, which get a line of their own."""
        self.measured: list[cst.Call] = []
        """Calls by which functions of other files evaluate a model on all ranks."""
        self._changes: dict[cst.CSTNode, list[Callable[[Any], Any]]] = {}
        self._before: dict[cst.CSTNode, list[cst.CSTNode]] = {}
        self._after: dict[cst.CSTNode, list[cst.CSTNode]] = {}
        ours = {*_support.NAMES, *_support.order(), "dist", "hvd"}
        # A variable of the script may have the name of a generated function.
        self._renamed = {name: f"{name}_" for name in ours & self.tree.names}
        if self.tree.imported.get("dist") == "torch.distributed":
            self._renamed.pop("dist", None)

    @cached_property
    def graph_names(self) -> frozenset[str]:
        """The variables through which gradients flow to a ``backward``."""
        return graph_names(self.job)

    # What to report

    def done(self, node: cst.CSTNode | None, text: str) -> None:
        """List something that was done."""
        self._note(node, text, Kind.DONE)

    def undecided(self, node: cst.CSTNode | None, text: str) -> None:
        """List something that the user has to check."""
        self._note(node, text, Kind.OPEN)

    def know(self, node: cst.CSTNode | None, text: str) -> None:
        """List something that is good to know."""
        self._note(node, text, Kind.KNOW)

    def _note(self, node: cst.CSTNode | None, text: str, kind: Kind) -> None:
        line = 0 if node is None else self.tree.shown_line(node)
        note = Note(line=line, text=text, kind=kind)
        if note not in self.notes:
            self.notes.append(note)

    # What to change

    def named(self, text: str) -> str:
        """Return generated text, with generated names as this script calls them."""
        parts = text.split(_THEIRS)
        parts[::2] = [self._named(part) for part in parts[::2]]
        return "".join(parts)

    def _named(self, text: str) -> str:
        self.used |= set(re.findall(r"[A-Za-z_]\w*", text)) & {
            *_support.order(),
            *_support.NAMES,
            "dist",
            "hvd",
            "DistributedDataParallel",
            "DistributedSampler",
            "contextlib",
            "atexit",
        }
        for name, other in self._renamed.items():
            text = re.sub(rf"(?<![\w.]){name}(?!\w)", other, text)
        return text

    def expression(self, text: str) -> cst.BaseExpression:
        """Return a generated expression."""
        config = self.tree.module.config_for_parsing
        return cst.parse_expression(self.named(text), config=config)

    def statement(self, text: str) -> cst.CSTNode:
        """Return a generated statement."""
        config = self.tree.module.config_for_parsing
        return cst.parse_statement(self.named(text), config=config)

    def change(self, node: cst.CSTNode, how: Callable[[Any], Any]) -> None:
        """Replace a node by the result of ``how``, after the changes inside it."""
        self._changes.setdefault(node, []).append(how)

    def replace(self, node: cst.CSTNode, text: str) -> None:
        """Replace a node by a generated expression."""
        new = self.expression(text)
        self.change(node, lambda _: new)

    def remove(self, statement: cst.CSTNode, *, alone: bool) -> None:
        """Remove a statement; one that is alone in its block leaves ``pass``."""
        instead = self.statement("pass")
        self.change(statement, lambda _: instead if alone else cst.RemoveFromParent())

    def call_around(self, node: cst.BaseExpression, function: str) -> None:
        """Put a call of a generated function around an expression.

        A label, such as the name of a keyword argument, stays as it is.
        """
        if self.tree.is_label(node):
            return
        func = self.expression(function)
        self.change(
            node, lambda new: cst.Call(func=func, args=[cst.Arg(value=as_one(new))])
        )

    def add_argument(self, call: cst.Call, name: str, value: str) -> None:
        """Give a call one more argument, by name."""
        argument = cst.Arg(
            keyword=cst.Name(name),
            value=self.expression(value),
            equal=cst.AssignEqual(
                whitespace_before=cst.SimpleWhitespace(""),
                whitespace_after=cst.SimpleWhitespace(""),
            ),
        )
        self.change(call, lambda new: appended(new, argument))

    def before(self, node: cst.CSTNode, *texts: str) -> None:
        """Insert statements before a statement."""
        self._before.setdefault(node, []).extend(self.statement(t) for t in texts)

    @property
    def barrier(self) -> str:
        """A statement in which every rank waits for the others."""
        return "hvd.barrier()" if self.horovod else "dist.barrier()"

    def nodes_before(self, node: cst.CSTNode, nodes: Sequence[cst.CSTNode]) -> None:
        """Insert parsed statements before a statement."""
        self._before.setdefault(node, []).extend(nodes)

    def after(self, node: cst.CSTNode, *texts: str) -> None:
        """Insert statements after a statement."""
        self._after.setdefault(node, []).extend(self.statement(t) for t in texts)

    def nodes_after(self, node: cst.CSTNode, nodes: Sequence[cst.CSTNode]) -> None:
        """Insert parsed statements after a statement."""
        self._after.setdefault(node, []).extend(nodes)

    def under(self, statement: cst.CSTNode, header: str) -> None:
        """Move a statement into its own block, such as ``if RANK == 0``."""
        shell = self._shell(header)  # before `_setup` inserts the functions it needs

        def indented(new: Any) -> Any:
            block = _filled(shell, new.with_changes(leading_lines=()))
            return block.with_changes(leading_lines=new.leading_lines)

        self.change(statement, indented)

    def block(self, header: str, statement: cst.CSTNode) -> Any:
        """Return a generated block that contains a statement alone."""
        return _filled(self._shell(header), statement)

    def _shell(self, header: str) -> Any:
        return self.statement(f"{header}:\n    pass")

    def on_rank_0(self, statement: cst.CSTNode) -> None:
        """Make only rank 0 execute a statement."""
        if any(self.tree.within(statement, other) for other in self.guarded):
            return
        self.guarded.append(statement)
        self.under(statement, "if RANK == 0")

    def is_guarded(self, node: cst.CSTNode) -> bool:
        """Return whether only rank 0 reaches a node."""
        return any(self.tree.within(node, other) for other in self.guarded)

    def result(self) -> cst.Module:
        """Return the script with all changes."""
        splits: dict[cst.CSTNode, Split] = {
            made.lines[0]: made for made in self._splits
        }
        apply = _Apply(self.tree, self._changes, self._before, self._after, splits)
        out = self.tree.module.visit(apply)
        if not isinstance(out, cst.Module):
            raise TypeError("a module became something else")
        return out


def _filled(shell: Any, statement: cst.CSTNode) -> Any:
    """Return a block with a statement instead of ``pass``."""
    return shell.with_changes(body=shell.body.with_changes(body=[statement]))


class _Apply(cst.CSTTransformer):
    def __init__(
        self,
        tree: ScriptTree,
        changes: dict[cst.CSTNode, list[Callable[[Any], Any]]],
        before: dict[cst.CSTNode, list[cst.CSTNode]],
        after: dict[cst.CSTNode, list[cst.CSTNode]],
        splits: dict[cst.CSTNode, Split],
    ) -> None:
        super().__init__()
        self._tree = tree
        self._changes, self._before, self._after = changes, before, after
        self._splits = splits
        """By the first of each split's lines."""
        self._of_a_split = {line for made in splits.values() for line in made.lines}
        self._unmoved: dict[int, cst.CSTNode] = {}

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        new = super().on_leave(original_node, updated_node)
        if isinstance(original_node, cst.Module | cst.IndentedBlock):
            new = self._joined(original_node, new)
        for how in self._changes.get(original_node, ()):
            new = how(new)
        if original_node in self._changes and isinstance(new, cst.BaseExpression):
            new = enclosed(new, original_node, self._tree.parent(original_node))
        first = list(self._before.get(original_node, ()))
        last = self._after.get(original_node, [])
        if not (first or last):
            if (
                original_node in self._of_a_split
                and isinstance(new, cst.SimpleStatementLine)
                and len(new.body) == 1
            ):
                self._unmoved[id(new)] = original_node
            return new
        middle: list[Any] = [new] if isinstance(new, cst.CSTNode) else []
        if first and middle:
            first[0], middle[0] = _with_cell_mark(first[0], middle[0])
        return cst.FlattenSentinel([*first, *middle, *last])

    def _joined(self, original: Any, new: Any) -> Any:
        splits = [self._splits[x] for x in original.body if x in self._splits]
        if not splits:
            return new
        body = joined(new.body, splits, self._unmoved)
        if isinstance(splits[0].origin, cst.SimpleStatementSuite):
            alone = len(body) == 1 and body[0] is not new.body[0]
            return suite(body[0], splits[0]) if alone else new
        return new.with_changes(body=body)


def _with_cell_mark(ours: Any, theirs: Any) -> tuple[Any, Any]:
    """Move marks of a notebook's cell above what is inserted at its beginning."""
    lines = list(theirs.leading_lines)
    marks = [
        i
        for i, line in enumerate(lines)
        if line.comment is not None and line.comment.value.startswith(_MARK)
    ]
    cut = marks[-1] + 1 if marks else 0
    while cut < len(lines) and lines[cut].comment is None:
        cut += 1  # blank lines stay above both
    return (
        ours.with_changes(leading_lines=[*lines[:cut], *ours.leading_lines]),
        theirs.with_changes(leading_lines=lines[cut:]),
    )


def appended(call: cst.Call, argument: cst.Arg) -> cst.Call:
    """Return a call with one more argument, laid out like those before."""
    if not call.args:
        return call.with_changes(args=[argument])
    *first, last = call.args
    comma = last.comma
    if isinstance(comma, cst.Comma) and isinstance(
        comma.whitespace_after, cst.ParenthesizedWhitespace
    ):
        # One argument per line, with a comma after the last.
        between = first[-1].comma if first else comma
        more = argument.with_changes(comma=comma)
        return call.with_changes(args=[*first, last.with_changes(comma=between), more])
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    if first and isinstance(first[-1].comma, cst.Comma):
        comma = first[-1].comma
    none = cst.SimpleWhitespace("")
    more = argument.with_changes(whitespace_after_arg=last.whitespace_after_arg)
    before = last.with_changes(comma=comma, whitespace_after_arg=none)
    return call.with_changes(args=[*first, before, more])
