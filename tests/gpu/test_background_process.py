"""A background in a process of its own beside a foreground, on one device."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

FOREGROUND = """
import sys, time, torch, stretto
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Linear(512, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 512)
).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
job = stretto.Foreground("cuda:0")
for step in range(int(sys.argv[1])):
    job.step()
    optimizer.zero_grad()
    loss = net(torch.randn(512, 512).cuda()).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
    with job.waiting("network"):
        time.sleep(0.01)
"""

BACKGROUND = """
import sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.last = nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.last(x.mean(1))

torch.use_deterministic_algorithms(True, warn_only=True)
torch.manual_seed(1)
net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
mixer = torch.randn(1024, 1024, device="cuda") / 32
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    total = torch.zeros((), device="cuda")
    for micro in range(2):
        # What is launched between leases must come first, however long it takes.
        y = torch.randint(10, (16,), device="cuda")
        x = torch.randn(1024, 1024, device="cuda")
        for _ in range(40):
            x = x @ mixer
        x = x[:256].reshape(16, 8, 32, 64)[..., :12, :12].contiguous()
        loss = nn.functional.cross_entropy(net(x), y)
        (loss / 2).backward()
        total += loss.detach()
        del x, y
    optimizer.step()
    print(total.item().hex(), flush=True)
print(sum(p.double().sum().item() for p in net.parameters()).hex())
"""


def started(folder: Path, *command: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "STRETTO_RUNTIME_DIR": str(folder),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"no end within 90 s\n{out[-500:]}\n{err}")
    assert process.returncode == 0, err
    return out, err


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Both scripts, with the number of their steps."""
    folder = tmp_path_factory.mktemp("scripts")
    foreground, background = folder / "train.py", folder / "other.py"
    foreground.write_text(FOREGROUND)
    background.write_text(BACKGROUND)
    return [(str(foreground), "250"), (str(background), "60")]


@pytest.fixture(scope="module")
def alone(
    scripts: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """What each prints without the other, and without leases."""
    folder = tmp_path_factory.mktemp("alone")
    return [ended(each)[0] for each in [started(folder, *run) for run in scripts]]


@pytest.mark.parametrize("segments", ["micro-batch", "layer"])
def test_both_jobs_compute_what_they_compute_alone(
    tmp_path: Path, scripts: list[tuple[str, str]], alone: list[str], segments: str
) -> None:
    foreground_run, background_run = scripts
    first = started(tmp_path, *foreground_run)
    second = started(
        tmp_path,
        *("-m", "stretto", "run", "--background", "cuda:0", "--segments", segments),
        *background_run,
    )
    (foreground_out, foreground_err), (out, err) = ended(first), ended(second)
    print(foreground_err, err)
    assert foreground_out == alone[0]
    assert out == alone[1]
    assert "MPS" in err


@pytest.mark.parametrize("segments", ["micro-batch", "layer"])
def test_a_background_without_a_foreground_computes_the_same(
    tmp_path: Path, scripts: list[tuple[str, str]], alone: list[str], segments: str
) -> None:
    """Its leases open at once, while what was launched before them still runs."""
    command = ("-m", "stretto", "run", "--background", "cuda:0", "--segments", segments)
    assert ended(started(tmp_path, *command, *scripts[1]))[0] == alone[1]
