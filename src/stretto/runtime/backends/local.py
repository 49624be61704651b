"""Lanes through shared memory, between ranks of one host.

`local_lanes` opens them, `local_collectives` executes their collectives.

# Note [What resource means on shared memory]
It means nothing: a collective is limited by the memory, not by connections. Buckets
with different resources use the same lane in the same way.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from stretto.errors import PlanMismatch
from stretto.process_identity import own_identity
from stretto.runtime.backends.base import AbstractBackend
from stretto.runtime.backends.local_collectives import DEVICE_TYPE, NAME
from stretto.runtime.backends.local_lanes import LocalLanes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.backends.base import Need
    from stretto.runtime.ranks import Ranks


@final
class LocalBackend(AbstractBackend):
    """Shared memory: completion is seen on the host."""

    name = NAME
    device_type = DEVICE_TYPE
    completes_on_host = True
    # A thread that waits for a peer must not wake in a finalizing interpreter.
    ends_at_exit = True

    @property
    def kind(self) -> Any:
        """Torch's type: it has none for this."""
        return dist.ProcessGroup.BackendType.CUSTOM

    def check(self, needs: Sequence[Need], ranks: int, device: torch.device) -> None:
        """Require that tensors are on the CPU and that the system shares memory.

        Whether all ranks are on one host is known when lanes are opened.
        """
        del needs, ranks
        if device.type != self.device_type:
            raise PlanMismatch(
                f"{self.name} lanes send tensors on the CPU, but the model is on "
                f"{device.type}: leave lane_backend out."
            )
        if sys.platform != "linux" or not own_identity().kernel:
            raise PlanMismatch(
                "local lanes need Linux, with /proc: leave lane_backend out."
            )

    def lanes(
        self,
        *,
        ranks: Ranks,
        store_for: Callable[[str], Store],
        device: torch.device,
        end_requests: Callable[[], None] | None,
        notes: Store,
    ) -> LocalLanes:
        """Return the lanes of a model."""
        del device, end_requests  # opening polls the store
        return LocalLanes(ranks=ranks, store_for=store_for, notes=notes)

    def collectives_per_slice(self, resource: int | None) -> int:
        """Return 1: see Note [What resource means on shared memory]."""
        del resource
        return 1

    def stream_launch(self, device: torch.device) -> None:
        """Return nothing: the host waits."""
        del device
