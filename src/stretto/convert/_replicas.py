"""List what makes the models of ranks differ although their gradients are equal.

Gradients are averaged over ranks, so models stay equal as long as all that changes them
is equal: learning rates, the data, the parameters themselves. Since training began each
rank draws its own random numbers, and it always has its own samples, gradients before
the exchange, clock and errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, final

import libcst as cst

from stretto.convert._flow import parameters
from stretto.convert._models import reaching_training, trained_functions
from stretto.convert._tree import Scope, argument, dotted, found, stored_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._edit import Work
    from stretto.convert._job import Optimizer
    from stretto.convert._models import Models

_DRAWS = frozenset(
    [
        *(
            f"torch.{name}"
            for name in (
                "rand",
                "randn",
                "randint",
                "randperm",
                "rand_like",
                "randn_like",
                "randint_like",
                "normal",
                "bernoulli",
                "multinomial",
                "poisson",
            )
        ),
        "torch.utils.data.random_split",
        "torch.utils.data.dataset.random_split",
    ]
)
_DRAWING_METHODS = (
    "uniform_",
    "normal_",
    "random_",
    "bernoulli_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
    "trunc_normal_",
)
_STORING = (
    "append",
    "extend",
    "setdefault",
    "update",
    "__setitem__",
    "setattr",
    "print",
)
"""Calls whose results a hook does not use."""

_REDUCING = ("mean", "sum", "norm", "std", "var", "max", "min", "amax", "mse_loss")
"""Functions that make one value of all samples."""

_FIXED_INITS = ("zeros_", "ones_", "constant_", "eye_", "dirac_", "calculate_gain")
_PRUNING = (
    "torch.nn.utils.prune.random_unstructured",
    "torch.nn.utils.prune.random_structured",
)
_CLOCKS = frozenset(
    [
        "time.time",
        "time.time_ns",
        "time.monotonic",
        "time.perf_counter",
        "time.process_time",
        "timeit.default_timer",
        "datetime.now",
        "datetime.utcnow",
        "datetime.datetime.now",
        "datetime.datetime.utcnow",
        "datetime.datetime.today",
    ]
)
_PASSED_ON = ("KeyboardInterrupt", "StopIteration", "SystemExit")
"""Errors that do not come from a step of one rank."""

_SEEDING = (
    "torch.manual_seed",
    "torch.random.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "transformers.set_seed",
)

_UPDATING = ("torch.optim.swa_utils.update_bn", "torch.optim.swa_utils.bn_update")

_DEPTH = 4


class RankValues(Protocol):
    """What is known about values of a rank's own samples."""

    def differs(self, node: cst.BaseExpression) -> bool:
        """Return whether a value comes from a rank's own samples, not reduced."""

    def steers(self, node: cst.If | cst.While) -> bool:
        """Return whether a decision may change how often a rank trains."""


def point_out(
    work: Work, models: Models, values: RankValues, begins: cst.CSTNode
) -> None:
    """List what makes models differ.

    Args:
        work: The script and its edits.
        models: The trained models and where they are wrapped.
        values: What differs by rank.
        begins: The statement before which ranks begin to draw their own numbers.
    """
    _Replicas(work, models, values, begins).point_out()


@final
class _Replicas:
    def __init__(
        self, work: Work, models: Models, values: RankValues, begins: cst.CSTNode
    ) -> None:
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._models, self._values, self._begins = models, values, begins
        self._training = reaching_training(work)
        self._in_step = trained_functions(work)
        self._reported: set[int] = set()

    def point_out(self) -> None:
        for call in self._tree.calls:
            self._changed_by_call(call)
            self._hook(call)
            self._gradients(call)
            self._statistics(call)
            self._trial(call)
            self._seed(call)
        changes: Iterator[cst.Assign | cst.AugAssign]
        changes = found(self._tree.module, (cst.Assign, cst.AugAssign))
        for node in changes:
            self._assigned(node)
        for loop in found(self._tree.module, cst.For):
            self._samples(loop)
        for optimizer in self._work.job.optimizers:
            self._closures(optimizer)
            for given in optimizer.call.args[1:]:
                self._setting(given.value, optimizer.scope, "the optimizer")
        self._data()
        decisions: Iterator[cst.If | cst.While]
        decisions = found(self._tree.module, (cst.If, cst.While))
        for decision in decisions:
            self._decision(decision)
        for choice in found(self._tree.module, cst.IfExp):
            self._choice(choice)
        for block in found(self._tree.module, cst.Try):
            self._attempt(block)

    # Parameters and gradients

    def _changed_by_call(self, call: cst.Call) -> None:
        scope, full = self._tree.function(call), self._tree.called(call)
        if full.startswith("torch.nn.init."):
            fixed = full.rpartition(".")[2] in _FIXED_INITS
            if not fixed and call.args and self._is_parameter(call.args[0].value):
                self._note_drawn(call)
            return
        if full in _PRUNING and call.args:
            if self._is_trained(call.args[0].value, scope, call):
                self._note_drawn(call)
            return
        func = call.func
        if not isinstance(func, cst.Attribute):
            return
        name = func.attr.value
        if name == "reset_parameters" and not call.args:
            if self._is_trained(func.value, scope, call):
                self._note_drawn(call)
        elif name == "load_state_dict" and call.args:
            given = call.args[0].value
            fresh = self._reached(given, scope, self._is_new_module, 2)
            if fresh is not None and self._is_trained(func.value, scope, call):
                self._note_drawn(call)
        elif name == "apply" and call.args:
            function = self._named(call.args[0].value)
            draws = function is not None and self._initializes(function)
            if draws and self._is_trained(func.value, scope, call):
                self._note_drawn(call)
        elif name.endswith("_") and not name.startswith("_"):
            on: cst.BaseExpression = func.value
            while isinstance(on, cst.Call) and isinstance(on.func, cst.Attribute):
                on = on.func.value
            if self._is_parameter(on):
                drawn = name in _DRAWING_METHODS
                self._changed(call, [a.value for a in call.args], drawn=drawn)

    def _assigned(self, node: cst.Assign | cst.AugAssign) -> None:
        scope = self._tree.function(node)
        target = node.target if isinstance(node, cst.AugAssign) else None
        if isinstance(node, cst.Assign):
            target = node.targets[0].target
        if isinstance(target, cst.Subscript) and self._is_group(target):
            self._setting(node.value, scope, self._tree.text(target))
        elif isinstance(target, cst.Attribute | cst.Subscript | cst.Name):
            plain = isinstance(target, cst.Name) and isinstance(node, cst.Assign)
            if not plain and self._is_parameter(target):
                self._changed(node, [node.value], drawn=False)

    def _changed(
        self, at: cst.CSTNode, given: list[cst.BaseExpression], *, drawn: bool
    ) -> None:
        scope = self._tree.function(at)
        names = [n for v in given for n in found(v, cst.Name)]
        fresh = any(
            self._reached(over, scope, self._is_new_module, 2) is not None
            for name in names
            for over in self._loop_over(name)
        )
        if drawn or fresh or any(self._draw(v, scope) is not None for v in given):
            self._note_drawn(at)
        elif any(self._values.differs(v) for v in given):
            self._note(
                at,
                f"`{self._short(at)}` changes parameters or gradients by values of "
                "each rank's own samples, so the models of the ranks become different. "
                "Reduce the values over ranks (mean_over_ranks) first, or use "
                "gradients that backward() computed",
            )

    def _note_drawn(self, at: cst.CSTNode) -> None:
        self._note(
            at,
            f"`{self._short(at)}` changes parameters or gradients by random numbers, "
            "and since training began each rank draws its own, so the models of the "
            "ranks become different. Draw the same numbers on all ranks: set a seed "
            "just before it (torch.manual_seed), or broadcast the result",
        )

    def _is_parameter(self, node: cst.BaseExpression) -> bool:
        """Return whether a value is a trained parameter, its data or its gradient."""
        while isinstance(node, cst.Subscript) or (
            isinstance(node, cst.Attribute) and node.attr.value in ("data", "grad")
        ):
            node = node.value
        scope = self._tree.function(node)
        if isinstance(node, cst.Attribute) and node.attr.value in ("weight", "bias"):
            return self._is_trained(node.value, scope, node)
        if not isinstance(node, cst.Name):
            return False
        for over in self._loop_over(node):
            text = self._tree.text(over)
            if "param_groups" in text or '["params"]' in text or "['params']" in text:
                return self._is_used(scope) and self._late(node)
            for call in found(over, cst.Call):
                owner = self._tree.method_called(call, "parameters", "named_parameters")
                if owner is not None and self._is_trained(owner, scope, node):
                    return True
        return False

    def _is_used(self, scope: Scope) -> bool:
        """Return whether a function is no method, or one of a class that is called."""
        owner = self._tree.owner(scope)
        return owner is None or any(
            (dotted(call.func) or "").rpartition(".")[2] == kind.name.value
            for kind in self._tree.family(owner)
            for call in self._tree.calls
        )

    def _loop_over(self, name: cst.Name) -> Iterator[cst.BaseExpression]:
        """Yield what the loops that set a name iterate over, or its part of a zip."""
        for loop in self._tree.loops(name):
            if not isinstance(loop, cst.For):
                continue
            if not any(n.value == name.value for n in stored_names(loop.target)):
                continue
            over: cst.BaseExpression = loop.iter
            target: cst.BaseExpression = loop.target
            if self._tree.called(over) == "enumerate" and isinstance(over, cst.Call):
                over = over.args[0].value
                if isinstance(target, cst.Tuple):
                    target = target.elements[-1].value
            if self._tree.called(over) == "zip" and isinstance(over, cst.Call):
                if isinstance(target, cst.Tuple):
                    for element, part in zip(target.elements, over.args, strict=False):
                        names = stored_names(element.value)
                        if any(n.value == name.value for n in names):
                            yield part.value
                continue
            yield over

    def _is_trained(
        self, node: cst.BaseExpression, scope: Scope, at: cst.CSTNode, depth: int = 3
    ) -> bool:
        """Return whether something is, or is part of, a model that is wrapped."""
        owner: cst.BaseExpression = node
        while True:
            if self._models.is_model(owner, scope):
                break
            if not isinstance(owner, cst.Attribute | cst.Subscript):
                return self._is_part(owner, scope, at, depth)
            owner = owner.value
        first = (dotted(owner) or "").partition(".")[0]
        if scope is not None and first in parameters(scope) and first != "self":
            return depth > 0 and any(
                self._is_trained(value, self._tree.function(call), call, depth - 1)
                for call, value in self._flow.passed(scope, first)
            )
        return self._models.is_wrapped(owner, scope) and self._late(at)

    def _is_part(
        self, node: cst.BaseExpression, scope: Scope, at: cst.CSTNode, depth: int
    ) -> bool:
        """Return whether a name is set by a loop over a trained model's modules."""
        if not isinstance(node, cst.Name) or not depth:
            return False
        for over in self._loop_over(node):
            for call in found(over, cst.Call):
                of = self._tree.method_called(
                    call, "modules", "children", "named_modules", "named_children"
                )
                if of is not None and self._is_trained(of, scope, at, depth - 1):
                    return True
        return False

    def _initializes(self, function: cst.FunctionDef) -> bool:
        for call in found(function.body, cst.Call):
            full = self._tree.called(call)
            name = full.rpartition(".")[2]
            if full.startswith("torch.nn.init.") and name not in _FIXED_INITS:
                return True
            if self._is_draw(call):
                return True
            if self._tree.method_called(call, "reset_parameters") is not None:
                return True
        return False

    def _named(self, node: cst.BaseExpression) -> cst.FunctionDef | None:
        last = (dotted(node) or "").rpartition(".")[2]
        return next((f for f in self._tree.functions if f.name.value == last), None)

    # Gradients before the exchange

    def _hook(self, call: cst.Call) -> None:
        on = self._tree.method_called(
            call, "register_hook", "register_post_accumulate_grad_hook"
        )
        if on is None:
            self._module_hook(call)
            return
        after = self._tree.text(call.func).endswith("accumulate_grad_hook")
        if after or self._hooked(on):
            self._note(
                call,
                f"`{self._short(call)}`: the hook sees the gradient of this rank's own "
                "samples, before the average over ranks. Change gradients, or make the "
                "step, after backward() instead",
            )
        elif call.args and self._changes(call.args[0].value):
            self._note_hook(call, "a gradient")

    def _module_hook(self, call: cst.Call) -> None:
        """List a hook of a module that may change a gradient, an input or an output."""
        if not call.args:
            return
        given = call.args[0].value
        backward = self._tree.method_called(
            call,
            "register_full_backward_hook",
            "register_full_backward_pre_hook",
            "register_backward_hook",
        )
        if backward is not None and self._changes(given):
            self._note_hook(call, "a gradient")
        forward = self._tree.method_called(
            call, "register_forward_hook", "register_forward_pre_hook"
        )
        if forward is None:
            return
        function = self._named(given)
        if self._changes(given):
            self._note_hook(call, "values")
        elif function is not None and any(
            self._reduces(inner) for inner in found(function.body, cst.Call)
        ):
            self._note(
                call,
                f"`{self._short(call)}`: the hook computes a value of this rank's own "
                "samples, which stretto does not follow. It is correct in a loss only "
                "if it is a mean over samples",
            )

    def _note_hook(self, call: cst.Call, what: str) -> None:
        self._note(
            call,
            f"`{self._short(call)}`: the hook may change {what} of this rank's own "
            "samples, which stretto does not follow. It is correct if it treats each "
            "sample by itself, or multiplies by a constant",
        )

    def _changes(self, hook: cst.BaseExpression) -> bool:
        """Return whether a hook returns something else than a multiple of its input."""
        if isinstance(hook, cst.Lambda):
            names = {p.name.value for p in hook.params.params}
            return not self._is_multiple(hook.body, names)
        function = self._named(hook)
        if function is None:
            return False
        names = set(parameters(function))
        return any(
            not self._is_multiple(v, names) for v in self._flow.returned(function)
        )

    def _is_multiple(self, value: cst.BaseExpression, names: set[str]) -> bool:
        """Return whether a value is ``None``, or one of some names times a constant."""
        if isinstance(value, cst.Name):
            return value.value in names or value.value == "None"
        if isinstance(value, cst.UnaryOperation):
            return self._is_multiple(value.expression, names)
        if isinstance(value, cst.BinaryOperation):
            if not isinstance(value.operator, cst.Multiply | cst.Divide):
                return False
            left, right = value.left, value.right
            if isinstance(value.operator, cst.Multiply) and not isinstance(
                left, cst.Name
            ):
                left, right = right, left
            free = {n.value for n in found(right, cst.Name)}
            return self._is_multiple(left, names) and not free & names
        if isinstance(value, cst.Call):
            name = self._tree.called(value).rpartition(".")[2]
            if isinstance(value.func, cst.Attribute) and name in ("neg", "clone"):
                return self._is_multiple(value.func.value, names)
            return name in _STORING
        return False

    def _reduces(self, call: cst.Call) -> bool:
        """Return whether a call makes one value of all samples."""
        name = dotted(call.func) or ""
        given = [arg.value for arg in call.args]
        if isinstance(call.func, cst.Attribute):
            name = call.func.attr.value
        if self._tree.called(call).startswith("torch"):
            given = given[1:]
        if name not in _REDUCING:
            return False
        return not given or name == "mse_loss" or self._tree.text(given[0]) == "0"

    def _hooked(self, node: cst.BaseExpression) -> bool:
        """Return whether a hook is on a parameter of a model that is trained."""
        scope = self._tree.function(node)
        if isinstance(node, cst.Attribute) and node.attr.value in ("weight", "bias"):
            return self._belongs(node.value, scope)
        if not isinstance(node, cst.Name):
            return False
        return any(
            owner is not None and self._belongs(owner, scope)
            for over in self._loop_over(node)
            for call in found(over, cst.Call)
            for owner in [
                self._tree.method_called(call, "parameters", "named_parameters")
            ]
        )

    def _belongs(self, node: cst.BaseExpression, scope: Scope) -> bool:
        while not self._models.is_model(node, scope):
            if not isinstance(node, cst.Attribute | cst.Subscript):
                return dotted(node) == "self"
            node = node.value
        return True

    def _gradients(self, call: cst.Call) -> None:
        if self._tree.called(call) != "torch.autograd.grad":
            return
        of = argument(call, 1, "inputs")
        if of is None or not self._is_in_step(call):
            return
        scope = self._tree.function(call)
        owners = [
            self._tree.method_called(c, "parameters", "named_parameters")
            for c in found(of, cst.Call)
        ]
        owners += [
            a.value
            for a in found(of, cst.Attribute)
            if a.attr.value in ("weight", "bias")
        ]
        if any(o is not None and self._belongs(o, scope) for o in owners):
            self._note(
                call,
                f"`{self._short(call)}` returns gradients of each rank's own samples: "
                "only those of backward() are exchanged. Average them over ranks "
                "(torch.distributed.all_reduce) before they are used",
            )

    def _statistics(self, call: cst.Call) -> None:
        if self._tree.called(call) not in _UPDATING or not call.args:
            return
        loader = call.args[0].value
        origins = self._work.job.taken(loader, self._tree.function(call))
        keys = {o.key for loop in self._work.job.training for o in loop.origins}
        if any(o.key in keys for o in origins):
            self._note(
                call,
                f"`{self._short(call)}` computes statistics of each rank's own "
                "samples, so the saved ones are rank 0's. Give it a loader of all "
                "samples",
            )

    # Settings and data

    def _is_group(self, target: cst.Subscript) -> bool:
        """Return whether a target is a setting of an optimizer's group."""
        index = target.slice[0].slice
        if not isinstance(index, cst.Index):
            return False
        if not isinstance(index.value, cst.SimpleString):
            return False
        if "param_groups" in self._tree.text(target.value):
            return True
        return isinstance(target.value, cst.Name) and any(
            "param_groups" in self._tree.text(over)
            for over in self._loop_over(target.value)
        )

    def _setting(self, value: cst.BaseExpression, scope: Scope, name: str) -> None:
        drawn = self._draw(value, scope)
        if drawn is None and not self._values.differs(value):
            return
        why = (
            f"random numbers (`{self._short(drawn)}`), of which each rank draws its "
            "own since training began"
            if drawn is not None
            else "values of each rank's own samples"
        )
        self._note(
            value,
            f"{name} is set from {why}: ranks train with different settings, and their "
            "models become different. Take the value from `random` or NumPy with a "
            "seed, or reduce it over ranks",
        )

    def _data(self) -> None:
        for loop in self._work.job.training:
            for origin in loop.origins:
                made = origin.value
                for given in made.args if isinstance(made, cst.Call) else ():
                    drawn = self._draw(given.value, origin.scope)
                    if drawn is not None:
                        self._note_data(made, drawn)

    def _note_data(self, made: cst.CSTNode, drawn: cst.Call) -> None:
        self._note(
            made,
            f"the data set is made with `{self._short(drawn)}`, and since training "
            "began each rank draws its own random numbers, so ranks divide different "
            "data sets. Give the call a generator with a seed, or draw with `random` "
            "or NumPy",
        )

    def _samples(self, loop: cst.For) -> None:
        """List a loop over drawn samples, rather than over a loader, that trains."""
        if any(loop is t.node for t in self._work.job.training):
            return
        drawn = self._draw(loop.iter, self._tree.function(loop))
        trains = any(
            c in self._work.job.backwards
            or any(f in self._training for f in self._flow.local(c))
            for c in found(loop.body, cst.Call)
        )
        if drawn is not None and trains:
            self._note(
                loop,
                f"this trains on what `{self._short(drawn)}` draws, and since training "
                "began each rank draws its own random numbers: a step takes other "
                "samples on each rank. Take the samples from a DataLoader",
            )

    def _closures(self, optimizer: Optimizer) -> None:
        """Reduce the loss by which an optimizer decides how far to go."""
        if self._tree.called(optimizer.call).rpartition(".")[2] != "LBFGS":
            return
        for call in self._tree.calls:
            given = argument(call, 0, "closure")
            if given is None or self._tree.method_called(call, "step") is None:
                continue
            function = self._named(given)
            if function is None:
                continue
            for value in self._flow.returned(function):
                if id(value) in self._reported or not self._values.differs(value):
                    continue
                self._reported.add(id(value))
                self._work.call_around(value, "mean_over_ranks")
                self._work.done(
                    value,
                    f"`{self._short(value)}`, by which the optimizer decides, is the "
                    "mean over ranks",
                )

    def _seed(self, call: cst.Call) -> None:
        """List a seed that is set on all ranks while they train."""
        if self._tree.called(call) not in _SEEDING or not self._late(call):
            return
        begins = self._begins
        around = isinstance(begins, cst.For | cst.While) and self._tree.within(
            call, begins.body
        )
        if around or any(
            self._tree.within(caller, begins) for caller in self._callers_of(call)
        ):
            self._note(
                call,
                f"`{self._short(call)}` sets one seed on all ranks while they train: "
                "from here on they draw the same numbers (dropout, noise) for "
                "different samples. Add the rank to the seed, unless parameters or "
                "decisions are drawn from it",
            )

    def _callers_of(self, node: cst.CSTNode) -> list[cst.Call]:
        """Return the calls that lead to a node."""
        out: list[cst.Call] = []
        waiting = [self._tree.function(node)]
        seen: set[int] = set()
        while waiting:
            scope = waiting.pop()
            if scope is None or id(scope) in seen:
                continue
            seen.add(id(scope))
            calls = self._flow.calls_of(scope)
            out += calls
            waiting += [self._tree.function(c) for c in calls]
        return out

    def _trial(self, call: cst.Call) -> None:
        """List a random argument of a function that trains."""
        if not any(f in self._training for f in self._flow.local(call)):
            return
        if self._is_in_step(call):
            return
        scope = self._tree.function(call)
        for given in call.args:
            drawn = self._draw(given.value, scope)
            if drawn is not None:
                self._note(
                    call,
                    f"`{self._short(call)}` trains with a value drawn by "
                    f"`{self._short(drawn)}`, and since training began each rank draws "
                    "its own random numbers: ranks train with different values. Draw "
                    "with `random` or NumPy, or set a seed before (torch.manual_seed)",
                )
                return

    # Decisions

    def _decision(self, node: cst.If | cst.While) -> None:
        if not self._values.steers(node):
            return
        scope = self._tree.function(node)
        clock = self._reached(node.test, scope, self._is_clock)
        if clock is not None:
            self._note(
                node,
                f"this decides on the clock (`{self._short(clock)}`), which differs by "
                "rank: if ranks take different branches here, they hang waiting for "
                "each other. Let rank 0 decide, and broadcast it",
            )
        elif (uneven := self._is_uneven(node.test)) is not None:
            self._note(
                node,
                f"this decides on `{self._short(uneven)}`, which is equal on all ranks "
                "only if all have drawn equally often, but the samples of a rank draw "
                "from it too: if ranks take different branches here, they hang waiting "
                "for each other. Use a generator of its own, random.Random(seed)",
            )
        elif not self._has_draw(node.test):
            drawn = self._draw(node.test, scope)
            if drawn is not None:
                self._note(
                    node,
                    f"this decides on a number drawn by `{self._short(drawn)}`, which "
                    "differs by rank: if ranks take different branches here, they hang "
                    "waiting for each other",
                )

    def _choice(self, node: cst.IfExp) -> None:
        """List a choice between models that ranks may make differently."""
        scope = self._tree.function(node)
        chosen = (node.body, node.orelse)
        if self._is_in_step(node) and any(
            self._models.is_model(part, scope) for part in chosen
        ):
            drawn = self._draw(node.test, scope)
            if drawn is not None or self._values.differs(node.test):
                self._note(
                    node,
                    f"`{self._short(node)}` chooses a model by a value that differs by "
                    "rank: if ranks train different models, they hang waiting for each "
                    "other. Choose with `random`, or let rank 0 choose",
                )

    def _is_uneven(self, node: cst.BaseExpression) -> cst.Call | None:
        """Return a draw of `random` or NumPy that samples of a rank also make."""
        for call in found(node, cst.Call):
            library = self._library(call)
            for function in self._tree.functions if library else ():
                if function.name.value in ("__getitem__", "__call__") and any(
                    self._library(c) == library for c in found(function, cst.Call)
                ):
                    return call
        return None

    def _library(self, call: cst.Call) -> str:
        full = self._tree.called(call)
        names = ("random.", "numpy.random.")
        return next((n for n in names if full.startswith(n)), "")

    def _has_draw(self, node: cst.BaseExpression) -> bool:
        return any(self._is_draw(call) for call in found(node, cst.Call))

    def _attempt(self, block: cst.Try) -> None:
        """List a step whose error on one rank is skipped, while the others wait."""
        inside = [c for c in self._work.job.backwards if self._tree.within(c, block)]
        inside = [c for c in inside if self._tree.within(c, block.body)]
        around = any(
            self._tree.within(loop.node, block) for loop in self._work.job.training
        )
        if not inside or around:
            return
        for handler in block.handlers:
            kind = self._tree.text(handler.type) if handler.type is not None else ""
            leaves = any(True for _ in found(handler.body, cst.Raise)) or any(
                self._tree.called(c) in ("sys.exit", "exit", "quit", "os._exit")
                for c in found(handler.body, cst.Call)
            )
            if kind.rpartition(".")[2] not in _PASSED_ON and not leaves:
                self._note(
                    handler,
                    "an error in a step is skipped here: if it happens on one rank "
                    "only, the others hang waiting for its gradients. Let the error "
                    "end the training",
                )

    # Values

    def _draw(self, node: cst.BaseExpression, scope: Scope) -> cst.Call | None:
        """Return a draw by which ranks differ and that a value may come from."""
        return self._reached(node, scope, lambda c: self._is_draw(c) and self._late(c))

    def _reached(
        self,
        node: cst.BaseExpression,
        scope: Scope,
        is_source: Source,
        depth: int = _DEPTH,
    ) -> cst.Call | None:
        for call in found(node, cst.Call):
            if is_source(call):
                return call
        if depth == 0:
            return None
        for call in found(node, cst.Call):
            for function in self._flow.local(call):
                for value in self._flow.returned(function):
                    source = self._reached(value, function, is_source, depth - 1)
                    if source is not None:
                        return source
        for name in found(node, (cst.Name, cst.Attribute)):
            path = dotted(name)
            above = self._tree.parent(name)
            if path is None or (
                isinstance(above, cst.Attribute) and above.attr is name
            ):
                continue
            for origin in self._flow.assigned(path, scope):
                if self._tree.within(node, origin.statement):
                    continue
                source = self._reached(origin.value, origin.scope, is_source, depth - 1)
                if source is not None:
                    return source
        return None

    def _is_draw(self, call: cst.Call) -> bool:
        generator = argument(call, -1, "generator")
        if generator is not None and self._tree.text(generator) != "None":
            return False
        full = self._tree.called(call)
        if full in _DRAWS:
            return True
        if self._tree.method_called(call, *_DRAWING_METHODS) is not None:
            return True
        on = self._tree.method_called(call, "sample", "rsample")
        return isinstance(on, cst.Call) and self._tree.called(on).startswith(
            "torch.distributions."
        )

    def _is_new_module(self, call: cst.Call) -> bool:
        """Return whether a call makes a module with random numbers of this rank."""
        full = self._tree.called(call)
        last = full.rpartition(".")[2]
        of_torch = full.startswith("torch.nn.") and last[:1].isupper()
        kind = self._tree.classes.get(full)
        is_module = kind is not None and any(
            (dotted(base.value) or "").endswith("Module") for base in kind.bases
        )
        if last in ("Parameter", "ParameterList") or not (of_torch or is_module):
            return False
        return self._late(call)

    def _is_clock(self, call: cst.Call) -> bool:
        return self._tree.called(call) in _CLOCKS

    def _is_in_step(self, node: cst.CSTNode) -> bool:
        if any(self._tree.within(node, t.node) for t in self._work.job.training):
            return True
        return any(a in self._in_step for a in self._tree.ancestors(node))

    def _late(self, node: cst.CSTNode, seen: frozenset[int] = frozenset()) -> bool:
        """Return whether code may run after ranks began to draw their own numbers."""
        scope = self._tree.function(node)
        if self._tree.within(node, self._begins):
            return True
        if scope is self._tree.function(self._begins):
            return self._tree.line(node) > self._tree.line(self._begins)
        if scope is None or id(scope) in seen:
            return False
        more = seen | {id(scope)}
        return any(self._late(call, more) for call in self._flow.calls_of(scope))

    def _short(self, node: cst.CSTNode) -> str:
        return " ".join(self._tree.text(node).split())[:60]

    def _note(self, node: cst.CSTNode, text: str) -> None:
        if id(node) not in self._reported:
            self._reported.add(id(node))
            self._work.undecided(node, text)


if TYPE_CHECKING:
    from collections.abc import Callable

    Source = Callable[[cst.Call], bool]
    """Returns whether a call is what is looked for."""
