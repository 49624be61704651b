"""The backend of docs/how-to/add-a-backend.md, installed as a package would be."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.testing.backends import CASES, check_case, run_case

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

GUIDE = Path(__file__).parents[2] / "docs/how-to/add-a-backend.md"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the guide's module, and its entry point as the guide has it."""
    text = GUIDE.read_text()
    (module,) = re.findall(
        r"```python\n(\"\"\"Lanes through the store.*?)```", text, re.S
    )
    (section,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    header, line = section.strip().splitlines()
    assert header == '[project.entry-points."stretto.backends"]'
    (tmp_path / "store_backend.py").write_text(module)
    info = tmp_path / "store_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: store-backend\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        f"[stretto.backends]\n{line.replace(chr(34), '')}\n"
    )
    return tmp_path


def rank_of_a_case(rank: int, size: int, folder: str, case: str) -> str:
    sys.path.insert(0, folder)
    run_case(case, backend="store")
    return "done"


@pytest.mark.parametrize("case", CASES)
def test_the_guides_backend_keeps_the_contract(
    ranks: Any, package: Path, case: str
) -> None:
    known = CASES[case]
    dies = known.dies is not None
    found = ranks(
        rank_of_a_case, known.ranks, str(package), case, errors=dies, timeout_s=100
    )
    survivors = [one for rank, one in enumerate(found) if rank != known.dies]
    assert survivors == ["done"] * len(survivors), found


def test_the_suite_starts_ranks_by_itself(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package))
    check_case("a planned model", backend="store")


_BROKEN = """
from stretto.runtime import backends
from store_backend import StoreBackend, StoreLane, StoreLanes

class BrokenLane(StoreLane):
{lane}

class BrokenLanes(StoreLanes):
    def _open(self, number):
        self._opened += 1
        return BrokenLane(number, self._ranks, self._store_for(f"{{self._opened}}"))
{lanes}

class BrokenBackend(StoreBackend):
    name = "broken"
    def lanes(self, *, ranks, store_for, **_):
        return BrokenLanes(ranks, store_for)

backends.register(BrokenBackend())
"""

_ADDS_WRONGLY = """
    def _rows(self, mine):
        return [row * 2 for row in super()._rows(mine)]
"""

_NEVER_WAITS_IN_BARRIER = """
    def barrier(self, opts=None):
        return self._threads.start(lambda: None, [])
"""

_ENDS_QUEUED_ON_CLOSE = """
    def close(self):
        self.abort()
        super().close()
"""

_CLOSES_TOGETHER = """
    def close(self):
        self.barrier().wait()
        super().close()
"""

_RETAINS_ALL = """
    def retain(self, lanes):
        pass
"""


def test_the_suite_finds_a_backend_that_adds_up_wrongly(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = _BROKEN.format(lane=_ADDS_WRONGLY, lanes="")
    (package / "broken_backend.py").write_text(text)
    monkeypatch.syspath_prepend(str(package))
    with pytest.raises(AssertionError, match="breaks the contract") as caught:
        check_case("slices in flight", backend="broken", setup="broken_backend")
    assert "--- rank 0" in str(caught.value)
    assert "--- rank 1" in str(caught.value)


@pytest.mark.parametrize(
    ("case", "lane", "lanes", "message"),
    [
        ("a barrier", _NEVER_WAITS_IN_BARRIER, "", "a barrier ended without rank"),
        ("retain frees", "    pass", _RETAINS_ALL, "after retaining only lane 0"),
        (
            "close with collectives queued",
            *(_ENDS_QUEUED_ON_CLOSE, "", "was aborted"),
        ),
        ("close on one rank", _CLOSES_TOGETHER, "", "ranks that have not closed"),
    ],
    ids=["barrier", "retain", "close queued", "close alone"],
)
def test_the_suite_finds_a_backend_that_breaks_one_promise(
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    lane: str,
    lanes: str,
    message: str,
) -> None:
    (package / "broken_backend.py").write_text(_BROKEN.format(lane=lane, lanes=lanes))
    monkeypatch.syspath_prepend(str(package))
    with pytest.raises(AssertionError, match=message):
        check_case(case, backend="broken", setup="broken_backend")
