r"""Costs of burst parallelism (DeepPool section 4.1): redistribution, synchronization.

Every cost is that of the most loaded GPU. With $B$ samples on $g$ GPUs it has
$s(g) = \lceil B/g \rceil$ samples; where $g$ divides $B$ this is the paper's $B/g$.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.cost.collectives import (
    ring_all_reduce_s,
    startup_steps,
    wire_factor,
)
from stretto.errors import SpecError
from stretto.schema import Link

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.schema import Cluster
    from stretto.schema.burst import Layer

WIDTHS = ("powers", "divisors", "all")
"""Rules that choose the GPU counts a layer may get."""

NORM_STEPS = 3
"""Collective rounds that one batch norm takes: 1 in forward and 2 in backward."""

MAX_DIRECT = 16
"""Up to this many ranks, the few numbers exchanged at the start of each step go
directly from each rank to every other. Beyond it they go around a ring, which sends
fewer messages."""

SYNCS = ("transfer", "ring", "hidden")
"""How gradient synchronization is counted, see `BurstNetwork.sync`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Costs of a ring between hosts, as measured on them."""

    step_s: float
    """Delay of each of its 2(p-1) steps, before the first byte."""

    wire_bytes_per_s: float
    """Wire rate of one all-reduce, including its sums."""


def ring_of(cluster: Cluster) -> Ring:
    """Return a cluster's ring, from the fitted all-reduce or else the inter-host link.

    The result holds for any number of hosts. From a fit over p ranks, a step takes
    ``startup_s`` / 2(p-1) and a byte on the wire ``s_per_byte`` / (2(p-1)/p). On a
    single host nothing crosses the network, so the links within the host are used.
    """
    link = cluster.bottleneck
    fit = cluster.allreduce
    if fit is None:
        return Ring(step_s=link.latency_s, wire_bytes_per_s=link.flow_bytes_per_s)
    return Ring(
        step_s=fit.startup_s / startup_steps("ring", fit.ranks),
        wire_bytes_per_s=wire_factor("ring", fit.ranks) / fit.s_per_byte,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstNetwork:
    """Full bisection: each GPU has its bandwidth whatever others send (section 4.1)."""

    transfer: Link
    """One GPU's link for moving samples; each transfer pays its latency once."""

    near: Link
    """Ring among at most ``near_gpus`` GPUs."""

    far: Link
    """Ring among more than ``near_gpus`` GPUs."""

    near_gpus: int

    sync: str
    """``transfer``: a ring's volume, 2(g-1)/g of a layer's parameters, as one transfer
    with one latency, the model of section 4.1. ``ring``: with all latencies of a ring.
    Both run after backward. ``hidden``: costs nothing; it overlaps with backward."""

    exposed_ratio: float = 1.0
    """Share of synchronization that other layers' backward does not hide."""

    def __post_init__(self) -> None:
        if self.sync not in SYNCS:
            raise SpecError(
                f"sync must be one of {', '.join(SYNCS)}, got {self.sync!r}",
                place=".sync",
            )
        if not 0 <= self.exposed_ratio <= 1:
            raise SpecError(
                f"exposed_ratio must be 0 to 1, got {self.exposed_ratio}",
                place=".exposed_ratio",
            )
        if self.near_gpus < 1:
            raise SpecError(
                f"near_gpus must be >= 1, got {self.near_gpus}", place=".near_gpus"
            )

    @classmethod
    def of(cls, cluster: Cluster, gpus: int, *, sync: str = "ring") -> BurstNetwork:
        """Return the network among ``gpus`` GPUs of a cluster.

        Beyond one host, the GPUs of a host share its link when they move samples; a
        ring crosses it once.
        """
        ring = ring_of(cluster)
        far = Link(latency_s=ring.step_s, bandwidth_bytes_per_s=ring.wire_bytes_per_s)
        transfer = cluster.intra_host
        if gpus > cluster.ranks_per_host:
            inter = cluster.inter_host
            share = inter.bandwidth_bytes_per_s / cluster.ranks_per_host
            transfer = Link(
                latency_s=ring.step_s,
                bandwidth_bytes_per_s=min(share, inter.flow_bytes_per_s),
            )
        return cls(
            transfer=transfer,
            near=cluster.intra_host if cluster.hosts > 1 else far,
            far=far,
            near_gpus=cluster.ranks_per_host,
            sync=sync,
        )

    def sync_s(self, parameter_bytes: int, gpus: int) -> float:
        """Return sync(i, g): the time after backward until all GPUs have gradients."""
        if gpus == 1 or self.sync == "hidden" or not parameter_bytes:
            return 0.0
        link = self.near if gpus <= self.near_gpus else self.far
        if self.sync == "transfer":
            size = wire_factor("ring", gpus) * parameter_bytes
            seconds = size / link.flow_bytes_per_s + link.latency_s
        else:
            seconds = ring_all_reduce_s(parameter_bytes, gpus, link)
        return self.exposed_ratio * seconds

    def norm_s(self, norms: int, gpus: int) -> float:
        """Return the time in which GPUs exchange batch norms' statistics, both ways.

        Each norm takes a gather in forward, g - 1 latencies, and a sum in backward,
        2(g - 1). The bytes are negligible beside the latencies. The layer waits for it.
        """
        link = self.near if gpus <= self.near_gpus else self.far
        return norms * NORM_STEPS * (gpus - 1) * link.latency_s

    @property
    def sync_grows(self) -> bool:
        """Whether adding GPUs never makes synchronization faster."""
        return self.sync == "hidden" or (
            self.far.latency_s >= self.near.latency_s
            and self.far.flow_bytes_per_s <= self.near.flow_bytes_per_s
        )

    def sample_s(self, layer: Layer) -> float:
        """Return the time to move a sample of a layer's output and its gradient."""
        return 2.0 * layer.activation_bytes / self.transfer.flow_bytes_per_s

    @property
    def delay_s(self) -> float:
        """Fixed cost of a redistribution, forward and backward, whatever its size."""
        return 2.0 * self.transfer.latency_s


# DeepPool's planner, published artifact, read 2026: 2.66e5 bytes per us, 40 us.
_NVSWITCH = Link(latency_s=40e-6, bandwidth_bytes_per_s=2.66e11)

DEEPPOOL = BurstNetwork(
    transfer=_NVSWITCH, near=_NVSWITCH, far=_NVSWITCH, near_gpus=1, sync="transfer"
)
"""The published planner's constants: eight A100 behind NVSwitch."""


def samples_on(batch: int, gpus: int) -> int:
    r"""Return the samples on the most loaded of ``gpus`` GPUs, $\lceil B/g \rceil$."""
    return -(-batch // gpus)


def redistribution_s(
    sample_s: float,
    delay_s: float,
    batch: int,
    source: int,
    target: int,
    *,
    moved: bool,
) -> float:
    r"""Return comm(i,g -> j,h): the time to move samples between sets of GPUs.

    $2\,(|s(g) - s(h)|\,a / W + \delta)$, and 0 where $g = h$, with $a$ the bytes of an
    activation, $W$ the bandwidth and $\delta$ the latency. The factor 2 is for the
    gradients' way back: ``sample_s`` is $2a/W$, ``delay_s`` is $2\delta$.

    The smaller set of GPUs is a subset of the larger one, so a GPU keeps the samples it
    has. With ``moved`` the two sets are disjoint (a branch with its own GPUs), so every
    sample moves: $\max(s(g), s(h))$ on the most loaded GPU.
    """
    g, h = samples_on(batch, source), samples_on(batch, target)
    if moved:
        return sample_s * max(g, h) + delay_s
    if source == target:
        return 0.0
    return sample_s * abs(g - h) + delay_s


def widths_of(kind: str | Sequence[int], gpus: int, batch: int) -> tuple[int, ...]:
    """Return the GPU counts that a layer may get, ascending, from 1 to ``gpus``.

    ``kind`` is ``powers`` (powers of two, and ``gpus`` itself), ``divisors`` (of the
    batch) or ``all``; counts above the number of samples are dropped. Or it lists the
    counts, each at most ``gpus`` and with a sample for every GPU.

    Raises:
        SpecError: the word is unknown, there is no GPU or sample, or a number breaks
            the rule.
    """
    for name, value in (("gpus", gpus), ("batch", batch)):
        if value < 1:
            raise SpecError(f"{name} must be >= 1, got {value}", place=f".{name}")
    widest = min(gpus, batch)
    if kind == "all":
        return tuple(range(1, widest + 1))
    if kind == "divisors":
        return tuple(g for g in range(1, widest + 1) if batch % g == 0)
    if kind == "powers":
        powers = {2**i for i in range(widest.bit_length()) if 2**i <= widest}
        return tuple(sorted(powers | {widest}))
    if isinstance(kind, str):
        raise SpecError(
            f"widths must be one of {', '.join(WIDTHS)} or numbers, got {kind!r}",
            place=".widths",
        )
    return _given_widths(kind, gpus, batch)


def _given_widths(given: Sequence[int], gpus: int, batch: int) -> tuple[int, ...]:
    widths = tuple(sorted(set(given)))
    if not widths:
        raise SpecError("widths must name a number of GPUs", place=".widths")
    for width in widths:
        if not 1 <= width <= gpus:
            raise SpecError(
                f"a width must be from 1 to {gpus}, the number of GPUs, got {width}: "
                "leave it out or plan for more GPUs",
                place=".widths",
            )
        if width > batch:
            raise SpecError(
                f"a width must be <= {batch}, the batch, got {width}: a GPU would have "
                "no sample. Choose fewer GPUs or a larger batch",
                place=".widths",
            )
    return widths
