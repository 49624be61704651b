"""End attempts on this host from outside, by the locks that their processes hold."""

from __future__ import annotations

import itertools
import signal
import time
from typing import TYPE_CHECKING

from stretto.cluster import processes
from stretto.cluster.loop import now_s
from stretto.cluster.part_spec import END_FILE, LOCK_FILE
from stretto.cluster.roles import continue_process, kill, send
from stretto.process_identity import children_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

_RANKS_S = 7.0
"""Until the ranks of a supervisor have ended that got a SIGTERM: it kills them after
5 s."""

_GUARDS_S = 5.0
"""Until guards have ended what their supervisors have left."""

_LOOK_S = 0.05


def supervisors_among(holders: Collection[int]) -> set[int]:
    """Return the supervisors among the processes that hold an attempt's lock.

    A supervisor is the child of its guard, which holds the lock, too. One whose guard
    was killed is not among them.
    """
    return _children(holders).intersection(holders)


def _children(parents: Iterable[int]) -> set[int]:
    return set(itertools.chain(*map(children_of, parents)))


def end_attempts(root: Path) -> list[str]:
    """End all attempts below a folder in which no end can be written.

    Ranks get the time that they have when their host shuts down.

    Returns:
        The names of the attempts whose ends could not be written.
    """
    holders = processes.lock_holders(root, LOCK_FILE)
    for pid in itertools.chain(*holders.values()):  # guards ignore it
        send(pid, signal.SIGTERM)
        continue_process(pid)
    deadline_s = now_s() + _RANKS_S
    while _children(itertools.chain(*holders.values())).difference(*holders.values()):
        if now_s() > deadline_s:
            break
        time.sleep(_LOOK_S)
    # One that has written its attempt's end ends by itself.
    lost = [lock for lock in holders if not (lock.parent / END_FILE).is_file()]
    for lock in lost:
        for pid in supervisors_among(holders[lock]):
            kill(pid)
    deadline_s = now_s() + _GUARDS_S
    while left := set(lost).intersection(processes.lock_holders(root, LOCK_FILE)):
        if now_s() > deadline_s:
            for pid in itertools.chain(*(holders[lock] for lock in left)):
                kill(pid)
            break
        time.sleep(_LOOK_S)
    return sorted(lock.parent.name for lock in lost)
