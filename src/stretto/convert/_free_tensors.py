"""Refuse tensors that an optimizer trains outside every module."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._optimizers import is_named
from stretto.convert._tree import Scope, argument, dotted, found

if TYPE_CHECKING:
    from stretto.convert._job import FoundTraining


def refuse_free_tensors(job: FoundTraining) -> None:
    """Refuse tensors that an optimizer trains outside every module.

    DistributedDataParallel exchanges gradients of its module's parameters only, so
    each rank would train such a tensor by itself. An optimizer made within the
    training loop is for tensors of that batch, and is accepted.

    Raises:
        SpecError: there is one; the error has the line and the next step.
    """
    _FreeTensors(job).refuse()


@final
class _FreeTensors:
    def __init__(self, job: FoundTraining) -> None:
        self._job, self._tree, self._flow = job, job.tree, job.flow

    def refuse(self) -> None:
        for call in self._tree.calls:
            added = self._tree.method_called(call, "add_param_group") is not None
            if not added and not self._makes_optimizer(call):
                continue
            given = argument(call, 0, "param_group" if added else "params")
            if given is None or (
                not added
                and any(self._tree.within(call, t.node) for t in self._job.training)
            ):
                continue
            name = self._free_tensor(given, self._tree.function(call), depth=3)
            if name is not None:
                raise self._job.refuse(
                    call,
                    f"the optimizer also trains `{name}`, a tensor outside every "
                    "module: its gradient would not be exchanged, and each rank would "
                    "train its own. Make it a parameter of the model and use it in "
                    "forward(), or use --to horovod",
                )

    def _makes_optimizer(self, call: cst.Call) -> bool:
        return is_named(self._tree, call) or any(
            o.call is call for o in self._job.optimizers
        )

    def _free_tensor(
        self, given: cst.BaseExpression, scope: Scope, depth: int
    ) -> str | None:
        """Return the name of a tensor among an optimizer's parameters, if any."""
        for name in found(given, cst.Name):
            if isinstance(self._tree.parent(name), cst.Attribute):
                continue
            for origin in self._flow.assigned(name.value, scope):
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
                return self._tree.text(attribute)
        return None

    def _is_free(self, node: cst.Attribute, scope: Scope) -> bool:
        """Return whether an attribute of an object other than a module is a tensor."""
        made = self._flow.assigned(dotted(node) or "", scope)
        return any(
            isinstance(o.value, cst.Call)
            and o.scope is not None
            and self._makes_tensor(o.value)
            and not self._is_of_module(o.scope)
            for o in (*made, *self._flow.of_objects(node, scope))
        )

    def _is_of_module(self, method: cst.FunctionDef) -> bool:
        """Return whether a method's class has a base that may be a module."""
        owner = self._tree.owner(method)
        if owner is None:
            return True
        return any(kind.bases for kind in self._tree.family(owner))

    def _makes_tensor(self, call: cst.Call) -> bool:
        full = self._tree.called(call)
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
            or self._tree.method_called(call, "requires_grad_") is not None
        )
