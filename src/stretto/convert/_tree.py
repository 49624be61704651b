"""A script's syntax tree, with the queries that the conversion needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, final

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

Node = TypeVar("Node", bound=cst.CSTNode)

Kinds = type[Node] | tuple[type[Node], ...]

Scope = cst.FunctionDef | None
"""The function that contains some code; ``None`` is the module."""

OWN = "__main__."
"""Begins the full name of a class or function that the script defines."""

_NO_GRAD = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad")


def dotted(node: cst.CSTNode | None) -> str | None:
    """Return ``a.b.c`` for a name with attributes, else ``None``."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr.value}"
    return None


def arguments_of(call: cst.Call) -> tuple[list[cst.BaseExpression], dict[str, cst.Arg]]:
    """Return positional values and keyword arguments, without starred ones."""
    positional = [a.value for a in call.args if a.keyword is None and a.star == ""]
    named = {a.keyword.value: a for a in call.args if a.keyword is not None}
    return positional, named


def argument(call: cst.Call, place: int, name: str) -> cst.BaseExpression | None:
    """Return the value of one argument, given by position or by name."""
    positional, named = arguments_of(call)
    if name in named:
        return named[name].value
    return positional[place] if 0 <= place < len(positional) else None


_CHILDREN: dict[cst.CSTNode, tuple[cst.CSTNode, ...]] = {}
"""The children of the latest tree's nodes, cached because listing them is slow."""


def children(node: cst.CSTNode) -> tuple[cst.CSTNode, ...]:
    """Return the nodes just below a node of the latest tree."""
    known = _CHILDREN.get(node)
    if known is None:
        known = _CHILDREN[node] = tuple(node.children)
    return known


def found(node: cst.CSTNode, kind: Kinds[Node]) -> Iterator[Node]:
    """Yield every node of a kind at or below a node, in the order of the text."""
    waiting = [node]
    while waiting:
        here = waiting.pop()
        if isinstance(here, kind):
            yield here
        waiting += reversed(children(here))


def parts(node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    """Yield the outermost expressions inside a node."""
    for child in node.children:
        if isinstance(child, cst.BaseExpression):
            if isinstance(node, cst.Arg) and child is node.keyword:
                continue
            yield child
        elif not isinstance(child, cst.BaseSmallStatement):
            yield from parts(child)


def is_main_guard(node: cst.CSTNode) -> bool:
    """Return whether a statement is ``if __name__ == "__main__":``, in either order."""
    if not isinstance(node, cst.If) or not isinstance(node.test, cst.Comparison):
        return False
    sides = [node.test.left, *(part.comparator for part in node.test.comparisons)]
    return any(dotted(side) == "__name__" for side in sides)


def targets_of(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return what a statement or an expression assigns to."""
    if isinstance(node, cst.Assign):
        return [t.target for t in node.targets]
    if isinstance(node, cst.AnnAssign | cst.AugAssign | cst.NamedExpr | cst.For):
        return [node.target]
    if isinstance(node, cst.WithItem) and node.asname is not None:
        return [node.asname.name]
    return []


def stored_names(target: cst.BaseExpression) -> Iterator[cst.Name]:
    """Yield the names that an assignment to a target sets."""
    if isinstance(target, cst.Name):
        yield target
    elif isinstance(target, cst.Tuple | cst.List):
        for element in target.elements:
            yield from stored_names(element.value)


def sets_names(node: cst.CSTNode) -> bool:
    """Return whether ``:=`` in an expression sets a name outside of its lambdas."""
    if isinstance(node, cst.Lambda):
        return False
    if isinstance(node, cst.NamedExpr):
        return True
    return any(sets_names(child) for child in children(node))


@final
class ScriptTree:
    """One parsed script: parents, lines, imported names."""

    def __init__(
        self, module: cst.Module, *, lines: dict[int, int] | None = None
    ) -> None:
        """Parse metadata.

        Args:
            module: The script.
            lines: The script's line for each line on which a statement of `module`
                begins, if they differ; such a module must not contain a node twice.
        """
        wrapper = MetadataWrapper(module, unsafe_skip_copy=lines is not None)
        self.module = wrapper.module
        self._of_script = lines
        _CHILDREN.clear()
        self._parents = {
            child: node
            for node in found(self.module, cst.CSTNode)
            for child in children(node)
        }
        self._positions = wrapper.resolve(PositionProvider)
        self._scopes: dict[cst.CSTNode, Scope] = {}
        self.imported = _imported(self.module)
        self.calls = list(found(self.module, cst.Call))
        self.functions = list(found(self.module, cst.FunctionDef))
        self.classes = {c.name.value: c for c in found(self.module, cst.ClassDef)}
        self.names = {n.value for n in found(self.module, cst.Name)}
        made: list[cst.FunctionDef | cst.ClassDef]
        made = [*self.functions, *self.classes.values()]
        own = {one.name.value for one in made if not self._is_in_class(one)}
        self._own = own.difference(self.imported)

    def changed(self, module: cst.Module) -> ScriptTree:
        """Return the tree of a module whose statements are on the same lines."""
        if self._of_script is None:
            return ScriptTree(module)
        return ScriptTree(module.deep_clone(), lines=self._of_script)

    def line(self, node: cst.CSTNode) -> int:
        """Return the first line of a node, from 1, to compare with others."""
        return int(self._positions[node].start.line)

    def shown_line(self, node: cst.CSTNode) -> int:
        """Return the first line of a node in the script, from 1."""
        return self.line_in_script(self.line(node))

    def line_in_script(self, line: int) -> int:
        """Return the script's line for a line of this tree's module."""
        if self._of_script is None:
            return line
        begun = max((n for n in self._of_script if n <= line), default=0)
        return self._of_script.get(begun, 0) + line - begun

    def text(self, node: cst.CSTNode) -> str:
        """Return the source text of a node."""
        return self.module.code_for_node(node).strip()

    def has(self, node: cst.CSTNode) -> bool:
        """Return whether a node is one of the script."""
        return node in self._positions

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the node around a node."""
        return self._parents.get(node)

    def is_label(self, node: cst.CSTNode) -> bool:
        """Return whether a name is a label: of a keyword, a parameter or an import."""
        above = self._parents.get(node)
        if isinstance(above, cst.Arg):
            return above.keyword is node
        if isinstance(above, cst.Attribute):
            return above.attr is node
        return isinstance(
            above,
            cst.Param
            | cst.ImportAlias
            | cst.AsName
            | cst.NameItem
            | cst.FunctionDef
            | cst.ClassDef,
        ) and node in (
            getattr(above, "name", None),
            getattr(above, "asname", None),
        )

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, innermost first."""
        above = self._parents.get(node)
        while above is not None:
            yield above
            above = self._parents.get(above)

    def within(self, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
        """Return whether a node is an outer node or is inside it."""
        return node is outer or any(a is outer for a in self.ancestors(node))

    def _is_in_class(self, node: cst.CSTNode) -> bool:
        """Return whether a definition is in the body of a class."""
        block = self._parents.get(node)
        while isinstance(block, cst.BaseSuite | cst.If | cst.Else):
            block = self._parents.get(block)
        return isinstance(block, cst.ClassDef)

    def own_class(self, call: cst.CSTNode | None) -> cst.ClassDef | None:
        """Return the class of the script that a call calls, if it calls one."""
        return self.classes.get(self.called(call).removeprefix(OWN))

    def full(self, node: cst.CSTNode | None) -> str | None:
        """Return a dotted name with its first part resolved to its import.

        One that the script itself defines begins with `OWN`: it is no library's,
        whatever its name.
        """
        name = dotted(node)
        if name is None:
            return None
        first, dot, rest = name.partition(".")
        if first in self._own:
            return OWN + name
        return self.imported.get(first, first) + dot + rest

    def called(self, call: cst.CSTNode | None) -> str:
        """Return the full name that a call calls, or an empty text."""
        return (self.full(call.func) or "") if isinstance(call, cst.Call) else ""

    def function(self, node: cst.CSTNode) -> Scope:
        """Return the function around a node, also if the node is a function."""
        if node not in self._scopes:
            self._scopes[node] = self._function(node)
        return self._scopes[node]

    def _function(self, node: cst.CSTNode) -> Scope:
        below = node
        for above in self.ancestors(node):
            # A default or a decorator belongs to the scope outside.
            if isinstance(above, cst.FunctionDef) and below is above.body:
                return above
            below = above
        return None

    def owner(self, scope: Scope) -> cst.ClassDef | None:
        """Return the class whose method a function is, or is inside."""
        if scope is None:
            return None
        return next(
            (a for a in self.ancestors(scope) if isinstance(a, cst.ClassDef)), None
        )

    def family(self, kind: cst.ClassDef) -> list[cst.ClassDef]:
        """Return a class with its bases and its subclasses in this script."""
        out = [kind]
        for node in out:
            for base in node.bases:
                other = self.classes.get((dotted(base.value) or "").rpartition(".")[2])
                if other is not None and other not in out:
                    out.append(other)
        below = [kind]
        for node in below:
            for other in self.classes.values():
                bases = {dotted(b.value) for b in other.bases}
                if node.name.value in bases and other not in below:
                    below.append(other)
        return [*out, *below[1:]]

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the smallest whole statement around a node: a line or a block."""
        kinds = (cst.SimpleStatementLine, cst.BaseCompoundStatement)
        if isinstance(node, kinds):
            return node
        return next(a for a in self.ancestors(node) if isinstance(a, kinds))

    def block(self, statement: cst.CSTNode) -> cst.Module | cst.BaseSuite:
        """Return the block that a statement is a line of."""
        above = self._parents[statement]
        if not isinstance(above, cst.Module | cst.BaseSuite):
            raise TypeError(f"{type(statement).__name__} is not a line of a block")
        return above

    def loops(self, node: cst.CSTNode) -> list[cst.For | cst.While]:
        """Yield the loops around a node, innermost first, also outside of a closure."""
        return [a for a in self.ancestors(node) if isinstance(a, cst.For | cst.While)]

    def without_gradient(self, node: cst.CSTNode) -> bool:
        """Return whether a node is inside ``torch.no_grad`` or similar."""
        for above in self.ancestors(node):
            if isinstance(above, cst.With) and any(
                self.called(item.item) in _NO_GRAD for item in above.items
            ):
                return True
            if isinstance(above, cst.FunctionDef) and any(
                (self.called(d.decorator) or self.full(d.decorator)) in _NO_GRAD
                for d in above.decorators
            ):
                return True
        return False

    def method_called(self, call: cst.Call, *names: str) -> cst.BaseExpression | None:
        """Yield what a method of one of these names is called on."""
        func = call.func
        if isinstance(func, cst.Attribute) and func.attr.value in names:
            return func.value
        return None


def _imported(module: cst.Module) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in found(module, cst.Import):
        for alias in node.names:
            full = dotted(alias.name) or ""
            if alias.asname is not None:
                names[dotted(alias.asname.name) or ""] = full
            else:
                first = full.partition(".")[0]
                names[first] = first
    for line in found(module, cst.ImportFrom):
        base = "." * len(line.relative) + (dotted(line.module) or "")
        if isinstance(line.names, cst.ImportStar):
            continue
        for alias in line.names:
            name = dotted(alias.name) or ""
            kept = dotted(alias.asname.name) if alias.asname is not None else name
            names[kept or name] = f"{base}.{name}"
    return names
