"""Lanes: communicators that carry collectives at the same time.

Collectives on one lane start in launch order and share its one connection to each
peer; lanes run beside each other. A lane is a backend of its own over the ranks of the
model's process group, not a ``dist.new_group``: that asks every process of the job to
take part, takes no Gloo options, and keeps the group until the job ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import PlanMismatch
from stretto.runtime.agreement import timeout_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.runtime.agreement import Ranks

_log = logging.getLogger(__name__)

# Note [Threads per lane]
# Two worker threads per Gloo lane, as PyTorch gives a group of its own. Collectives of
# a lane start in launch order, and the second in line may begin its start-up while the
# first still sends: they share the lane's one connection, so the lane's rate stays what
# it is and only the pause between two collectives goes. Measured, 2 threads against 1,
# time of backward, 10 MB of gradients: 2 ranks, connections paced at 37.5 MB/s: 0.95 to
# 1.02; 4 ranks the same: 0.91 to 1.03; 2 ranks on free loopback: 0.65 to 0.80 on one
# lane, 0.98 to 1.05 on four (medians of ratios within one run, two busy cores).
GLOO_THREADS = 2

_NCCL_OVERRIDES = ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_CGA_CLUSTER_SIZE")


@final
class LanePool:
    """Lanes of one model, opened when a plan first asks for them and kept."""

    def __init__(
        self, ranks: Ranks, *, serial: int, backend: str, device: torch.device
    ) -> None:
        self._ranks = ranks
        self._serial = serial
        self._device = device
        self._open: Callable[[int, int | None], Any] = (
            self._open_nccl if backend == "nccl" else self._open_gloo
        )
        self._lanes: dict[tuple[int, int | None], Any] = {}
        self._sockets: set[tuple[int, str]] = set()

    def lane(self, number: int, resource: int | None = None) -> Any:
        """The backend of a lane; every rank must ask in the same order."""
        key = (number, resource)
        if key not in self._lanes:
            before = _open_sockets()
            self._lanes[key] = self._open(number, resource)
            self._sockets |= _open_sockets() - before
        return self._lanes[key]

    def abort(self) -> None:
        """Ends every connection, so that no peer waits for this rank any longer.

        Gloo has no such call (its ``abort`` does nothing), so the sockets that came
        with the lanes are shut down. Descriptors stay open, for Gloo to close.
        """
        for descriptor, inode in self._sockets & _open_sockets():
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(descriptor)) as connection,
            ):
                connection.getpeername()  # a listener has none and must stay
                connection.shutdown(socket.SHUT_RDWR)
                _log.debug("shut socket %s down", inode)

    def _store(self, number: int, resource: int | None) -> PrefixStore:
        name = f"lanes/{self._serial}/{number}/{resource}"
        return PrefixStore(name, self._ranks.store)

    def _open_gloo(self, number: int, resource: int | None) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001
        options._devices = [_gloo_device(number)]  # noqa: SLF001
        options._threads = GLOO_THREADS  # noqa: SLF001
        options._timeout = timeout_of(self._ranks.timeout_s)  # noqa: SLF001
        return gloo(
            self._store(number, resource), self._ranks.rank, self._ranks.size, options
        )

    def _open_nccl(self, number: int, resource: int | None) -> Any:
        # Not yet run on a GPU.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout_of(self._ranks.timeout_s)  # noqa: SLF001
        if resource is not None:
            for name in _NCCL_OVERRIDES:
                if name in os.environ:
                    raise PlanMismatch(
                        f"the plan sets {resource} CTAs, but {name} is set in the "
                        "environment and overrides it: unset it."
                    )
            # Equal values pin the channel count of the communicator.
            options.config.min_ctas = resource
            options.config.max_ctas = resource
        backend = dist.ProcessGroupNCCL(
            self._store(number, resource), self._ranks.rank, self._ranks.size, options
        )
        backend.eager_connect_single_device(self._device)
        return backend


def _gloo_device(number: int) -> Any:
    """A network device of its own for a lane: its own listener and I/O thread."""
    named = [n for n in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if n]
    if named:
        interface = named[number % len(named)]
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def _open_sockets() -> set[tuple[int, str]]:
    """(descriptor, inode) of this process's sockets; empty where /proc is missing."""
    found = set()
    try:
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(entry)  # noqa: PTH115
                if target.startswith("socket:"):
                    found.add((int(entry.name), target))
    except OSError:
        return set()
    return found
