"""Let a model's ranks meet through the store at the end of a reduced backward.

# Note [Where ranks may wait for each other]
DDP guarantees one thing about the order of operations: the n-th reduced backward takes
place on all ranks. When it ends on one rank, its buckets have been launched on every
rank, so every rank reaches that end, whatever it does between steps. Forwards,
micro-steps without reduction, evaluations and the user's own collectives may differ. So
tuning waits for other ranks only there, and never in a process group of the user.

# Note [A rank that fails]
Every rank takes part in the beginning of a meeting, including a rank where tuning has
failed. The rest of the meeting may be cut short: a rank that fails after the beginning
writes its failure in place of its next message, so that no rank waits for it. Not every
rank reads that message, so nothing is decided there; at the next beginning all ranks
learn of the failure and end tuning together. A rank that is late is treated the same
way: the store keeps the first answer to a meeting, and every later rank reads that
answer.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, final

from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import StrettoError
from stretto.runtime.presence import Wait
from stretto.runtime.store import loss_message, own_connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.runtime.ranks import Ranks

BEGIN_S = 30.0
"""A rank that begins a meeting this late ends tuning; training continues."""

WORK_S = 120.0
"""How long ranks wait for each other between the beginning and the end of a meeting;
rank 0 may plan during this time."""

OF_TIMEOUT = 0.5
"""Each wait is limited to this share of the group's timeout, which restarts with the
collective that finds the missing rank."""

ANSWER = 1.5
"""Ranks wait this many times as long for rank 0, which itself waits for the others."""

_MIN_PAUSE_S, _MAX_PAUSE_S, _PAUSE_SHARE = 0.0002, 0.05, 0.03
"""Pause between two requests for keys not yet written. It grows with the time waited,
which keeps both the delay and the number of requests small."""

_LOOK_S = 0.5
"""How often a waiting rank checks that the other processes are still running."""


class Stopped(StrettoError):
    """Tuning can't continue, and every rank at this meeting knows."""


@final
class TuningMeeting:
    """Collective helpers; every rank must call them in the same order.

    Messages are JSON; no data from another rank is executed.
    """

    def __init__(self, ranks: Ranks, *, serial: int) -> None:
        """Prepare; ``serial`` identifies the model in its group, equal on all ranks."""
        self._ranks = ranks
        self.rank = ranks.rank
        self.size = ranks.size
        store = ranks.store
        if ranks.size > 1:
            limit_s = ANSWER * min(WORK_S, OF_TIMEOUT * ranks.timeout_s)
            store = own_connection(ranks, limit_s=limit_s)
        self._store: Any = PrefixStore(f"tune/{serial}", store)
        self._step = 0
        self._number = 0
        self._written: list[str] = []
        self._lost: str | None = None

    def begin(
        self,
        step: int,
        message: Any,
        answer: Callable[[list[Any]], Any],
        *,
        failed: str | None = None,
    ) -> Any:
        """Begin the meeting at the end of reduced backward ``step``.

        Returns:
            The result of rank 0's ``answer`` for all ranks' messages.

        Raises:
            Stopped: on every rank, when a rank failed or was late.
        """
        self._step, self._number = step, 0
        written, self._written = self._written, []
        found = self._meet(message, answer, BEGIN_S, failed)
        for key in written:  # every rank has arrived, so every rank has read these
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(key)
        return found

    def meet(self, message: Any, answer: Callable[[list[Any]], Any]) -> Any:
        """Have rank 0 answer all ranks' messages, after the beginning.

        Raises:
            Stopped: a rank failed or was late; the next meeting ends tuning.
        """
        return self._meet(message, answer, WORK_S, None)

    def meet_or_end(self, message: Any, answer: Callable[[list[Any]], Any]) -> Any:
        """Have rank 0 answer all ranks' messages, where a failure must not wait.

        The store keeps one answer to a meeting, so every rank gets the same. After
        connections were closed, ranks can't take another step as they are.

        Raises:
            Ended: a rank failed or did not arrive; tuning ends here.
        """
        try:
            return self.meet(message, answer)
        except Stopped as exc:
            raise Ended(str(exc)) from exc

    def all_reduce_max(self, *values: float) -> tuple[float, ...]:
        """Return the maximum over all ranks of each value."""

        def largest(rows: list[Any]) -> list[float]:
            return [max(column) for column in zip(*rows, strict=True)]

        return tuple(self.meet(list(values), largest))

    def broadcast_int(self, number: int) -> int:
        """Return rank 0's number."""
        return int(self.broadcast_object(number))

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value, which consists of JSON types and bytes of text."""
        return self.meet(None, lambda _rows: value)

    def agree(self, trouble: Exception | None) -> None:
        """Require that no rank reports an error, after the beginning.

        Raises:
            Refused: on every rank, with the first rank's error.
        """

        def first(rows: list[Any]) -> Any:
            return next(((r, why) for r, why in enumerate(rows) if why), None)

        found = self.meet(None if trouble is None else reason_of(trouble), first)
        if found is not None:
            rank, why = found
            raise Refused(f"{self._ranks.name(rank)}: {why}")

    def fail(self, why: str) -> None:
        """Write a failure where the other ranks may wait for this rank."""
        key = self._next_key()
        if self._lost is not None:
            return
        with contextlib.suppress(RuntimeError):
            if self.rank == 0:
                self._answer(key, {"stopped": why})
            else:
                self._write(f"{key}/{self.rank}", {"failed": why})

    def name(self, rank: int) -> str:
        """Return the name of a rank in messages."""
        return self._ranks.name(rank)

    # One meeting.

    def _meet(
        self,
        message: Any,
        answer: Callable[[list[Any]], Any],
        timeout_s: float,
        failed: str | None,
    ) -> Any:
        key = self._next_key()
        timeout_s = min(timeout_s, OF_TIMEOUT * self._ranks.timeout_s)
        if self._lost is not None:
            raise Stopped(self._lost)
        mine = {"message": message} if failed is None else {"failed": failed}
        try:
            if self.rank == 0:
                found = self._answer(key, self._collect(key, mine, answer, timeout_s))
            else:
                self._write(f"{key}/{self.rank}", mine)
                found = self._wait_for_answer(key, ANSWER * timeout_s)
        except RuntimeError as exc:
            # A late answer would be mistaken for the answer to a later request.
            self._lost = f"the store does not answer: {str(exc).splitlines()[0]}"
            raise Stopped(self._lost) from exc
        if "stopped" in found:
            raise Stopped(found["stopped"])
        return found["answer"]

    def _collect(
        self,
        key: str,
        mine: Any,
        answer: Callable[[list[Any]], Any],
        timeout_s: float,
    ) -> Any:
        keys = [f"{key}/{rank}" for rank in range(1, self.size)]
        missing = self._wait({k: 1 + r for r, k in enumerate(keys)}, timeout_s)
        if missing is not None:
            return {"stopped": missing}
        rows = [mine, *(_loads(value) for value in self._values(keys))]
        for row in rows:
            if "failed" in row:
                return {"stopped": row["failed"]}
        try:
            return {"answer": answer([row["message"] for row in rows])}
        except Exception as exc:  # noqa: BLE001 - the others must know of any error
            judged = isinstance(exc, StrettoError)
            return {
                "stopped": str(exc) if judged else f"{self.name(0)}: {reason_of(exc)}"
            }

    def _wait(self, keys: dict[str, int], timeout_s: float) -> str | None:
        """Wait for the ranks' keys; return which ranks are missing, or ``None``."""
        # Poll instead of waiting in the store: a wait can't be interrupted when a
        # process has exited, and each timeout prints warnings.
        ranks = self._ranks
        watch = Wait(ranks.presence, every_s=_LOOK_S)
        began_s = time.perf_counter()
        while keys and not self._store.check(list(keys)):
            waited_s = time.perf_counter() - began_s
            lost = watch.lost(ranks.names[r] for r in keys.values())
            if lost or waited_s > timeout_s:
                # Check again after the look: an exited rank's key exists by now or
                # never will.
                keys = {k: r for k, r in keys.items() if not self._store.check([k])}
            gone = [r for r in keys.values() if ranks.names[r] in lost]
            if gone:
                return loss_message(ranks, gone, lost)
            if keys and waited_s > timeout_s:
                who = ranks.name_all(list(keys.values()))
                return f"{who} did not arrive within {timeout_s:g} s"
            time.sleep(min(_MAX_PAUSE_S, _MIN_PAUSE_S + _PAUSE_SHARE * waited_s))
        return None

    def _wait_for_answer(self, key: str, timeout_s: float) -> Any:
        name = f"{key}/answer"
        # Rank 0 itself waits for the others before it answers.
        missing = self._wait({name: 0}, timeout_s)
        if missing is not None:
            return self._answer(key, {"stopped": missing})
        return _loads(self._store.get(name))

    def _answer(self, key: str, value: Any) -> Any:
        """Write an answer unless one exists; return the answer that is in effect."""
        name = f"{key}/answer"
        found = self._store.compare_set(name, "", _dumps(value))
        self._written.append(name)
        return _loads(found)

    def _write(self, key: str, value: Any) -> None:
        self._store.set(key, _dumps(value))
        self._written.append(key)

    def _values(self, keys: list[str]) -> list[bytes]:
        if keys and self._store.has_extended_api():
            values: list[bytes] = self._store.multi_get(keys)
            return values
        return [self._store.get(key) for key in keys]

    def _next_key(self) -> str:
        self._number += 1
        return f"{self._step}/{self._number}"


class Ended(Stopped):
    """Tuning ends at this meeting, and every rank gets this from it."""


class Refused(StrettoError):
    """A rank can't apply a plan; every rank keeps its current one."""


def reason_of(exc: BaseException) -> str:
    """Return the first line of an error, with its type where that says more."""
    line = (str(exc) or type(exc).__name__).splitlines()[0]
    return line if isinstance(exc, StrettoError) else f"{type(exc).__name__}: {line}"


def _dumps(value: Any) -> str:
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"text": value.decode()}
    raise TypeError(f"a message can't hold a {type(value).__name__}")


def _loads(data: bytes | str) -> Any:
    return json.loads(data, object_hook=_from_plain)


def _from_plain(value: dict[str, Any]) -> Any:
    return value["text"].encode() if value.keys() == {"text"} else value
