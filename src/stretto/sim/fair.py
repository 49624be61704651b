"""Max-min fair rates of flows over links."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def max_min_rates(
    links: Sequence[Sequence[int]],
    caps_bytes_per_s: Sequence[float],
    capacities_bytes_per_s: Sequence[float],
) -> list[float]:
    """Return rates none of which can rise without lowering one that is no larger.

    Progressive filling (Bertsekas and Gallager, Data Networks, 1992, 6.5.2): all rates
    rise together until a flow reaches its cap or a link is full, whose flows then stay
    constant. O(F (F + L)) for F flows and L links.

    Args:
        links: the links that each flow crosses.
        caps_bytes_per_s: of each flow.
        capacities_bytes_per_s: of each link.
    """
    rates = [0.0] * len(links)
    left = list(capacities_bytes_per_s)
    rising = set(range(len(links)))
    while rising:
        counts = [0] * len(left)
        for flow in rising:
            for link in links[flow]:
                counts[link] += 1
        more = min(
            [caps_bytes_per_s[flow] - rates[flow] for flow in rising]
            + [left[k] / count for k, count in enumerate(counts) if count]
        )
        for flow in rising:
            rates[flow] += more
        left = [room - more * n for room, n in zip(left, counts, strict=True)]
        full = {
            k
            for k, room in enumerate(left)
            if counts[k] and room <= 1e-9 * capacities_bytes_per_s[k]
        }
        rising = {
            flow
            for flow in rising
            if rates[flow] < caps_bytes_per_s[flow] * (1 - 1e-9)
            and not full.intersection(links[flow])
        }
    return rates
