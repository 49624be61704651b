"""The example of JAX and optax, on emulated hosts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_optax.py"

pytestmark = [pytest.mark.lab, pytest.mark.dist, pytest.mark.timeout(240)]


@pytest.mark.parametrize("mode", ["paced", "namespaces"])
def test_weights_of_the_example_are_those_of_one_process(lab, mode, request):
    if mode == "namespaces":
        request.getfixturevalue("namespaces")
    done = lab.run(
        *["--hosts", 2, "--mode", mode, "--flow", "300mbit", "--timeout", 220],
        *["--", sys.executable, EXAMPLE],
        timeout=230,
    )
    assert done.returncode == 0, done.stderr
    ((ranks, apart),) = re.findall(r"(\d) ranks, .* differ by (\S+)", done.stdout)
    assert ranks == "2"
    assert float(apart) <= 1e-6
