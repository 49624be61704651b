"""Ranks of foregrounds whose devices are idle long enough for backgrounds."""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.cluster.devices import Device
    from stretto.cluster.views import JobsView, JobView, Speed

NEVER_USED = 1.0 - 1e-9
"""A rank with at least this idle ratio computes nothing: its device is given back."""

_MAX_KEPT = 4096


class Offer(NamedTuple):
    """A device beside a foreground's rank."""

    rate: float
    """A background's rate there, over its rate alone."""

    job: JobView
    device: Device


@final
class Offers:
    """Ranks by the rate that a background has beside them, best first.

    Rank 0 is never offered if it computes: it is the busiest. Without a measured pair
    of jobs, only ranks that a plan never uses are offered.
    """

    def __init__(self, min_rate: float) -> None:
        """Offer no rank with a lower rate."""
        self._min_rate = min_rate
        # Rates of a speed never change; the speed is kept so that its id stays its own.
        self._known: dict[int, tuple[Speed, tuple[tuple[float, int], ...]]] = {}

    def by_rank(self, speed: Speed) -> tuple[tuple[float, int], ...]:
        """Return the rates and ranks offered, best first, upper ranks first."""
        known = self._known.get(id(speed))
        if known is None:
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            rates = ((self._rate(speed, rank), rank) for rank in range(speed.gpus))
            rows = sorted((r for r in rates if r[0] >= self._min_rate), reverse=True)
            known = self._known[id(speed)] = (speed, tuple(rows))
        return known[1]

    def rate(self, job: JobView, speed: Speed | None, rank: int) -> float:
        """Return the rate offered beside a rank of a job; 0 if it is not offered."""
        if speed is None or not job.allows_background or rank >= speed.gpus:
            return 0.0
        rate = self._rate(speed, rank)
        return rate if rate >= self._min_rate and _permits(job, speed, rate) else 0.0

    @staticmethod
    def _rate(speed: Speed, rank: int) -> float:
        if rank < len(speed.idle_ratios) and speed.idle_ratios[rank] >= NEVER_USED:
            return 1.0
        if rank == 0 or rank >= len(speed.background):
            return 0.0
        return speed.background[rank]

    def best(self, jobs: JobsView, minimum: float = 0.0) -> Iterator[Offer]:
        """Yield offers by descending rate, down to ``minimum``."""
        heads = []
        for groups in jobs.hosting.values():
            for beside, group in groups.items():
                speed = next(iter(group.values())).speed
                rows = [
                    (rate, rank)
                    for rate, rank in (() if speed is None else self.by_rank(speed))
                    if rate >= minimum and not beside >> rank & 1
                ]
                if rows:
                    first = next(iter(group.values())).number
                    heads.append((-rows[0][0], first, 0, rows, group))
        heapify(heads)
        while heads:
            _, first, at, rows, group = heads[0]
            rate, rank = rows[at]
            for job in group.values():
                if _permits(job, job.speed, rate):
                    yield Offer(rate, job, job.devices[rank])
            if at + 1 < len(rows):
                heapreplace(heads, (-rows[at + 1][0], first, at + 1, rows, group))
            else:
                heappop(heads)

    def num_offered(self, jobs: JobsView) -> int:
        """Return how many devices foregrounds offer at most."""
        total = 0
        for groups in jobs.hosting.values():
            for beside, group in groups.items():
                speed = next(iter(group.values())).speed
                if speed is not None:
                    rows = self.by_rank(speed)
                    free = sum(not beside >> rank & 1 for _, rank in rows)
                    total += free * len(group)
        return total

    def for_gang(self, jobs: JobsView, need: int, taken: set[Device]) -> list[Offer]:
        """Return the ranks of one foreground with the highest sum of rates.

        Windows of upper ranks coincide, because widths nest, so a gang is on the
        highest ranks of one foreground. Empty if no foreground offers enough.
        """
        found: list[Offer] = []
        highest = (0.0, 0)
        for groups in jobs.hosting.values():
            for group in groups.values():
                some = self._of_group(group, need, taken)
                if some:
                    total = sum(offer.rate for offer in some)
                    if (total, -some[0].job.number) > highest or not found:
                        found, highest = some, (total, -some[0].job.number)
        return found

    def _of_group(
        self, group: dict[str, JobView], need: int, taken: set[Device]
    ) -> list[Offer]:
        """Return enough offers of the first job of a group that has them, or none."""
        for job in group.values():
            some = self._of_job(job, need, taken)
            if len(some) == need:
                return some
            if not taken.intersection(job.devices) and _permits(job, job.speed, 0.0):
                break  # the others of the group offer the same
        return []

    def _of_job(self, job: JobView, need: int, taken: set[Device]) -> list[Offer]:
        found: list[Offer] = []
        for rate, rank in () if job.speed is None else self.by_rank(job.speed):
            device = job.devices[rank]
            free = not job.beside >> rank & 1 and device not in taken
            if free and _permits(job, job.speed, rate):
                found.append(Offer(rate, job, device))
                if len(found) == need:
                    break
        return found


def _permits(job: JobView, speed: Speed | None, rate: float) -> bool:
    """Return whether the loss is within a job's limit; unused ranks cost nothing."""
    if speed is None:
        return False
    return rate >= NEVER_USED or speed.loss <= job.spec.background.max_loss
