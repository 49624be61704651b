"""Give code that reads a model, rather than trains it, the module inside the wrapper.

A wrapped model has neither its class nor its attributes, items and names. What the
script's own functions read is found by following the model into them; of what another
file or a library reads, only the call is seen.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import dotted, found

if TYPE_CHECKING:
    from stretto.convert._edit import Work
    from stretto.convert._models import Models

_READING = frozenset(
    [
        "isinstance",
        "type",
        "hasattr",
        "getattr",
        "setattr",
        "delattr",
        "len",
        "iter",
        "list",
        "tuple",
        "enumerate",
        "reversed",
        "vars",
        "dir",
        "print",
        "repr",
        "str",
    ]
)
"""Functions of Python that read an object."""

EXPORTING = ("torch.onnx.", "torch.jit.", "torch.export.")

_KEEPING = frozenset(
    ["append", "add", "extend", "insert", "put", "update_parameters", "id", "callable"]
)
"""Functions and methods that keep an object, or do not look into it."""

_EVALUATING = (
    "eval",
    "valid",
    "test",
    "infer",
    "predict",
    "score",
    "sample",
    "generat",
    "plot",
    "visual",
    "show",
    "summar",
    "save",
    "export",
    "count",
    "metric",
    "accura",
    "acc",
    "profile",
    "flops",
    "param",
    "checkpoint",
    "watch",
    "describe",
)
"""How words begin in the names of functions that do not train."""

_MEASURING = ("eval", "valid", "test", "infer", "predict", "score", "metric", "acc")
"""The words among these of functions that compute with the model."""

_TRAINING = ("train", "fit", "optim", "step", "loss", "criterion", "backward")


def convert(work: Work, models: Models) -> None:
    """Unwrap models where they are read, and list where that is not known."""
    if not work.horovod:
        _Handed(work, models).convert()


@final
class _Handed:
    def __init__(self, work: Work, models: Models) -> None:
        self._work, self._tree = work, work.tree
        self._models = models
        self._graph = work.graph_names
        self._optimizers = {id(o.call) for o in work.job.optimizers}

    def convert(self) -> None:
        for node in found(self._tree.module, cst.Subscript):
            if self._is_wrapped(node.value):
                self._refuse_layers(node, self._tree.parent(node))
                self._work.call_around(node.value, "unwrap")
        for loop in found(self._tree.module, cst.For):
            if self._is_wrapped(loop.iter):
                for call in found(loop.body, cst.Call):
                    if dotted(call.func) == dotted(loop.target):
                        self._refuse_layers(call.func, call)
                self._work.call_around(loop.iter, "unwrap")
        for comp in found(self._tree.module, cst.CompFor):
            if self._is_wrapped(comp.iter):
                self._work.call_around(comp.iter, "unwrap")
        for part in found(self._tree.module, cst.FormattedStringExpression):
            if self._is_wrapped(part.expression):
                self._work.call_around(part.expression, "unwrap")
        for call in self._tree.calls:
            for argument in call.args:
                if not argument.star and self._is_wrapped(argument.value):
                    self._given(call, argument.value)

    def _is_wrapped(self, node: cst.BaseExpression) -> bool:
        return isinstance(node, cst.Name | cst.Attribute) and self._models.is_wrapped(
            node, self._tree.function(node)
        )

    def _refuse_layers(self, layer: cst.BaseExpression, at: cst.CSTNode | None) -> None:
        """Refuse training through layers that the wrapper does not see."""
        if (
            isinstance(at, cst.Call)
            and at.func is layer
            and self._models.in_training(at)
            and not self._tree.without_gradient(at)
        ):
            raise self._work.job.refuse(
                at,
                f"training calls the layer `{self._tree.text(layer)}(...)`, which "
                "DistributedDataParallel does not see, so its gradients would not be "
                "exchanged. Call the model itself, or use --to horovod",
            )

    def _given(self, call: cst.Call, model: cst.BaseExpression) -> None:
        full = self._tree.called(call)
        if self._work.flow.local(call) or self._tree.own_class(call) is not None:
            return  # followed into it
        if full in _READING:
            text = self._tree.text(call)
            if "module" not in text and "Parallel" not in text:
                self._work.call_around(model, "unwrap")
        elif full.startswith("torch."):
            if full.startswith(EXPORTING):
                self._work.call_around(model, "unwrap")
        elif full not in ("copy.deepcopy", "copy.copy"):
            self._given_to_another(call, model)

    def _given_to_another(self, call: cst.Call, model: cst.BaseExpression) -> None:
        last = self._last(call)
        if not last or last in _KEEPING:
            return
        words = [w.lower() for w in re.split(r"_|(?<=[a-z])(?=[A-Z])", last)]
        evaluates = any(w.startswith(_EVALUATING) or w in ("val", "log") for w in words)
        trains = any(w.startswith(_TRAINING) for w in words) or self._may_train(call)
        if self._tree.without_gradient(call) or (evaluates and not trains):
            if any(w.startswith(_MEASURING) or w == "val" for w in words):
                self._evaluated(call, model)
            self._work.call_around(model, "unwrap")
            self._work.done(
                call,
                f"`{last}` of another file is given the model without the wrapper",
            )
            return
        name = self._tree.text(model)
        self._work.undecided(
            call,
            f"whether `{last}`, which is in another file, trains `{name}`: it is given "
            f"the wrapper, which training needs, but which lacks the model's own "
            f"attributes and methods. If it does not train, give it unwrap({name})",
        )

    def _evaluated(self, call: cst.Call, model: cst.BaseExpression) -> None:
        """Give all ranks rank 0's buffers where another file evaluates a model."""
        if (
            not self._work.is_guarded(call)
            and self._models.loop_of_a_share(call) is None
        ):
            self._work.measured.append(call)
            if self._models.has_buffers(model):
                self._work.call_around(model, "buffers_of_rank0")

    def _last(self, call: cst.Call) -> str:
        """Return the last part of what is called, also of a call's result."""
        if isinstance(call.func, cst.Attribute):
            return call.func.attr.value
        return dotted(call.func) or ""

    def _may_train(self, call: cst.Call) -> bool:
        """Return whether a call gets an optimizer, or gradients flow through it."""
        scope = self._tree.function(call)
        for argument in call.args:
            for origin in self._work.flow.origins(argument.value, scope):
                if id(origin.value) in self._optimizers:
                    return True
        for above in self._tree.ancestors(call):
            if isinstance(above, cst.Assign):
                targets = {n for t in above.targets for n in found(t, cst.Name)}
                return any(n.value in self._graph for n in targets)
            if isinstance(above, cst.Call) and above in self._work.job.backwards:
                return True
            if isinstance(above, cst.BaseSmallStatement):
                return False
        return False
