"""``stretto run --convert`` trains a script for one device on several ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.convert import Choices, convert_source
from stretto.convert._memory import compiled
from support.conversions import STEP

pytestmark = [pytest.mark.dist, pytest.mark.timeout(700)]

TRAINING = """\
import os
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.arange(16.0).view(8, 2))
loader = DataLoader(data, batch_size=4)
for epoch in range(2):
    seen = 0
    for (x,) in loader:
        loss = model(x / 16).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen += len(x)
    print("seen", seen, "loss", loss.item())
"""


def stretto_run(*arguments, folder):
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    return subprocess.run(
        [sys.executable, "-m", "stretto", "run", *map(str, arguments)],
        env={**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_plain_script_trains_on_two_ranks_and_errors_name_its_lines(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINING + 'raise KeyError(os.environ["WORLD_SIZE"])\n')
    alone = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    done = stretto_run("--convert", script, folder=tmp_path)
    pattern = re.compile(r"^seen (\d+) loss (\S+)$", re.MULTILINE)
    found, expected = pattern.findall(done.stdout), pattern.findall(alone.stdout)
    assert len(found) == len(expected) == 2, done.stderr
    for (seen, loss), (all_seen, all_loss) in zip(found, expected, strict=True):
        assert seen == all_seen == "8"
        assert float(loss) == pytest.approx(float(all_loss), rel=1e-5, abs=1e-6)
    assert done.returncode == 1
    assert "KeyError: '2'" in done.stderr
    last = len(TRAINING.splitlines()) + 1
    assert f'File "{script}", line {last}, in <module>' in done.stderr
    assert 'raise KeyError(os.environ["WORLD_SIZE"])' in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.py"]


EVALUATED = (
    """\
import random
import numpy as np
import torch
from tqdm import tqdm
from torch.utils.data import DataLoader, TensorDataset
from kept import keep

torch.manual_seed(0)
x = torch.randn(24, 2)
model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x), batch_size=4, shuffle=True)
held_out = DataLoader(TensorDataset(x), batch_size=5, shuffle=True)
def accuracy():
    model.eval()
    with torch.no_grad():
        return [(model(x) > 0).float().mean().item() for (x,) in held_out]
for epoch in range(2):
    model.train()
    for (x,) in loader:
"""
    + STEP
    + """\
    model.eval()
    outputs = []
    with torch.no_grad():
        for (x,) in held_out:
            outputs.append(model(x + torch.randn(x.shape)).mean().item())
        bar = tqdm(held_out)
        for i, (x,) in enumerate(bar):
            for (y,) in held_out:
                outputs.append(model(y * torch.randn(1)).mean().item())
            outputs.append(model(x * np.random.rand() * random.random()).mean().item())
            if i + 1 == len(bar):
                outputs.append(i)
        outputs += [model(x).mean().item() for (x,) in held_out]
        for (x,), (y,) in zip(held_out, held_out):
            outputs.append(model(x * torch.randn(1)).mean().item())
    with open("accuracy", "a") as file:
        file.write(str(accuracy()) + "\\n")
    torch.save([accuracy()], "accuracy.pt")
    keep([*outputs, random.random(), np.random.rand()], torch.initial_seed())
"""
)

KEEP = """\
import os
import torch

def keep(outputs, seed):
    drawn = torch.rand(1).item()  # each rank's own random numbers continue
    with open(f"kept{os.environ['RANK']}", "a") as file:
        file.write(f"{outputs}\\n{seed, drawn}\\n")
"""


def test_ranks_evaluate_equally_so_that_they_decide_equally(tmp_path):
    (tmp_path / "train.py").write_text(EVALUATED)
    (tmp_path / "kept.py").write_text(KEEP)
    done = stretto_run("--convert", tmp_path / "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    of_ranks = [(tmp_path / f"kept{rank}").read_text().split("\n") for rank in (0, 1)]
    assert of_ranks[0][0::2] == of_ranks[1][0::2]
    assert of_ranks[0][0] != of_ranks[0][2]
    assert of_ranks[0][1] != of_ranks[1][1]
    assert of_ranks[0][3] != of_ranks[1][3]
    assert (tmp_path / "accuracy").read_text().count("\n") == 2


def test_a_notebook_trains_on_two_ranks(tmp_path):
    notebook = Path(__file__).parent / "scripts/notebook.ipynb"
    options = ("--convert", "--plan", "ddp", "--nproc-per-node", "2")
    done = stretto_run(*options, notebook, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\d) \d\.\d{6}$", done.stdout, re.MULTILINE) == ["0", "1", "2"]


def test_what_is_not_understood_is_refused_once_before_ranks_start(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import tensorflow\n")
    done = stretto_run("--convert", script, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("imports tensorflow") == 1


def test_code_of_the_script_keeps_its_lines_and_ours_has_another_file():
    conversion = convert_source(TRAINING, name="train.py", choices=Choices())
    parts = compiled(conversion, "train.py")
    names = {part.co_filename for part in parts}
    assert names == {"train.py", "<put in by stretto convert: train.py>"}
    lines = TRAINING.splitlines()
    loop = next(
        p for p in parts if "epoch" in p.co_names and p.co_filename == "train.py"
    )
    spoken = {line for _, _, line in loop.co_lines() if line}
    assert spoken <= set(range(1, len(lines) + 1))
    assert {n + 1 for n, line in enumerate(lines) if "backward" in line} <= spoken


RANK_PROGRAM = """\
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(4, 2)).mean().backward()
print(type(model).__module__.split(".")[0], __name__, sys.argv[1:], flush=True)
dist.destroy_process_group()
sys.exit(int(sys.argv[1]))
"""


def test_a_module_runs_with_its_arguments_and_exit_status(tmp_path):
    package = tmp_path / "job"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(RANK_PROGRAM)
    options = ("--plan", "ddp", "--standalone", "--nproc-per-node", "1")
    done = stretto_run(*options, "-m", "job.train", "7", "--x", folder=tmp_path)
    assert done.returncode == 7, done.stderr
    assert "stretto __main__ ['7', '--x']" in done.stdout
    missing = stretto_run(*options, "-m", "job.none", folder=tmp_path)
    assert "-m job.none: no such module" in missing.stderr


def test_modules_are_not_converted_and_programs_not_replaced(tmp_path):
    done = stretto_run("--convert", "-m", "job.train", folder=tmp_path)
    assert done.returncode == 2
    assert "needs the path of a script" in done.stderr
    done = stretto_run("--no-python", "true", folder=tmp_path)
    assert done.returncode == 2
    assert "use torchrun" in done.stderr
