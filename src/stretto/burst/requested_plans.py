"""Follow the plans that a cluster requests while a model trains.

Rank 0 reads the requests of `stretto.plan_requests`; the ranks meet about once in
`_INTERVAL_S`, after a number of calls that rank 0 has announced at the meeting before.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

from stretto.errors import CommTimeout, StrettoError
from stretto.logs import get_logger
from stretto.plan_requests import (
    CHANGE,
    CHANGED,
    MEASURE,
    MEASURED,
    REFUSED,
    JobReports,
    PlanRequest,
    reports_of_job,
)
from stretto.schema import codec
from stretto.schema.burst import BurstPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.burst.parts import Parts

_log = get_logger(__name__)

_INTERVAL_S = 1.0
_FIRST_CALLS, _MAX_CALLS = 5, 10_000


@final
class RequestedPlans:
    """Requests to one model. All calls of `follow` are collective.

    Args:
        parts: of the model.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._reports: JobReports | None = reports_of_job()
        self._left, self._interval = _FIRST_CALLS, _FIRST_CALLS
        self._began_s = perf_counter()
        self._measuring = 0
        """Number of the request whose steps are measured; 0: none."""

    def follow(self, change: Callable[[BurstPlan], None]) -> bool:
        """Look for a request, if it is time; return whether the plan has changed.

        Args:
            change: follows another plan.

        Raises:
            CommTimeout: a rank was lost.
        """
        if self._reports is None:
            return False
        self._left -= 1
        if self._left > 0:
            return False
        rank = self._parts.ranks.rank
        mine: dict[str, Any] = {}
        if self._measuring:
            mine["timings"] = [asdict(each) for each in self._parts.timings.layers()]
        if rank == 0:
            mine |= self._announced()
        purpose = "look for a requested plan"
        texts = self._parts.meeting.gather(purpose, json.dumps(mine))
        rows: list[dict[str, Any]] = [json.loads(text) for text in texts]
        self._left = self._interval = int(rows[0]["calls"])
        self._began_s = perf_counter()
        if self._measuring:
            number, self._measuring = self._measuring, 0
            timings = [each for row in rows for each in row.get("timings", ())]
            if rank == 0:
                kind = MEASURED if timings else REFUSED
                self._reports.add(kind, number, timings=timings)
        if rows[0]["request"] is None:
            return False
        request = PlanRequest(**rows[0]["request"])
        if request.kind == MEASURE:
            self._measure(request)
        elif request.kind == CHANGE:
            return self._change(request, change)
        return False

    def _announced(self) -> dict[str, Any]:
        """Return what rank 0 says: a request, and the calls until the next meeting."""
        assert self._reports is not None  # noqa: S101
        call_s = (perf_counter() - self._began_s) / self._interval
        calls = min(_MAX_CALLS, max(1, round(_INTERVAL_S / max(call_s, 1e-9))))
        request = self._reports.next()
        return {
            "calls": calls,
            "request": None if request is None else asdict(request),
        }

    def _measure(self, request: PlanRequest) -> None:
        if self._parts.timings.is_on:  # the program measures steps itself
            self._report(REFUSED, request.number, why="the program measures steps")
            return
        self._parts.timings.start(request.steps)
        self._measuring = request.number
        self._left = self._interval = request.steps + 1

    def _change(
        self, request: PlanRequest, change: Callable[[BurstPlan], None]
    ) -> bool:
        began_s = perf_counter()
        try:
            plan = codec.decode(request.plan.encode(), BurstPlan, source="request")
            change(plan)
        except StrettoError as exc:
            failed = self._parts.rank_groups.failures.error is not None
            if isinstance(exc, CommTimeout) or failed:
                raise
            # Every rank has kept its plan.
            if self._parts.ranks.rank == 0:
                _log.warning("the plan that the cluster requests is not used: %s", exc)
            self._report(REFUSED, request.number, why=str(exc))
            return False
        took_s = perf_counter() - began_s
        self._report(CHANGED, request.number, took_s=took_s)
        self._began_s = perf_counter()
        return True

    def _report(self, kind: str, number: int, **data: Any) -> None:
        if self._reports is not None and self._parts.ranks.rank == 0:
            self._reports.add(kind, number, **data)
