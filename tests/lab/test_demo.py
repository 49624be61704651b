"""The main job end to end, on small models."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from stretto.schema import Cluster, Plan, Workload
from stretto.schema.timeline import load_timelines

pytestmark = [
    pytest.mark.lab,
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("namespaces"),
]

METHODS = ["single", "ddp", "ddp-best", "mg-wfbp", "stretto"]

KEYS = {
    "name",
    "predicted_step_s",
    "measured_step_s",
    "spread_s",
    "speedup_over_ddp",
    "bound_share",
    "final_loss",
}


def demo(*options):
    return subprocess.run(
        [sys.executable, "-m", "stretto", "demo", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.mark.parametrize(("model", "width"), [("convnet", 16), ("transformer", 60)])
def test_the_demo_leaves_what_it_says(tmp_path, model, width):
    network = ("--hosts", 2, "--link", "200mbit", "--flow", "60mbit")
    sizes = ("--model", model, "--width", width, "--batch", 4, "--quick")
    out = tmp_path / "out"
    done = demo(*network, *sizes, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results == json.loads((out / "results.json").read_text())
    methods = results["methods"]
    assert [m["name"] for m in methods] == METHODS
    assert all(set(m) == KEYS for m in methods)
    assert all(m["measured_step_s"] > 0 < m["predicted_step_s"] for m in methods)
    losses = [m["final_loss"] for m in methods]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)

    workload, cluster = (
        Workload.load(out / "workload.json"),
        Cluster.load(out / "cluster.json"),
    )
    assert cluster.hosts == cluster.ranks == 2
    # One flow reaches 60 of the link's 200 Mbit/s.
    assert cluster.inter_host.flow_bytes_per_s == pytest.approx(7.5e6, rel=0.2)
    for name in METHODS:
        Plan.load(out / "plans" / f"{name}.json").check_matches(workload)
    assert len(load_timelines(out / "trace.json")) == 2 * len(METHODS)
    assert (out / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_demo_that_can_not_be_is_refused_before_it_starts(tmp_path):
    few = demo("--steps", 2, "--out", tmp_path / "out")
    assert few.returncode == 2
    assert "'--steps': 2 is not in the range" in few.stderr
    rate = demo("--link", "fast", "--out", tmp_path / "out")
    assert rate.returncode == 2
    assert "'fast'" in rate.stderr


def test_the_demo_of_background_jobs_compares_four_arrangements(tmp_path):
    network = ("--hosts", 2, "--link", "200mbit", "--flow", "60mbit")
    sizes = ("--width", 16, "--batch", 4, "--steps", 6)
    out = tmp_path / "out"
    done = demo("background", *network, *sizes, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results == json.loads((out / "background.json").read_text())
    rows = {row["name"]: row for row in results["arrangements"]}
    assert list(rows) == [
        "foreground alone",
        "background alone",
        "static partition",
        "together",
    ]
    assert rows["foreground alone"]["foreground"] == 1.0
    page = (out / "background.html").read_text()
    assert all(name in page for name in rows)
    assert "<svg" in page
    if rows["background alone"]["background"] is None:
        assert any("got no processor time" in note for note in results["notes"])
        return  # other programs take all processor time, before any background
    assert rows["background alone"]["background"] == 1.0
    for name in ("static partition", "together"):
        row = rows[name]
        assert row["foreground"] > 0.0
        assert row["min_total"] <= row["total"] <= row["max_total"]
