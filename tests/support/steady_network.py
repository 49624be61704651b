"""A network whose measured times are exact, so that no noise keeps tuning open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stretto.measure import NetworkSamples
from stretto.schema.samples import CollectiveSample
from stretto.tune import initial_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STARTUP_S = 2e-4
FLOW_BYTES_PER_S = 1e8
LINK_BYTES_PER_S = 2e8


def use_steady_network() -> None:
    """Fit this process's probes from exact times; call it on every rank.

    Each lane still all-reduces, so a failure to open or use one is still found. On a
    busy machine three probes in a row may fit no model, and then tuning waits.
    """
    initial_profile.probe_network = _exact_samples
    initial_profile.determines_rate = lambda sample: False


def _exact_samples(
    *,
    lane_group: Callable[[int], Any],
    sizes_bytes: Sequence[int],
    lanes: Sequence[int],
    points: Sequence[tuple[int, int]] | None,
    **_options: Any,
) -> NetworkSamples:
    pairs = points or [(size, count) for size in sizes_bytes for count in lanes]
    ranks = lane_group(0).size()
    for lane in range(max(count for _, count in pairs)):
        lane_group(lane).allreduce([torch.ones(8)]).wait()
    return NetworkSamples(
        collectives=tuple(
            CollectiveSample(
                size_bytes=size,
                lanes=count,
                ranks=ranks,
                duration_s=_exact_s(size, count, ranks),
                spread_s=0.0,
                repetitions=5,
            )
            for size, count in pairs
        ),
        contention=(),
    )


def _exact_s(size_bytes: int, lanes: int, ranks: int) -> float:
    """Return the time of simultaneous all-reduces, one of ``size_bytes`` per lane."""
    wire_bytes = size_bytes * 2 * (ranks - 1) / ranks
    return STARTUP_S + wire_bytes / min(FLOW_BYTES_PER_S, LINK_BYTES_PER_S / lanes)
