"""Run a script on values, to see how its losses depend on a batch.

The script is executed as far as its text goes: the module, its functions where they are
called, the methods of its objects. Both branches of an undecided test are taken and
their results joined; loops run until nothing changes. Code that cannot be read gives
values that say so. Nothing is imported and nothing of the script is executed.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._proof.attributes import attribute_of
from stretto.convert._proof.batch_values import (
    ELLIPSIS,
    BoundMethod,
    Class,
    Constant,
    Count,
    Func,
    LibraryName,
    LibraryResult,
    ObjectRef,
    OneOf,
    Rows,
    Seq,
    Unproved,
    Why,
    has_count,
    joined,
)
from stretto.convert._proof.calls import evaluate_call
from stretto.convert._proof.containers import items_in, new_list
from stretto.convert._proof.expressions import (
    boolean_operation,
    comparison,
    comprehension,
    conditional,
    dict_display,
    element_values,
    operation,
    unary_operation,
)
from stretto.convert._proof.function_calls import function_call, parameter_names
from stretto.convert._proof.given_arguments import as_call
from stretto.convert._proof.library_calls import library_call, made_call
from stretto.convert._proof.method_calls import method_call
from stretto.convert._proof.objects import new_object, object_call
from stretto.convert._proof.script_run import Frame, Run, TooLong
from stretto.convert._proof.statements import run_small, run_statement
from stretto.convert._proof.subscripts import subscript
from stretto.convert._proof.targets import bind
from stretto.convert._tree import found

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stretto.convert._edit import Work
    from stretto.convert._proof.batch_values import Value


_MAX_STEPS = 400_000
"""Expressions after which a script is too long to be followed."""


@final
class Interpreter(Run):
    """Runs one script, and notes the value of each loss."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._flow = work.flow
        self._steps = 0

    def run(self) -> None:
        """Run the module, then the functions that nothing in it calls.

        Raises:
            TooLong: it takes too many steps, so that what is noted is incomplete.
        """
        top = Frame(key=self.key("module"), scope=None)
        self.frames[top.key] = top
        self.block(self.tree.module, top)
        for function in self._unreached():
            self._start(function, top)

    def is_rowwise(self, node: cst.CSTNode) -> bool:
        """Return whether an expression only had values with a row for each sample."""
        return self.rowwise.get(id(node), False)

    def _unreached(self) -> Iterator[cst.FunctionDef]:
        """Yield functions to begin with, so that each backward is reached."""
        for widest in (True, False):
            for call in self.job.backwards:
                if id(call) in self.losses:
                    continue
                around = self._callers(call) if widest else []
                scope = self.tree.function(call)
                for function in around or ([scope] if scope is not None else []):
                    if id(call) not in self.losses:
                        yield function

    def _callers(self, call: cst.CSTNode) -> list[cst.FunctionDef]:
        """Return functions that lead to a call and that nothing calls."""
        out: list[cst.FunctionDef] = []
        waiting = [self.tree.function(call)]
        seen: set[int] = set()
        while waiting:
            function = waiting.pop()
            if function is None or id(function) in seen:
                continue
            seen.add(id(function))
            calls = self._flow.calls_of(function)
            if not calls:
                out.append(function)
            waiting += [self.tree.function(c) for c in calls]
        return out

    def _start(self, function: cst.FunctionDef, top: Frame) -> None:
        """Run a function whose caller is not known."""
        owner = self.tree.owner(function)
        receiver: Value | None = None
        if (
            owner is not None
            and self.tree.parent(self.tree.parent(function) or function) is owner
        ):
            made = Class(owner, top.key)
            receiver = new_object(self, made, owner, (), {}, top, strict=False)
        names = parameter_names(function)
        if receiver is not None:
            names = names[1:]
        options: dict[str, Value] = {}
        of = function.params
        defaults = {p.name.value: p.default for p in (*of.params, *of.kwonly_params)}
        for name in names:
            if defaults.get(name) is None:
                options[name] = Constant()
        function_call(
            self, Func(function, top.key, receiver, owner), (), options, function, top
        )

    def block(self, body: cst.CSTNode, frame: Frame) -> bool:
        """Run a block; return whether what follows it is reached."""
        if isinstance(body, cst.SimpleStatementSuite):
            return run_small(self, body.body, frame)
        return all(
            run_statement(self, line, frame) for line in getattr(body, "body", ())
        )

    def value(self, node: cst.CSTNode | None, frame: Frame) -> Value:
        """Return the value of an expression."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise TooLong
        if node in self.work.divided:
            return Count()
        if isinstance(node, cst.Name):
            return self.read(node.value, frame)
        if isinstance(node, cst.Call | cst.BinaryOperation):
            value = (
                evaluate_call(self, node, frame)
                if isinstance(node, cst.Call)
                else operation(self, node, frame)
            )
            rows = isinstance(value, Rows) and value.axis is not None
            self.rowwise[id(node)] = rows and self.rowwise.get(id(node), True)
            return value
        if isinstance(node, cst.Attribute):
            return attribute_of(
                self, self.value(node.value, frame), node.attr.value, node
            )
        if isinstance(node, cst.Subscript):
            return subscript(self, node, frame)
        if isinstance(node, cst.Integer | cst.Float | cst.SimpleString):
            try:
                return Constant(ast.literal_eval(node.value))
            except (ValueError, SyntaxError):
                return Constant()
        if isinstance(node, cst.Tuple):
            return Seq(tuple(element_values(self, node.elements, frame)))
        if isinstance(node, cst.List | cst.Set):
            parts = tuple(element_values(self, node.elements, frame))
            return new_list(self, Seq(parts), node, frame)
        if isinstance(node, cst.Dict):
            return dict_display(self, node, frame)
        if isinstance(node, cst.UnaryOperation):
            return unary_operation(self, node, frame)
        if isinstance(node, cst.Comparison):
            return comparison(self, node, frame)
        if isinstance(node, cst.BooleanOperation):
            return boolean_operation(self, node, frame)
        if isinstance(node, cst.IfExp):
            return conditional(self, node, frame)
        if isinstance(
            node, cst.ListComp | cst.GeneratorExp | cst.SetComp | cst.DictComp
        ):
            return comprehension(self, node, frame)
        if isinstance(node, cst.Lambda):
            return Func(node, frame.key)
        if isinstance(node, cst.NamedExpr):
            value = self.value(node.value, frame)
            bind(self, node.target, value, frame)
            return value
        if isinstance(node, cst.Yield):
            if node.value is not None:
                inner = node.value
                if isinstance(inner, cst.From):
                    frame.yields += items_in(self, self.value(inner.item, frame), node)
                else:
                    frame.yields.append(self.value(inner, frame))
            return Constant()
        if isinstance(node, cst.Await):
            return self.value(node.expression, frame)
        if isinstance(node, cst.FormattedString | cst.ConcatenatedString):
            shown = [
                self.value(part.expression, frame)
                for part in found(node, cst.FormattedStringExpression)
            ]
            return (
                Unproved(Why.COUNTED, node)
                if any(map(has_count, shown))
                else Constant()
            )
        return ELLIPSIS if isinstance(node, cst.Ellipsis) else Constant()

    def call(
        self,
        func: Value,
        args: tuple[Value, ...],
        options: Mapping[str, Value],
        node: cst.CSTNode,
        frame: Frame,
    ) -> Value:
        """Return the value of a call."""
        if isinstance(func, OneOf):
            return joined(
                [self.call(f, args, options, node, frame) for f in func.values], node
            )
        if isinstance(func, Func):
            return function_call(self, func, args, options, node, frame)
        if isinstance(func, Class):
            return new_object(self, func, node, args, options, frame)
        if isinstance(func, ObjectRef) and isinstance(func.kind, cst.ClassDef):
            return object_call(self, func, args, options, node, frame)
        call = as_call(node)
        given = self.given(call, args, options)
        if isinstance(func, BoundMethod):
            return method_call(self, func.of, func.name, args, options, node, frame)
        if isinstance(func, LibraryName):
            return library_call(self, func.name, given, frame)
        if isinstance(func, LibraryResult):
            return made_call(self, func, given, frame)
        if isinstance(func, Unproved):
            return func
        return self.unread(call, given.all)
