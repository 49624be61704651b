"""Layer profiles, burst plans, costs and the graph's parse."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from stretto.cli.burst import command
from stretto.cost.burst import DEEPPOOL, BurstNetwork, redistribution_s, widths_of
from stretto.errors import Infeasible, PlanMismatch, SpecError
from stretto.planners.burst.tree import Block, Chain, Edge, parse
from stretto.schema import Cluster, Link
from stretto.schema.burst import BatchTime, BurstPlan, Layer, LayerGpus, LayerProfile
from support.burst_graphs import inputs_of, random_profile, random_shape


def layer(name, *inputs, times=((1, 1e-3), (2, 1.5e-3), (8, 6e-3))) -> Layer:
    return Layer(
        name=name,
        inputs=inputs,
        parameter_bytes=4 * 10**6,
        activation_bytes=10**5,
        times=tuple(
            BatchTime(samples=n, forward_s=t / 3, backward_s=2 * t / 3)
            for n, t in times
        ),
    )


def profile(*layers) -> LayerProfile:
    return LayerProfile(name="small", device="none", layers=layers, provenance={})


CHAIN = profile(layer("a"), layer("b", "a"), layer("c", "b"))


def test_time_is_linear_between_profiled_batches():
    a = layer("a")
    assert a.compute_s(1) == pytest.approx(1e-3)
    assert a.compute_s(4) == pytest.approx(1.5e-3 + (6e-3 - 1.5e-3) / 3)
    assert a.compute_s(8) == pytest.approx(6e-3)


@pytest.mark.parametrize("samples", [0, 0.5, 9])
def test_no_time_is_made_up_outside_of_what_was_profiled(samples):
    with pytest.raises(SpecError, match="'a' was profiled for 1 to 8 samples"):
        layer("a").compute_s(samples)


def test_a_profile_and_a_plan_are_read_as_written(tmp_path):
    CHAIN.save(tmp_path / "p.json")
    body = json.loads((tmp_path / "p.json").read_text())
    assert body["kind"] == "layer_profile"
    assert LayerProfile.load(tmp_path / "p.json") == CHAIN
    plan = BurstPlan(
        profile_digest=CHAIN.digest,
        gpus=4,
        batch=8,
        amplification_limit=None,
        layers=tuple(LayerGpus(layer=n, gpus=2, first_gpu=2) for n in "abc"),
    )
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["kind"] == "burst_plan"
    assert BurstPlan.load(tmp_path / "plan.json") == plan
    plan.check_matches(CHAIN)
    with pytest.raises(PlanMismatch, match="digest"):
        plan.check_matches(profile(layer("a"), layer("b", "a")))


def test_files_from_before_updates_and_whole_steps_are_read(tmp_path):
    CHAIN.save(tmp_path / "p.json")
    body = json.loads((tmp_path / "p.json").read_text())
    del body["input_bytes"], body["whole"], body["outside_s"]
    for each in body["layers"]:
        del each["update_s"], each["norms"]
    (tmp_path / "old.json").write_text(json.dumps(body))
    assert LayerProfile.load(tmp_path / "old.json") == CHAIN
    del body["layers"][1]["activation_bytes"]
    (tmp_path / "old.json").write_text(json.dumps(body))
    with pytest.raises(SpecError, match=r"layers\[1\].activation_bytes: is missing"):
        LayerProfile.load(tmp_path / "old.json")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: profile(), "at least one layer"),
        (lambda: profile(layer("a"), layer("a")), "is a duplicate of layers"),
        (lambda: profile(layer("a", "b"), layer("b")), "comes before it"),
        (lambda: layer("a", "b", "b"), "must not repeat"),
        (lambda: layer("a", times=()), "at least one time"),
        (lambda: layer("a", times=((2, 1.0), (1, 1.0))), "samples must ascend"),
        (lambda: layer("a", times=((1, float("nan")),)), "forward_s must be finite"),
        (lambda: layer("a", times=((1, -1.0),)), "forward_s must be >= 0"),
        (lambda: layer("a", times=((0, 1.0),)), "samples must be >= 1"),
        (lambda: widths_of("odd", 4, 4), "powers, divisors, all"),
        (lambda: widths_of("all", 0, 4), "gpus must be >= 1"),
        (lambda: replace(DEEPPOOL, sync="x"), "transfer, ring, hidden"),
    ],
)
def test_what_breaks_a_rule_is_refused(build, message):
    with pytest.raises(SpecError, match=message):
        build()


def test_widths():
    assert widths_of("powers", 12, 100) == (1, 2, 4, 8, 12)
    assert widths_of("powers", 1024, 32) == (1, 2, 4, 8, 16, 32)
    assert widths_of("divisors", 10, 12) == (1, 2, 3, 4, 6)
    assert widths_of("all", 3, 100) == (1, 2, 3)


def test_redistribution_moves_the_difference_or_on_other_gpus_everything():
    kept = redistribution_s(1e-3, 1e-2, 32, 4, 8, moved=False)
    assert kept == pytest.approx(1e-2 + 4e-3)
    assert redistribution_s(1e-3, 1e-2, 32, 8, 8, moved=False) == 0
    assert redistribution_s(1e-3, 1e-2, 32, 8, 8, moved=True) == pytest.approx(1.4e-2)
    back = redistribution_s(1e-3, 1e-2, 32, 8, 4, moved=False)
    assert back == kept


def test_a_clusters_gpus_share_their_hosts_link():
    near = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e11)
    far = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    cluster = Cluster(
        name="c", hosts=2, ranks_per_host=4, inter_host=far, intra_host=near
    )
    within, beyond = BurstNetwork.of(cluster, 4), BurstNetwork.of(cluster, 8)
    assert within.transfer == near
    assert beyond.transfer.bandwidth_bytes_per_s == pytest.approx(2.5e9)
    assert beyond.sync_s(10**8, 4) == within.sync_s(10**8, 4)
    assert beyond.sync_s(10**8, 8) == pytest.approx(14 * 1e-5 + 1.75 * 1e8 / 1e10)
    assert beyond.sync_s(10**8, 1) == 0


@pytest.mark.parametrize("seed", range(10))
def test_the_parse_of_a_graph_holds_each_layer_and_edge_once(seed):
    rng = random.Random(seed)
    shape = random_shape(rng, 3, nested=seed % 2 == 0)
    tree = parse(random_profile(rng, shape, 2))
    nodes, edges = [tree.source, tree.target], []

    def walk(part):
        if isinstance(part, Edge):
            edges.append((part.source, part.target))
        elif isinstance(part, Block):
            for branch in part.branches:
                walk(branch)
        elif isinstance(part, Chain):
            nodes.extend(part.nodes)
            for link in part.links:
                walk(link)

    walk(tree.chain)
    inputs = inputs_of(shape)
    assert sorted(nodes) == sorted(inputs)
    assert sorted(edges) == sorted((j, i) for i, js in inputs.items() for j in js)


def test_layers_that_cross_are_named():
    crossing = profile(
        layer("a"),
        layer("b", "a"),
        layer("c", "a"),
        layer("d", "b", "c"),
        layer("e", "c"),
        layer("f", "d", "e"),
    )
    with pytest.raises(SpecError, match=r"not series-parallel: .*join and part"):
        parse(crossing)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((layer("a"), layer("b"), layer("c", "a", "b")), "one first layer.*'a', 'b'"),
        ((layer("a"), layer("b", "a"), layer("c", "a")), "one last layer.*'b', 'c'"),
    ],
)
def test_several_ends_are_named(layers, message):
    with pytest.raises(SpecError, match=message):
        parse(profile(*layers))


# the command


@pytest.fixture
def stored(tmp_path):
    CHAIN.save(tmp_path / "p.json")
    return str(tmp_path / "p.json")


def run(*args):
    return CliRunner().invoke(command, ["plan", *args])


def test_the_command_prints_one_object_and_keeps_the_plan(stored, tmp_path):
    out = str(tmp_path / "plan.json")
    done = run(stored, "--gpus", "4", "--batch", "8", "--json", "-o", out)
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    plan = BurstPlan.load(out)
    plan.check_matches(CHAIN)
    assert row["iteration_s"] == plan.predicted.iteration_s
    assert row["iteration_s"] <= row["data_parallel_s"]
    assert [entry["layer"] for entry in row["layers"]] == ["a", "b", "c"]


def test_the_commands_front_is_listed_fastest_first(stored):
    done = run(stored, "--gpus", "8", "--batch", "8", "--front", "--json")
    assert done.exit_code == 0, done.output
    times = [plan["iteration_s"] for plan in json.loads(done.stdout)["front"]]
    assert times == sorted(times)
    assert "step" in run(stored, "--gpus", "8", "--batch", "8", "--front").output


def test_a_limit_that_none_keeps_ends_with_3_and_the_nearest(stored):
    usual = (stored, "--gpus", "4", "--batch", "8", "--widths", "2,4", "--amp-limit")
    done = run(*usual, "1.01")
    assert isinstance(done.exception, Infeasible)
    assert done.exception.exit_code == 3
    limit = re.search(r"feasible limit is ([\d.]+?)\.? ", f"{done.exception} ").group(1)
    again = run(*usual, limit)
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize("limit", ["nan", "inf", "0", "-1", "0.99"])
def test_an_invalid_limit_is_refused(stored, limit):
    done = run(stored, "--gpus", "4", "--batch", "8", f"--amp-limit={limit}")
    assert done.exit_code == 2
    assert "--amp-limit" in done.output
