"""Calls in the script's text, and the losses of ``backward``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.arithmetic import combined
from stretto.convert._proof.batch_values import (
    NONE,
    Constant,
    Iter,
    LibraryResult,
    Linear,
    ObjectRef,
    Rows,
    Shape,
    is_of_batch,
    join,
)
from stretto.convert._proof.class_lookups import bound_method, library_base, method_of
from stretto.convert._proof.containers import items_in, items_of
from stretto.convert._proof.library_modules import module_call
from stretto.convert._proof.method_calls import method_call

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import Value
    from stretto.convert._proof.script_run import Frame, Run


def evaluate_call(run: Run, node: cst.Call, frame: Frame) -> Value:
    """Return the value of a call in the script's text."""
    func = node.func
    if id(node) in run.backwards:
        return _note_loss(run, node, frame)
    if isinstance(func, cst.Attribute) and run.tree.called(func.value) == "super":
        return _super_call(run, node, func.attr.value, frame)
    args, options = _arguments_of(run, node, frame)
    if isinstance(func, cst.Attribute):
        on = run.value(func.value, frame)
        return method_call(run, on, func.attr.value, args, options, node, frame)
    return run.call(run.value(func, frame), args, options, node, frame)


def _arguments_of(
    run: Run, node: cst.Call, frame: Frame
) -> tuple[tuple[Value, ...], dict[str, Value]]:
    """Return the arguments of a call, by place and by name."""
    args: list[Value] = []
    options: dict[str, Value] = {}
    for given in node.args:
        value = run.value(given.value, frame)
        if given.keyword is not None:
            options[given.keyword.value] = value
        elif given.star == "*":
            if isinstance(value, Iter) or (
                isinstance(value, ObjectRef)
                and isinstance(run.items_of_ref(value), Iter)
            ):
                args.append(
                    Iter(
                        items_in(run, value, node)[0],
                        samples=items_of(run, value, node)[1],
                    )
                )
                options.setdefault("*", Constant())
            elif isinstance(value, Shape):
                args.append(value)
            else:
                args += items_in(run, value, node)
        elif given.star == "**":
            if isinstance(value, ObjectRef) and value.kind == "dict":
                for name, part in run.state.get(value.key, {}).items():
                    options[name.removeprefix("k:")] = part
            else:
                options["**"] = value
        else:
            args.append(value)
    return tuple(args), options


def _note_loss(run: Run, node: cst.Call, frame: Frame) -> Value:
    """Note the value on which ``backward`` is called."""
    loss_node = None
    try:
        loss_node = run.job.differentiated(node)
    except Exception:  # noqa: BLE001 - refused elsewhere
        return Constant()
    value = run.value(loss_node, frame) if loss_node is not None else Constant()
    if not (
        isinstance(node.func, cst.Attribute)
        and run.tree.called(node) == "torch.autograd.backward"
    ):
        args, options = _arguments_of(run, node, frame)
        weights = options.get("gradient", args[0] if args else NONE)
        if isinstance(value, Rows) and weights != NONE:
            total = Linear(value.degree + 1)
            if isinstance(weights, Rows):
                value = replace(total, degree=total.degree + weights.degree)
            else:
                value = combined("*", total, weights, node)
        if isinstance(value, ObjectRef | LibraryResult) and args:
            for given in args:  # optimizer.backward(loss), fabric.backward(loss)
                if is_of_batch(given):
                    value = given
    old = run.losses.get(id(node))
    run.losses[id(node)] = value if old is None else join(old, value, node)
    return NONE


def _super_call(run: Run, node: cst.Call, name: str, frame: Frame) -> Value:
    """Return the value of a call of a method of ``super()``."""
    args, options = _arguments_of(run, node, frame)
    here: Frame | None = frame
    while here is not None and here.receiver is None:
        here = here.parent
    if here is None or not isinstance(here.receiver, ObjectRef):
        return Constant()
    ref = here.receiver
    if not isinstance(ref.kind, cst.ClassDef):
        return Constant()
    method = method_of(run, ref.kind, name, after=here.owner)
    if method is not None:
        return run.call(bound_method(run, method, ref), args, options, node, frame)
    base = library_base(run, ref.kind)
    if name == "__init__":
        made = LibraryResult(base, node, args, tuple(options.items()))
        run.set(ref.key, "__made__", made)
        return NONE
    if name in ("forward", "__call__"):
        known = run.get(ref.key, "__made__")
        made = known if isinstance(known, LibraryResult) else LibraryResult(base, node)
        given = run.given(node, args, options)
        return module_call(made, given, trusted=run.trusted)
    return run.unread(node, [*args, *options.values()])
