"""Weak, strong, batch-optimal and burst scaling."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from stretto._api import burst
from stretto.cli.burst import command
from stretto.cost.burst import DEEPPOOL
from stretto.errors import SpecError
from stretto.planners.burst.scaling import METHODS
from stretto.schema.efficiency import BatchSamples, SampleEfficiency
from stretto.zoo import layer_profile


@pytest.fixture(scope="module")
def vgg():
    return layer_profile("vgg16", samples=tuple(2**i for i in range(9)))


CRITICAL = SampleEfficiency(name="critical", critical_batch=1024)


def curve(*points):
    return SampleEfficiency(
        name="measured",
        points=tuple(BatchSamples(batch=b, samples=s) for b, s in points),
    )


def test_the_critical_form_halves_efficiency_at_the_critical_batch():
    assert CRITICAL.samples_to_target(1024) == pytest.approx(2.0)
    # steps fall toward a least number, samples grow from one
    steps = [CRITICAL.samples_to_target(2**i) / 2**i for i in range(20)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == pytest.approx(1 / 1024, rel=0.01)


def test_a_measured_curve_is_straight_in_logarithms_and_ends():
    some = curve((64, 1e6), (1024, 4e6))
    assert some.samples_to_target(64) == 1e6
    assert some.samples_to_target(256) == pytest.approx(2e6)
    assert some.samples_to_target(63) is None
    assert some.samples_to_target(2048) is None


def test_burst_is_never_behind_batch_optimal_nor_that_behind_weak_or_strong(vgg):
    rows = burst.scale(vgg, CRITICAL, batch=256, gpus=(1, 4, 32, 256, 4096))
    assert list(rows[0].methods) == list(METHODS)
    for row in rows:
        speedups = {name: point.speedup for name, point in row.methods.items() if point}
        best = speedups["batch-optimal"]
        assert speedups["burst"] >= best * (1 - 1e-9)
        assert all(
            best >= speedups[n] * (1 - 1e-9)
            for n in ("weak", "strong")
            if n in speedups
        )
    assert rows[0].methods["strong"].speedup == pytest.approx(1.0)
    # Beyond as many GPUs as samples strong scaling gains nothing more.
    assert rows[3].methods["strong"].speedup == pytest.approx(
        rows[4].methods["strong"].speedup
    )
    # DeepPool, Figure 2: the larger the job, the fewer samples a GPU gets.
    each = [row.methods["batch-optimal"].batch / row.gpus for row in rows]
    assert each == sorted(each, reverse=True)
    # Many GPUs: layers that only cost synchronization hold data parallelism back.
    assert rows[-1].methods["burst"].speedup > rows[-1].methods["strong"].speedup


def test_figures_are_those_of_the_model(vgg):
    (row,) = burst.scale(vgg, CRITICAL, batch=64, gpus=(8,))
    for name, batch in (("weak", 512), ("strong", 64)):
        step_s = sum(
            layer.compute_s(batch // 8) + DEEPPOOL.sync_s(layer.parameter_bytes, 8)
            for layer in vgg.layers
        )
        alone_s = sum(layer.compute_s(64) for layer in vgg.layers)
        ratio = (1 + 64 / 1024) / 64 * alone_s / ((1 + batch / 1024) / batch * step_s)
        assert row.methods[name].batch == batch
        assert row.methods[name].iteration_s == pytest.approx(step_s)
        assert row.methods[name].speedup == pytest.approx(ratio)


def test_what_was_not_measured_has_no_figure(vgg):
    some = curve((64, 1e6), (256, 1.5e6))
    (row,) = burst.scale(vgg, some, batch=64, gpus=(8,))
    assert row.methods["weak"] is None  # 512 samples
    assert row.methods["batch-optimal"].batch <= 256
    with pytest.raises(SpecError, match="batches 64 to 256, but 32 is needed"):
        burst.scale(vgg, some, batch=32, gpus=(8,))
    with pytest.raises(SpecError, match="was profiled for 1 to 256 samples"):
        burst.scale(vgg, CRITICAL, batch=512, gpus=(8,))


def test_a_slow_network_favors_weak_scaling(vgg):
    def ratio(bandwidth):
        (row,) = burst.scale(
            vgg, CRITICAL, batch=256, gpus=(256,), bandwidth_bytes_per_s=bandwidth
        )
        return row.methods["weak"].speedup / row.methods["strong"].speedup

    assert ratio(10e9 / 8) > 1 > ratio(4800e9 / 8)  # DeepPool, Figure 3


# files


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SampleEfficiency(name="x"), "points or a critical_batch, got neither"),
        (
            lambda: SampleEfficiency(
                name="x",
                critical_batch=3.0,
                points=(BatchSamples(batch=1, samples=1.0),),
            ),
            "got both",
        ),
        (lambda: curve((2, 1.0), (2, 1.0)), "must ascend"),
        (lambda: curve((2, 0.0)), "samples"),
        (lambda: SampleEfficiency(name="x", critical_batch=0.0), "critical_batch"),
    ],
)
def test_curves_that_break_a_rule_are_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_curves_are_read_from_both_kinds_of_file(tmp_path):
    some = curve((64, 1e6), (1024, 4e6))
    some.save(tmp_path / "c.json")
    assert SampleEfficiency.load(tmp_path / "c.json") == some
    table = tmp_path / "measured.csv"
    table.write_text("batch,samples,error\n1024,4e6,1\n64,1e6,2\n")
    assert SampleEfficiency.load(table) == some
    for text, message in (
        ("size,samples\n1,2\n", "first line must name"),
        ("batch,samples,batch\n1,2,3\n", "line 1: column 'batch' is a duplicate"),
        ("batch,samples\n1,2\nx,3\n", "line 3: must be a batch and samples"),
        ("batch,samples\n1\n", "line 2"),
        ("batch,samples\n64,1,3\n", "line 2: has more cells"),
        ("batch,samples\n", "has no rows after the first line"),
        ("batch,samples\n64,1\n64,2\n", "measured.csv: batches must ascend"),
    ):
        table.write_text(text)
        with pytest.raises(SpecError, match=message):
            SampleEfficiency.load(table)
    with pytest.raises(SpecError, match="cannot be read"):
        SampleEfficiency.load(tmp_path / "none.csv")


def test_the_command_prints_all_ways_and_draws_them(vgg, tmp_path):
    vgg.save(tmp_path / "p.json")
    page = tmp_path / "page.html"
    args = ["scale", f"{tmp_path}/p.json", "--efficiency", "critical:1024"]
    args += ["--batch", "256", "--gpus", "1,64,4096"]
    done = CliRunner().invoke(command, [*args, "--report", str(page)])
    assert done.exit_code == 0, done.output
    for name in METHODS:
        assert name in done.output
        assert name in page.read_text()
    assert "<svg" in page.read_text()
    assert "NaN" not in page.read_text()
    done = CliRunner().invoke(command, [*args, "--json"])
    rows = json.loads(done.stdout)["scaling"]
    assert [row["gpus"] for row in rows] == [1, 64, 4096]
    assert rows[0]["ways"]["strong"]["speedup"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("critical:x", "needs a number"),
        ("critical:0", "critical_batch"),
        ("no", "read"),
    ],
)
def test_an_invalid_curve_is_refused(vgg, tmp_path, given, message):
    vgg.save(tmp_path / "p.json")
    done = CliRunner().invoke(
        command, ["scale", f"{tmp_path}/p.json", "--batch", "1", "--efficiency", given]
    )
    assert isinstance(done.exception, SpecError)
    assert message in str(done.exception)


def test_the_batch_of_weak_scaling_is_tried_for_three_gpus(vgg):
    (row,) = burst.scale(vgg, CRITICAL, batch=64, gpus=(3,))
    assert {24, 48, 96, 192} <= set(row.batches)


def test_batch_optimal_is_not_behind_weak_scaling_on_three_gpus(vgg):
    (row,) = burst.scale(vgg, CRITICAL, batch=64, gpus=(3,))
    best, weak = row.methods["batch-optimal"], row.methods["weak"]
    assert best.speedup >= weak.speedup


def test_the_command_says_which_batches_were_tried(vgg, tmp_path):
    vgg.save(tmp_path / "layers.json")
    result = CliRunner().invoke(
        command,
        f"scale {tmp_path}/layers.json --efficiency critical:1024 --batch 2 --gpus 3",
    )
    assert "batches tried: 1, 2, 3, 4, 6, 8" in result.output


@pytest.mark.parametrize("more", ["", "--front"])
def test_cores_without_a_simulated_step_are_refused(vgg, tmp_path, more):
    vgg.save(tmp_path / "layers.json")
    result = CliRunner().invoke(
        command,
        f"plan {tmp_path}/layers.json --gpus 4 --batch 8 --cores 2 {more}",
    )
    assert "--cores applies to simulated steps only" in result.output


def test_a_plan_without_the_widest_layers_is_compared_with_its_own_widest(
    vgg, tmp_path
):
    vgg.save(tmp_path / "layers.json")
    result = CliRunner().invoke(
        command,
        f"plan {tmp_path}/layers.json --gpus 4 --batch 4 --widths 1,2",
    )
    assert "every layer on 2 GPUs" in result.output


def test_fewer_samples_than_gpus_are_compared_with_a_gpu_for_each(vgg, tmp_path):
    vgg.save(tmp_path / "layers.json")
    result = CliRunner().invoke(
        command, f"plan {tmp_path}/layers.json --gpus 8 --batch 4"
    )
    assert "every layer on 4 GPUs" in result.output
