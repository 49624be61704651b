"""Timeline files."""

from __future__ import annotations

import errno
import json
import os
import time
from typing import TYPE_CHECKING, Any

from stretto.horovod import timeline

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_full_disk_costs_spans_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "timeline.json"
    timeline.open_timeline(str(path), mark_cycles=False)
    tries = []

    def full(*_arguments: Any) -> int:
        tries.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            for count in (1, 2):
                timeline.add_span("x", "pack", 0.0, time.perf_counter())
                until_s = time.perf_counter() + 30
                while len(tries) < count and time.perf_counter() < until_s:
                    time.sleep(0.01)
        timeline.add_span("later", "pack", 0.0, time.perf_counter())
    finally:
        timeline.stop_timeline()
    assert len(tries) == 2
    assert caplog.text.count("No space left on device") == 1
    assert "later" in str(json.loads(path.read_text(encoding="utf-8")))
