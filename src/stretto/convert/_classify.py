"""Classify a number of one rank as a mean over its samples, or a sum."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol, final

import libcst as cst

from stretto.convert._losses import Loss, Losses
from stretto.convert._tree import dotted, found

if TYPE_CHECKING:
    from stretto.convert._edit import Work
    from stretto.convert._rank_value_notes import Reductions


class Amount(enum.Enum):
    """How all ranks' values combine."""

    MEAN = "mean"
    """Each rank's value is a mean over its samples, so the result is their mean."""
    SUM = "sum"
    """Each rank's value is a sum or a count over its samples, so the result is their
    sum.
    """
    SAME = "same"
    """The number is the same on each rank."""
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
        "squeeze",
        "view",
        "reshape",
    ]
)

_COUNTING = frozenset(
    [
        "torch.bincount",
        "torch.histc",
        "numpy.bincount",
        "sklearn.metrics.confusion_matrix",
        "sklearn.metrics.multilabel_confusion_matrix",
    ]
)
"""Functions that count samples by their values."""

_REDUCING = ("mean", "sum", "std", "var", "max", "min", "amax", "amin", "norm", "prod")
"""Methods, and functions of torch, that reduce all of a tensor without a dimension."""


class AbstractShares(Protocol):
    """Values computed from a rank's own samples."""

    def is_share(self, node: cst.BaseExpression) -> bool:
        """Return whether a value may come from this rank's part of a batch."""

    def reduced_by(self, numbers: Reductions) -> AbstractShares:
        """Return the values that still do once some numbers are reduced."""


_NORMS = frozenset(
    f"torch.nn.utils.{module}{name}"
    for module in ("", "clip_grad.")
    for name in ("clip_grad_norm_", "clip_grad_norm", "get_total_norm")
)
"""Functions that return a norm of the gradients of parameters."""


@final
class Classifier:
    """Classify the numbers of a training step."""

    def __init__(self, work: Work, shares: AbstractShares) -> None:
        self._work, self._shares = work, shares
        self._tree, self._flow = work.tree, work.flow
        self.losses = Losses(work)
        self.carried: set[cst.BaseExpression] = set()
        """The assignments of loops' sums, whose terms are reduced over ranks."""
        self._kinds_of: dict[str, list[tuple[cst.Call, Loss]]] = {}
        for call in work.job.backwards:
            kind = self.losses.of(call)
            for name in self._names_of(call):
                self._kinds_of.setdefault(name, []).append((call, kind))

    def loss_names(self) -> set[str]:
        """Return the variables that ``backward`` is called on."""
        return set(self._kinds_of)

    def _names_of(self, call: cst.Call) -> set[str]:
        """Return the variables in the expression that one ``backward`` is called on."""
        out = set()
        node = self._work.job.differentiated(call)
        for name in found(node, cst.Name) if node is not None else ():
            parent = self._tree.parent(name)
            called = isinstance(parent, cst.Attribute) and parent.value is not name
            if called or name.value in ("self", "scaler"):
                continue
            if name is node or self._shares.is_share(name):
                out.add(name.value)  # not a factor, such as a number of micro-steps
        path = dotted(node)
        if path is not None:
            out.add(path)
        return out

    def _of_loss(
        self, path: str, node: cst.BaseExpression, within: cst.CSTNode
    ) -> Amount:
        """Return the kind of a loss under one of its names.

        Loops may use one name for different losses, of which a block's own counts.
        """
        every = self._kinds_of[path]
        scope = self._tree.function(node)
        near = [kind for call, kind in every if self._tree.within(call, within)]
        near = near or [k for c, k in every if self._tree.function(c) is scope]
        kinds = set(near or [kind for _, kind in every])
        if Loss.SUM not in kinds:
            return Amount.MEAN
        return Amount.SUM if kinds == {Loss.SUM} else Amount.UNKNOWN

    def of(
        self, node: cst.BaseExpression, within: cst.CSTNode, depth: int = 6
    ) -> Amount:
        """Return the kind of an expression's value, with a block's names resolved.

        A sum over what every rank has whole, such as a test set, is the same on each.
        """
        kind = self._of(node, within, depth)
        if kind is Amount.SUM and not self._shares.is_share(node):
            return Amount.SAME
        if not isinstance(node, cst.Call) or kind in (Amount.MEAN, Amount.SUM):
            return kind
        degree = self._work.proofs.number_degree(node)
        if degree == 0 and (kind is Amount.UNKNOWN or self._shares.is_share(node)):
            return Amount.MEAN
        return Amount.SUM if degree == 1 and kind is Amount.UNKNOWN else kind

    def _is_setting(self, node: cst.BaseExpression, within: cst.CSTNode) -> bool:
        """Return whether an element is of what was made before, such as a setting.

        A block only reads it: its elements are neither set there nor handed on.
        """
        while isinstance(node, cst.Subscript):
            node = node.value
        path = dotted(node)
        return (
            path is not None
            and not any(
                self._tree.within(o.statement, within)
                for o in self._flow.assigned(path, self._tree.function(node))
            )
            and all(
                self._is_element_read(part)
                for part in found(within, (cst.Name, cst.Attribute))
                if dotted(part) == path
            )
        )

    def _is_element_read(self, node: cst.CSTNode) -> bool:
        above = self._tree.parent(node)
        if isinstance(above, cst.Attribute):
            return above.attr.value == "get"
        while isinstance(above, cst.Subscript):
            node, above = above, self._tree.parent(above)
        if not isinstance(node, cst.Subscript):
            return False
        return not isinstance(above, cst.AssignTarget) and not (
            isinstance(above, cst.AugAssign | cst.AnnAssign) and above.target is node
        )

    def _of(self, node: cst.BaseExpression, within: cst.CSTNode, depth: int) -> Amount:
        if depth == 0:
            return Amount.UNKNOWN
        if isinstance(node, cst.Integer | cst.Float | cst.SimpleString):
            return Amount.SAME
        if isinstance(node, cst.UnaryOperation):
            return self.of(node.expression, within, depth)
        if isinstance(node, cst.NamedExpr):
            return self.of(node.value, within, depth)
        if isinstance(node, cst.List | cst.Tuple):
            kinds = {self.of(e.value, within, depth) for e in node.elements}
            return kinds.pop() if len(kinds) == 1 else Amount.UNKNOWN
        if isinstance(node, cst.BinaryOperation):
            return self._of_operation(node, within, depth)
        if isinstance(node, cst.Call):
            return self._of_call(node, within, depth)
        if isinstance(node, cst.Subscript):
            base = node.value
            if isinstance(base, cst.Attribute) and base.attr.value == "shape":
                first = self._tree.text(node.slice[0].slice) == "0"
                return Amount.SUM if first else Amount.SAME
            setting = self._is_setting(node, within)
            same = setting and not self._shares.is_share(node)
            return Amount.SAME if same else Amount.UNKNOWN
        if (path := dotted(node)) is not None:
            if path in self._kinds_of:
                return self._of_loss(path, node, within)
            if isinstance(node, cst.Attribute) and node.attr.value == "batch_size":
                return Amount.SUM  # of a divided loader; any other is the same
            if isinstance(node, cst.Attribute) and node.attr.value in _THROUGH:
                return self.of(node.value, within, depth)
            made = [
                o
                for o in self._flow.assigned(path, self._tree.function(node))
                if self._tree.within(o.statement, within)
                and o.value not in self.carried
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
            if left is right:
                return Amount.UNKNOWN  # the product of two numbers that differ
            return Amount.SUM if Amount.SUM in both else Amount.MEAN
        if isinstance(node.operator, cst.Divide):
            if left is Amount.SUM and right is Amount.SUM:
                adds = self._adds_up(node.right, within, depth)
                return Amount.UNKNOWN if adds else Amount.MEAN
            return left if right is Amount.SAME else Amount.UNKNOWN
        if isinstance(node.operator, cst.Add | cst.Subtract):
            if both == {Amount.SUM, Amount.SAME}:
                return Amount.UNKNOWN  # the sum would count the same part on each rank
            rest = both - {Amount.SAME}
            return rest.pop() if len(rest) == 1 else Amount.UNKNOWN
        return Amount.UNKNOWN

    def _adds_up(
        self, node: cst.BaseExpression, within: cst.CSTNode, depth: int
    ) -> bool:
        """Return whether a divisor adds up values, so that ranks have other shares."""
        if any(
            self._tree.called(call) == "torch.sum"
            or self._tree.method_called(call, "sum", "count_nonzero") is not None
            for call in found(node, cst.Call)
        ):
            return True
        path = dotted(node)
        return depth > 0 and any(
            self._adds_up(origin.value, within, depth - 1)
            for origin in (
                self._flow.assigned(path, self._tree.function(node)) if path else ()
            )
            if self._tree.within(origin.statement, within)
        )

    def _of_call(self, node: cst.Call, within: cst.CSTNode, depth: int) -> Amount:
        full = self._tree.called(node)
        method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        if self._is_of_parameters(node) or self._is_norm(node, full):
            return Amount.SAME
        if full in ("float", "int", "round") and node.args:
            return self.of(node.args[0].value, within, depth)
        if method == "get" and isinstance(node.func, cst.Attribute):
            setting = self._is_setting(node.func.value, within)
            same = setting and not self._shares.is_share(node)
            return Amount.SAME if same else Amount.UNKNOWN
        if method == "size" and node.args and self._tree.text(node.args[0]) != "0":
            return Amount.SAME
        if method == "sum" and isinstance(node.func, cst.Attribute):
            return self._of_sum(node.func.value, within)
        if full == "torch.sum" and node.args:
            return self._of_sum(node.args[0].value, within)
        if full == "len" and node.args and self._counts_steps(node.args[0].value):
            return Amount.SAME
        if full == "len" or method in ("size", "numel"):
            return Amount.SUM
        if full in _COUNTING or method in ("bincount", "histc"):
            kept = ("weights", "normalize", "density")
            named = {a.keyword.value for a in node.args if a.keyword is not None}
            return Amount.UNKNOWN if named.intersection(kept) else Amount.SUM
        if method == "mean" or full == "torch.mean":
            return Amount.UNKNOWN if self._averages_twice(node) else Amount.MEAN
        if method == "abs" and isinstance(node.func, cst.Attribute):
            inner = self.of(node.func.value, within, depth)
            return inner if inner is Amount.SAME else Amount.UNKNOWN
        if method in _THROUGH and isinstance(node.func, cst.Attribute):
            return self.of(node.func.value, within, depth)
        kind = self.losses.criterion(node, self._tree.function(node))
        if kind in (Loss.MEAN, Loss.SUM):
            return Amount.SUM if kind is Loss.SUM else Amount.MEAN
        returned = {
            self.of(given, function.body, depth - 1)
            for function in self._work.calls.functions(node)
            if not any(
                self._tree.within(call, function) for call in self._work.job.backwards
            )  # whose numbers are reduced inside
            for given in self._flow.returned(function)
        }
        if returned in ({Amount.MEAN}, {Amount.SUM}):
            return returned.pop()
        return Amount.UNKNOWN

    def _counts_steps(self, node: cst.BaseExpression) -> bool:
        """Return whether a list gets one element in each step, so as many on each rank.

        As in ``losses = []``, then ``losses.append(loss.item())`` in a loop.
        """
        if not isinstance(node, cst.Name):
            return False
        scope = self._tree.function(node)
        begun = [o.value for o in self._flow.assigned(node.value, scope)]
        if not begun or not all(
            isinstance(value, cst.List) and not value.elements for value in begun
        ):
            return False
        where: cst.CSTNode = self._tree.module if scope is None else scope.body
        for name in found(where, cst.Name):
            above = self._tree.parent(name)
            if name.value != node.value or not isinstance(
                above, cst.Attribute | cst.AugAssign
            ):
                continue
            if isinstance(above, cst.AugAssign):
                adds = isinstance(above.value, cst.List) and not any(
                    isinstance(e, cst.StarredElement) for e in above.value.elements
                )
            else:
                adds = above.value is not name or above.attr.value in (
                    "append",
                    "clear",
                    "copy",
                )
            around = self._tree.loops(name)[:1]
            of_steps = not around or self._work.job.batches.loop(around[0]) is not None
            if not adds or not of_steps:
                return False
        return True

    def _averages_twice(self, node: cst.Call) -> bool:
        """Return whether a mean is one of values computed from all samples.

        Such is a variance, ``((x - x.mean()) ** 2).mean()``.
        """
        of_torch = self._tree.called(node) == "torch.mean"
        parts = [arg.value for arg in node.args[:1]] if of_torch else [node.func]
        return any(
            self._reduces_all(call) for part in parts for call in found(part, cst.Call)
        )

    def _reduces_all(self, call: cst.Call) -> bool:
        """Return whether a call reduces a tensor over all of its samples."""
        if self._tree.called(call) in {f"torch.{name}" for name in _REDUCING}:
            given = call.args[1:]
        elif self._tree.method_called(call, *_REDUCING) is not None:
            given = call.args
        else:
            return False
        sides = [a for a in given if a.keyword is None or a.keyword.value == "dim"]
        return not sides or self._tree.text(sides[0].value) == "0"

    def _of_sum(self, node: cst.BaseExpression, within: cst.CSTNode) -> Amount:
        """Return the kind of the sum of a tensor's elements."""
        if isinstance(node, cst.Call):
            full = self._tree.called(node)
            mean = full == "torch.mean" or self._tree.method_called(node, "mean")
            given = node.args[1:] if full == "torch.mean" else node.args
            if mean and (not given or self._tree.text(given[0].value) == "0"):
                return Amount.MEAN  # over samples already
        path = dotted(node)
        if path is not None:
            for origin in self._flow.assigned(path, self._tree.function(node)):
                carried = any(
                    dotted(part) == path
                    for part in found(origin.value, (cst.Name, cst.Attribute))
                )
                averaged = any(
                    self._tree.method_called(call, "mean") is not None
                    for call in found(origin.value, cst.Call)
                )
                if self._tree.within(origin.statement, within) and (
                    carried and averaged
                ):
                    return Amount.UNKNOWN  # kept from step to step
        return Amount.SUM

    def _is_norm(self, node: cst.Call, full: str) -> bool:
        """Return whether a call returns the norm of exchanged gradients."""
        if full not in _NORMS or not node.args:
            return False
        given: list[cst.BaseExpression] = [node.args[0].value]
        if (path := dotted(given[0])) is not None:
            scope = self._tree.function(node)
            given = [o.value for o in self._flow.assigned(path, scope)]
        return bool(given) and all(
            any(
                self._tree.method_called(call, "parameters") is not None
                for call in found(part, cst.Call)
            )
            for part in given
        )

    def _is_of_parameters(self, node: cst.Call) -> bool:
        """Return whether a method is called on a parameter that a loop iterates over.

        Parameters and their exchanged gradients are the same on each rank.
        """
        on: cst.BaseExpression = node
        while isinstance(on, cst.Call | cst.Attribute):
            on = on.func if isinstance(on, cst.Call) else on.value
        if not isinstance(on, cst.Name):
            return False
        for above in self._tree.ancestors(node):
            if isinstance(above, cst.For):
                pairs = [(above.target, above.iter)]
            elif isinstance(above, cst.BaseSimpleComp):
                pairs = [(above.for_in.target, above.for_in.iter)]
            else:
                continue
            for target, over in pairs:
                if any(n.value == on.value for n in found(target, cst.Name)):
                    return any(
                        self._tree.method_called(c, "parameters", "named_parameters")
                        is not None
                        for c in found(over, cst.Call)
                    )
        return False
