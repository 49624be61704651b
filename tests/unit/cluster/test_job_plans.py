"""Speeds and burst plans of a profiled job."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from stretto import zoo
from stretto.cluster import job_plans
from stretto.cluster.folders import Folders, Settings
from stretto.cluster.job_plans import plan_job
from stretto.cluster.views import BURST, DATA_PARALLEL
from stretto.errors import SpecError
from stretto.schema.burst import BurstPlan
from stretto.schema.collocation import Collocation
from stretto.schema.job import BurstOptions, GpuRange, Job
from support.pairs import measured_pair

if TYPE_CHECKING:
    from pathlib import Path

PROFILE = zoo.layer_profile("vgg11", samples=(1, 2, 4, 8, 16, 32))
NETWORK = zoo.cluster("deeppool")


def job_of(**fields: Any) -> Job:
    known: dict[str, Any] = {
        "name": "vgg",
        "role": "foreground",
        "command": ("train.py",),
        "directory": "/",
        "gpus": GpuRange(minimum=1, maximum=4),
        "batch": 32,
        "burst": BurstOptions(factory="train.py:make", amplification_limit=2.0),
    }
    return Job(**known | fields)


PAIR = measured_pair(loss_ratio=0.05)


def test_speeds_cover_powers_of_two_up_to_the_jobs_most() -> None:
    found = plan_job(job_of(), PROFILE, NETWORK, devices=8)
    assert [row.gpus for row in found.speeds.methods[BURST]] == [1, 2, 4]
    assert sorted(found.plans) == [1, 2, 4]


def test_one_device_has_speedup_1_and_no_idle_time() -> None:
    found = plan_job(job_of(), PROFILE, NETWORK, devices=1)
    for method in (DATA_PARALLEL, BURST):
        (row,) = found.speeds.methods[method]
        assert row.speedup == pytest.approx(1.0)
        assert row.idle_ratios == pytest.approx((0.0,), abs=1e-9)


def test_without_a_limit_a_burst_plan_is_at_least_as_fast_as_data_parallelism() -> None:
    spec = job_of(burst=BurstOptions(factory="train.py:make"))
    speeds = plan_job(spec, PROFILE, NETWORK, devices=4).speeds
    for plain, burst in zip(
        speeds.methods[DATA_PARALLEL], speeds.methods[BURST], strict=True
    ):
        # Plans within 2 % are equal, and the one that computes less is taken.
        assert burst.step_s <= 1.02 * plain.step_s


def test_a_measured_pair_gives_rates_of_backgrounds_and_the_loss() -> None:
    speeds = plan_job(job_of(), PROFILE, NETWORK, devices=4, pair=PAIR).speeds
    row = speeds.methods[BURST][-1]
    assert len(row.background) == 4
    assert row.loss == pytest.approx(1.0 - 1.0 / 1.05)


def test_without_a_pair_no_background_is_promised() -> None:
    speeds = plan_job(job_of(), PROFILE, NETWORK, devices=4).speeds
    assert all(row.background == () for rows in speeds.methods.values() for row in rows)


def test_a_job_without_batch_cannot_be_planned() -> None:
    with pytest.raises(SpecError, match="has no batch"):
        plan_job(job_of(batch=None), PROFILE, NETWORK, devices=4)


def test_a_batch_beyond_the_profile_names_the_reason() -> None:
    with pytest.raises(SpecError, match="cannot be planned: "):
        plan_job(job_of(batch=4096), PROFILE, NETWORK, devices=1)


def folders_of(root: Path, **settings: Any) -> Folders:
    folders = Folders(root)
    folders.create()
    hosts = {"host0": ("cpu:0", "cpu:1")}
    folders.save_settings(Settings(hosts=hosts, policy="fifo", **settings))
    return folders


def test_the_process_writes_what_the_coordinator_reads(tmp_path: Path) -> None:
    Collocation(rows=(PAIR,)).save(tmp_path / "pairs.json")
    folders = folders_of(tmp_path / "c", collocation=str(tmp_path / "pairs.json"))
    PROFILE.save(tmp_path / "layers.json")
    spec = dataclasses.replace(job_of(), directory=str(tmp_path))
    job_plans.save_request(folders, "vgg-1", spec)
    job_plans.main(str(folders.root), "vgg-1", "layers.json")
    speeds, why = job_plans.read_answer(folders, "vgg-1")
    assert why == ""
    expected = plan_job(spec, PROFILE, NETWORK, devices=2, pair=PAIR)
    assert speeds == expected.speeds
    plan = BurstPlan.load(folders.plan("vgg-1", 2))
    assert plan.layers == expected.plans[2].layers


def test_the_process_finds_the_plans_in_a_shared_folder(tmp_path: Path) -> None:
    folders = folders_of(tmp_path / "c", shared=str(tmp_path / "shared"))
    folders.load_settings()
    PROFILE.save(tmp_path / "layers.json")
    spec = dataclasses.replace(job_of(), directory=str(tmp_path))
    job_plans.save_request(folders, "vgg-1", spec)
    job_plans.main(str(folders.root), "vgg-1", "layers.json")
    assert job_plans.read_answer(folders, "vgg-1")[0] is not None


def test_damaged_settings_are_the_reason_and_named(tmp_path: Path) -> None:
    folders = folders_of(tmp_path / "c")
    job_plans.save_request(folders, "vgg-1", job_of())
    folders.settings.write_text("")
    job_plans.main(str(folders.root), "vgg-1", "layers.json")
    why = job_plans.read_answer(folders, "vgg-1")[1]
    assert f"{folders.settings} cannot be read" in why


def test_a_missing_profile_is_the_reason_not_an_error(tmp_path: Path) -> None:
    folders = folders_of(tmp_path / "c")
    job_plans.save_request(folders, "vgg-1", job_of())
    job_plans.main(str(folders.root), "vgg-1", "/nowhere.json")
    speeds, why = job_plans.read_answer(folders, "vgg-1")
    assert speeds is None
    assert "/nowhere.json" in why


def test_a_process_without_an_answer_is_a_reason(tmp_path: Path) -> None:
    speeds, why = job_plans.read_answer(folders_of(tmp_path / "c"), "vgg-1")
    assert (speeds, "without an answer" in why) == (None, True)
