"""Lends the ranks of `support.ranks` to the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.ranks import BUSY, START_S, Ranks, RankServers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of ranks the time to start besides their own timeouts."""
    for item in items:
        mark = item.get_closest_marker("timeout")
        if (
            mark is not None
            and mark.args
            and "rank_servers" in getattr(item, "fixturenames", ())
        ):
            longer = pytest.mark.timeout(BUSY * mark.args[0] + START_S)
            item.add_marker(longer, append=False)


@pytest.fixture(scope="session")
def rank_servers() -> Iterator[RankServers]:
    made = RankServers()
    yield made
    made.close()


@pytest.fixture
def ranks(tmp_path: Path, rank_servers: RankServers) -> Ranks:
    return Ranks(tmp_path, rank_servers)
