"""Refuse training through a container that holds a model from before it is wrapped.

Wrapping a model gives its name another object, and a list, a dict or a module that was
made of the model earlier does not see it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import libcst as cst

from stretto.convert._batch_loops import WRAPPERS
from stretto.convert._tree import dotted, found, stored_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.convert._edit import Work
    from stretto.convert._views import Site

_DISPLAYS = (cst.List, cst.Tuple, cst.Set, cst.Dict)

_MAKERS = frozenset(
    [
        "torch.nn.Sequential",
        "torch.nn.ModuleList",
        "torch.nn.ModuleDict",
        "functools.partial",
        "collections.OrderedDict",
        "list",
        "tuple",
        "dict",
    ]
)
"""Calls whose result holds what they are given."""

_ELEMENTS = frozenset(["values", "items", "get", "pop", "children", "modules"])
"""Methods of a container that return what it holds."""

_CALLING = frozenset(["map", "filter"])
"""Functions that call one argument with another's elements."""


@final
class HeldModels:
    """Containers of models, and what training does with them."""

    def __init__(self, work: Work, trains: Callable[[cst.CSTNode], bool]) -> None:
        self._work, self._trains = work, trains
        self._tree, self._flow = work.tree, work.flow

    def check(self, site: Site, is_model: Callable[[cst.BaseExpression], bool]) -> None:
        """Refuse a call of a model, wrapped at a place, that does not see the wrapper.

        Raises:
            SpecError: training calls the model through an earlier container.
        """
        for value, path in self._made_before(site, is_model):
            for use in self._uses(value):
                if self._calls_element(use):
                    raise self._work.job.refuse(
                        use,
                        f"training goes through `{path}`, which holds `{site.path}` "
                        "from before it is wrapped, so its gradients would not be "
                        f"exchanged. Make `{path}` after the optimizer is created, or "
                        f"call `{site.path}` itself",
                    )

    def _made_before(
        self, site: Site, is_model: Callable[[cst.BaseExpression], bool]
    ) -> list[tuple[cst.BaseExpression, str]]:
        """Return the values that hold the model, and the names that they get."""
        out: dict[int, tuple[cst.BaseExpression, str]] = {}
        for node in found(self._tree.module, (*_DISPLAYS, cst.Call)):
            if isinstance(node, cst.Call) and self._tree.called(node) not in _MAKERS:
                continue
            if self._tree.function(node) is not site.scope:
                continue
            if self._tree.line(node) > site.last_line:
                continue
            if any(is_model(part) for part in _parts(node)):
                whole, line = self._outermost(node)
                path = dotted(line.targets[0].target) if line is not None else None
                if path is not None:
                    out[id(whole)] = whole, path
        return list(out.values())

    def _outermost(
        self, node: cst.BaseExpression
    ) -> tuple[cst.BaseExpression, cst.Assign | None]:
        """Return the container that is assigned, and its assignment."""
        above = self._tree.parent(node)
        while isinstance(
            above,
            cst.Element
            | cst.DictElement
            | cst.Arg
            | cst.List
            | cst.Tuple
            | cst.Dict
            | cst.Call,
        ):
            if isinstance(above, cst.Call) and self._tree.called(above) not in _MAKERS:
                return node, None
            if isinstance(above, cst.BaseExpression):
                node = above
            above = self._tree.parent(above)
        return node, above if isinstance(above, cst.Assign) else None

    def _uses(self, value: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Return where training uses a container, under any name."""
        return [
            node
            for node in found(self._tree.module, (cst.Name, cst.Attribute))
            if dotted(node) is not None
            and not self._tree.is_label(node)
            and self._trains(node)
            and not self._tree.without_gradient(node)
            and any(
                key[0] == id(value)
                for key in self._flow.reached(node, self._tree.function(node))
            )
        ]

    def _calls_element(self, use: cst.BaseExpression) -> bool:
        """Return whether the use of a container calls what it holds."""
        node: cst.CSTNode = use
        above = self._tree.parent(node)
        while (
            (isinstance(above, cst.Subscript) and above.value is node)
            or (isinstance(above, cst.Attribute) and above.attr.value in _ELEMENTS)
            or (
                isinstance(above, cst.Call)
                and above.func is node
                and isinstance(node, cst.Attribute)
            )
            or isinstance(above, cst.Arg)
            or (isinstance(above, cst.Call) and self._tree.called(above) in WRAPPERS)
        ):
            node, above = above, self._tree.parent(above)
        if isinstance(above, cst.Call):
            return above.func is node or self._tree.called(above) in _CALLING
        if isinstance(above, cst.For | cst.CompFor) and above.iter is node:
            names = {name.value for name in stored_names(above.target)}
            inside = above.body if isinstance(above, cst.For) else None
            block = inside if inside is not None else self._tree.parent(above)
            return block is not None and any(
                dotted(call.func) in names and not self._tree.without_gradient(call)
                for call in found(block, cst.Call)
            )
        if isinstance(above, cst.Assign):
            names = {n.value for t in above.targets for n in stored_names(t.target)}
            scope = self._tree.function(above)
            return any(
                dotted(call.func) in names and self._tree.function(call) is scope
                for call in self._tree.calls
            )
        return False


def _parts(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return the elements of a display, or the arguments of a call."""
    if isinstance(node, cst.Call):
        return [given.value for given in node.args]
    elements = getattr(node, "elements", ())
    return [element.value for element in elements]
