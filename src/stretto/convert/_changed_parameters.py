"""List what changes parameters or gradients differently on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._rank_sources import DRAWING_METHODS
from stretto.convert._replica_notes import target_of
from stretto.convert._tree import found

if TYPE_CHECKING:
    from stretto.convert._replica_notes import ReplicaNotes

_FIXED_INITS = ("zeros_", "ones_", "constant_", "eye_", "dirac_", "calculate_gain")

_PRUNING = (
    "torch.nn.utils.prune.random_unstructured",
    "torch.nn.utils.prune.random_structured",
)


@final
class ChangedParameters:
    """Changes of what is trained, besides the steps of optimizers."""

    def __init__(self, on: ReplicaNotes) -> None:
        self._on = on
        self._note, self._short = on.note, on.short
        self._tree = on.work.tree
        self._values, self._sources, self._parts = on.values, on.sources, on.parts

    def by_call(self, call: cst.Call) -> None:
        """List a call that changes parameters by what differs by rank."""
        scope, full = self._tree.function(call), self._tree.called(call)
        if full.startswith("torch.nn.init."):
            fixed = full.rpartition(".")[2] in _FIXED_INITS
            if not fixed and call.args and self._parts.is_parameter(call.args[0].value):
                self._note_drawn(call)
            return
        if full in _PRUNING and call.args:
            if self._parts.is_trained(call.args[0].value, scope, call):
                self._note_drawn(call)
            return
        func = call.func
        if not isinstance(func, cst.Attribute):
            return
        name = func.attr.value
        if name == "reset_parameters" and not call.args:
            if self._parts.is_trained(func.value, scope, call):
                self._note_drawn(call)
        elif name == "load_state_dict" and call.args:
            given = call.args[0].value
            fresh = self._sources.reached(given, scope, self._sources.is_new_module, 2)
            if fresh is not None and self._parts.is_trained(func.value, scope, call):
                self._note_drawn(call)
        elif name == "apply" and call.args:
            function = self._on.named(call.args[0].value)
            draws = function is not None and self._initializes(function)
            if draws and self._parts.is_trained(func.value, scope, call):
                self._note_drawn(call)
        elif name.endswith("_") and not name.startswith("_"):
            on: cst.BaseExpression = func.value
            while isinstance(on, cst.Call) and isinstance(on.func, cst.Attribute):
                on = on.func.value
            if self._parts.is_parameter(on):
                drawn = name in DRAWING_METHODS
                self._changed(call, [a.value for a in call.args], drawn=drawn)

    def by_assignment(self, node: cst.Assign | cst.AugAssign) -> None:
        """List an assignment that changes parameters by what differs by rank."""
        target = target_of(node)
        if isinstance(target, cst.Attribute | cst.Subscript | cst.Name):
            plain = isinstance(target, cst.Name) and isinstance(node, cst.Assign)
            if not plain and self._parts.is_parameter(target):
                self._changed(node, [node.value], drawn=False)

    def _changed(
        self, at: cst.CSTNode, given: list[cst.BaseExpression], *, drawn: bool
    ) -> None:
        scope = self._tree.function(at)
        names = [n for v in given for n in found(v, cst.Name)]
        fresh = any(
            self._sources.reached(over, scope, self._sources.is_new_module, 2)
            is not None
            for name in names
            for over in self._parts.loops_over(name)
        )
        if (
            drawn
            or fresh
            or any(self._sources.draw(v, scope) is not None for v in given)
        ):
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

    def _initializes(self, function: cst.FunctionDef) -> bool:
        for call in found(function.body, cst.Call):
            full = self._tree.called(call)
            name = full.rpartition(".")[2]
            if full.startswith("torch.nn.init.") and name not in _FIXED_INITS:
                return True
            if self._sources.is_draw(call):
                return True
            if self._tree.method_called(call, "reset_parameters") is not None:
                return True
        return False
