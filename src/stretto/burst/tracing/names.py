"""Names of what a captured module holds."""

from __future__ import annotations

import json
import keyword
from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from torch import nn


class Name(str):
    """The path of a held module or tensor, any part of which code can be made for.

    torch.fx writes parts after a dot unless they are not identifiers, and others
    between quotes as they are. Neither works for ``global`` or for a name with a quote.
    """

    __slots__ = ()

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        """Split it into parts."""
        return [_Part(part) for part in str(self).split(sep, maxsplit)]


class _Part(str):
    __slots__ = ()

    def isidentifier(self) -> bool:
        return super().isidentifier() and not keyword.iskeyword(self)

    def __format__(self, spec: str) -> str:
        return format(json.dumps(str(self), ensure_ascii=False)[1:-1], spec)


def free_name(name: str, *modules: nn.Module) -> str:
    """Return a name like this one that no module has for something else."""
    while any(hasattr(module, name) for module in modules):
        name += "_"
    return name


def new_graph() -> fx.Graph:
    """Return a graph without nodes, none of which will be named ``self``.

    torch.fx names a node after the module that it calls. Generated code would assign
    the output of one that is named ``self`` to the module that runs the code.
    """
    graph = fx.Graph()
    graph._graph_namespace.create_name("self", None)  # noqa: SLF001
    return graph
