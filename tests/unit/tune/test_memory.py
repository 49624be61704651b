"""Plans kept between runs: found again, nearest first, and never in the way."""

from __future__ import annotations

import logging
import sqlite3
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stretto.errors import SpecError
from stretto.tune.likeness import Topology
from stretto.tune.memory import Job, PlanMemory, Remembered, default_path

if TYPE_CHECKING:
    from pathlib import Path

    from stretto.schema import Cluster, Workload
    from stretto.tune.space import Space


@pytest.fixture
def settled(space: Space, workload: Workload, cluster: Cluster) -> Remembered:
    return Remembered(
        job=Job(
            name="small",
            model="sha256:1",
            hosts=4,
            ranks_per_host=1,
            surroundings="torch 2.13 gloo cpu",
        ),
        plan=space.plan(space.points[3], cluster),
        workload=workload,
        cluster=cluster,
        step_s=0.25,
        ddp_step_s=0.5,
    )


def test_what_is_kept_is_found_again_by_an_equal_job_only(
    tmp_path: Path, settled: Remembered
) -> None:
    memory = PlanMemory(tmp_path / "deep" / "plans.sqlite", strict=True)
    memory.remember(settled)
    found = PlanMemory(tmp_path / "deep" / "plans.sqlite", strict=True).exact(
        replace(settled.job, name="another name")
    )
    assert found is not None
    assert replace(found, number=None, at="") == settled
    for change in (
        {"model": "sha256:2"},
        {"hosts": 2},
        {"ranks_per_host": 2},
        {"surroundings": "torch 2.14 gloo cpu"},
    ):
        assert memory.exact(replace(settled.job, **change)) is None


def test_a_later_settlement_of_the_job_stands_in_place_of_the_earlier(
    tmp_path: Path, settled: Remembered
) -> None:
    memory = PlanMemory(tmp_path / "plans.sqlite", strict=True)
    memory.remember(settled)
    memory.remember(replace(settled, step_s=0.2))
    assert [entry.step_s for entry in memory.all()] == [0.2]


def test_the_nearest_job_comes_first(
    tmp_path: Path, settled: Remembered, workload: Workload
) -> None:
    memory = PlanMemory(tmp_path / "plans.sqlite", strict=True)
    memory.remember(settled)
    far = replace(
        workload,
        tensors=tuple(replace(t, bytes=64 * t.bytes) for t in workload.tensors),
    )
    memory.remember(
        replace(settled, workload=far, job=replace(settled.job, model="sha256:far"))
    )
    near = replace(
        workload,
        tensors=tuple(replace(t, bytes=t.bytes + 4) for t in workload.tensors),
    )
    topology = Topology(hosts=4, ranks_per_host=1)
    found = memory.nearest(near, topology, settled.job.surroundings)
    assert found is not None
    assert found[0].job.model == "sha256:1"
    assert 0 < found[1] < 0.01
    assert memory.nearest(near, topology, "elsewhere") is None


def test_entries_are_forgotten_one_by_one_and_all(
    tmp_path: Path, settled: Remembered
) -> None:
    memory = PlanMemory(tmp_path / "plans.sqlite", strict=True)
    for i in range(3):
        memory.remember(replace(settled, job=replace(settled.job, model=f"m{i}")))
    second = memory.all()[1]
    assert second.number is not None
    assert memory.forget(second.number) == 1
    assert memory.forget(second.number) == 0
    assert [entry.job.model for entry in memory.all()] == ["m2", "m0"]
    assert memory.forget() == 2
    assert memory.all() == []


@pytest.mark.parametrize("what", ["corrupt", "version", "foreign", "folder", "row"])
def test_a_file_that_can_not_be_used_costs_one_warning_and_nothing_else(
    tmp_path: Path, settled: Remembered, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    path = tmp_path / "plans.sqlite"
    if what == "corrupt":
        path.write_bytes(b"no database at all, by far" * 100)
    elif what == "version":
        with sqlite3.connect(path) as file:
            file.execute("PRAGMA user_version = 99")
        file.close()
    elif what == "foreign":
        with sqlite3.connect(path) as file:
            file.execute("CREATE TABLE somebody_elses (x)")
        file.close()
    elif what == "folder":
        path.mkdir()
    else:
        PlanMemory(path, strict=True).remember(settled)
        with sqlite3.connect(path) as file:
            file.execute("UPDATE settled SET plan = '{}'")
        file.close()
    memory = PlanMemory(path)
    with caplog.at_level(logging.WARNING):
        assert memory.exact(settled.job) is None
        memory.remember(settled)
        assert memory.all() == []
        assert memory.forget() == 0
    assert len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert str(path) in line
    assert "STRETTO_MEMORY" in line
    with pytest.raises(SpecError, match=r"plans\.sqlite: can't look plans up"):
        PlanMemory(path, strict=True).all()


def test_a_locked_file_is_given_up_after_a_moment(
    tmp_path: Path,
    settled: Remembered,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stretto.tune.memory._LOCK_S", 0.1)
    path = tmp_path / "plans.sqlite"
    PlanMemory(path, strict=True).remember(settled)
    holder = sqlite3.connect(path)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with caplog.at_level(logging.WARNING):
            PlanMemory(path).remember(settled)
    finally:
        holder.close()
    assert "locked" in caplog.text


def test_several_jobs_write_at_once_and_none_is_lost(
    tmp_path: Path, settled: Remembered
) -> None:
    path = tmp_path / "plans.sqlite"
    errors: list[BaseException] = []

    def job(first: int) -> None:
        try:
            for i in range(first, first + 10):
                PlanMemory(path, strict=True).remember(
                    replace(settled, job=replace(settled.job, model=f"m{i}"))
                )
        except BaseException as exc:  # noqa: BLE001
            errors.append(exc)

    threads = [threading.Thread(target=job, args=(10 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(PlanMemory(path, strict=True).all()) == 40


def test_the_environment_says_where_or_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: Remembered
) -> None:
    monkeypatch.setenv("STRETTO_MEMORY", str(tmp_path / "here.sqlite"))
    assert default_path() == tmp_path / "here.sqlite"
    monkeypatch.setenv("STRETTO_MEMORY", "off")
    assert default_path() is None
    memory = PlanMemory(default_path(), strict=True)
    memory.remember(settled)
    assert memory.all() == []
    monkeypatch.delenv("STRETTO_MEMORY")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "stretto" / "plans.sqlite"
