"""Burst-parallel training across the emulated network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("namespaces")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "burst_vgg.py"


def test_a_vgg_on_four_hosts_sends_samples_but_no_gradients_of_dense_layers(
    lab, programs, tmp_path
):
    done = lab.run(
        *["--hosts", 4, "--link", "1gbit", "--timeout", 100],
        *["--", "python", programs / "burst.py"],
        timeout=110,
        # torch leaves a cache there.
        env={"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["differs"] < 1e-10
    # The dense layers are most of the model, and stay where they are.
    assert found["sent_bytes"] < 0.5 * found["data_parallel_bytes"]
    assert found["sent_bytes"] > found["sample_bytes"]


def test_the_example_is_as_short_as_promised():
    code = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert (
        len(code) <= 44
    )  # thirty lines, the docstring and the definition of its model
    compile("\n".join(code), str(EXAMPLE), "exec")
