"""Write what a number of a script is computed from, to tell whether two are the same.

A loader may have ``CFG["bs"]`` while a step has ``size``, a parameter whose default is
that entry. Both have the same form: the number that the dict was written with.
"""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, final

import libcst as cst

from stretto.convert._bindings import Binding, Bindings
from stretto.convert._flow import parameters
from stretto.convert._tree import OWN, argument, arguments_of, dotted, found, targets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from stretto.convert._edit import Work

Form = tuple[Any, ...]
"""The kind of a value, and the values that it is computed from."""

Forms = frozenset[Form]

LENGTH: Form = ("length",)
"""The number of samples of a rank's batch."""

_OTHER: Form = ("size",)
"""Another number of a tensor or of data."""

SHAPE: Form = ("shape",)
"""The shape of a tensor."""

UNRELATED: Forms = frozenset([LENGTH, _OTHER, SHAPE])
"""Numbers that are no batch size of all ranks."""

_SAME = ("int", "float", "round", "abs", "operator.index")
"""Functions that return a whole number as it is."""

_AS_DICT = ("vars", "dataclasses.asdict")
"""Functions that return an object's attributes as a dict."""

_DRAWING = ("rand", "choice", "sample", "next", "input", "pop", "time", "uuid")
"""Parts of names of functions that return something else in each call."""

_SEVERAL = 16
"""Values of one number beyond which it is not followed."""


@final
class NumberForms:
    """The forms of one script's numbers.

    Args:
        work: The script.
        in_step: Returns whether a node runs in steps.
    """

    def __init__(self, work: Work, in_step: Callable[[cst.CSTNode], bool]) -> None:
        self._work, self._tree, self._flow = work, work.tree, work.flow
        self._in_step = in_step
        self.bindings = Bindings(work.tree, work.flow)
        self._known: dict[int, Forms] = {}
        self._nodes: dict[int, cst.BaseExpression] = {}
        self._stored: list[tuple[cst.Subscript, cst.BaseExpression, bool]] = []
        self._attributes: dict[str, list[tuple[cst.Attribute, Forms | None]]] = {}
        self._values: dict[int, cst.BaseExpression | None] = {}
        self._updates = [c for c in self._tree.calls if self._is_update(c)]
        lines: Iterator[cst.Assign | cst.AnnAssign | cst.AugAssign]
        lines = found(self._tree.module, (cst.Assign, cst.AnnAssign, cst.AugAssign))
        for line in lines:
            changed = isinstance(line, cst.AugAssign)
            for target in targets_of(line):
                if isinstance(target, cst.Subscript) and line.value is not None:
                    self._stored.append((target, line.value, changed))
                elif isinstance(target, cst.Attribute):
                    forms = frozenset([("changed", id(line))]) if changed else None
                    same = self._attributes.setdefault(target.attr.value, [])
                    same.append((target, forms))
                    self._values[id(target)] = line.value

    def of(self, node: cst.BaseExpression) -> Forms:
        """Return the forms that a number may have; none for one that sets itself."""
        if id(node) not in self._known:
            self._known[id(node)] = frozenset()  # while it is computed
            made = self._of(node)
            if len(made) > _SEVERAL:
                made = frozenset([self._opaque(node)])
            self._known[id(node)] = made
        return self._known[id(node)]

    def of_binding(self, made: Binding, path: str) -> Forms:
        """Return the forms that a variable has after one place that sets it."""
        if made.parameter is not None:
            return self._passed(made)
        if made.node is None:
            return frozenset([("path", path)])
        if made.value is None:
            return frozenset([("bound", id(made.node), path)])
        if made.changed:
            target = getattr(made.node, "target", None)
            before = self.of(target) if target is not None else frozenset()
            if before and before <= {LENGTH, _OTHER}:
                return before
            return frozenset([("changed", id(made.node), *_sorted(before))])
        if isinstance(made.value, cst.Integer):
            # The script may set the same variable to the same number twice.
            return frozenset([("int", (id(made.scope), path), _integer(made.value))])
        place = _place_in_target(made, path)
        given = self.of(made.value)
        return given if place is None else self._parts(given, place)

    def of_argument(self, call: cst.Call, place: int, name: str) -> Forms:
        """Return the forms of an argument, which ``**`` of a dict may give."""
        value = argument(call, place, name)
        if value is not None:
            return self.of(value)
        out: set[Form] = set()
        for given in call.args:
            if given.star == "**":
                out |= self._items(self.of(given.value), repr(name))
        return frozenset(out)

    def node_of(self, form: Form) -> cst.BaseExpression | None:
        """Return the expression that a form stands for, if it is one."""
        return self._nodes.get(form[1]) if form[0] == "node" else None

    def _opaque(self, node: cst.BaseExpression) -> Form:
        self._nodes[id(node)] = node
        return "node", id(node)

    def _of(self, node: cst.BaseExpression) -> Forms:
        if isinstance(node, cst.Integer):
            return frozenset([("int", id(node), _integer(node))])
        if isinstance(node, cst.Name):
            return self._of_name(node)
        if isinstance(node, cst.Attribute):
            return self._of_attribute(node)
        if isinstance(node, cst.Subscript):
            return self._of_subscript(node)
        if isinstance(node, cst.IfExp):
            return self.of(node.body) | self.of(node.orelse)
        if isinstance(node, cst.NamedExpr):
            return self.of(node.value)
        if isinstance(node, cst.BooleanOperation):
            return self.of(node.left) | self.of(node.right)
        if isinstance(node, cst.BinaryOperation):
            return self._computed(node, node.operator, [node.left, node.right])
        if isinstance(node, cst.UnaryOperation):
            return self._computed(node, node.operator, [node.expression])
        if isinstance(node, cst.Call):
            return self._of_call(node)
        return frozenset([self._opaque(node)])

    def _computed(
        self,
        node: cst.BaseExpression,
        how: cst.CSTNode | str,
        given: list[cst.BaseExpression],
    ) -> Forms:
        name = how if isinstance(how, str) else type(how).__name__
        parts = [_sorted(self._written(x)) for x in given]
        count = 1
        for part in parts:
            count *= len(part)
        if not 0 < count <= _SEVERAL:
            return frozenset([self._opaque(node)])
        return frozenset(("op", name, *each) for each in product(*parts))

    def _written(self, node: cst.BaseExpression) -> Forms:
        """Return the forms of a part of an expression, in which numbers are written."""
        if isinstance(node, cst.Integer):
            return frozenset([("constant", _integer(node))])
        return self.of(node)

    # Names and attributes

    def _of_name(self, node: cst.Name) -> Forms:
        scope = self._tree.function(node)
        owner = self._tree.owner(scope)
        if owner is not None and node.value == "self":
            kinds = sorted(id(kind) for kind in self._tree.family(owner))
            return frozenset([("self", kinds[0])])
        keywords = scope.params.star_kwarg if scope is not None else None
        if keywords is not None and keywords.name.value == node.value:
            return frozenset([("keywords", id(scope))])
        out: set[Form] = set()
        for made in self.bindings.reaching(node):
            out |= self.of_binding(made, node.value)
        return frozenset(out)

    def _of_attribute(self, node: cst.Attribute) -> Forms:
        if node.attr.value == "shape":
            return frozenset([SHAPE])
        path = dotted(node)
        out: set[Form] = set()
        reached = self.bindings.reaching(node)
        for made in reached:
            if path is not None and (made.node is not None or made.parameter):
                out |= self.of_binding(made, path)
        if out and all(made.node is not None for made in reached):
            return frozenset(out)
        bases = self.of(node.value)
        if node.attr.value == "__dict__":
            return frozenset(("vars", base) for base in bases)
        for base in bases:
            out |= self._attribute(base, node.attr.value, path)
        return frozenset(out)

    def _attribute(self, base: Form, name: str, path: str | None = None) -> Forms:
        """Return an attribute of an object, which other lines may set too.

        Args:
            base: The object.
            name: The attribute's name.
            path: How a line reads it, whose assignments are known already.
        """
        out: Forms = self._of_object(base, name)
        for target, changed in self._attributes.get(name, ()):
            value = self._values[id(target)]
            if (
                dotted(target) != path
                and dotted(target.value) != "self"
                and base in self.of(target.value)
                and value is not None
            ):
                out |= self.of(value) if changed is None else changed
        return out or frozenset([("attribute", base, name)])

    def _of_object(self, base: Form, name: str) -> Forms:
        """Return what an attribute of an object of one of the script's classes is."""
        made = self.node_of(base)
        kind = self._class_of(base)
        if kind is None:
            return self._of_keyword(made, name)
        calls = [made] if isinstance(made, cst.Call) else []
        if base[0] == "self":
            names = {k.name.value for k in self._tree.family(kind)}
            calls = [c for c in self._tree.calls if dotted(c.func) in names]
        out: set[Form] = set()
        for origin in self._flow.of_class(kind, f"self.{name}"):
            out |= self.of(origin.value)
        fields, default = self._fields(kind, name)
        given = [self._given_field(c, fields, name) for c in calls]
        for value in given:
            out |= self.of(value) if value is not None else frozenset()
        if default is not None and (None in given or not given):
            out |= self.of(default)
        return frozenset(out)

    def _class_of(self, base: Form) -> cst.ClassDef | None:
        made = self.node_of(base)
        if isinstance(made, cst.Call):
            return self._tree.classes.get(dotted(made.func) or "")
        if base[0] not in ("self", "bound"):
            return None
        kinds = self._tree.classes.values()
        return next((kind for kind in kinds if id(kind) == base[1]), None)

    def _fields(
        self, kind: cst.ClassDef, name: str
    ) -> tuple[list[str], cst.BaseExpression | None]:
        """Return the fields that a class declares, and the value of one of them."""
        fields: list[str] = []
        default: cst.BaseExpression | None = None
        for other in self._tree.family(kind):
            lines: Iterator[cst.Assign | cst.AnnAssign]
            lines = found(other.body, (cst.Assign, cst.AnnAssign))
            for line in lines:
                if self._tree.parent(self._tree.statement(line)) is not other.body:
                    continue
                names = [dotted(target) or "" for target in targets_of(line)]
                fields += names if isinstance(line, cst.AnnAssign) else []
                if name in names and default is None:
                    default = line.value
        return fields, default

    def _given_field(
        self, call: cst.Call, fields: list[str], name: str
    ) -> cst.BaseExpression | None:
        """Return what the call of a data class gives for a field."""
        return argument(call, fields.index(name) if name in fields else -1, name)

    def _of_keyword(self, made: cst.BaseExpression | None, name: str) -> Forms:
        """Return an attribute of what keywords make, as ``SimpleNamespace(bs=8)``."""
        if not isinstance(made, cst.Call):
            return frozenset()
        called = self._tree.called(made)
        kept = called.rpartition(".")[2] in _KEEPING_KEYWORDS
        if not kept or called.startswith(OWN):
            return frozenset()
        return self.of_argument(made, -1, name)

    def _passed(self, made: Binding) -> Forms:
        """Return what the calls of a function pass for a parameter."""
        function, given = made.node, self.given(made)
        unknown = frozenset([("parameter", id(function), made.parameter)])
        if not given:
            return unknown
        here: set[Form] = set()
        for node in given:
            if self._in_step(node):
                here |= self._written(node)
        if here and here <= {LENGTH, _OTHER}:
            return frozenset(here)  # other calls do not meet this rank's tensors
        return frozenset().union(*[self._written(node) for node in given])

    def given(self, made: Binding) -> list[cst.BaseExpression] | None:
        """Return what calls pass for a parameter; ``None`` if one does not say it."""
        function, name = made.node, made.parameter
        if not isinstance(function, cst.FunctionDef | cst.Lambda) or name is None:
            return None
        params = found(function.params, cst.Param)
        default = next((p.default for p in params if p.name.value == name), None)
        names = parameters(function)
        is_method = isinstance(function, cst.FunctionDef) and self._tree.owner(function)
        if names and names[0] in ("self", "cls") and is_method:
            names = names[1:]
        place = names.index(name) if name in names else -1
        out = []
        for call in self._calls(function):
            value = argument(call, place, name)
            if value is None and not any(a.star for a in call.args):
                value = default
            if value is None:
                return None
            out.append(value)
        return out

    def _calls(self, function: cst.FunctionDef | cst.Lambda) -> list[cst.Call]:
        if isinstance(function, cst.Lambda):
            return self._calls_of_lambdas.get(id(function), [])
        owner = self._tree.owner(function)
        calls = self._flow.calls_of(function)
        if owner is None or function.name.value != "forward":
            return calls
        kinds = {kind.name.value for kind in self._tree.family(owner)}
        return calls + [c for c in self._tree.calls if self._runs(c, kinds)]

    @cached_property
    def _calls_of_lambdas(self) -> dict[int, list[cst.Call]]:
        """The calls of lambdas that a name or an attribute has, by the lambda."""
        out: dict[int, list[cst.Call]] = {}
        if any(True for _ in found(self._tree.module, cst.Lambda)):
            for call in self._tree.calls:
                scope = self._tree.function(call)
                for origin in self._flow.origins(call.func, scope):
                    if isinstance(origin.value, cst.Lambda):
                        out.setdefault(id(origin.value), []).append(call)
        return out

    def _runs(self, call: cst.Call, kinds: set[str]) -> bool:
        """Return whether a call runs a module of one of the script's classes."""
        if dotted(call.func) is None:
            return False
        for origin in self._flow.origins(call.func, self._tree.function(call)):
            made = origin.value
            while isinstance(made, cst.Call) and isinstance(made.func, cst.Attribute):
                made = made.func.value  # Net().to(device)
            if isinstance(made, cst.Call) and dotted(made.func) in kinds:
                return True
        return False

    # Entries

    def _of_subscript(self, node: cst.Subscript) -> Forms:
        base = self.of(node.value)
        if base and base <= UNRELATED:
            return self._of_shape(base, node)
        key = _key(node)
        if key is not None:
            return self._items(base, key)
        out: set[Form] = set()
        for form in base:
            made = self.node_of(form)
            if not isinstance(made, cst.Dict):
                return frozenset([self._opaque(node)])
            for element in made.elements:
                out |= self.of(element.value)
        return frozenset(out)

    def _of_shape(self, base: Forms, node: cst.Subscript) -> Forms:
        first = base == {SHAPE} and _key(node) == "0"
        return frozenset([self._length(node) if first else _OTHER])

    def _length(self, node: cst.BaseExpression) -> Form:
        return LENGTH if self._in_step(node) else _OTHER

    def _parts(self, given: Forms, place: int) -> Forms:
        """Return one of several values that are unpacked."""
        out: set[Form] = set()
        for form in given:
            made = self.node_of(form)
            if form == SHAPE:
                out.add(LENGTH if place == 0 else _OTHER)
            elif form in (LENGTH, _OTHER):
                out.add(form)
            elif isinstance(made, cst.Tuple | cst.List) and place < len(made.elements):
                out |= self.of(made.elements[place].value)
            else:
                out.add(("part", form, place))
        return frozenset(out)

    def _items(self, bases: Forms, key: str, default: Forms = frozenset()) -> Forms:
        out: set[Form] = set()
        for base in bases:
            if base[0] == "vars":
                out |= self._attribute(base[1], key.strip("'\""))
                continue
            if base[:2] == ("op", "BitOr"):
                for part in reversed(base[2:]):
                    out = set(self._items(frozenset([part]), key))
                    if out and ("item", part, key) not in out:
                        break
                continue
            made = self.node_of(base)
            inside = self._entry(made, key) if made is not None else None
            if base[0] == "keywords":
                inside = self._keyword(base, key.strip("'\""))
            stored = self._stored_items(base, key)
            if inside:
                out |= inside
            elif not stored and inside is not None:
                out |= default
            elif not stored:
                out.add(("item", base, key))
            out |= stored
        return frozenset(out)

    def _entry(self, made: cst.BaseExpression, key: str) -> Forms | None:
        """Return an entry of what makes a dict or a list; ``None`` if it is neither."""
        if isinstance(made, cst.List | cst.Tuple):
            plain = not any(isinstance(e, cst.StarredElement) for e in made.elements)
            if key.isdecimal() and plain and int(key) < len(made.elements):
                return self.of(made.elements[int(key)].value)
            return None
        if isinstance(made, cst.Dict):
            for element in reversed(made.elements):
                if isinstance(element, cst.StarredDictElement):
                    inner = self._items(self.of(element.value), key)
                    if inner:
                        return inner
                elif isinstance(element, cst.DictElement) and _text(element.key) == key:
                    return self.of(element.value)
            return frozenset()
        if isinstance(made, cst.Call) and self._tree.called(made) == "dict":
            _, named = arguments_of(made)
            for name, given in named.items():
                if repr(name) == key:
                    return self.of(given.value)
            out: set[Form] = set()
            for given in made.args:
                if given.keyword is None:
                    out |= self._items(self.of(given.value), key)
            return frozenset(out)
        return None

    def _keyword(self, base: Form, name: str) -> Forms:
        """Return what the calls of a function give under a name that ``**`` takes."""
        functions = (f for f in self._tree.functions if id(f) == base[1])
        calls = [call for f in functions for call in self._calls(f)]
        return frozenset().union(*[self.of_argument(c, -1, name) for c in calls])

    def _stored_items(self, base: Form, key: str) -> Forms:
        """Return what other lines store under a key of an object."""
        out: set[Form] = set()
        for target, value, changed in self._stored:
            if _key(target) == key and base in self.of(target.value):
                out |= {("changed", id(target))} if changed else self.of(value)
        for call in self._updates:
            on = self._tree.method_called(call, "update")
            if on is None or base not in self.of(on):
                continue
            out |= self.of_argument(call, -1, key.strip("'\""))
            for given in call.args:
                if given.keyword is None and not given.star:
                    out |= self._items(self.of(given.value), key)
        return frozenset(out)

    def _is_update(self, call: cst.Call) -> bool:
        on = self._tree.method_called(call, "update")
        return on is not None and dotted(on) is not None

    # Calls

    def _of_call(self, node: cst.Call) -> Forms:
        called = self._tree.called(node)
        given = [a.value for a in node.args]
        if called in _SAME and len(given) == 1:
            return self.of(given[0])
        if called == "len" and len(given) == 1:
            return frozenset([self._of_len(node, given[0])])
        if called == "min" and any(self.of(x) == {LENGTH} for x in given):
            return frozenset([LENGTH])  # a rank's batch is shorter than all ranks'
        if called in ("min", "max"):
            return self._computed(node, called, given)
        if called in _AS_DICT and len(given) == 1:
            return frozenset(("vars", form) for form in self.of(given[0]))
        if self._tree.method_called(node, "size") is not None:
            dim = argument(node, 0, "dim")
            if dim is None:
                return frozenset([SHAPE])
            first = isinstance(dim, cst.Integer) and dim.value == "0"
            return frozenset([self._length(node) if first else _OTHER])
        if self._tree.method_called(node, "numel", "nelement") is not None:
            return frozenset([self._length(node)])
        if self._tree.method_called(node, "dim", "ndimension", "item") is not None:
            return frozenset([_OTHER])
        on = self._tree.method_called(node, "get")
        if on is not None and given and (key := _text(given[0])) is not None:
            default = self.of(given[1]) if len(given) > 1 else frozenset()
            return self._items(self.of(on), key, default)
        functions = self._flow.local(node)
        if functions:
            returned = [v for f in functions for v in self._flow.returned(f)]
            return frozenset().union(*[self.of(value) for value in returned])
        return self._of_other_call(node, called)

    def _of_len(self, node: cst.Call, of: cst.BaseExpression) -> Form:
        text = (dotted(of) or "").lower()
        if "loader" in text or "dataset" in text or self._is_made_before(of):
            return _OTHER
        return _OTHER if self.of(of) == {SHAPE} else self._length(node)

    def _is_made_before(self, node: cst.BaseExpression) -> bool:
        """Return whether lines outside of the steps make what a variable holds."""
        if not isinstance(node, cst.Name | cst.Attribute):
            return False
        reaching = self.bindings.reaching(node)
        return all(
            made.node is not None
            and made.value is not None
            and not self._in_step(made.node)
            for made in reaching
        )

    def _of_other_call(self, node: cst.Call, called: str) -> Forms:
        """Return the form of a call of another file's function, by its text."""
        last = called.rpartition(".")[2]
        opaque = frozenset([self._opaque(node)])
        if (
            not called
            or called in ("dict", "list", "tuple")
            or self._tree.own_class(node) is not None
            or last in _KEEPING_KEYWORDS
            or any(part in last.lower() for part in _DRAWING)
            or any(a.star for a in node.args)
        ):
            return opaque
        parts = [self._written(a.value) for a in node.args]
        if any(len(part) != 1 for part in parts):
            return opaque
        names = [a.keyword.value if a.keyword is not None else "" for a in node.args]
        each = zip(names, (next(iter(part)) for part in parts), strict=True)
        return frozenset([("call", called, *each)])


_KEEPING_KEYWORDS = ("SimpleNamespace", "Namespace", "EasyDict", "edict", "Munch")
"""Functions whose keywords become attributes of what they return."""


def _integer(node: cst.Integer) -> int:
    return int(node.value, 0) if node.value.isdecimal() else -1


def _sorted(forms: Collection[Form]) -> list[Form]:
    return sorted(forms, key=repr)


def _text(node: cst.BaseExpression) -> str | None:
    """Return a constant key as Python writes it, or ``None``."""
    if isinstance(node, cst.SimpleString | cst.ConcatenatedString):
        return repr(node.evaluated_value)
    return node.value if isinstance(node, cst.Integer) else None


def _key(node: cst.Subscript) -> str | None:
    if len(node.slice) != 1 or not isinstance(node.slice[0].slice, cst.Index):
        return None
    return _text(node.slice[0].slice.value)


def _place_in_target(made: Binding, path: str) -> int | None:
    """Return the place of a variable among those that one value is unpacked into."""
    for target in targets_of(made.node) if made.node is not None else ():
        if not isinstance(target, cst.Tuple | cst.List):
            continue
        if isinstance(getattr(made.node, "value", None), cst.Tuple | cst.List):
            continue
        paths = [dotted(e.value) for e in target.elements]
        if path in paths:
            return paths.index(path)
    return None


def roots(form: Form) -> Iterator[Form]:
    """Yield what a number is computed from."""
    kind = form[0]
    if kind == "op":
        for part in form[2:]:
            yield from roots(part)
    elif kind == "constant":
        return
    elif kind == "call":
        yield form
        for _, part in form[2:]:
            yield from roots(part)
    elif kind == "changed":
        for part in form[2:]:
            yield from roots(part)
        yield form
    else:
        yield form


def number(form: Form) -> int | None:
    """Return the number that a form certainly is, if it is written in the script."""
    if form[0] in ("int", "constant"):
        return int(form[-1])
    if form[0] != "op":
        return None
    parts = [number(part) for part in form[2:]]
    if any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    if form[1] == "Multiply":
        return known[0] * known[1]
    if form[1] == "Add":
        return known[0] + known[1]
    if form[1] == "FloorDivide" and known[1]:
        return known[0] // known[1]
    return None
