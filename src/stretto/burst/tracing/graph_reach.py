"""Which trained parameters the autograd graph of an output reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from torch import Tensor
from torch.autograd.function import BackwardCFunction

if TYPE_CHECKING:
    from collections.abc import Mapping


@final
@dataclass(frozen=True)
class GraphReach:
    """The parameters that one output's autograd graph of the module itself reaches."""

    names: frozenset[str]
    is_complete: bool
    """Whether there are no others: a backward in Python, such as a checkpoint's, may
    give gradients to parameters that are not in the graph."""

    @classmethod
    def of(cls, output: Tensor, names: Mapping[int, str]) -> GraphReach:
        """Return the reach of an output; ``names`` are those of parameters, by id."""
        found = {names[id(output)]} if id(output) in names else set()
        is_complete, seen, left = True, set(), [output.grad_fn]
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            is_complete &= not isinstance(node, BackwardCFunction)
            held = getattr(node, "variable", None)
            if isinstance(held, Tensor) and id(held) in names:
                found.add(names[id(held)])
            left += [behind for behind, _ in node.next_functions]
        return cls(frozenset(found), is_complete)

    def joined(self, other: GraphReach) -> GraphReach:
        """Return the reach in either of two runs."""
        return GraphReach(
            self.names | other.names, self.is_complete and other.is_complete
        )
