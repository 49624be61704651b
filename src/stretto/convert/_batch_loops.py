"""Find the loops over batches, and the loaders that the batches come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._comprehensions import TrainingComprehension
from stretto.convert._containers import Containers, element_of, literal
from stretto.convert._flow import Origin
from stretto.convert._step_calls import StepCalls
from stretto.convert._tree import Scope, dotted, found, stored_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.convert._flow import ScriptFlow
    from stretto.convert._tree import ScriptTree
    from stretto.errors import SpecError

_COUNTERS = ("range", "trange", "tqdm.trange", "tqdm.auto.trange", "itertools.count")

_WAYS = 2000
"""Functions after which each is followed once, whatever its callers pass."""

_SEVERAL = ("zip", "itertools.zip_longest", "itertools.chain")
"""Calls that pass on the batches of all their arguments."""

WRAPPERS = (
    "enumerate",
    "iter",
    "reversed",
    "itertools.islice",
    "tqdm",
    "tqdm.tqdm",
    "tqdm.auto.tqdm",
    "tqdm.notebook.tqdm",
    "tqdm.rich.tqdm",
    "rich.progress.track",
    "itertools.cycle",
    "alive_it",
    "cycle",
    *_SEVERAL,
)
"""Calls that pass on the batches of their arguments."""


@dataclass(slots=True, kw_only=True)
class BatchLoop:
    """A loop over batches of a loader."""

    node: cst.For | cst.While
    scope: Scope
    loaders: list[tuple[cst.BaseExpression, Scope]]
    """The loaders, as they are named where the loop, or its iterator, is created."""
    origins: list[Origin] = field(default_factory=list)
    anchor: cst.CSTNode | None = None
    """The statement before which an epoch begins."""


@final
class BatchLoops:
    """The loops of a script that may take batches of a loader.

    Args:
        tree: The script.
        flow: Its assignments and calls.
        backwards: The calls of ``backward``.
        refuse: Returns an error that names a node's line.
    """

    def __init__(
        self,
        tree: ScriptTree,
        flow: ScriptFlow,
        backwards: list[cst.Call],
        refuse: Callable[[cst.CSTNode, str], SpecError],
    ) -> None:
        self._tree, self._flow = tree, flow
        self._backwards, self._refuse = backwards, refuse
        self.steps = StepCalls(tree, flow)
        self._containers = Containers(tree, flow, self._may_be_loader)
        self.idle: set[cst.Call] = set()
        """Calls of functions that contain a ``backward`` and do not run it."""
        self._active: set[cst.Call] = set()
        self._ends: list[cst.CSTNode] = []
        """Calls of the module, in no loop over batches, that reach a ``backward``."""
        self._ways: list[cst.FunctionDef] = []
        """Functions in the order in which they were followed, again for each way."""

    def training(self) -> list[BatchLoop]:
        """Return the loops whose batches are trained on.

        Raises:
            SpecError: a ``backward`` is in no such loop.
        """
        loops: dict[int, BatchLoop] = {}
        for call in self._backwards:
            self._ends.clear()
            around = self._batch_loops(call, [call], {})
            if not around and (not self.idle or self._ends):
                self._check_called(call)
                self._check_loops(call)
                inner = next(
                    (
                        loop
                        for node in (call, *self._ends)
                        for loop in self._tree.loops(node)
                    ),
                    None,
                )
                over = (
                    f" (line {self._tree.shown_line(inner)} iterates over "
                    f"`{self._tree.text(inner.iter)[:50]}`)"
                    if isinstance(inner, cst.For)
                    else ""
                )
                raise self._refuse(
                    call,
                    "backward() is called, but no loop around it is known to take "
                    f"batches from a DataLoader made in this file{over}, so the data "
                    "cannot be divided among ranks. Take the batches from a "
                    "torch.utils.data.DataLoader",
                )
            for loop in around:
                loops.setdefault(id(loop.node), loop)
        self.idle -= self._active
        if not loops:
            raise self._refuse(
                self._backwards[0],
                "backward() is called, but each call of the function around it passes "
                "arguments with which it is not reached, or is in torch.no_grad(), so "
                "nothing trains",
            )
        return list(loops.values())

    def _check_loops(self, call: cst.Call) -> None:
        """Refuse a loop that takes batches of a loader in a way not understood."""
        function = self._tree.function(call)
        callers = self._flow.calls_of(function) if function is not None else []
        for node in (call, *callers):
            for loop in self._tree.loops(node):
                if not isinstance(loop, cst.For):
                    continue
                loader = self._hidden_loader(loop.iter, self._tree.function(loop))
                if loader is not None:
                    raise self._refuse(
                        loop,
                        f"training loops over `{self._tree.text(loop.iter)[:60]}`, and "
                        "how that takes its batches from the DataLoader "
                        f"`{loader[:40]}` is not understood, so the data cannot be "
                        "divided among ranks. Loop over the DataLoader itself, or over "
                        "a condition that chooses between DataLoaders, and do in the "
                        "body of the loop what is done to a batch",
                    )

    def hidden(
        self, node: cst.BaseExpression, scope: Scope
    ) -> list[tuple[cst.BaseExpression, str]]:
        """Return what a loop goes through that may take a loader's batches.

        How it does is not understood. Each comes with the loader's text.
        """
        leaves = [node]
        out = []
        while leaves:
            leaf = leaves.pop()
            if isinstance(leaf, cst.Call) and self._tree.called(leaf) in WRAPPERS:
                leaves += [a.value for a in leaf.args if a.keyword is None]
            elif not self.taken(leaf, scope) and not self._counts(leaf):
                loader = self._hidden_loader(leaf, scope)
                if loader is not None:
                    out.append((leaf, loader))
        return out

    def _counts(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression has nothing of a loader but its length."""
        full = self._tree.called(node)
        return full in _COUNTERS or full in ("len", "int", "min", "max")

    def _hidden_loader(self, node: cst.BaseExpression, scope: Scope) -> str | None:
        """Return the text of a loader inside an expression that a loop goes through."""
        places = [(node, scope)]
        if (path := dotted(node)) is not None:
            places = [(o.value, o.scope) for o in self._flow.assigned(path, scope)]
        return next(
            (
                self._tree.text(part)
                for place, inner in places
                for part in found(place, (cst.Name, cst.Attribute, cst.Call))
                if not self._tree.is_label(part)
                and not self._is_measured(part)
                and self.taken(part, inner)
            ),
            None,
        )

    def _is_measured(self, node: cst.CSTNode) -> bool:
        """Return whether only a loader's length or an attribute of it is read."""
        above = self._tree.parent(node)
        if isinstance(above, cst.Attribute):
            return above.value is node
        call = self._tree.parent(above) if isinstance(above, cst.Arg) else None
        return self._tree.called(call) == "len"

    def _check_called(self, call: cst.Call) -> None:
        """Refuse a function that only code under another name may call."""
        function = self._tree.function(call)
        if function is None or self._flow.calls_of(function) or self._tree.loops(call):
            return
        name = function.name.value
        raise self._refuse(
            call,
            f"backward() is called in `{name}`, and nothing in this file calls "
            f"`{name}` by its name, so the loop that runs it is unknown. Call it by "
            "its name in the loop over batches, or move backward() into that loop",
        )

    def _batch_loops(
        self,
        node: cst.CSTNode,
        points: list[cst.CSTNode],
        entered: dict[cst.FunctionDef, cst.Call],
    ) -> list[BatchLoop]:
        """Return the loops whose batches a call trains on, also through functions.

        Args:
            node: The ``backward``, or the call through which it is reached.
            points: The calls on the way from `node` to the ``backward``.
            entered: Functions on the way, and the call that enters each.
        """
        for above in self._tree.ancestors(node):
            if isinstance(above, cst.For | cst.While):
                made = self.loop(above)
                if made is not None:
                    return [made]
            elif isinstance(above, cst.BaseComp):
                self._check_comprehension(above, node)
        out: list[BatchLoop] = []
        if self._tree.function(node) is None and node not in self._backwards:
            self._ends.append(node)
        for function in (
            a for a in self._tree.ancestors(node) if isinstance(a, cst.FunctionDef)
        ):
            if function in entered:
                continue
            if len(self._ways) > _WAYS and function in self._ways:
                continue
            self._ways.append(function)
            for call in self._flow.calls_of(function):
                inside = {**entered, function: call}
                if self.steps.without_gradient(call, function) or any(
                    self.steps.reaches(point, inside) is False for point in points
                ):
                    self.idle.add(call)
                    continue
                self._active.add(call)
                out += self._batch_loops(call, [*points, call], inside)
        return out

    def _check_comprehension(self, comp: cst.BaseComp, node: cst.CSTNode) -> None:
        """Refuse a comprehension that trains on the batches of a loader."""
        clause: cst.CompFor | None = comp.for_in
        while clause is not None:
            if self._tree.within(node, clause.iter):
                return
            if self.taken(clause.iter, self._tree.function(comp)):
                raise TrainingComprehension(
                    str(
                        self._refuse(
                            comp,
                            f"training runs in `{self._tree.text(comp)[:60]}`, a "
                            "comprehension over a loader. It is converted only where "
                            "it is a list (or in sum() and the like), is the first "
                            "that its statement evaluates, and has no comments in it. "
                            "Write it as a `for` statement: "
                            f"`for {self._tree.text(clause.target)} in "
                            f"{self._tree.text(clause.iter)[:50]}:`",
                        )
                    ),
                    comp,
                )
            clause = clause.inner_for_in

    def loop(self, node: cst.For | cst.While) -> BatchLoop | None:
        """Return the loop over a loader's batches, if a loop is one."""
        scope = self._tree.function(node)
        sources: list[tuple[cst.BaseExpression, Scope]] = []
        anchor: cst.CSTNode = node
        if isinstance(node, cst.For):
            sources = list(self._sources(node.iter, scope))
        for call in found(node.body, cst.Call):
            nearest = self._tree.loops(call)[:1]
            if dotted(call.func) != "next" or not call.args or nearest != [node]:
                continue
            if not isinstance(node, cst.For) or not sources or self._feeds(call, node):
                sources += self._sources(call.args[0].value, scope)
        pairs = [(s, self._loaders(s, inner)) for s, inner in sources]
        origins = [o for _, reached in pairs for o in reached]
        if not origins:
            return None
        named = {
            id(s[0]): s
            for s, (_, reached) in zip(sources, pairs, strict=True)
            if reached
        }
        loaders = list(named.values())
        return BatchLoop(
            node=node,
            scope=scope,
            loaders=loaders,
            origins=list({o.key: o for o in origins}.values()),
            anchor=anchor,
        )

    def _feeds(self, taken: cst.Call, loop: cst.For | cst.While) -> bool:
        """Return whether a loss in a loop is computed from a batch that it takes."""
        line = self._tree.parent(taken)
        if not isinstance(line, cst.Assign):
            return True
        targets = {n.value for t in line.targets for n in stored_names(t.target)}
        scope = self._tree.function(loop)
        waiting: list[cst.CSTNode] = [
            call
            for call in found(loop.body, cst.Call)
            if call in self._backwards
            or any(self._trains(f, set()) for f in self._flow.local(call))
        ]
        seen: set[str] = set()
        while waiting:
            for name in found(waiting.pop(), cst.Name):
                if name.value in targets:
                    return True
                if name.value not in seen:
                    seen.add(name.value)
                    made = self._flow.assigned(name.value, scope)
                    waiting += [
                        o.value for o in made if self._tree.within(o.statement, loop)
                    ]
        return False

    def _trains(self, function: cst.FunctionDef, seen: set[int]) -> bool:
        if id(function) in seen:
            return False
        seen.add(id(function))
        return any(
            call in self._backwards
            or any(self._trains(f, seen) for f in self._flow.local(call))
            for call in found(function.body, cst.Call)
        )

    def sources(
        self, node: cst.BaseExpression, scope: Scope
    ) -> list[tuple[cst.BaseExpression, Scope]]:
        """Return the loaders whose batches an expression goes through, as named."""
        sources = self._sources(node, scope)
        return [s for s in sources if self._loaders(*s)]

    def taken(self, node: cst.BaseExpression, scope: Scope) -> list[Origin]:
        """Return the origins of loaders whose batches an expression goes through."""
        sources = self._sources(node, scope)
        return [o for s, inner in sources for o in self._loaders(s, inner)]

    def _sources(
        self, node: cst.BaseExpression, scope: Scope, depth: int = 6
    ) -> list[tuple[cst.BaseExpression, Scope]]:
        """Return the loaders inside enumerate(), tqdm(), zip(), iter() or names."""
        if depth == 0:
            return []
        if isinstance(node, cst.Call):
            full = self._tree.called(node)
            if full in _COUNTERS:
                return []
            if self.is_loader(node):
                return [(node, scope)]
            if full in WRAPPERS and node.args and self._local(node) is None:
                several = node.args if full in _SEVERAL else node.args[:1]
                return [
                    s for a in several for s in self._sources(a.value, scope, depth - 1)
                ]
            generator = self._local(node)
            if generator is not None and list(found(generator.body, cst.Yield)):
                return [
                    s
                    for loop in found(generator.body, cst.For)
                    for s in self._sources(loop.iter, generator, depth - 1)
                ]
            taken = element_of(node) is not None and bool(self._loaders(node, scope))
            return [(node, scope)] if taken or self._gives_loader(node) else []
        if (path := dotted(node)) is not None:
            out, plain = [], []
            for origin in self._flow.assigned(path, scope):
                if self._is_lazy(origin.value):
                    out += self._sources(origin.value, origin.scope, depth - 1)
                elif dotted(origin.value) not in (None, path):
                    plain += self._sources(origin.value, origin.scope, depth - 1)
            out += plain if out else []
            return out or [(node, scope)]
        if isinstance(node, cst.Subscript) and dotted(node.value) is not None:
            return [(node, scope)]
        if isinstance(node, cst.IfExp):
            sides = [
                self._sources(side, scope, depth - 1)
                for side in (node.body, node.orelse)
            ]
            return [s for side in sides for s in side] if all(sides) else []
        return []

    def _is_lazy(self, node: cst.BaseExpression) -> bool:
        """Return whether a value passes on batches, so that it is no loader itself."""
        if isinstance(node, cst.IfExp):
            return self._is_lazy(node.body) or self._is_lazy(node.orelse)
        return isinstance(node, cst.Call) and (
            self._tree.called(node) in WRAPPERS or self._yields(node)
        )

    def _gives_loader(self, call: cst.Call) -> bool:
        """Return whether a function of the script returns only a loader."""
        returned = [
            self._flow.origins(given, function)
            for function in self._flow.local(call)
            for given in self._flow.returned(function)
        ]
        return bool(returned) and all(
            origins and all(self.is_loader(o.value) for o in origins)
            for origins in returned
        )

    def _yields(self, call: cst.Call) -> bool:
        local = self._local(call)
        return local is not None and bool(list(found(local.body, cst.Yield)))

    def _local(self, call: cst.Call) -> cst.FunctionDef | None:
        name = dotted(call.func)
        return next((f for f in self._tree.functions if f.name.value == name), None)

    def _loaders(
        self, node: cst.BaseExpression, scope: Scope, depth: int = 4
    ) -> list[Origin]:
        """Return where the loader was created; empty if it cannot be a loader."""
        key: str | None = None
        place: int | None = None
        out: list[Origin] = []
        taken = element_of(node)
        if taken is not None:
            node, index = taken
            key = literal(index)
            if isinstance(index, cst.Integer):
                place = index.evaluated_value
            out += self._containers.put(node, scope, key)
            if self._containers.moves(node, scope):
                place = None
        for origin in self._flow.origins(node, scope):
            made = origin.value
            if taken is not None and self._containers.is_empty(made):
                continue
            if isinstance(made, cst.Dict):
                for element in made.elements:
                    if isinstance(element, cst.DictElement) and (
                        key is None or self._tree.text(element.key).strip("\"'") == key
                    ):
                        out += self._flow.origins(element.value, origin.scope)
            elif isinstance(made, cst.List | cst.Tuple) and key is not None:
                last = None if place is None else place + 1
                for part in made.elements[place:last]:
                    out += self._flow.origins(part.value, origin.scope)
            elif isinstance(made, cst.DictComp) or (
                isinstance(made, cst.ListComp) and key is not None
            ):
                value = made.value if isinstance(made, cst.DictComp) else made.elt
                out += self._flow.origins(value, origin.scope)
            elif element_of(made) is not None and depth > 0:
                out += self._loaders(made, origin.scope, depth - 1)
            elif isinstance(made, cst.IfExp):
                out += self._of_choice(made, origin.scope, depth=4)
            else:
                out.append(origin)
        return [o for o in out if self._may_be_loader(o)]

    def put(self, node: cst.BaseExpression, scope: Scope) -> list[Origin]:
        """Return the loaders that are put into a container of which a loop is made."""
        while isinstance(node, cst.Call):
            on = self._tree.method_called(node, "values", "items")
            if on is None and (self._tree.called(node) not in WRAPPERS):
                return []
            if on is None and not node.args:
                return []
            node = on if on is not None else node.args[0].value
        return self._containers.put(node, scope, None)

    def is_put(self, origin: Origin) -> bool:
        """Return whether a loader gets into a container after that is created."""
        return origin.key in self._containers.keys

    def by_key(
        self, node: cst.BaseExpression, scope: Scope
    ) -> list[tuple[str, list[Origin]]]:
        """Return the loaders of a dict of which an element is taken, by their key.

        Return none if a key is not a text, or the dict is not written as one.
        """
        if not isinstance(node, cst.Subscript):
            return []
        out: list[tuple[str, list[Origin]]] = []
        for origin in self._flow.origins(node.value, scope):
            if self._containers.is_empty(origin.value):
                continue
            if not isinstance(origin.value, cst.Dict):
                return []
            for element in origin.value.elements:
                if not isinstance(element, cst.DictElement) or not isinstance(
                    element.key, cst.SimpleString
                ):
                    return []
                made = self._flow.origins(element.value, origin.scope)
                out.append((str(element.key.evaluated_value), made))
        for name, origins in self._containers.put_by_key(node.value, scope):
            if name is None:
                return []
            out.append((name, origins))
        return out

    def _of_choice(self, node: cst.IfExp, scope: Scope, depth: int) -> list[Origin]:
        """Return where the loaders were created of which a condition chooses one.

        Return none if one of them may be something else.
        """
        out: list[Origin] = []
        for side in (node.body, node.orelse):
            if dotted(side) == "None":
                continue
            for origin in self._flow.origins(side, scope):
                made = origin.value
                if isinstance(made, cst.IfExp) and depth > 0:
                    inner = self._of_choice(made, origin.scope, depth - 1)
                else:
                    inner = [origin] if self._may_be_loader(origin) else []
                if not inner:
                    return []
                out += inner
        return out

    def is_loader(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is a call of DataLoader."""
        return _is_data_loader(self._tree.called(node))

    def makes_loaders(self, node: cst.BaseExpression) -> bool:
        """Return whether something is a function of DataLoaders within an expression.

        Such as ``partial(DataLoader, batch_size=8)`` or ``lambda d: DataLoader(d, 8)``.
        """
        if isinstance(node, cst.Lambda):
            return self.is_loader(node.body)
        if self._tree.called(node) != "functools.partial":
            return False
        first = node.args[0].value if isinstance(node, cst.Call) and node.args else None
        return first is not None and _is_data_loader(self._tree.full(first) or "")

    def _may_be_loader(self, origin: Origin) -> bool:
        """Return whether a value is a DataLoader or may be returned as one."""
        made = origin.value
        if self.is_loader(made):
            return True
        if not isinstance(made, cst.Call):
            return False
        makers = self._flow.origins(made.func, origin.scope)
        if any(self.makes_loaders(maker.value) for maker in makers):
            return True
        local = self._local(made)
        if local is not None:
            return any(self.is_loader(c) for c in found(local.body, cst.Call))
        full = self._tree.called(made)
        name = (origin.path or "").lower()
        return not full.startswith("torch.") and (
            "loader" in full.lower() or "loader" in name
        )


def _is_data_loader(full: str) -> bool:
    """Return whether a full name is that of torch's DataLoader."""
    return full == "DataLoader" or (
        full.startswith("torch.") and full.rpartition(".")[2] == "DataLoader"
    )
