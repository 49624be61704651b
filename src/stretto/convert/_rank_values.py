"""Follow values of each rank's own samples to where they are shown or collected.

A divided loader gives each rank other samples. What a step computes from them differs
by rank, unless it was reduced. This module follows such values through assignments,
containers, attributes and the script's functions, to where the script shows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._batch_loops import WRAPPERS
from stretto.convert._classify import AbstractShares
from stretto.convert._display import BARS, SAVES, SAVING_METHODS
from stretto.convert._divided import DividedIterables
from stretto.convert._flow import parameters
from stretto.convert._loop_sums import element_of
from stretto.convert._models import reaching_training
from stretto.convert._rank_value_notes import RankValueNotes
from stretto.convert._tree import (
    Scope,
    dotted,
    found,
    parts,
    stored_names,
    targets_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._edit import Work
    from stretto.convert._loaders import Loaders
    from stretto.convert._rank_value_notes import Reductions
    from stretto.convert._replica_notes import RankValues

_SHOWING = frozenset(
    [
        "debug",
        "info",
        "warning",
        "error",
        "critical",
        "log",
        "write",
        "writelines",
        "writerow",
        "writerows",
        "add_scalar",
        "add_scalars",
        "add_histogram",
        "add_image",
        "add_images",
        "set_postfix",
        "set_postfix_str",
        "set_description",
    ]
)
_COLLECTING = frozenset(
    [
        "append",
        "appendleft",
        "extend",
        "insert",
        "add",
        "update",
        "setdefault",
        "put",
        "push",
    ]
)
_TRAINING = frozenset(["backward", "zero_grad", "train", "eval", "unscale_"])
"""Methods that only train."""

_EQUAL_CALLS = frozenset(
    ["isinstance", "type", "hasattr", "callable", "id", "range", "getattr"]
)
_EQUAL_METHODS = frozenset(["dim", "ndimension", "is_floating_point", "get_device"])
_EQUAL_ATTRIBUTES = frozenset(
    [
        "dtype",
        "device",
        "ndim",
        "grad",
        "is_cuda",
        "requires_grad",
        "layout",
        "__class__",
        "__name__",
    ]
)
"""Calls and attributes whose value does not depend on the samples."""

_DRAWING = frozenset(
    [
        "torch.rand",
        "torch.randn",
        "torch.randint",
        "torch.randperm",
        "torch.bernoulli",
    ]
)

_OF_SHARE = ("batch_size", "sampler", "batch_sampler")
"""Attributes of a divided loader that are of this rank's share."""

_PASSES = 6


@dataclass(slots=True, eq=False)
class _Def:
    """An assignment to a name."""

    line: int
    block: cst.CSTNode | None
    """Where the assignment certainly happened before what follows."""
    differs: bool = False


@dataclass(slots=True, eq=False)
class _Frame:
    """A function with the parameters that get values of one rank's samples."""

    scope: Scope
    given: frozenset[str]
    defs: dict[str, dict[int, _Def]] = field(default_factory=dict)
    within: set[tuple[int, str]] = field(default_factory=set)
    """Variables of comprehensions that differ."""
    returns: set[int | None] = field(default_factory=set)
    """Places of the returned tuple that differ; ``None`` for the whole value."""


def point_out(work: Work, loaders: Loaders, numbers: Reductions) -> RankValues:
    """List what differs by rank where it is shown, written or collected."""
    values = _RankValues(work, loaders, numbers)
    values.point_out()
    return values


@final
class Shares(AbstractShares):
    """Values computed from a rank's own samples, before any is reduced, or after."""

    def __init__(
        self, work: Work, loaders: Loaders, numbers: Reductions | None = None
    ) -> None:
        self._work, self._loaders = work, loaders
        self._numbers = numbers or _Unreduced()
        self._values: _RankValues | None = None

    def is_share(self, node: cst.BaseExpression) -> bool:
        """Return whether a value may come from this rank's part of a batch."""
        if self._values is None:
            self._values = _RankValues(
                self._work, self._loaders, self._numbers, unknown=True
            )
            self._values.follow()
        return self._values.may_differ(node)

    def reduced_by(self, numbers: Reductions) -> Shares:
        """Return the values that still differ once some numbers are reduced."""
        return Shares(self._work, self._loaders, numbers)


@final
class _Unreduced:
    """No number is reduced over ranks."""

    def __init__(self) -> None:
        self.graph: frozenset[str] = frozenset()
        self.reduced_after: list[tuple[cst.CSTNode, list[str]]] = []

    def is_reduced(self, _: cst.CSTNode) -> bool:
        return False

    def is_within_reduced(self, _: cst.CSTNode) -> bool:
        return False


@final
class _RankValues:
    def __init__(
        self,
        work: Work,
        loaders: Loaders,
        numbers: Reductions,
        *,
        unknown: bool = False,
    ) -> None:
        """Collect what a script does in each function.

        With ``unknown``, what an unknown caller passes, and the sizes of a divided
        loader, also differ.
        """
        self._unknown = unknown
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._loaders, self._numbers = loaders, numbers
        self._frames: dict[tuple[int, frozenset[str]], _Frame] = {}
        self._attributes: set[tuple[int, str]] = set()
        self._names: set[str] = set()
        """Attributes that differ, of whatever object."""
        self._wild: set[tuple[int, str]] = set()
        """Variables that another function sets."""
        self._changed = False
        self._notes: RankValueNotes | None = None
        self._called: dict[int, list[cst.FunctionDef]] = {}
        self._divided: list[cst.For | cst.While] = []
        self._events: dict[int, list[cst.CSTNode]] = {}
        self._iterables = DividedIterables(work, loaders, self._events)
        self._training = reaching_training(work)
        for node in found(
            work.tree.module,
            (
                cst.Assign,
                cst.AnnAssign,
                cst.AugAssign,
                cst.NamedExpr,
                cst.For,
                cst.While,
                cst.CompFor,
                cst.WithItem,
                cst.Return,
                cst.Call,
            ),
        ):
            scope = self._tree.function(node)
            self._events.setdefault(id(scope), []).append(node)
            if isinstance(node, cst.For | cst.While):
                loop = work.job.batches.loop(node)
                if loop is not None and loaders.is_divided(loop):
                    self._divided.append(node)
        self._bound = {id(f): self._bound_in(f) for f in self._tree.functions}

    def point_out(self) -> None:
        """List what differs where it is shown, written or collected."""
        self.follow()
        self._notes = RankValueNotes(self._work, self._numbers)
        for frame in list(self._frames.values()):
            self._run(frame)
        decisions: Iterator[cst.If | cst.While]
        decisions = found(self._tree.module, (cst.If, cst.While))
        for node in decisions:
            if self.steers(node):
                self._decide(node, self._notes)
            elif isinstance(node, cst.If) and self._saves(node):
                self._save(node, self._notes)

    def _decide(self, node: cst.If | cst.While, notes: RankValueNotes) -> None:
        """List a decision that a rank takes by its own samples or random numbers."""
        scope = self._tree.function(node)
        frames = [f for f in list(self._frames.values()) if f.scope is scope]
        for name in (self._decides(node, frame) for frame in frames):
            if name is not None:
                notes.decided(node, name)
                return
        for call in found(node.test, cst.Call):
            if self._tree.called(call) in _DRAWING:  # a generator for each rank
                notes.decided(node, self._tree.text(call)[:50])
                return

    def _saves(self, node: cst.If) -> bool:
        if any(self._tree.within(node, t.node) for t in self._work.job.training):
            return False  # listed with the other decisions of a step
        return any(
            self._tree.called(call) in SAVES
            or self._tree.method_called(call, *SAVING_METHODS) is not None
            for call in found(node.body, cst.Call)
        )

    def _save(self, node: cst.If, notes: RankValueNotes) -> None:
        """List a decision to write a file by a value of a rank's own samples."""
        scope = self._tree.function(node)
        for frame in [f for f in list(self._frames.values()) if f.scope is scope]:
            name = self._decides(node, frame)
            if name is not None:
                notes.saved(node, name)
                return

    def _decides(self, node: cst.If | cst.While, frame: _Frame) -> str | None:
        """Return a name that differs by rank and that a test reads, if there is one."""
        differing = [
            name
            for name in found(node.test, cst.Name)
            if self._read(name, frame) and not self._is_of_size(name, node)
        ]
        if differing and self._differs(node.test, frame):
            return str(differing[0].value)
        return self._carried(node, frame)

    def _carried(self, node: cst.If | cst.While, frame: _Frame) -> str | None:
        """Return a name that a ``while`` tests again after its body has set it."""
        if not isinstance(node, cst.While):
            return None
        lines = [self._tree.line(x) for x in found(node.body, cst.BaseSmallStatement)]
        for name in found(node.test, cst.Name):
            made = frame.defs.get(name.value, {}).values()
            last = [d for d in made if min(lines) <= d.line <= max(lines)]
            reduced = any(
                self._numbers.is_reduced(a) for a in self._tree.ancestors(name)
            )
            if any(d.differs for d in last) and not reduced:
                return str(name.value)
        return None

    def _is_of_size(self, name: cst.Name, node: cst.If | cst.While) -> bool:
        """Return whether a test reads only the size of a batch, equal on all ranks."""
        within = [
            part
            for part in self._tree.ancestors(name)
            if self._tree.within(part, node.test)
        ]
        if any(_is_size(part) for part in within):
            return True
        made = self._flow.assigned(name.value, self._tree.function(name))
        return bool(made) and all(_is_size(_innermost_of_index(o.value)) for o in made)

    def steers(self, node: cst.If | cst.While) -> bool:
        """Return whether a decision may change how often a rank trains."""
        if isinstance(node, cst.While) and self._trains(node.body):
            return True
        blocks = [node.body, *([node.orelse] if node.orelse is not None else [])]
        for block in blocks:
            for end in found(block, (cst.Break, cst.Continue)):
                loop = next(iter(self._tree.loops(end)), None)
                if loop is not None and self._trains(loop.body):
                    return True
            scope = self._tree.function(node)
            if scope in self._training and any(
                self._tree.function(end) is scope for end in found(block, cst.Return)
            ):
                return True
        around = any(self._trains(loop.body) for loop in self._tree.loops(node))
        return around and any(self._trains(block) for block in blocks)

    def _trains(self, block: cst.CSTNode) -> bool:
        """Return whether a batch may be trained on within a block."""
        return any(
            call in self._work.job.backwards
            or any(f in self._training for f in self._flow.local(call))
            for call in found(block, cst.Call)
        )

    def may_differ(self, node: cst.BaseExpression) -> bool:
        """Return whether a value may differ in some call of the function around it."""
        scope = id(self._tree.function(node))
        frames = [f for (of, _), f in self._frames.items() if of == scope]
        in_lambda = any(isinstance(a, cst.Lambda) for a in self._tree.ancestors(node))
        return in_lambda or not frames or any(self._differs(node, f) for f in frames)

    def differs(self, node: cst.BaseExpression) -> bool:
        """Return whether a value comes from a rank's own samples, not reduced."""
        scope = id(self._tree.function(node))
        frames = [f for (of, _), f in self._frames.items() if of == scope]
        return any(self._differs(node, frame) for frame in frames)

    def follow(self) -> None:
        """Follow a rank's samples through the script until nothing more differs."""
        self._frame(None, frozenset())
        for function in self._tree.functions:
            called = bool(self._flow.calls_of(function))
            if not called and self._unknown:
                self._frame(function, frozenset(_every_parameter(function)))
            elif not called or function in self._training:
                self._frame(function, frozenset())
        for _ in range(_PASSES):
            self._changed = False
            for frame in list(self._frames.values()):
                self._run(frame)
            if not self._changed:
                break

    # Frames

    def _frame(self, scope: Scope, given: frozenset[str]) -> _Frame:
        key = (id(scope), given)
        if key not in self._frames:
            frame = _Frame(scope=scope, given=given)
            self._frames[key] = frame
            self._changed = True
            if scope is not None:
                for name in _every_parameter(scope):
                    made = _Def(0, scope.body, name in given)
                    frame.defs.setdefault(name, {})[id(scope)] = made
        return self._frames[key]

    def _bound_in(self, function: cst.FunctionDef) -> set[str]:
        out = set(_every_parameter(function))
        for node in self._events.get(id(function), []):
            for target in targets_of(node):
                out |= {n.value for n in stored_names(target)}
        foreign = {
            item.name.value
            for line in found(function.body, (cst.Global, cst.Nonlocal))
            for item in getattr(line, "names", ())
        }
        return out - foreign

    def _run(self, frame: _Frame) -> None:
        for node in self._events.get(id(frame.scope), []):
            if isinstance(node, cst.Assign):
                for target in node.targets:
                    self._bind(target.target, node.value, node, frame)
            elif isinstance(node, cst.AnnAssign | cst.NamedExpr):
                if node.value is not None:
                    self._bind(node.target, node.value, node, frame)
            elif isinstance(node, cst.AugAssign):
                self._store(
                    node.target, node, frame, differs=self._differs(node.value, frame)
                )
            elif isinstance(node, cst.For):
                if self._iterables.is_divided(node.iter):
                    self._batches(node, frame)
                else:
                    self._bind(node.target, node.iter, node, frame, each=True)
            elif isinstance(node, cst.CompFor):
                if self._loaders.divides(node):
                    self._store(node.target, node, frame, differs=True)
                else:
                    self._bind(node.target, node.iter, node, frame, each=True)
            elif isinstance(node, cst.WithItem):
                if node.asname is not None:
                    self._bind(node.asname.name, node.item, node, frame)
            elif isinstance(node, cst.Return):
                self._return(node, frame)
            elif isinstance(node, cst.Call):
                self._call(node, frame)

    def _return(self, node: cst.Return, frame: _Frame) -> None:
        value = node.value
        if value is None:
            return
        places: set[int | None] = set()
        if isinstance(value, cst.Tuple):
            places |= {
                i for i, e in enumerate(value.elements) if self._differs(e.value, frame)
            }
        if places or self._differs(value, frame):
            places.add(None)
            if not isinstance(value, cst.Tuple):
                places.add(-1)  # any place
        if not places <= frame.returns:
            frame.returns |= places
            self._changed = True

    # Assignments

    def _batches(self, node: cst.For, frame: _Frame) -> None:
        """Mark a divided loop's variables; the number of a batch is the same."""
        target: cst.BaseExpression = node.target
        over = node.iter
        while isinstance(over, cst.Call) and self._tree.called(over) in WRAPPERS:
            if self._tree.called(over) == "enumerate" and isinstance(target, cst.Tuple):
                self._store(target.elements[0].value, node, frame, differs=False)
                target = target.elements[-1].value
                break
            if not over.args:
                break
            over = over.args[0].value
        self._store(target, node, frame, differs=True)

    def _bind(
        self,
        target: cst.BaseExpression,
        value: cst.BaseExpression,
        at: cst.CSTNode,
        frame: _Frame,
        *,
        each: bool = False,
    ) -> None:
        """Assign a value, or each of its elements, to a target, part by part."""
        if not isinstance(target, cst.Tuple | cst.List):
            self._store(target, at, frame, differs=self._differs(value, frame))
            return
        parts = [e.value for e in target.elements]
        values: list[bool]
        called = self._tree.called(value)
        if isinstance(value, cst.Tuple | cst.List) and not each:
            values = [self._differs(e.value, frame) for e in value.elements]
        elif each and isinstance(value, cst.Call) and called in ("zip", "enumerate"):
            values = [self._differs(a.value, frame) for a in value.args]
            values = [False, *values] if called == "enumerate" else values
        elif (
            each
            and isinstance(value, cst.Call)
            and self._tree.method_called(value, "items") is not None
        ):
            values = [False, self._differs(value, frame)]
        elif isinstance(value, cst.Call) and not each:
            values = [self._result(value, frame, place) for place in range(len(parts))]
        else:
            values = [self._differs(value, frame)] * len(parts)
        if len(values) < len(parts) or any(
            isinstance(e, cst.StarredElement) for e in target.elements
        ):
            values = [any(values)] * len(parts)
        for part, differs in zip(parts, values, strict=False):
            self._store(part, at, frame, differs=differs)

    def _store(
        self,
        target: cst.BaseExpression,
        at: cst.CSTNode,
        frame: _Frame,
        *,
        differs: bool,
    ) -> None:
        if isinstance(target, cst.Tuple | cst.List):
            for element in target.elements:
                self._store(element.value, at, frame, differs=differs)
        elif isinstance(target, cst.Name):
            self._set(target.value, at, frame, differs=differs)
        elif isinstance(target, cst.Attribute):
            if differs:
                self._set_attribute(target, at, frame)
        elif isinstance(target, cst.Subscript):
            names = (element_of(target), dotted(target.value))
            if any(self._is_reduced_later(name, at) for name in names):
                return
            index = any(
                self._differs(e, frame)
                for i in target.slice
                for e in found(i, cst.BaseExpression)
                if self._tree.parent(e) is i.slice
            )
            if differs or index:
                self._collect(target.value, target, frame)

    def _set(self, name: str, at: cst.CSTNode, frame: _Frame, *, differs: bool) -> None:
        if isinstance(at, cst.CompFor):
            if differs and (id(at), name) not in frame.within:
                frame.within.add((id(at), name))
                self._changed = True
            return
        if frame.scope is not None and name not in self._bound[id(frame.scope)]:
            home = self._home(name, self._tree.function(frame.scope))
            if differs and (home, name) not in self._wild:
                self._wild.add((home, name))
                self._changed = True
            return
        if self._is_reduced_later(name, at):
            differs = False  # only added up there, and reduced after the loop
        block: cst.CSTNode | None
        if isinstance(at, cst.For):
            block = at.body
        elif isinstance(at, cst.NamedExpr | cst.AugAssign):
            block = None
        else:
            block = self._surely_run_with(self._tree.statement(at))
        made = frame.defs.setdefault(name, {}).setdefault(
            id(at), _Def(self._tree.line(at), block)
        )
        if differs and not made.differs:
            made.differs = True
            self._changed = True

    def _is_reduced_later(self, name: str | None, at: cst.CSTNode) -> bool:
        """Return whether a name, or an element, is reduced after the loop around."""
        return any(
            name in names and self._tree.within(at, loop)
            for loop, names in self._numbers.reduced_after
        )

    def _surely_run_with(self, statement: cst.CSTNode) -> cst.CSTNode | None:
        """Return the outermost block that runs a statement whenever it runs to its end.

        The body of ``with torch.no_grad():`` belongs to the block around it.
        """
        block = self._tree.parent(statement)
        while block is not None:
            above = self._tree.parent(block)
            if not isinstance(above, cst.With) or any(
                self._tree.called(item.item) == "contextlib.suppress"
                for item in above.items
            ):
                break
            block = self._tree.parent(above)
        return block

    def _home(self, name: str, scope: Scope) -> int:
        while scope is not None and name not in self._bound[id(scope)]:
            scope = self._tree.function(scope)
        return id(scope)

    def _set_attribute(
        self, target: cst.Attribute, at: cst.CSTNode, frame: _Frame
    ) -> None:
        kind = self._tree.owner(frame.scope)
        if dotted(target.value) == "self" and kind is not None:
            if self._notes is not None and self._is_buffer(target.attr.value, kind):
                self._notes.buffer(target, at)
            key = (id(kind), target.attr.value)
            if key not in self._attributes:
                self._attributes.add(key)
                self._names.add(target.attr.value)
                self._changed = True
        elif isinstance(target.value, cst.Attribute | cst.Name):
            if target.attr.value in ("data", "grad"):
                self._store(target.value, at, frame, differs=True)
            elif target.attr.value not in self._names:
                self._names.add(target.attr.value)
                self._changed = True

    def _is_buffer(self, name: str, kind: cst.ClassDef) -> bool:
        return any(
            self._tree.method_called(call, "register_buffer") is not None
            and call.args
            and self._tree.text(call.args[0].value).strip("\"'") == name
            for inner in self._tree.family(kind)
            for call in found(inner, cst.Call)
        )

    # Values

    def _differs(self, node: cst.BaseExpression, frame: _Frame) -> bool:
        """Return whether a value may come from a rank's own samples, not reduced."""
        if self._numbers.is_reduced(node):
            return False
        if isinstance(node, cst.Name):
            return self._read(node, frame)
        if isinstance(node, cst.Attribute):
            return self._attribute(node, frame)
        if isinstance(node, cst.Subscript):
            if self._is_inner_size(node):
                return False
            return self._differs(node.value, frame) or any(
                self._differs(e, frame)
                for i in node.slice
                for e in i.slice.children
                if isinstance(e, cst.BaseExpression)
            )
        if isinstance(node, cst.Call):
            return self._result(node, frame, None)
        if isinstance(node, cst.Lambda | cst.SimpleString | cst.Integer | cst.Float):
            return False
        if isinstance(node, cst.Comparison) and any(
            isinstance(c.operator, cst.Is | cst.IsNot) for c in node.comparisons
        ):
            return False
        return any(self._differs(e, frame) for e in parts(node))

    def _read(self, node: cst.Name, frame: _Frame) -> bool:
        name = node.value
        scope = frame.scope
        for above in self._tree.ancestors(node):
            part = above.for_in if isinstance(above, cst.BaseComp) else None
            while part is not None:
                if any(n.value == name for n in stored_names(part.target)):
                    return (id(part), name) in frame.within
                part = part.inner_for_in
        if scope is not None and name not in self._bound[id(scope)]:
            outer = self._tree.function(scope)
            home = self._home(name, outer)
            return (home, name) in self._wild or any(
                made.differs
                for (of, _), other in self._frames.items()
                if of == home
                for made in other.defs.get(name, {}).values()
            )
        if (id(scope), name) in self._wild:
            return True
        line = self._tree.line(node)
        every = list(frame.defs.get(name, {}).values())
        around = {id(a) for a in self._tree.ancestors(node)}
        before = [
            d
            for d in every
            if d.block is not None and id(d.block) in around and d.line < line
        ]
        if before:
            first = max(d.line for d in before)
            every = [d for d in every if first <= d.line <= line]
        latest: dict[int, int] = {}
        for made in every:
            # After a block, its last assignment to the name is the one in effect.
            if made.block is not None and made.line < line:
                key = id(made.block)
                latest[key] = max(latest.get(key, 0), made.line)
        return any(
            d.differs
            for d in every
            if d.block is None
            or id(d.block) in around
            or d.line >= latest.get(id(d.block), 0)
        )

    def _attribute(self, node: cst.Attribute, frame: _Frame) -> bool:
        name = node.attr.value
        if name in _EQUAL_ATTRIBUTES:
            return False
        if (
            self._unknown
            and name in _OF_SHARE
            and node not in self._work.whole
            and self._iterables.is_divided(node.value)
        ):
            return True
        if dotted(node.value) == "self":
            kind = self._tree.owner(frame.scope)
            return kind is not None and any(
                (id(k), name) in self._attributes for k in self._tree.family(kind)
            )
        if self._differs(node.value, frame):
            return True
        return name in self._names and not self._is_foreign(node.value)

    def _is_foreign(self, node: cst.BaseExpression) -> bool:
        return (dotted(node) or "").partition(".")[0] in self._tree.imported

    def _is_inner_size(self, node: cst.Subscript) -> bool:
        """Return whether this is the size of a dimension that is not the samples'."""
        base = node.value
        of_shape = isinstance(base, cst.Attribute) and base.attr.value == "shape"
        of_size = (
            isinstance(base, cst.Call)
            and self._tree.method_called(base, "size") is not None
        )
        if not (of_shape or of_size):
            return False
        text = self._tree.text(node.slice[0].slice)
        return len(node.slice) == 1 and text != "0" and not text.startswith((":", "0"))

    def _result(self, call: cst.Call, frame: _Frame, place: int | None) -> bool:
        """Return whether a call's result differs, or one place of it."""
        if self._numbers.is_reduced(call):
            return False
        full = self._tree.called(call)
        on = call.func.value if isinstance(call.func, cst.Attribute) else None
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        if full in _EQUAL_CALLS or method in _EQUAL_METHODS:
            return False
        if method == "size" and call.args and self._tree.text(call.args[0]) != "0":
            return False
        if (
            full == "next"
            and call.args
            and self._iterables.is_divided(call.args[0].value)
        ):
            return True
        if self._is_handed_over(call, frame):
            return True
        out = False
        followed = False
        for function in self._functions(call):
            followed = True
            returns = self._enter(function, call, frame).returns
            if place is None:
                out = out or None in returns
            else:
                out = out or place in returns or -1 in returns
        kind = self._tree.classes.get(dotted(call.func) or "")
        if kind is not None:
            for init in found(kind.body, cst.FunctionDef):
                if init.name.value == "__init__":
                    self._enter(init, call, frame)
            return False
        if followed:
            return out
        return (on is not None and self._differs(on, frame)) or any(
            self._differs(a.value, frame) for a in call.args
        )

    def _functions(self, call: cst.Call) -> list[cst.FunctionDef]:
        if id(call) not in self._called:
            self._called[id(call)] = self._work.calls.functions(call)
        return self._called[id(call)]

    def _enter(
        self, function: cst.FunctionDef, call: cst.Call, frame: _Frame
    ) -> _Frame:
        names = parameters(function)
        if names and names[0] in ("self", "cls") and self._tree.owner(function):
            names = names[1:]
        given: set[str] = set()
        star = function.params.star_arg
        rest = star.name.value if isinstance(star, cst.Param) else None
        more = function.params.star_kwarg
        place = 0
        for argument in call.args:
            differs = self._differs(argument.value, frame)
            if argument.keyword is not None:
                name = argument.keyword.value
                if name not in names:
                    name = more.name.value if more is not None else ""
            elif argument.star:
                name = rest or ""
            else:
                name = names[place] if place < len(names) else rest or ""
                place += 1
            if differs and name:
                given.add(name)
        return self._frame(function, frozenset(given))

    # What is done with values

    def _call(self, call: cst.Call, frame: _Frame) -> None:
        if self._notes is not None:
            self._notes.combined(call, partial(self._differs, frame=frame))
        if self._is_handed_over(call, frame):
            self._shown(call, [a.value for a in call.args], frame)
            return
        self._result(call, frame, None)  # enters the functions
        full = self._tree.called(call)
        on = call.func.value if isinstance(call.func, cst.Attribute) else None
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        shows = full in ("print", "pprint.pprint", "pprint.pp") or full in SAVES
        if shows or method in _SHOWING or method in SAVING_METHODS:
            saved = [on] if on is not None and method in SAVING_METHODS else []
            self._shown(call, [*saved, *(a.value for a in call.args)], frame)
        elif (
            not isinstance(self._tree.parent(call), cst.Expr)
            or self._functions(call)
            or full.startswith("torch.")
            or method in _TRAINING
            or not any(self._differs(a.value, frame) for a in call.args)
        ):
            return
        elif on is not None and method.endswith("_"):
            at, inner = self._tree.statement(call), _innermost(on)
            path = dotted(inner)
            kept = path is not None and self._outlives(path, at, frame)
            if kept and path is not None and self._notes is not None:
                self._notes.collected(path, at)
            self._store(inner, at, frame, differs=True)
        elif on is not None and method == "update" and self._is_bar(on):
            return  # only rank 0 shows it
        elif on is not None and method in _COLLECTING:
            self._collect(on, call, frame)
        else:
            self._shown(call, [a.value for a in call.args], frame)

    def _is_bar(self, node: cst.BaseExpression) -> bool:
        made = self._flow.origins(node, self._tree.function(node))
        return any(self._tree.called(o.value) in BARS for o in made)

    def _shown(
        self, call: cst.Call, given: list[cst.BaseExpression], frame: _Frame
    ) -> None:
        if self._notes is not None:
            self._notes.shown(call, given, partial(self._differs, frame=frame))

    def _is_handed_over(self, call: cst.Call, frame: _Frame) -> bool:
        """Return whether an object that does not train is given a rank's values."""
        if not isinstance(call.func, cst.Attribute):
            return False
        functions = self._functions(call)
        if not functions or not isinstance(self._tree.parent(call), cst.Expr):
            return False
        if dotted(call.func.value) in ("self", "super"):
            return False
        if any(f in self._training for f in functions):
            return False
        return any(self._differs(a.value, frame) for a in call.args)

    def _collect(
        self, container: cst.BaseExpression, at: cst.CSTNode, frame: _Frame
    ) -> None:
        """Add to a container; list it if the container outlives the step."""
        path = dotted(container)
        inner: cst.BaseExpression = container
        while path is None and isinstance(inner, cst.Subscript | cst.Call):
            inner = inner.value if isinstance(inner, cst.Subscript) else inner.func
            if isinstance(inner, cst.Attribute) and dotted(inner) is None:
                inner = inner.value
            path = dotted(inner)
        if path is None:
            return
        if self._outlives(path, at, frame):
            if self._notes is not None:
                self._notes.collected(path, at)
        elif path in self._numbers.graph:
            return
        elif isinstance(inner, cst.Name):
            self._set(inner.value, at, frame, differs=True)
        elif isinstance(inner, cst.Attribute):
            self._set_attribute(inner, at, frame)

    def _outlives(self, path: str, at: cst.CSTNode, frame: _Frame) -> bool:
        """Return whether a container exists before the step in which it is filled."""
        loop = next(
            (x for x in self._divided if self._tree.within(at, x.body)),
            None,
        )
        where: cst.CSTNode | None = loop.body if loop is not None else None
        if where is None:
            if frame.scope is None or not frame.given:
                return False
            where = frame.scope.body
        made = self._flow.assigned(path, frame.scope)
        if "." not in path:
            made = [o for o in made if o.scope is frame.scope]
        return not any(self._tree.within(o.statement, where) for o in made)


def _is_size(node: cst.CSTNode) -> bool:
    """Return whether an expression is the number of samples, or of elements."""
    if isinstance(node, cst.Call):
        func = node.func
        if isinstance(func, cst.Attribute):
            return func.attr.value in ("size", "numel", "nelement")
        return dotted(func) == "len"
    return isinstance(node, cst.Attribute) and node.attr.value == "shape"


def _innermost_of_index(node: cst.BaseExpression) -> cst.BaseExpression:
    while isinstance(node, cst.Subscript):
        node = node.value
    return node


def _innermost(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return the object at the beginning of ``x.mul_(a).add_(b)``."""
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        node = node.func.value
    return node


def _every_parameter(function: cst.FunctionDef) -> list[str]:
    of = function.params
    rest = [of.star_arg] if isinstance(of.star_arg, cst.Param) else []
    more = [of.star_kwarg] if of.star_kwarg is not None else []
    return [*parameters(function), *(p.name.value for p in (*rest, *more))]
