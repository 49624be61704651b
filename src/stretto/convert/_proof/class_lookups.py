"""Methods and attributes of the script's classes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._proof.batch_values import BoundMethod, Constant, Func
from stretto.convert._proof.script_run import MODULE
from stretto.convert._tree import dotted

if TYPE_CHECKING:
    from stretto.convert._proof.batch_values import ObjectRef, Value
    from stretto.convert._proof.script_run import Frame, Run


def object_attribute(run: Run, ref: ObjectRef, name: str, node: cst.CSTNode) -> Value:
    """Return an attribute of an object of the script."""
    if isinstance(ref.kind, str):
        return BoundMethod(ref, name)
    known = run.get(ref.key, name)
    if known is not None:
        return known
    method = method_of(run, ref.kind, name)
    if method is not None:
        return bound_method(run, method, ref)
    if name == "training":
        return Constant(value=True)
    return class_attribute(run, ref.kind, name, ref, node)


def decorated(run: Run, made: Func, node: cst.FunctionDef, frame: Frame) -> Func:
    """Return what the script's own decorators make of a function."""
    for decorator in reversed(node.decorators):
        on = decorator.decorator
        called = on.func if isinstance(on, cst.Call) else on
        if run.tree.full(called) == "functools.wraps":
            continue
        around = run.value(on, frame)
        if isinstance(around, Func):
            call = cst.Call(func=on)
            inside = run.call(around, (made,), {}, call, frame)
            made = inside if isinstance(inside, Func) else made
    return made


def bound_method(
    run: Run, found_method: tuple[cst.FunctionDef, cst.ClassDef], ref: Value
) -> Value:
    """Return a method with its receiver, or the value of a property."""
    method, owner = found_method
    marks = {dotted(d.decorator) for d in method.decorators}
    home = MODULE
    if "staticmethod" in marks:
        return Func(method, home, None, owner)
    made = Func(method, home, None, owner)
    made = replace(decorated(run, made, method, run.frames[home]), receiver=ref)
    if marks & {"property", "cached_property", "functools.cached_property"}:
        return run.call(made, (), {}, method, run.frames[MODULE])
    return made


def class_attribute(
    run: Run, kind: cst.ClassDef, name: str, ref: ObjectRef | None, node: cst.CSTNode
) -> Value:
    """Return an attribute that a class or one of its bases sets."""
    for owner in _class_line(run, kind):
        for line in getattr(owner.body, "body", ()):
            if isinstance(line, cst.FunctionDef) and line.name.value == name:
                return Func(line, MODULE, None, owner)
            for small in (
                getattr(line, "body", ())
                if isinstance(line, cst.SimpleStatementLine)
                else ()
            ):
                if isinstance(small, cst.Assign) and any(
                    dotted(t.target) == name for t in small.targets
                ):
                    return run.value(small.value, run.frames[MODULE])
                if (
                    isinstance(small, cst.AnnAssign)
                    and dotted(small.target) == name
                    and small.value is not None
                ):
                    return run.value(small.value, run.frames[MODULE])
    if ref is not None:
        return BoundMethod(ref, name)
    return Constant()


def _class_line(run: Run, kind: cst.ClassDef) -> list[cst.ClassDef]:
    """Return a class and its bases in the script, in the order of look-ups."""
    out = [kind]
    for node in out:
        for base in node.bases:
            name = (dotted(base.value) or "").rpartition(".")[2]
            other = run.tree.classes.get(name)
            if other is not None and other not in out:
                out.append(other)
    return out


def method_of(
    run: Run, kind: cst.ClassDef, name: str, after: cst.ClassDef | None = None
) -> tuple[cst.FunctionDef, cst.ClassDef] | None:
    """Return a method of a class, or of one of its bases ``after`` another."""
    line = _class_line(run, kind)
    if after is not None and after in line:
        line = line[line.index(after) + 1 :]
    for owner in line:
        for node in getattr(owner.body, "body", ()):
            if isinstance(node, cst.FunctionDef) and node.name.value == name:
                return node, owner
    return None


def library_base(run: Run, kind: cst.ClassDef) -> str:
    """Return the full name of the class of a library that a class is made from."""
    for owner in _class_line(run, kind):
        for base in owner.bases:
            full = run.tree.full(base.value)
            if full is not None and full not in run.tree.classes:
                return full
    return ""
