"""Wait at the interpreter's exit until communication threads are idle.

# Note [Exit while Gloo's threads still work]
A Gloo worker thread reports a collective as finished and drops its own reference to it
afterward. If that is the last reference and a tensor of the collective has a Python
object, the thread needs the interpreter's lock. A finalizing interpreter ends such a
thread with ``pthread_exit``, whose unwinding meets a noexcept destructor: the process
aborts ("terminate called without an active exception") instead of returning its exit
status. It happens with plain PyTorch too (docs/known-issues-of-torch.md). The same
holds for a Python thread that returns from a call that had released the lock.

So before finalization the main thread sleeps, which leaves the lock free, until no
worker has run between two checks. The threads are found by name, and the checks read
their states and context switches in /proc, so this covers every group of the process,
including groups that a program destroyed while something still refers to them. A thread
that waits for a peer sleeps, so a lost peer does not delay the exit.
"""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path

_WORKER = "pt_gloo_runloop"
_LIMIT_S = 5.0
_PAUSE_S = 0.01
_OWN_THREADS_S = 1.0
_UNKNOWN_S = 0.3
"""Length of the pause if there is no /proc."""

_OWN = tuple(
    f"stretto-{name}" for name in ("control", "lane", "failure", "store", "release")
)
"""Names of stretto's daemon threads that call torch, and end by themselves."""

_TASKS = Path("/proc/self/task")


def quiesce(limit_s: float = _LIMIT_S) -> bool:
    """Wait until stretto's threads have ended and Gloo's workers are idle.

    Returns:
        True if they are, False if ``limit_s`` has passed.
    """
    deadline = time.perf_counter() + limit_s
    _join_own(min(deadline, time.perf_counter() + _OWN_THREADS_S))
    return wait_for_workers(max(0.0, deadline - time.perf_counter()))


def wait_for_workers(limit_s: float = _LIMIT_S) -> bool:
    """Wait until Gloo's workers are idle, with the interpreter's lock free.

    Returns:
        True if they are, False if ``limit_s`` has passed.
    """
    if not _TASKS.is_dir():
        time.sleep(min(_UNKNOWN_S, limit_s))
        return True
    deadline = time.perf_counter() + limit_s
    before = _workers()
    while before:
        time.sleep(_PAUSE_S)
        now = _workers()
        if now == before and all(row.startswith("S") for row in now.values()):
            return True
        if time.perf_counter() > deadline:
            return False
        before = now
    return True


def _join_own(deadline: float) -> None:
    """Join stretto's daemon threads, which may be in a call without the lock."""
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith(_OWN):
            thread.join(max(0.0, deadline - time.perf_counter()))


def _workers() -> dict[str, str]:
    """Return each worker's state and number of context switches, by thread id.

    A thread that has run between two checks has switched; one that is about to run is
    not in state S.
    """
    found = {}
    for task in _TASKS.iterdir():
        try:
            if (task / "comm").read_text().strip() != _WORKER:
                continue
            rows = dict(
                line.partition(":")[::2]
                for line in (task / "status").read_text().splitlines()
            )
        except OSError:  # the thread has ended
            continue
        found[task.name] = " ".join(
            rows.get(name, "").strip()
            for name in (
                "State",
                "voluntary_ctxt_switches",
                "nonvoluntary_ctxt_switches",
            )
        )
    return found


# Finalizers run in reverse order of creation: this one runs after those of all engines
# and lanes, and after handlers that a program registers with atexit later.
_at_exit = weakref.finalize(quiesce, quiesce)
