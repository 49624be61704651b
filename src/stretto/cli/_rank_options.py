"""Options that ``stretto run`` checks once, instead of on each rank.

The checks load torch. A keeper of ``--elastic`` runs as long as its ranks and never
loads torch, so a process of its own, this module, checks for it.
"""

from __future__ import annotations

import subprocess
import sys

from stretto.errors import SpecError, StrettoError

_UNCHECKED = ("auto", "ddp", None)
"""Values of ``--plan`` that name no file; a script may pass plans of its own."""


def check_options(plan: str | None, lane_backend: str | None, overlap: str) -> None:
    """Refuse a plan that no model can be run with, and an unknown backend of lanes.

    Whether the plan fits the script's model is known only on the ranks, which compare
    it. An empty ``overlap`` means the default.

    Raises:
        SpecError: the file is not a plan, or does not fit the overlap; or there is no
            such backend, or its package does not load.
        PlanMismatch: the runtime does not support the plan.
    """
    if plan not in _UNCHECKED:
        _check_plan(plan, overlap)
    if lane_backend is not None:
        _check_lane_backend(lane_backend)


def check_options_apart(
    plan: str | None, lane_backend: str | None, overlap: str
) -> None:
    """Do the same in another process, without loading torch in this one.

    Raises:
        SpecError: an option is refused.
    """
    if plan in _UNCHECKED and lane_backend is None:
        return
    row = [sys.executable, "-m", __name__, plan or "auto", overlap]
    if lane_backend is not None:
        row.append(lane_backend)
    done = subprocess.run(row, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SpecError(done.stderr.strip() or f"{row[2]} failed")


def _check_plan(plan: str, overlap: str) -> None:
    from stretto._api.ddp import BACKWARD, require_overlap
    from stretto.runtime.plan_binding import check_features
    from stretto.schema import Plan

    loaded = Plan.load(plan)
    check_features(loaded)
    require_overlap(loaded, overlap or BACKWARD, automatic=False)


def _check_lane_backend(name: str) -> None:
    from stretto.runtime import backends

    if not backends.supported(name):
        known = ", ".join(backends.names())
        raise SpecError(f"--lane-backend must be one of {known}, got {name!r}")
    backends.get(name)


if __name__ == "__main__":
    try:
        check_options(
            sys.argv[1], sys.argv[3] if len(sys.argv) > 3 else None, sys.argv[2]
        )
    except StrettoError as error:
        sys.exit(str(error))
