"""Find a script's optimizers, and the models that they train."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._flow import SAME_OBJECT, Origin, parameters
from stretto.convert._optimizers import SteppedObjects, is_named, update_by_hand
from stretto.convert._parameter_owners import ParameterOwners
from stretto.convert._tree import Scope, argument, dotted, found, stored_names
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stretto.convert._flow import Key, ScriptFlow
    from stretto.convert._tree import ScriptTree

_CONTAINERS = (cst.Dict, cst.List, cst.Tuple, cst.ListComp, cst.DictComp)


class UnnamedModel(SpecError):
    """A trained model has no name, as in ``Trainer(nn.Linear(2, 1))``."""

    def __init__(self, text: str, value: cst.BaseExpression) -> None:
        super().__init__(text)
        self.value = value


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """A call that makes an optimizer, and the models whose parameters it gets."""

    call: cst.Call
    scope: Scope
    models: tuple[Origin, ...]


@final
class TrainedModels:
    """The optimizers of a script and their models.

    Args:
        tree: The script.
        flow: Its assignments and calls.
        refuse: Returns an error that names a node's line.
    """

    def __init__(
        self,
        tree: ScriptTree,
        flow: ScriptFlow,
        refuse: Callable[[cst.CSTNode, str], SpecError],
    ) -> None:
        self._tree, self._flow, self._refuse = tree, flow, refuse
        self._owners = ParameterOwners(tree, flow)
        self._stepped = SteppedObjects(tree, flow)
        self.optimizers = self._optimizers()

    def complete(self) -> list[Origin]:
        """Give each optimizer the models that its own are made of, and return all.

        Raises:
            SpecError: one has no name; the error has the line and the next step.
        """
        self.optimizers = self._with_sources(self.optimizers)
        models = _distinct([m for o in self.optimizers for m in o.models])
        for model in models:
            if model.path is None:
                raise UnnamedModel(
                    str(
                        self._refuse(
                            model.statement,
                            "the trained model "
                            f"`{self._tree.text(model.value)[:60]}` has no name, so it "
                            "cannot be wrapped. Assign it to a variable first",
                        )
                    ),
                    model.value,
                )
            if isinstance(model.value, _CONTAINERS) and model.place is None:
                raise self._refuse(
                    model.statement,
                    f"the trained model is an element of `{model.path}`, so it cannot "
                    "be wrapped by name. Assign it to its own variable first",
                )
        return models

    def _optimizers(self) -> list[Optimizer]:
        out = []
        for call in self._tree.calls:
            if models := _distinct(self._trained_by(call)):
                scope = self._tree.function(call)
                out.append(Optimizer(call=call, scope=scope, models=tuple(models)))
        known: set[Key] = {m.key for o in out for m in o.models}
        for call in self._tree.calls:
            if self._tree.method_called(call, "add_param_group") is None:
                continue
            given, scope = argument(call, 0, "param_group"), self._tree.function(call)
            if given is None or self._is_part(given, scope, known):
                continue
            models = _distinct(self._owners.models_of(given, scope, 3))
            if new := [m for m in models if m.key not in known]:
                out.append(Optimizer(call=call, scope=scope, models=tuple(new)))
        return out

    def _is_part(
        self, given: cst.BaseExpression, scope: Scope, known: set[Key]
    ) -> bool:
        """Return whether parameters that are added are of a model trained already."""
        for call in found(given, cst.Call):
            node = self._tree.method_called(call, "parameters", "named_parameters")
            while isinstance(node, cst.Attribute | cst.Subscript):
                node = node.value
                if not known.isdisjoint(o.key for o in self._flow.origins(node, scope)):
                    return True
        return False

    def _with_sources(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Replace models by those that they are made of, so that each is wrapped once.

        ``model.cuda()`` and ``DataParallel(model)`` are `model`, also in a function
        that gets it.
        """
        models = _distinct([m for o in optimizers for m in o.models])
        within = {
            m.key: {key[0] for key in self._flow.reached(m.value, m.scope)}
            for m in models
        }
        sources = {
            m.key: next(
                (
                    other
                    for other in models
                    if id(other.value) in within[m.key]
                    and id(m.value) not in within[other.key]
                    and not any(
                        id(third.value) in within[other.key]
                        and id(other.value) not in within[third.key]
                        for third in models
                    )
                ),
                m,
            )
            for m in models
        }
        return [
            replace(
                o, models=tuple(_distinct([sources.get(m.key, m) for m in o.models]))
            )
            for o in optimizers
        ]

    def _trained_by(self, call: cst.Call) -> list[Origin]:
        """Return the models that a call's result trains, if it is an optimizer."""
        scope = self._tree.function(call)
        if is_named(self._tree, call):
            given = argument(call, 0, "params")
            if given is None:
                return []
            models = self._owners.models_of(given, scope, 3)
            return models or self._grouped_by_call(given, scope)
        if not self._stepped.is_stepped(call):
            return []
        out: list[Origin] = []
        for value in self._stepped.given(call):
            out += self._owners.models_of(value, scope, depth=3)
        if not out and self._stepped.is_optimizer(call):
            for value in self._stepped.modules(call):
                out += self._owners.model(value, scope)
        return out

    def _grouped_by_call(self, given: cst.BaseExpression, scope: Scope) -> list[Origin]:
        """Return the models that a call gets to make parameter groups of them."""
        calls = [(call, scope) for call in found(given, cst.Call)]
        calls += [
            (origin.value, origin.scope)
            for name in found(given, cst.Name)
            for origin in self._flow.assigned(name.value, scope)
            if isinstance(origin.value, cst.Call)
        ]
        return [
            model
            for call, where in calls
            for value in self._stepped.given(call)
            if self._stepped.is_module(value)
            for model in self._owners.model(value, where)
        ]

    def _refuse_element(self, call: cst.Call) -> None:
        """Refuse an optimizer of what a loop takes from a container of models.

        Raises:
            SpecError: it is one; the error has the line and the next step.
        """
        for inner in found(call, cst.Call):
            on = self._tree.method_called(inner, "parameters")
            if not isinstance(on, cst.Name):
                continue
            names = [(on, self._tree.function(on))]
            scope = names[0][1]
            if scope is not None and on.value in parameters(scope):
                given = self._flow.passed(scope, on.value)
                names = [
                    (value, self._tree.function(at))
                    for at, value in given
                    if isinstance(value, cst.Name)
                ]
            for name, _ in names:
                over = self._taken_from(name)
                if over is not None:
                    raise self._refuse(
                        call,
                        f"`{self._tree.text(call)[:60]}` trains `{on.value}`, an "
                        f"element of `{self._tree.text(over)[:40]}` (line "
                        f"{self._tree.shown_line(over)}), and a model in a container "
                        "cannot be wrapped by name. Give each model a variable of its "
                        "own, and make its optimizer from that",
                    )

    def _refuse_collected(self, call: cst.Call) -> None:
        """Refuse an optimizer of parameters collected from a container of models.

        Raises:
            SpecError: it is one; the error has the line and the next step.
        """
        paths = {dotted(given.value) for given in call.args} - {None}
        added: list[cst.CSTNode] = [
            line.value
            for line in found(self._tree.module, cst.AugAssign)
            if dotted(line.target) in paths
        ]
        added += [
            more
            for more in self._tree.calls
            if dotted(self._tree.method_called(more, "extend", "append")) in paths
        ]
        for node in (call, *added):
            for inner in found(node, cst.Call):
                on = self._tree.method_called(inner, "parameters")
                if isinstance(on, cst.Subscript):
                    raise self._refuse(
                        inner,
                        f"`{self._tree.text(call)[:60]}` trains "
                        f"`{self._tree.text(on)[:40]}`, and a model in a container "
                        "cannot be wrapped by name. Give each model a variable of its "
                        "own, and take the optimizer's parameters() from that",
                    )

    def _taken_from(self, name: cst.Name) -> cst.BaseExpression | None:
        """Return what a loop or a comprehension takes a name from."""
        scope = self._tree.function(name)
        loops: Iterator[cst.For | cst.CompFor]
        loops = found(self._tree.module, (cst.For, cst.CompFor))
        for loop in loops:
            inside = isinstance(loop, cst.For) or any(
                loop in list(found(above, cst.CompFor))
                for above in self._tree.ancestors(name)
                if isinstance(above, cst.BaseComp)
            )
            if (
                inside
                and self._tree.function(loop) is scope
                and any(n.value == name.value for n in stored_names(loop.target))
            ):
                return loop.iter
        return None

    def refuse_unknown_optimizers(self) -> None:
        """Refuse an optimizer whose model is unknown, so that it would not be wrapped.

        Raises:
            SpecError: there is one; the error has the line and the next step.
        """
        known = {id(o.call) for o in self.optimizers}
        models = {id(m.value) for o in self.optimizers for m in o.models}
        for call in self._tree.calls:
            if (
                self._stepped.is_optimizer(call)
                and not self._tree.called(call).startswith("torch.nn.")
                and id(call) not in known | models
                and not self._stepped.takes_optimizer(call)
                and not self._flow.local(call)
                and self._tree.own_class(call) is None
                and self._tree.method_called(call, *SAME_OBJECT) is None
            ):
                self._refuse_element(call)
                self._refuse_collected(call)
                raise self._refuse(
                    call,
                    f"`{self._tree.text(call)[:60]}` makes an optimizer, but the model "
                    "that it trains cannot be found in this file, so it could not be "
                    "distributed. Create the model here, under a name of its own, and "
                    "give the optimizer its parameters()",
                )

    def refuse_updates_by_hand(self) -> None:
        """Refuse a model that no optimizer trains, but a loop over its parameters.

        Raises:
            SpecError: there is one; the error has the line and the next step.
        """
        if not self.optimizers:
            return  # refused as a whole
        known = {id(m.value) for o in self.optimizers for m in o.models}
        for loop in found(self._tree.module, cst.For):
            scope = self._tree.function(loop)
            update = update_by_hand(self._tree, loop)
            for call in found(loop.iter, cst.Call) if update is not None else ():
                owner = self._tree.method_called(call, "parameters", "named_parameters")
                if owner is None or update is None:
                    continue
                if known.isdisjoint(k[0] for k in self._flow.reached(owner, scope)):
                    raise self._refuse(
                        update,
                        f"`{self._tree.text(owner)}` is trained here by hand, and no "
                        "optimizer has its parameters(), so it would not be "
                        "distributed. Train it with an optimizer",
                    )


def _distinct(origins: list[Origin]) -> list[Origin]:
    seen: set[tuple[int, str | None]] = set()
    out = []
    for origin in origins:
        key = (id(origin.scope), origin.path) if origin.path else (id(origin.value), "")
        if key not in seen:
            seen.add(key)
            out.append(origin)
    return out
