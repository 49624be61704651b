"""List what uses gradients of one rank's samples, before the exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._flow import parameters
from stretto.convert._tree import argument, dotted, found

if TYPE_CHECKING:
    from stretto.convert._replica_notes import ReplicaNotes

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


@final
class GradientHooks:
    """Hooks of a script, and gradients that no ``backward`` computes."""

    def __init__(self, on: ReplicaNotes) -> None:
        self._on = on
        self._note, self._short = on.note, on.short
        self._tree, self._flow = on.work.tree, on.work.flow
        self._sources, self._parts = on.sources, on.parts

    def hook(self, call: cst.Call) -> None:
        """List a hook that sees gradients or values of one rank's samples."""
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
        function = self._on.named(given)
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
        function = self._on.named(hook)
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
            return self._parts.belongs(node.value, scope)
        if not isinstance(node, cst.Name):
            return False
        return any(
            owner is not None and self._parts.belongs(owner, scope)
            for over in self._parts.loops_over(node)
            for call in found(over, cst.Call)
            for owner in [
                self._tree.method_called(call, "parameters", "named_parameters")
            ]
        )

    def gradients(self, call: cst.Call) -> None:
        """List gradients that are computed without ``backward``."""
        if self._tree.called(call) != "torch.autograd.grad":
            return
        of = argument(call, 1, "inputs")
        if of is None or not self._sources.is_in_step(call):
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
        if any(o is not None and self._parts.belongs(o, scope) for o in owners):
            self._note(
                call,
                f"`{self._short(call)}` returns gradients of each rank's own samples: "
                "only those of backward() are exchanged. Average them over ranks "
                "(torch.distributed.all_reduce) before they are used",
            )
