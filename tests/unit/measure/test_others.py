"""What other programs use of the processors."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from stretto.measure.others import BUSY_CORES, OthersLoad, busy_note


def _stat(busy_s: float) -> str:
    tick = os.sysconf("SC_CLK_TCK")
    return f"cpu  {int(busy_s * tick)} 0 0 12345 0 0 0 0 0 0\ncpu0 1 2 3\n"


def test_time_of_others_is_counted(tmp_path) -> None:
    file = tmp_path / "stat"
    file.write_text(_stat(1000.0))
    load = OthersLoad(file)
    time.sleep(0.2)
    file.write_text(_stat(1010.0))
    assert load.cores() > BUSY_CORES


def test_own_and_childrens_time_is_not(tmp_path) -> None:
    file = tmp_path / "stat"
    file.write_text(_stat(1000.0))
    load = OthersLoad(file)
    begin_s = time.process_time()
    code = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    own_s = time.process_time() - begin_s
    file.write_text(_stat(1000.5 + own_s))
    assert load.cores() == pytest.approx(0.0, abs=0.05)


def test_an_unknown_load_is_not_reported(tmp_path) -> None:
    assert OthersLoad(tmp_path / "missing").cores() is None
    assert busy_note(None) is None
    assert busy_note(0.1) is None
    assert "1.5 of this machine" in busy_note(1.5)
