from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from stretto.cli._main import group
from stretto.errors import SpecError
from stretto.measure import profile_script
from stretto.schema import Workload

TRAIN = """
import sys
from pathlib import Path
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range({steps}):
    optimizer.zero_grad()
    try:
        model(torch.ones(5, 4)).sum().backward()
    except Exception:
        raise SystemExit("a script's own handler saw the end of profiling")
    optimizer.step()
Path(sys.argv[1]).write_text("trained to the end")
"""

GROUP = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
assert os.environ["LOCAL_RANK"] == "0"
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


def profiled(path, *arguments, **options):
    return profile_script(path, arguments, max_spread_ratio=1e9, **options)


def test_an_unchanged_script_is_watched_and_stopped(script, tmp_path):
    before = list(sys.argv), list(sys.path)
    done = tmp_path / "done"
    workload = profiled(script(TRAIN.format(steps=50)), str(done), repetitions=4)
    assert not done.exists()
    assert {t.name for t in workload.tensors} == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }
    assert workload.batch_per_rank == 5
    assert workload.name == "train"
    assert workload.provenance["repetitions"] == 4
    assert (sys.argv, sys.path) == before


def test_a_script_that_ends_too_soon_is_refused(script, tmp_path):
    with pytest.raises(SpecError, match="ended after 3 whole steps, but 7 are needed"):
        profiled(
            script(TRAIN.format(steps=5)), str(tmp_path / "x"), warmup=3, repetitions=4
        )


def test_a_script_that_trains_nothing_is_refused(script):
    with pytest.raises(SpecError, match="without calling a module"):
        profiled(script("print('hello')"))


def test_a_missing_script_is_refused(tmp_path):
    with pytest.raises(SpecError, match="no such script"):
        profiled(tmp_path / "absent.py")


def test_parts_trained_without_a_common_module_are_refused(script):
    text = """
import torch
from torch import nn
a, b = nn.Linear(4, 4), nn.Linear(4, 4)
optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
for _ in range(50):
    b(a(torch.ones(1, 4))).sum().backward()
    optimizer.step()
"""
    with pytest.raises(SpecError, match="lacks: put all trained parameters"):
        profiled(script(text))


def test_the_script_s_own_failure_is_passed_on(script):
    with pytest.raises(ZeroDivisionError):
        profiled(script("1 / 0"))


def test_the_command_writes_a_workload_and_is_quiet_on_stdout(script, tmp_path):
    output = tmp_path / "workload.json"
    path = script(TRAIN.format(steps=50))
    arguments = ["profile", "-o", str(output), "--max-spread", "1e9", "--steps", "3"]
    result = CliRunner().invoke(group, [*arguments, str(path), str(tmp_path / "x")])
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert len(Workload.load(output).tensors) == 4


def test_the_command_runs_a_distributed_script_without_a_launcher(tmp_path):
    program = tmp_path / "ddp.py"
    program.write_text(
        TRAIN.format(steps=50)
        .replace("from torch import nn\n", "from torch import nn\n" + GROUP, 1)
        .replace(
            "optimizer = ",
            "model = nn.parallel.DistributedDataParallel(model)\noptimizer = ",
            1,
        )
    )
    output = tmp_path / "workload.json"
    command = [sys.executable, "-m", "stretto", "profile", "-o", str(output)]
    done = subprocess.run(
        [*command, "--max-spread", "1e9", "--steps", "3", str(program), "done"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert len(Workload.load(output).tensors) == 4
