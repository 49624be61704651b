"""Calls of methods of values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._flow import SAME_OBJECT
from stretto.convert._proof import own_gradients
from stretto.convert._proof.arithmetic import elementwise
from stretto.convert._proof.attributes import attribute_of
from stretto.convert._proof.batch_values import (
    NONE,
    UNSET,
    Class,
    Constant,
    Count,
    Func,
    Iter,
    LibraryName,
    LibraryResult,
    ObjectRef,
    OneOf,
    Rows,
    Seq,
    Shape,
    Unproved,
    Why,
    first_bad,
    first_rows,
    is_of_batch,
    joined,
)
from stretto.convert._proof.builtin_calls import number_in
from stretto.convert._proof.containers import container_method
from stretto.convert._proof.counts import followed
from stretto.convert._proof.draws import numpy_drawn
from stretto.convert._proof.given_arguments import as_call
from stretto.convert._proof.known_names import (
    GENERATORS,
    PASSING,
    TENSOR_NAMES,
    TRUSTED,
)
from stretto.convert._proof.loaders import batch_of, is_loader
from stretto.convert._proof.objects import object_method
from stretto.convert._proof.own_gradients import has_own_gradient
from stretto.convert._proof.targets import bind_again, write_root
from stretto.convert._proof.tensor_functions import tensor_function
from stretto.convert._proof.tensor_methods import tensor_method
from stretto.convert._proof.tensor_names import OTHER, VIEWING
from stretto.convert._tree import dotted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.given_arguments import CallArguments
    from stretto.convert._proof.script_run import Frame, Run


def method_call(
    run: Run,
    on: Value,
    name: str,
    args: tuple[Value, ...],
    options: Mapping[str, Value],
    node: cst.CSTNode,
    frame: Frame,
) -> Value:
    """Return the value of a call of a method."""
    out = _method_call(run, on, name, args, options, node, frame)
    if isinstance(on, OneOf | Class | Func | LibraryName | Unproved):
        return out
    if isinstance(on, ObjectRef) and isinstance(on.kind, cst.ClassDef):
        return out
    return followed(name, run.given(as_call(node), args, options), out)


def _method_call(
    run: Run,
    on: Value,
    name: str,
    args: tuple[Value, ...],
    options: Mapping[str, Value],
    node: cst.CSTNode,
    frame: Frame,
) -> Value:
    if isinstance(on, OneOf):
        return joined(
            [method_call(run, v, name, args, options, node, frame) for v in on.values],
            node,
        )
    if isinstance(on, LibraryName):
        if on.name == "super":
            return Constant()
        return run.call(LibraryName(f"{on.name}.{name}"), args, options, node, frame)
    call = as_call(node)
    given = run.given(call, args, options)
    if isinstance(on, ObjectRef):
        if isinstance(on.kind, cst.ClassDef):
            return object_method(run, on, name, given, frame)
        return container_method(run, on, name, given, frame)
    if isinstance(on, Class):
        if name == "apply" and has_own_gradient(run, on):
            return own_gradients.apply(run, on, args, options, node, frame)
        func = attribute_of(run, on, name, node)
        if isinstance(func, Func) and "classmethod" in {
            dotted(d.decorator) for d in getattr(func.node, "decorators", ())
        }:
            func = replace(func, receiver=on)
        return run.call(func, args, options, node, frame)
    if isinstance(on, LibraryResult):
        return _made_method(run, on, name, given, frame)
    if isinstance(on, Seq | Iter):
        if name in ("items", "values", "keys"):
            return on
        if name in ("to", "cuda", "view", "float"):
            return on
        if isinstance(on, Iter) and name in ("append", "extend"):
            return NONE
        known = tensor_method(name, replace(given, args=(on, *args)))
        return known if known is not None else on
    if isinstance(on, Rows) and (on.raw or on.opaque is not None):
        if name == "items":
            return Iter(Seq((Constant(), replace(on, whole=False))))
        if name in ("values", "get", "pop"):
            part = replace(on, whole=False)
            return Iter(part) if name == "values" else part
        if name in ("keys",):
            return Iter(Constant())
    if isinstance(on, Func):
        return run.unread(node, list(args))
    if isinstance(on, Shape):
        return Count(exact=False) if name == "numel" else Constant()
    if name == "item":
        return number_in(run, on, node)
    if name in ("tolist", "numpy") and isinstance(on, Rows):
        return on
    values = tuple(run.items_of_ref(v) if isinstance(v, ObjectRef) else v for v in args)
    opts = {
        k: run.items_of_ref(v) if isinstance(v, ObjectRef) else v
        for k, v in options.items()
    }
    if name == "apply_" or (name == "apply" and args):
        return run.unread(node, [on, *args[1:]])
    whole = replace(given, args=(on, *values), options=opts)
    if (
        isinstance(on, Constant)
        and on.value is UNSET
        and is_of_batch(Seq(tuple(whole.all[1:])))
    ):
        if name in PASSING:
            return next((v for v in values if is_of_batch(v)), Constant())
        if name not in TENSOR_NAMES:
            return run.unread(node, whole.all)
    if name == "__setitem__":
        run.write(on, Unproved(Why.PLACED, node), node)
    known = tensor_method(name, whole)
    if known is not None:
        if (
            name.endswith("_")
            and not name.startswith("_")
            and isinstance(call.func, cst.Attribute)
        ):
            run.write(on, known, node)
            write_root(run, call.func.value, known, frame)
            bind_again(run, call.func.value, known, frame)
        elif name in VIEWING:
            run.note_view(known, on)
        return known
    plain = isinstance(on, Rows) and not on.raw and on.opaque is None
    if plain or (isinstance(on, Rows) and name in OTHER):
        return Unproved(Why.UNREAD, node)
    return run.unread(node, whole.all)


def _made_method(
    run: Run, on: LibraryResult, name: str, given: CallArguments, frame: Frame
) -> Value:
    """Return the value of a call of a method of what a library made."""
    if name in SAME_OBJECT or name in ("compile", "requires_grad_", "manual_seed"):
        return on
    if name in (
        "parameters",
        "named_parameters",
        "modules",
        "named_modules",
        "state_dict",
    ):
        return (
            Iter(Constant(grad=True))
            if name == "parameters"
            else Iter(Seq((Constant(), Constant(grad=True))))
        )
    if on.name in GENERATORS:
        rows = first_rows(given.all)
        return rows if rows is not None else numpy_drawn(given)
    if name in PASSING:
        return next((v for v in given.all if is_of_batch(v)), Constant())
    own = first_rows([on])
    if own is not None and on.name.startswith(("torch.distributions", "torch.nn")):
        return elementwise([own, *given.all], given.node)
    if is_loader(run, on):
        return batch_of(run, on) if name in ("next", "__next__") else Constant()
    if on.name.startswith("torch.distributions") and name in ("sample", "rsample"):
        return (
            tensor_function(
                "torch.randn", replace(given, args=given.args or (Constant(1),))
            )
            or Constant()
        )
    if on.name.startswith("torch.distributions"):
        return elementwise(given.all, given.node)
    values = [run.items_of_ref(v) if isinstance(v, ObjectRef) else v for v in given.all]
    if not is_of_batch(Seq(tuple(values))):
        if first_rows([on]) is None:
            return LibraryResult(
                f"{on.name}.{name}",
                given.node,
                given.args,
                tuple(given.options.items()),
            )
        return Constant(grad=True)
    if (bad := first_bad(values)) is not None:
        return bad
    if on.name.startswith(TRUSTED):
        return Rows(opaque=given.node, trusted=True)
    return run.unread(given.node, values)
