"""Which expressions are trained models, their parts, parameters or gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._flow import parameters
from stretto.convert._tree import dotted, found, stored_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._edit import Work
    from stretto.convert._models import Models
    from stretto.convert._rank_sources import RankSources
    from stretto.convert._tree import Scope


@final
class TrainedParts:
    """The parts of a wrapped model."""

    def __init__(self, work: Work, models: Models, sources: RankSources) -> None:
        self._tree, self._flow = work.tree, work.flow
        self._models, self._sources = models, sources

    def is_parameter(self, node: cst.BaseExpression) -> bool:
        """Return whether a value is a trained parameter, its data or its gradient."""
        while isinstance(node, cst.Subscript) or (
            isinstance(node, cst.Attribute) and node.attr.value in ("data", "grad")
        ):
            node = node.value
        scope = self._tree.function(node)
        if isinstance(node, cst.Attribute) and node.attr.value in ("weight", "bias"):
            return self.is_trained(node.value, scope, node)
        if not isinstance(node, cst.Name):
            return False
        for over in self.loops_over(node):
            text = self._tree.text(over)
            if "param_groups" in text or '["params"]' in text or "['params']" in text:
                return self._is_used(scope) and self._sources.is_late(node)
            for call in found(over, cst.Call):
                owner = self._tree.method_called(call, "parameters", "named_parameters")
                if owner is not None and self.is_trained(owner, scope, node):
                    return True
        return False

    def _is_used(self, scope: Scope) -> bool:
        """Return whether a function is not a method, or its class is called."""
        owner = self._tree.owner(scope)
        return owner is None or any(
            (dotted(call.func) or "").rpartition(".")[2] == kind.name.value
            for kind in self._tree.family(owner)
            for call in self._tree.calls
        )

    def loops_over(self, name: cst.Name) -> Iterator[cst.BaseExpression]:
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

    def is_trained(
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
                self.is_trained(value, self._tree.function(call), call, depth - 1)
                for call, value in self._flow.passed(scope, first)
            )
        return self._models.is_wrapped(owner, scope) and self._sources.is_late(at)

    def _is_part(
        self, node: cst.BaseExpression, scope: Scope, at: cst.CSTNode, depth: int
    ) -> bool:
        """Return whether a name is set by a loop over a trained model's modules."""
        if not isinstance(node, cst.Name) or not depth:
            return False
        for over in self.loops_over(node):
            for call in found(over, cst.Call):
                of = self._tree.method_called(
                    call, "modules", "children", "named_modules", "named_children"
                )
                if of is not None and self.is_trained(of, scope, at, depth - 1):
                    return True
        return False

    def belongs(self, node: cst.BaseExpression, scope: Scope) -> bool:
        """Return whether something is, or is part of, a model or ``self``."""
        while not self._models.is_model(node, scope):
            if not isinstance(node, cst.Attribute | cst.Subscript):
                return dotted(node) == "self"
            node = node.value
        return True
