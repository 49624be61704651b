"""The records of one rank alone."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import HashStore

from stretto import process_identity
from stretto.runtime.ranks import Ranks
from stretto.runtime.recording.gathering import RankRecord, RecordGathering


@pytest.mark.parametrize("name", ["a-host", ""])
def test_records_come_where_the_hosts_name_can_not_be_looked_up(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse() -> str:
        raise OSError("no network in these tests")

    monkeypatch.setattr(socket, "gethostname", refuse)
    monkeypatch.setattr(process_identity.platform, "node", lambda: name)
    alone = Ranks(rank=0, size=1, names=(0,), store=HashStore(), timeout_s=5.0)
    gathering = RecordGathering(alone)
    found: list[tuple[dict[int, RankRecord], list[int]]] = []
    gathering.begin()
    gathering.finish(tuple, lambda records, missing: found.append((records, missing)))
    assert gathering.wait(10.0)
    ((records, missing),) = found
    assert missing == []
    assert records[0].host == (name or "localhost")
