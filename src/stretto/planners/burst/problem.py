"""One burst planning problem, with its costs as arrays, and a decision about it.

Arrays are indexed by layer or by width, the position of a number of GPUs in ``widths``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

import numpy as np

from stretto.cost.burst import BurstNetwork, redistribution_s, samples_on, widths_of
from stretto.errors import SpecError
from stretto.planners.burst.tree import Crossing, Tree, parse
from stretto.schema.burst import LayerProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

TOLERANCE = 1e-9
"""Relative tolerance for a layer's amplification above its limit, for rounding."""


@final
@dataclass(frozen=True, kw_only=True)
class BurstProblem:
    """Choose each layer's GPUs for the shortest step within a limit.

    The limit holds for each edge into a layer (algorithm 1, in the reading that makes
    it exact): (comm + comp + sync) * gpus <= limit * comp on one GPU, for the first
    layer without comm. A layer that computes nothing has no such limit.
    """

    profile: LayerProfile

    network: BurstNetwork

    gpus: int

    batch: int

    widths: tuple[int, ...]
    """The numbers of GPUs a layer may get, ascending."""

    amplification_limit: float | None = None

    def __post_init__(self) -> None:
        limit = self.amplification_limit
        if limit is not None and not 0 < limit < math.inf:
            raise SpecError(
                f"the amplification limit must be finite and > 0, got {limit}; 1 asks "
                "for as much GPU time as on one GPU",
                place=".amplification_limit",
            )

    @classmethod
    def of(
        cls,
        profile: LayerProfile,
        network: BurstNetwork,
        *,
        gpus: int,
        batch: int,
        widths: str | Sequence[int] = "powers",
        amplification_limit: float | None = None,
    ) -> BurstProblem:
        r"""Return the problem over one kind of widths, without useless widths.

        Of the numbers of GPUs with equally many samples on the most loaded GPU, the
        smallest has the same computation and transfers, at most the same
        synchronization and the least GPU time, so the others cannot shorten any plan.
        About $2\sqrt{B}$ of ``all`` are left.
        """
        some = widths_of(widths, gpus, batch)
        if network.sync_grows:
            smallest = {samples_on(batch, g): g for g in reversed(some)}
            some = tuple(sorted(smallest.values()))
        return cls(
            profile=profile,
            network=network,
            gpus=gpus,
            batch=batch,
            widths=some,
            amplification_limit=amplification_limit,
        )

    @cached_property
    def tree(self) -> Tree:
        """The graph's chains and blocks."""
        return parse(self.profile)

    @cached_property
    def crosses(self) -> bool:
        """Whether branches cross, so that there is no `tree`."""
        try:
            return self.tree is None
        except Crossing:
            return True

    @cached_property
    def samples(self) -> Floats:
        """Samples on the most loaded GPU, by width."""
        return np.array([samples_on(self.batch, g) for g in self.widths], float)

    @cached_property
    def single_s(self) -> list[float]:
        """comp(i, 1), by layer."""
        return [layer.compute_s(self.batch) for layer in self.profile.layers]

    @cached_property
    def node_s(self) -> Floats:
        """comp(i, g) + sync(i, g) and batch norms' exchange, by layer and width."""
        shares = [samples_on(self.batch, g) for g in self.widths]
        sync_s = {
            size: [self.network.sync_s(size, g) for g in self.widths]
            for size in {layer.parameter_bytes for layer in self.profile.layers}
        }
        rows = []
        for layer in self.profile.layers:
            by_share = {share: layer.compute_s(share) for share in set(shares)}
            comp_s = [by_share[share] for share in shares]
            rows.append(
                [
                    c + s + self.network.norm_s(layer.norms, g)
                    for c, s, g in zip(
                        comp_s, sync_s[layer.parameter_bytes], self.widths, strict=True
                    )
                ]
            )
        return np.array(rows)

    @cached_property
    def sample_s(self) -> list[float]:
        """Time to move one sample of a layer's output and its gradient, by layer."""
        return [self.network.sample_s(layer) for layer in self.profile.layers]

    def comm_s(self, layer: int, source: int, target: int, *, moved: bool) -> float:
        """Return the comm of a layer's output between two widths."""
        return redistribution_s(
            self.sample_s[layer],
            self.network.delay_s,
            self.batch,
            self.widths[source],
            self.widths[target],
            moved=moved,
        )

    @cached_property
    def slack_s(self) -> Floats:
        """Upper limit of comm into a layer, by layer and width."""
        if self.amplification_limit is None:
            return np.full_like(self.node_s, math.inf)
        single = np.array(self.single_s)[:, None]
        allowed = self.amplification_limit * (1 + TOLERANCE) * single
        slack = allowed / np.array(self.widths, float) - self.node_s
        return np.where(single > 0, slack, math.inf)

    def amplification(self, layer: int, width: int, comm_s: float) -> float:
        """Return a layer's GPU time relative to one GPU; 0 if it computes nothing."""
        if self.single_s[layer] <= 0:
            return 0.0
        busy_s = comm_s + float(self.node_s[layer, width])
        return busy_s * self.widths[width] / self.single_s[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Each layer's width, and the branches that run on their own GPUs."""

    widths: tuple[int, ...]
    """By layer; the position in the problem's widths."""

    own: frozenset[int] = frozenset()
    """First layers of the branches that run on their own GPUs, beside the others of
    their block; the others take turns on the GPUs of the layer before the block."""

    first_gpus: tuple[int, ...] = ()
    """By layer; empty if no branch has its own GPUs."""
