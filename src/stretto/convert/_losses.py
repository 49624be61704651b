"""Classify a training loss over samples: a mean, a sum, or something else."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._branches import Branches
from stretto.convert._flow import parameters
from stretto.convert._tree import Scope, argument, dotted, found, stored_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.convert._calls import Called
    from stretto.convert._edit import Work
    from stretto.convert._flow import Origin


class Loss(enum.Enum):
    """How a loss grows with the samples of a batch."""

    CONSTANT = "constant"
    """A number without a gradient."""
    PARAMETERS = "parameters"
    """A function of parameters alone, such as a weight penalty."""
    MEAN = "mean"
    SUM = "sum"
    EACH = "each"
    """One value for each sample."""
    OUTPUT = "output"
    """A part of what a model returns: its loss, or a value for each sample."""
    MIXED = "mixed"
    """A sum over samples plus a mean over them or a function of parameters."""
    OTHER = "other"
    """A function of means or sums that is neither, such as a ratio or a root."""
    UNKNOWN = "unknown"


_REDUCED = frozenset([Loss.MEAN, Loss.SUM, Loss.MIXED, Loss.OTHER])
"""Kinds of a value that combines the samples of a batch."""


_LINEAR = frozenset(
    [
        "float",
        "double",
        "half",
        "to",
        "cuda",
        "cpu",
        "clone",
        "squeeze",
        "view",
        "reshape",
        "contiguous",
        "unsqueeze",
        "flatten",
        "requires_grad_",
    ]
)
"""Methods that keep a value's kind."""

_SCALING = ("scale", "scale_loss")

_DEPTH = 12


@final
class Losses:
    """Classifies what ``backward`` is called on."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._tree, self._flow = work.tree, work.flow
        self._calls, self._branches = work.calls, Branches(work.tree, work.flow)
        self._tops = [loop.scope for loop in work.job.training]

    def of(self, call: cst.Call) -> Loss:
        """Return the kind of the loss of a call of ``backward``.

        A loss that is not shown to be a mean is what its text looks like.
        """
        degree = self._work.proofs.degree(call)
        if degree is not None:
            return Loss.SUM if degree else Loss.MEAN
        kind = self.by_text(call)
        if kind is Loss.MIXED and not self._work.proofs.is_mixed(call):
            return Loss.UNKNOWN
        return kind

    def by_text(self, call: cst.Call) -> Loss:
        """Return the kind of the loss of a call of ``backward`` by its last steps."""
        node = self._work.job.differentiated(call)
        if node is None:
            return Loss.UNKNOWN
        if isinstance(node, cst.Call) and node.args:
            on = self._tree.method_called(node, *_SCALING)
            if on is not None:
                node = node.args[0].value
        scope, line = self._tree.function(call), self._tree.line(call)
        loss = self._of(node, scope, line, _DEPTH)
        weights = argument(call, 0, "gradient")
        if weights is not None and self._tree.called(call) != "torch.autograd.backward":
            loss = self._weighted(loss, weights)
        # A model's unchanged output is its own loss, a mean by all conventions.
        if loss in (Loss.EACH, Loss.OUTPUT):
            return Loss.MEAN
        return Loss.UNKNOWN if loss is Loss.OTHER else loss

    def _weighted(self, loss: Loss, weights: cst.BaseExpression) -> Loss:
        """Return the kind of a loss whose backward gets weights of its elements."""
        if loss not in (Loss.EACH, Loss.OUTPUT) or self._tree.text(weights) == "None":
            return loss
        ones = self._tree.called(weights) in ("torch.ones_like", "torch.ones")
        return Loss.SUM if loss is Loss.EACH and ones else Loss.UNKNOWN

    def _of(
        self, node: cst.BaseExpression, scope: Scope, line: int, depth: int
    ) -> Loss:
        if depth == 0:
            return Loss.UNKNOWN
        if isinstance(node, cst.Integer | cst.Float | cst.BaseString):
            return Loss.CONSTANT
        if isinstance(node, cst.UnaryOperation):
            return self._of(node.expression, scope, line, depth)
        if isinstance(node, cst.BinaryOperation):
            left = self._of(node.left, scope, line, depth - 1)
            right = self._of(node.right, scope, line, depth - 1)
            if isinstance(node.operator, cst.MatrixMultiply) and left is right:
                return left if left is Loss.PARAMETERS else Loss.UNKNOWN
            return _combined(
                node.operator,
                left,
                right,
                counts=self._counts(node.right, scope),
            )
        if isinstance(node, cst.IfExp):
            known = self._branches.decided(node.test)
            if known is not None:
                part = node.body if known else node.orelse
                return self._of(part, scope, line, depth - 1)
            return _either(
                self._of(node.body, scope, line, depth - 1),
                self._of(node.orelse, scope, line, depth - 1),
            )
        if isinstance(node, cst.Call):
            return self._of_call(node, scope, line, depth - 1)
        if isinstance(node, cst.Subscript):
            if any(isinstance(i.slice, cst.Slice) for i in node.slice):
                inner = self._of(node.value, scope, line, depth - 1)
                return inner if inner not in _REDUCED else Loss.UNKNOWN
            return self._of_part(node.value, scope, line, depth - 1)
        if isinstance(node, cst.Attribute) and node.attr.value == "loss":
            return Loss.MEAN
        if (path := dotted(node)) is not None:
            return self._of_name(path, scope, line, depth - 1)
        return Loss.UNKNOWN

    def _of_part(
        self, node: cst.BaseExpression, scope: Scope, line: int, depth: int
    ) -> Loss:
        """Return the kind of one element of a result; a model's is its loss."""
        given = node
        if (path := dotted(node)) is not None:
            for origin in self._before(path, scope, line):
                given = origin.value
        if isinstance(given, cst.Call) and self._is_module(given, scope):
            return Loss.OUTPUT
        if self._of(node, scope, line, depth) is Loss.EACH:
            return Loss.EACH
        return Loss.UNKNOWN

    # Names

    def _of_name(self, path: str, scope: Scope, line: int, depth: int) -> Loss:
        if path.rpartition(".")[2] in ("weight", "bias"):
            return Loss.PARAMETERS
        made = self._before(path, scope, line)
        if not made:
            if self._is_loop_target(path, scope):
                return Loss.EACH
            inner = self._parameter(path, scope, depth)
            return inner or Loss.CONSTANT
        out: Loss | None = None
        for origin in made:
            more = origin.value
            if (
                out is not None
                and isinstance(more, cst.BinaryOperation)
                and isinstance(more.operator, cst.Add)
                and dotted(more.left) == path
            ):
                value = (
                    Loss.PARAMETERS
                    if self._of_parameters(origin.statement)
                    else self._of(
                        more.right,
                        origin.scope,
                        self._tree.line(origin.statement),
                        depth,
                    )
                )
                out = _combined(more.operator, out, value, counts=False)
                continue
            if self._of_parameters(origin.statement):
                value = Loss.PARAMETERS
            elif origin.place is not None:
                value = self._of_unpacked(origin, depth)
            else:
                value = self._of(
                    origin.value,
                    origin.scope,
                    self._tree.line(origin.statement),
                    depth,
                )
            out = value if out is None else _either(out, value)
        for added in self._added(path, made[-1], scope, line):
            value = (
                Loss.PARAMETERS
                if self._of_parameters(added)
                else self._of(added.value, scope, self._tree.line(added), depth)
            )
            out = _combined(added.operator, out or Loss.CONSTANT, value, counts=False)
        return out or Loss.UNKNOWN

    def _parameter(self, path: str, scope: Scope, depth: int) -> Loss | None:
        if scope is None or path not in parameters(scope):
            return None
        out: Loss | None = None
        for call, value in self._flow.passed(scope, path):
            inner, line = self._tree.function(call), self._tree.line(call)
            found_here = self._of(value, inner, line, depth)
            out = found_here if out is None else _either(out, found_here)
        return out

    def _before(self, path: str, scope: Scope, line: int) -> list[Origin]:
        """Return the assignments to a name that may be in effect on a line.

        Later ones hide others. An assignment in a block around the line hides those
        before it.
        """
        made = [
            o
            for o in self._flow.assigned(path, scope)
            if (o.scope is not scope or self._tree.line(o.statement) < line)
            and not self._tree.without_gradient(o.statement)
            and not self._branches.is_left_out(o.statement)
            and not (o.scope is scope and self._is_other_branch(o.statement, line))
        ]
        for place in range(len(made) - 1, -1, -1):
            block = self._branches.sure_block(made[place].statement)
            if made[place].scope is not scope:
                continue
            end = [n for n in (block,) if isinstance(n, cst.Module | cst.BaseSuite)]
            last = max((self._last_line(n) for n in end), default=0)
            if last >= line:
                return made[place:]
        return made

    def _is_other_branch(self, statement: cst.CSTNode, line: int) -> bool:
        """Return whether a line is in the ``else`` of an ``if`` around a statement."""
        below = statement
        for above in self._tree.ancestors(statement):
            if isinstance(above, cst.FunctionDef):
                return False
            if isinstance(above, cst.If) and below is above.body and above.orelse:
                first = self._last_line(above.body)
                if first < line <= self._last_line(above.orelse):
                    return True
            below = above
        return False

    def _last_line(self, node: cst.CSTNode) -> int:
        return max(
            (self._tree.line(n) for n in found(node, cst.BaseExpression)), default=0
        )

    def _added(
        self, path: str, after: Origin, scope: Scope, line: int
    ) -> list[cst.AugAssign]:
        body: cst.CSTNode = self._tree.module if scope is None else scope.body
        first = self._tree.line(after.statement)
        return [
            a
            for a in found(body, cst.AugAssign)
            if dotted(a.target) == path
            and not self._branches.is_left_out(a)
            and self._tree.function(a) is scope
            and (first < self._tree.line(a) < line or after.scope is not scope)
        ]

    def _is_loop_target(self, path: str, scope: Scope) -> bool:
        body: cst.CSTNode = self._tree.module if scope is None else scope.body
        return any(
            name.value == path
            for loop in found(body, cst.For)
            if self._tree.called(loop.iter) not in ("range", "trange", "tqdm.trange")
            for name in found(loop.target, cst.Name)
        )

    def _of_unpacked(self, origin: Origin, depth: int) -> Loss:
        made = origin.value
        if not isinstance(made, cst.Call):
            line = self._tree.line(origin.statement)
            value = self._of(made, origin.scope, line, depth)
            return value if value in (Loss.EACH, Loss.CONSTANT) else Loss.UNKNOWN
        out: Loss | None = None
        for function, kind, maker in self._calls.called(made, origin.scope):
            for given in self._returned(function, kind, maker):
                if not isinstance(given, cst.Tuple | cst.List):
                    return Loss.UNKNOWN
                if origin.place is None or origin.place >= len(given.elements):
                    return Loss.UNKNOWN
                part = given.elements[origin.place].value
                if part.deep_equals(cst.Name("None")):
                    continue
                line = self._tree.line(part) + 1
                value = self._inside(kind, maker, part, function, line, depth)
                out = value if out is None else _either(out, value)
        if out is None and self._is_module(made, origin.scope):
            return Loss.OUTPUT
        return out or Loss.UNKNOWN

    # Calls

    def _of_call(self, node: cst.Call, scope: Scope, line: int, depth: int) -> Loss:
        full = self._tree.called(node)
        method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        first = node.args[0].value if node.args else None
        if full == "sum" and first is not None:
            return self._of_total(first, scope, line, depth)
        if full.endswith(".Parameter"):
            return Loss.PARAMETERS
        if full in ("torch.mean", "torch.sum") and first is not None:
            dim = [a for a in node.args[1:] if _is_dim(a)]
            return self._reduced(first, full.rpartition(".")[2], dim, line, depth)
        reduces = method in ("mean", "sum") and isinstance(node.func, cst.Attribute)
        if reduces and isinstance(node.func, cst.Attribute):
            dim = [a for a in node.args if _is_dim(a)]
            return self._reduced(node.func.value, method, dim, line, depth)
        if (reduction := self.criterion(node, scope)) is not None:
            return reduction
        if functions := self._calls.called(node, scope):
            return self._of_returned(functions, depth)
        if self._is_module(node, scope):
            return Loss.EACH
        if method in _LINEAR and isinstance(node.func, cst.Attribute):
            return self._of(node.func.value, scope, line, depth)
        if self._is_of_parameters(node):
            return Loss.PARAMETERS
        inner = [self._of(a.value, scope, line, depth) for a in node.args]
        if isinstance(node.func, cst.Attribute) and not full.startswith("torch."):
            inner.append(self._of(node.func.value, scope, line, depth))
        if inner and set(inner) <= {Loss.CONSTANT}:
            return Loss.CONSTANT
        if inner and set(inner) <= {Loss.CONSTANT, Loss.PARAMETERS}:
            return Loss.PARAMETERS
        return Loss.UNKNOWN if _REDUCED.isdisjoint(inner) else Loss.OTHER

    def _reduced(
        self,
        node: cst.BaseExpression,
        how: str,
        dim: list[cst.Arg],
        line: int,
        depth: int,
    ) -> Loss:
        """Return what ``mean`` or ``sum`` makes, over ``dim`` or all."""
        scope = self._tree.function(node)
        if self._is_of_parameters(node):
            return Loss.PARAMETERS
        if isinstance(node, cst.Call) and self._tree.called(node) == "torch.stack":
            return Loss.UNKNOWN
        inner = self._of(node, scope, line, depth)
        if inner is Loss.PARAMETERS or inner in _REDUCED:
            return inner  # over samples already
        if dim and not re.match(r"[(\[]?\s*0\b", self._tree.text(dim[0].value)):
            return Loss.EACH
        return Loss.MEAN if how == "mean" else Loss.SUM

    def _of_total(
        self, node: cst.BaseExpression, scope: Scope, line: int, depth: int
    ) -> Loss:
        """Classify ``sum(...)`` over a generator or a list of losses."""
        if isinstance(node, cst.GeneratorExp | cst.ListComp):
            if self._is_of_parameters(node.for_in.iter):
                return Loss.PARAMETERS
            value = self._of(node.elt, scope, line, depth)
            if value in (Loss.EACH, Loss.MEAN, Loss.OUTPUT) and self._is_over_batch(
                node.for_in.iter
            ):
                return Loss.SUM if value is Loss.MEAN else Loss.UNKNOWN
            return value
        if isinstance(node, cst.List | cst.Tuple) and node.elements:
            out = Loss.CONSTANT
            for element in node.elements:
                value = self._of(element.value, scope, line, depth)
                out = _combined(cst.Add(), out, value, counts=False)
            return out
        return Loss.UNKNOWN

    def _is_over_batch(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression goes through the samples of a batch."""
        names = {
            name.value
            for loop in self._work.job.training
            if isinstance(loop.node, cst.For)
            for name in stored_names(loop.node.target)
        }
        given = [node]
        if self._tree.called(node) in ("zip", "enumerate", "reversed"):
            given = [a.value for a in node.args] if isinstance(node, cst.Call) else []
        return any(isinstance(n, cst.Name) and n.value in names for n in given)

    def _of_returned(self, called: list[Called], depth: int) -> Loss:
        out: Loss | None = None
        for function, kind, maker in called:
            for given in self._returned(function, kind, maker):
                line = self._tree.line(given) + 1
                value = self._inside(kind, maker, given, function, line, depth)
                out = value if out is None else _either(out, value)
        return out or Loss.UNKNOWN

    def _inside(
        self,
        kind: cst.ClassDef | None,
        maker: cst.Call | None,
        node: cst.BaseExpression,
        function: cst.FunctionDef,
        line: int,
        depth: int,
    ) -> Loss:
        """Classify what a method returns for an object that a call made."""
        with self._branches.inside(kind, maker):
            return self._of(node, function, line, depth)

    def _returned(
        self,
        function: cst.FunctionDef,
        kind: cst.ClassDef | None,
        maker: cst.Call | None,
    ) -> list[cst.BaseExpression]:
        """Return what a function may return, of an object that a call made."""
        every = self._flow.returned(function)
        if kind is None or maker is None:
            return every
        with self._branches.inside(kind, maker):
            return [given for given in every if not self._branches.is_left_out(given)]

    def criterion(self, call: cst.Call, scope: Scope) -> Loss | None:
        """Return the kind of a loss of ``torch.nn`` or ``torch.nn.functional``."""
        full = self._tree.called(call)
        if full.startswith("torch.nn.functional."):
            name = full.rpartition(".")[2]
            if "loss" in name or "cross_entropy" in name or name == "kl_div":
                return self._by_reduction(call, call.args[2:])
            return None
        for made in self._calls.makers(call, scope):
            name = self._tree.called(made)
            if name.startswith("torch.nn.") and name.endswith("Loss"):
                return self._by_reduction(made, made.args)
        return None

    def _by_reduction(self, call: cst.Call, options: Sequence[cst.Arg]) -> Loss:
        for given in options:
            text = self._tree.text(given.value).strip("\"'")
            if given.keyword is None and text in ("sum", "none", "False"):
                of_text = {"sum": Loss.SUM, "none": Loss.EACH}
                return of_text.get(text, Loss.UNKNOWN)
        for given in call.args:
            name = given.keyword.value if given.keyword is not None else ""
            text = self._tree.text(given.value).strip("\"'")
            if (name == "reduction" and text == "sum") or (
                name == "size_average" and text == "False"
            ):
                return Loss.SUM
            if name == "reduction" and text == "none":
                return Loss.EACH
            if name == "reduction" and text not in ("mean", "batchmean"):
                return Loss.UNKNOWN
            if name == "reduce" and text == "False":
                return Loss.EACH
        return Loss.MEAN

    def _is_module(self, call: cst.Call, scope: Scope) -> bool:
        """Return whether a call is one of a trained model."""
        if dotted(call.func) is None:
            return False
        reached = self._flow.reached(call.func, scope)
        keys = {m.key for m in self._work.job.models}
        keys |= {
            o.key
            for m in self._work.job.models
            if m.path is not None
            for o in self._flow.assigned(m.path, m.scope)
        }
        return not keys.isdisjoint(reached)

    def _is_of_parameters(self, node: cst.CSTNode) -> bool:
        return any(
            self._tree.method_called(c, "parameters", "named_parameters") is not None
            for c in found(node, cst.Call)
        ) or any(a.attr.value in ("weight", "bias") for a in found(node, cst.Attribute))

    def _of_parameters(self, node: cst.CSTNode) -> bool:
        """Return whether a statement is inside a loop over parameters."""
        return any(
            isinstance(a, cst.For) and self._is_of_parameters(a.iter)
            for a in self._tree.ancestors(node)
        )

    def _counts(self, node: cst.BaseExpression, scope: Scope) -> bool:
        """Return whether an expression is a number of samples or of elements."""
        if (path := dotted(node)) is not None:
            if isinstance(node, cst.Attribute) and node.attr.value == "batch_size":
                keys = {o.key for t in self._work.job.training for o in t.origins}
                of = self._flow.origins(node.value, scope)
                return any(o.key in keys for o in of)  # a rank's part of the batch
            made = self._flow.assigned(path, scope)
            return bool(made) and all(
                dotted(o.value) is None and self._counts(o.value, o.scope) for o in made
            )
        if isinstance(node, cst.Call):
            method = (
                node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
            )
            if self._tree.called(node) == "len" and node.args:
                return self._is_of_step(node.args[0].value, scope)
            on = node.func.value if isinstance(node.func, cst.Attribute) else None
            return (
                method in ("size", "numel")
                and on is not None
                and self._is_of_step(on, scope)
            )
        if isinstance(node, cst.BinaryOperation):
            return self._counts(node.left, scope) or self._counts(node.right, scope)
        if isinstance(node, cst.Subscript):
            base = node.value
            return (
                isinstance(base, cst.Attribute)
                and base.attr.value == "shape"
                and self._is_of_step(base.value, scope)
            )
        return False

    def _is_of_step(self, node: cst.BaseExpression, scope: Scope) -> bool:
        """Return whether something may be a batch, rather than whole data."""
        path = dotted(node)
        if path is None:
            return True
        first = path.partition(".")[0]
        if scope is not None and first in parameters(scope) and first != "self":
            return not path.endswith("dataset")
        made = self._flow.assigned(path, scope) or self._flow.assigned(first, scope)
        loops = [loop.node for loop in self._work.job.training]
        inside = [self._tree.within(o.statement, loop) for o in made for loop in loops]
        return (
            (not made and first != "self")
            or any(inside)
            or (
                scope is not None
                and scope not in self._tops
                and any(o.scope is scope for o in made)
            )
        )


def _either(one: Loss, other: Loss) -> Loss:
    """Return the kind of a value that comes from one of two places."""
    if one is other or other is Loss.CONSTANT:
        return one
    if {one, other} == {Loss.OUTPUT, Loss.MEAN}:
        return Loss.MEAN
    if one is Loss.CONSTANT:
        return other
    return Loss.UNKNOWN


def _combined(operator: cst.CSTNode, left: Loss, right: Loss, *, counts: bool) -> Loss:
    """Return the kind of two values joined by an operator."""
    if Loss.OUTPUT in (left, right):
        return _with_output(operator, left, right, counts=counts)
    both = {left, right}
    plus = isinstance(operator, cst.Add | cst.Subtract | cst.AddAssign)
    plus = plus or isinstance(operator, cst.SubtractAssign)
    divided = isinstance(operator, cst.Divide | cst.DivideAssign)
    if divided and counts:
        # A sum divided by the number of this rank's samples is a mean over them.
        if left is Loss.SUM:
            return Loss.MEAN
        return Loss.OTHER if left in _REDUCED else Loss.UNKNOWN
    neither = Loss.UNKNOWN if _REDUCED.isdisjoint(both) else Loss.OTHER
    if Loss.UNKNOWN in both or Loss.OTHER in both:
        return neither
    if both == {Loss.CONSTANT}:
        return Loss.CONSTANT
    rest = both - {Loss.CONSTANT}
    if rest == {Loss.EACH} and (plus or not counts):
        return Loss.EACH
    if plus:
        if Loss.SUM in rest and len(rest) > 1:
            return Loss.MIXED
        if rest == {Loss.MEAN, Loss.PARAMETERS}:
            return Loss.MEAN
        return rest.pop() if len(rest) == 1 else neither
    if isinstance(operator, cst.Multiply | cst.MultiplyAssign) or divided:
        if divided and right is not Loss.CONSTANT and right is not Loss.PARAMETERS:
            return neither
        if len(rest) == 1 and Loss.CONSTANT in both:
            return rest.pop()
        if rest == {Loss.PARAMETERS}:
            return Loss.PARAMETERS
        if Loss.PARAMETERS in rest and Loss.MIXED not in rest:
            return (rest - {Loss.PARAMETERS}).pop()
        return neither
    return Loss.PARAMETERS if rest == {Loss.PARAMETERS} else neither


def _with_output(
    operator: cst.CSTNode, left: Loss, right: Loss, *, counts: bool
) -> Loss:
    """Return the kind of an operation on an output, a loss if another is added."""
    loss = not {left, right}.isdisjoint([Loss.MEAN, Loss.PARAMETERS])
    instead = Loss.MEAN if loss else Loss.EACH
    parts = [instead if part is Loss.OUTPUT else part for part in (left, right)]
    out = _combined(operator, *parts, counts=counts)
    rest = {left, right} - {Loss.OUTPUT, Loss.CONSTANT}
    return Loss.OUTPUT if out is Loss.EACH and not rest else out


def _is_dim(given: cst.Arg) -> bool:
    """Return whether an argument of ``sum`` or ``mean`` gives the dimensions."""
    return given.keyword is None or given.keyword.value in ("dim", "axis")
