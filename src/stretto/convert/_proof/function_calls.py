"""Calls of functions of the script."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.batch_values import NONE, Constant, Iter, Seq, joined
from stretto.convert._proof.branches import afresh, either
from stretto.convert._proof.containers import new_dict
from stretto.convert._proof.script_run import MODULE, Frame
from stretto.convert._tree import found

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.convert._proof.batch_values import Func, Value
    from stretto.convert._proof.script_run import Run


_DEEPEST = 28
"""Calls within calls that are followed."""


def parameter_names(function: cst.FunctionDef | cst.Lambda) -> list[str]:
    """Return the names of a function's parameters."""
    of = function.params
    return [p.name.value for p in (*of.posonly_params, *of.params, *of.kwonly_params)]


def function_call(
    run: Run,
    func: Func,
    args: tuple[Value, ...],
    options: Mapping[str, Value],
    node: cst.CSTNode,
    caller: Frame,
) -> Value:
    """Run a function of the script, and return what it returns."""
    function = func.node
    if len(run.active) >= _DEEPEST or run.active.count(function) > 1:
        return run.unread(node, [*args, *options.values()])
    home = run.frames.get(func.home) or run.frames[MODULE]
    key = run.key("call", caller.key, id(node), id(function))
    frame = Frame(
        key=key,
        scope=function,
        owner=func.owner,
        parent=home,
        receiver=func.receiver if func.receiver is not None else home.receiver,
    )
    run.frames[key] = frame
    run.state[key] = {}
    _bind_parameters(run, func, args, options, frame, home)
    run.active.append(function)
    loops, run.loops = run.loops, []
    try:
        if isinstance(function, cst.Lambda):
            return run.value(function.body, frame)
        falls = run.block(function.body, frame)
    finally:
        run.active.pop()
        run.loops = loops
    if _is_generator(run, function):
        return Iter(joined(frame.yields, function))
    if falls and frame.returns:
        frame.returns.append(NONE)
    out: Value | None = None
    for value in frame.returns:
        if out is None:
            out = value
        else:
            out = either(afresh(out), value, function, frame.returned)
    if not _has_inner_functions(run, function):
        run.state.pop(key, None)
    return NONE if out is None else out


def _is_generator(run: Run, function: cst.FunctionDef) -> bool:
    """Return whether a function yields."""
    known = run.generators.get(id(function))
    if known is None:
        known = any(
            run.tree.function(y) is function for y in found(function.body, cst.Yield)
        )
        run.generators[id(function)] = known
    return known


def _has_inner_functions(run: Run, function: cst.FunctionDef) -> bool:
    """Return whether a function contains others, which read its variables."""
    known = run.nesting.get(id(function))
    if known is None:
        known = any(True for _ in found(function.body, (cst.FunctionDef, cst.Lambda)))
        run.nesting[id(function)] = known
    return known


def _bind_parameters(
    run: Run,
    func: Func,
    args: tuple[Value, ...],
    options: Mapping[str, Value],
    frame: Frame,
    home: Frame,
) -> None:
    """Assign a call's arguments to a function's parameters."""
    of = func.node.params
    plain = [*of.posonly_params, *of.params]
    given = list(args)
    if func.receiver is not None:
        given.insert(0, func.receiver)
    rest = given[len(plain) :]
    spread = options.get("*") is not None
    for place, param in enumerate(plain):
        name = param.name.value
        if place < len(given):
            run.set(frame.key, name, given[place])
        elif name in options:
            run.set(frame.key, name, options[name])
        elif spread and isinstance(given[-1] if given else None, Iter):
            run.set(frame.key, name, given[-1].item)  # type: ignore[union-attr]
        elif "**" in options:
            run.set(frame.key, name, options["**"])
        elif param.default is not None:
            run.set(frame.key, name, run.value(param.default, home))
        else:
            run.set(frame.key, name, Constant())
    if spread and given and isinstance(given[-1], Iter) and len(given) <= len(plain):
        run.set(frame.key, plain[len(given) - 1].name.value, given[-1].item)
    for param in of.kwonly_params:
        name = param.name.value
        value = options.get(name)
        if value is None:
            value = run.value(param.default, home) if param.default else Constant()
        run.set(frame.key, name, value)
    if isinstance(of.star_arg, cst.Param):
        run.set(frame.key, of.star_arg.name.value, Seq(tuple(rest)))
    if of.star_kwarg is not None:
        names = {p.name.value for p in (*plain, *of.kwonly_params)}
        more = {f"k:{k}": v for k, v in options.items() if k not in names}
        if "k:**" in more:
            more["*"] = more.pop("k:**")
        more.pop("k:*", None)
        ref = new_dict(run, more, of.star_kwarg, frame)
        run.set(frame.key, of.star_kwarg.name.value, ref)
