"""Requests to a running job to measure its layers or change its plan, and its reports.

The process that starts the ranks creates a folder and names it in
`variable_names.PLAN_REQUESTS`. It writes the last request to one file; the job's rank 0
appends its reports to another. Neither waits for the other, and a job that reads no
request loses nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from stretto import variable_names

MEASURE, CHANGE = "measure", "change"
"""Kinds of requests: to report the layers' times, and to follow another plan."""

MEASURED, CHANGED, REFUSED = "measured", "changed", "refused"
"""Kinds of reports: of the layers' times, of a plan that is followed, and of a request
that changes nothing."""

_REQUEST, _REPORTS = "request.json", "reports.jsonl"
_MAX_LINE_BYTES = 1 << 24


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request to a job: to measure steps, or to follow a plan."""

    number: int
    """1, 2, 3, ... in each attempt."""

    kind: str

    steps: int = 0
    """How many steps to measure."""

    plan: str = ""
    """The plan to follow, as the text of its file."""


@final
class RequestFolder:
    """The side that requests."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read_bytes = folder, 0

    def create(self) -> None:
        """Create the folder, for this user alone.

        Raises:
            OSError: it cannot be created.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def write(self, request: PlanRequest) -> None:
        """Replace the last request.

        Raises:
            OSError: it cannot be written, such as on a full disk.
        """
        part = self._folder / f".{_REQUEST}"
        part.write_text(json.dumps(asdict(request)))
        part.replace(self._folder / _REQUEST)

    def reports(self) -> list[dict[str, Any]]:
        """Return the job's reports since the last call, oldest first.

        Each has a ``kind`` and a ``number``; anything else is skipped.
        """
        try:
            with (self._folder / _REPORTS).open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read(_MAX_LINE_BYTES)
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("number"), int):
                    found.append(row)
        return found


@final
class JobReports:
    """The job's side, on rank 0."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._last = 0

    def next(self) -> PlanRequest | None:
        """Return the last request if it is new."""
        try:
            request = PlanRequest(**json.loads((self._folder / _REQUEST).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        if request.number <= self._last:
            return None
        self._last = request.number
        return request

    def add(self, kind: str, number: int, **data: Any) -> None:
        """Append a report; one that cannot be written is dropped."""
        line = json.dumps({"kind": kind, "number": number, **data}) + "\n"
        with contextlib.suppress(OSError):
            path = self._folder / _REPORTS
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)


def reports_of_job() -> JobReports | None:
    """Return where this job reports, or ``None`` if nothing asks for it."""
    folder = os.environ.get(variable_names.PLAN_REQUESTS)
    return JobReports(folder) if folder else None
