"""Plans kept between runs: found again, nearest first, and never in the way."""

from __future__ import annotations

import logging
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stretto.errors import SpecError
from stretto.schema import codec
from stretto.tune import TuneOptions
from stretto.tune.job_similarity import RateTopology
from stretto.tune.plan_cache import (
    CachedPlan,
    PlanCache,
    PlanMemory,
    TunedJob,
    Unreadable,
    default_path,
    topology_of,
)

if TYPE_CHECKING:
    from stretto.schema import Cluster, Workload
    from stretto.tune.search_space import Space


@pytest.fixture
def settled(space: Space, workload: Workload, cluster: Cluster) -> CachedPlan:
    return CachedPlan(
        job=TunedJob(
            name="small",
            model="sha256:1",
            hosts=4,
            ranks_per_host=1,
            environment="torch 2.13 gloo cpu",
        ),
        plan=space.plan(space.points[3], cluster),
        workload=workload,
        cluster=cluster,
        step_s=0.25,
        ddp_step_s=0.5,
    )


def test_what_is_kept_is_found_again_by_an_equal_job_only(
    tmp_path: Path, settled: CachedPlan
) -> None:
    memory = PlanCache(tmp_path / "deep" / "plans.sqlite", strict=True)
    memory.store(settled)
    found = PlanCache(tmp_path / "deep" / "plans.sqlite", strict=True).exact(
        replace(settled.job, name="another name")
    )
    assert found is not None
    assert replace(found, number=None, at="") == settled
    for change in (
        {"model": "sha256:2"},
        {"hosts": 2},
        {"ranks_per_host": 2},
        {"environment": "torch 2.14 gloo cpu"},
    ):
        assert memory.exact(replace(settled.job, **change)) is None


def test_a_later_settlement_of_the_job_replaces_the_earlier(
    tmp_path: Path, settled: CachedPlan
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    memory.store(settled)
    memory.store(replace(settled, step_s=0.2))
    assert [entry.step_s for entry in memory.all()] == [0.2]


def test_the_nearest_job_comes_first(
    tmp_path: Path, settled: CachedPlan, workload: Workload
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    memory.store(settled)
    far = replace(
        workload,
        tensors=tuple(replace(t, bytes=64 * t.bytes) for t in workload.tensors),
    )
    memory.store(
        replace(settled, workload=far, job=replace(settled.job, model="sha256:far"))
    )
    near = replace(
        workload,
        tensors=tuple(replace(t, bytes=t.bytes + 4) for t in workload.tensors),
    )
    topology = RateTopology(hosts=4, ranks_per_host=1)
    found = memory.nearest(near, topology, settled.job.environment)
    assert found is not None
    assert found[0].job.model == "sha256:1"
    assert 0 < found[1] < 0.01
    assert memory.nearest(near, topology, "elsewhere") is None


def test_entries_are_forgotten_one_by_one_and_all(
    tmp_path: Path, settled: CachedPlan
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    for i in range(3):
        memory.store(replace(settled, job=replace(settled.job, model=f"m{i}")))
    second = memory.all()[1]
    assert second.number is not None
    assert memory.delete(second.number) == 1
    assert memory.delete(second.number) == 0
    assert [entry.job.model for entry in memory.all()] == ["m2", "m0"]
    assert memory.delete() == 2
    assert memory.all() == []


@pytest.mark.parametrize("what", ["corrupt", "version", "foreign", "folder"])
def test_a_file_that_can_not_be_used_costs_one_warning_and_nothing_else(
    tmp_path: Path, settled: CachedPlan, caplog: pytest.LogCaptureFixture, what: str
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
    else:
        path.mkdir()
    memory = PlanCache(path)
    with caplog.at_level(logging.WARNING):
        assert memory.exact(settled.job) is None
        memory.store(settled)
        assert memory.all() == []
        assert memory.delete() == 0
    assert len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert str(path) in line
    assert "STRETTO_PLAN_CACHE" in line
    with pytest.raises(SpecError, match=r"plans\.sqlite: can't look plans up"):
        PlanCache(path, strict=True).all()


@pytest.mark.parametrize("column", ["plan", "workload", "cluster", "step_s", "hosts"])
def test_an_entry_that_can_not_be_read_costs_one_warning_and_no_other_entry(
    tmp_path: Path, settled: CachedPlan, caplog: pytest.LogCaptureFixture, column: str
) -> None:
    path = tmp_path / "plans.sqlite"
    other = replace(settled, job=replace(settled.job, model="sha256:2"))
    for entry in (settled, other):
        PlanCache(path, strict=True).store(entry)
    with sqlite3.connect(path) as file:
        file.execute(f"UPDATE settled SET {column} = '{{}}' WHERE id = 1")
    file.close()
    memory = PlanCache(path, strict=True)
    readable, broken = memory.all()
    assert isinstance(readable, CachedPlan)
    assert isinstance(broken, Unreadable)
    assert (broken.number, broken.name) == (1, "small")
    assert broken.why
    with caplog.at_level(logging.WARNING):
        memory.exact(settled.job)
        found = memory.nearest(
            settled.workload, topology_of(settled.cluster), settled.job.environment
        )
    assert found is not None
    assert found[0].number == 2
    (record,) = caplog.records
    line = record.getMessage()
    assert str(path) in line
    assert "entry 1 can't be read" in line
    assert "`stretto tune forget 1`" in line
    # What this run finds out may stand in its place.
    assert memory.store(replace(settled, unfinished_steps=9))
    assert memory.exact(settled.job) is not None


def kept_of(memory: PlanCache, job: TunedJob) -> tuple[float, int | None]:
    """Return the step time and the unfinished steps of a job's plan."""
    found = memory.exact(job)
    assert found is not None
    return found.step_s, found.unfinished_steps


@pytest.fixture
def early(settled: CachedPlan) -> CachedPlan:
    """Return the settled plan's job with a plan of a run that ended early."""
    return replace(settled, step_s=0.3, unfinished_steps=20)


def test_a_later_plan_of_a_job_replaces_an_unfinished_one(
    tmp_path: Path, settled: CachedPlan, early: CachedPlan
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    assert memory.store(early)
    assert memory.store(replace(early, step_s=0.28, unfinished_steps=40))
    assert kept_of(memory, settled.job) == (0.28, 40)
    assert memory.store(settled)
    assert kept_of(memory, settled.job) == (0.25, None)


def test_an_unfinished_plan_never_replaces_a_settled_one_that_holds(
    tmp_path: Path, settled: CachedPlan, early: CachedPlan
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    memory.store(settled)
    assert not memory.store(early)
    assert not memory.store(early, refuted=999)
    assert kept_of(memory, settled.job) == (0.25, None)


def test_an_unfinished_plan_of_another_job_is_stored(
    tmp_path: Path, settled: CachedPlan, early: CachedPlan
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    memory.store(settled)
    assert memory.store(replace(early, job=replace(early.job, model="sha256:2")))


def test_an_unfinished_plan_replaces_a_settled_one_that_it_refutes(
    tmp_path: Path, settled: CachedPlan, early: CachedPlan
) -> None:
    memory = PlanCache(tmp_path / "plans.sqlite", strict=True)
    memory.store(settled)
    found = memory.exact(settled.job)
    assert found is not None
    assert memory.store(early, refuted=found.number)
    assert kept_of(memory, settled.job) == (0.3, 20)


EARLIER_LAYOUT = """
CREATE TABLE settled (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    name TEXT NOT NULL,
    model TEXT NOT NULL,
    hosts INTEGER NOT NULL,
    ranks_per_host INTEGER NOT NULL,
    surroundings TEXT NOT NULL,
    step_s REAL NOT NULL,
    ddp_step_s REAL,
    workload TEXT NOT NULL,
    cluster TEXT NOT NULL,
    plan TEXT NOT NULL,
    UNIQUE (model, hosts, ranks_per_host, surroundings)
)
"""


def test_a_file_from_before_unfinished_plans_is_read_as_it_is_and_then_widened(
    tmp_path: Path, settled: CachedPlan
) -> None:
    path = tmp_path / "plans.sqlite"
    job = settled.job
    columns = "name, hosts, ranks_per_host, surroundings, step_s, ddp_step_s, "
    values: list[object] = [job.name, job.hosts, job.ranks_per_host, job.environment]
    values += [settled.step_s, settled.ddp_step_s]
    values += map(codec.encode, (settled.workload, settled.cluster, settled.plan))

    def earlier_stretto_settles(model: str) -> None:
        with sqlite3.connect(path) as file:
            file.execute(
                f"INSERT OR REPLACE INTO settled ({columns} workload, cluster, plan, "
                "model) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [*values, model],
            )
        file.close()

    with sqlite3.connect(path) as file:
        file.execute(EARLIER_LAYOUT)
        file.execute("PRAGMA user_version = 1")
    file.close()
    earlier_stretto_settles("sha256:1")
    memory = PlanCache(path, strict=True)
    before = path.read_bytes()
    found = memory.exact(job)
    assert found is not None
    assert replace(found, number=None, at="") == settled
    assert path.read_bytes() == before  # looking changes nothing
    early = replace(settled, job=replace(job, model="sha256:2"), unfinished_steps=7)
    assert memory.store(early)
    found = memory.exact(early.job)
    assert found is not None
    assert found.unfinished_steps == 7
    # The earlier stretto continues with the same file, and what it settles is settled.
    earlier_stretto_settles("sha256:2")
    found = memory.exact(early.job)
    assert found is not None
    assert found.unfinished_steps is None
    assert not memory.store(early)


def test_a_locked_file_is_given_up_after_a_moment(
    tmp_path: Path,
    settled: CachedPlan,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stretto.tune.plan_cache._LOCK_S", 0.1)
    path = tmp_path / "plans.sqlite"
    PlanCache(path, strict=True).store(settled)
    holder = sqlite3.connect(path)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with caplog.at_level(logging.WARNING):
            PlanCache(path).store(settled)
    finally:
        holder.close()
    assert "locked" in caplog.text


def test_several_jobs_write_at_once_and_none_is_lost(
    tmp_path: Path, settled: CachedPlan
) -> None:
    path = tmp_path / "plans.sqlite"
    errors: list[BaseException] = []

    def job(first: int) -> None:
        try:
            for i in range(first, first + 10):
                PlanCache(path, strict=True).store(
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
    assert len(PlanCache(path, strict=True).all()) == 40


def test_the_environment_says_where_or_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: CachedPlan
) -> None:
    monkeypatch.setenv("STRETTO_PLAN_CACHE", str(tmp_path / "here.sqlite"))
    assert default_path() == tmp_path / "here.sqlite"
    monkeypatch.setenv("STRETTO_PLAN_CACHE", "off")
    assert default_path() is None
    memory = PlanCache(default_path(), strict=True)
    memory.store(settled)
    assert memory.all() == []
    monkeypatch.delenv("STRETTO_PLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "stretto" / "plans.sqlite"


def test_the_former_variable_is_read_if_the_other_is_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_MEMORY", "off")
    monkeypatch.setenv("STRETTO_PLAN_CACHE", str(tmp_path / "here.sqlite"))
    assert default_path() == tmp_path / "here.sqlite"
    monkeypatch.delenv("STRETTO_PLAN_CACHE")
    assert default_path() is None


def test_the_former_option_means_the_same() -> None:
    assert TuneOptions(memory=False) == TuneOptions(plan_cache=False)


def test_without_a_home_no_plan_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("STRETTO_PLAN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert default_path() is None
    assert "set HOME, or name a file in STRETTO_PLAN_CACHE" in caplog.text


def test_the_former_names_do_the_same(tmp_path: Path, settled: CachedPlan) -> None:
    memory = PlanMemory(tmp_path / "plans.sqlite", strict=True)
    assert memory.remember(settled)
    assert memory.forget() == 1
    assert PlanMemory is PlanCache
