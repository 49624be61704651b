"""An unmodified DDP script in the lab, by itself and under `stretto run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.schema import Cluster, Plan, Workload
from stretto.schema.timeline import load_timelines

PROGRAM = Path(__file__).parent / "programs" / "train.py"

pytestmark = [
    pytest.mark.lab,
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(320),
    pytest.mark.usefixtures("namespaces"),
]

NETWORK = ("--mode", "namespaces", "--hosts", 4, "--link", "800mbit")
STEPS = 44
"""Enough for a second profile, where the machine is busy."""

SHORT = 60
"""Enough for the speed and the losses of plain DDP."""

LONG = 3000
"""The most steps until tuning has settled and the report is written: 280 to over 600 of
these short steps, more on a busy machine."""


@pytest.fixture
def run(lab, tmp_path):
    """`stretto lab run`, with PyTorch's own cache folder out of the lab's."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def run_in_lab(*arguments):
        return lab.run(*arguments, timeout=220, env=cache)

    return run_in_lab


def result(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_line_changes_and_steps_are_shorter(run, tmp_path):
    network = (*NETWORK, "--flow", "200mbit", "--")
    theirs = result(run(*network, "python", PROGRAM, SHORT))
    kept = {
        option: tmp_path / f"{option}.out"
        for option in ("save-plan", "profile", "cluster", "trace", "report")
    }
    options = [text for name, path in kept.items() for text in (f"--{name}", path)]
    program = (PROGRAM, LONG, kept["report"])  # the last file of a run
    done = run(*network, "stretto", "run", *options, *program)
    ours = result(done)
    assert ours["losses"][:SHORT] == pytest.approx(theirs["losses"], rel=1e-4)
    # One flow reaches a quarter of the link; half of that gain is room for noise.
    assert ours["step_s"] < 0.6 * theirs["step_s"]
    assert "stretto: planned: " in done.stderr

    workload, cluster = Workload.load(kept["profile"]), Cluster.load(kept["cluster"])
    plan = Plan.load(kept["save-plan"])
    plan.check_matches(workload)
    assert cluster.hosts == 4
    assert plan.lanes > 1
    timelines = load_timelines(kept["trace"])
    assert list(timelines) == [
        f"stretto {what}" for what in ("predicted", "measured", "all ranks")
    ]
    for timeline in timelines.values():
        tracks = set(timeline.tracks)
        assert "compute" in tracks
        # Which of the plan's lanes carry something is the plan's business.
        assert len({track for track in tracks if track.startswith("lane")}) > 1
    assert timelines["stretto all ranks"].ranks == (0, 1, 2, 3)
    page = kept["report"].read_text()
    assert "All ranks on one clock" in page
    assert page.startswith("<!DOCTYPE html>")
    assert "<svg" in page


def test_a_dead_rank_ends_all_with_one_message_that_names_it(run, tmp_path):
    program = tmp_path / "dies.py"
    text = PROGRAM.read_text()
    mark = "    loss.backward()\n"
    assert mark in text
    die = "    if step == 12 and dist.get_rank() == 2:\n        os._exit(7)\n"
    program.write_text("import os\n" + text.replace(mark, die + mark))
    done = run(
        *NETWORK, "--logs", tmp_path / "logs", "--", "stretto", "run", program, STEPS
    )
    assert done.returncode == 7
    for rank in (0, 1, 3):
        log = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        errors = [line for line in log.splitlines() if "stretto: error:" in line]
        assert len(errors) == 1, log
        assert "rank 2" in errors[0]
