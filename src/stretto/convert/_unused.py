"""Find models of which a backward may leave parameters without a gradient.

DistributedDataParallel waits for every parameter's gradient, unless it is set to look
for those that a backward does not reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import OWN, dotted, found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._edit import Work
    from stretto.convert._flow import Origin

_WITHOUT_PARAMETERS = ("Dropout", "LU", "Softmax", "Sigmoid", "Tanh", "Loss", "Pool")
"""Parts of the names of layers that train nothing."""

_OUTPUTS = "a loss uses only some of its outputs"


def why_unused(work: Work, model: Origin, calls: list[cst.Call]) -> str | None:
    """Return why a backward may not reach all of a model's parameters.

    Args:
        work: The conversion.
        model: The model.
        calls: The calls of the model in training.
    """
    return _Unused(work, model).why(calls)


@final
class _Unused:
    def __init__(self, work: Work, model: Origin) -> None:
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._model = model
        made = model.value
        while isinstance(made, cst.Call) and isinstance(made.func, cst.Attribute):
            if self._tree.method_called(made, "to", "cuda", "train") is None:
                break
            made = made.func.value
        self._maker = self._tree.called(made).removeprefix(OWN)
        self._kind = self._tree.classes.get(self._maker)

    def why(self, calls: list[cst.Call]) -> str | None:
        if self._maker.startswith("torch.nn."):
            return None
        optimizers = [
            o
            for o in self._work.job.optimizers
            if any(m.key == self._model.key for m in o.models)
        ]
        if len(optimizers) > 1 and len(self._work.job.backwards) > 1:
            return "several optimizers train parts of it"
        if any(self._is_partial(call) for call in calls):
            return _OUTPUTS
        for kind in self._kinds():
            name = self._branch(kind) or self._never_read(kind)
            if name is not None:
                return f"`{name}` does not run in every forward"
            name = self._cut_off(kind)
            if name is not None:
                return f"forward lets no gradient through to `{name}`"
        return None

    # Outputs

    def _is_partial(self, call: cst.Call) -> bool:
        """Return whether a loss may use only some of a call's outputs."""
        names = self._unpacked(call)
        if names is None:
            return False
        layers = self._layers_of_outputs(len(names))
        if layers is not None and all(one == layers[0] for one in layers):
            return False
        backwards = self._work.job.backwards
        if layers is not None and len(backwards) > 1:
            return True
        graph = self._work.graph_names
        used = [name in graph or self._is_passed_back(name, call) for name in names]
        if not self._is_beside_backward(call):
            used = [name is not None and self._is_read(name, call) for name in names]
        if layers is None:
            return not all(used)
        reached = {x for one, use in zip(layers, used, strict=True) if use for x in one}
        return not set().union(*layers) <= reached

    def _unpacked(self, call: cst.Call) -> list[str | None] | None:
        """Return the names that a call's outputs get; ``None`` for one output."""
        above = self._tree.parent(call)
        if isinstance(above, cst.Subscript):
            place = self._tree.text(above.slice[0].slice)
            known = place.isdecimal() and self._outputs() > int(place)
            names: list[str | None] = [None] * (self._outputs() if known else 2)
            line = self._tree.parent(above)
            if known and isinstance(line, cst.Assign):
                names[int(place)] = dotted(line.targets[0].target)
            return names
        if isinstance(above, cst.Assign):
            target = above.targets[0].target
            if isinstance(target, cst.Tuple | cst.List):
                return [dotted(e.value) for e in target.elements]
        return None

    def _outputs(self) -> int:
        for given in self._returned():
            if isinstance(given, cst.Tuple):
                return len(given.elements)
        return 0

    def _is_beside_backward(self, call: cst.Call) -> bool:
        scope = self._tree.function(call)
        return any(self._tree.function(c) is scope for c in self._work.job.backwards)

    def _is_read(self, name: str, call: cst.Call) -> bool:
        scope = self._tree.function(call)
        where: cst.CSTNode = self._tree.module if scope is None else scope.body
        line = self._tree.statement(call)
        return any(
            dotted(node) == name and not self._tree.within(node, line)
            for node in found(where, (cst.Name, cst.Attribute))
        )

    def _is_passed_back(self, name: str | None, call: cst.Call) -> bool:
        """Return whether an output is a state, which the next call is given."""
        return name is not None and any(dotted(a.value) == name for a in call.args)

    # Forward

    def _forward(self, kind: cst.ClassDef | None) -> cst.FunctionDef | None:
        if kind is None:
            return None
        return next(
            (
                f
                for f in found(kind.body, cst.FunctionDef)
                if f.name.value == "forward" and self._tree.owner(f) is kind
            ),
            None,
        )

    def _returned(self) -> list[cst.BaseExpression]:
        forward = self._forward(self._kind)
        return [] if forward is None else self._flow.returned(forward)

    def _layers_of_outputs(self, count: int) -> list[set[str]] | None:
        """Return the layers that each output comes from, if forward says so."""
        forward = self._forward(self._kind)
        returned = self._returned()
        if forward is None or not returned:
            return None
        out: list[set[str]] = [set() for _ in range(count)]
        for given in returned:
            if not isinstance(given, cst.Tuple) or len(given.elements) != count:
                return None
            for layers, element in zip(out, given.elements, strict=True):
                layers |= self._sources_of(element.value, forward)
        return out

    def _sources_of(self, node: cst.CSTNode, function: cst.FunctionDef) -> set[str]:
        """Return the attributes of ``self`` from which a value is computed."""
        seen: set[str] = set()
        waiting = [node]
        out: set[str] = set()
        while waiting:
            here = waiting.pop()
            out |= set(self._of_self(here))
            for name in {n.value for n in found(here, cst.Name)} - seen:
                seen.add(name)
                waiting += self._values(name, function)
        return out

    def _values(self, name: str, function: cst.FunctionDef) -> Iterator[cst.CSTNode]:
        """Yield what a variable of a function is computed from."""
        lines: list[tuple[cst.CSTNode, cst.CSTNode]] = []
        for line in found(function.body, cst.Assign):
            lines += [(t.target, line.value) for t in line.targets]
        lines += [(n.target, n.value) for n in found(function.body, cst.AugAssign)]
        lines += [(n.target, n.iter) for n in found(function.body, cst.For)]
        for target, value in lines:
            if any(n.value == name for n in found(target, cst.Name)):
                yield value

    def _of_self(self, node: cst.CSTNode) -> Iterator[str]:
        for part in found(node, cst.Attribute):
            if dotted(part.value) == "self":
                yield part.attr.value

    # Layers

    def _kinds(self) -> list[cst.ClassDef]:
        """Return the model's class, and those that it makes objects of."""
        out = [] if self._kind is None else [self._kind]
        for kind in out:
            for name in found(kind.body, cst.Name):
                other = self._tree.classes.get(name.value)
                if other is not None and other not in out:
                    out.append(other)
        return out

    def _made(self, kind: cst.ClassDef) -> dict[str, str]:
        """Return the layers that a class makes, by name, with their classes."""
        out = {}
        for line in found(kind.body, cst.Assign):
            path = dotted(line.targets[0].target) or ""
            full = self._tree.called(line.value)
            full = full.removeprefix(OWN)
            trains = full.startswith("torch.nn.") or full in self._tree.classes
            if path.startswith("self.") and trains:
                out[path.removeprefix("self.")] = full
        return {
            name: full
            for name, full in out.items()
            if "." not in name  # a layer of a layer, which that one runs
            and not any(word in full for word in _WITHOUT_PARAMETERS)
        }

    def _never_read(self, kind: cst.ClassDef) -> str | None:
        """Return a layer that nothing reads."""
        read = {
            node.attr.value
            for node in found(self._tree.module, cst.Attribute)
            if not isinstance(self._tree.parent(node), cst.AssignTarget)
        }
        if self._forward(kind) is None or "getattr" in self._tree.names:
            return None
        return next((n for n in self._made(kind) if n not in read), None)

    def _cut_off(self, kind: cst.ClassDef) -> str | None:
        """Return a layer that is only read where no gradient flows."""
        cut: dict[str, bool] = {}
        made = self._made(kind)
        for node in found(kind.body, cst.Attribute):
            function = self._tree.function(node)
            name = node.attr.value
            if name not in made or dotted(node.value) != "self" or function is None:
                continue
            if function.name.value != "forward" and (
                function.name.value == "__init__" or not self._flow.calls_of(function)
            ):
                continue
            cut[name] = cut.get(name, True) and self._is_cut(node, function)
        return next((name for name, always in cut.items() if always), None)

    def _is_cut(self, node: cst.CSTNode, function: cst.FunctionDef) -> bool:
        """Return whether no gradient flows to an expression of a function."""
        if self._tree.without_gradient(node) or self._is_detached(node):
            return True
        line = next(
            (a for a in self._tree.ancestors(node) if isinstance(a, cst.Assign)), None
        )
        name = None if line is None else dotted(line.targets[0].target)
        reads = [
            read
            for read in found(function.body, cst.Name)
            if read.value == name
            and not isinstance(self._tree.parent(read), cst.AssignTarget)
        ]
        return bool(reads) and all(self._is_detached(read) for read in reads)

    def _is_detached(self, node: cst.CSTNode) -> bool:
        return any(
            isinstance(above, cst.Call)
            and (on := self._tree.method_called(above, "detach", "detach_")) is not None
            and self._tree.within(node, on)
            for above in self._tree.ancestors(node)
        )

    def _branch(self, kind: cst.ClassDef) -> str | None:
        """Return a layer that runs in one branch of forward only.

        A branch on the object's own settings is the same in each step.
        """
        forward, made = self._forward(kind), self._made(kind)
        if forward is None:
            return None
        tests = [
            (node.test, node.body, node.orelse)
            for node in found(forward, cst.BaseExpression)
            if isinstance(node, cst.IfExp)
        ]
        blocks = [(n.test, n.body, n.orelse) for n in found(forward, cst.If)]
        for test, body, orelse in (*tests, *blocks):
            own = {"self", *self._of_self(test)}
            if {n.value for n in found(test, cst.Name)} <= own:
                continue
            other = set() if orelse is None else set(self._of_self(orelse))
            apart = sorted((set(self._of_self(body)) ^ other) & set(made))
            if apart:
                return apart[0]
        return None
