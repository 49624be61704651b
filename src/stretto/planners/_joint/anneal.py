"""Simulated annealing from the best draft found by hill climbing.

Climbing accepts only faster drafts and changes one bucket at a time. Where buckets
differ in resource and algorithm, better plans are often two changes away. The schedule
is short and starts at a low temperature, because the draft is good already. The seed is
fixed, so the same input gives the same plan. S. Kirkpatrick, C. D. Gelatt, M. P.
Vecchi: Optimization by Simulated Annealing, Science 220 (1983).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.planners._joint.moves import (
    merged,
    split,
    turned,
    with_algorithm,
    with_end,
    with_resource,
    with_sending,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from stretto.planners._joint.space import JointSpace
    from stretto.planners.base import Draft

HOT, COLD = 2e-3, 1e-6
"""First and last temperature, as a share of the step time."""


class Neighbors:
    """Random changes of a draft within the open dimensions."""

    def __init__(
        self,
        rng: random.Random,
        space: JointSpace,
        between: Callable[[int, int], tuple[int, ...]],
        dtype_starts: tuple[int, ...],
    ) -> None:
        """Initialize; ``between(begin, end)`` gives the cuts between two tensors."""
        self._rng = rng
        self._space = space
        self._between = between
        self._dtype_starts = dtype_starts
        self._moves: list[Callable[[Draft, int], Draft | None]] = []
        if space.fusion:
            self._moves += [self._move_end, self._move_end, self._split, self._merge]
        if space.max_lanes > 1:
            self._moves += [self._send, self._turn, self._change_lanes]
        if len(space.resources) > 1:
            self._moves.append(self._change_resource)
        if len(space.algorithms) > 1:
            self._moves.append(self._change_algorithm)

    def of(self, draft: Draft) -> Draft | None:
        """Return a changed draft, or None if the drawn change is impossible."""
        if not self._moves:  # one kind, one lane, fixed buckets
            return None
        move = self._rng.choice(self._moves)
        return move(draft, self._rng.randrange(len(draft.ends)))

    def _move_end(self, draft: Draft, bucket: int) -> Draft | None:
        if bucket + 1 == len(draft.ends):
            return None
        begin = draft.ends[bucket - 1] if bucket else 0
        end = draft.ends[bucket]
        earlier = self._rng.random() < 0.5
        if earlier:
            cuts = self._between(begin, end)[::-1]
        else:
            cuts = self._between(end, draft.ends[bucket + 1])
        if not cuts or self._dtype_starts[end] == end:
            return None
        far = int(len(cuts) ** self._rng.random())
        return with_end(draft, bucket, cuts[min(far, len(cuts)) - 1])

    def _split(self, draft: Draft, bucket: int) -> Draft | None:
        begin = draft.ends[bucket - 1] if bucket else 0
        cuts = self._between(begin, draft.ends[bucket])
        if not cuts:
            return None
        lane = self._rng.randrange(draft.lanes)
        return split(draft, bucket, self._rng.choice(cuts), lane)

    def _merge(self, draft: Draft, bucket: int) -> Draft | None:
        if bucket + 1 == len(draft.ends):
            return None
        end = draft.ends[bucket]
        return None if self._dtype_starts[end] == end else merged(draft, bucket)

    def _send(self, draft: Draft, bucket: int) -> Draft | None:
        slices = draft.slices[bucket]
        if self._space.slices and self._rng.random() < 0.5:
            slices = self._rng.randint(1, draft.lanes)
        return with_sending(draft, bucket, self._rng.randrange(draft.lanes), slices)

    def _turn(self, draft: Draft, bucket: int) -> Draft | None:
        return turned(draft, bucket, self._rng.randrange(draft.lanes))

    def _change_lanes(self, draft: Draft, _bucket: int) -> Draft | None:
        lanes = draft.lanes + self._rng.choice((-1, 1))
        if not 1 <= lanes <= self._space.max_lanes:
            return None
        return replace(
            draft,
            lanes=lanes,
            bucket_lanes=tuple(lane % lanes for lane in draft.bucket_lanes),
            slices=tuple(min(slices, lanes) for slices in draft.slices),
        )

    def _change_resource(self, draft: Draft, bucket: int) -> Draft | None:
        resource = self._rng.choice(self._space.resources)
        for place in self._places(draft, bucket):
            draft = with_resource(draft, place, resource)
        return draft

    def _change_algorithm(self, draft: Draft, bucket: int) -> Draft | None:
        algorithm = self._rng.choice(self._space.algorithms)
        for place in self._places(draft, bucket):
            draft = with_algorithm(draft, place, algorithm)
        return draft

    def _places(self, draft: Draft, bucket: int) -> range:
        """Return the bucket alone, or it and all later ones."""
        alone = self._rng.random() < 2 / 3
        return range(bucket, bucket + 1 if alone else len(draft.ends))


def annealed(
    draft: Draft,
    neighbors: Neighbors,
    value_s: Callable[[Draft], float],
    rng: random.Random,
    evaluations: int,
    *,
    may_continue: Callable[[], bool],
) -> None:
    """Evaluate random changes of a draft; ``value_s`` keeps the best.

    Ends after ``evaluations`` changes, or as soon as ``may_continue()`` is false.
    """
    here, here_s = draft, value_s(draft)
    best_s = here_s
    for i in range(evaluations):
        if not may_continue():
            return
        other = neighbors.of(here)
        if other is None:
            continue
        other_s = value_s(other)
        heat = HOT * (COLD / HOT) ** (i / evaluations)
        worse = (other_s - here_s) / best_s
        if worse <= 0 or rng.random() < math.exp(-worse / heat):
            here, here_s = other, other_s
            best_s = min(best_s, here_s)
