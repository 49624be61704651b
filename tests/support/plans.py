"""Plans by hand, for any model that has the named parameters."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

from stretto.schema import Bucket, Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

FORWARD_VARIABLE = "STRETTO_TEST_FORWARD"


def reversed_names(model: nn.Module) -> list[str]:
    """Names of the parameters to train, the last declared first."""
    return [name for name, p in model.named_parameters() if p.requires_grad][::-1]


def plan_of_buckets(
    buckets: Iterable[Bucket],
    *,
    ranks: int = 2,
    lanes: int = 1,
    overlap: str = "backward",
    workload_digest: str = "",
) -> Plan:
    """A plan of these buckets; without a digest it fits any model with the names.

    `FORWARD_VARIABLE` makes a plan that overlaps with backward one that overlaps with
    the next forward, too, in another launch order.
    """
    buckets = tuple(buckets)
    launch: tuple[int, ...] = ()
    if overlap == "backward" and os.environ.get(FORWARD_VARIABLE):
        overlap = "forward"
        launch = tuple(
            random.Random(len(buckets)).sample(range(len(buckets)), len(buckets))
        )
    return Plan(
        planner="test",
        workload_digest=workload_digest,
        ranks=ranks,
        overlap=overlap,
        lanes=lanes,
        buckets=buckets,
        launch=launch,
    )


def plan_in_turn(
    groups: Iterable[Sequence[str]], *, lanes: int = 1, **more: Any
) -> Plan:
    """A bucket per group of names, on the lanes in turn.

    ``ranks``, ``overlap`` and ``workload_digest`` are the plan's; every other value is
    one of each bucket, in float32 unless ``wire_dtype`` says otherwise.
    """
    own = {
        key: more.pop(key)
        for key in ("ranks", "overlap", "workload_digest")
        if key in more
    }
    bucket = {"wire_dtype": "float32"} | more
    return plan_of_buckets(
        (
            Bucket(tensors=tuple(group), lane=i % lanes, **bucket)
            for i, group in enumerate(groups)
        ),
        lanes=lanes,
        **own,
    )
