"""What every engine must do: jobs on a cluster, and what happens when parts of it die.

Tests on Ray are slow, and skipped without it: `make test-cluster-ray` runs them.

What fails, and the test of it, here (on both engines) unless a file is named:

- the coordinator: test_a_killed_coordinator_answers_again_and_disturbs_no_job,
  test_a_job_that_ends_without_coordinator_is_done_once_it_is_back
- an agent: test_a_killed_agents_jobs_are_adopted,
  test_a_job_that_ends_without_agent_is_done_once_it_is_back; with the file of an
  attempt: test_an_attempt_whose_file_cannot_be_read_is_adopted and its neighbors
- a supervisor: test_a_killed_supervisors_job_starts_again_and_leaves_nothing and its
  neighbor
- a supervisor without an agent for its watchdog's time: test_supervisor.py,
  test_without_a_reset_watchdog_the_supervisor_ends_the_attempt
- the keeper: test_a_killed_keeper_is_replaced_when_the_coordinator_dies_too,
  test_a_killed_keeper_is_replaced_and_starts_an_agent_that_died_too,
  test_a_keeper_that_a_signal_ends_is_replaced_and_ends_nothing
- a coordinator, an agent, a supervisor or a guard that a signal has stopped, also as
  it starts: test_a_stopped_coordinator_is_continued_and_loses_no_host,
  test_a_stopped_agent_is_continued and their neighbors
- the file of the settings:
  test_a_cluster_with_damaged_settings_can_be_ended_and_started and its neighbors
- a host, or its connection to the coordinator:
  test_a_silent_hosts_job_starts_elsewhere_and_never_runs_twice,
  test_a_host_that_is_silent_for_less_than_its_watchdog_keeps_its_job
- the network between two hosts of their own, and one that restarts: test_ray_hosts.py
- a node of Ray: test_engine_ray.py,
  test_a_node_that_joins_gets_jobs_and_its_loss_moves_them
- Ray itself (GCS and raylet), the gateway, an actor: test_engine_ray.py,
  test_a_killed_ray_is_started_again_and_disturbs_no_job and its neighbors
- one rank: test_a_killed_ranks_job_ends_as_a_whole_and_starts_again
- a background: test_a_killed_background_starts_again_and_disturbs_no_foreground
- a rank's memory: test_a_job_that_uses_too_much_memory_fails_and_says_so
- a foreground that makes no step: test_a_job_that_makes_no_step_is_reported_and_runs_on
- a full disk: test_a_full_disk_refuses_submissions_and_running_jobs_continue,
  test_what_is_killed_on_a_full_disk_starts_again_and_jobs_continue; a locked
  store: test_store.py, test_a_locked_store_is_unavailable_and_says_so
- two coordinators: test_a_second_coordinator_is_refused
- everything above in any order, in virtual time: test_machine.py

Not tested: a GCS with RocksDB that ends alone (an alpha of Ray).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from stretto import variable_names, zoo
from stretto.cluster import engine_local, processes, server
from stretto.cluster.folders import Folders, Settings
from stretto.cluster.part_spec import PART_FILE, PartSpec
from stretto.cluster.processes import marked_processes
from stretto.errors import ClusterError, Infeasible, SpecError, StrettoError
from stretto.schema.burst import BurstPlan
from stretto.schema.collocation import Collocation
from stretto.schema.job import BurstOptions
from support.clusters import (
    ENGINES,
    LIMIT_S,
    WAITS,
    Cluster,
    await_file,
    await_that,
    cluster,
    job,
)
from support.pairs import measured_pair

if TYPE_CHECKING:
    from collections.abc import Iterator


PAIR = measured_pair(loss_ratio=0.01)


@pytest.fixture(scope="module", params=ENGINES)
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster of two hosts with two devices each, which each test leaves idle."""
    folder = tmp_path_factory.mktemp("cluster") / "c"
    with cluster(folder, engine=request.param, report_every_s=0.5) as found:
        yield found


def is_once(cluster: Cluster, name: str) -> None:
    """Check that a job ran in one attempt, which nothing disturbed."""
    found = cluster.await_state(name, "done")
    assert found["attempt"] == 1
    assert cluster.events(name).count("started") == 1


# a job's life


def test_a_job_runs_on_its_devices_and_its_logs_stay(
    shared: Cluster, tmp_path: Path
) -> None:
    script = "echo rank $RANK of $WORLD_SIZE in $(pwd)"
    name = shared.submit(job(tmp_path, script, devices=2))
    shared.await_state(name, "done")
    assert shared.log(name, 1) == f"rank 1 of 2 in {tmp_path}\n"


def test_ranks_on_two_hosts_meet_at_one_port(shared: Cluster, tmp_path: Path) -> None:
    name = shared.submit(job(tmp_path, "echo $MASTER_ADDR:$MASTER_PORT", devices=4))
    shared.await_state(name, "done")
    assert len({shared.log(name, rank) for rank in range(4)}) == 1


def test_ranks_on_two_hosts_use_the_interfaces_of_their_hosts_addresses(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, "echo $GLOO_SOCKET_IFNAME", devices=4))
    shared.await_state(name, "done")
    assert shared.log(name, 0) == shared.log(name, 3) == "lo\n"


def test_a_job_waits_until_its_devices_are_free_and_says_so(
    shared: Cluster, tmp_path: Path
) -> None:
    first = shared.submit(job(tmp_path, WAITS, devices=4))
    second = shared.submit(job(tmp_path, "true", devices=3))
    shared.await_state(first, "running")
    found = shared.show(second)
    assert (found["state"], found["why"]) == ("waiting", "needs 3 devices, 0 are free")
    (tmp_path / "go").touch()
    shared.await_state(second, "done")


def test_a_job_starts_after_those_it_names(shared: Cluster, tmp_path: Path) -> None:
    first = shared.submit(job(tmp_path, f"{WAITS}; touch first"))
    second = shared.submit(job(tmp_path, "[ -e first ]", after=(first,)))
    assert shared.show(second)["state"] == "waiting"
    (tmp_path / "go").touch()
    shared.await_state(second, "done")


def test_a_stopped_job_gets_its_grace(shared: Cluster, tmp_path: Path) -> None:
    script = "trap 'touch saved; exit 0' TERM; touch ready; " + WAITS
    name = shared.submit(job(tmp_path, script))
    await_file(tmp_path / "ready")
    shared.ask("stop", job=name, user="ana")
    assert shared.await_state(name, "stopped")["why"] == "ana stopped it"
    assert (tmp_path / "saved").exists()


def test_a_job_that_fails_is_started_again_with_its_number_of_restarts(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, "echo no; exit 3", attempts=2))
    found = shared.await_state(name, "failed")
    assert (found["attempt"], found["code"]) == (3, 3)
    assert "rank 0 failed with exit status 3; its last lines:\n  | no" in found["why"]


def test_a_drained_hosts_job_moves_without_counting_a_failure(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, f"touch on-$STRETTO_DEVICE; {WAITS}"))
    found = shared.await_state(name, "running")
    ((host, _),) = found["devices"]
    shared.ask("drain", host=host)
    try:
        await_that(
            lambda: len(list(tmp_path.glob("on-*"))) == 2,
            lambda: str(shared.show(name)),
        )
        (tmp_path / "go").touch()
        found = shared.await_state(name, "done")
    finally:
        shared.ask("drain", host=host, open=True)
    assert (found["attempt"], found["failures"]) == (2, 0)


# refusals


def test_a_job_that_can_never_fit_is_refused(shared: Cluster, tmp_path: Path) -> None:
    with pytest.raises(Infeasible, match="needs 5 devices, the cluster has 4"):
        shared.submit(job(tmp_path, "true", devices=5))


def test_an_unknown_job_is_named(shared: Cluster) -> None:
    with pytest.raises(SpecError, match="no-such-job"):
        shared.show("no-such-job")


@pytest.mark.parametrize("since", [10**30, "one", None])
def test_an_invalid_request_is_refused_and_ends_no_coordinator(
    shared: Cluster, since: object
) -> None:
    before = shared.pid("coordinator")
    with pytest.raises(SpecError, match="invalid request"):
        shared.ask("events", since=since)
    assert shared.pid("coordinator") == before


@pytest.mark.parametrize(
    "message",
    [
        {"do": "x" * 100_000},
        {"do": ["x" * 100_000]},
        {"do": "show", "job": "x" * 100_000},
        {"do": "drain", "host": "x" * 100_000},
        {"do": "events", "since": "x" * 100_000},
        {"do": "submit", "spec": "x" * 100_000, "user": "me", "source": "x" * 100_000},
    ],
    ids=lambda message: str(message["do"])[:10],
)
def test_no_answer_and_no_log_quotes_a_long_request_whole(
    shared: Cluster, message: dict[str, Any]
) -> None:
    with pytest.raises(StrettoError) as refused:
        engine_local.ask(shared.folders, message)
    assert len(str(refused.value)) < 3000
    assert "x" * 3000 not in shared.folders.coordinator_log.read_text()


def test_an_unknown_request_lists_the_known_ones(shared: Cluster) -> None:
    with pytest.raises(SpecError, match="unknown request 'dance'; known are push, sub"):
        shared.ask("dance")


def test_a_coordinator_that_fails_in_a_request_answers_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the same request would come again, and end the next one, too.
    def fails(*_: object) -> dict[str, object]:
        raise RuntimeError("a defect")

    answers: list[dict[str, object]] = []
    coordinator = object.__new__(server.Server)
    coordinator.folders = Folders(tmp_path)
    monkeypatch.setitem(server._HANDLERS, "list", fails)
    with pytest.raises(RuntimeError):
        coordinator._on_message(Mock(send=answers.append), {"do": "list"})
    assert "a defect" in str(answers[0]["error"])


def test_a_second_coordinator_is_refused(shared: Cluster) -> None:
    command = [sys.executable, "-m", "stretto.cluster.server", str(shared.folders.root)]
    done = subprocess.run(
        command, timeout=60, check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "another coordinator has it" in done.stderr


def test_a_removed_socket_is_made_again(shared: Cluster) -> None:
    shared.folders.socket.unlink()
    assert shared.ask("status")["hosts"]


def test_a_second_cluster_in_one_folder_is_refused(shared: Cluster) -> None:
    with pytest.raises(ClusterError, match="a cluster runs in"):
        engine_local.start(shared.folders, shared.settings)


# what dies


def test_a_killed_coordinator_answers_again_and_disturbs_no_job(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, f"touch ready; {WAITS}", devices=2))
    shared.await_state(name, "running")
    before = shared.kill("coordinator")
    assert shared.show(name)["state"] == "running"
    await_that(lambda: shared.pid("coordinator") != before, lambda: "no other")
    (tmp_path / "go").touch()
    is_once(shared, name)


def test_a_job_that_ends_without_coordinator_is_done_once_it_is_back(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, f"touch ready; {WAITS}; touch end"))
    await_file(tmp_path / "ready")
    shared.kill("coordinator")
    (tmp_path / "go").touch()
    await_file(tmp_path / "end")
    is_once(shared, name)


def test_a_killed_agents_jobs_are_adopted(shared: Cluster, tmp_path: Path) -> None:
    name = shared.submit(job(tmp_path, f"touch ready; {WAITS}"))
    await_file(tmp_path / "ready")
    ((host, _),) = shared.await_state(name, "running")["devices"]
    shared.kill(host)
    (tmp_path / "go").touch()
    is_once(shared, name)


def test_a_job_that_ends_without_agent_is_done_once_it_is_back(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, f"touch ready; {WAITS}; touch end"))
    await_file(tmp_path / "ready")
    ((host, _),) = shared.await_state(name, "running")["devices"]
    shared.kill("keeper")  # so that the agent stays dead for a while
    shared.kill(host)
    (tmp_path / "go").touch()
    await_file(tmp_path / "end")
    engine_local.start_keeper(shared.folders)
    is_once(shared, name)


def part_file(cluster: Cluster, name: str) -> Path:
    """Return the file of the first attempt of a job that runs."""
    ((host, _),) = cluster.await_state(name, "running")["devices"]
    return cluster.node(host).attempts(host) / f"{name}.1" / PART_FILE


@pytest.mark.parametrize("text", ["", '{"job": "of an earlier release"}'])
def test_an_attempt_whose_file_cannot_be_read_is_adopted(
    shared: Cluster, tmp_path: Path, text: str
) -> None:
    name = shared.submit(job(tmp_path, f"echo $$ >>ready; {WAITS}"))
    await_file(tmp_path / "ready")
    file = part_file(shared, name)
    before = PartSpec.load(file.parent)
    file.write_text(text)
    shared.kill(file.parents[2].name)
    await_that(lambda: file.read_text() != text, lambda: "its supervisor says nothing")
    assert PartSpec.load(file.parent) == before
    (tmp_path / "go").touch()
    is_once(shared, name)
    assert len((tmp_path / "ready").read_text().split()) == 1


def test_a_job_that_ends_without_agent_is_done_also_if_its_file_cannot_be_read(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, f"touch ready; {WAITS}; touch end"))
    await_file(tmp_path / "ready")
    file = part_file(shared, name)
    shared.kill("keeper")  # so that the agent stays dead for a while
    shared.kill(file.parents[2].name)
    file.write_text("")
    (tmp_path / "go").touch()
    await_file(tmp_path / "end")
    engine_local.start_keeper(shared.folders)
    is_once(shared, name)


def test_an_attempt_of_which_nothing_is_left_and_known_uses_up_no_restart(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, WAITS, attempts=0))
    supervisor, file = shared.supervisor(name), part_file(shared, name)
    file.write_text("")
    shared.kill(file.parents[2].name)
    os.kill(supervisor, signal.SIGKILL)
    (tmp_path / "go").touch()
    found = shared.await_state(name, "done")
    assert (found["attempt"], found["failures"]) == (2, 0)


STARTS_BARE = (
    "env -i setsid sh -c 'echo $$ >new; mv new bare; exec sleep 600' & "
    "while [ ! -e bare ]; do sleep 0.02; done"
)
"""Starts a process without environment, which writes its number into ``bare``."""


def test_a_supervisor_that_is_killed_after_its_agent_leaves_nothing(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, f"{STARTS_BARE}; {WAITS}"))
    await_file(tmp_path / "bare")
    supervisor = shared.supervisor(name)
    bare = int((tmp_path / "bare").read_text())
    ((host, _),) = shared.show(name)["devices"]
    shared.kill(host)
    os.kill(supervisor, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert shared.await_state(name, "done")["attempt"] == 2
    assert not runs(bare)


def test_a_killed_supervisors_job_starts_again_and_leaves_nothing(
    shared: Cluster, tmp_path: Path
) -> None:
    script = f"setsid sleep 600 & {STARTS_BARE}; touch ready-$$; {WAITS}"
    name = shared.submit(job(tmp_path, script))
    await_that(lambda: len(list(tmp_path.glob("ready*"))) == 1, lambda: "not ready")
    bare = int((tmp_path / "bare").read_text())
    ((host, _),) = shared.await_state(name, "running")["devices"]
    folder = shared.node(host).attempts(host) / f"{name}.1"
    os.kill(shared.supervisor(name), signal.SIGKILL)
    await_that(
        lambda: len(list(tmp_path.glob("ready*"))) == 2, lambda: str(shared.show(name))
    )
    assert marked_processes(variable_names.CLUSTER_ATTEMPT, str(folder)) == []
    assert not runs(bare)
    (tmp_path / "go").touch()
    found = shared.await_state(name, "done")
    assert (found["attempt"], found["failures"]) == (2, 1)


def test_a_job_whose_host_was_started_again_uses_up_no_restart(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, WAITS, attempts=0))
    supervisor = shared.supervisor(name)
    ((host, _),) = shared.show(name)["devices"]
    folder = shared.node(host).attempts(host) / f"{name}.1"
    dataclasses.replace(PartSpec.load(folder), boot="another").save(folder)
    shared.kill(host)
    os.kill(supervisor, signal.SIGKILL)
    (tmp_path / "go").touch()
    found = shared.await_state(name, "done")
    assert (found["attempt"], found["failures"]) == (2, 0)


def test_a_killed_ranks_job_ends_as_a_whole_and_starts_again(
    shared: Cluster, tmp_path: Path
) -> None:
    script = f"echo $$ > pid$RANK.new; mv pid$RANK.new pid$RANK; {WAITS}"
    name = shared.submit(job(tmp_path, script, devices=2, grace_s=0.2))
    await_file(tmp_path / "pid0")
    await_file(tmp_path / "pid1")
    os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
    await_that(
        lambda: shared.show(name)["attempt"] == 2, lambda: str(shared.show(name))
    )
    (tmp_path / "go").touch()
    shared.await_state(name, "done")
    ends = [row["data"] for row in shared.rows(name) if row["kind"] == "ended"]
    assert "rank 1 was killed by SIGKILL" in ends[0]["why"]


def test_a_killed_background_starts_again_and_disturbs_no_foreground(
    shared: Cluster, tmp_path: Path
) -> None:
    foreground = shared.submit(job(tmp_path, WAITS))
    script = f"echo $$ > pid.new; mv pid.new pid-$STRETTO_CLUSTER_RESUME-; {WAITS}"
    background = shared.submit(job(tmp_path, script, role="background"))
    await_file(tmp_path / "pid--")
    os.kill(int((tmp_path / "pid--").read_text()), signal.SIGKILL)
    await_file(tmp_path / "pid-1-")
    (tmp_path / "go").touch()
    is_once(shared, foreground)
    end = shared.await_state(background, "done")
    assert (end["attempt"], end["failures"]) == (2, 1)


def test_a_job_that_uses_too_much_memory_fails_and_says_so(
    shared: Cluster, tmp_path: Path
) -> None:
    program = "import time; held = bytearray(200 << 20); time.sleep(600)"
    spec = job(
        tmp_path,
        f"exec {sys.executable} -c '{program}'",
        attempts=0,
        host_memory_bytes=100 << 20,
    )
    name = shared.submit(spec)
    end = shared.await_state(name, "failed")
    assert "host_memory_bytes permits 100 MiB" in end["why"]


@pytest.mark.slow
def test_a_job_that_makes_no_step_is_reported_and_runs_on(
    shared: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "hangs.py").write_text(
        "import os, time\n"
        "from stretto.step_counts import StepCounter\n"
        "counter = StepCounter(os.environ['STRETTO_STEP_COUNTS'], 0)\n"
        "for _ in range(20):\n"
        "    counter.add()\n"
        "while not os.path.exists('go'):\n"
        "    time.sleep(0.02)\n"
    )
    name = shared.submit(job(tmp_path, f"exec {sys.executable} hangs.py"))
    await_that(
        lambda: any("idle_s" in row["data"] for row in shared.rows(name)),
        lambda: str(shared.rows(name)),
    )
    (tmp_path / "go").touch()
    is_once(shared, name)


def test_a_killed_keeper_is_replaced_when_the_coordinator_dies_too(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, f"touch ready; {WAITS}"))
    await_file(tmp_path / "ready")
    keeper = shared.kill("keeper")
    shared.kill("coordinator")
    assert shared.pid("coordinator")
    await_that(lambda: shared.pid("keeper") != keeper, lambda: "no other keeper")
    (tmp_path / "go").touch()
    is_once(shared, name)


def test_a_killed_keeper_is_replaced_and_starts_an_agent_that_died_too(
    shared: Cluster,
) -> None:
    keeper, agent = shared.kill("keeper"), shared.kill("host0")
    await_that(lambda: shared.pid("keeper") != keeper, lambda: "no other keeper")
    await_that(lambda: shared.pid("host0") != agent, lambda: "no other agent")


def test_a_keeper_that_a_signal_ends_is_replaced_and_ends_nothing(
    shared: Cluster,
) -> None:
    before = {role: shared.pid(role) for role in ("keeper", "coordinator", "host0")}
    os.kill(before["keeper"], signal.SIGTERM)
    await_that(lambda: shared.pid("keeper") != before["keeper"], lambda: "no other")
    for role in ("coordinator", "host0"):
        assert shared.pid(role) == before[role]


def test_a_full_disk_refuses_submissions_and_running_jobs_continue(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, f"touch ready; {WAITS}; touch end"))
    await_file(tmp_path / "ready")
    pid = shared.pid("coordinator")
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    # A limit on the size of files fails writes as a full disk does.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(
            ClusterError, match="Running jobs continue; free disk space"
        ):
            shared.submit(job(tmp_path, "true"))
        (tmp_path / "go").touch()
        await_file(tmp_path / "end")
        await_that(lambda: bool(shared.ask("status")["trouble"]), lambda: "no trouble")
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    is_once(shared, name)
    assert not shared.ask("status")["trouble"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a cluster and little more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def filled(disk: Path) -> Path:
    """Fill a disk, and return the file that does."""
    rest = disk / "rest"
    with rest.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(512)):
            pass
    return rest


@pytest.mark.lab
def test_what_is_killed_on_a_full_disk_starts_again_and_jobs_continue(
    small_disk: Path, tmp_path: Path
) -> None:
    with cluster(small_disk / "c", hosts=1) as found:
        name = found.submit(job(tmp_path, f"touch ready; {WAITS}"))
        await_file(tmp_path / "ready")
        found.await_state(name, "running")
        rest = filled(small_disk)
        before = [found.kill(role) for role in ("keeper", "coordinator", "host0")]
        assert found.ask("list")["jobs"][0]["state"] == "running"
        roles = ("keeper", "coordinator", "host0")
        assert not set(before) & {found.pid(role) for role in roles}
        await_that(lambda: bool(found.ask("status")["trouble"]), lambda: "no trouble")
        rest.unlink()
        (tmp_path / "go").touch()
        is_once(found, name)


@pytest.mark.lab
def test_a_cluster_on_a_full_disk_can_be_ended(small_disk: Path) -> None:
    with cluster(small_disk / "c", hosts=1) as found:
        filled(small_disk)
        assert engine_local.down(found.folders, timeout_s=60.0)
        with pytest.raises(ClusterError, match=r"settings\.json: cannot be written"):
            engine_local.start(found.folders, found.settings)
        assert not processes.is_locked(found.folders.keeper_lock)


@pytest.mark.lab
def test_the_end_of_a_cluster_on_a_full_disk_says_what_it_waits_for(
    small_disk: Path, tmp_path: Path
) -> None:
    with cluster(small_disk / "c", hosts=1) as found:
        name = found.submit(job(tmp_path, f"touch ready; {WAITS}"))
        await_file(tmp_path / "ready")
        rest, said = filled(small_disk), []

        def free(text: str) -> None:
            said.append(text)
            rest.unlink(missing_ok=True)

        assert engine_local.down(found.folders, timeout_s=60.0, report=free)
        assert said[0].startswith(f"cannot ask {name} to stop: ")


@pytest.mark.lab
def test_a_cluster_ends_where_no_file_can_be_created(
    small_disk: Path, tmp_path: Path
) -> None:
    subprocess.run(
        ["mount", "-o", "remount,nr_inodes=100", str(small_disk)], check=True
    )
    with cluster(small_disk / "c", hosts=1) as found:
        name = found.submit(job(tmp_path, f"touch ready; {WAITS}"))
        await_file(tmp_path / "ready")
        pids = [found.supervisor(name)]
        pids += [found.pid(role) for role in ("keeper", "coordinator", "host0")]
        with contextlib.suppress(OSError):
            for number in range(100):
                (small_disk / f"file{number}").touch()
        with pytest.raises(ClusterError, match="host were ended"):
            engine_local.down(found.folders, timeout_s=0.0)
        await_that(  # they release their locks shortly before their end
            lambda: not any(map(runs, pids)), lambda: f"of {pids} some run", limit_s=2.0
        )
        for path in small_disk.glob("file*"):
            path.unlink()


def test_a_cluster_continues_if_its_end_is_interrupted(
    shared: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drained() -> list[str]:
        return [row["host"] for row in shared.ask("status")["hosts"] if row["drained"]]

    def interrupt(*_: object) -> None:
        assert drained()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_local, "_await_ends", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine_local.down(shared.folders, timeout_s=60.0)
    await_that(lambda: not drained(), lambda: "hosts stay drained")


def test_only_hosts_that_a_user_has_drained_stay_so_after_the_end(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path / "c") as found:
        found.ask("drain", host="host0")
        for host in ("host0", "host1"):  # by a `down` that was killed
            found.ask("drain", host=host, ends=True)
        assert engine_local.down(found.folders, timeout_s=60.0)
        engine_local.start(found.folders, found.settings)
        rows = {row["host"]: row for row in found.ask("status")["hosts"]}
        assert [rows[host]["drained"] for host in ("host0", "host1")] == [True, False]
        found.ask("drain", host="host0", open=True)


def test_two_commands_do_not_start_one_cluster(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "c")
    folders.create()
    settings = Settings(hosts={"host0": ("cpu:0",)}, policy="fifo")
    other = processes.lock(folders.starting)
    assert other is not None
    with pytest.raises(ClusterError, match="another command starts a cluster in "):
        engine_local.start(folders, settings)
    os.close(other)
    assert not folders.settings.exists()


def test_two_commands_may_end_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_wait, await_ends = threading.Barrier(2), engine_local._await_ends

    def wait(*arguments: Any) -> bool:
        both_wait.wait(LIMIT_S)
        (tmp_path / "go").touch()
        return await_ends(*arguments)

    with cluster(tmp_path / "c", hosts=1) as found:
        name = found.submit(job(tmp_path, f"trap '' TERM; touch ready; {WAITS}"))
        await_file(tmp_path / "ready")
        with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
            patch.setattr(engine_local, "_await_ends", wait)
            end = functools.partial(engine_local.down, found.folders, timeout_s=60.0)
            assert all(each.result() for each in [pool.submit(end), pool.submit(end)])
        engine_local.start(found.folders, found.settings)
        assert not any(row["drained"] for row in found.ask("status")["hosts"])
        found.await_state(name, "done")


# processes that a signal has stopped


def test_a_stopped_coordinator_is_continued_and_loses_no_host(tmp_path: Path) -> None:
    # The pause is longer than four heartbeats of all hosts.
    with cluster(tmp_path / "c", heartbeat_s=0.2) as found:
        name = found.submit(job(tmp_path, f"touch ready; {WAITS}", devices=4))
        await_file(tmp_path / "ready")
        os.kill(found.pid("coordinator"), signal.SIGSTOP)
        os.kill(found.pid("keeper"), signal.SIGSTOP)
        found.ask("status")
        (tmp_path / "go").touch()
        assert found.await_state(name, "done")["attempt"] == 1


def test_a_stopped_supervisor_is_continued(shared: Cluster, tmp_path: Path) -> None:
    name = shared.submit(job(tmp_path, f"touch ready; {WAITS}"))
    await_file(tmp_path / "ready")
    os.kill(shared.supervisor(name), signal.SIGSTOP)
    (tmp_path / "go").touch()
    is_once(shared, name)


def test_a_stopped_agent_is_continued(shared: Cluster, tmp_path: Path) -> None:
    name = shared.submit(job(tmp_path, f"touch ready; {WAITS}"))
    await_file(tmp_path / "ready")
    ((host, _),) = shared.await_state(name, "running")["devices"]
    agent = shared.pid(host)
    os.kill(agent, signal.SIGSTOP)
    (tmp_path / "go").touch()
    is_once(shared, name)
    assert shared.pid(host) == agent


def test_a_supervisor_that_is_stopped_as_its_agent_is_continued(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, f"touch ready; {WAITS}"))
    await_file(tmp_path / "ready")
    ((host, _),) = shared.await_state(name, "running")["devices"]
    for pid in (shared.pid(host), shared.supervisor(name)):
        os.kill(pid, signal.SIGSTOP)
    (tmp_path / "go").touch()
    is_once(shared, name)


def guard_of(supervisor: int) -> int:
    text = Path(f"/proc/{supervisor}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


def test_a_stopped_guard_whose_supervisor_is_killed_is_continued(
    shared: Cluster, tmp_path: Path
) -> None:
    name = shared.submit(job(tmp_path, f"touch ready; {WAITS}"))
    await_file(tmp_path / "ready")
    supervisor = shared.supervisor(name)
    os.kill(guard_of(supervisor), signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert shared.await_state(name, "done")["attempt"] == 2


def test_the_end_of_a_cluster_continues_a_stopped_guard(tmp_path: Path) -> None:
    with cluster(tmp_path / "c", hosts=1) as found:
        name = found.submit(job(tmp_path, WAITS))
        supervisor = found.supervisor(name)
        guard = guard_of(supervisor)
        for role in ("keeper", "host0"):
            os.kill(found.pid(role), signal.SIGSTOP)
        os.kill(guard, signal.SIGSTOP)
        os.kill(supervisor, signal.SIGKILL)
        engine_local.down(found.folders, timeout_s=0.0)
        assert not runs(guard)


def await_starting(module: str, root: Path) -> int:
    """Return a process of a module before it holds its lock, stopped there."""
    found: list[int] = []

    def is_stopped() -> bool:
        for pid in processes.processes_of("-m", module, str(root)):
            # One that was killed has its command for a moment.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                found.append(pid)
        return any(map(runs, found))

    await_that(is_stopped, lambda: f"{module} does not start")
    return next(filter(runs, found))


def test_a_coordinator_that_is_stopped_as_it_starts_is_continued(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path / "c", hosts=1) as found:
        found.kill("coordinator")
        await_starting("stretto.cluster.server", found.folders.root)
        found.ask("status")


def test_the_end_of_a_cluster_ends_what_was_stopped_as_it_started(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path / "c", hosts=1) as found:
        os.kill(found.pid("keeper"), signal.SIGSTOP)
        command = [*processes.PYTHON, "-m", "stretto.cluster.agent"]
        with subprocess.Popen([*command, str(found.folders.root), "host0"]) as agent:
            os.kill(agent.pid, signal.SIGSTOP)
            engine_local.down(found.folders, timeout_s=LIMIT_S)
            assert agent.wait(LIMIT_S) == -signal.SIGKILL


@pytest.mark.slow
def test_a_job_does_not_run_twice_after_all_of_its_cluster_was_stopped(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path / "c", devices=1, watchdog_s=1.0, heartbeat_s=0.1) as found:
        # Two attempts at once would find the lock taken.
        script = "exec 9>lock; flock -n 9 || touch twice; touch ready-$$; "
        name = found.submit(job(tmp_path, script + WAITS))
        supervisor = found.supervisor(name)
        await_that(lambda: len(list(tmp_path.glob("ready-*"))) == 1, lambda: "not yet")
        for role in ("keeper", "coordinator", "host0", "host1"):
            os.kill(found.pid(role), signal.SIGSTOP)
        os.kill(supervisor, signal.SIGSTOP)
        time.sleep(found.settings.watchdog_s + found.settings.margin_s + 1.0)
        found.ask("status")  # continues them
        await_that(
            lambda: len(list(tmp_path.glob("ready-*"))) > 1,
            lambda: str(found.show(name)),
        )
        (tmp_path / "go").touch()
        found.await_state(name, "done")
        assert not (tmp_path / "twice").exists()


# settings that cannot be read


DAMAGES = ["", '{"hosts": {"ho', "[]", '{"hosts": 3, "policy": "fifo"}']


@pytest.mark.parametrize("text", DAMAGES)
def test_damaged_settings_are_named_with_the_way_out(tmp_path: Path, text: str) -> None:
    folders = Folders(tmp_path)
    folders.settings.write_text(text)
    with pytest.raises(ClusterError) as raised:
        engine_local.ask(folders, {"do": "list"})
    assert str(raised.value).startswith(f"{folders.settings} cannot be read (")
    assert "`stretto cluster down`, then `stretto cluster start`" in str(raised.value)


@pytest.mark.parametrize("killed", [(), ("coordinator",), ("keeper", "coordinator")])
def test_a_cluster_with_damaged_settings_can_be_ended_and_started(
    tmp_path: Path, killed: tuple[str, ...]
) -> None:
    with cluster(tmp_path / "c", hosts=1, watchdog_s=2.0, heartbeat_s=0.1) as found:
        name = found.submit(job(tmp_path, f"touch ready; {WAITS}"))
        await_file(tmp_path / "ready")
        found.folders.settings.write_text("")
        for role in killed:
            found.kill(role)
        engine_local.down(found.folders, timeout_s=60.0)
        assert not engine_local._is_served(found.folders)
        found.start()
        (tmp_path / "go").touch()
        assert found.await_state(name, "done")["failures"] == 0


def test_a_cluster_without_settings_can_be_ended(tmp_path: Path) -> None:
    with cluster(tmp_path / "c", hosts=1) as found:
        found.folders.settings.unlink()
        found.kill("keeper")
        found.kill("coordinator")
        engine_local.down(found.folders, timeout_s=60.0)
        assert not engine_local._is_served(found.folders)


def test_what_nothing_runs_of_can_be_ended_with_damaged_settings(
    tmp_path: Path,
) -> None:
    folders = Folders(tmp_path)
    folders.settings.write_text("")
    engine_local.down(folders, timeout_s=60.0)
    with pytest.raises(ClusterError, match="no cluster runs in"):
        engine_local.ask(folders, {"do": "list"})


def test_the_end_with_damaged_settings_says_how_to_end_what_a_ray_may_run(
    tmp_path: Path,
) -> None:
    folders = Folders(tmp_path)
    folders.settings.write_text("")
    folders.gateway_lock.touch()
    said: list[str] = []
    engine_local.down(folders, timeout_s=60.0, report=said.append)
    (text,) = said
    assert "run `stretto cluster start` with the --ray HOST:PORT" in text


def test_a_job_starts_while_the_settings_are_damaged(
    shared: Cluster, tmp_path: Path
) -> None:
    text = shared.folders.settings.read_text()
    shared.folders.settings.write_text("")
    try:
        is_once(shared, shared.submit(job(tmp_path, "true")))
    finally:
        shared.folders.settings.write_text(text)


def test_a_cluster_whose_agents_still_run_is_not_started_again(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path / "c", hosts=1) as found:
        found.folders.settings.write_text("")  # so that nothing starts a keeper
        found.kill("keeper")
        found.kill("coordinator")
        with pytest.raises(ClusterError, match="end it with `stretto cluster down`"):
            engine_local.start(found.folders, found.settings)


def test_a_cluster_of_stopped_processes_can_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_local, "_ANSWER_S", 1.0)
    with cluster(tmp_path / "c", hosts=1) as found:
        for role in ("coordinator", "keeper", "host0"):
            os.kill(found.pid(role), signal.SIGSTOP)
        assert engine_local.down(found.folders, timeout_s=60.0)
        agent = found.folders.agent_lock("host0")
        locks = [agent, found.folders.coordinator_lock, found.folders.keeper_lock]
        assert not any(map(processes.is_locked, locks))


# hosts


@pytest.mark.parametrize("engine", ENGINES)
def test_a_silent_hosts_job_starts_elsewhere_and_never_runs_twice(
    engine: str, tmp_path: Path
) -> None:
    times = {"watchdog_s": 4.0, "heartbeat_s": 0.25}
    with cluster(tmp_path / "c", engine=engine, devices=1, **times) as found:
        # Two attempts at once would find the lock taken, and fail.
        script = "exec 9>lock; flock -n 9 || touch twice; touch on-$STRETTO_DEVICE; "
        name = found.submit(job(tmp_path, script + WAITS))
        ((host, _),) = found.await_state(name, "running")["devices"]
        with found.silenced(host):
            await_that(
                lambda: len(list(tmp_path.glob("on-*"))) == 2,
                lambda: str(found.show(name)),
            )
        (tmp_path / "go").touch()
        end = found.await_state(name, "done")
        # On a machine that stops for that time there are more attempts.
        assert end["attempt"] >= 2
        assert end["failures"] == 0
        assert not (tmp_path / "twice").exists()
        # The host is back.
        await_that(
            lambda: all(row["joined"] for row in found.ask("status")["hosts"]),
            lambda: str(found.ask("status")),
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_host_that_is_silent_for_less_than_its_watchdog_keeps_its_job(
    engine: str, tmp_path: Path
) -> None:
    with cluster(tmp_path / "c", engine=engine, devices=1, heartbeat_s=0.25) as found:
        name = found.submit(job(tmp_path, f"touch ready; {WAITS}"))
        await_file(tmp_path / "ready")
        ((host, _),) = found.await_state(name, "running")["devices"]
        with found.silenced(host):
            await_that(
                lambda: "lost" in [row["kind"] for row in found.rows(None)],
                lambda: str(found.rows(None)),
            )
        (tmp_path / "go").touch()
        is_once(found, name)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cluster_that_was_down_continues_its_jobs(
    engine: str, tmp_path: Path
) -> None:
    with cluster(tmp_path / "c", engine=engine, hosts=1) as found:
        script = f"trap 'touch saved; exit 0' TERM; touch ready; {WAITS}"
        name = found.submit(job(tmp_path, script))
        await_file(tmp_path / "ready")
        assert engine_local.down(found.folders, timeout_s=60.0)
        assert (tmp_path / "saved").exists()
        assert not found.folders.socket.exists()
        with pytest.raises(ClusterError, match="no cluster runs in"):
            engine_local.ask(found.folders, {"do": "status"})
        (tmp_path / "go").touch()
        found.start()
        end = found.await_state(name, "done")
        assert (end["attempt"], end["failures"]) == (2, 0)


def test_a_background_runs_beside_a_foreground_that_was_planned_for_it(
    tmp_path: Path,
) -> None:
    Collocation(rows=(PAIR,)).save(tmp_path / "pairs.json")
    zoo.layer_profile("vgg11", samples=(8, 16, 32)).save(tmp_path / "layers.json")
    with cluster(
        tmp_path / "c",
        hosts=1,
        policy="deeppool",
        collocation=str(tmp_path / "pairs.json"),
    ) as found:
        first = job(
            tmp_path,
            f"echo $STRETTO_CLUSTER_PLAN $STRETTO_FOREGROUND; {WAITS}",
            devices=2,
            name="vgg",
            batch=32,
            burst=BurstOptions(
                factory="train.py:make",
                profile="layers.json",
                amplification_limit=1.2,  # so that a rank is idle for long enough
            ),
        )
        foreground = found.submit(first)
        found.await_state(foreground, "running")
        second = job(tmp_path, "echo $STRETTO_BACKGROUND", role="background")
        background = found.submit(second)
        place = found.await_state(background, "running", "done")["devices"]
        found.await_state(background, "done")
        device = found.log(background).strip()
        (tmp_path / "go").touch()
        found.await_state(foreground, "done")
        plan, beside = found.log(foreground, 1).split()
        assert BurstPlan.load(plan).gpus == 2
        assert device == beside, place


def test_files_of_a_cluster_are_this_users_alone(shared: Cluster) -> None:
    root = shared.folders.root
    assert root.stat().st_mode & 0o777 == 0o700
    sockets = [shared.folders.socket]
    assert [path.stat().st_mode & 0o777 for path in sockets] == [0o600]


def test_a_start_on_a_damaged_store_says_so_and_leaves_nothing_running(
    tmp_path: Path,
) -> None:
    (tmp_path / "c").mkdir(mode=0o700)
    (tmp_path / "c" / "cluster.db").write_bytes(b"no database, but long enough" * 99)
    with (
        pytest.raises(ClusterError, match="the coordinator ends: "),
        cluster(tmp_path / "c"),
    ):
        pass
    keeper = Folders(tmp_path / "c").keeper_lock
    await_that(lambda: not processes.is_locked(keeper), lambda: "the keeper runs")


def test_a_cluster_whose_coordinator_cannot_start_can_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(tmp_path / "c", hosts=1) as found:

        def no_answer(*_: object, **__: object) -> None:
            raise ClusterError("the coordinator does not answer")

        monkeypatch.setattr(engine_local, "ask", no_answer)
        assert not engine_local.down(found.folders, timeout_s=60.0)
        assert not processes.is_locked(found.folders.keeper_lock)
        assert not processes.is_locked(found.folders.agent_lock("host0"))
        with pytest.raises(ClusterError):  # none runs
            engine_local.down(found.folders, timeout_s=60.0)
        monkeypatch.undo()


def test_a_command_that_finds_no_coordinator_starts_one_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    folders = Folders(tmp_path)
    folders.save_settings(Settings(hosts={"host0": ("cpu:0",)}, policy="fifo"))
    monkeypatch.setattr(engine_local, "start_keeper", started.append)
    with pytest.raises(ClusterError, match="does not answer"):
        engine_local.ask(folders, {"do": "list"}, patience_s=0.5)
    assert started == [folders]


def test_a_cluster_whose_folder_was_removed_ends(tmp_path: Path) -> None:
    with cluster(tmp_path / "c", hosts=1) as found:
        roles = "keeper", "coordinator", "host0"
        pids = [found.pid(role) for role in roles]
        shutil.rmtree(tmp_path / "c")
        await_that(lambda: not any(map(runs, pids)), lambda: f"{pids} run")
        (tmp_path / "c").mkdir(mode=0o700)


ALONE = f"exec 8>>alone; flock -n 8 || touch twice; touch ready; {WAITS}"
"""A script that leaves a file if it runs beside another start of it."""


@pytest.mark.parametrize("left", ["attempt", "attempts", "host"])
def test_a_job_whose_files_are_removed_never_runs_twice(
    tmp_path: Path, left: str
) -> None:
    with cluster(tmp_path / "c", hosts=1) as found:
        name = found.submit(job(tmp_path, ALONE))
        supervisor = found.supervisor(name)
        await_file(tmp_path / "ready")
        host = found.folders.host("host0")
        removed = {"attempt": "attempts/test-1.1", "attempts": "attempts", "host": ""}
        agent = found.kill("host0")
        shutil.rmtree(host / removed[left])
        await_that(lambda: not runs(supervisor), lambda: f"{supervisor} runs")
        (tmp_path / "go").touch()
        end = found.await_state(name, "done")
        assert found.pid("host0") != agent
        assert (end["attempt"], end["failures"]) == (2, 0)
        assert not (tmp_path / "twice").exists()


def test_a_removed_folder_of_a_host_is_made_again(tmp_path: Path) -> None:
    with cluster(tmp_path / "c", hosts=1) as found:
        agent = found.pid("host0")
        shutil.rmtree(found.folders.host("host0"))
        await_that(lambda: not runs(agent), lambda: f"{agent} runs")
        is_once(found, found.submit(job(tmp_path, "true")))


def test_a_keeper_whose_lock_was_removed_is_replaced(tmp_path: Path) -> None:
    with cluster(tmp_path / "c", hosts=1) as found:
        keeper = found.pid("keeper")
        found.folders.keeper_lock.unlink()
        await_that(lambda: not runs(keeper), lambda: f"{keeper} runs")
        assert found.pid("keeper") != keeper
        is_once(found, found.submit(job(tmp_path, "true")))


def runs(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][1] != "Z"
    except OSError:
        return False


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir(mode=0o755)
    os.chmod(tmp_path / "c", 0o755)  # noqa: PTH101
    with pytest.raises(ClusterError, match="chmod 700"), cluster(tmp_path / "c"):
        pass
