"""Fork ranks from this process, which has imported torch: a start costs little.

A forked rank leaves `main` through the exception `Forked` and runs at the top of the
script, so that it ends as any program does: through the interpreter's finalization.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

IMPORTED_FIRST = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.optim",
    "scipy.optimize",
    "stretto",
    "stretto.burst",
    "stretto.tune",
    "stretto.horovod.torch",
)


class Forked(BaseException):
    """Carries a forked rank's work to the top of its script."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work = work


def prepare() -> None:
    """Import what ranks need, while this process has one thread."""
    for module in IMPORTED_FIRST:
        importlib.import_module(module)
    gc.freeze()


def start(
    work: Callable[..., None],
    size: int,
    port: int,
    logs: list[Path],
    *arguments: Any,
    **environment: str,
) -> list[int]:
    """Fork ``size`` ranks that call ``work(rank, size, ...)``; return their pids."""
    sys.stdout.flush()
    pids = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                GLOO_SOCKET_IFNAME="lo",
                **environment,
            )
            log = os.open(logs[rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            raise Forked(lambda rank=rank: work(rank, size, *arguments))
        pids.append(pid)
    return pids


def wait(
    pids: list[int],
    limit_s: float,
    tick: Callable[[], None] = lambda: None,
    ignore: int | None = None,
) -> dict[int, tuple[int, float]]:
    """Wait for all ranks but ``ignore``; kill those that are left after ``limit_s``.

    Returns:
        Each rank's exit status, negative for a signal, and when it ended
        (``perf_counter``); a rank that had to be killed is missing.
    """
    found: dict[int, tuple[int, float]] = {}
    left = dict(enumerate(pids))
    deadline = time.perf_counter() + limit_s
    while left.keys() - {ignore} and time.perf_counter() < deadline:
        for rank, pid in list(left.items()):
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                found[rank] = os.waitstatus_to_exitcode(status), time.perf_counter()
                del left[rank]
        tick()
        time.sleep(0.005)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def run_as_script(main: Callable[[], None]) -> None:
    """Call ``main``, or in a forked rank the rank's work."""
    try:
        main()
    except Forked as forked:
        work = forked.work
    else:
        return
    work()
