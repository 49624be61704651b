"""Scripts that start ranks of their own under a launcher."""

from __future__ import annotations

from typing import Any

import pytest
from torch import multiprocessing

from stretto.script import warn_of_spawn


@pytest.mark.parametrize(
    ("ranks", "local_rank", "lines"),
    [("2", "0", 1), ("2", "1", 0), ("1", "0", 0), (None, None, 0)],
)
def test_spawn_in_one_of_several_ranks_logs_one_line(
    monkeypatch: Any, caplog: Any, ranks: str | None, local_rank: str | None, lines: int
) -> None:
    for name, value in (("WORLD_SIZE", ranks), ("LOCAL_RANK", local_rank)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    calls: list[Any] = []
    monkeypatch.setattr(multiprocessing, "spawn", lambda *a, **k: calls.append((a, k)))
    warn_of_spawn()
    multiprocessing.spawn(print, args=(1,), nprocs=2)
    assert calls == [((print,), {"args": (1,), "nprocs": 2})]
    assert len(caplog.records) == lines
    if lines:
        assert "torch.multiprocessing.spawn" in caplog.text
