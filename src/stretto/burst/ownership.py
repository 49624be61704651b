"""Which ranks run which layer, and so hold the gradients of which parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from stretto.burst.rank_groups import is_among

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor, nn

    from stretto.burst.rank_groups import RankRange
    from stretto.burst.tracing.layers import LayerGraph
    from stretto.runtime.agreement import Ranks

LOOSE = "(none)"
"""Takes the place of a layer for parameters that no layer uses."""


@final
class Ownership:
    """The ranks of every layer and parameter of one model; empty before its set-up."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._layer_by_id: dict[int, str] = {}
        self.widths: dict[str, RankRange] = {}
        """Ranks of each layer."""
        self.width_by_id: dict[int, RankRange] = {}
        """Ranks of each parameter, by its id."""
        self.loose: tuple[nn.Parameter, ...] = ()
        """Parameters that no layer uses, but losses may, on every rank."""

    @property
    def everywhere(self) -> RankRange:
        """All ranks."""
        return 0, self._ranks.size

    def assign(
        self,
        graph: LayerGraph,
        widths: Mapping[str, RankRange],
        parameters: Iterable[nn.Parameter],
    ) -> None:
        """Record the ranks of a model's layers, and of all its parameters."""
        self.widths = dict(widths)
        self.width_by_id, self._layer_by_id = {}, {}
        for node in graph.nodes:
            for parameter in node.module.parameters():
                self.width_by_id[id(parameter)] = widths[node.name]
                self._layer_by_id[id(parameter)] = node.name
        self.loose = tuple(p for p in parameters if id(p) not in self.width_by_id)
        for parameter in self.loose:
            self.width_by_id[id(parameter)] = self.everywhere
            self._layer_by_id[id(parameter)] = LOOSE

    def includes(self, width: RankRange) -> bool:
        """Return whether this rank is one of these ranks."""
        return is_among(width, self._ranks.rank)

    def runs(self, layer: str) -> bool:
        """Return whether this rank runs a layer."""
        return self.includes(self.widths[layer])

    def runs_parameter(self, parameter: Tensor) -> bool:
        """Return whether this rank runs the layer of a parameter."""
        return self.includes(self.width_by_id[id(parameter)])

    def is_everywhere(self, parameter: Tensor) -> bool:
        """Return whether every rank runs the layer of a parameter."""
        return self.width_by_id[id(parameter)] == self.everywhere

    def layer_of(self, parameter: Tensor) -> str | None:
        """Return the name of a parameter's layer; ``None`` if it isn't the model's."""
        return self._layer_by_id.get(id(parameter))

    def holds(self, parameter: Tensor) -> bool:
        """Return whether a parameter is the model's, and ranks hold different ones."""
        return self._ranks.size > 1 and id(parameter) in self.width_by_id

    def is_first(self, parameter: Tensor) -> bool:
        """Return whether this rank is the first of those that `holds` speaks of."""
        return (
            self.holds(parameter)
            and self.width_by_id[id(parameter)][0] == self._ranks.rank
        )

    def is_whole(self) -> bool:
        """Return whether every rank runs every layer."""
        return all(width == self.everywhere for width in self.widths.values())
