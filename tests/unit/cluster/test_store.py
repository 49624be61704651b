"""The store: what it keeps, whom it refuses, and what a full disk does."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import stat

import pytest

from stretto.cluster import engine_local, processes, server, step_thinning, wire
from stretto.cluster import events as ev
from stretto.cluster import store as stores
from stretto.cluster.coordinator import Clock, Coordinator
from stretto.cluster.folders import Folders, Settings
from stretto.cluster.ledger import Ledger
from stretto.cluster.part_spec import base_environment, rank_commands
from stretto.cluster.policies import registry
from stretto.cluster.state import State
from stretto.cluster.store import (
    Store,
    read_events,
    read_only,
    read_page,
    read_spec,
    read_table,
)
from stretto.cluster.tables import TABLES, all_rows
from stretto.errors import ClusterError, SpecError, StoreUnavailable
from stretto.schema import codec
from support.cluster_world import LIMITS, World
from support.clusters import job, part_spec_of


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "cluster")
    yield opened
    opened.close()


@pytest.fixture
def world(store):
    return World(registry.get("deeppool"), (2, 2), store)


def submit_many(world):
    for _ in range(200):
        world.submit(minimum=1)


def busy(world):
    jobs = [
        world.submit(minimum=2),
        world.submit("background", 1, 2),
        world.submit(minimum=1, burst="profiled"),
    ]
    world.advance(4.0, 4)
    world.coordinator.stop(jobs[0])
    world.advance(4.0, 4)
    return jobs


def test_tables_are_the_fold_of_events(world, store):
    busy(world)
    ledger = Ledger(world.policy, LIMITS)
    for event in store.events():
        ledger.apply(event)
    database = read_only(store._folder)
    for table, rows in all_rows(ledger.state).items():
        raw = database.execute(f"SELECT * FROM {table}").fetchall()
        assert sorted(raw, key=str) == sorted(rows, key=str), table
    database.close()


def test_events_of_a_job_are_read_without_the_others(world, store, monkeypatch):
    # The coordinator answers no other request meanwhile, and hosts count as lost.
    name, *_ = busy(world)
    expected = [event for event in store.events() if event.job == name]
    decoded = []
    decode = stores.event_of_row
    monkeypatch.setattr(
        stores, "event_of_row", lambda row: decoded.append(row) or decode(row)
    )
    database = read_only(store._folder)
    rows = list(read_events(database, store._folder, since=1, job=name, steps=False))
    database.close()
    assert [event for seq, event in rows] == expected
    assert len(decoded) == len(expected)


def test_a_store_that_calls_a_method_a_way_is_read_and_renamed(tmp_path):
    store = Store(tmp_path / "cluster")
    world = World(registry.get("deeppool"), (2, 2), store)
    busy(world)
    rows = store._database.execute("SELECT job, method FROM attempts").fetchall()
    store._database.execute("ALTER TABLE attempts RENAME COLUMN method TO way")
    store._database.execute(
        "UPDATE events SET data = replace(data, '\"method\":', '\"way\":')"
    )
    store.close()
    again = Store(store._folder)
    ledger = Ledger(world.policy, LIMITS)
    for event in again.events():
        ledger.apply(event)
    assert all_rows(ledger.state) == all_rows(world.ledger.state)
    found = again._database.execute("SELECT job, method FROM attempts").fetchall()
    assert found == rows
    again.close()


@pytest.mark.parametrize("made_by", [codec.MADE_BY, "stretto 0.1.0"])
def test_a_page_of_events_is_what_the_events_are_as_json(tmp_path, made_by):
    store = Store(tmp_path / "cluster")
    busy(World(registry.get("deeppool"), (2, 2), store))
    expected = [
        {"seq": seq} | wire.plain_event(event)
        for seq, event in read_events(store._database, store._folder)
    ]
    store._database.execute(
        "UPDATE events SET data = replace(data, ?, ?)", (codec.MADE_BY, made_by)
    )
    found = read_page(store._database, store._folder, since=0, job=None)
    assert found == json.loads(json.dumps(expected))
    store.close()


def test_a_page_of_large_events_has_few_of_them(tmp_path, monkeypatch):
    store = Store(tmp_path / "cluster")
    busy(World(registry.get("deeppool"), (2, 2), store))
    monkeypatch.setattr(stores, "PAGE_BYTES", 1)
    page = read_page(store._database, store._folder, since=3, job=None)
    assert [row["seq"] for row in page] == [4]
    store.close()


def test_a_restart_continues(world):
    busy(world)
    world.restart()
    world.calm()


def test_the_last_step_is_known_after_a_restart(world, store):
    job = world.submit(minimum=1)
    world.advance(4.0, 4)
    host, supervisor = world.live()[0]
    for step in (5, 7):
        host.report(ev.STEP, job, supervisor.attempt, step=step)
        world.beat(host)
    ledger = Ledger(world.policy, LIMITS)
    Coordinator(ledger, store, lambda: world.now_s)
    assert ledger.state.records[job].progress[ev.STEP]["step"] == 7


def report_steps(world, job, counts):
    """Report steps as the job's host would, each in a message of its own."""
    host, supervisor = next(row for row in world.live() if row[1].job == job)
    for count in counts:
        host.report(ev.STEP, job, supervisor.attempt, step=count)
        world.beat(host)


def kept_steps(store, job):
    rows = read_events(store._database, store._folder, job=job)
    return [event.data["step"] for _, event in rows if event.kind == ev.STEP]


def test_a_restart_looks_at_no_report_of_a_step_but_the_last_ones(world, store):
    # With millions of them, a coordinator would answer after many seconds.
    job = world.submit(minimum=1)
    world.advance(4.0, 4)
    report_steps(world, job, range(3))
    queries = []
    store._database.set_trace_callback(queries.append)
    assert list(store.events())
    assert list(store.last_steps())
    assert store.last_s > 0.0
    store._database.set_trace_callback(None)
    for query in queries:
        plan = store._database.execute(f"EXPLAIN QUERY PLAN {query}").fetchall()
        ways = [row[3] for row in plan if "events" in row[3]]
        assert ways, query
        for way in ways:
            found = ("events_but_steps (", "events_of_job (job=?", "(rowid=?)")
            assert any(each in way for each in found) or "LIMIT 1000" in query, way


def test_an_earlier_store_gets_its_index_or_is_read_without(
    tmp_path, monkeypatch, caplog
):
    store = Store(tmp_path)
    busy(World(registry.get("deeppool"), (2, 2), store))
    expected = list(store.events())
    store._database.execute("DROP INDEX events_but_steps")
    store.close()
    other = sqlite3.connect(tmp_path / stores.DATABASE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # nothing can be written, as on a full disk
    monkeypatch.setattr(stores, "_BUSY_S", 0.01)
    for lines in (1, 1):
        again = Store(tmp_path)
        assert list(again.events()) == expected
        found = again._database.execute("SELECT name FROM pragma_index_list('events')")
        assert (("events_but_steps",) in found.fetchall()) is (other is None)
        again.close()
        assert len(caplog.records) == lines
        if other is not None:
            other.close()
            other = None


def test_old_reports_of_steps_are_removed_but_for_one_an_hour(
    world, store, monkeypatch
):
    monkeypatch.setattr(step_thinning, "KEPT_STEPS", 3)
    monkeypatch.setattr(step_thinning, "_PIECE", 4)
    monkeypatch.setattr(step_thinning, "_AGAIN", 10)
    job = world.submit(minimum=1)
    world.advance(4.0, 4)
    for hour in range(2):
        report_steps(world, job, range(10 * hour, 10 * hour + 10))
        world.now_s += 3600.0
    while store.thin_steps():
        pass
    assert kept_steps(store, job) == [0, 10, 17, 18, 19]
    world.check_fold()


def test_a_long_history_is_thinned_after_an_upgrade_and_a_full_disk(
    world, store, monkeypatch
):
    job = world.submit(minimum=1)
    world.advance(4.0, 4)
    report_steps(world, job, range(10))
    monkeypatch.setattr(step_thinning, "KEPT_STEPS", 3)
    thinning = step_thinning.StepThinning(store._database)
    store._database.execute("PRAGMA query_only = ON")
    assert thinning.next_piece()
    store._database.execute("PRAGMA query_only = OFF")
    assert not thinning.next_piece()
    assert kept_steps(store, job) == [0, 7, 8, 9]


def test_readers_see_jobs_with_and_without_a_coordinator(world, store):
    first, *_ = busy(world)
    database = read_only(store._folder)
    assert {row["id"] for row in read_table(database, "jobs")} >= {first}
    assert set(read_table(database, "devices")[0]) == set(TABLES["devices"])
    assert read_spec(database, first).name == "j"
    assert read_spec(database, "nobody") is None
    numbers = [seq for seq, _ in read_events(database, store._folder, since=3)]
    assert numbers[0] == 4
    database.close()


def test_a_second_coordinator_is_refused_by_name(store):
    with pytest.raises(ClusterError, match=f"another coordinator.*{os.getpid()}"):
        Store(store._folder)


def test_a_look_at_the_lock_refuses_no_coordinator(tmp_path, monkeypatch):
    looks = processes.lock(tmp_path / stores.LOCK)
    monkeypatch.setattr(processes.time, "sleep", lambda _: os.close(looks))
    Store(tmp_path).close()


def test_a_coordinator_whose_lock_was_removed_writes_nothing_more(tmp_path):
    first = Store(tmp_path)
    world = World(registry.get("fifo"), (2,), first)
    (tmp_path / stores.LOCK).unlink()
    second = Store(tmp_path)
    with pytest.raises(ClusterError, match="another coordinator may have"):
        world.submit(minimum=1)
    first.close()
    second.close()


def test_files_are_the_users_alone(store):
    for path in store._folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert stat.S_IMODE(store._folder.stat().st_mode) == 0o700


def test_a_full_disk_refuses_submissions_and_recovers(world, store):
    job = world.submit(minimum=1)
    world.advance(2.0, 2)
    used = store._database.execute("PRAGMA page_count").fetchone()[0]
    store._database.execute(f"PRAGMA max_page_count = {used}")
    with pytest.raises(StoreUnavailable, match="full"):
        submit_many(world)
    world.advance(2.0, 2)
    assert world.ledger.job(job).state == "running"
    store._database.execute("PRAGMA max_page_count = 1000000")
    world.advance(2.0, 2)
    assert world.coordinator.trouble == ""
    world.submit(minimum=1)
    world.check_fold()


def test_a_locked_store_is_unavailable_and_says_so(world, store, monkeypatch):
    store._database.execute("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(store._folder / stores.DATABASE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        world.submit(minimum=1)
    other.execute("ROLLBACK")
    other.close()
    world.submit(minimum=1)


def test_a_stop_that_cannot_be_kept_says_so_and_happens_once_it_can(world, store):
    job = world.submit(minimum=1)
    store._database.execute("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(store._folder / stores.DATABASE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="executed once it can be written"):
        world.coordinator.stop(job)
    with pytest.raises(StoreUnavailable, match="locked"):
        world.coordinator.drain(world.hosts[0].name)
    other.execute("ROLLBACK")
    other.close()
    world.advance(4.0, 4)
    assert world.ledger.job(job).state == "stopped"
    assert not world.ledger.cluster.hosts[world.hosts[0].name].is_drained


LATER = {
    "format": "PRAGMA user_version = 99",
    "note": "UPDATE releases SET release = 'stretto 9.1.0'",
    "job": "UPDATE events SET data = replace(data, 'stretto 0', 'stretto 9')",
    "version": "UPDATE events SET data = "
    """replace(data, '"schema_version": 1', '"schema_version": 7')""",
    "kind": "UPDATE events SET kind = 'teleported' WHERE kind = 'placed'",
}


@pytest.mark.parametrize("change", LATER)
def test_a_store_of_a_later_release_is_called_so_and_stays_as_it_is(tmp_path, change):
    world = World(registry.get("fifo"), (2, 2), Store(tmp_path))
    busy(world)
    assert world.store._database.execute(LATER[change]).rowcount
    world.store.close()
    before = (tmp_path / stores.DATABASE).read_bytes()
    with pytest.raises(ClusterError) as refused:
        World(registry.get("fifo"), (2, 2), Store(tmp_path))
    assert (tmp_path / stores.DATABASE).read_bytes() == before
    assert "was written by" in str(refused.value)
    assert "upgrade stretto" in str(refused.value)


def test_the_release_that_wrote_a_store_is_named(tmp_path):
    with_job = World(registry.get("fifo"), (2, 2), Store(tmp_path))
    with_job.store._database.execute(LATER["note"])
    with_job.store.close()
    with pytest.raises(ClusterError, match=r"written by stretto 9\.1\.0, this is"):
        Store(tmp_path)


def test_a_start_on_a_store_of_a_later_release_changes_no_file(tmp_path):
    world = World(registry.get("fifo"), (2, 2), Store(tmp_path))
    world.store._database.execute(LATER["note"])
    world.store.close()
    tmp_path.chmod(0o700)
    settings = Settings(hosts={"host0": ("cpu:0",)}, policy="fifo")
    with pytest.raises(ClusterError, match="was written by"):
        engine_local.start(Folders(tmp_path), settings)
    assert not Folders(tmp_path).settings.exists()


def test_an_earlier_store_that_names_no_release_is_opened(tmp_path):
    world = World(registry.get("fifo"), (2, 2), Store(tmp_path))
    world.store._database.execute("DROP TABLE releases")
    world.store.close()
    again = World(registry.get("fifo"), (2, 2), Store(tmp_path))
    again.submit()
    found = again.store._database.execute("SELECT release FROM releases").fetchall()
    assert found == [(codec.MADE_BY,)]
    again.store.close()


def test_after_a_store_was_moved_away_no_job_gets_an_earlier_ones_files(tmp_path):
    folders = Folders(tmp_path)
    folders.save_settings(Settings(hosts={"host0": ("cpu:0",)}, policy="fifo"))
    folders.files("test-7").mkdir(parents=True)
    first = server.Server(folders)
    made = [first.coordinator.submit(job(tmp_path, "true")) for _ in range(2)]
    first.store.close()
    assert made == ["test-8", "test-9"]


def test_a_user_whose_name_is_not_utf_8_can_submit(tmp_path):
    # Before, later requests of all users failed, until another coordinator started.
    folders = Folders(tmp_path)
    folders.save_settings(Settings(hosts={"host0": ("cpu:0",)}, policy="fifo"))
    found = server.Server(folders)
    spec = codec.encode(job(tmp_path, "true")).decode()
    with pytest.raises(SpecError):
        found._submit({"spec": 5, "user": "me"})
    for user in (os.fsdecode(b"\xff"), "me"):
        found._submit({"spec": spec, "user": user})
    found.store.close()
    rows = server.Server(folders)._list({})["jobs"]
    assert [row["user"] for row in rows] == ["?", "me"]


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / stores.DATABASE).write_text("hello" * 1000)
    with pytest.raises(ClusterError, match="cannot be opened"):
        Store(tmp_path)


def test_the_clock_never_goes_back():
    wall, monotonic = [100.0], [5.0]
    clock = Clock(250.0, lambda: wall[0], lambda: monotonic[0])
    assert clock() == 250.0
    wall[0], monotonic[0] = 0.0, 7.0
    assert clock() == 252.0


def test_a_restarted_coordinators_clock_follows_no_jump_of_the_wall_clock(
    tmp_path, monkeypatch
):
    folders = Folders(tmp_path)
    before_s = server.steady_wall(folders)()
    monkeypatch.setattr(server, "wall_s", lambda: 1e12)
    assert server.steady_wall(folders)() - before_s < 1e6


def test_a_clock_of_an_earlier_start_of_the_host_is_not_used(tmp_path, monkeypatch):
    folders = Folders(tmp_path)
    folders.clock.write_text('{"boot": "another", "base_s": 0.0}')
    monkeypatch.setattr(server, "wall_s", lambda: 1e12)
    assert server.steady_wall(folders)() >= 1e12


def test_after_a_clock_was_ahead_time_continues_between_two_coordinators(
    tmp_path, monkeypatch, caplog
):
    folders = Folders(tmp_path)
    folders.save_settings(Settings(hosts={"host0": ("cpu:0",)}, policy="fifo"))
    folders.clock.write_text('{"boot": "another", "base_s": 0.0}')
    store = Store(tmp_path)
    store.append([ev.Event(ev.REFUSED, 1e12)], State())
    store.close()
    times = []
    for now_s in (100.0, 3700.0):
        monkeypatch.setattr(server, "now_s", lambda now_s=now_s: now_s)
        found = server.Server(folders)
        times.append(found.clock())
        found.store.close()
    assert times == [1e12, 1e12 + 3600.0]
    assert "ahead of this host's clock" in caplog.text


def test_no_variable_that_a_rank_gets_from_the_cluster_can_be_set(tmp_path):
    devices = ("cuda:0",)
    part = part_spec_of(tmp_path, "true", role="background", devices=devices)
    both = [part, dataclasses.replace(part, role="foreground")]
    ranks = [rank_commands(each, tmp_path)[0] for each in both]
    usual = {*base_environment(), "OMP_NUM_THREADS"}
    for name in {name for rank in ranks for name in rank.environment} - usual:
        with pytest.raises(SpecError, match="is set by the cluster"):
            job(tmp_path, "true", environment={name: "x"})


def test_events_and_commands_survive_the_wire(world):
    busy(world)
    for event in world.store.events():
        assert wire.event_of(wire.plain_event(event)) == wire.event_of_row(
            wire.row_of_event(event)
        )
    for command in world.ledger.commands():
        assert wire.command_of(wire.plain_command(command)) == command
