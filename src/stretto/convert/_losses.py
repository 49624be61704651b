"""Classify a training loss over samples: a mean, a sum, or something else."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._flow import parameters
from stretto.convert._tree import Scope, dotted, found

if TYPE_CHECKING:
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
    MIXED = "mixed"
    """A sum over samples plus a mean over them or a function of parameters."""
    UNKNOWN = "unknown"


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

    def of(self, call: cst.Call) -> Loss:
        """Return the kind of the loss of a call of ``backward``."""
        node = self._work.job.differentiated(call)
        if node is None:
            return Loss.UNKNOWN
        if isinstance(node, cst.Call) and node.args:
            on = self._tree.method_called(node, *_SCALING)
            if on is not None:
                node = node.args[0].value
        scope, line = self._tree.function(call), self._tree.line(call)
        loss = self._of(node, scope, line, _DEPTH)
        # A model's unchanged output is its own loss, a mean by all conventions.
        return Loss.MEAN if loss is Loss.EACH else loss

    def graph_names(self) -> set[str]:
        """Return the variables through which gradients flow to a ``backward``."""
        out: set[str] = set()
        scopes: list[cst.CSTNode] = []
        for call in self._work.job.backwards:
            loss = self._work.job.differentiated(call)
            if loss is not None:
                out |= _tensor_names(loss)
            scope = self._tree.function(call)
            scopes.append(self._tree.module if scope is None else scope.body)
        grown = -1
        while grown < len(out):
            grown = len(out)
            for body in scopes:
                for assign in found(body, cst.Assign):
                    names = {dotted(t.target) for t in assign.targets}
                    if names & out:
                        out |= _tensor_names(assign.value)
                for added in found(body, cst.AugAssign):
                    if dotted(added.target) in out:
                        out |= _tensor_names(added.value)
                for call in found(body, cst.Call):
                    on = self._tree.method_called(call, "append", "extend")
                    if on is not None and dotted(on) in out:
                        for given in call.args:
                            out |= _tensor_names(given.value)
        return out

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
            return _combined(
                node.operator,
                self._of(node.left, scope, line, depth - 1),
                self._of(node.right, scope, line, depth - 1),
                counts=self._counts(node.right, scope),
            )
        if isinstance(node, cst.IfExp):
            return _either(
                self._of(node.body, scope, line, depth - 1),
                self._of(node.orelse, scope, line, depth - 1),
            )
        if isinstance(node, cst.Call):
            return self._of_call(node, scope, line, depth - 1)
        if isinstance(node, cst.Subscript):
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
            return Loss.MEAN
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
        ]
        for place in range(len(made) - 1, -1, -1):
            block = self._tree.parent(made[place].statement)
            if made[place].scope is not scope:
                continue
            end = [n for n in (block,) if isinstance(n, cst.Module | cst.BaseSuite)]
            last = max((self._last_line(n) for n in end), default=0)
            if last >= line:
                return made[place:]
        return made

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
        functions = self._flow.local(made)
        functions += self._forwards(made, origin.scope)
        out: Loss | None = None
        for function in functions:
            for given in self._flow.returned(function):
                if not isinstance(given, cst.Tuple | cst.List):
                    return Loss.UNKNOWN
                if origin.place is None or origin.place >= len(given.elements):
                    return Loss.UNKNOWN
                part = given.elements[origin.place].value
                if part.deep_equals(cst.Name("None")):
                    continue
                value = self._of(part, function, self._tree.line(part) + 1, depth)
                out = value if out is None else _either(out, value)
        if out is None and self._is_module(made, origin.scope):
            return Loss.MEAN
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
        if functions := self._flow.local(node):
            return self._of_returned(functions, depth)
        forwards = self._forwards(node, scope)
        if forwards or self._is_module(node, scope):
            given = self._of_returned(forwards, depth)
            return given if given in (Loss.MEAN, Loss.SUM, Loss.MIXED) else Loss.EACH
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
        return Loss.UNKNOWN

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
        if inner in (Loss.PARAMETERS, Loss.MEAN, Loss.SUM, Loss.MIXED):
            return inner  # already one number
        if dim:
            first = self._tree.text(dim[0].value)
            return Loss.UNKNOWN if first == "0" else Loss.EACH
        return Loss.MEAN if how == "mean" else Loss.SUM

    def _of_total(
        self, node: cst.BaseExpression, scope: Scope, line: int, depth: int
    ) -> Loss:
        """Classify ``sum(...)`` over a generator or a list of losses."""
        if isinstance(node, cst.GeneratorExp | cst.ListComp):
            if self._is_of_parameters(node.for_in.iter):
                return Loss.PARAMETERS
            return self._of(node.elt, scope, line, depth)
        if isinstance(node, cst.List | cst.Tuple) and node.elements:
            out = Loss.CONSTANT
            for element in node.elements:
                value = self._of(element.value, scope, line, depth)
                out = _combined(cst.Add(), out, value, counts=False)
            return out
        return Loss.UNKNOWN

    def _of_returned(self, functions: list[cst.FunctionDef], depth: int) -> Loss:
        out: Loss | None = None
        for function in functions:
            for given in self._flow.returned(function):
                line = self._tree.line(given) + 1
                value = self._of(given, function, line, depth)
                out = value if out is None else _either(out, value)
        return out or Loss.UNKNOWN

    def criterion(self, call: cst.Call, scope: Scope) -> Loss | None:
        """Return the kind of a loss of ``torch.nn`` or ``torch.nn.functional``."""
        full = self._tree.called(call)
        if full.startswith("torch.nn.functional."):
            name = full.rpartition(".")[2]
            if "loss" in name or "cross_entropy" in name or name == "kl_div":
                return self._by_reduction(call)
            return None
        for made in self._makers(call, scope):
            name = self._tree.called(made)
            if name.startswith("torch.nn.") and name.endswith("Loss"):
                return self._by_reduction(made)
        return None

    def _by_reduction(self, call: cst.Call) -> Loss:
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

    # What is called

    def _forwards(self, call: cst.Call, scope: Scope) -> list[cst.FunctionDef]:
        """Return the ``forward`` of the script's class whose object is called."""
        out = []
        for made in self._makers(call, scope):
            kind = self._tree.classes.get(dotted(made.func) or "")
            if kind is not None:
                out += [
                    f
                    for f in found(kind.body, cst.FunctionDef)
                    if f.name.value in ("forward", "__call__")
                ]
        return out

    def _makers(self, call: cst.Call, scope: Scope) -> list[cst.Call]:
        """Return the calls that made the object that is called, or the call itself.

        ``CrossEntropyLoss()(x, y)`` calls what it makes.
        """
        if isinstance(call.func, cst.Call):
            return [call.func]
        if dotted(call.func) is None:
            return []
        out: list[cst.Call] = []
        waiting = self._flow.origins(call.func, scope)
        seen: set[int] = set()
        while waiting:
            origin = waiting.pop()
            made = origin.value
            if not isinstance(made, cst.Call | cst.IfExp) or id(made) in seen:
                continue
            seen.add(id(made))
            same = self._flow.same_object(made, origin.scope, origin.place)
            if isinstance(made, cst.Call) and not same:
                out.append(made)
            for value, inner, _ in same:
                waiting += self._flow.origins(value, inner)
        return out

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
            made = self._flow.assigned(path, scope)
            return bool(made) and all(
                dotted(o.value) is None and self._counts(o.value, o.scope) for o in made
            )
        if isinstance(node, cst.Call):
            method = (
                node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
            )
            return self._tree.called(node) == "len" or method in ("size", "numel")
        if isinstance(node, cst.BinaryOperation):
            return self._counts(node.left, scope) or self._counts(node.right, scope)
        if isinstance(node, cst.Subscript):
            base = node.value
            return isinstance(base, cst.Attribute) and base.attr.value == "shape"
        return False


def _either(one: Loss, other: Loss) -> Loss:
    """Return the kind of a value that comes from one of two places."""
    if one is other or other is Loss.CONSTANT:
        return one
    if one is Loss.CONSTANT:
        return other
    return Loss.UNKNOWN


def _combined(operator: cst.CSTNode, left: Loss, right: Loss, *, counts: bool) -> Loss:
    """Return the kind of two values joined by an operator."""
    both = {left, right}
    plus = isinstance(operator, cst.Add | cst.Subtract | cst.AddAssign)
    plus = plus or isinstance(operator, cst.SubtractAssign)
    divided = isinstance(operator, cst.Divide | cst.DivideAssign)
    if divided and counts:
        # A sum divided by the number of this rank's samples is a mean over them.
        return Loss.MEAN if left is Loss.SUM else Loss.UNKNOWN
    if Loss.UNKNOWN in both:
        return Loss.UNKNOWN
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
        return rest.pop() if len(rest) == 1 else Loss.UNKNOWN
    if isinstance(operator, cst.Multiply | cst.MultiplyAssign) or divided:
        if divided and right is not Loss.CONSTANT and right is not Loss.PARAMETERS:
            return Loss.UNKNOWN
        if len(rest) == 1 and Loss.CONSTANT in both:
            return rest.pop()
        if rest == {Loss.PARAMETERS}:
            return Loss.PARAMETERS
        if Loss.PARAMETERS in rest and Loss.MIXED not in rest:
            return (rest - {Loss.PARAMETERS}).pop()
        return Loss.UNKNOWN
    return Loss.PARAMETERS if rest == {Loss.PARAMETERS} else Loss.UNKNOWN


def _is_dim(given: cst.Arg) -> bool:
    """Return whether an argument of ``sum`` or ``mean`` gives the dimensions."""
    return given.keyword is None or given.keyword.value in ("dim", "axis")


_CUTTING = frozenset(["item", "detach", "data", "numpy", "tolist", "shape", "size"])
"""Attributes and methods behind which no gradient flows."""


def _tensor_names(node: cst.BaseExpression) -> set[str]:
    """Return the names in an expression that gradients may flow through."""
    out: set[str] = set()
    waiting: list[cst.CSTNode] = [node]
    while waiting:
        here = waiting.pop()
        if isinstance(here, cst.Attribute) and here.attr.value in _CUTTING:
            continue
        if isinstance(here, cst.Call) and dotted(here.func) in ("float", "int", "len"):
            continue
        path = dotted(here)
        if path is not None:
            out.add(path)
        if isinstance(here, cst.Attribute):
            waiting.append(here.value)
        else:
            waiting += here.children
    return out - {"self", "torch", "F", "nn", "math"}
