"""Fixtures for all tests; no test reads what earlier runs left on this machine.

``make test`` sets ``STRETTO_TEST_TURN`` to a number made of the commit. Then tests
marked ``repeat`` do not run. Of those marked ``turns(n)``, in a file of `TAKE_TURNS` or
a folder of `FOLDERS_TURNS`, every n-th of a file runs; the number decides which, so
that some n commits run all of them. Without the variable, and with
``STRETTO_TEST_ALL=1 make test``, all tests run.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# A busy machine is not a defect: no example has a time limit of its own.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

os.environ["STRETTO_PLAN_CACHE"] = "off"

TAKE_TURNS = {
    "dist/test_auto.py": 4,
    "dist/test_burst_by_hand.py": 3,
    "dist/test_burst_faults.py": 4,
    "dist/test_burst_features.py": 3,
    "dist/test_burst_outputs.py": 3,
    "dist/test_burst_waiting.py": 3,
    "dist/test_dtypes.py": 3,
    "dist/test_elastic.py": 3,
    "dist/test_example_backend.py": 3,
    "dist/test_exit.py": 4,
    "dist/test_faults_replanning.py": 3,
    "dist/test_forward_overlap.py": 4,
    "dist/test_frameworks.py": 3,
    "dist/test_horovod_elastic.py": 3,
    "dist/test_horovod_ops_start.py": 3,
    "unit/background/test_two_processes.py": 2,
    "unit/burst/tracing/test_cache_places.py": 6,
    "unit/burst/tracing/test_caches.py": 6,
    "unit/burst/test_capture.py": 4,
    "unit/burst/tracing/test_inner_calls.py": 2,
    "unit/burst/test_later_captures.py": 2,
    "unit/burst/tracing/test_reads.py": 2,
    "unit/burst/checks/test_recheck.py": 2,
    "unit/burst/checks/test_later_of_all.py": 2,
    "unit/cli/test_run.py": 4,
    "unit/planners/test_joint.py": 3,
    "wheel/test_wheel.py": 3,
}
"""Files with other turns than their folder: how many commits run all their tests."""

FOLDERS_TURNS = {
    "convert/": 3,
    "dist/": 5,
    "lab/": 3,
    "unit/burst/": 3,
    "unit/cli/": 2,
    "unit/cluster/": 2,
    "unit/planners/": 2,
    "unit/sim/": 2,
}
"""The number of turns of the other files of folders."""


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Choose this turn's tests; begin with those that take minutes."""
    turn = os.environ.get("STRETTO_TEST_TURN")
    if turn:
        kept = this_turn(items, int(turn))
        left_out = set(items) - set(kept)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = kept
    items.sort(key=lambda item: item.path.parent.name != "conformance")


def this_turn(items: list[pytest.Item], turn: int) -> list[pytest.Item]:
    """Return the tests that run in this turn, in their order."""
    kept = []
    seen: Counter[tuple[str, int]] = Counter()
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        if file in TAKE_TURNS:
            item.add_marker(pytest.mark.turns(TAKE_TURNS[file]), append=False)
        mark = item.get_closest_marker("turns")
        if item.get_closest_marker("repeat"):
            continue
        if mark is not None:
            (every,) = mark.args
        else:
            every = next((n for f, n in FOLDERS_TURNS.items() if file.startswith(f)), 1)
        group = (str(item.path), every)
        seen[group] += 1
        # Files begin at different tests, so that no turn has most of the files' first.
        if (seen[group] + turn + zlib.crc32(file.encode())) % every:
            continue
        kept.append(item)
    return kept


@pytest.fixture(autouse=True)
def _variables_are_restored() -> Iterator[None]:
    """Commands called in this process set variables for the ranks they start."""
    before = {k: v for k, v in os.environ.items() if k.startswith("STRETTO_")}
    yield
    for name in [name for name in os.environ if name.startswith("STRETTO_")]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)
