"""Functions of the script with a backward method of its own.

The gradient of such a function is what its ``backward`` returns, so this runs it too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.convert._proof.batch_values import (
    NONE,
    Class,
    Constant,
    Func,
    Linear,
    ObjectRef,
    Rows,
    Seq,
    Unproved,
    Why,
    first_bad,
    is_of_batch,
)
from stretto.convert._proof.class_lookups import library_base, method_of
from stretto.convert._proof.script_run import MODULE

if TYPE_CHECKING:
    from collections.abc import Mapping

    import libcst as cst

    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.script_run import Frame, Run


def has_own_gradient(run: Run, value: Value) -> bool:
    """Return whether a value is a class with a backward method."""
    base = library_base(run, value.node) if isinstance(value, Class) else ""
    return base.startswith("torch.") and base.endswith("Function")


def apply(
    run: Run,
    made: Class,
    args: tuple[Value, ...],
    options: Mapping[str, Value],
    node: cst.CSTNode,
    frame: Frame,
) -> Value:
    """Return the value of ``Function.apply``.

    Its backward must return, for the gradient of a mean over samples, what belongs to a
    mean: rows for each tensor of samples, and a sum over samples for each parameter.
    """
    context = ObjectRef(run.key("object", frame.key, id(node), "context"), made.node)
    run.state[context.key] = {}

    def call(name: str, *given: Value, own: Value | None = context) -> Value | None:
        method = method_of(run, made.node, name)
        if method is None:
            return None
        func = Func(method[0], MODULE, own, method[1])
        named = options if name == "forward" else {}
        return run.call(func, given, named, node, frame)

    if method_of(run, made.node, "setup_context") is not None:
        out = call("forward", *args, own=None)
        call("setup_context", Seq(args), out or Constant())
    else:
        out = call("forward", *args)
    if out is None:
        return run.unread(node, list(args))
    if not is_of_batch(Seq(args)) or not is_of_batch(out) or first_bad([out]):
        return out
    asked = _gradients_of(out)
    if asked is None:
        return Unproved(Why.UNREAD, node)
    gradients, degree = asked
    back = call("backward", *gradients)
    if back is None:
        back = call("vjp", *gradients)
    if back is None:
        return Unproved(Why.UNREAD, node)
    given = back.items if isinstance(back, Seq) else (back,)
    for argument, gradient in zip(args, given, strict=False):
        wrong = _wrong(argument, gradient, degree, node)
        if wrong is not None:
            return wrong
    return out


def _gradients_of(out: Value) -> tuple[list[Value], int] | None:
    """Return the gradients of a mean for the results, and the mean's degree.

    A mean over samples is of degree 0, also of those of which it is a sum: they have a
    row for each sample.
    """
    gradients: list[Value] = []
    degrees = set()
    for part in out.items if isinstance(out, Seq) else (out,):
        if isinstance(part, Rows):
            plain = replace(part, raw=False, whole=False, kind="", opaque=None)
            gradients.append(replace(plain, degree=-1 - part.degree, shifted=None))
            degrees.add(0)
        elif isinstance(part, Linear) and not part.mixed:
            gradients.append(Constant())
            degrees.add(part.degree)
        elif isinstance(part, Constant):
            gradients.append(Constant())
        else:
            return None
    return (gradients, degrees.pop()) if len(degrees) == 1 else None


def _wrong(
    argument: Value, gradient: Value, degree: int, node: cst.CSTNode
) -> Unproved | None:
    """Return why a gradient is not that of one process, averaged over ranks."""
    if isinstance(gradient, Unproved) or gradient == NONE:
        return gradient if isinstance(gradient, Unproved) else None
    if isinstance(argument, Rows):
        if argument.kind:
            return None  # numbers of places, and conditions, have no gradient
        fits = isinstance(gradient, Rows) and gradient.shifted is None
        wanted = degree - 1 - argument.degree
        if fits and isinstance(gradient, Rows) and gradient.degree == wanted:
            return None
    elif isinstance(argument, Constant):
        summed = isinstance(gradient, Linear) and gradient == Linear(degree)
        if summed or (isinstance(gradient, Constant) and not argument.grad):
            return None
    elif not is_of_batch(gradient):
        return None
    return Unproved(Why.BACKWARD, node)
