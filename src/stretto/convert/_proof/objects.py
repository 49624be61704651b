"""Objects of the script's classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._flow import SAME_OBJECT
from stretto.convert._proof.batch_values import (
    NONE,
    BoundMethod,
    Constant,
    Func,
    Iter,
    LibraryResult,
    Linear,
    ObjectRef,
    Rows,
    Seq,
)
from stretto.convert._proof.class_lookups import (
    bound_method,
    library_base,
    method_of,
    object_attribute,
)
from stretto.convert._proof.function_calls import parameter_names
from stretto.convert._proof.given_arguments import as_call
from stretto.convert._proof.library_calls import made_call
from stretto.convert._proof.script_run import MODULE
from stretto.convert._tree import dotted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.convert._proof.batch_values import Class, Value
    from stretto.convert._proof.given_arguments import CallArguments
    from stretto.convert._proof.script_run import Frame, Run


def new_object(
    run: Run,
    made: Class,
    node: cst.CSTNode,
    args: tuple[Value, ...],
    options: Mapping[str, Value],
    frame: Frame,
    *,
    strict: bool = True,
) -> Value:
    """Return a new object of a class of the script."""
    kind = made.node
    ref = ObjectRef(run.key("object", frame.key, id(node), id(kind)), kind)
    run.state[ref.key] = {}
    base = library_base(run, kind)
    if (
        base.startswith(("torch.nn.", "torch.optim"))
        and base.rpartition(".")[2] != "Module"
    ):
        run.set(ref.key, "__made__", LibraryResult(base, as_call(node)))
    method = method_of(run, kind, "__init__")
    if method is not None:
        if not strict:
            names = parameter_names(method[0])[1:]
            options = {name: Constant() for name in names}
        run.call(Func(method[0], MODULE, ref, method[1]), args, options, node, frame)
    else:
        fields = [
            dotted(small.target) or ""
            for line in getattr(kind.body, "body", ())
            if isinstance(line, cst.SimpleStatementLine)
            for small in line.body
            if isinstance(small, cst.AnnAssign)
        ]
        for name, value in [*zip(fields, args, strict=False), *options.items()]:
            run.set(ref.key, name, value)
    return ref


def object_call(
    run: Run,
    ref: ObjectRef,
    args: tuple[Value, ...],
    options: Mapping[str, Value],
    node: cst.CSTNode,
    frame: Frame,
) -> Value:
    """Return the value of a call of an object of the script."""
    if not isinstance(ref.kind, cst.ClassDef):
        return Constant()
    for name in ("__call__", "forward"):
        method = method_of(run, ref.kind, name)
        if method is not None:
            return run.call(bound_method(run, method, ref), args, options, node, frame)
    made = run.get(ref.key, "__made__")
    if not isinstance(made, LibraryResult):
        made = LibraryResult(library_base(run, ref.kind), as_call(node))
    given = run.given(as_call(node), args, options)
    return made_call(run, made, given, frame)


def object_method(
    run: Run, ref: ObjectRef, name: str, given: CallArguments, frame: Frame
) -> Value:
    """Return the value of a call of a method of an object of the script."""
    node, args = given.node, given.args
    value = object_attribute(run, ref, name, node)
    if isinstance(value, BoundMethod) and value.of == ref:
        if name in SAME_OBJECT:
            return ref
        if name == "save_for_backward":
            run.set(ref.key, "saved_tensors", Seq(args))
            run.set(ref.key, "saved_variables", Seq(args))
            return NONE
        if name in ("parameters", "buffers"):
            return Iter(Constant(grad=True))
        if name in ("named_parameters", "named_modules", "named_children"):
            return Iter(Seq((Constant(), Constant(grad=True))))
        if name in (
            "register_buffer",
            "register_parameter",
            "add_module",
            "register_module",
        ):
            if (
                len(args) > 1
                and isinstance(args[0], Constant)
                and isinstance(args[0].value, str)
            ):
                inner = args[1]
                if isinstance(inner, Linear | Rows):
                    inner = Constant()
                run.set(ref.key, args[0].value, inner)
            return NONE
        if name in ("children", "modules"):
            return Iter(Constant(grad=True))
        return run.unread(node, given.all)
    return run.call(value, args, given.options, node, frame)
