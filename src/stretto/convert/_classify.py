"""Whether a number of one rank is a mean over its samples, or a sum."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import Scope, argument, dotted, found

if TYPE_CHECKING:
    from stretto.convert._edit import Work


class Amount(enum.Enum):
    """What all ranks' values make together."""

    MEAN = "mean"
    """Each rank's is a mean over its samples, so the whole is their mean."""
    SUM = "sum"
    """Each rank's is a sum or a count over its samples, so the whole is their sum."""
    SAME = "same"
    """It is the same number on each rank."""
    UNKNOWN = "unknown"


_THROUGH = frozenset(
    [
        "item",
        "detach",
        "cpu",
        "numpy",
        "float",
        "double",
        "data",
        "clone",
        "tolist",
        "sqrt",
        "abs",
        "squeeze",
        "view",
        "reshape",
    ]
)


@final
class Classifier:
    """Classifies the numbers of a training step."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._tree, self._flow = work.tree, work.flow
        self.sums = [c for c in self._tree.calls if self._is_sum_loss(c)]

    def loss_names(self) -> set[str]:
        """The variables that ``backward`` is called on."""
        out = set()
        for call in self._work.job.backwards:
            node = call.func.value if isinstance(call.func, cst.Attribute) else None
            for name in found(node, cst.Name) if node is not None else ():
                parent = self._tree.parent(name)
                called = isinstance(parent, cst.Attribute) and parent.value is not name
                if not called and name.value not in ("self", "scaler"):
                    out.add(name.value)
            path = dotted(node)
            if path is not None:
                out.add(path)
        return out

    def loss(self) -> Amount:
        """What the training loss is."""
        return Amount.SUM if self.sums else Amount.MEAN

    def _is_sum_loss(self, call: cst.Call) -> bool:
        """Whether a call sets a training loss to be a sum over samples."""
        given = {a.keyword.value: a.value for a in call.args if a.keyword is not None}
        summed = any(
            (name == "reduction" and self._tree.text(value).strip("\"'") == "sum")
            or (name == "size_average" and self._tree.text(value) == "False")
            for name, value in given.items()
        )
        if not summed or self._tree.without_gradient(call):
            return False
        scope = self._tree.function(call)
        if self._evaluates(scope):
            return False
        path = None
        line = self._tree.parent(call)
        if isinstance(line, cst.Assign):
            path = dotted(line.targets[0].target)
        # Used where a step is trained: in its loop, its function, or by a function
        # that is called there.
        text = self._step_text()
        if path is not None and scope is None:
            return path in text
        if scope is not None and any(
            self._tree.within(b, scope) for b in self._work.job.backwards
        ):
            return True
        return scope is None or scope.name.value in text or (path or "") in text

    def _evaluates(self, scope: Scope) -> bool:
        return scope is not None and any(
            self._tree.method_called(c, "eval") is not None
            for c in found(scope.body, cst.Call)
        )

    def _step_text(self) -> set[str]:
        out: set[str] = set()
        for loop in self._work.job.training:
            out |= {n.value for n in found(loop.node.body, cst.Name)}
            out |= {dotted(a) or "" for a in found(loop.node.body, cst.Attribute)}
        for call in self._work.job.backwards:
            scope = self._tree.function(call)
            if scope is not None:
                out |= {n.value for n in found(scope.body, cst.Name)}
                out |= {dotted(a) or "" for a in found(scope.body, cst.Attribute)}
        return out

    def of(
        self, node: cst.BaseExpression, within: cst.CSTNode, depth: int = 6
    ) -> Amount:
        """What an expression's value is, looking up names assigned in a block."""
        if depth == 0:
            return Amount.UNKNOWN
        if isinstance(node, cst.Integer | cst.Float):
            return Amount.SAME
        if isinstance(node, cst.UnaryOperation):
            return self.of(node.expression, within, depth)
        if isinstance(node, cst.BinaryOperation):
            return self._of_operation(node, within, depth)
        if isinstance(node, cst.Call):
            return self._of_call(node, within, depth)
        if isinstance(node, cst.Subscript):
            base = node.value
            if isinstance(base, cst.Attribute) and base.attr.value == "shape":
                return Amount.SUM
            return Amount.UNKNOWN
        if (path := dotted(node)) is not None:
            if path in self.loss_names():
                return self.loss()
            if isinstance(node, cst.Attribute) and node.attr.value in _THROUGH:
                return self.of(node.value, within, depth)
            made = [
                o
                for o in self._flow.assigned(path, self._tree.function(node))
                if self._tree.within(o.statement, within)
            ]
            if len(made) == 1 and made[0].place is None:
                return self.of(made[0].value, within, depth - 1)
            if made:
                return Amount.UNKNOWN
            return Amount.SAME
        return Amount.UNKNOWN

    def _of_operation(
        self, node: cst.BinaryOperation, within: cst.CSTNode, depth: int
    ) -> Amount:
        left = self.of(node.left, within, depth)
        right = self.of(node.right, within, depth)
        both = {left, right}
        if Amount.UNKNOWN in both:
            return Amount.UNKNOWN
        if both == {Amount.SAME}:
            return Amount.SAME
        if isinstance(node.operator, cst.Multiply):
            return Amount.SUM if Amount.SUM in both else Amount.MEAN
        if isinstance(node.operator, cst.Divide):
            if left is Amount.SUM and right is Amount.SUM:
                return Amount.MEAN
            return Amount.UNKNOWN if right is Amount.SUM else left
        if isinstance(node.operator, cst.Add | cst.Subtract):
            rest = both - {Amount.SAME}
            return rest.pop() if len(rest) == 1 else Amount.UNKNOWN
        return Amount.UNKNOWN

    def _of_call(self, node: cst.Call, within: cst.CSTNode, depth: int) -> Amount:
        full = self._tree.called(node)
        method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        if full in ("float", "int", "round") and node.args:
            return self.of(node.args[0].value, within, depth)
        if full == "len" or method in ("size", "numel", "sum") or full == "torch.sum":
            return Amount.SUM
        if method == "mean" or full == "torch.mean":
            return Amount.MEAN
        if method in _THROUGH and isinstance(node.func, cst.Attribute):
            return self.of(node.func.value, within, depth)
        if self._is_criterion(node):
            return self.loss()
        return Amount.UNKNOWN

    def _is_criterion(self, call: cst.Call) -> bool:
        """Whether a call gives a loss of torch.nn or torch.nn.functional."""
        full = self._tree.called(call)
        if full.startswith("torch.nn.functional.") and argument(call, 9, "reduction"):
            return False
        if full.startswith("torch.nn.functional.") and "loss" in full:
            return True
        if full in (
            "torch.nn.functional.cross_entropy",
            "torch.nn.functional.binary_cross_entropy",
            "torch.nn.functional.binary_cross_entropy_with_logits",
        ):
            return True
        scope = self._tree.function(call)
        return dotted(call.func) is not None and any(
            isinstance(o.value, cst.Call)
            and self._tree.called(o.value).startswith("torch.nn.")
            and self._tree.called(o.value).endswith("Loss")
            for o in self._flow.origins(call.func, scope)
        )
