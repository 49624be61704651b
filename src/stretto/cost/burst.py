r"""Burst parallelism's costs (DeepPool section 4.1): redistribute and synchronise.

Every cost is that of the fullest GPU. With $B$ samples on $g$ GPUs it has
$s(g) = \lceil B/g \rceil$; where $g$ divides $B$ these are the paper's $B/g$.
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
"""Which numbers of GPUs a layer may get."""

NORM_STEPS = 3
"""Rounds over the other ranks that one batch norm takes: 1 forward and 2 back."""

MOST_DIRECT = 16
"""Up to so many ranks the few numbers that every step begins with go from each rank to
every other at once. Beyond, in a ring, whose messages are fewer."""

SYNCS = ("transfer", "ring", "hidden")
"""How gradients' synchronisation is counted, see `BurstNetwork.sync`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """What a ring between hosts takes, as measured where it was."""

    step_s: float
    """Of each of its 2(p-1) steps, before the first byte."""

    wire_bytes_per_s: float
    """What one all-reduce reaches on the wire, sums included."""


def ring_of(cluster: Cluster) -> Ring:
    """A cluster's ring: from the fitted all-reduce, else from the link between hosts.

    Both are those of any number of hosts: of the fit's time a step takes
    ``startup_s`` / 2(p-1) and a byte on the wire ``s_per_byte`` / (2(p-1)/p) at the
    fit's p ranks. On one host nothing crosses the network and its links count.
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
    """Full bisection: each GPU has its bandwidth whoever else sends (section 4.1)."""

    transfer: Link
    """What one GPU has for moving samples; each transfer waits its latency once."""

    near: Link
    """What a ring among at most ``near_gpus`` GPUs has."""

    far: Link
    """What a larger ring has."""

    near_gpus: int

    sync: str
    """``transfer``: a ring's volume, 2(g-1)/g of a layer's parameters, as one transfer
    with one latency, the model of section 4.1. ``ring``: with all latencies of a ring.
    Both come after backward. ``hidden``: nothing, all of it is under backward."""

    exposed_ratio: float = 1.0
    """The part of synchronisation that is not under other layers' backward."""

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
        """The network that ``gpus`` GPUs of a cluster have.

        Beyond one host the GPUs of a host share its link when they move samples; a ring
        crosses it once.
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
        """sync(i, g): time after backward until all GPUs have a layer's gradients."""
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
        """Time in which GPUs exchange batch norms' statistics, forward and back.

        For each a gathering forward, g - 1 latencies, and a sum back, 2(g - 1); what
        is sent weighs nothing beside them. A layer waits for it.
        """
        link = self.near if gpus <= self.near_gpus else self.far
        return norms * NORM_STEPS * (gpus - 1) * link.latency_s

    @property
    def sync_grows(self) -> bool:
        """Whether more GPUs never synchronise in less time."""
        return self.sync == "hidden" or (
            self.far.latency_s >= self.near.latency_s
            and self.far.flow_bytes_per_s <= self.near.flow_bytes_per_s
        )

    def sample_s(self, layer: Layer) -> float:
        """Time to move one sample of a layer's output forward and its gradient back."""
        return 2.0 * layer.activation_bytes / self.transfer.flow_bytes_per_s

    @property
    def delay_s(self) -> float:
        """What a redistribution costs whatever its size, forward and backward."""
        return 2.0 * self.transfer.latency_s


# DeepPool's planner, published artefact, read 2026: 2.66e5 bytes per us, 40 us.
_NVSWITCH = Link(latency_s=40e-6, bandwidth_bytes_per_s=2.66e11)

DEEPPOOL = BurstNetwork(
    transfer=_NVSWITCH, near=_NVSWITCH, far=_NVSWITCH, near_gpus=1, sync="transfer"
)
"""The published planner's constants: eight A100 behind NVSwitch."""


def samples_on(batch: int, gpus: int) -> int:
    r"""Samples on the fullest of ``gpus`` GPUs, $\lceil B/g \rceil$."""
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
    r"""comm(i,g -> j,h): time to move samples from ``source`` to ``target`` GPUs.

    $2\,(|s(g) - s(h)|\,a / W + \delta)$, nothing where $g = h$; with $a$ the bytes of
    an activation, $W$ = bandwidth, $\delta$ = latency, 2 for the gradients' way back:
    ``sample_s`` is $2a/W$, ``delay_s`` is $2\delta$.

    A narrower set of GPUs is a part of the wider one, so what a GPU has stays. Where
    ``moved`` the two sets are disjoint (a branch with GPUs of its own): then all of
    them move, $\max(s(g), s(h))$ on the fullest GPU.
    """
    g, h = samples_on(batch, source), samples_on(batch, target)
    if moved:
        return sample_s * max(g, h) + delay_s
    if source == target:
        return 0.0
    return sample_s * abs(g - h) + delay_s


def widths_of(kind: str | Sequence[int], gpus: int, batch: int) -> tuple[int, ...]:
    """The numbers of GPUs a layer may get, ascending, from 1 to ``gpus``.

    ``powers`` of two and ``gpus`` itself, ``divisors`` of the batch, or ``all``. Of
    these more GPUs than samples are never used. Or the numbers themselves, each of
    which must divide ``gpus`` and find a sample for each GPU.

    Raises:
        SpecError: the word is unknown, there is no GPU or sample, or a number breaks
            the rule.
    """
    for name, value in (("gpus", gpus), ("batch", batch)):
        if value < 1:
            raise SpecError(f"{name} must be >= 1, got {value}", place=f".{name}")
    most = min(gpus, batch)
    if kind == "all":
        return tuple(range(1, most + 1))
    if kind == "divisors":
        return tuple(g for g in range(1, most + 1) if batch % g == 0)
    if kind == "powers":
        powers = {2**i for i in range(most.bit_length()) if 2**i <= most}
        return tuple(sorted(powers | {most}))
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
        if width < 1 or gpus % width:
            raise SpecError(
                f"widths must divide the {gpus} GPUs, got {width}: choose among "
                f"{', '.join(str(g) for g in range(1, gpus + 1) if gpus % g == 0)}",
                place=".widths",
            )
        if width > batch:
            raise SpecError(
                f"a width must be <= {batch}, the batch, got {width}: a GPU would have "
                "no sample. Choose fewer GPUs or a larger batch",
                place=".widths",
            )
    return widths
