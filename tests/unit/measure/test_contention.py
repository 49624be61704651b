"""The loop that reads contention, on benches that follow the model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from click.testing import CliRunner

from stretto.cli.probe import command
from stretto.cost.contention import curve_bytes_per_s
from stretto.cost.resource_contention import fit_compute, with_contention
from stretto.errors import Infeasible, NoisyProfile, SpecError
from stretto.measure import AbstractContentionBench, read_contention
from stretto.measure.load import backward
from stretto.schema import ComputeContention, Link, RateCurve
from support.instances import one_link

ALPHA = ComputeContention(alpha1=0.99, alpha2=0.012)
BESIDE = RateCurve(gamma1=4.0e8, gamma2=3.6e8, gamma3=0.25, gamma4=0.6)
ALONE = RateCurve(gamma1=4.4e8, gamma2=3.9e8, gamma3=0.3, gamma4=0.6)
STARTUP_S = 3e-4
RANKS = 4


@dataclass
class ModelBench(AbstractContentionBench):
    """Times that LIBRA's Eq. 5 and 6 give, on a machine that slows from call to call.

    ``noise`` is the standard deviation of each time, relative.
    """

    noise: float = 0.0
    drift: float = 0.0
    peers: bool = True
    calls: list = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(3))

    @property
    def wire_factor(self):
        return 2 * (RANKS - 1) / RANKS if self.peers else None

    def compute_s(self, resource):
        self.calls.append(("compute", resource))
        sigma = 1.0
        if resource is not None:
            sigma = ALPHA.alpha1 - ALPHA.alpha2 * resource
        return self._seen(0.05 / sigma)

    def send_s(self, resource, size_bytes, *, beside):
        assert self.peers
        self.calls.append(("send", resource, size_bytes, beside))
        rate = curve_bytes_per_s(BESIDE if beside else ALONE, resource)
        return self._seen(STARTUP_S + self.wire_factor * size_bytes / rate)

    def agree(self, value):
        return value

    def slowest(self, values):
        return list(values)

    def provenance(self):
        return {"communication": "model"}

    def _seen(self, true_s):
        slower = 1 + self.drift * len(self.calls)
        return true_s * slower * (1 + self.noise * self.rng.gauss(0, 1))


def cluster(rate=5e8):
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=rate)
    return one_link(link, name="here", hosts=RANKS)


LEVELS = (1, 2, 4, 8, 16, 32)


def test_exact_times_give_the_coefficients_back():
    made = with_contention(
        cluster(), read_contention(ModelBench(), resources=LEVELS, repetitions=3)
    )
    found = made.contention
    assert found.resources == LEVELS
    assert found.compute.alpha1 == pytest.approx(ALPHA.alpha1, rel=1e-6)
    assert found.compute.alpha2 == pytest.approx(ALPHA.alpha2, rel=1e-6)
    for curve, true in ((found.overlapped, BESIDE), (found.exclusive, ALONE)):
        for level in (*LEVELS, 12, 24):
            rate = curve_bytes_per_s(curve, level)
            assert rate == pytest.approx(curve_bytes_per_s(true, level), rel=1e-3)
    report = made.provenance["contention"]
    for part in ("slowdown", "overlapped", "exclusive"):
        assert max(map(abs, report[part]["residual_ratios"])) < 1e-3
    assert report["communication"] == "model"


def test_noise_and_a_machine_that_slows_move_the_coefficients_little():
    bench = ModelBench(noise=0.01, drift=1e-3)
    readings = read_contention(bench, resources=LEVELS, repetitions=9)
    found = fit_compute(readings)
    assert found.value.alpha1 == pytest.approx(ALPHA.alpha1, rel=0.02)
    assert found.value.alpha2 == pytest.approx(ALPHA.alpha2, rel=0.1)
    for level in LEVELS:
        rate = curve_bytes_per_s(
            with_contention(cluster(), readings).contention.overlapped, level
        )
        assert rate == pytest.approx(curve_bytes_per_s(BESIDE, level), rel=0.35)


def test_without_peers_only_the_slow_down_is_read():
    bench = ModelBench(peers=False)
    readings = read_contention(bench, resources=(1, 4, 8), repetitions=3)
    assert readings.rates == ()
    assert not [call for call in bench.calls if call[0] == "send"]
    assert fit_compute(readings).value.alpha2 == pytest.approx(ALPHA.alpha2)
    with pytest.raises(SpecError, match="without peers"):
        with_contention(cluster(), readings)


def test_every_beside_has_its_alone_just_before_it_and_turns_differ_in_order():
    bench = ModelBench(peers=False)
    read_contention(bench, resources=(1, 2, 3, 4), repetitions=4)
    warm_up = 1 + 4
    pairs = bench.calls[warm_up:]
    assert all(resource is None for _, resource in pairs[::2])
    turns = [tuple(pairs[i : i + 8][1::2]) for i in range(0, len(pairs), 8)]
    assert all(sorted(turn) == sorted(turns[0]) for turn in turns)
    assert len(set(turns)) > 1


def test_the_budget_ends_the_turns_but_not_before_three():
    bench = ModelBench(peers=False)
    found = read_contention(bench, resources=(1, 2), repetitions=50, budget_s=0.0)
    assert {reading.repetitions for reading in found.slowdowns} == {3}


def test_the_slowest_rank_counts():
    class Two(ModelBench):
        def slowest(self, values):
            return [3 * v for v in values]

    one = read_contention(ModelBench(), resources=(1, 8), repetitions=3)
    two = read_contention(Two(), resources=(1, 8), repetitions=3)
    assert two.slowdowns[0].compute_alone_s == pytest.approx(
        3 * one.slowdowns[0].compute_alone_s
    )
    assert two.rates[0].exclusive_s == pytest.approx(3 * one.rates[0].exclusive_s)


def test_wrong_levels_and_sizes_are_refused():
    with pytest.raises(SpecError, match="at least two levels"):
        read_contention(ModelBench(), resources=(4,))
    with pytest.raises(SpecError, match="at least 1"):
        read_contention(ModelBench(), resources=(0, 4))
    with pytest.raises(SpecError, match="larger than the first"):
        read_contention(ModelBench(), resources=(1, 4), sizes_bytes=(8, 8))


def test_times_that_do_not_grow_and_computation_that_speeds_up_are_refused():
    class Flat(ModelBench):
        def send_s(self, resource, size_bytes, *, beside):
            return 1e-3

    with pytest.raises(NoisyProfile, match="with resource 1, alone"):
        read_contention(Flat(), resources=(1, 4), repetitions=3)

    class Faster(ModelBench):
        def compute_s(self, resource):
            return 0.05 if resource is None else 0.03

    readings = read_contention(Faster(), resources=(1, 4), repetitions=3)
    with pytest.raises(Infeasible, match="faster than alone"):
        fit_compute(readings)


def test_the_gpus_load_is_backward_alone_and_can_be_run_again():
    torch.manual_seed(1)
    once = backward(torch.device("cpu"))
    once()
    once()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--synthetic"], ("CUDA device", "--resources")),
        ([], ("-o FILE",)),
    ],
)
def test_a_probe_that_can_not_run_says_what_to_do(monkeypatch, arguments, words):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecError) as caught:
        CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert all(word in str(caught.value) for word in words)


def test_resources_that_are_no_numbers_are_refused():
    done = CliRunner().invoke(command, ["-o", "c.json", "--resources", "1,x"])
    assert done.exit_code == 2
    assert "'--resources': numbers from 1 to" in done.output
