"""Find the calls that make a script's optimizers, by class or by use."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import dotted, found, stored_names

if TYPE_CHECKING:
    from stretto.convert._flow import ScriptFlow
    from stretto.convert._tree import ScriptTree

_OPTIMIZERS = frozenset(
    [
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "LBFGS",
        "Lion",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "SparseAdam",
        "AdaBelief",
        "LAMB",
        "Lamb",
        "LARS",
    ]
)

_STEPPING = ("step", "first_step", "second_step")
"""Methods that change an optimizer's parameters; the last two are those of SAM."""

_PARAMETERS = ("parameters", "named_parameters")

_OF_MODULES = (
    "train",
    "eval",
    "parameters",
    "named_parameters",
    "modules",
    "state_dict",
    "load_state_dict",
)
"""Methods by which a module is known where its class is in another file."""


def is_named(tree: ScriptTree, call: cst.Call) -> bool:
    """Return whether a call makes an optimizer by the name of what it calls."""
    if isinstance(call.func, cst.Call) and dotted(call.func.func) == "getattr":
        of = call.func.args[0].value if call.func.args else None
        return tree.full(of) == "torch.optim"
    full = tree.called(call)
    own = tree.own_class(call)
    if own is not None:
        bases = [(dotted(b.value) or "").rpartition(".")[2] for b in own.bases]
        return own.name.value in _OPTIMIZERS and any(
            base in _OPTIMIZERS or "Optim" in base for base in bases
        )
    return full.rpartition(".")[2] in _OPTIMIZERS or (
        full.startswith(("torch.optim.", "torch_optimizer."))
        and "lr_scheduler" not in full
        and "swa_utils" not in full
    )


def update_by_hand(tree: ScriptTree, loop: cst.For) -> cst.CSTNode | None:
    """Return where a loop changes its variable by the variable's gradient, if it does.

    ``p -= rate * p.grad`` and ``p.data.add_(p.grad, alpha=-rate)`` are such places.
    """
    names = {name.value for name in found(loop.target, cst.Name)}
    changes: list[tuple[cst.CSTNode, cst.BaseExpression, list[cst.CSTNode]]] = [
        (node, node.target, [node.value]) for node in found(loop.body, cst.AugAssign)
    ]
    changes += [
        (call, call.func.value, [*call.args])
        for call in found(loop.body, cst.Call)
        if isinstance(call.func, cst.Attribute) and call.func.attr.value[-1:] == "_"
    ]
    for node, changed, by in changes:
        root, _, rest = (dotted(changed) or "").partition(".")
        gradients = {f"{root}.grad", f"{root}.grad.data"}
        read = {dotted(part) for one in by for part in found(one, cst.Attribute)}
        if root in names and rest in ("", "data") and not gradients.isdisjoint(read):
            return node
    return None


@final
class SteppedObjects:
    """The calls whose results are used as optimizers, of whatever class they are."""

    def __init__(self, tree: ScriptTree, flow: ScriptFlow) -> None:
        self._tree, self._flow = tree, flow
        self._stepped: set[int | None] = set()
        self._cleared: set[int | None] = set()
        for call in tree.calls:
            stepped = tree.method_called(call, *_STEPPING)
            if stepped is not None:
                self._stepped |= self._every_maker(stepped)
                for argument in call.args[:1]:  # scaler.step(optimizer)
                    self._stepped |= self._every_maker(argument.value)
            cleared = tree.method_called(call, "zero_grad")
            if cleared is not None:
                self._cleared |= self._every_maker(cleared)
        self._named = {id(call) for call in tree.calls if is_named(tree, call)}

    def _makers(self, node: cst.BaseExpression) -> set[int | None]:
        reached = self._flow.reached(node, self._tree.function(node))
        return {key[0] for key in reached}

    def _every_maker(self, node: cst.BaseExpression) -> set[int | None]:
        """Return the calls that make an object, or elements that it may be."""
        out = self._makers(node)
        for element in self._elements(self._containers(node)):
            out |= self._makers(element)
        return out

    def _containers(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Return what an object is an element of, by an index or in a loop."""
        if isinstance(node, cst.Subscript):
            return [node.value]
        if not isinstance(node, cst.Name):
            return []
        out: list[cst.BaseExpression] = []
        for above in self._tree.ancestors(node):
            clause: cst.CSTNode | None = above
            if isinstance(above, cst.BaseComp):
                clause = above.for_in
            while isinstance(clause, cst.For | cst.CompFor):
                if any(n.value == node.value for n in stored_names(clause.target)):
                    out.append(clause.iter)
                clause = (
                    clause.inner_for_in if isinstance(clause, cst.CompFor) else None
                )
        return out

    def _elements(
        self, containers: list[cst.BaseExpression]
    ) -> list[cst.BaseExpression]:
        """Return what containers are made of, and what is added to them."""
        out: list[cst.BaseExpression] = []
        waiting = list(containers)
        seen: set[int] = set()
        while waiting:
            node = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, cst.List | cst.Tuple | cst.Dict):
                out += [element.value for element in node.elements]
            elif isinstance(node, cst.ListComp | cst.GeneratorExp):
                out.append(node.elt)
            elif isinstance(node, cst.DictComp):
                out.append(node.value)
            elif isinstance(node, cst.Call):  # zip(a, b), opts.values()
                waiting += [given.value for given in node.args]
                if isinstance(node.func, cst.Attribute):
                    waiting.append(node.func.value)
            elif (path := dotted(node)) is not None:
                scope = self._tree.function(node)
                waiting += [o.value for o in self._flow.origins(node, scope)]
                out += self._added(path)
        return out

    def _added(self, path: str) -> list[cst.BaseExpression]:
        """Return what is added to a container of a name."""
        out: list[cst.BaseExpression] = []
        for call in self._tree.calls:
            on = self._tree.method_called(call, "append", "insert")
            if dotted(on) == path and call.args:
                out.append(call.args[-1].value)
        for line in found(self._tree.module, cst.Assign):
            for target in line.targets:
                to = target.target
                if isinstance(to, cst.Subscript) and dotted(to.value) == path:
                    out.append(line.value)
        return out

    def is_stepped(self, call: cst.Call) -> bool:
        """Return whether ``step()`` is called on a call's result."""
        return id(call) in self._stepped

    def is_optimizer(self, call: cst.Call) -> bool:
        """Return whether a call's result is used as only an optimizer is."""
        if id(call) not in self._stepped:
            return False
        return id(call) in self._cleared or self._gets_parameters(call)

    def _gets_parameters(self, call: cst.Call) -> bool:
        """Return whether a call gets what ``parameters()`` of a module returns."""
        return any(
            self._tree.method_called(inner, *_PARAMETERS) is not None
            for given in call.args
            for inner in found(given, cst.Call)
        )

    def given(self, call: cst.Call) -> list[cst.BaseExpression]:
        """Return a call's arguments, without those that are optimizers themselves."""
        return [a.value for a in call.args if not self._has_optimizer(a.value)]

    def takes_optimizer(self, call: cst.Call) -> bool:
        """Return whether a call gets an optimizer, as a scheduler's does."""
        return any(self._has_optimizer(a.value) for a in call.args)

    def _has_optimizer(self, node: cst.BaseExpression) -> bool:
        return not self._makers(node).isdisjoint(self._stepped | self._named)

    def modules(self, call: cst.Call) -> list[cst.BaseExpression]:
        """Return the arguments of a call of another file that are modules."""
        if self._flow.local(call) or self._tree.own_class(call) is not None:
            return []
        return [value for value in self.given(call) if self.is_module(value)]

    def is_module(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression is used as a module in this file."""
        if dotted(node) is None:
            return False
        made = self._makers(node)
        return any(
            not made.isdisjoint(self._makers(on))
            for call in self._tree.calls
            if (on := self._tree.method_called(call, *_OF_MODULES)) is not None
        )
