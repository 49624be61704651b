"""One attempt's supervisor: ranks, logs, grace, watchdog, adoption."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stretto import variable_names
from stretto.cluster import attempt_ends, memory_use, processes, roles, supervisor_start
from stretto.cluster.channel import connected, encoded
from stretto.cluster.loop import now_s
from stretto.cluster.part_spec import (
    END_FILE,
    LOCK_FILE,
    PART_FILE,
    SOCKET_FILE,
    PartSpec,
)
from stretto.cluster.step_reports import StepReports
from stretto.lab import syscalls
from stretto.process_identity import children_of, stat_row
from stretto.step_counts import StepCounter
from support.clusters import WAITS, await_that, part_spec_of

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 60.0


AGENTS: list[Agent] = []


class Agent:
    """A connection to a supervisor."""

    def __init__(self, folder: Path, *, until_s: float = 1e18) -> None:
        self.socket = connected(folder / SOCKET_FILE, timeout_s=LIMIT_S)
        self.lines = self.socket.makefile("rb")
        AGENTS.append(self)
        self.send(do="attach", until_s=until_s)

    def send(self, **message: Any) -> None:
        self.socket.sendall(encoded(message))

    def event(self, kind: str) -> dict[str, Any]:
        """Return the next event of a kind, acknowledging none."""
        for line in self.lines:
            event = json.loads(line).get("event")
            if event is not None and event["kind"] == kind:
                data: dict[str, Any] = event["data"]
                data["number"] = event["number"]
                return data
        raise AssertionError(f"closed before {kind}")

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of an attempt; whatever was started in it ends."""
    yield tmp_path
    while AGENTS:
        AGENTS.pop().close()
    processes.kill_marked(variable_names.CLUSTER_ATTEMPT, str(tmp_path))
    deadline_s = time.monotonic() + LIMIT_S
    while processes.is_locked(tmp_path / LOCK_FILE) and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            agent = Agent(tmp_path)
            agent.send(do="stop", grace_s=0.0)
            agent.send(do="acknowledge", number=agent.event("ended")["number"])
        time.sleep(0.01)
    while AGENTS:
        AGENTS.pop().close()


_STARTER = """
import signal, sys
from pathlib import Path
from stretto.cluster import supervisor_start
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    print(supervisor_start.start(Path(line.rstrip()), forks=True), flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def starter() -> Iterator[None]:
    """A process with one thread, which forks supervisors as an agent does."""
    command = [sys.executable, "-c", _STARTER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        STARTER.append(process)
        yield
        STARTER.clear()
        assert process.stdin is not None
        process.stdin.close()


STARTER: list[subprocess.Popen[str]] = []


def awaited_end(folder: Path) -> dict[str, Any]:
    """Return how an attempt ended, once its supervisor has ended, too."""
    deadline_s = time.monotonic() + LIMIT_S
    while processes.is_locked(folder / LOCK_FILE):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    end = supervisor_start.read_end(folder)
    assert end is not None
    return end


def started(folder: Path, part: PartSpec, *, forks: bool = True) -> Agent:
    part.save(folder)
    assert start_supervisor(folder, forks=forks) is not None
    return Agent(folder)


def start_supervisor(folder: Path, *, forks: bool = True) -> int | None:
    if not forks:
        return supervisor_start.start(folder, forks=False)
    process = STARTER[0]
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{folder}\n")
    process.stdin.flush()
    answer = process.stdout.readline().strip()
    return None if answer == "None" else int(answer)


def shell(text: str) -> tuple[str, str, str]:
    return "/bin/sh", "-c", text


def await_file(path: Path) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} does not appear"
        time.sleep(0.005)


def test_ranks_run_and_their_output_is_kept_by_rank(folder: Path) -> None:
    command = shell("echo out $RANK of $WORLD_SIZE; echo err >&2")
    agent = started(folder, part_spec_of(folder, *command, devices=("cpu:0", "cpu:1")))
    assert agent.event("ended")["code"] == 0
    logs = {p.name: p.read_text() for p in (folder / "logs").iterdir()}
    assert logs == {"rank0.log": "out 0 of 2\nerr\n", "rank1.log": "out 1 of 2\nerr\n"}


def test_the_environment_comes_from_the_job_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    part = part_spec_of(folder, "/usr/bin/env", environment={"MINE": "a b"})
    agent = started(folder, part, forks=False)
    agent.event("ended")
    text = (folder / "logs/rank0.log").read_text()
    assert "MINE=a b\n" in text
    assert "RAY_AUTH_MODE" not in text
    assert "PYTHONPATH" not in text


def test_an_inherited_nice_value_is_reset(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may raise a priority")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    command = (sys.executable, "-c", "import os; print(os.nice(0))")
    os.setpriority(os.PRIO_PROCESS, 0, 15)
    try:
        agent = started(folder, part_spec_of(folder, *command), forks=False)
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)
    agent.event("ended")
    assert (folder / "logs/rank0.log").read_text() == "0\n"


def test_the_first_failure_is_the_outcome_and_ends_the_others(folder: Path) -> None:
    command = shell("[ $RANK = 1 ] && echo oops && exit 7; exec sleep 600")
    agent = started(folder, part_spec_of(folder, *command, devices=("cpu:0", "cpu:1")))
    end = agent.event("ended")
    assert (end["code"], end["rank"]) == (7, 1)
    assert "rank 1 failed with exit status 7; its last lines:\n  | oops" in end["why"]


def test_a_missing_program_is_a_failure_with_its_name(folder: Path) -> None:
    agent = started(folder, part_spec_of(folder, "no-such-program"))
    end = agent.event("ended")
    assert end["code"] == 127
    assert "no-such-program: No such file or directory" in end["why"]


def test_a_signal_without_a_name_is_a_failure_with_its_number(folder: Path) -> None:
    end = started(folder, part_spec_of(folder, *shell("kill -40 $$"))).event("ended")
    assert (end["code"], "rank 0 was killed by signal 40" in end["why"]) == (168, True)


def test_a_failures_last_lines_control_no_terminal(folder: Path) -> None:
    command = shell("printf 'a\\033[31m\\377b\\n'; exit 1")
    end = started(folder, part_spec_of(folder, *command)).event("ended")
    assert end["why"].endswith("| a\ufffd[31m\ufffdb")


def test_a_supervisor_that_fails_leaves_the_reason(folder: Path) -> None:
    agent = started(folder, part_spec_of(folder, "sleep", "600"))
    agent.send(do="stop", signal="NONE", grace_s=1.0)
    end = awaited_end(folder)
    assert (end["code"], "SIGNONE" in end["why"]) == (1, True)


def test_a_missing_folder_is_a_failure_with_its_name(folder: Path) -> None:
    part = part_spec_of(folder, "/bin/true", directory="/no/such/folder")
    assert "/no/such/folder" in started(folder, part).event("ended")["why"]


def test_a_stop_gives_the_rank_time_to_end_by_itself(folder: Path) -> None:
    command = shell(
        "trap 'echo saved; touch saved; exit 0' TERM; touch ready; "
        "while :; do sleep 0.01; done"
    )
    agent = started(folder, part_spec_of(folder, *command))
    await_file(folder / "ready")
    agent.send(do="stop", grace_s=LIMIT_S, why="preempted")
    end = agent.event("ended")
    assert (end["code"], end["why"]) == (0, "preempted")
    assert (folder / "saved").exists()


def test_a_background_that_is_stopped_gets_an_ordinary_priority_to_end(
    folder: Path,
) -> None:
    code = (
        "import os, signal, sys, time\n"
        "def end(*_):\n"
        "    print(os.sched_getscheduler(0) == os.SCHED_OTHER)\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "open('ready', 'w').close()\n"
        "time.sleep(600)\n"
    )
    command = (sys.executable, "-c", code)
    agent = started(folder, part_spec_of(folder, *command, role="background"))
    await_file(folder / "ready")
    agent.send(do="stop", grace_s=LIMIT_S)
    agent.event("ended")
    may_raise = os.geteuid() == 0  # others need a limit of nice values
    assert (folder / "logs/rank0.log").read_text() == "True\n" or not may_raise


def test_the_job_files_signal_is_sent(folder: Path) -> None:
    command = shell("trap 'exit 5' USR1; touch ready; while :; do sleep 0.01; done")
    agent = started(folder, part_spec_of(folder, *command, signal="USR1"))
    await_file(folder / "ready")
    agent.send(do="stop", grace_s=LIMIT_S)
    assert agent.event("ended")["why"] == "on request"


def test_a_rank_that_had_ended_when_it_was_stopped_has_ended_by_itself(
    folder: Path,
) -> None:
    command = shell("while [ ! -e go ]; do sleep 0.01; done")
    agent = started(folder, part_spec_of(folder, *command))
    pid = int(agent.event("started")["pid"])
    (rank,) = children_of(pid)

    def has_ended() -> bool:
        row = stat_row(rank)
        return row is not None and row[0] == "Z"

    os.kill(pid, signal.SIGSTOP)  # it does not wait for its rank
    (folder / "go").touch()
    await_that(has_ended, lambda: "the rank runs")
    agent.send(do="stop")
    os.kill(pid, signal.SIGCONT)
    end = agent.event("ended")
    assert (end["code"], end["signaled"]) == (0, False)


def test_a_rank_that_saves_its_work_as_the_host_shuts_down_is_not_done(
    folder: Path,
) -> None:
    command = shell("trap 'exit 0' TERM; touch ready; while :; do sleep 0.01; done")
    agent = started(folder, part_spec_of(folder, *command))
    await_file(folder / "ready")
    os.kill(int(agent.event("started")["pid"]), signal.SIGTERM)
    assert agent.event("ended")["code"] is None


def test_a_rank_that_a_shutdown_ends_before_its_supervisor_hears_has_not_failed(
    folder: Path,
) -> None:
    agent = started(folder, part_spec_of(folder, *shell("exec sleep 600")))
    pid = int(agent.event("started")["pid"])
    (rank,) = children_of(pid)
    os.kill(pid, signal.SIGSTOP)
    os.kill(rank, signal.SIGTERM)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGCONT)
    assert agent.event("ended")["code"] is None


def test_a_supervisor_that_a_shutdown_kills_has_left_its_attempts_end(
    folder: Path,
) -> None:
    command = shell("trap '' TERM; touch ready; while :; do sleep 0.01; done")
    agent = started(folder, part_spec_of(folder, *command))
    await_file(folder / "ready")
    pid = int(agent.event("started")["pid"])
    os.kill(pid, signal.SIGTERM)
    await_file(folder / END_FILE)
    os.kill(pid, signal.SIGKILL)
    agent.close()
    assert awaited_end(folder)["code"] is None


def test_what_ignores_the_signal_is_killed_after_the_grace(folder: Path) -> None:
    command = shell("trap '' TERM; touch ready; while :; do sleep 0.01; done")
    agent = started(folder, part_spec_of(folder, *command))
    await_file(folder / "ready")
    agent.send(do="stop", grace_s=0.2)
    assert agent.event("ended")["code"] == 128 + signal.SIGTERM


def test_no_process_of_the_attempt_is_left_even_of_another_session(
    folder: Path,
) -> None:
    command = shell("setsid sleep 600 & sleep 600 & touch ready; exit 0")
    agent = started(folder, part_spec_of(folder, *command))
    agent.event("ended")
    assert processes.marked_processes(variable_names.CLUSTER_ATTEMPT, str(folder)) == []


ESCAPES = {
    "a new session without environment": "env -i setsid {}",
    "a double fork": "env -i sh -c 'setsid sh -c \"{} &\" &'",
    "an orphan with a child": "env -i setsid sh -c '{}; true'",
    "another user": "su nobody -s /bin/sh -c 'exec {}'",
}
"""How a rank's child can leave its session, environment and user."""


def runs(pid: int) -> bool:
    row = stat_row(pid)
    return row is not None and row[0] not in "ZX"


def escaped(folder: Path, how: str) -> tuple[Agent, int, list[int]]:
    """Start a rank and such a child; return agent, supervisor and child."""
    if "su " in how and os.geteuid() != 0:
        pytest.skip("only root may become another user")
    program = f"sleep {time.time_ns()}"  # finds it
    start = how.format(program)
    command = shell(f"{start} >/dev/null 2>&1 & exec sleep 600")
    agent = started(folder, part_spec_of(folder, *command))
    found: list[int] = []

    def has_started() -> bool:
        words = b"\0".join(program.encode().split()) + b"\0"
        found[:] = [
            int(entry.parent.name)
            for entry in Path("/proc").glob("[0-9]*/cmdline")
            if is_file_of(entry, words)
        ]
        return bool(found)

    await_that(has_started, lambda: f"{start} does not run")
    return agent, int(agent.event("started")["pid"]), found


def is_file_of(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False


@pytest.mark.parametrize("how", ESCAPES.values(), ids=ESCAPES)
def test_nothing_is_left_of_an_attempt_whose_supervisor_is_killed(
    folder: Path, how: str
) -> None:
    _, supervisor, children = escaped(folder, how)
    os.kill(supervisor, signal.SIGKILL)
    await_unlocked(folder)
    assert not any(map(runs, children))


@pytest.mark.parametrize("how", ESCAPES.values(), ids=ESCAPES)
def test_nothing_is_left_of_an_attempt_that_ends(folder: Path, how: str) -> None:
    agent, _, children = escaped(folder, how)
    agent.send(do="stop", grace_s=0.0)
    agent.event("ended")
    assert not any(map(runs, children))


def guard_of(supervisor: int) -> int:
    text = Path(f"/proc/{supervisor}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


def await_unlocked(folder: Path) -> None:
    lock = folder / LOCK_FILE
    await_that(lambda: not processes.is_locked(lock), lambda: f"{lock} is held")


def test_a_killed_guard_disturbs_no_attempt(folder: Path) -> None:
    agent = started(folder, part_spec_of(folder, *shell(WAITS)))
    guard = guard_of(int(agent.event("started")["pid"]))
    os.kill(guard, signal.SIGKILL)
    await_that(lambda: not runs(guard), lambda: "the guard runs")
    (folder / "go").touch()
    assert agent.event("ended")["code"] == 0


def test_a_stopped_guard_is_continued(folder: Path) -> None:
    agent = started(folder, part_spec_of(folder, *shell(WAITS)))
    os.kill(guard_of(int(agent.event("started")["pid"])), signal.SIGSTOP)
    (folder / "go").touch()
    agent.send(do="acknowledge", number=agent.event("ended")["number"])
    await_unlocked(folder)


def test_a_stopped_guard_is_found_by_the_lock_of_its_killed_supervisor(
    folder: Path,
) -> None:
    agent = started(folder, part_spec_of(folder, *shell(WAITS)))
    supervisor = int(agent.event("started")["pid"])
    guard = guard_of(supervisor)
    os.kill(guard, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    lock = folder / LOCK_FILE
    await_that(lambda: not runs(supervisor), lambda: "the supervisor runs")
    await_that(  # a signal stops a process some time later
        lambda: roles.stopped_holders([lock]) == {guard: lock},
        lambda: f"stopped: {roles.stopped_holders([lock])}",
    )
    roles.continue_stopped([lock])
    await_unlocked(folder)


def test_a_lock_whose_file_was_removed_has_a_holder(tmp_path: Path) -> None:
    descriptor = processes.lock(tmp_path / "lock")
    assert descriptor is not None
    try:
        (tmp_path / "lock").unlink()
        found = processes.lock_holders(tmp_path, "lock")
        assert found == {tmp_path / "lock": [os.getpid()]}
    finally:
        os.close(descriptor)


def test_a_signal_to_end_ends_no_guard_before_its_supervisor(folder: Path) -> None:
    agent, supervisor, children = escaped(folder, "env -i setsid {}")
    os.kill(guard_of(supervisor), signal.SIGTERM)
    os.kill(supervisor, signal.SIGKILL)
    agent.close()
    await_unlocked(folder)
    assert not any(map(runs, children))


def test_what_only_another_user_may_end_is_waited_for_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kill(*_: int) -> None:
        raise PermissionError

    with subprocess.Popen(["sleep", "60"]) as process:
        monkeypatch.setattr(processes, "children_of", lambda _: [process.pid])
        monkeypatch.setattr(processes.os, "kill", kill)
        try:
            assert processes.kill_children(attempts=1)
        finally:
            monkeypatch.undo()
            process.kill()


def test_without_an_agent_the_attempt_continues_and_a_new_one_adopts_it(
    folder: Path,
) -> None:
    command = shell("touch ready; while [ ! -e go ]; do sleep 0.01; done; exit 3")
    agent = started(folder, part_spec_of(folder, *command))
    await_file(folder / "ready")
    agent.close()
    assert start_supervisor(folder) is None  # one is enough
    second = Agent(folder)
    second.event("started")  # nothing was acknowledged, so it comes again
    (folder / "go").touch()
    assert second.event("ended")["code"] == 3


def test_without_a_reset_watchdog_the_supervisor_ends_the_attempt(folder: Path) -> None:
    part = part_spec_of(folder, *shell("exec sleep 600"), watchdog_s=0.5)
    agent = started(folder, part)
    end = agent.event("ended")
    assert end["why"] == "no agent reset the watchdog for 0.5 s"
    assert end["code"] is None  # which counts as no restart
    assert supervisor_start.read_end(folder) is not None


def test_a_reset_watchdog_keeps_the_attempt(folder: Path) -> None:
    command = shell("sleep 1.5; exit 4")
    agent = started(folder, part_spec_of(folder, *command, watchdog_s=1.0))
    for _ in range(15):
        agent.send(do="reset", until_s=now_s() + 1.0)
        time.sleep(0.1)
    # On a machine that stopped for a second the watchdog may have fired.
    assert agent.event("ended")["code"] in (4, None)


def test_a_reset_that_is_read_after_its_time_resets_nothing(folder: Path) -> None:
    # As if the supervisor had not run since the message was sent.
    sent_until_s = now_s() - 1.0
    part = part_spec_of(folder, *shell("exec sleep 600"), watchdog_s=1e6)
    part = dataclasses.replace(part, first_watchdog_until_s=now_s() + 3.0)
    part.save(folder)
    assert start_supervisor(folder) is not None
    with contextlib.suppress(OSError):  # a busy machine: it has ended already
        Agent(folder, until_s=sent_until_s)
    assert awaited_end(folder)["why"].startswith("no agent reset the watchdog")


def test_ranks_do_not_start_after_their_watchdog_has_fired(folder: Path) -> None:
    part = part_spec_of(folder, *shell("touch ran"))
    part = dataclasses.replace(part, first_watchdog_until_s=now_s() - 1.0)
    part.save(folder)
    assert start_supervisor(folder) is not None
    assert awaited_end(folder)["code"] is None
    assert not (folder / "ran").exists()


def test_an_end_without_an_acknowledgment_is_kept_in_a_file(folder: Path) -> None:
    part = part_spec_of(folder, *shell("exit 9"), watchdog_s=1.0)
    started(folder, part).close()
    end = awaited_end(folder)
    assert end["code"] == 9


def test_an_end_that_cannot_be_written_is_kept_until_it_can(folder: Path) -> None:
    # As on a full disk, after `down` has ended the agent.
    blocked = folder / END_FILE / "file"
    blocked.parent.mkdir()
    blocked.touch()
    part = part_spec_of(folder, *shell("exec sleep 600"), watchdog_s=0.2)
    agent = started(folder, part)
    agent.event("ended")
    agent.close()
    time.sleep(0.5)  # it looks at its watchdog meanwhile
    blocked.unlink()
    blocked.parent.rmdir()
    assert awaited_end(folder)["code"] is None  # which counts as no restart


def test_an_attempt_whose_end_cannot_be_written_is_ended_and_named(
    folder: Path,
) -> None:
    part = part_spec_of(folder, *shell(f"touch ready; {WAITS}"))
    agent = started(folder, part)
    await_file(folder / "ready")
    (folder / END_FILE / "blocked").mkdir(parents=True)
    agent.close()
    assert attempt_ends.end_attempts(folder.parent) == [folder.name]
    assert not processes.is_locked(folder / LOCK_FILE)


def test_a_killed_supervisor_takes_its_ranks_with_it(folder: Path) -> None:
    part = part_spec_of(folder, *shell("touch ready; exec sleep 600"))
    agent = started(folder, part)
    pid = agent.event("started")["pid"]
    await_file(folder / "ready")
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + LIMIT_S
    while processes.marked_processes(variable_names.CLUSTER_ATTEMPT, str(folder)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_rank_whose_supervisor_was_killed_as_it_forked_does_not_run() -> None:
    def other_parent() -> None:
        syscalls.die_with(1)

    with subprocess.Popen(["true"], preexec_fn=other_parent) as process:
        pass
    assert process.returncode == -signal.SIGKILL


def test_a_log_on_a_full_disk_loses_lines_and_the_job_continues(folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs/rank0.log").symlink_to("/dev/full")
    command = shell("i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done")
    end = started(folder, part_spec_of(folder, *command)).event("ended")
    assert (end["code"], end["why"]) == (0, "")


def test_single_processes_come_and_go_with_their_devices(folder: Path) -> None:
    command = shell("touch on-$STRETTO_DEVICE; exec sleep 600")
    part = part_spec_of(
        folder,
        *command,
        devices=("cpu:0", "cpu:1"),
        gang="none",
        role="background",
    )
    agent = started(folder, part)
    for device in part.devices:
        await_file(folder / f"on-{device}")
    (folder / "on-cpu:1").unlink()
    agent.send(do="use", devices=["cpu:1", "cpu:3"])
    assert agent.event("using")["devices"] == ["cpu:1", "cpu:3"]
    await_file(folder / "on-cpu:3")
    assert not (folder / "on-cpu:1").exists()  # it continued, and did not start again


@pytest.mark.parametrize("gang", ["none", "claims"])
def test_what_a_rank_has_started_leaves_its_device_with_it(
    folder: Path, gang: str
) -> None:
    command = shell(
        "(trap '' TERM; exec setsid sleep 600 > /dev/null 2>&1) & "
        "touch on-$STRETTO_DEVICE; exec sleep 600"
    )
    devices = "cpu:0", "cpu:1"
    part = part_spec_of(folder, *command, devices=devices, gang=gang, role="background")
    agent = started(folder, part)
    for device in devices:
        await_file(folder / f"on-{device}")
    agent.send(do="use", devices=["cpu:1"])
    agent.event("using")
    left = "STRETTO_DEVICE=cpu:0"
    assert (
        processes.marked_processes(variable_names.CLUSTER_ATTEMPT, str(folder), left)
        == []
    )
    kept = "STRETTO_DEVICE=cpu:1"
    assert processes.marked_processes(variable_names.CLUSTER_ATTEMPT, str(folder), kept)


def test_a_single_process_that_has_ended_does_not_start_again(folder: Path) -> None:
    command = shell(
        "echo >> on-$STRETTO_DEVICE; [ $STRETTO_DEVICE = cpu:0 ] || exec sleep 600"
    )
    part = part_spec_of(
        folder,
        *command,
        devices=("cpu:0", "cpu:1"),
        gang="none",
        role="background",
    )
    agent = started(folder, part)
    await_file(folder / "on-cpu:1")
    pid = int(agent.event("started")["pid"])
    await_that(lambda: len(children_of(pid)) == 1, lambda: "two processes run")
    agent.send(do="use", devices=["cpu:0", "cpu:1", "cpu:2"])
    agent.event("using")
    await_file(folder / "on-cpu:2")
    agent.send(do="use", devices=["cpu:0"])  # no process is left: the attempt is over
    assert agent.event("ended")["code"] == 0
    assert (folder / "on-cpu:0").read_text() == "\n"


def test_a_gang_starts_again_on_its_new_devices(folder: Path) -> None:
    command = shell("touch rank$RANK-of-$WORLD_SIZE; exec sleep 600")
    part = part_spec_of(folder, *command, gang="claims", role="background")
    agent = started(folder, part)
    await_file(folder / "rank0-of-1")
    agent.send(do="use", devices=["cpu:0", "cpu:2"])
    assert agent.event("using")["devices"] == ["cpu:0", "cpu:2"]
    await_file(folder / "rank0-of-2")
    await_file(folder / "rank1-of-2")


def test_a_gang_that_is_stopped_while_it_changes_devices_does_not_start_again(
    folder: Path,
) -> None:
    leave = "while [ ! -e go ]; do sleep 0.02; done; exit 1"
    command = shell(f"trap '{leave}' TERM; touch runs; while :; do sleep 0.02; done")
    part = part_spec_of(folder, *command, gang="claims", role="background")
    agent = started(folder, part)
    await_file(folder / "runs")
    agent.send(do="use", devices=["cpu:0", "cpu:2"])
    agent.send(do="stop", grace_s=2 * LIMIT_S)
    agent.send(do="attach")  # its answer shows that the two others were read
    assert "attached" in agent.lines.readline().decode()
    (folder / "go").touch()
    assert agent.event("ended")["why"] == "on request"


def test_steps_are_reported_with_their_rate(folder: Path) -> None:
    code = (
        "import os, time\n"
        "from stretto.step_counts import StepCounter\n"
        "counter = StepCounter(os.environ['STRETTO_STEP_COUNTS'], 0)\n"
        "for _ in range(20):\n"
        "    time.sleep(0.005)\n"
        "    counter.add()\n"
    )
    part = part_spec_of(folder, sys.executable, "-c", code, batch=32)
    step = started(folder, part).event("step")
    assert step["step"] == 20
    assert step["step_s"] >= 0.005
    assert step["samples_per_s"] == pytest.approx(32 / step["step_s"])


def test_a_report_of_a_rank_that_makes_no_step_has_the_usual_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = StepReports(tmp_path / "steps", 1, 0, 32)
    counter = StepCounter(tmp_path / "steps", 0)
    counter.set(1)
    counter.set(7)
    usual = reports.next() or {}
    later_s = time.monotonic() + 3600.0
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    late = reports.next() or {}
    late.pop("idle_s")
    assert late == usual


def test_steps_of_a_rank_that_started_again_are_reported(tmp_path: Path) -> None:
    reports = StepReports(tmp_path / "steps", 1, 0, None)
    StepCounter(tmp_path / "steps", 0).set(7)
    assert (reports.next() or {})["step"] == 7
    StepCounter(tmp_path / "steps", 0).set(3)
    assert (reports.next() or {})["step"] == 3


def test_a_rank_that_uses_too_much_memory_ends_the_attempt_and_says_so(
    folder: Path,
) -> None:
    script = "import time; held = bytearray(200 << 20); time.sleep(600)"
    part = part_spec_of(
        folder, sys.executable, "-c", script, host_memory_bytes=100 << 20
    )
    end = started(folder, part).event("ended")
    assert end["code"] == 137
    assert end["signaled"] is False  # it counts as a failure
    used = re.search(r"use (\d+) MiB", end["why"])  # it may still be growing
    assert used is not None
    assert int(used[1]) >= 100  # as rounded
    assert "MiB of the host's memory; host_memory_bytes permits 100 MiB" in end["why"]


def test_memory_that_processes_share_counts_once() -> None:
    script = (
        "import os, sys, time\nheld = bytearray(b'x') * (80 << 20)\n"
        "for _ in range(3):\n    if not os.fork():\n        time.sleep(600)\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            used = memory_use.memory_bytes(process.pid, above=0)
            counted = memory_use.memory_bytes(process.pid, above=1 << 40)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert 80 << 20 < used < 160 << 20
    assert counted > 4 * (80 << 20)


def test_a_lock_that_cannot_be_looked_at_may_be_held(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert processes.is_locked(tmp_path / "loop")
    assert not processes.is_locked(tmp_path / "absent")


def test_a_lock_on_a_read_only_file_system_can_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opens = tmp_path / "lock", os.open

    def open_read_only(name: Path, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opens(name, flags, *mode)

    descriptor = processes.lock(path)
    assert descriptor is not None
    monkeypatch.setattr(os, "open", open_read_only)
    held = processes.is_locked(path)
    os.close(descriptor)
    assert (held, processes.is_locked(path)) == (True, False)


def test_a_holder_whose_number_is_not_known_has_not_ended(tmp_path: Path) -> None:
    descriptor = processes.lock(tmp_path / "lock")
    assert descriptor is not None
    assert not roles.end_holders([tmp_path / "lock"], timeout_s=0.1)
    os.close(descriptor)
    assert roles.end_holders([tmp_path / "lock"], timeout_s=0.1)


def test_a_part_of_a_later_release_can_be_read(tmp_path: Path) -> None:
    part = part_spec_of(tmp_path, "true")
    plain = dataclasses.asdict(part) | {"later": 1}
    (tmp_path / PART_FILE).write_text(json.dumps(plain))
    assert PartSpec.load(tmp_path) == part


def test_a_process_that_one_look_has_missed_is_killed(monkeypatch) -> None:
    look, looks = processes.marked_processes, iter([False])
    monkeypatch.setattr(
        processes,
        "marked_processes",
        lambda *args: look(*args) if next(looks, True) else [],
    )
    with subprocess.Popen(["sleep", "60"], env={"MISSED": "1"}) as process:
        try:
            await_that(lambda: look("MISSED", "1"), lambda: "it does not run")
            assert processes.kill_marked("MISSED", "1")
            assert process.wait(10) == -signal.SIGKILL
        finally:
            process.kill()
