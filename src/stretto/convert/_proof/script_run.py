"""One run of a script on values: its variables, and what its parts call."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.batch_values import (
    Constant,
    Draw,
    Item,
    Iter,
    LibraryName,
    Linear,
    ObjectRef,
    Rows,
    Seq,
    Unproved,
    Value,
    Why,
    first_bad,
    first_rows,
    has_count,
    is_list_of_samples,
    joined,
    with_elements,
)
from stretto.convert._proof.given_arguments import CallArguments
from stretto.convert._proof.known_names import BUILTINS, TRUSTED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.convert._edit import Work


State = dict[int, dict[str, Value]]
"""Variables of each frame, and attributes of each object."""

MODULE = 1
"""The key of the module's frame."""


class TooLong(Exception):
    """The script needs more steps than are spent on it."""


@dataclass(slots=True, eq=False)
class Frame:
    """One call of a function, or the module."""

    key: int
    scope: cst.FunctionDef | cst.Lambda | None
    owner: cst.ClassDef | None = None
    parent: Frame | None = None
    receiver: Value | None = None
    returns: list[Value] = field(default_factory=list)
    yields: list[Value] = field(default_factory=list)
    decided: list[Why] = field(default_factory=list)
    """Why tests around the present statement may differ by rank."""
    returned: Why | None = None
    """Why it may return early on some ranks."""
    foreign: dict[str, int] = field(default_factory=dict)
    """Names of another frame that it sets."""


@dataclass(slots=True, eq=False)
class LoopRun:
    """One run of a loop."""

    samples: bool
    """Whether it is over samples."""
    decisions: int = 0
    """How many decisions that may differ by rank are around it."""
    left: Why | None = None
    """Why ranks may leave it in different turns."""
    skipped: Why | None = None
    """Why ranks may skip the rest of different turns."""
    breaks: list[State] = field(default_factory=list)
    continues: list[State] = field(default_factory=list)
    added: set[tuple[int, str]] = field(default_factory=set)
    """Variables to which something is added."""
    updated: set[tuple[int, str]] = field(default_factory=set)
    """Variables that are computed from what they were."""


class Run(ABC):
    """One run of a script: its variables, and what its parts call of each other.

    Attributes:
        work: The script and its edits.
        tree: The script.
        job: What takes part in its training.
        state: The present variables.
        frames: Calls and the module, by key.
        loops: The loops around the present statement, in its function.
        losses: The values on which each call of ``backward`` is made, by its ``id``.
        repeated: Calls that draw the same numbers on each rank for its samples.
        unsure: Calls of layers that may take a batch for one sequence.
        batched: Those of them that are shown to take a batch.
        tested: Those of them of whose results the script asks how many dimensions they
            have, so that it may be written for both.
        summed: Numbers of samples that are summed over ranks where they are taken.
        numbers: The values of which calls take numbers, by the ``id`` of the call.
        rowwise: Whether an expression has a row for each sample, by its ``id``.
        backwards: The calls of ``backward``, by their ``id``.
        training: The training loops, by their ``id``.
        reducing: The blocks in which numbers are reduced where they are computed, by
            their ``id``.
        trusted: Whether the script imports a package whose models return mean losses.
        in_step: How many training loops are around the present statement.
        active: The functions that are being called.
        written: Variables set since a decision that may differ by rank, for each.
        generators: Whether a function yields, by its ``id``.
        sizes: The sizes that code asks for, by its ``id``, with their dimensions.
        nesting: Whether a function contains others, by its ``id``.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.tree, self.job = work, work.tree, work.job
        self.state: State = {}
        self.frames: dict[int, Frame] = {}
        self.loops: list[LoopRun] = []
        self.losses: dict[int, Value] = {}
        self.repeated: set[cst.Call] = set()
        self.unsure: set[cst.Call] = set()
        self.batched: set[cst.Call] = set()
        self.tested: set[cst.Call] = set()
        self.summed: set[cst.CSTNode] = set()
        self.numbers: dict[int, list[Value]] = {}
        self.rowwise: dict[int, bool] = {}
        self.in_step = 0
        self.active: list[cst.CSTNode] = []
        self.written: list[set[tuple[int, str]]] = []
        self.generators: dict[int, bool] = {}
        self.sizes: dict[int, list[tuple[cst.BaseExpression, int]]] = {}
        self.nesting: dict[int, bool] = {}
        self.backwards = {id(c) for c in work.job.backwards}
        self.training = {id(t.node) for t in work.job.training}
        self.reducing = self.training | {
            id(scope)
            for call in work.job.backwards
            if (scope := work.tree.function(call)) is not None
        }
        self._views: dict[int, tuple[Value, Value]] = {}
        self._keys: dict[tuple[object, ...], int] = {}
        names = {full.partition(".")[0] for full in work.tree.imported.values()}
        self.trusted = not names.isdisjoint(TRUSTED)

    @abstractmethod
    def block(self, body: cst.CSTNode, frame: Frame) -> bool:
        """Run a block; return whether what follows it is reached."""

    @abstractmethod
    def value(self, node: cst.CSTNode | None, frame: Frame) -> Value:
        """Return the value of an expression."""

    @abstractmethod
    def call(
        self,
        func: Value,
        args: tuple[Value, ...],
        options: Mapping[str, Value],
        node: cst.CSTNode,
        frame: Frame,
    ) -> Value:
        """Return the value of a call."""

    def key(self, *what: object) -> int:
        """Return the number of a frame or an object."""
        return self._keys.setdefault(what, len(self._keys) + 1)

    def get(self, key: int, name: str) -> Value | None:
        """Return a variable of a frame, or an attribute of an object."""
        return self.state.get(key, {}).get(name)

    def set(self, key: int, name: str, value: Value) -> None:
        """Set a variable of a frame, or an attribute of an object."""
        self.state[key] = {**self.state.get(key, {}), name: value}
        for names in self.written:
            names.add((key, name))

    def read(self, name: str, frame: Frame) -> Value:
        """Return what a name refers to."""
        here: Frame | None = frame
        while here is not None:
            value = self.get(here.key, name)
            if value is not None:
                return value
            here = here.parent
        if name in self.tree.imported:
            return LibraryName(self.tree.imported[name])
        if name in ("True", "False", "None"):
            return Constant(ast.literal_eval(name))
        return LibraryName(name) if name in BUILTINS else Constant()

    def assign(self, name: str, value: Value, frame: Frame) -> None:
        """Make a name refer to a value."""
        self.set(frame.foreign.get(name, frame.key), name, value)

    def note_view(self, part: Value, of: Value) -> None:
        """Note that a tensor may share its memory with another."""
        tensors = isinstance(part, Constant | Rows | Unproved) and part is not of
        if tensors and (
            isinstance(of, Rows) or (isinstance(of, Constant) and of.counted)
        ):
            self._views[id(part)] = part, of

    def write(self, old: Value, new: Value, node: cst.CSTNode) -> None:
        """Set all variables with a tensor's memory after a change in place."""
        tensor = isinstance(old, Rows) and isinstance(new, Unproved)
        if tensor or (isinstance(old, Constant) and old.counted):
            for key, names in list(self.state.items()):
                for name, value in names.items():
                    if value is old:
                        self.set(key, name, new)
        part, of = self._views.get(id(old), (None, None))
        if part is not old or of is None:
            return
        chosen = (
            isinstance(of, Constant) and isinstance(old, Constant) and not old.counted
        )
        if chosen or isinstance(new, Unproved):
            self.write(of, Unproved(Why.PLACED, node), node)
        elif isinstance(of, Constant):
            after = Constant(grad=of.grad, shape=of.shape, counted=True)
            self.write(of, after if isinstance(new, Constant) else new, node)

    def items_of_ref(self, ref: ObjectRef) -> Value:
        """Return what a list or a dict contains."""
        if ref.kind == "list":
            return self.get(ref.key, "items") or Seq(())
        if ref.kind == "dict":
            values = [v for k, v in self.state.get(ref.key, {}).items()]
            return Iter(joined(values, self.tree.module))
        return Iter(Constant())

    def given(
        self, node: cst.Call, args: tuple[Value, ...], options: Mapping[str, Value]
    ) -> CallArguments:
        """Return the arguments of a call."""
        return CallArguments(
            node=node,
            args=args,
            options=options,
            in_step=bool(self.in_step),
            repeated=self.repeated,
            unsure=self.unsure,
            batched=self.batched,
            tested=self.tested,
        )

    def unread(self, node: cst.CSTNode, values: list[Value]) -> Value:
        """Return what a call returns that cannot be read."""
        values = [
            self.items_of_ref(v) if isinstance(v, ObjectRef) else v for v in values
        ]
        if (bad := first_bad(values)) is not None:
            return bad
        if any(map(has_count, values)):
            return Unproved(Why.COUNTED, node)
        rows = first_rows(values)
        if rows is not None:
            if rows.shifted is not None:
                return Unproved(Why.UNREAD, node)
            axis = 0 if rows.axis is None else rows.axis
            return Rows(
                axis=axis, opaque=node, trusted=self.trusted, copies=rows.copies
            )
        if any(is_list_of_samples(v) for v in values):
            return Rows(opaque=node, trusted=self.trusted)
        for value in with_elements(values):
            if isinstance(value, Linear):
                return Unproved(Why.UNREAD, node)
            if isinstance(value, Item):
                return value
        return Draw() if any(isinstance(v, Draw) for v in values) else Constant()
