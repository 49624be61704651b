from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from stretto.cli._main import group
from stretto.errors import SpecError
from stretto.schema import Cluster, Workload
from stretto.schema.burst import LayerProfile


def run(*args):
    result = CliRunner().invoke(group, ["zoo", *map(str, args)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_list():
    text = run("list").output
    assert "resnet152" in text
    assert "60.193" in text
    assert "asc-uncapped" in text
    found = json.loads(run("list", "--json").output)
    rows = {row["name"]: row for row in found["models"]}
    assert rows["densenet201"]["tensors"] == 604
    assert {row["name"] for row in found["clusters"]} >= {"asc", "libra", "aiacc"}


def test_show_writes_a_workload(tmp_path):
    path = tmp_path / "w.json"
    text = run("show", "bert-base", "-o", path).output
    assert "206 tensors" in text
    assert Workload.load(path).batch_per_rank == 64
    times = ["--batch", 4, "--forward-s", 0.5, "--backward-s", 0.75]
    run("show", "vgg11", "-o", path, *times)
    made = Workload.load(path)
    assert (made.batch_per_rank, made.forward_s, made.backward_s) == (4, 0.5, 0.75)


def test_cluster_writes_a_cluster(tmp_path):
    path = tmp_path / "c.json"
    text = run("cluster", "libra", "-o", path, "--hosts", 64).output
    assert "assumed: " in text
    assert Cluster.load(path).ranks == 64


def test_layers_writes_a_profile(tmp_path):
    path = tmp_path / "p.json"
    text = run("layers", "vgg16", "-o", path).output
    assert "22 layers" in text
    assert "sums published" in text
    counts = ["--samples", 4, "--samples", 2, "--device", "v100"]
    run("layers", "resnet50", "-o", path, *counts)
    made = LayerProfile.load(path)
    assert [t.samples for t in made.layers[0].times] == [2, 4]
    assert made.device == "V100"


def test_what_is_made_can_be_planned(tmp_path):
    run("show", "resnet50", "-o", tmp_path / "w.json")
    run("cluster", "asc", "-o", tmp_path / "c.json")
    result = CliRunner().invoke(
        group,
        [
            "simulate",
            str(tmp_path / "w.json"),
            str(tmp_path / "c.json"),
            "--planner",
            "fusion",
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    assert 0.2 < json.loads(result.output)["iteration_s"] < 1.0


def test_wrong_input_is_refused(tmp_path):
    with pytest.raises(SpecError, match="model must be one of"):
        run("show", "alexnet", "-o", tmp_path / "w.json")
    with pytest.raises(SpecError, match="cluster must be one of"):
        run("cluster", "moon", "-o", tmp_path / "c.json")
    assert run("show", "vgg11").exit_code == 2
