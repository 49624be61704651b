"""Run a script on abstract values, to see how its losses depend on a batch.

The script is executed as far as its text goes: the module, its functions where they are
called, the methods of its objects. Both branches of an undecided test are taken and
their results joined; loops run until nothing changes. Code that cannot be read gives
values that say so. Nothing is imported and nothing of the script is executed.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert import _library_values as library
from stretto.convert import _tensor_values as tensors
from stretto.convert._batch_values import (
    NONE,
    UNSET,
    Alt,
    Bad,
    Class,
    Count,
    Draw,
    Fixed,
    Func,
    Item,
    Iter,
    Lib,
    Linear,
    Made,
    Method,
    Ref,
    Rows,
    Seq,
    Shape,
    Value,
    Why,
    combined,
    first_bad,
    first_rows,
    is_of_batch,
    join,
    joined,
)
from stretto.convert._flow import SAME_OBJECT, WRAPPING
from stretto.convert._job import WRAPPERS
from stretto.convert._tensor_values import Given
from stretto.convert._tree import dotted, found

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stretto.convert._edit import Work

State = dict[int, dict[str, Value]]
"""Variables of each frame, and attributes of each object."""

_MAX_STEPS = 400_000
"""Expressions after which a script is too long to be followed."""

_DEEPEST = 28
"""Calls within calls that are followed."""

_UNROLLED = 6
"""The longest tuple whose loop is followed element by element."""

_OPERATORS = {
    cst.Add: "+",
    cst.Subtract: "-",
    cst.Multiply: "*",
    cst.Divide: "/",
    cst.AddAssign: "+",
    cst.SubtractAssign: "-",
    cst.MultiplyAssign: "*",
    cst.DivideAssign: "/",
}


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
class _Loop:
    samples: bool
    breaks: list[State] = field(default_factory=list)
    continues: list[State] = field(default_factory=list)
    added: set[tuple[int, str]] = field(default_factory=set)
    """Variables to which something is added."""


@final
class Interpreter:
    """Runs one script, and notes the value of each loss.

    Attributes:
        losses: The values on which each call of ``backward`` is made, by its ``id``.
        repeated: Calls that draw the same numbers on each rank for its samples.
    """

    def __init__(self, work: Work) -> None:
        self._work, self._tree, self._job = work, work.tree, work.job
        self.state: State = {}
        self.losses: dict[int, Value] = {}
        self._backwards = {id(c) for c in work.job.backwards}
        self._training = {id(t.node): t for t in work.job.training}
        self._keys: dict[tuple[object, ...], int] = {}
        self.frames: dict[int, Frame] = {}
        self._steps = 0
        self._depth = 0
        self._active: list[cst.CSTNode] = []
        self._loops: list[_Loop] = []
        self._in_step = 0
        self._nested: dict[int, bool] = {}
        self._yielding: dict[int, bool] = {}
        self.repeated: set[cst.Call] = set()
        self._written: list[set[tuple[int, str]]] = []
        """Variables set since a decision that may differ by rank, for each."""
        self._rowwise: dict[int, bool] = {}
        self._reduced = self._reducing()
        names = {full.partition(".")[0] for full in work.tree.imported.values()}
        self.trusted = not names.isdisjoint(tensors.TRUSTED)

    def run(self) -> None:
        """Run the module, then the functions that nothing in it calls."""
        top = Frame(key=self.key("module"), scope=None)
        self.frames[top.key] = top
        try:
            self._block(self._tree.module, top)
            for function in self._unreached():
                self._start(function, top)
        except (TooLong, RecursionError):
            return

    def is_rowwise(self, node: cst.CSTNode) -> bool:
        """Return whether an expression only had values with a row for each sample."""
        return self._rowwise.get(id(node), False)

    def _unreached(self) -> Iterator[cst.FunctionDef]:
        """Yield functions to begin with, so that each backward is reached."""
        for widest in (True, False):
            for call in self._job.backwards:
                if id(call) in self.losses:
                    continue
                around = self._callers(call) if widest else []
                scope = self._tree.function(call)
                for function in around or ([scope] if scope is not None else []):
                    if id(call) not in self.losses:
                        yield function

    def _callers(self, call: cst.CSTNode) -> list[cst.FunctionDef]:
        """Return functions that lead to a call and that nothing calls."""
        out: list[cst.FunctionDef] = []
        waiting = [self._tree.function(call)]
        seen: set[int] = set()
        while waiting:
            function = waiting.pop()
            if function is None or id(function) in seen:
                continue
            seen.add(id(function))
            calls = self._work.flow.calls_of(function)
            if not calls:
                out.append(function)
            waiting += [self._tree.function(c) for c in calls]
        return out

    def _start(self, function: cst.FunctionDef, top: Frame) -> None:
        """Run a function whose caller is not known."""
        owner = self._tree.owner(function)
        receiver: Value | None = None
        if (
            owner is not None
            and self._tree.parent(self._tree.parent(function) or function) is owner
        ):
            made = Class(owner, top.key)
            receiver = self._object(made, owner, (), {}, top, strict=False)
        names = self._names(function)
        if receiver is not None:
            names = names[1:]
        options: dict[str, Value] = {}
        of = function.params
        defaults = {p.name.value: p.default for p in (*of.params, *of.kwonly_params)}
        for name in names:
            if defaults.get(name) is None:
                options[name] = Fixed()
        self._enter(
            Func(function, top.key, receiver, owner), (), options, function, top
        )

    def _reducing(self) -> set[int]:
        """Return the blocks in which numbers are reduced where they are computed."""
        out = {id(t.node) for t in self._job.training}
        for call in self._job.backwards:
            scope = self._tree.function(call)
            if scope is not None:
                out.add(id(scope))
        return out

    # Frames

    def key(self, *what: object) -> int:
        """Return the number of a frame or an object."""
        return self._keys.setdefault(what, len(self._keys) + 1)

    def get(self, key: int, name: str) -> Value | None:
        """Return a variable of a frame, or an attribute of an object."""
        return self.state.get(key, {}).get(name)

    def set(self, key: int, name: str, value: Value) -> None:
        """Set a variable of a frame, or an attribute of an object."""
        self.state[key] = {**self.state.get(key, {}), name: value}
        for names in self._written:
            names.add((key, name))

    def _read(self, name: str, frame: Frame) -> Value:
        here: Frame | None = frame
        while here is not None:
            value = self.get(here.key, name)
            if value is not None:
                return value
            here = here.parent
        if name in self._tree.imported:
            return Lib(self._tree.imported[name])
        if name in ("True", "False", "None"):
            return Fixed(ast.literal_eval(name))
        return Lib(name) if name in library.BUILTINS else Fixed()

    def _assign(self, name: str, value: Value, frame: Frame) -> None:
        self.set(frame.foreign.get(name, frame.key), name, value)

    # Statements

    def _block(self, body: cst.CSTNode, frame: Frame) -> bool:
        """Run a block; return whether what follows it is reached."""
        if isinstance(body, cst.SimpleStatementSuite):
            return self._small(body.body, frame)
        return all(self._statement(line, frame) for line in getattr(body, "body", ()))

    def _small(self, lines: Sequence[cst.CSTNode], frame: Frame) -> bool:
        return all(self._line(line, frame) for line in lines)

    def _statement(self, node: cst.CSTNode, frame: Frame) -> bool:
        if isinstance(node, cst.SimpleStatementLine):
            return self._small(node.body, frame)
        if isinstance(node, cst.If):
            return self._if(node, frame)
        if isinstance(node, cst.For):
            return self._for(node, frame)
        if isinstance(node, cst.While):
            return self._while(node, frame)
        if isinstance(node, cst.With):
            for item in node.items:
                value = self.value(item.item, frame)
                if item.asname is not None:
                    if isinstance(item.item, cst.Call) and item.item.args:
                        on = self._tree.method_called(item.item, "scale_loss")
                        if on is not None:
                            value = self.value(item.item.args[0].value, frame)
                    self._bind(item.asname.name, value, frame)
            return self._block(node.body, frame)
        if isinstance(node, cst.Try):
            return self._try(node, frame)
        if isinstance(node, cst.FunctionDef):
            self._assign(node.name.value, self._function(node, frame), frame)
        elif isinstance(node, cst.ClassDef):
            self._assign(node.name.value, Class(node, frame.key), frame)
        elif isinstance(node, cst.Match):
            self.value(node.subject, frame)
            before, after = dict(self.state), [self.state]
            for case in node.cases:
                self.state = dict(before)
                if self._block(case.body, frame):
                    after.append(self.state)
            self.state = self._merged(after, node)
        return True

    def _given(
        self, node: cst.Call, args: tuple[Value, ...], options: Mapping[str, Value]
    ) -> Given:
        """Return the arguments of a call."""
        return Given(
            node=node,
            args=args,
            options=options,
            in_step=bool(self._in_step),
            repeated=self.repeated,
        )

    def _function(self, node: cst.FunctionDef, frame: Frame) -> Value:
        made: Value = Func(node, frame.key)
        for decorator in node.decorators:
            on = decorator.decorator
            name = self._tree.full(on.func if isinstance(on, cst.Call) else on) or ""
            inner = self.value(on.func if isinstance(on, cst.Call) else on, frame)
            if isinstance(inner, Func) and "wraps" not in name:
                continue  # a decorator of the script: its function is taken as it is
        return made

    def _line(self, node: cst.CSTNode, frame: Frame) -> bool:
        if isinstance(node, cst.Expr):
            self.value(node.value, frame)
        elif isinstance(node, cst.Assign):
            value = self.value(node.value, frame)
            for target in node.targets:
                self._bind(target.target, value, frame)
                self._note_addition(target.target, node.value, frame)
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                self._bind(node.target, self.value(node.value, frame), frame)
        elif isinstance(node, cst.AugAssign):
            self._augment(node, frame)
        elif isinstance(node, cst.Return):
            value = NONE if node.value is None else self.value(node.value, frame)
            if frame.decided and frame.returned is None:
                frame.returned = frame.decided[-1]
            frame.returns.append(value)
            return False
        elif isinstance(node, cst.Raise):
            return False
        elif isinstance(node, cst.Break):
            if self._loops:
                self._loops[-1].breaks.append(self.state)
            return False
        elif isinstance(node, cst.Continue):
            if self._loops:
                self._loops[-1].continues.append(self.state)
            return False
        elif isinstance(node, cst.Global | cst.Nonlocal):
            for item in node.names:
                name = item.name.value
                home = frame.parent
                if isinstance(node, cst.Global):
                    home = self.frames[1]
                while (
                    home is not None
                    and home.parent is not None
                    and (self.get(home.key, name) is None)
                ):
                    home = home.parent
                frame.foreign[name] = home.key if home is not None else 1
        elif isinstance(node, cst.Assert):
            self.value(node.test, frame)
        return True

    def _note_addition(
        self, target: cst.BaseExpression, value: cst.BaseExpression, frame: Frame
    ) -> None:
        """Note that ``a = a + x`` adds to a variable."""
        name = dotted(target)
        if name is None or not isinstance(value, cst.BinaryOperation):
            return
        if isinstance(value.operator, cst.Add) and name in (
            dotted(value.left),
            dotted(value.right),
        ):
            self._added(target, frame)

    def _added(self, target: cst.BaseExpression, frame: Frame) -> None:
        place = self._place(target, frame)
        if place is not None:
            for loop in self._loops:
                loop.added.add(place)

    def _place(
        self, target: cst.BaseExpression, frame: Frame
    ) -> tuple[int, str] | None:
        if isinstance(target, cst.Name):
            return frame.foreign.get(target.value, frame.key), target.value
        if isinstance(target, cst.Attribute):
            on = self.value(target.value, frame)
            if isinstance(on, Ref):
                return on.key, target.attr.value
        return None

    def _augment(self, node: cst.AugAssign, frame: Frame) -> None:
        old = self.value(node.target, frame)
        more = self.value(node.value, frame)
        if isinstance(old, Ref) and old.kind == "list":
            self._extend(old, self.items(more, node), node)
            return
        op = _OPERATORS.get(type(node.operator), "?")
        self._bind(node.target, combined(op, old, more, node), frame)
        if op == "+":
            self._added(node.target, frame)

    def _if(self, node: cst.If, frame: Frame) -> bool:
        truth, why = self._test(node.test, frame)
        if truth is True:
            return self._block(node.body, frame)
        if truth is False:
            return self._else(node.orelse, frame)
        before = self.state
        if why is not None:
            frame.decided.append(why)
            self._written.append(set())
        alive: list[State] = []
        self.state = dict(before)
        if self._block(node.body, frame):
            alive.append(self.state)
        self.state = dict(before)
        if self._else(node.orelse, frame):
            alive.append(self.state)
        written = set()
        if why is not None:
            frame.decided.pop()
            written = self._written.pop()
        if not alive:
            return False
        self.state = self._merged(alive, node, why)
        for key, name in written:
            value = self.get(key, name)
            if value is not None and why is not None:
                self.set(key, name, self._either(value, NONE, node, why))
        return True

    def _else(self, orelse: cst.If | cst.Else | None, frame: Frame) -> bool:
        if orelse is None:
            return True
        if isinstance(orelse, cst.If):
            return self._if(orelse, frame)
        return self._block(orelse.body, frame)

    def _test(
        self, node: cst.BaseExpression, frame: Frame
    ) -> tuple[bool | None, Why | None]:
        """Return whether a test holds, and why it may differ by rank."""
        value = self.value(node, frame)
        known = truth_of(value)
        if known is not None:
            return known, None
        if isinstance(value, Draw):
            return None, Why.DRAWN
        return None, Why.DECIDED if is_of_batch(value) else None

    def _merged(
        self, states: list[State], node: cst.CSTNode, why: Why | None = None
    ) -> State:
        out = states[0]
        for other in states[1:]:
            out = self._merge(out, other, node, why)
        return out

    def _merge(
        self, one: State, other: State, node: cst.CSTNode, why: Why | None
    ) -> State:
        if one is other:
            return one
        out = dict(one)
        for key, theirs in other.items():
            ours = one.get(key)
            if ours is None:
                out[key] = theirs
            elif ours is not theirs:
                names = dict(ours)
                for name, value in theirs.items():
                    here = names.get(name)
                    if here is None:
                        names[name] = value
                    elif here is not value:
                        names[name] = self._either(here, value, node, why)
                out[key] = names
        return out

    def _either(
        self, one: Value, other: Value, node: cst.CSTNode, why: Why | None
    ) -> Value:
        """Return a value that stands for either of two, of which a test chooses."""
        if one == other:
            return one
        if why is not None:
            both = (one, other)
            if any(isinstance(v, Linear | Item) for v in both):
                return Bad(why, node)
            if why is Why.DECIDED and any(isinstance(v, Rows | Draw) for v in both):
                return Bad(why, node)
            if all(isinstance(v, Fixed | Count) for v in both) and NONE not in both:
                return Bad(why, node) if why is Why.DECIDED else Draw()
        return join(one, other, node)

    def _for(self, node: cst.For, frame: Frame) -> bool:
        over = self.value(node.iter, frame)
        trains = id(node) in self._training
        if trains:
            over = self._batches(node, over)
        items, samples = self._items_of(over, node, whole=trains)
        self._in_step += trains
        falls = self._repeat(node, items, frame, samples=samples)
        self._in_step -= trains
        return falls

    def _batches(self, node: cst.For, over: Value) -> Value:
        """Return the batches that a training loop takes, as its text says."""
        if isinstance(over, Iter) and is_of_batch(over.item):
            return over
        return self._by_text(node.iter)

    def _by_text(self, node: cst.BaseExpression) -> Value:
        batch = Rows(raw=True, whole=True)
        full = self._tree.called(node)
        if isinstance(node, cst.Call) and full in WRAPPERS and node.args:
            inner = self._by_text(node.args[0].value)
            item = inner.item if isinstance(inner, Iter) else batch
            if full == "enumerate":
                return Iter(Seq((Fixed(), item)))
            if full == "zip":
                parts = [self._by_text(a.value) for a in node.args]
                return Iter(
                    Seq(tuple(p.item if isinstance(p, Iter) else batch for p in parts))
                )
            return inner
        if full in ("range", "trange"):
            return Iter(Fixed())
        return Iter(batch)

    def _while(self, node: cst.While, frame: Frame) -> bool:
        trains = id(node) in self._training
        self._in_step += trains
        self.value(node.test, frame)
        falls = self._repeat(node, [], frame, samples=False)
        self._in_step -= trains
        return falls

    def _repeat(
        self,
        node: cst.For | cst.While,
        items: Sequence[Value],
        frame: Frame,
        *,
        samples: bool,
    ) -> bool:
        loop = _Loop(samples=samples)
        before = dict(self.state)
        self._loops.append(loop)
        once = len(items) > 1
        for turn in range(max(len(items), 3)):
            if once and turn >= len(items):
                break
            entry = self.state
            self.state = dict(entry)
            if isinstance(node, cst.For):
                self._bind(node.target, items[turn if once else 0], frame)
            falls = self._block(node.body, frame)
            exits = [*loop.continues, *([self.state] if falls else [])]
            loop.continues = []
            if once:
                if not exits:
                    break
                self.state = self._merged(exits, node)
                continue
            self.state = self._merged([entry, *exits], node)
            if turn and self.state == entry:
                break
        self._loops.pop()
        self.state = self._merged([self.state, *loop.breaks], node)
        if samples:
            self._settle(loop, before, node)
        if node.orelse is not None:
            return self._block(node.orelse.body, frame)
        return True

    def _settle(self, loop: _Loop, before: State, node: cst.CSTNode) -> None:
        """Make what a loop over samples has added up a sum over them."""
        for key, names in list(self.state.items()):
            if names is before.get(key):
                continue
            new = dict(names)
            for name, value in names.items():
                if isinstance(value, Item) and before.get(key, {}).get(name) != value:
                    summed = (key, name) in loop.added
                    new[name] = (
                        Linear(value.degree + 1) if summed else Bad(Why.ACROSS, node)
                    )
            self.state[key] = new

    def _try(self, node: cst.Try, frame: Frame) -> bool:
        before = dict(self.state)
        alive = []
        falls = self._block(node.body, frame)
        if falls and node.orelse is not None:
            falls = self._block(node.orelse.body, frame)
        if falls:
            alive.append(self.state)
        for handler in node.handlers:
            self.state = self._merge(dict(before), self.state, node, None)
            if self._block(handler.body, frame):
                alive.append(self.state)
        if alive:
            self.state = self._merged(alive, node)
        if node.finalbody is not None and not self._block(node.finalbody.body, frame):
            return False
        return bool(alive)

    # Targets

    def _bind(self, target: cst.BaseExpression, value: Value, frame: Frame) -> None:
        if isinstance(target, cst.Name):
            self._assign(target.value, value, frame)
        elif isinstance(target, cst.Tuple | cst.List):
            parts = self._unpacked(value, target)
            for element, part in zip(target.elements, parts, strict=False):
                self._bind(element.value, part, frame)
        elif isinstance(target, cst.Attribute):
            on = self.value(target.value, frame)
            for ref in on.values if isinstance(on, Alt) else (on,):
                if isinstance(ref, Ref):
                    self.set(ref.key, target.attr.value, value)
                elif isinstance(ref, Class):
                    self.set(self.key("class", id(ref.node)), target.attr.value, value)
        elif isinstance(target, cst.Subscript):
            self._store(target, value, frame)

    def _unpacked(self, value: Value, target: cst.Tuple | cst.List) -> list[Value]:
        count = len(target.elements)
        starred = [isinstance(e, cst.StarredElement) for e in target.elements]
        if isinstance(value, Alt):
            parts = [self._unpacked(v, target) for v in value.values]
            return [joined(p, target) for p in zip(*parts, strict=False)]
        if isinstance(value, Ref):
            value = self.items_of_ref(value)
        if isinstance(value, Seq) and not any(starred):
            known = list(value.items)
            return known + [Fixed()] * (count - len(known))
        if isinstance(value, Shape):
            return [tensors.size_of(value.of, i) for i in range(count)]
        if isinstance(value, Rows):
            if value.raw or value.opaque is not None:
                part: Value = replace(value, whole=False)
                return [part] * count
            inner, _ = self._items_of(value, target)
            return [inner[0]] * count
        if isinstance(value, Iter):
            return [value.item] * count
        if isinstance(value, Seq):
            return [joined(value.items, target)] * count
        if isinstance(value, Item | Linear | Bad):
            return [value] * count
        return [Fixed()] * count

    def _store(self, target: cst.Subscript, value: Value, frame: Frame) -> None:
        on = self.value(target.value, frame)
        index = self._index(target, frame)
        if isinstance(on, Ref) and on.kind == "dict":
            name = index[0].value if index and isinstance(index[0], Fixed) else UNSET
            if isinstance(name, str):
                self.set(on.key, f"k:{name}", value)
            else:
                old = self.get(on.key, "*")
                self.set(
                    on.key, "*", value if old is None else join(old, value, target)
                )
        elif isinstance(on, Ref) and on.kind == "list":
            self._extend(on, [value], target)
        elif isinstance(on, Ref | Made | Lib | Class):
            return
        else:
            mixed = self._stored(on, value, [*index], target)
            self._bind_again(target.value, mixed, frame)

    def _stored(
        self, on: Value, value: Value, index: list[Value], node: cst.CSTNode
    ) -> Value:
        """Return a tensor after some of its elements were set."""
        parts = [v for v in (on, value, *index) if is_of_batch(v)]
        if not parts:
            return on
        if any(isinstance(i, Item) for i in index) and not isinstance(on, Rows):
            return Rows()
        if isinstance(value, Linear):
            return Bad(Why.ACROSS, node) if isinstance(on, Rows) else value
        if isinstance(on, Rows) and isinstance(value, Fixed):
            return on
        if isinstance(on, Fixed) and isinstance(value, Rows):
            if any(isinstance(i, Rows) and i.kind != "order" for i in index):
                return Bad(Why.ACROSS, node)  # a memory of samples
            return replace(value, axis=None if index else value.axis, ndim=None)
        return tensors.elementwise([on, value], node)

    def _bind_again(
        self, target: cst.BaseExpression, value: Value, frame: Frame
    ) -> None:
        if isinstance(target, cst.Name | cst.Attribute):
            if isinstance(target, cst.Attribute) and target.attr.value in (
                "data",
                "grad",
            ):
                return
            self._bind(target, value, frame)

    # Containers

    def items_of_ref(self, ref: Ref) -> Value:
        """Return what a list or a dict contains."""
        if ref.kind == "list":
            return self.get(ref.key, "items") or Seq(())
        if ref.kind == "dict":
            values = [v for k, v in self.state.get(ref.key, {}).items()]
            return Iter(joined(values, self._tree.module))
        return Iter(Fixed())

    def _list(self, items: Value, node: cst.CSTNode, frame: Frame) -> Ref:
        ref = Ref(self.key("list", frame.key, id(node)), "list")
        self.state[ref.key] = {"items": items}
        return ref

    def _dict(self, parts: Mapping[str, Value], node: cst.CSTNode, frame: Frame) -> Ref:
        ref = Ref(self.key("dict", frame.key, id(node)), "dict")
        self.state[ref.key] = dict(parts)
        return ref

    def _extend(self, ref: Ref, values: Sequence[Value], node: cst.CSTNode) -> None:
        old = self.get(ref.key, "items") or Seq(())
        samples = any(loop.samples for loop in self._loops)
        if isinstance(old, Seq) and not self._loops and len(old.items) < 64:
            self.set(ref.key, "items", Seq((*old.items, *values)))
            return
        items = list(old.items) if isinstance(old, Seq) else []
        if isinstance(old, Iter):
            items, samples = [old.item], samples or old.samples
        several = joined([*items, *values], node)
        samples = samples and is_of_batch(several)
        self.set(ref.key, "items", Iter(several, samples))

    def items(self, value: Value, node: cst.CSTNode) -> list[Value]:
        """Return the elements of a value, or one that stands for all."""
        return self._items_of(value, node)[0]

    def _items_of(
        self, value: Value, node: cst.CSTNode, *, whole: bool = False
    ) -> tuple[list[Value], bool]:
        """Return the elements of a value, and whether there is one for each sample."""
        if isinstance(value, Ref):
            if value.kind == "dict":
                return [Fixed()], False
            if isinstance(value.kind, cst.ClassDef):
                return [self._iterated(value)], False
            value = self.items_of_ref(value)
        if isinstance(value, Alt):
            return [
                joined((i for v in value.values for i in self.items(v, node)), node)
            ], False
        if isinstance(value, Seq):
            if 0 < len(value.items) <= _UNROLLED:
                return list(value.items), False
            return [joined(value.items, node)], False
        if isinstance(value, Iter):
            return [value.item], value.samples
        if isinstance(value, Shape):
            return [Fixed()], False
        if isinstance(value, Rows):
            if value.opaque is not None or value.axis is None:
                return [replace(value, whole=False)], False
            if value.axis == 0 and not whole:
                if value.whole and not isinstance(node, cst.For):
                    return [replace(value, whole=False)], False
                return [Item(value.degree)], True
            ndim = None if value.ndim is None else value.ndim - 1
            return [replace(value, axis=max(value.axis - 1, 0), ndim=ndim)], False
        if isinstance(value, Made) and self._is_loader(value):
            return [self._batch_of(value)], False
        if isinstance(value, Count):
            return [Item()], True
        if isinstance(value, Linear | Item | Bad | Draw):
            return [value], False
        return [Fixed(grad=isinstance(value, Fixed) and value.grad)], False

    def _iterated(self, ref: Ref) -> Value:
        if isinstance(ref.kind, cst.ClassDef):
            method = self.method(ref.kind, "__iter__")
            if method is not None:
                made = self.call(
                    self._bound(method, ref), (), {}, ref.kind, self.frames[1]
                )
                return self.items(made, ref.kind)[0]
        return Fixed()

    def _is_loader(self, made: Made) -> bool:
        last = made.name.rpartition(".")[2]
        return last.endswith("DataLoader") or self._job.is_loader(made.node)

    def _batch_of(self, made: Made) -> Value:
        """Return the batch of a loader, as its ``collate_fn`` makes it."""
        raw = Rows(raw=True, whole=True)
        collate = made.option("collate_fn", 6)
        if isinstance(collate, Func):
            item = Iter(Item(), samples=True)
            out = self.call(collate, (item,), {}, made.node, self.frames[1])
            if is_of_batch(out) or isinstance(out, Ref):
                return out if first_bad([out]) is None else replace(raw, axis=None)
            return replace(raw, axis=None)
        if collate is None or collate == NONE:
            return raw
        return replace(raw, axis=None)

    # Expressions

    def value(self, node: cst.CSTNode | None, frame: Frame) -> Value:
        """Return the value of an expression."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise TooLong
        if isinstance(node, cst.Name):
            return self._read(node.value, frame)
        if isinstance(node, cst.Call | cst.BinaryOperation):
            value = (
                self._call(node, frame)
                if isinstance(node, cst.Call)
                else self._operation(node, frame)
            )
            rows = isinstance(value, Rows) and value.axis is not None
            self._rowwise[id(node)] = rows and self._rowwise.get(id(node), True)
            return value
        if isinstance(node, cst.Attribute):
            return self.attribute(self.value(node.value, frame), node.attr.value, node)
        if isinstance(node, cst.Subscript):
            return self._element(node, frame)
        if isinstance(node, cst.Integer | cst.Float | cst.SimpleString):
            try:
                return Fixed(ast.literal_eval(node.value))
            except (ValueError, SyntaxError):
                return Fixed()
        if isinstance(node, cst.Tuple):
            return Seq(tuple(self._elements(node.elements, frame)))
        if isinstance(node, cst.List | cst.Set):
            parts = tuple(self._elements(node.elements, frame))
            return self._list(Seq(parts), node, frame)
        if isinstance(node, cst.Dict):
            return self._display(node, frame)
        if isinstance(node, cst.UnaryOperation):
            return self._unary(node, frame)
        if isinstance(node, cst.Comparison):
            return self._comparison(node, frame)
        if isinstance(node, cst.BooleanOperation):
            return self._boolean(node, frame)
        if isinstance(node, cst.IfExp):
            return self._choice(node, frame)
        if isinstance(
            node, cst.ListComp | cst.GeneratorExp | cst.SetComp | cst.DictComp
        ):
            return self._comprehension(node, frame)
        if isinstance(node, cst.Lambda):
            return Func(node, frame.key)
        if isinstance(node, cst.NamedExpr):
            value = self.value(node.value, frame)
            self._bind(node.target, value, frame)
            return value
        if isinstance(node, cst.Yield):
            if node.value is not None:
                inner = node.value
                if isinstance(inner, cst.From):
                    frame.yields += self.items(self.value(inner.item, frame), node)
                else:
                    frame.yields.append(self.value(inner, frame))
            return Fixed()
        if isinstance(node, cst.Await):
            return self.value(node.expression, frame)
        if isinstance(node, cst.FormattedString | cst.ConcatenatedString):
            for part in found(node, cst.FormattedStringExpression):
                self.value(part.expression, frame)
            return Fixed()
        return Fixed()

    def _elements(
        self, elements: Sequence[cst.BaseElement], frame: Frame
    ) -> Iterator[Value]:
        for element in elements:
            value = self.value(element.value, frame)
            if isinstance(element, cst.StarredElement):
                yield from self.items(value, element)
            else:
                yield value

    def _display(self, node: cst.Dict, frame: Frame) -> Value:
        parts: dict[str, Value] = {}
        for element in node.elements:
            value = self.value(element.value, frame)
            if isinstance(element, cst.DictElement):
                key = self.value(element.key, frame)
                name = key.value if isinstance(key, Fixed) else UNSET
                if isinstance(name, str):
                    parts[f"k:{name}"] = value
                    continue
            elif isinstance(value, Ref) and value.kind == "dict":
                parts |= self.state.get(value.key, {})
                continue
            parts["*"] = join(parts["*"], value, node) if "*" in parts else value
        return self._dict(parts, node, frame)

    def _operation(self, node: cst.BinaryOperation, frame: Frame) -> Value:
        a, b = self.value(node.left, frame), self.value(node.right, frame)
        if isinstance(node.operator, cst.MatrixMultiply):
            return tensors.product(a, b, node)
        if isinstance(a, Ref) or isinstance(b, Ref):
            parts = [self.items_of_ref(v) if isinstance(v, Ref) else v for v in (a, b)]
            if isinstance(node.operator, cst.Multiply):
                listed = parts[0] if isinstance(a, Ref) else parts[1]
                inner = joined(self.items(listed, node), node)
                return self._list(Iter(inner), node, frame)
            both = combined("+", parts[0], parts[1], node)
            return self._list(
                both if isinstance(both, Seq | Iter) else Iter(both), node, frame
            )
        return combined(_OPERATORS.get(type(node.operator), "?"), a, b, node)

    def _unary(self, node: cst.UnaryOperation, frame: Frame) -> Value:
        value = self.value(node.expression, frame)
        if isinstance(node.operator, cst.Not):
            known = truth_of(value)
            if known is not None:
                return Fixed(not known)
            return value if is_of_batch(value) else Fixed()
        if isinstance(node.operator, cst.Minus) and isinstance(value, Fixed):
            number = value.value
            if isinstance(number, int | float):
                return Fixed(-number, value.grad)
            return Fixed(grad=value.grad)
        if isinstance(node.operator, cst.BitInvert) and isinstance(value, Linear):
            return Bad(Why.NONLINEAR, node)
        return value

    def _comparison(self, node: cst.Comparison, frame: Frame) -> Value:
        left = self.value(node.left, frame)
        values = [left]
        out: list[bool | None] = []
        for part in node.comparisons:
            right = self.value(part.comparator, frame)
            out.append(_compared(part.operator, values[-1], right))
            values.append(right)
        if out and all(o is not None for o in out):
            return Fixed(all(out))
        if any(isinstance(p.operator, cst.Is | cst.IsNot) for p in node.comparisons):
            return Fixed()
        for value in values:
            if isinstance(value, Linear | Bad):
                return Bad(Why.DECIDED, node)
        rows = first_rows(values)
        if rows is not None:
            made = tensors.elementwise(
                [replace(v, degree=0) if isinstance(v, Rows) else v for v in values],
                node,
            )
            return replace(made, kind="bool") if isinstance(made, Rows) else made
        if any(isinstance(v, Item) for v in values):
            return Item()
        return Draw() if any(isinstance(v, Draw) for v in values) else Fixed()

    def _boolean(self, node: cst.BooleanOperation, frame: Frame) -> Value:
        left = self.value(node.left, frame)
        known = truth_of(left)
        is_and = isinstance(node.operator, cst.And)
        if known is not None:
            return left if known is not is_and else self.value(node.right, frame)
        right = self.value(node.right, frame)
        second = truth_of(right)
        if second is not None and second is not is_and and not is_of_batch(left):
            return (
                Fixed(second) if isinstance(right, Fixed) else join(left, right, node)
            )
        for value in (left, right):
            if is_of_batch(value):
                return value
        return join(left, right, node)

    def _choice(self, node: cst.IfExp, frame: Frame) -> Value:
        truth, why = self._test(node.test, frame)
        if truth is not None:
            return self.value(node.body if truth else node.orelse, frame)
        one, other = self.value(node.body, frame), self.value(node.orelse, frame)
        return self._either(one, other, node, why)

    def _comprehension(self, node: cst.BaseComp, frame: Frame) -> Value:
        inner = Frame(
            key=self.key("comp", frame.key, id(node)),
            scope=frame.scope,
            owner=frame.owner,
            parent=frame,
            receiver=frame.receiver,
        )
        samples = False
        part: cst.CompFor | None = node.for_in
        unrolled: list[Value] | None = None
        while part is not None:
            over = self.value(part.iter, inner)
            items, each = self._items_of(over, part)
            samples = samples or each
            simple = part is node.for_in and part.inner_for_in is None and not part.ifs
            if simple and len(items) > 1:
                unrolled = []
                for item in items:
                    self._bind(part.target, item, inner)
                    unrolled.append(self._result_of(node, inner))
                break
            self._bind(part.target, joined(items, part), inner)
            for test in part.ifs:
                self.value(test.test, inner)
            part = part.inner_for_in
        if isinstance(node, cst.DictComp):
            value = (
                joined(unrolled, node) if unrolled else self.value(node.value, inner)
            )
            self.state.pop(inner.key, None)
            return self._dict({"*": value}, node, frame)
        result: Value = (
            Seq(tuple(unrolled))
            if unrolled is not None
            else Iter(self._result_of(node, inner), samples)
        )
        self.state.pop(inner.key, None)
        if isinstance(node, cst.GeneratorExp):
            return result
        return self._list(result, node, frame)

    def _result_of(self, node: cst.BaseComp, frame: Frame) -> Value:
        if isinstance(node, cst.DictComp):
            return self.value(node.value, frame)
        return self.value(getattr(node, "elt", None), frame)

    # Elements

    def _index(self, node: cst.Subscript, frame: Frame) -> list[Value]:
        out: list[Value] = []
        for part in node.slice:
            inner = part.slice
            if isinstance(inner, cst.Index):
                value = self.value(inner.value, frame)
                if isinstance(value, Seq) and len(node.slice) == 1:
                    out += value.items
                else:
                    out.append(value)
            else:
                out.append(Fixed())
        return out

    def _element(self, node: cst.Subscript, frame: Frame) -> Value:
        on = self.value(node.value, frame)
        if isinstance(on, Alt):
            return joined([self._element_of(v, node, frame) for v in on.values], node)
        return self._element_of(on, node, frame)

    def _element_of(self, on: Value, node: cst.Subscript, frame: Frame) -> Value:
        first = node.slice[0].slice
        index = self._index(node, frame)
        number = index[0].value if index and isinstance(index[0], Fixed) else UNSET
        sliced = isinstance(first, cst.Slice)
        part = first if isinstance(first, cst.Slice) else None
        if isinstance(on, Ref):
            if on.kind == "dict":
                return self._value_of(on, number, node)
            if isinstance(on.kind, cst.ClassDef):
                method = self.method(on.kind, "__getitem__")
                if method is None:
                    return Fixed()
                given = (index[0] if index else Fixed(),)
                return self.call(self._bound(method, on), given, {}, node, frame)
            on = self.items_of_ref(on)
        if isinstance(on, Seq):
            if part is not None:
                return self._cut(on, part, frame)
            if isinstance(number, int) and -len(on.items) <= number < len(on.items):
                return on.items[int(number)]
            return joined(on.items, node)
        if isinstance(on, Iter):
            return on if sliced else on.item
        if isinstance(on, Shape):
            if sliced:
                return Iter(Fixed()) if not self._is_whole(first) else on
            return (
                tensors.size_of(on.of, int(number))
                if isinstance(number, int)
                else Fixed()
            )
        if isinstance(on, Rows):
            return self._rows_element(on, node, index, frame)
        if isinstance(on, Linear | Item | Bad | Draw):
            return on
        parts = [v for v in index if is_of_batch(v)]
        if parts:
            rows = first_rows(parts)
            if rows is not None:
                return replace(
                    rows,
                    raw=False,
                    whole=False,
                    kind="",
                    opaque=None,
                    axis=0,
                    ndim=None,
                )
            return parts[0]
        if isinstance(on, Made):
            return (
                Made(f"{on.name}[]", on.node, on.args, on.options)
                if is_of_batch(on)
                else Fixed()
            )
        return Fixed(grad=isinstance(on, Fixed) and on.grad)

    def _cut(self, on: Seq, part: cst.Slice, frame: Frame) -> Value:
        ends = []
        for end in (part.lower, part.upper, part.step):
            value = self.value(end, frame) if end is not None else NONE
            known = value.value if isinstance(value, Fixed) else UNSET
            if known is not None and not isinstance(known, int):
                return Iter(joined(on.items, part))
            ends.append(known)
        return Seq(on.items[slice(*ends)])

    def _is_whole(self, part: cst.BaseSlice) -> bool:
        return isinstance(part, cst.Slice) and (
            part.lower is None and part.upper is None and part.step is None
        )

    def _value_of(self, ref: Ref, name: object, node: cst.CSTNode) -> Value:
        known = self.state.get(ref.key, {})
        if isinstance(name, str) and f"k:{name}" in known:
            return known[f"k:{name}"]
        if isinstance(name, str) and "*" in known:
            return known["*"]
        return joined(known.values(), node) if known else Fixed()

    def _rows_element(
        self, on: Rows, node: cst.Subscript, index: list[Value], frame: Frame
    ) -> Value:
        """Return elements of a tensor of samples."""
        inner = node.slice[0].slice
        key = index[0] if index else Fixed()
        if (
            isinstance(inner, cst.Index)
            and len(node.slice) == 1
            and isinstance(inner.value, cst.BinaryOperation)
            and not isinstance(key, Rows | Item | Fixed | Bad)
        ):
            return replace(on, whole=False, ndim=None)
        if isinstance(key, Fixed) and isinstance(key.value, str):
            if key.value == "loss" and on.trusted:
                return Linear(0)
            return replace(on, whole=False)
        if on.whole and isinstance(key, Fixed) and isinstance(inner, cst.Index):
            return replace(on, whole=False)
        if (
            on.opaque is not None
            and len(node.slice) == 1
            and isinstance(inner, cst.Index)
        ) and isinstance(key, Fixed):
            return on
        parts: list[tuple[cst.BaseSlice, Value]] = []
        for part in node.slice:
            if isinstance(part.slice, cst.Index):
                value = self.value(part.slice.value, frame)
                several = value.items if isinstance(value, Seq) else (value,)
                parts += [(part.slice, v) for v in several]
            else:
                parts.append((part.slice, Fixed()))
        return self._indexed(on, parts, node, frame)

    def _indexed(
        self,
        on: Rows,
        parts: list[tuple[cst.BaseSlice, Value]],
        node: cst.Subscript,
        frame: Frame,
    ) -> Value:
        axis, ndim = on.axis, on.ndim
        place = new = 0
        out = replace(on, raw=False, whole=False, thin=False)
        found_rows = False
        kept: int | None = None
        for part, value in parts:
            dotdot = isinstance(part, cst.Index) and isinstance(
                part.value, cst.Ellipsis
            )
            if dotdot:
                if axis is not None and place <= axis and kept is None:
                    kept = new + axis - place if place <= axis else None
                place = 10**6
                continue
            if isinstance(part, cst.Index) and value == NONE:
                new += 1
                ndim = None if ndim is None else ndim + 1
                continue
            here = axis is not None and place == axis
            if isinstance(part, cst.Slice):
                if here:
                    kept = new
                    if not self._keeps(part, on, frame):
                        return Bad(Why.ACROSS, node)
                    if part.lower is not None or part.upper is not None:
                        out = replace(out, copies=1)
                new += 1
            elif isinstance(value, Rows) and isinstance(part, cst.Index):
                if (
                    value.kind == "order"
                    or value.kind == "bool"
                    or here
                    or axis is None
                ):
                    if not found_rows:
                        kept = new if here or kept is None else kept
                        new += 1
                    if (here and value.kind == "bool") or (
                        here and value.kind != "order"
                    ):
                        out = replace(out, even=False)
                    elif value.kind == "bool":
                        out = replace(out, even=False)
                        kept = 0
                found_rows = True
                if not value.even:
                    out = replace(out, even=False)
            elif isinstance(value, Item) and here:
                return Item(on.degree)
            elif here and isinstance(value, Fixed):
                listed = isinstance(part, cst.Index) and isinstance(
                    part.value, cst.List
                )
                if value.value is UNSET and not listed:
                    return Bad(Why.ACROSS, node)
                return Bad(Why.ACROSS, node)
            elif here:
                return Bad(Why.ACROSS, node)
            else:
                ndim = None if ndim is None else ndim - 1
            place += 1
        if axis is None:
            return replace(out, ndim=None, kind=on.kind)
        if kept is None:
            kept = new + axis - place if place <= axis else axis
        return replace(out, axis=max(kept, 0), ndim=ndim if not found_rows else None)

    def _keeps(self, part: cst.Slice, on: Rows, frame: Frame) -> bool:
        """Return whether a slice keeps all samples, or a group of all of them."""
        if part.step is not None:
            step = self.value(part.step, frame)
            if not (isinstance(step, Fixed) and step.value in (1, None)):
                return False
        for end in (part.lower, part.upper):
            if end is None:
                continue
            value = self.value(end, frame)
            if isinstance(value, Count) and value.exact:
                continue
            if on.copies > 1 and isinstance(value, Count):
                continue
            if on.copies > 1 and isinstance(value, Fixed) and value.value is UNSET:
                continue  # a batch size, which is listed
            if isinstance(value, Fixed) and value.value in (0, None):
                continue
            return False
        return True

    # Attributes

    def attribute(self, on: Value, name: str, node: cst.CSTNode) -> Value:
        """Return an attribute of a value."""
        if isinstance(on, Alt):
            return joined([self.attribute(v, name, node) for v in on.values], node)
        if isinstance(on, Lib):
            return Lib(f"{on.name}.{name}")
        if isinstance(on, Ref):
            return self._attribute_of(on, name, node)
        if isinstance(on, Class):
            known = self.get(self.key("class", id(on.node)), name)
            if known is not None:
                return known
            return self._class_attribute(on.node, name, None, node)
        if isinstance(on, Rows):
            if name in ("shape",):
                return Shape(on)
            if name in ("T", "mT", "H", "mH"):
                given = self._given(_as_call(node), (on,), {})
                return tensors.tensor_method(name, given) or on
            if name in ("device", "dtype", "grad", "requires_grad", "grad_fn"):
                return Fixed()
            if name.startswith("is_"):
                return Fixed()
            if name == "ndim":
                return Fixed() if on.ndim is None else Fixed(on.ndim)
            if name in ("data", "real", "imag"):
                return replace(on, kind="")
            if name == "loss" and on.trusted:
                return Linear(0)
            if on.raw or on.opaque is not None:
                return replace(on, whole=False)
            return Method(on, name)
        if isinstance(on, Linear):
            if name in ("device", "dtype", "grad", "shape", "requires_grad", "grad_fn"):
                return Fixed()
            return on if name in ("data", "T") else Method(on, name)
        if isinstance(on, Seq):
            if name in ("values", "indices") and len(on.items) == 2:
                return on.items[name == "indices"]
            return Method(on, name)
        if isinstance(on, Made):
            if name == "batch_size" and self._is_loader(on):
                return Count()
            if name in ("weight", "bias"):
                return Fixed(grad=True)
            if name in (
                "mean",
                "stddev",
                "loc",
                "scale",
                "probs",
                "logits",
                "variance",
                "mode",
            ) and (rows := first_rows([on])):
                return replace(rows, raw=False, whole=False)
            return Made(f"{on.name}.{name}", on.node, on.args, on.options)
        if isinstance(on, Item | Bad):
            return on
        if isinstance(on, Count) and name in ("shape", "device", "dtype"):
            return Fixed()
        return Fixed(
            grad=isinstance(on, Fixed)
            and on.grad
            and name not in ("shape", "device", "dtype", "grad")
        )

    def _attribute_of(self, ref: Ref, name: str, node: cst.CSTNode) -> Value:
        if isinstance(ref.kind, str):
            return Method(ref, name)
        known = self.get(ref.key, name)
        if known is not None:
            return known
        method = self.method(ref.kind, name)
        if method is not None:
            return self._bound(method, ref)
        if name == "training":
            return Fixed(value=True)
        return self._class_attribute(ref.kind, name, ref, node)

    def _bound(
        self, found_method: tuple[cst.FunctionDef, cst.ClassDef], ref: Value
    ) -> Value:
        method, owner = found_method
        marks = {dotted(d.decorator) for d in method.decorators}
        home = self._home_of(owner)
        if "staticmethod" in marks:
            return Func(method, home, None, owner)
        made = Func(method, home, ref, owner)
        if marks & {"property", "cached_property", "functools.cached_property"}:
            return self.call(made, (), {}, method, self.frames[1])
        return made

    def _home_of(self, kind: cst.ClassDef) -> int:
        return 1

    def _class_attribute(
        self, kind: cst.ClassDef, name: str, ref: Ref | None, node: cst.CSTNode
    ) -> Value:
        for owner in self.line_of(kind):
            for line in getattr(owner.body, "body", ()):
                if isinstance(line, cst.FunctionDef) and line.name.value == name:
                    return Func(line, 1, None, owner)
                for small in (
                    getattr(line, "body", ())
                    if isinstance(line, cst.SimpleStatementLine)
                    else ()
                ):
                    if isinstance(small, cst.Assign) and any(
                        dotted(t.target) == name for t in small.targets
                    ):
                        return self.value(small.value, self.frames[1])
                    if (
                        isinstance(small, cst.AnnAssign)
                        and dotted(small.target) == name
                        and small.value is not None
                    ):
                        return self.value(small.value, self.frames[1])
        if ref is not None:
            return Method(ref, name)
        return Fixed()

    def line_of(self, kind: cst.ClassDef) -> list[cst.ClassDef]:
        """Return a class and its bases in the script, in the order of look-ups."""
        out = [kind]
        for node in out:
            for base in node.bases:
                name = (dotted(base.value) or "").rpartition(".")[2]
                other = self._tree.classes.get(name)
                if other is not None and other not in out:
                    out.append(other)
        return out

    def method(
        self, kind: cst.ClassDef, name: str, after: cst.ClassDef | None = None
    ) -> tuple[cst.FunctionDef, cst.ClassDef] | None:
        """Return a method of a class, or of one of its bases ``after`` another."""
        line = self.line_of(kind)
        if after is not None and after in line:
            line = line[line.index(after) + 1 :]
        for owner in line:
            for node in getattr(owner.body, "body", ()):
                if isinstance(node, cst.FunctionDef) and node.name.value == name:
                    return node, owner
        return None

    def library_base(self, kind: cst.ClassDef) -> str:
        """Return the full name of the class of a library that a class is made from."""
        for owner in self.line_of(kind):
            for base in owner.bases:
                full = self._tree.full(base.value)
                if full is not None and full not in self._tree.classes:
                    return full
        return ""

    # Calls

    def _call(self, node: cst.Call, frame: Frame) -> Value:
        func = node.func
        if id(node) in self._backwards:
            return self._backward(node, frame)
        if isinstance(func, cst.Attribute) and self._tree.called(func.value) == "super":
            return self._super(node, func.attr.value, frame)
        args, options = self._arguments(node, frame)
        if isinstance(func, cst.Attribute):
            on = self.value(func.value, frame)
            return self._method_call(on, func.attr.value, args, options, node, frame)
        return self.call(self.value(func, frame), args, options, node, frame)

    def _arguments(
        self, node: cst.Call, frame: Frame
    ) -> tuple[tuple[Value, ...], dict[str, Value]]:
        args: list[Value] = []
        options: dict[str, Value] = {}
        for given in node.args:
            value = self.value(given.value, frame)
            if given.keyword is not None:
                options[given.keyword.value] = value
            elif given.star == "*":
                if isinstance(value, Iter) or (
                    isinstance(value, Ref)
                    and isinstance(self.items_of_ref(value), Iter)
                ):
                    args.append(
                        Iter(
                            self.items(value, node)[0],
                            samples=self._items_of(value, node)[1],
                        )
                    )
                    options.setdefault("*", Fixed())
                elif isinstance(value, Shape):
                    args.append(value)
                else:
                    args += self.items(value, node)
            elif given.star == "**":
                if isinstance(value, Ref) and value.kind == "dict":
                    for name, part in self.state.get(value.key, {}).items():
                        options[name.removeprefix("k:")] = part
                else:
                    options["**"] = value
            else:
                args.append(value)
        return tuple(args), options

    def _backward(self, node: cst.Call, frame: Frame) -> Value:
        loss_node = None
        try:
            loss_node = self._job.differentiated(node)
        except Exception:  # noqa: BLE001 - refused elsewhere
            return Fixed()
        value = self.value(loss_node, frame) if loss_node is not None else Fixed()
        if not (
            isinstance(node.func, cst.Attribute)
            and self._tree.called(node) == "torch.autograd.backward"
        ):
            args, options = self._arguments(node, frame)
            weights = options.get("gradient", args[0] if args else NONE)
            if isinstance(value, Rows) and weights != NONE:
                total = Linear(value.degree + 1)
                if isinstance(weights, Rows):
                    value = replace(total, degree=total.degree + weights.degree)
                else:
                    value = combined("*", total, weights, node)
            if isinstance(value, Ref | Made) and args:
                for given in args:  # optimizer.backward(loss), fabric.backward(loss)
                    if is_of_batch(given):
                        value = given
        old = self.losses.get(id(node))
        self.losses[id(node)] = value if old is None else join(old, value, node)
        return NONE

    def _super(self, node: cst.Call, name: str, frame: Frame) -> Value:
        args, options = self._arguments(node, frame)
        here: Frame | None = frame
        while here is not None and here.receiver is None:
            here = here.parent
        if here is None or not isinstance(here.receiver, Ref):
            return Fixed()
        ref = here.receiver
        if not isinstance(ref.kind, cst.ClassDef):
            return Fixed()
        method = self.method(ref.kind, name, after=here.owner)
        if method is not None:
            return self.call(self._bound(method, ref), args, options, node, frame)
        base = self.library_base(ref.kind)
        if name == "__init__":
            made = Made(base, node, args, tuple(options.items()))
            self.set(ref.key, "__made__", made)
            return NONE
        if name in ("forward", "__call__"):
            known = self.get(ref.key, "__made__")
            made = known if isinstance(known, Made) else Made(base, node)
            given = self._given(node, args, options)
            return tensors.module(made, given, trusted=self.trusted)
        return self._unknown(node, [*args, *options.values()])

    def call(
        self,
        func: Value,
        args: tuple[Value, ...],
        options: Mapping[str, Value],
        node: cst.CSTNode,
        frame: Frame,
    ) -> Value:
        """Return the value of a call."""
        if isinstance(func, Alt):
            return joined(
                [self.call(f, args, options, node, frame) for f in func.values], node
            )
        if isinstance(func, Func):
            return self._enter(func, args, options, node, frame)
        if isinstance(func, Class):
            return self._object(func, node, args, options, frame)
        if isinstance(func, Ref) and isinstance(func.kind, cst.ClassDef):
            return self._object_call(func, args, options, node, frame)
        call = _as_call(node)
        given = self._given(call, args, options)
        if isinstance(func, Method):
            return self._method_call(func.of, func.name, args, options, node, frame)
        if isinstance(func, Lib):
            return self._library_call(func.name, given, frame)
        if isinstance(func, Made):
            return self._made_call(func, given, frame)
        if isinstance(func, Bad):
            return func
        return self._unknown(call, given.all)

    def _unknown(self, node: cst.CSTNode, values: list[Value]) -> Value:
        """Return what a call returns that cannot be read."""
        values = [self.items_of_ref(v) if isinstance(v, Ref) else v for v in values]
        if (bad := first_bad(values)) is not None:
            return bad
        rows = first_rows(values)
        if rows is not None:
            if rows.shifted is not None:
                return Bad(Why.UNREAD, node)
            axis = 0 if rows.axis is None else rows.axis
            return Rows(
                axis=axis, opaque=node, trusted=self.trusted, copies=rows.copies
            )
        for value in tensors.with_elements(values):
            if isinstance(value, Linear):
                return Bad(Why.UNREAD, node)
            if isinstance(value, Item):
                return value
        return Draw() if any(isinstance(v, Draw) for v in values) else Fixed()

    def _made_call(self, made: Made, given: Given, frame: Frame) -> Value:
        if made.name == "functools.partial" and made.args:
            options = {**dict(made.options), **given.options}
            args = (*made.args[1:], *given.args)
            return self.call(made.args[0], args, options, given.node, frame)
        if made.name.endswith("nn.Sequential") and self._is_chain(made):
            value: Value = given.args[0] if given.args else Fixed()
            for part in made.args:
                value = self.call(part, (value,), {}, given.node, frame)
            return value
        whole = {
            name: self.items_of_ref(v) if isinstance(v, Ref) else v
            for name, v in given.options.items()
        }
        args = tuple(
            self.items_of_ref(v) if isinstance(v, Ref) else v for v in given.args
        )
        given = replace(given, args=args, options=whole)
        if made.name.startswith("torch.") and not made.name.startswith("torch.nn."):
            known = tensors.function(made.name, given)
            if known is not None:
                return known
        return tensors.module(made, given, trusted=self.trusted)

    def _is_chain(self, made: Made) -> bool:
        return bool(made.args) and all(
            isinstance(a, Made | Func)
            or (isinstance(a, Ref) and isinstance(a.kind, cst.ClassDef))
            for a in made.args
        )

    def _library_call(self, full: str, given: Given, frame: Frame) -> Value:
        node = given.node
        last_given = given.args[-1] if given.args else None
        if "*" in given.options and isinstance(last_given, Iter) and full != "zip":
            item = last_given.item
            rest = {k: v for k, v in given.options.items() if k != "*"}
            given = replace(given, args=(*given.args[:-1], item, item), options=rest)
        if full in library.BUILTINS:
            return self._builtin(full, given, frame)
        if full in WRAPPERS or full.rpartition(".")[2] in (
            "tqdm",
            "track",
            "alive_it",
            "trange",
        ):
            return given.args[0] if given.args else Iter(Fixed())
        if full in WRAPPING or full in library.SAME:
            return given.args[0] if given.args else Fixed()
        last = full.rpartition(".")[2]
        if full.startswith("torch.") and last in ("ModuleList", "ParameterList"):
            listed = given.args[0] if given.args else Seq(())
            items = self.items_of_ref(listed) if isinstance(listed, Ref) else listed
            return self._list(
                items if isinstance(items, Seq | Iter) else Iter(Fixed()), node, frame
            )
        if full.startswith("torch.") and last == "ModuleDict":
            return (
                given.args[0]
                if given.args and isinstance(given.args[0], Ref)
                else self._dict({}, node, frame)
            )
        if last in ("Parameter", "UninitializedParameter"):
            return Fixed(grad=True)
        if last == "deepcopy" or full == "copy.copy":
            return given.args[0] if given.args else Fixed()
        if last == "data_parallel" and len(given.args) > 1:
            return self.call(given.args[0], given.args[1:2], {}, node, frame)
        if last in ("checkpoint", "maybe_checkpoint") and given.args:
            rest = {
                k: v
                for k, v in given.options.items()
                if k not in ("use_reentrant", "preserve_rng_state")
            }
            return self.call(given.args[0], given.args[1:], rest, node, frame)
        if full.startswith(("random.", "numpy.random.")):
            rows = first_rows(given.all)
            return rows if rows is not None else tensors.numpy_drawn(given)
        if full in (
            "collections.defaultdict",
            "collections.OrderedDict",
            "collections.Counter",
        ):
            return self._dict({}, node, frame)
        if full in ("math.prod", "numpy.prod") and any(
            isinstance(v, Shape) for v in given.args
        ):
            return Count(exact=False)
        values = tuple(
            self.items_of_ref(v)
            if isinstance(v, Ref) and isinstance(v.kind, str)
            else v
            for v in given.args
        )
        options = {
            k: self.items_of_ref(v)
            if isinstance(v, Ref) and isinstance(v.kind, str)
            else v
            for k, v in given.options.items()
        }
        plain = replace(given, args=values, options=options)
        known = tensors.function(full, plain)
        if known is not None:
            return known
        of_torch = full.startswith(("torch.", "torchvision.")) and last[:1].isupper()
        if of_torch or not is_of_batch(Seq(tuple(plain.all))):
            kept = values if "Sequential" not in last else given.args
            return Made(full, node, kept, tuple(given.options.items()))
        if full.startswith("math."):
            return tensors.elementwise(values, node)
        if full.startswith("torch.") and not full.startswith("torch.nn.utils"):
            bad = first_bad(plain.all)
            if bad is None and any(
                isinstance(v, Linear | Rows) for v in tensors.with_elements(plain.all)
            ):
                return Bad(Why.UNREAD, node)
        if full.startswith(("torchvision.", "timm.", "kornia.")):
            rows = first_rows(plain.all)
            if rows is not None:
                return replace(rows, raw=False, whole=False, kind="")
        return self._unknown(node, plain.all)

    def _builtin(self, name: str, given: Given, frame: Frame) -> Value:
        node = given.node
        args = given.args
        first: Value = args[0] if args else Fixed()
        if name == "print":
            return NONE
        if name == "len":
            return self._length(first, node)
        if name in ("range",):
            counted = next((v for v in args if isinstance(v, Count)), None)
            return Iter(Item(), samples=True) if counted is not None else Iter(Fixed())
        if name == "enumerate":
            items, samples = self._items_of(
                first, _loop_of(node, self._tree.parent(node))
            )
            if len(items) > 1:
                return Seq(tuple(Seq((Fixed(i), v)) for i, v in enumerate(items)))
            index: Value = Item() if samples else Fixed()
            return Iter(Seq((index, joined(items, node))), samples)
        if name == "zip":
            if "*" in given.options and len(args) == 1:
                inner = args[0]
                if isinstance(inner, Iter):
                    items = (
                        self.items(inner.item, node)
                        if not isinstance(inner.item, Item)
                        else [inner.item]
                    )
                    return Iter(Iter(joined(items, node), inner.samples))
            parts = [
                self._items_of(v, _loop_of(node, self._tree.parent(node))) for v in args
            ]
            lengths = {len(items) for items, _ in parts}
            if lengths and len(lengths) == 1 and max(lengths) > 1:
                rows = zip(*(items for items, _ in parts), strict=True)
                return Seq(tuple(Seq(r) for r in rows))
            samples = any(s for _, s in parts)
            return Iter(Seq(tuple(joined(items, node) for items, _ in parts)), samples)
        if name == "sum":
            return self._sum(first, args, node)
        if name in ("max", "min"):
            values = list(args)
            if len(values) == 1:
                values = (
                    self.items(first, node)
                    if isinstance(first, Seq | Iter | Ref)
                    else [first]
                )
            if any(isinstance(v, Linear) for v in values):
                return Bad(Why.NONLINEAR, node)
            if isinstance(first, Rows) and len(args) == 1:
                return Bad(Why.DECIDED, node)
            return tensors.elementwise([*values, Fixed()], node)
        if name in ("float", "int", "abs", "round", "bool", "complex", "pow"):
            if isinstance(first, Count) and name in ("float", "int"):
                return first
            if name == "float":
                return self._number(first, node)
            if (
                isinstance(first, Fixed)
                and name == "int"
                and isinstance(first.value, int)
            ):
                return first
            return tensors.elementwise(args, node)
        if name in ("list", "tuple", "sorted", "set", "reversed", "iter", "frozenset"):
            items, samples = self._items_of(first, node) if args else ([], False)
            if isinstance(first, Rows) and first.opaque is not None:
                return first
            if isinstance(first, Rows) and first.whole:
                return first
            made: Value = (
                Seq(tuple(items))
                if not args or len(items) > 1
                else Iter(items[0], samples)
            )
            if isinstance(first, Seq) and name in ("list", "tuple", "iter"):
                made = first
            if isinstance(first, Ref) and first.kind == "list" and name != "set":
                made = self.items_of_ref(first)
            if name in ("list", "set", "sorted"):
                return self._list(made, node, frame)
            return made
        if name == "next":
            return self.items(first, node)[0] if args else Fixed()
        if name in ("map", "filter"):
            items, samples = self._items_of(args[1] if len(args) > 1 else NONE, node)
            inner = joined(items, node)
            if name == "filter":
                return Iter(inner, samples)
            return Iter(self.call(first, (inner,), {}, node, frame), samples)
        if name == "getattr" and len(args) > 1:
            named = args[1]
            if isinstance(named, Fixed) and isinstance(named.value, str):
                return self.attribute(first, named.value, node)
            return Fixed()
        if name == "setattr" and len(args) > 2:
            named = args[1]
            if (
                isinstance(first, Ref)
                and isinstance(named, Fixed)
                and isinstance(named.value, str)
            ):
                self.set(first.key, named.value, args[2])
            return NONE
        if name == "dict":
            known = {
                f"k:{k}": v for k, v in given.options.items() if k not in ("**", "*")
            }
            if isinstance(first, Ref) and first.kind == "dict":
                known = {**self.state.get(first.key, {}), **known}
            elif args:
                if isinstance(first, Rows):
                    return first
                known["*"] = joined(self.items(first, node), node)
            return self._dict(known, node, frame)
        if name in ("isinstance", "hasattr", "callable", "issubclass", "type", "id"):
            return Fixed()
        if name in ("any", "all"):
            return first if is_of_batch(first) else Fixed()
        return Fixed()

    def _length(self, value: Value, node: cst.CSTNode) -> Value:
        if isinstance(value, Ref):
            value = self.items_of_ref(value)
        if isinstance(value, Rows):
            if value.whole or value.axis not in (0, None):
                return (
                    Fixed()
                    if value.whole and not value.raw
                    else Count()
                    if value.raw
                    else Fixed()
                )
            return Count() if value.even and value.copies == 1 else Count(exact=False)
        if isinstance(value, Iter) and value.samples:
            return Count()
        if isinstance(value, Seq):
            return Fixed(len(value.items))
        return Fixed()

    def _sum(self, first: Value, args: tuple[Value, ...], node: cst.CSTNode) -> Value:
        if isinstance(first, Rows) and first.opaque is None and not first.raw:
            return Linear(first.degree + 1) if first.axis == 0 else first
        items, samples = self._items_of(first, node)
        out: Value = args[1] if len(args) > 1 else Fixed(0)
        for item in items:
            out = combined("+", out, item, node)
        if isinstance(first, Ref) and first.kind == "dict":
            out = self.items_of_ref(first)
            out = out.item if isinstance(out, Iter) else out
        if isinstance(out, Item):
            return Linear(out.degree + 1)
        if samples and isinstance(out, Linear):
            return Bad(Why.UNREAD, node)
        return out

    def _number(self, value: Value, node: cst.CSTNode) -> Value:
        """Return the number in a tensor, which is reduced over ranks in a step."""
        if isinstance(value, Linear | Rows | Bad):
            around = (id(a) for a in self._tree.ancestors(node))
            if any(a in self._reduced for a in around):
                return Fixed()
        return value

    def _method_call(
        self,
        on: Value,
        name: str,
        args: tuple[Value, ...],
        options: Mapping[str, Value],
        node: cst.CSTNode,
        frame: Frame,
    ) -> Value:
        if isinstance(on, Alt):
            return joined(
                [
                    self._method_call(v, name, args, options, node, frame)
                    for v in on.values
                ],
                node,
            )
        if isinstance(on, Lib):
            if on.name == "super":
                return Fixed()
            return self.call(Lib(f"{on.name}.{name}"), args, options, node, frame)
        call = _as_call(node)
        given = self._given(call, args, options)
        if isinstance(on, Ref):
            if isinstance(on.kind, cst.ClassDef):
                return self._object_method(on, name, given, frame)
            return self._container_method(on, name, given, frame)
        if isinstance(on, Class):
            func = self.attribute(on, name, node)
            if func == Fixed() and name == "apply":
                method = self.method(on.node, "forward")
                if method is not None:
                    return self.call(
                        Func(method[0], 1, Fixed(), method[1]),
                        args,
                        options,
                        node,
                        frame,
                    )
            if isinstance(func, Func) and "classmethod" in {
                dotted(d.decorator) for d in getattr(func.node, "decorators", ())
            }:
                func = replace(func, receiver=on)
            return self.call(func, args, options, node, frame)
        if isinstance(on, Made):
            return self._made_method(on, name, given, frame)
        if isinstance(on, Seq | Iter):
            if name in ("items", "values", "keys"):
                return on
            if name in ("to", "cuda", "view", "float"):
                return on
            if isinstance(on, Iter) and name in ("append", "extend"):
                return NONE
            known = tensors.tensor_method(name, replace(given, args=(on, *args)))
            return known if known is not None else on
        if isinstance(on, Rows) and (on.raw or on.opaque is not None):
            if name == "items":
                return Iter(Seq((Fixed(), replace(on, whole=False))))
            if name in ("values", "get", "pop"):
                part = replace(on, whole=False)
                return Iter(part) if name == "values" else part
            if name in ("keys",):
                return Iter(Fixed())
        if isinstance(on, Func):
            return self._unknown(node, list(args))
        if isinstance(on, Shape):
            return Count(exact=False) if name == "numel" else Fixed()
        if name == "item":
            return self._number(on, node)
        if name in ("tolist", "numpy") and isinstance(on, Rows):
            return on
        values = tuple(self.items_of_ref(v) if isinstance(v, Ref) else v for v in args)
        opts = {
            k: self.items_of_ref(v) if isinstance(v, Ref) else v
            for k, v in options.items()
        }
        if name == "apply_" or (name == "apply" and args):
            return self._unknown(node, [on, *args[1:]])
        whole = replace(given, args=(on, *values), options=opts)
        if (
            isinstance(on, Fixed)
            and on.value is UNSET
            and is_of_batch(Seq(tuple(whole.all[1:])))
        ):
            if name in library.PASSING:
                return next((v for v in values if is_of_batch(v)), Fixed())
            if name not in library.TENSOR_NAMES:
                return self._unknown(node, whole.all)
        known = tensors.tensor_method(name, whole)
        if known is not None:
            if (
                name.endswith("_")
                and not name.startswith("_")
                and isinstance(call.func, cst.Attribute)
            ):
                self._bind_again(call.func.value, known, frame)
            return known
        if isinstance(on, Rows) and not on.raw and on.opaque is None:
            return Bad(Why.UNREAD, node)
        return self._unknown(node, whole.all)

    def _made_method(self, on: Made, name: str, given: Given, frame: Frame) -> Value:
        if name in SAME_OBJECT or name in ("compile", "requires_grad_", "manual_seed"):
            return on
        if name in (
            "parameters",
            "named_parameters",
            "modules",
            "named_modules",
            "state_dict",
        ):
            return (
                Iter(Fixed(grad=True))
                if name == "parameters"
                else Iter(Seq((Fixed(), Fixed(grad=True))))
            )
        if name in library.PASSING:
            return next((v for v in given.all if is_of_batch(v)), Fixed())
        own = first_rows([on])
        if own is not None and on.name.startswith(("torch.distributions", "torch.nn")):
            return tensors.elementwise([own, *given.all], given.node)
        if self._is_loader(on):
            return self._batch_of(on) if name in ("next", "__next__") else Fixed()
        if on.name.startswith("torch.distributions") and name in ("sample", "rsample"):
            return (
                tensors.function(
                    "torch.randn", replace(given, args=given.args or (Fixed(1),))
                )
                or Fixed()
            )
        if on.name.startswith("torch.distributions"):
            return tensors.elementwise(given.all, given.node)
        values = [self.items_of_ref(v) if isinstance(v, Ref) else v for v in given.all]
        if not is_of_batch(Seq(tuple(values))):
            if first_rows([on]) is None:
                return Made(
                    f"{on.name}.{name}",
                    given.node,
                    given.args,
                    tuple(given.options.items()),
                )
            return Fixed(grad=True)
        if (bad := first_bad(values)) is not None:
            return bad
        if on.name.startswith(tensors.TRUSTED):
            return Rows(opaque=given.node, trusted=True)
        return self._unknown(given.node, values)

    def _container_method(
        self, on: Ref, name: str, given: Given, frame: Frame
    ) -> Value:
        node, args = given.node, given.args
        first: Value = args[0] if args else Fixed()
        if on.kind == "list":
            if name in ("append", "add", "insert", "appendleft"):
                self._extend(on, [args[-1]] if args else [], node)
                return NONE
            if name in ("extend", "update"):
                self._extend(on, self.items(first, node), node)
                return NONE
            if name in ("clear",):
                self.set(on.key, "items", Seq(()))
                return NONE
            if name in ("pop", "popleft"):
                return joined(self.items(on, node), node)
            if name in SAME_OBJECT:
                return on
            if name in ("parameters",):
                return Iter(Fixed(grad=True))
            if name in ("copy", "reverse", "sort"):
                return on
            return Fixed()
        inside = self.state.get(on.key, {})
        few = 0 < len(inside) <= _UNROLLED and "*" not in inside
        if name == "values":
            return Seq(tuple(inside.values())) if few else self.items_of_ref(on)
        if name == "items":
            if few:
                pairs = ((k.removeprefix("k:"), v) for k, v in inside.items())
                return Seq(tuple(Seq((Fixed(k), v)) for k, v in pairs))
            each = self.items_of_ref(on)
            value = each.item if isinstance(each, Iter) else Fixed()
            return Iter(Seq((Fixed(), value)))
        if name in ("get", "pop", "setdefault"):
            key = first.value if isinstance(first, Fixed) else UNSET
            return self._value_of(on, key, node)
        if name == "update":
            if isinstance(first, Ref) and first.kind == "dict":
                for key_, value in self.state.get(first.key, {}).items():
                    self.set(on.key, key_, value)
            for key_, value in given.options.items():
                self.set(on.key, f"k:{key_}", value)
            return NONE
        if name in SAME_OBJECT or name == "copy":
            return on
        return Fixed()

    # Objects and functions of the script

    def _object(
        self,
        made: Class,
        node: cst.CSTNode,
        args: tuple[Value, ...],
        options: Mapping[str, Value],
        frame: Frame,
        *,
        strict: bool = True,
    ) -> Value:
        kind = made.node
        ref = Ref(self.key("object", frame.key, id(node), id(kind)), kind)
        self.state[ref.key] = {}
        base = self.library_base(kind)
        if (
            base.startswith(("torch.nn.", "torch.optim"))
            and base.rpartition(".")[2] != "Module"
        ):
            self.set(ref.key, "__made__", Made(base, _as_call(node)))
        method = self.method(kind, "__init__")
        if method is not None:
            if not strict:
                names = self._names(method[0])[1:]
                options = {name: Fixed() for name in names}
            self.call(Func(method[0], 1, ref, method[1]), args, options, node, frame)
        else:
            fields = [
                dotted(small.target) or ""
                for line in getattr(kind.body, "body", ())
                if isinstance(line, cst.SimpleStatementLine)
                for small in line.body
                if isinstance(small, cst.AnnAssign)
            ]
            for name, value in [*zip(fields, args, strict=False), *options.items()]:
                self.set(ref.key, name, value)
        return ref

    def _object_call(
        self,
        ref: Ref,
        args: tuple[Value, ...],
        options: Mapping[str, Value],
        node: cst.CSTNode,
        frame: Frame,
    ) -> Value:
        if not isinstance(ref.kind, cst.ClassDef):
            return Fixed()
        for name in ("__call__", "forward"):
            method = self.method(ref.kind, name)
            if method is not None:
                return self.call(self._bound(method, ref), args, options, node, frame)
        made = self.get(ref.key, "__made__")
        if not isinstance(made, Made):
            made = Made(self.library_base(ref.kind), _as_call(node))
        given = self._given(_as_call(node), args, options)
        return self._made_call(made, given, frame)

    def _object_method(self, ref: Ref, name: str, given: Given, frame: Frame) -> Value:
        node, args = given.node, given.args
        value = self._attribute_of(ref, name, node)
        if isinstance(value, Method) and value.of == ref:
            if name in SAME_OBJECT:
                return ref
            if name in ("parameters", "buffers"):
                return Iter(Fixed(grad=True))
            if name in ("named_parameters", "named_modules", "named_children"):
                return Iter(Seq((Fixed(), Fixed(grad=True))))
            if name in (
                "register_buffer",
                "register_parameter",
                "add_module",
                "register_module",
            ):
                if (
                    len(args) > 1
                    and isinstance(args[0], Fixed)
                    and isinstance(args[0].value, str)
                ):
                    inner = args[1]
                    if isinstance(inner, Linear | Rows):
                        inner = Fixed()
                    self.set(ref.key, args[0].value, inner)
                return NONE
            if name in ("children", "modules"):
                return Iter(Fixed(grad=True))
            return self._unknown(node, given.all)
        return self.call(value, args, given.options, node, frame)

    def _names(self, function: cst.FunctionDef | cst.Lambda) -> list[str]:
        of = function.params
        return [
            p.name.value for p in (*of.posonly_params, *of.params, *of.kwonly_params)
        ]

    def _enter(
        self,
        func: Func,
        args: tuple[Value, ...],
        options: Mapping[str, Value],
        node: cst.CSTNode,
        caller: Frame,
    ) -> Value:
        """Run a function of the script, and return what it returns."""
        function = func.node
        if self._depth >= _DEEPEST or self._active.count(function) > 1:
            return self._unknown(node, [*args, *options.values()])
        home = self.frames.get(func.home) or self.frames[1]
        key = self.key("call", caller.key, id(node), id(function))
        frame = Frame(
            key=key,
            scope=function,
            owner=func.owner,
            parent=home,
            receiver=func.receiver if func.receiver is not None else home.receiver,
        )
        self.frames[key] = frame
        self.state[key] = {}
        self._parameters(func, args, options, frame, home)
        self._depth += 1
        self._active.append(function)
        loops, self._loops = self._loops, []
        try:
            if isinstance(function, cst.Lambda):
                return self.value(function.body, frame)
            falls = self._block(function.body, frame)
        finally:
            self._depth -= 1
            self._active.pop()
            self._loops = loops
        if self._yields(function):
            return Iter(joined(frame.yields, function))
        if falls and frame.returns:
            frame.returns.append(NONE)
        out: Value | None = None
        for value in frame.returns:
            if out is None:
                out = value
            else:
                out = self._either(out, value, function, frame.returned)
        if not self._nests(function):
            self.state.pop(key, None)
        return NONE if out is None else out

    def _yields(self, function: cst.FunctionDef) -> bool:
        known = self._yielding.get(id(function))
        if known is None:
            known = any(
                self._tree.function(y) is function
                for y in found(function.body, cst.Yield)
            )
            self._yielding[id(function)] = known
        return known

    def _nests(self, function: cst.FunctionDef) -> bool:
        """Return whether a function contains others, which read its variables."""
        known = self._nested.get(id(function))
        if known is None:
            known = any(
                True for _ in found(function.body, (cst.FunctionDef, cst.Lambda))
            )
            self._nested[id(function)] = known
        return known

    def _parameters(
        self,
        func: Func,
        args: tuple[Value, ...],
        options: Mapping[str, Value],
        frame: Frame,
        home: Frame,
    ) -> None:
        of = func.node.params
        plain = [*of.posonly_params, *of.params]
        given = list(args)
        if func.receiver is not None:
            given.insert(0, func.receiver)
        rest = given[len(plain) :]
        spread = options.get("*") is not None
        for place, param in enumerate(plain):
            name = param.name.value
            if place < len(given):
                self.set(frame.key, name, given[place])
            elif name in options:
                self.set(frame.key, name, options[name])
            elif spread and isinstance(given[-1] if given else None, Iter):
                self.set(frame.key, name, given[-1].item)  # type: ignore[union-attr]
            elif "**" in options:
                self.set(frame.key, name, options["**"])
            elif param.default is not None:
                self.set(frame.key, name, self.value(param.default, home))
            else:
                self.set(frame.key, name, Fixed())
        if (
            spread
            and given
            and isinstance(given[-1], Iter)
            and len(given) <= len(plain)
        ):
            self.set(frame.key, plain[len(given) - 1].name.value, given[-1].item)
        for param in of.kwonly_params:
            name = param.name.value
            value = options.get(name)
            if value is None:
                value = self.value(param.default, home) if param.default else Fixed()
            self.set(frame.key, name, value)
        if isinstance(of.star_arg, cst.Param):
            self.set(frame.key, of.star_arg.name.value, Seq(tuple(rest)))
        if of.star_kwarg is not None:
            names = {p.name.value for p in (*plain, *of.kwonly_params)}
            more = {f"k:{k}": v for k, v in options.items() if k not in names}
            if "k:**" in more:
                more["*"] = more.pop("k:**")
            more.pop("k:*", None)
            ref = self._dict(more, of.star_kwarg, frame)
            self.set(frame.key, of.star_kwarg.name.value, ref)


def truth_of(value: Value) -> bool | None:
    """Return whether a value is true, if that is certain."""
    if isinstance(value, Fixed):
        return None if value.value is UNSET else bool(value.value)
    if isinstance(value, Func | Class | Made | Lib):
        return True if not isinstance(value, Lib | Made) else None
    if isinstance(value, Ref) and isinstance(value.kind, cst.ClassDef):
        return True
    if isinstance(value, Seq):
        return bool(value.items)
    return None


def _compared(operator: cst.BaseCompOp, a: Value, b: Value) -> bool | None:
    """Return the result of a comparison, if it is certain."""
    if isinstance(operator, cst.Is | cst.IsNot | cst.Equal | cst.NotEqual):
        equal: bool | None = None
        x = a.value if isinstance(a, Fixed) else UNSET
        y = b.value if isinstance(b, Fixed) else UNSET
        if x is not UNSET and y is not UNSET:
            equal = x == y
        elif NONE in (a, b):
            other = b if a == NONE else a
            if not isinstance(other, Fixed | Alt | Made | Lib | Method):
                equal = False
        if equal is None:
            return None
        return equal if isinstance(operator, cst.Is | cst.Equal) else not equal
    if not isinstance(a, Fixed) or a.value is UNSET:
        return None
    if isinstance(operator, cst.In | cst.NotIn):
        if isinstance(b, Seq) and all(
            isinstance(i, Fixed) and i.value is not UNSET for i in b.items
        ):
            inside = any(isinstance(i, Fixed) and i.value == a.value for i in b.items)
            return inside if isinstance(operator, cst.In) else not inside
        return None
    if not isinstance(b, Fixed) or b.value is UNSET:
        return None
    x, y = a.value, b.value
    if not isinstance(x, int | float) or not isinstance(y, int | float):
        return None
    if isinstance(operator, cst.GreaterThan):
        return x > y
    if isinstance(operator, cst.GreaterThanEqual):
        return x >= y
    if isinstance(operator, cst.LessThan):
        return x < y
    return x <= y if isinstance(operator, cst.LessThanEqual) else None


_ANY_CALL = cst.Call(func=cst.Name("call"))


def _as_call(node: cst.CSTNode) -> cst.Call:
    return node if isinstance(node, cst.Call) else _ANY_CALL


def _loop_of(node: cst.CSTNode, above: cst.CSTNode | None) -> cst.CSTNode:
    """Return the loop whose iterable a call is, else the call."""
    return above if isinstance(above, cst.For) else node
