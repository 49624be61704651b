"""The parts of a script's training job: models, optimizers, loops, loaders."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

import libcst as cst

from stretto.convert._flow import SAME_OBJECT, Flow, Key, Origin, parameters
from stretto.convert._optimizers import SteppedObjects, is_named, update_by_hand
from stretto.convert._tree import Scope, Tree, argument, dotted, found, stored_names
from stretto.errors import SpecError

_COUNTERS = ("range", "trange", "tqdm.trange", "tqdm.auto.trange", "itertools.count")

_BACKWARD = "torch.autograd.backward"

_BY_HAND = (
    "torch.autograd.grad",
    "torch.func.grad",
    "torch.func.grad_and_value",
    "torch.func.vjp",
    "functorch.grad",
    "functorch.grad_and_value",
)
"""Calls that return gradients without storing them in parameters."""

_CONTAINERS = (cst.Dict, cst.List, cst.Tuple, cst.ListComp, cst.DictComp)

_READING = ("values", "items", "keys", "get")
"""Methods of a container that leave it as it is."""

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
    "zip",
    "cycle",
)
"""Calls that pass on the batches of their arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """A call that makes an optimizer, and the models whose parameters it gets."""

    call: cst.Call
    scope: Scope
    models: tuple[Origin, ...]


@dataclass(slots=True, kw_only=True)
class Loop:
    """A loop over batches of a loader."""

    node: cst.For | cst.While
    scope: Scope
    loaders: list[tuple[cst.BaseExpression, Scope]]
    """The loaders, as they are named where the loop, or its iterator, is created."""
    origins: list[Origin] = field(default_factory=list)
    anchor: cst.CSTNode | None = None
    """The statement before which an epoch begins."""


@final
class Job:
    """The training found in a script.

    Raises:
        SpecError: the script has no training, or it is not understood; the error has
            the line and the next step.
    """

    def __init__(self, tree: Tree, name: str) -> None:
        self.tree = tree
        self.flow = Flow(tree)
        self._name = name
        self.backwards = [c for c in tree.calls if self._begins_backward(c)]
        if not self.backwards:
            raise self._no_backward()
        self._stepped = SteppedObjects(tree, self.flow)
        self.optimizers = self._optimizers()
        self._refuse_unknown_optimizers()
        self._refuse_updates_by_hand()
        if not self.optimizers:
            raise self.refuse(
                self.backwards[0],
                "backward() is called, but this file makes no optimizer over a "
                "model's parameters(), so the model to be distributed is unknown. "
                "Make the optimizer in this file",
            )
        self.optimizers = self._with_sources(self.optimizers)
        self.models = _distinct([m for o in self.optimizers for m in o.models])
        for model in self.models:
            if model.path is None:
                raise self.refuse(
                    model.statement,
                    f"the trained model `{tree.text(model.value)[:60]}` has no name, "
                    "so it cannot be wrapped. Assign it to a variable first",
                )
            if isinstance(model.value, _CONTAINERS) and model.place is None:
                raise self.refuse(
                    model.statement,
                    f"the trained model is an element of `{model.path}`, so it cannot "
                    "be wrapped by name. Assign it to its own variable first",
                )
        self.training = self._training_loops()

    def refuse(self, node: cst.CSTNode, text: str) -> SpecError:
        """Return an error that names a node's line."""
        return SpecError(f"{self._name}:{self.tree.shown_line(node)}: {text}")

    def _begins_backward(self, call: cst.Call) -> bool:
        """Return whether a call is of a loss's ``backward``, or of torch.autograd's."""
        if self.tree.called(call) == _BACKWARD:
            return True
        on = self.tree.method_called(call, "backward")
        of_super = isinstance(on, cst.Call) and dotted(on.func) == "super"
        return on is not None and not of_super

    def _no_backward(self) -> SpecError:
        by_hand = next(
            (c for c in self.tree.calls if self.tree.called(c) in _BY_HAND), None
        )
        if by_hand is not None:
            return self.refuse(
                by_hand,
                f"gradients are computed with {self.tree.called(by_hand)}() and "
                "nothing calls backward(), but DistributedDataParallel exchanges "
                "gradients in backward() only. Call loss.backward() and read each "
                "parameter's .grad",
            )
        return SpecError(
            f"{self._name}: no training loop found: nothing calls backward(). Give the "
            "file that contains the loop"
        )

    def differentiated(self, call: cst.Call) -> cst.BaseExpression | None:
        """Return the loss that a call of ``backward`` starts from.

        Raises:
            SpecError: it is not one tensor; the error has the line and the next step.
        """
        if self.tree.called(call) != _BACKWARD:
            return call.func.value if isinstance(call.func, cst.Attribute) else None
        given = argument(call, 0, "tensors")
        if isinstance(given, cst.List | cst.Tuple) and len(given.elements) == 1:
            given = given.elements[0].value
        weights = argument(call, 1, "grad_tensors")
        weighted = weights is not None and self.tree.text(weights) != "None"
        if given is None or weighted or isinstance(given, cst.List | cst.Tuple):
            raise self.refuse(
                call,
                "torch.autograd.backward() is given several tensors or grad_tensors, "
                "so what is averaged over ranks is unknown. Add the losses, each "
                "multiplied by its weight, and call backward() on the sum",
            )
        return given

    # Optimizers and models

    def _optimizers(self) -> list[Optimizer]:
        out = []
        for call in self.tree.calls:
            if models := _distinct(self._trained_by(call)):
                scope = self.tree.function(call)
                out.append(Optimizer(call=call, scope=scope, models=tuple(models)))
        known: set[Key] = {m.key for o in out for m in o.models}
        for call in self.tree.calls:
            if self.tree.method_called(call, "add_param_group") is None:
                continue
            given, scope = argument(call, 0, "param_group"), self.tree.function(call)
            if given is None or self._is_part(given, scope, known):
                continue
            models = _distinct(self._whose_parameters(given, scope, 3))
            if new := [m for m in models if m.key not in known]:
                out.append(Optimizer(call=call, scope=scope, models=tuple(new)))
        return out

    def _is_part(
        self, given: cst.BaseExpression, scope: Scope, known: set[Key]
    ) -> bool:
        """Return whether parameters that are added are of a model trained already."""
        for call in found(given, cst.Call):
            node = self.tree.method_called(call, "parameters", "named_parameters")
            while isinstance(node, cst.Attribute | cst.Subscript):
                node = node.value
                if not known.isdisjoint(o.key for o in self.flow.origins(node, scope)):
                    return True
        return False

    def _with_sources(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Replace models by those that they are made of, so that each is wrapped once.

        ``model.cuda()`` and ``DataParallel(model)`` are `model`, also in a function
        that gets it.
        """
        models = _distinct([m for o in optimizers for m in o.models])
        within = {
            m.key: {key[0] for key in self.flow.reached(m.value, m.scope)}
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
        scope = self.tree.function(call)
        if is_named(self.tree, call):
            given = argument(call, 0, "params")
            if given is None:
                return []
            models = self._whose_parameters(given, scope, 3)
            return models or self._grouped_by_call(given, scope)
        if not self._stepped.is_stepped(call):
            return []
        out: list[Origin] = []
        for value in self._stepped.given(call):
            out += self._whose_parameters(value, scope, depth=3)
        if not out and self._stepped.is_optimizer(call):
            for value in self._stepped.modules(call):
                out += self._model(value, scope)
        return out

    def _grouped_by_call(self, given: cst.BaseExpression, scope: Scope) -> list[Origin]:
        """Return the models that a call gets to make parameter groups of them."""
        calls = [(call, scope) for call in found(given, cst.Call)]
        calls += [
            (origin.value, origin.scope)
            for name in found(given, cst.Name)
            for origin in self.flow.assigned(name.value, scope)
            if isinstance(origin.value, cst.Call)
        ]
        return [
            model
            for call, where in calls
            for value in self._stepped.given(call)
            if self._stepped.is_module(value)
            for model in self._model(value, where)
        ]

    def _refuse_unknown_optimizers(self) -> None:
        """Refuse an optimizer whose model is unknown, so that it would not be wrapped.

        Raises:
            SpecError: there is one; the error has the line and the next step.
        """
        known = {id(o.call) for o in self.optimizers}
        models = {id(m.value) for o in self.optimizers for m in o.models}
        for call in self.tree.calls:
            if (
                self._stepped.is_optimizer(call)
                and id(call) not in known | models
                and not self._stepped.takes_optimizer(call)
                and not self.flow.local(call)
                and self.tree.called(call) not in self.tree.classes
                and self.tree.method_called(call, *SAME_OBJECT) is None
            ):
                raise self.refuse(
                    call,
                    f"`{self.tree.text(call)[:60]}` makes an optimizer, but the model "
                    "that it trains cannot be found in this file, so it could not be "
                    "distributed. Create the model here, and give the optimizer its "
                    "parameters()",
                )

    def _refuse_updates_by_hand(self) -> None:
        """Refuse a model that no optimizer trains, but a loop over its parameters.

        Raises:
            SpecError: there is one; the error has the line and the next step.
        """
        if not self.optimizers:
            return  # refused as a whole
        known = {id(m.value) for o in self.optimizers for m in o.models}
        for loop in found(self.tree.module, cst.For):
            scope = self.tree.function(loop)
            update = update_by_hand(self.tree, loop)
            for call in found(loop.iter, cst.Call) if update is not None else ():
                owner = self.tree.method_called(call, "parameters", "named_parameters")
                if owner is None or update is None:
                    continue
                if known.isdisjoint(k[0] for k in self.flow.reached(owner, scope)):
                    raise self.refuse(
                        update,
                        f"`{self.tree.text(owner)}` is trained here by hand, and no "
                        "optimizer has its parameters(), so it would not be "
                        "distributed. Train it with an optimizer",
                    )

    def _makes_optimizer(self, call: cst.Call) -> bool:
        return is_named(self.tree, call) or any(o.call is call for o in self.optimizers)

    def refuse_free_tensors(self) -> None:
        """Refuse tensors that an optimizer trains outside every module.

        DistributedDataParallel exchanges gradients of its module's parameters only, so
        each rank would train such a tensor by itself. An optimizer made within the
        training loop is for tensors of that batch, and is accepted.
        """
        for call in self.tree.calls:
            added = self.tree.method_called(call, "add_param_group") is not None
            if not added and not self._makes_optimizer(call):
                continue
            given = argument(call, 0, "param_group" if added else "params")
            if given is None or (
                not added and any(self.tree.within(call, t.node) for t in self.training)
            ):
                continue
            name = self._free_tensor(given, self.tree.function(call), depth=3)
            if name is not None:
                raise self.refuse(
                    call,
                    f"the optimizer also trains `{name}`, a tensor outside every "
                    "module: its gradient would not be exchanged, and each rank would "
                    "train its own. Make it a parameter of the model and use it in "
                    "forward(), or use --to horovod",
                )

    def _free_tensor(
        self, given: cst.BaseExpression, scope: Scope, depth: int
    ) -> str | None:
        """Return the name of a tensor among an optimizer's parameters, if any."""
        for name in found(given, cst.Name):
            if isinstance(self.tree.parent(name), cst.Attribute):
                continue
            for origin in self.flow.assigned(name.value, scope):
                made = origin.value
                if isinstance(made, cst.Call):
                    if self._makes_tensor(made):
                        return str(name.value)
                elif depth and isinstance(
                    made, cst.List | cst.Tuple | cst.Dict | cst.BinaryOperation
                ):
                    inner = self._free_tensor(made, origin.scope, depth - 1)
                    if inner is not None:
                        return inner
        for attribute in found(given, cst.Attribute):
            if dotted(attribute) is not None and self._is_free(attribute, scope):
                return self.tree.text(attribute)
        return None

    def _is_free(self, node: cst.Attribute, scope: Scope) -> bool:
        """Return whether an attribute of an object that is no module is a tensor."""
        made = self.flow.assigned(dotted(node) or "", scope)
        return any(
            isinstance(o.value, cst.Call)
            and o.scope is not None
            and self._makes_tensor(o.value)
            and not self._is_of_module(o.scope)
            for o in (*made, *self.flow.of_objects(node, scope))
        )

    def _is_of_module(self, method: cst.FunctionDef) -> bool:
        """Return whether a method's class has a base that may be a module."""
        owner = self.tree.owner(method)
        if owner is None:
            return True
        return any(kind.bases for kind in self.tree.family(owner))

    def _makes_tensor(self, call: cst.Call) -> bool:
        full = self.tree.called(call)
        module, _, _ = full.rpartition(".")
        return (
            (module == "torch" and full not in ("torch.compile", "torch.load"))
            or full
            in (
                "torch.nn.Parameter",
                "torch.nn.parameter.Parameter",
                "torch.nn.ParameterList",
                "torch.nn.ParameterDict",
            )
            or self.tree.method_called(call, "requires_grad_") is not None
        )

    def _whose_parameters(
        self, given: cst.BaseExpression, scope: Scope, depth: int
    ) -> list[Origin]:
        out: list[Origin] = []
        for call in found(given, cst.Call):
            owner = self.tree.method_called(call, "parameters", "named_parameters")
            if owner is not None:
                out += self._model(owner, scope)
        if out or depth == 0:
            return out
        for name in found(given, cst.Name):
            for origin in self.flow.assigned(name.value, scope):
                out += self._whose_parameters(origin.value, origin.scope, depth - 1)
            for above in _scopes(self.tree, scope):
                if name.value in parameters(above):
                    for call, value in self.flow.passed(above, name.value):
                        inner = self.tree.function(call)
                        out += self._whose_parameters(value, inner, depth - 1)
        return out

    def _model(self, owner: cst.BaseExpression, scope: Scope) -> list[Origin]:
        """Return where the model was created that contains `owner`."""
        while isinstance(owner, cst.Subscript):  # model[1].parameters()
            part = self._element(owner, scope)
            if part is not None:
                return self._model(*part)
            owner = owner.value
        path = dotted(owner)
        if path is None:
            if isinstance(owner, cst.Call) and owner.args:  # unwrap(model).parameters()
                return self._model(owner.args[0].value, scope)
            return []
        if path == "self" and scope is not None:
            return self._receivers(scope)
        over = self._iterated(owner)
        if over is not None:
            elements = self._elements(over, scope)
            return [m for e, where in elements for m in self._model(e, where)]
        # The longest assigned part of model.head.parameters() is the model.
        node: cst.BaseExpression = owner
        while True:
            origins = self.flow.origins(node, scope)
            real = [o for o in origins if o.path is not None or not dotted(o.value)]
            for origin in origins:  # a parameter that gets a loop's variable
                over = None if origin in real else self._iterated(origin.value)
                if over is not None:
                    for element, where in self._elements(over, origin.scope):
                        real += self._model(element, where)
            if real:
                return real
            if not isinstance(node, cst.Attribute):
                return []
            node = node.value
            if dotted(node) == "self" and scope is not None:
                return self._receivers(scope)

    def _iterated(self, node: cst.BaseExpression) -> cst.BaseExpression | None:
        """Return what a loop or a comprehension goes through to set a name."""
        name = (dotted(node) or "").partition(".")[0]
        for above in self.tree.ancestors(node):
            if isinstance(above, cst.FunctionDef | cst.Lambda | cst.ClassDef):
                return None
            clause: cst.For | cst.CompFor | None = None
            if isinstance(above, cst.For | cst.CompFor):
                clause = above
            elif isinstance(above, cst.BaseComp):
                clause = above.for_in
            while clause is not None:
                sets = isinstance(clause.target, cst.Name) and clause.target.value
                if sets == name and not self.tree.within(node, clause.iter):
                    return clause.iter
                clause = (
                    clause.inner_for_in if isinstance(clause, cst.CompFor) else None
                )
        return None

    def _elements(
        self, over: cst.BaseExpression, scope: Scope
    ) -> list[tuple[cst.BaseExpression, Scope]]:
        """Return the names in the list, the tuple or the dict's values gone through."""
        on = (
            self.tree.method_called(over, "values")
            if isinstance(over, cst.Call)
            else None
        )
        displays = [(over, scope)]
        path = dotted(over if on is None else on)
        if path is not None:
            if self._may_change(path):
                return []
            displays = [(o.value, o.scope) for o in self.flow.assigned(path, scope)]
        out: list[tuple[cst.BaseExpression, Scope]] = []
        for display, where in displays:
            kinds = (cst.List, cst.Tuple) if on is None else (cst.Dict,)
            if not isinstance(display, kinds):
                return []
            out += [(e.value, where) for e in display.elements]
        return out if all(dotted(e) is not None for e, _ in out) else []

    def _may_change(self, path: str) -> bool:
        """Return whether a container of a name may get or lose elements."""
        for node in found(self.tree.module, (cst.Name, cst.Attribute)):
            if dotted(node) != path or self.tree.is_label(node):
                continue
            above = self.tree.parent(node)
            if isinstance(above, cst.Attribute) and above.value is node:
                if above.attr.value not in _READING:
                    return True
            elif isinstance(above, cst.Subscript):
                around = self.tree.parent(above)
                if isinstance(around, cst.AssignTarget | cst.AugAssign | cst.Del):
                    return True
            elif isinstance(above, cst.Arg):
                call = self.tree.parent(above)
                if self.tree.called(call) not in (*WRAPPERS, "len", "print"):
                    return True
            elif not isinstance(above, cst.AssignTarget | cst.For | cst.CompFor):
                return True
        return False

    def _element(
        self, node: cst.Subscript, scope: Scope
    ) -> tuple[cst.BaseExpression, Scope] | None:
        """Return the name in a display that an element is, by its index or its key."""
        index = node.slice[0].slice
        path = dotted(node.value)
        made = self.flow.assigned(path, scope) if path is not None else []
        if len(made) != 1 or not isinstance(index, cst.Index):
            return None
        if self._may_change(path or ""):
            return None
        display, given = made[0].value, self.tree.text(index.value)
        out: cst.BaseExpression | None = None
        if isinstance(display, cst.List | cst.Tuple):
            if given.isdecimal() and int(given) < len(display.elements):
                out = display.elements[int(given)].value
        elif isinstance(display, cst.Dict):
            for element in display.elements:
                if not isinstance(element, cst.DictElement):
                    return None
                if self.tree.text(element.key).strip("\"'") == given.strip("\"'"):
                    out = element.value
        if out is None or dotted(out) is None:
            return None
        return out, made[0].scope

    def _receivers(self, method: cst.FunctionDef) -> list[Origin]:
        """Return the objects whose method is called, if that makes the optimizer."""
        out: list[Origin] = []
        for call in self.flow.calls_of(method):
            on = self.tree.method_called(call, method.name.value)
            if on is not None and dotted(on) != "self":
                out += self.flow.origins(on, self.tree.function(call))
        return out

    # Loops and loaders

    def _training_loops(self) -> list[Loop]:
        loops: dict[int, Loop] = {}
        for call in self.backwards:
            around = self._batch_loops(call, set())
            if not around:
                inner = next((x for x in self.tree.loops(call)), None)
                over = (
                    f" (line {self.tree.shown_line(inner)} iterates over "
                    f"`{self.tree.text(inner.iter)[:50]}`)"
                    if isinstance(inner, cst.For)
                    else ""
                )
                raise self.refuse(
                    call,
                    "backward() is called, but no loop around it takes batches from a "
                    f"DataLoader made in this file{over}, so the data cannot be "
                    "divided among ranks. Take the batches from a "
                    "torch.utils.data.DataLoader",
                )
            for loop in around:
                loops.setdefault(id(loop.node), loop)
        return list(loops.values())

    def _batch_loops(self, node: cst.CSTNode, seen: set[int]) -> list[Loop]:
        for loop in self.tree.loops(node):
            made = self.loop(loop)
            if made is not None:
                return [made]
        out: list[Loop] = []
        for function in (
            a for a in self.tree.ancestors(node) if isinstance(a, cst.FunctionDef)
        ):
            if id(function) in seen:
                continue
            seen.add(id(function))
            for call in self.flow.calls_of(function):
                out += self._batch_loops(call, seen)
        return out

    def loop(self, node: cst.For | cst.While) -> Loop | None:
        """Return the loop over a loader's batches, if a loop is one."""
        scope = self.tree.function(node)
        sources: list[tuple[cst.BaseExpression, Scope]] = []
        anchor: cst.CSTNode = node
        if isinstance(node, cst.For):
            sources = list(self._sources(node.iter, scope))
        for call in found(node.body, cst.Call):
            nearest = self.tree.loops(call)[:1]
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
        return Loop(
            node=node,
            scope=scope,
            loaders=loaders,
            origins=list({o.key: o for o in origins}.values()),
            anchor=anchor,
        )

    def _feeds(self, taken: cst.Call, loop: cst.For | cst.While) -> bool:
        """Return whether a loss in a loop is computed from a batch that it takes."""
        line = self.tree.parent(taken)
        if not isinstance(line, cst.Assign):
            return True
        targets = {n.value for t in line.targets for n in stored_names(t.target)}
        scope = self.tree.function(loop)
        waiting: list[cst.CSTNode] = [
            call
            for call in found(loop.body, cst.Call)
            if call in self.backwards
            or any(self._trains(f, set()) for f in self.flow.local(call))
        ]
        seen: set[str] = set()
        while waiting:
            for name in found(waiting.pop(), cst.Name):
                if name.value in targets:
                    return True
                if name.value not in seen:
                    seen.add(name.value)
                    made = self.flow.assigned(name.value, scope)
                    waiting += [
                        o.value for o in made if self.tree.within(o.statement, loop)
                    ]
        return False

    def _trains(self, function: cst.FunctionDef, seen: set[int]) -> bool:
        if id(function) in seen:
            return False
        seen.add(id(function))
        return any(
            call in self.backwards
            or any(self._trains(f, seen) for f in self.flow.local(call))
            for call in found(function.body, cst.Call)
        )

    def taken_by(self, node: cst.CompFor) -> list[Origin]:
        """Return the origins of loaders that a comprehension takes batches from."""
        return self.taken(node.iter, self.tree.function(node))

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
            full = self.tree.called(node)
            if full in _COUNTERS:
                return []
            if self.is_loader(node):
                return [(node, scope)]
            if full in WRAPPERS and node.args and self._local(node) is None:
                several = node.args if full == "zip" else node.args[:1]
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
            return [(node, scope)] if self._gives_loader(node) else []
        if (path := dotted(node)) is not None:
            out = []
            for origin in self.flow.assigned(path, scope):
                made = origin.value
                if isinstance(made, cst.Call) and (
                    self.tree.called(made) in WRAPPERS or self._yields(made)
                ):
                    out += self._sources(made, origin.scope, depth - 1)
            return out or [(node, scope)]
        if isinstance(node, cst.Subscript) and dotted(node.value) is not None:
            return [(node, scope)]
        return []

    def _gives_loader(self, call: cst.Call) -> bool:
        """Return whether a function of the script returns only a loader."""
        returned = [
            self.flow.origins(given, function)
            for function in self.flow.local(call)
            for given in self.flow.returned(function)
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
        return next((f for f in self.tree.functions if f.name.value == name), None)

    def _loaders(self, node: cst.BaseExpression, scope: Scope) -> list[Origin]:
        """Return where the loader was created; empty if it cannot be a loader."""
        key: str | None = None
        if isinstance(node, cst.Subscript):
            index = node.slice[0].slice
            if isinstance(index, cst.Index) and isinstance(
                index.value, cst.SimpleString
            ):
                key = index.value.value.strip("\"'")
            node = node.value
        out: list[Origin] = []
        for origin in self.flow.origins(node, scope):
            made = origin.value
            if isinstance(made, cst.Dict):
                for element in made.elements:
                    if isinstance(element, cst.DictElement) and (
                        key is None or self.tree.text(element.key).strip("\"'") == key
                    ):
                        out += self.flow.origins(element.value, origin.scope)
            elif isinstance(made, cst.DictComp):
                out += self.flow.origins(made.value, origin.scope)
            else:
                out.append(origin)
        return [o for o in out if self.may_be_loader(o)]

    def is_loader(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is a call of DataLoader."""
        full = self.tree.called(node)
        return full.rpartition(".")[2] == "DataLoader" and (
            full == "DataLoader" or full.startswith("torch.")
        )

    def may_be_loader(self, origin: Origin) -> bool:
        """Return whether a value is a DataLoader or may be returned as one."""
        made = origin.value
        if self.is_loader(made):
            return True
        if not isinstance(made, cst.Call):
            return False
        local = self._local(made)
        if local is not None:
            return any(self.is_loader(c) for c in found(local.body, cst.Call))
        full = self.tree.called(made)
        name = (origin.path or "").lower()
        return not full.startswith("torch.") and (
            "loader" in full.lower() or "loader" in name
        )


def _scopes(tree: Tree, scope: Scope) -> list[cst.FunctionDef]:
    out = []
    while scope is not None:
        out.append(scope)
        scope = tree.function(scope)
    return out


def _distinct(origins: list[Origin]) -> list[Origin]:
    seen: set[tuple[int, str | None]] = set()
    out = []
    for origin in origins:
        key = (id(origin.scope), origin.path) if origin.path else (id(origin.value), "")
        if key not in seen:
            seen.add(key)
            out.append(origin)
    return out
