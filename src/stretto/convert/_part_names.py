"""Refuse checkpoints of modules of which only a part is wrapped.

The wrapper is a module of its own, so it puts ``module.`` into the names of the
parameters that a module around it has, and the original script would not know them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._modules import is_module_class
from stretto.convert._tree import dotted, found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.convert._edit import Work
    from stretto.convert._tree import Scope
    from stretto.convert._views import Site

_NAMING = (
    *("state_dict", "load_state_dict", "named_parameters", "named_buffers"),
    *("named_modules", "named_children", "get_parameter", "get_buffer"),
    *("get_submodule", "save_pretrained", "push_to_hub"),
)
"""Methods of a module that use the names of its parts."""

_KEEPING = ("torch.save", "torch.jit.save", "torch.jit.script", "copy.deepcopy")
"""Functions of other files that keep a whole module."""


def refuse_renamed(work: Work, sites: list[Site]) -> None:
    """Refuse to wrap parts of a module whose names the script saves or reads.

    Raises:
        SpecError: it does; the error has the line and the next step.
    """
    for site in sites:
        owner = work.tree.owner(site.scope)
        if (
            owner is None
            or not site.path.startswith("self.")
            or not is_module_class(work.tree, owner)
        ):
            continue
        part = f"{owner.name.value}.{site.path.removeprefix('self.')}"
        for node in _uses_of_names(work, owner):
            raise work.job.refuse(
                node,
                f"`{work.tree.text(node)[:50]}` has the names of all parts of a "
                f"`{owner.name.value}`, of which training calls `{part}` by itself, so "
                "that it is wrapped alone and its parameters get other names, with "
                f"`module.`. Save and load the state_dict() of each part "
                f"(`{site.path.removeprefix('self.')}`) by itself; or let training "
                f"call the whole `{owner.name.value}`, and make the optimizer outside "
                "of the class",
            )
        work.know(
            site.at,
            f"`{part}` is wrapped by itself, so the names of its parameters in a "
            f"`{owner.name.value}` get `module.`; nothing in this file reads them",
        )


def _uses_of_names(work: Work, owner: cst.ClassDef) -> Iterator[cst.BaseExpression]:
    tree = work.tree
    for call in tree.calls:
        scope = tree.function(call)
        on = tree.method_called(call, *_NAMING)
        if on is not None and _is_object(work, on, scope, owner):
            yield call
        if tree.called(call) in _KEEPING:
            for given in found(call, (cst.Name, cst.Attribute)):
                whole = isinstance(tree.parent(given), cst.Arg | cst.DictElement)
                if whole and _is_object(work, given, scope, owner):
                    yield call


def _is_object(
    work: Work, node: cst.BaseExpression, scope: Scope, owner: cst.ClassDef
) -> bool:
    """Return whether an expression is an object of a class, or of one of its family."""
    family = work.tree.family(owner)
    if dotted(node) == "self":
        return work.tree.owner(scope) in family
    if isinstance(node, cst.Call):
        return dotted(node.func) == "super" and work.tree.owner(scope) in family
    if dotted(node) is None:
        return False
    names = {kind.name.value for kind in family}
    values = {key[0] for key in work.flow.reached(node, scope)}
    return any(
        id(call) in values for call in work.tree.calls if dotted(call.func) in names
    )
