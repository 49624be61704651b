"""The reductions of a process: one round at a time, numbered.

# Note [Rounds]
A framework's graph may run calls at the same time where they don't depend on each
other, and in an order of its own. So ranks could pair gradients of different calls.
Therefore a call's first and last callback, `begin` and `wait`, run in program order,
across executions too, so all ranks begin the same round: these are JAX's ordered
effects and TensorFlow's stateful operations. Only `submit` may run whenever a gradient
is ready. Every callback gets the round's ticket; a stale one raises. As `begin` runs in
one order on all ranks, ranks register a new set of gradients there, however often each
rank traced it.

A round that is open when the next one begins was cut short by an error. It is
abandoned, so that the other ranks' `wait` raises and no rank pairs its gradients with
later ones.

Frameworks order the effects of each thread of the program apart. Two threads' rounds
are noticed only if one begins while the other is open; if ranks' threads take turns in
different orders, ranks pair different calls. The callbacks run in the framework's own
threads, so they can't know which thread of the program dispatched them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from stretto.errors import SpecError, StrettoError
from stretto.logs import get_logger
from stretto.runtime.exchange import ArrayRow, Exchange
from stretto.runtime.negotiated import CollectiveKind, Op, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from stretto.runtime.negotiated import Engine

_log = get_logger(__name__)

SEQUENCE = "gradients"
"""Operations that all ranks do in one order, one by one; see Note [Sequences]."""

_TICKETS = 2**20
"""Tickets travel as float32, which counts exactly up to 2 ** 24."""


@dataclass(frozen=True, slots=True)
class RoundRows:
    """The arrays that a round reduces: ranks begin rounds of equal rows together."""

    rows: tuple[ArrayRow, ...]

    op: Op

    flags: tuple[int, ...] = ()
    """Rows that must be zero on all ranks: they say that a gradient can't be right."""

    prescale: float = 1.0

    postscale: float = 1.0


@final
class Rounds:
    """The rounds of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._exchanges: dict[RoundRows, Exchange] = {}
        self._lock = threading.Lock()
        self._last = 0
        self._open: tuple[int, Exchange, RoundRows] | None = None
        self._ended: dict[int, tuple[Exchange, list[np.ndarray[Any, Any]]]] = {}

    def begin(self, what: RoundRows) -> int:
        """Begin the next round and return its ticket; wait for ranks once per `what`.

        Raises:
            RankDisagreement: another rank begins a round of other rows, or is at
                another place.
            CommTimeout: a rank is lost.
        """
        self._abandon()
        exchange = self._exchanges.get(what)
        if exchange is None:
            name = f"gradients {len(self._exchanges)}"
            exchange = Exchange(
                self._engine,
                name,
                what.rows,
                op=what.op,
                prescale=what.prescale,
                postscale=what.postscale,
                sequence=SEQUENCE,
            )
            self._exchanges[what] = exchange
        with self._lock:
            self._last = self._last % _TICKETS + 1
            self._open = (self._last, exchange, what)
            return self._last

    def _abandon(self) -> None:
        with self._lock:
            cut, self._open = self._open, None
        if cut is None:
            return
        ticket, exchange, _ = cut
        _log.warning(
            "reduction %d was not finished before the next one began: an error ended "
            "the computation, or two threads reduce gradients at once. All ranks drop "
            "its results.",
            ticket,
        )
        exchange.abandon()

    def pause(self, name: str) -> None:
        """Wait until all ranks are at this place, between rounds.

        Args:
            name: The place, for the message of ranks that are at another one.

        Raises:
            RankDisagreement: another rank begins a round, or is at another place.
            CommTimeout: a rank is lost.
        """
        self._abandon()
        place = Request(name=name, kind=CollectiveKind.BARRIER, sequence=SEQUENCE)
        self._engine.submit(place).wait()

    def _opened(self, ticket: int) -> tuple[Exchange, RoundRows]:
        with self._lock:
            if self._open is None or self._open[0] != ticket:
                raise StrettoError(
                    f"reduction {ticket} has ended: an error in another computation "
                    "ended it, or two threads reduce gradients at once. Call "
                    "functions that reduce gradients from one thread."
                )
            return self._open[1:]

    def submit(self, ticket: int, index: int, array: np.ndarray[Any, Any]) -> None:
        """Copy one gradient of the open round and send it; never wait.

        Raises:
            StrettoError: the round isn't open, or as `Exchange.submit`.
        """
        self._opened(ticket)[0].submit(index, array)

    def wait(self, ticket: int) -> None:
        """End the open round: wait until all ranks have its results.

        Raises:
            RankDisagreement: another rank is at a round of other rows, or elsewhere.
            StrettoError: the round isn't open, or as `Exchange.wait`.
            SpecError: a flag is set on a rank.
        """
        exchange, what = self._opened(ticket)
        try:
            arrays = exchange.wait()
        finally:
            if not exchange.begun:
                with self._lock:
                    self._open = None
        for flag in what.flags:
            if arrays[flag] != 0:
                raise SpecError(
                    f"on some rank the gradient of {what.rows[flag].name} of the scan "
                    "is not zero: parameters that scanned= names may be used in the "
                    "scan's body only, after in_backward"
                )
        with self._lock:
            self._ended[ticket] = (exchange, arrays)

    def take(
        self,
        ticket: int,
        outputs: Sequence[np.ndarray[Any, Any]],
        rows: Sequence[slice],
    ) -> None:
        """Copy an ended round's results into outputs; later rounds may be open.

        An output gets the values of its rows, one after the other.
        """
        with self._lock:
            exchange, arrays = self._ended.pop(ticket)
        for output, part in zip(outputs, rows, strict=True):
            found = arrays[part]
            if len(found) == 1 and found[0].shape == output.shape:
                output[...] = found[0]
            else:
                for k, array in enumerate(found):
                    output[k] = array
        exchange.recycle(arrays)

    def results(self, ticket: int) -> list[np.ndarray[Any, Any]]:
        """Return an ended round's results; their memory is the caller's."""
        with self._lock:
            _, arrays = self._ended.pop(ticket)
        return arrays
