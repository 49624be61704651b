"""Max-min fair rates, by which flows share links everywhere in `stretto.sim`.

Called by the event engine, the step model's network, and the simulator of bursts.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_INF = float("inf")


def max_min_rates(
    caps_bytes_per_s: Sequence[float],
    flow_links: Sequence[Sequence[int]],
    capacities_bytes_per_s: Sequence[float],
    *,
    numbers: Sequence[int] | None = None,
) -> list[float]:
    """Return max-min fair rates under a cap per flow and a capacity per link.

    Progressive filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2):
    all rates rise together; a flow stops at its cap or when one of its links is full.
    O(F (F + L)) for F flows and L links.

    Args:
        caps_bytes_per_s: of each flow; a flow without links gets its cap.
        flow_links: indices of the links that each flow crosses.
        capacities_bytes_per_s: of each link.
        numbers: how many equal flows each entry represents; ``None``: one.
    """
    caps = caps_bytes_per_s
    rates = [0.0] * len(caps)
    numbers = numbers or [1] * len(caps)
    left = list(capacities_bytes_per_s)
    count = [0] * len(left)
    for crossed, number in zip(flow_links, numbers, strict=True):
        for link in crossed:
            count[link] += number
    rising = sorted(range(len(caps)), key=caps.__getitem__)
    while rising:
        share, tight = min(
            ((left[link] / num, link) for link, num in enumerate(count) if num),
            default=(_INF, -1),
        )
        # Flows that stop at caps below the share leave the others no less than that.
        stopped = rising[: bisect_right(rising, share, key=caps.__getitem__)]
        for i in stopped:
            rates[i] = caps[i]
        if not stopped:
            stopped = [i for i in rising if tight in flow_links[i]]
            for i in stopped:
                rates[i] = share
        for i in stopped:
            for link in flow_links[i]:
                left[link] = max(0.0, left[link] - rates[i] * numbers[i])
                count[link] -= numbers[i]
        gone = set(stopped)
        rising = [i for i in rising if i not in gone]
    return rates
