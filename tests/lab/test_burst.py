"""Burst-parallel training across the emulated network."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("namespaces")]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "burst_vgg.py"


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


def command_of(text, example):
    """The arguments of ``stretto lab run`` in a document, for an example."""
    (found,) = re.findall(rf"^stretto lab run (.*examples/{example}\.py)$", text, re.M)
    return found.split()


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)
def test_a_hugging_face_model_trains_as_one_process_by_the_documents_commands(
    lab, tmp_path
):
    guide = (ROOT / "docs" / "burst-on-your-own-model.md").read_text()
    command = command_of(guide, "burst_bert")
    assert command_of(
        (ROOT / "examples" / "burst_bert.py").read_text(), "burst_bert"
    ) == (command)
    done = lab.run(
        *["--timeout", 150, *command, "--steps", 3, "--share", 2],
        timeout=170,
        cwd=ROOT,
        env={"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    widths = re.findall(r"(\d+) layers on (\d) of 4 hosts", done.stdout)
    # The embedding's gradients are 31 MB, its output for all samples 1 MB.
    assert any(int(hosts) < 4 for _, hosts in widths), done.stdout
    difference = re.search(r"difference from one process: (\S+)", done.stdout)
    assert difference is not None, done.stdout
    assert float(difference[1]) < 1e-9
