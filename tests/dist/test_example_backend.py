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

class WrongLane(StoreLane):
    def _rows(self, mine):
        return [row * 2 for row in super()._rows(mine)]

class WrongLanes(StoreLanes):
    def _open(self, number):
        self._opened += 1
        return WrongLane(number, self._ranks, self._store_for(f"{self._opened}"))

class WrongBackend(StoreBackend):
    name = "wrong"
    def lanes(self, *, ranks, store_for, **_):
        return WrongLanes(ranks, store_for)

backends.register(WrongBackend())
"""


def test_the_suite_finds_a_backend_that_adds_up_wrongly(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "wrong_backend.py").write_text(_BROKEN)
    monkeypatch.syspath_prepend(str(package))
    with pytest.raises(AssertionError, match="breaks the contract") as caught:
        check_case("slices in flight", backend="wrong", setup="wrong_backend")
    assert "--- rank 0" in str(caught.value)
    assert "--- rank 1" in str(caught.value)
