"""The parts of a script's training job: models, optimizers, loops, loaders."""

from __future__ import annotations

from typing import final

import libcst as cst

from stretto.convert._batch_loops import BatchLoops
from stretto.convert._flow import ScriptFlow
from stretto.convert._trained_models import TrainedModels
from stretto.convert._tree import ScriptTree, argument, dotted
from stretto.errors import SpecError

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


@final
class FoundTraining:
    """The training found in a script.

    Raises:
        SpecError: the script has no training, or it is not understood; the error has
            the line and the next step.
    """

    def __init__(self, tree: ScriptTree, name: str) -> None:
        self.tree = tree
        self.flow = ScriptFlow(tree)
        self._name = name
        self.backwards = [c for c in tree.calls if self._begins_backward(c)]
        if not self.backwards:
            raise self._no_backward()
        trained = TrainedModels(tree, self.flow, self.refuse)
        trained.refuse_unknown_optimizers()
        trained.refuse_updates_by_hand()
        if not trained.optimizers:
            raise self.refuse(
                self.backwards[0],
                "backward() is called, but this file makes no optimizer over a "
                "model's parameters(), so the model to be distributed is unknown. "
                "Make the optimizer in this file",
            )
        self.models = trained.complete()
        self.optimizers = trained.optimizers
        self.batches = BatchLoops(tree, self.flow, self.backwards, self.refuse)
        self.training = self.batches.training()

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
