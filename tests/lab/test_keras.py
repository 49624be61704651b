"""The examples of Keras and TensorFlow, on emulated hosts."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.lab, pytest.mark.dist, pytest.mark.timeout(400)]


@pytest.mark.parametrize("example", ["keras_fit.py", "tensorflow_loop.py"])
def test_weights_of_the_example_are_those_of_one_process(lab, example, monkeypatch):
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "tensorflow")
    done = lab.run(
        *["--hosts", 2, "--mode", "paced", "--flow", "300mbit", "--timeout", 380],
        *["--", sys.executable, EXAMPLES / example],
        timeout=390,
    )
    assert done.returncode == 0, done.stderr
    ((ranks, apart),) = re.findall(r"(\d) ranks, .* differ by (\S+)", done.stdout)
    assert ranks == "2"
    assert float(apart) <= 1e-6
