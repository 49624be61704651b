"""Find whether a model may have buffers, as batch norm has."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING

import libcst as cst

from stretto.convert._tree import dotted, found

if TYPE_CHECKING:
    from stretto.convert._edit import Work
    from stretto.convert._flow import Origin

_WITH_BUFFERS = ("BatchNorm", "InstanceNorm", "spectral_norm", "Lazy", "Buffer")
"""Parts of names of layers and functions of PyTorch that add buffers."""

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")

_BUILTIN = frozenset(dir(builtins))


def may_have_buffers(work: Work, model: Origin) -> bool:
    """Return whether a model may have buffers: it is made of unknown parts, or says so.

    Known are PyTorch's layers, and classes of the script that are made of these.
    """
    tree, seen = work.tree, set[int]()
    waiting: list[cst.CSTNode] = [model.value]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        for call in found(node, cst.Call):
            name, full = dotted(call.func), tree.called(call)
            if full.startswith("torch."):
                if any(word in full for word in _WITH_BUFFERS):
                    return True
                if full.rpartition(".")[2] in _CONTAINERS and any(
                    isinstance(arg.value, cst.Name | cst.Attribute | cst.Subscript)
                    for arg in call.args
                ):
                    return True  # layers that are made elsewhere
                continue
            if isinstance(call.func, cst.Attribute):
                if call.func.attr.value == "register_buffer":
                    return True
                if (name or "").partition(".")[0] in tree.imported:
                    return True
                waiting += [f.body for f in work.flow.local(call)]
                continue
            kind = tree.classes.get(name or "")
            local = work.flow.local(call)
            if kind is not None:
                waiting += tree.family(kind)
            elif local:
                waiting += [f.body for f in local]
            elif name not in _BUILTIN:
                return True
    return False
