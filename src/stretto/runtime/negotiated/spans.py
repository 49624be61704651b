"""Timeline spans of an engine's requests."""

from __future__ import annotations

import abc


class AbstractEngineObserver(abc.ABC):
    """Receives spans, in `time.perf_counter` seconds.

    An implementation must return at once and must not raise; it is called from
    several threads.
    """

    @abc.abstractmethod
    def span(self, track: str, name: str, start_s: float, end_s: float) -> None:
        """Record an activity from ``start_s`` to ``end_s``.

        ``track`` is a request's name, with ``name`` one of ``queued`` (submitted, not
        yet ready on every rank), ``pack``, ``allreduce`` and other operations; or
        ``lane0``, ``lane1``, ... with a unit's requests as ``name``; or ``rounds``
        with ``negotiate``.
        """
