"""First come, first served, with backfill."""

from __future__ import annotations

from typing import ClassVar, final

from stretto.cluster.policies.exclusive import ExclusivePolicy


@final
class FifoPolicy(ExclusivePolicy):
    """Gives a job as many devices as are free, up to its maximum."""

    name: ClassVar[str] = "fifo"
