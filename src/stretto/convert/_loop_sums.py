"""Find a loop's sums, and whether its results are nothing but sums of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._tree import Scope, dotted, found, targets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stretto.convert._batch_loops import BatchLoop
    from stretto.convert._edit import Work
    from stretto.convert._models import Models


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """``name += value`` in a loop."""

    name: str
    """A variable, an attribute or an element, as ``element_of`` names it."""
    value: cst.BaseExpression
    statement: cst.CSTNode
    whole: cst.BaseExpression | None = None
    """The sum that is assigned, where it is written as ``a = a + x``."""
    text: str = ""
    """The name as the script writes it."""
    index: cst.Subscript | None = None
    """The element of an array that is added to, where the name is the array's."""

    @property
    def part(self) -> cst.CSTNode:
        """Return the statement, or what of it is assigned to this name."""
        alone = self.whole is None or getattr(self.statement, "value", 0) is self.whole
        return self.statement if alone or self.whole is None else self.whole


def added_in(body: cst.CSTNode) -> list[Added]:
    """Return what is added to a name in some code, in each form of a sum.

    These are ``a += x``, ``a = a + x``, ``a = x + a``, ``a: float = a + x``,
    ``a = torch.add(a, x)``, ``a = a.add(x)`` and ``a, b = a + x, b + y``. Of several
    terms, each is returned.
    """
    return _added(body, dotted)


def elements_added_in(body: cst.CSTNode) -> list[Added]:
    """Return what is added to the elements of variables: ``a["loss"] += x``."""
    return _added(body, element_of)


def _added(
    body: cst.CSTNode, named: Callable[[cst.CSTNode], str | None]
) -> list[Added]:
    out = []
    for line in found(body, cst.AugAssign):
        name = named(line.target)
        if name is not None and isinstance(line.operator, cst.AddAssign):
            text = _text(line.target)
            out.append(Added(name=name, value=line.value, statement=line, text=text))
    plain: Iterator[cst.Assign | cst.AnnAssign]
    plain = found(body, (cst.Assign, cst.AnnAssign))
    for assign in plain:
        targets = targets_of(assign)
        if assign.value is None or len(targets) != 1:
            continue
        for target, value in _pairs(targets[0], assign.value):
            name = named(target)
            terms = _terms(value)
            rest = [term for term in terms if name not in (named(term), _got(term))]
            if name is None or not rest or len(rest) != len(terms) - 1:
                continue
            out += [
                Added(
                    name=name,
                    value=term,
                    statement=assign,
                    whole=value,
                    text=_text(target),
                )
                for term in rest
            ]
    return out


def _text(node: cst.BaseExpression) -> str:
    return cst.Module([]).code_for_node(node)


def element_of(node: cst.CSTNode) -> str | None:
    """Return the text of a variable's element whose key is written, else ``None``."""
    if not isinstance(node, cst.Subscript) or len(node.slice) != 1:
        return None
    index, base = node.slice[0].slice, node.value
    if not isinstance(index, cst.Index) or not isinstance(base, cst.Name):
        return None
    key = index.value
    if isinstance(key, cst.SimpleString | cst.Integer):
        return f"{base.value}[{key.evaluated_value!r}]"
    return None


def _got(node: cst.CSTNode) -> str | None:
    """Return the text of the element that ``a.get("loss", 0)`` reads."""
    if (
        not isinstance(node, cst.Call)
        or not isinstance(node.func, cst.Attribute)
        or node.func.attr.value != "get"
        or not isinstance(node.func.value, cst.Name)
        or len(node.args) != 2
        or not is_zero(node.args[1].value)
    ):
        return None
    key = node.args[0].value
    if isinstance(key, cst.SimpleString | cst.Integer):
        return f"{node.func.value.value}[{key.evaluated_value!r}]"
    return None


def base_of(name: str) -> str:
    """Return the variable of an element, or the name itself."""
    return name.partition("[")[0]


def _is_collection(node: cst.CSTNode) -> bool:
    """Return whether an expression is written as a list, a text or the like."""
    return isinstance(
        node, cst.List | cst.Tuple | cst.Set | cst.Dict | cst.BaseComp | cst.BaseString
    )


def _pairs(
    target: cst.BaseExpression, value: cst.BaseExpression
) -> list[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Return the targets of an assignment, each with its value."""
    both = cst.Tuple | cst.List
    if not isinstance(target, both) or not isinstance(value, both):
        return [(target, value)]
    if len(target.elements) != len(value.elements):
        return []
    return [
        (part.value, made.value)
        for part, made in zip(target.elements, value.elements, strict=True)
    ]


def _terms(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return the terms of a sum."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):
        return [*_terms(node.left), *_terms(node.right)]
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        given = [a.value for a in node.args if a.keyword is None and not a.star]
        if node.func.attr.value == "add" and len(given) == len(node.args):
            of_torch = dotted(node.func.value) == "torch"
            terms = given if of_torch else [node.func.value, *given]
            if len(terms) == 2:
                return [part for term in terms for part in _terms(term)]
    return [node]


def is_zero(node: cst.BaseExpression) -> bool:
    """Return whether an expression is the number 0, as written."""
    return isinstance(node, cst.Integer | cst.Float) and node.evaluated_value == 0


_STORING = frozenset(
    {"append", "appendleft", "extend", "insert", "setdefault", "update", "write"}
    | {"writelines", "writerow", "writerows"}
)
"""Methods that keep what they get, also where their result is used."""


@final
class LoopSums:
    """Sums of loops: for `_numbers`, which reduces them over ranks."""

    def __init__(self, work: Work, models: Models) -> None:
        self._work, self._tree, self._models = work, work.tree, models

    def is_sum(self, added: Added, scope: Scope) -> bool:
        """Return whether what is added is a sum; to a list or a text, ``+=`` appends.

        To an array of zeros, a list is added element by element.
        """
        base = base_of(added.name)
        begun = [o.value for o in self._work.flow.assigned(base, scope)]
        begun = [value for value in begun if value is not added.whole]
        if _is_collection(added.value):
            return bool(begun) and all(self._is_array(value) for value in begun)
        if base != added.name:
            return True
        return not any(
            _is_collection(value)
            or (
                isinstance(value, cst.Call)
                and self._tree.called(value) in ("list", "str", "collections.deque")
            )
            for value in begun
        )

    def _is_array(self, value: cst.BaseExpression) -> bool:
        called = self._tree.called(value) if isinstance(value, cst.Call) else ""
        return called.startswith(("numpy.", "torch.")) and called.rpartition(".")[
            2
        ] in ("zeros", "zeros_like")

    def parts_added_in(self, loop: BatchLoop) -> list[Added]:
        """Return what a loop adds to elements: ``a["loss"] += x``, ``a[i, j] += 1``.

        An array that begins with zeros is one sum, whatever its index.
        """
        out = [
            added
            for added in elements_added_in(loop.node.body)
            if not self._begins_as_array(base_of(added.name), loop.scope)
        ]
        for line in found(loop.node.body, cst.AugAssign):
            target = line.target
            if not isinstance(target, cst.Subscript) or not isinstance(
                target.value, cst.Name
            ):
                continue
            base = target.value.value
            if isinstance(line.operator, cst.AddAssign) and self._begins_as_array(
                base, loop.scope
            ):
                out.append(
                    Added(
                        name=base,
                        value=line.value,
                        statement=line,
                        text=base,
                        index=target,
                    )
                )
        return out

    def _begins_as_array(self, name: str, scope: Scope) -> bool:
        begun = self._work.flow.assigned(name, scope)
        return bool(begun) and all(self._is_array(o.value) for o in begun)

    def only_added(self, added: Added, loop: BatchLoop) -> bool:
        """Return whether a name is set before a loop and only added to in it."""
        base = base_of(added.name)
        if not base.isidentifier():
            return False
        of_element = base != added.name
        reads = 0
        for name in found(loop.node, cst.Name):
            if name.value != base:
                continue
            target: cst.CSTNode | None = name
            if of_element:
                target = self._tree.parent(name)
                if target is None or element_of(target) is None:
                    return False
                if element_of(target) != added.name:
                    continue
            above = self._tree.parent(name)
            if added.index is not None and isinstance(above, cst.Subscript):
                target = above
            parent = self._tree.parent(target) if target is not None else None
            reads += not (isinstance(parent, cst.AugAssign) and parent.target is target)
        plain = {
            id(other.statement)
            for other in (
                *added_in(loop.node.body),
                *elements_added_in(loop.node.body),
            )
            if other.name == added.name
            and not isinstance(other.statement, cst.AugAssign)
        }
        if reads > 2 * len(plain):
            return False
        block = self._tree.block(loop.node)
        begun = [
            o
            for o in self._work.flow.assigned(base, loop.scope)
            if self._tree.line(o.statement) < self._tree.line(loop.node)
        ]
        return any(self._tree.parent(o.statement) is block for o in begun) or any(
            self._tree.within(loop.node, self._tree.block(o.statement))
            and self._same_pass(o.statement, loop.node)
            for o in begun
        )

    def begins_at_zero(self, added: Added, loop: BatchLoop) -> bool:
        """Return whether a sum certainly is 0 where a loop begins.

        Otherwise the sum over ranks of its end would count its beginning on each.
        """
        line = self._tree.line
        base = base_of(added.name)
        before = [
            o
            for o in self._work.flow.assigned(base, loop.scope)
            if line(o.statement) < line(loop.node)
        ]
        block = self._tree.block(loop.node)
        more = any(
            line(other.statement) < line(loop.node)
            and (not before or line(other.statement) > line(before[-1].statement))
            for other in (*added_in(block), *elements_added_in(block))
            if other.name == added.name
        )
        if not before or more:
            return False
        begin = before[-1].value
        if base == added.name:
            return self._is_zero(begin)
        return self._element_is_zero(begin, added.name.removeprefix(base)[1:-1])

    def _element_is_zero(self, begin: cst.BaseExpression, key: str) -> bool:
        """Return whether an element of what a variable is set to is 0."""
        values: list[cst.BaseExpression] = []
        if isinstance(begin, cst.Dict):
            values = [
                element.value
                for element in begin.elements
                if isinstance(element, cst.DictElement)
                and isinstance(element.key, cst.SimpleString | cst.Integer)
                and repr(element.key.evaluated_value) == key
            ]
        elif isinstance(begin, cst.List) and key.isdigit():
            values = [e.value for e in begin.elements][int(key) : int(key) + 1]
        elif isinstance(begin, cst.BinaryOperation):
            values = [e.value for e in getattr(begin.left, "elements", ())]
            times = isinstance(begin.operator, cst.Multiply)
            return times and bool(values) and all(self._is_zero(v) for v in values)
        elif isinstance(begin, cst.Call):
            called = self._tree.called(begin)
            if called == "dict":
                values = [
                    a.value
                    for a in begin.args
                    if a.keyword is not None and repr(a.keyword.value) == key
                ]
            elif called == "collections.defaultdict":
                made = [self._tree.text(a.value) for a in begin.args]
                return made in (["float"], ["int"], ["lambda: 0"], ["lambda: 0.0"])
            else:
                return called == "collections.Counter" and not begin.args
        return len(values) == 1 and self._is_zero(values[0])

    def _is_zero(self, value: cst.BaseExpression) -> bool:
        if isinstance(value, cst.Call):
            called = self._tree.called(value)
            if called.rpartition(".")[2] in ("zeros", "zeros_like"):
                return True
            given = [a.value for a in value.args if a.keyword is None]
            names = ("float", "int", "torch.tensor")
            return called in names and (not given or self._is_zero(given[0]))
        return is_zero(value)

    def why_not_summable(self, node: cst.For) -> str | None:
        """Return why a loop's results are more than sums of numbers, or ``None``."""
        scope = self._tree.function(node)
        added = added_in(node.body)
        names = {a.name for a in added}
        if not added:
            return "nothing is added up in it"
        loop = self._work.job.batches.loop(node)
        if loop is None or not all(
            self._tree.within(source, node.iter) for source, _ in loop.loaders
        ):
            return "its loader is named outside the loop"
        for a in added:
            if not self.is_number(a.value, node):
                return f"`{a.name}` may be a tensor or a list"
            made = Added(name=a.name, value=a.value, statement=a.statement)
            if not self.only_added(made, loop):
                return f"`{a.name}` is read in the loop, or not set before it"
            if not self.begins_at_zero(made, loop):
                return f"`{a.name}` may not be 0 before it"
        if self._tree.called(node.iter) == "enumerate" and isinstance(
            node.target, cst.Tuple
        ):
            index = dotted(node.target.elements[0].value)
            if any(n.value == index for n in found(node.body, cst.Name)):
                return f"it uses the number `{index}` of each batch"
        after = self._read_after(node, scope)
        for line in found(node.body, (cst.Assign, cst.AnnAssign)):
            for target in targets_of(line):
                for name in found(target, cst.Name):
                    if name.value in after - names:
                        return f"`{name.value}` is read after the loop"
                if not isinstance(target, cst.Name | cst.Tuple):
                    return "it sets more than its own variables"
        for change in found(node.body, cst.AugAssign):
            path = dotted(change.target)
            if path in names and isinstance(change.operator, cst.AddAssign):
                continue
            if path in after or not self._is_made_in(change.target, node):
                return f"`{self._tree.text(change)[:40]}` changes more than a sum"
        for walrus in found(node.body, cst.NamedExpr):
            if dotted(walrus.target) in after:
                return f"`{dotted(walrus.target)}` is read after the loop"
        for call in found(node.body, cst.Call):
            if (why := self._hidden(call)) is not None:
                return why
        if any(True for _ in found(node.body, cst.Return)):
            return "it returns from within"
        if any(True for _ in found(node.body, cst.Break)):
            return "it may end early"
        return None

    def _is_made_in(self, target: cst.BaseExpression, node: cst.For) -> bool:
        """Return whether a name is set in each pass of a loop, so is nothing of it."""
        return isinstance(target, cst.Name) and any(
            self._tree.within(o.statement, node.body)
            and not isinstance(o.statement, cst.AugAssign)
            for o in self._work.flow.assigned(target.value, self._tree.function(node))
        )

    def _same_pass(self, statement: cst.CSTNode, loop: cst.CSTNode) -> bool:
        """Return whether each pass of a loop begins by resetting a target."""
        return self._tree.loops(statement)[:1] == self._tree.loops(loop)[:1]

    def _hidden(self, call: cst.Call) -> str | None:
        """Return why a call in an evaluation may do more than return a value."""
        function = next(
            (f for f in self._tree.functions if f.name.value == dotted(call.func)), None
        )
        scope = self._tree.function(call)
        passes = any(self._models.is_model(a.value, scope) for a in call.args)
        if function is not None and (
            passes
            or any(
                self._models.is_model(c.func, function)
                for c in found(function.body, cst.Call)
            )
        ):
            return f"`{function.name.value}` calls the model"
        if (
            isinstance(call.func, cst.Attribute)
            and dotted(call.func.value) == "self"
            and not self._models.is_model(call.func, scope)
            and not self._work.flow.assigned(f"self.{call.func.attr.value}", scope)
        ):
            return f"`{dotted(call.func)}` may store something"
        in_line = isinstance(self._tree.parent(call), cst.Expr)
        prints = self._tree.called(call) == "print" and not any(
            a.keyword is not None and a.keyword.value == "file" for a in call.args
        )
        last = self._tree.called(call).rpartition(".")[2]
        if (in_line and not prints) or last in _STORING:
            return f"`{self._tree.text(call)[:40]}` stores something"
        return None

    def is_number(self, value: cst.BaseExpression, node: cst.For | cst.While) -> bool:
        """Return whether an expression certainly is a plain number."""
        if isinstance(value, cst.Integer | cst.Float):
            return True
        if isinstance(value, cst.BinaryOperation):
            return self.is_number(value.left, node) and self.is_number(
                value.right, node
            )
        if isinstance(value, cst.Call):
            method = (
                value.func.attr.value if isinstance(value.func, cst.Attribute) else ""
            )
            return (
                method == "item"
                or (method == "size" and bool(value.args))
                or (self._tree.called(value) in ("len", "float", "int"))
            )
        if isinstance(value, cst.Subscript):
            base = value.value
            return isinstance(base, cst.Attribute) and base.attr.value == "shape"
        if (path := dotted(value)) is not None:
            made = [
                o
                for o in self._work.flow.assigned(path, self._tree.function(node))
                if self._tree.within(o.statement, node.body) and o.place is None
            ]
            return len(made) == 1 and self.is_number(made[0].value, node)
        return False

    def _read_after(self, node: cst.For, scope: Scope) -> set[str]:
        where: cst.CSTNode = self._tree.module if scope is None else scope.body
        last = max(self._tree.line(n) for n in found(node, cst.Name))
        inside = {id(n) for n in found(node, cst.Name)}
        return {
            n.value
            for n in found(where, cst.Name)
            if id(n) not in inside
            and self._tree.line(n) > last
            and not self._assigned_by(n)
        }

    def _assigned_by(self, name: cst.Name) -> bool:
        parent = self._tree.parent(name)
        return isinstance(parent, cst.AssignTarget)
