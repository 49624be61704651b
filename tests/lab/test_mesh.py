"""The example of a two-dimensional mesh, on emulated hosts."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from stretto import variable_names
from stretto.tune.forced import FORCED

EXAMPLE = Path(__file__).parents[2] / "examples" / "mesh.py"
STEPS = 8
"""With the forced schedule a plan is in use from the fourth step on."""

pytestmark = [
    pytest.mark.lab,
    pytest.mark.dist,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("namespaces"),
]


def _in_one_process():
    """Return the last loss of the first half of the batch, with the whole batch."""
    spec = importlib.util.spec_from_file_location("mesh_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    net = nn.Sequential(*[example.Layer() for _ in range(example.LAYERS)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        halves = [net(example.samples(step, part)).square().mean() for part in (0, 1)]
        (sum(halves) / 2).backward()
        optimizer.step()
    return halves[0].item()


def test_losses_beside_a_pipeline_are_those_of_one_process(lab):
    done = lab.run(
        *["--hosts", 2, "--ranks-per-host", 2, "--timeout", 220],
        *["--", "python", EXAMPLE, "pipeline", "--steps", STEPS],
        env={variable_names.TUNE_SCHEDULE: FORCED},
        timeout=230,
    )
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"last loss ([\d.]+)", done.stdout)
    assert float(loss) == pytest.approx(_in_one_process(), rel=1e-5)
