"""Init and shutdown, rank and size."""

from __future__ import annotations

import atexit
from dataclasses import dataclass

import jax
import torch

from stretto.errors import SpecError
from stretto.horovod import world
from stretto.horovod.process_sets import global_process_set
from stretto.logs import get_logger
from stretto.runtime.negotiated import Engine
from stretto.runtime.reduction_rounds import Rounds

_log = get_logger(__name__)


@dataclass(slots=True)
class _Joined:
    rounds: Rounds
    engine: Engine
    objects: int = 0
    """Number of operations on objects so far."""


_joined: _Joined | None = None
_last_size: int | None = None


def init() -> None:
    """Join the job's ranks; wait for all of them. A second call does nothing.

    Ranks are found through the variables of torchrun, ``stretto run`` or Horovod's
    launchers. A process without a launcher is a job of one rank. `jax.distributed` is
    not needed.

    Raises:
        SpecError: JAX has several devices in this process, or no CPU backend.
        HorovodInternalError: ranks have different settings, or a rank did not arrive.
    """
    global _joined, _last_size
    if _joined is not None:
        return
    require_one_cpu()
    is_first = not world.is_initialized()
    world.init()
    if is_first:
        torch.set_num_threads(1)  # torch only copies here, beside XLA's threads
    member = world.current().member(global_process_set)
    engine = member.engine
    _joined = _Joined(member.rounds, engine)
    if _last_size not in (None, engine.size):
        # What was traced for another number of ranks has other callbacks, or none.
        jax.clear_caches()
    _last_size = engine.size
    atexit.register(shutdown)


def require_one_cpu() -> None:
    """Require one local CPU device.

    Raises:
        SpecError: there are several devices, or they are not CPUs.
    """
    platform = jax.default_backend()
    if platform != "cpu":
        raise SpecError(
            f"stretto.jax runs on CPUs only, and JAX's default here is {platform}: "
            "set JAX_PLATFORMS=cpu"
        )
    count = jax.local_device_count()
    if count != 1:
        raise SpecError(
            f"stretto.jax needs one device per process, and JAX has {count} here: "
            "start one process per device, without "
            "--xla_force_host_platform_device_count"
        )


def shutdown() -> None:
    """Wait for computations under way, then leave the job; nothing without `init`.

    All ranks should call it; at the end of a process it is called by itself.
    """
    global _joined
    if _joined is None:
        return
    atexit.unregister(shutdown)
    try:
        jax.effects_barrier()
    except Exception as exc:  # noqa: BLE001
        _log.warning("a computation under way at shutdown failed: %s", exc)
    _joined = None
    world.shutdown()


def joined() -> _Joined:
    """Return this process's state between `init` and `shutdown`.

    Raises:
        SpecError: `init` was not called.
    """
    if _joined is None or not world.is_initialized():
        raise SpecError("stretto.jax is not initialized: call stretto.jax.init() first")
    return _joined


def is_initialized() -> bool:
    """Return whether `init` was called without a later `shutdown`."""
    return _joined is not None


def rank() -> int:
    """Return this process's rank.

    Raises:
        SpecError: `init` was not called. The functions below raise it too.
    """
    return joined().engine.rank


def size() -> int:
    """Return the number of ranks."""
    return joined().engine.size


def local_rank() -> int:
    """Return this process's rank on its host."""
    joined()
    return world.local_rank()


def local_size() -> int:
    """Return the number of ranks on this host."""
    joined()
    return world.local_size()


def shard(n: int) -> range:
    """Return this rank's indices out of ``n`` samples, an equal part for each rank.

    Raises:
        SpecError: ``n`` is not a multiple of the number of ranks; an average of ranks
            would then weight samples unequally.
    """
    joined()
    return world.shard(n)
