"""A background's priority: what is tried, and that the test of it is honest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.background import priority
from stretto.background.priority import (
    CGROUP,
    MAX_RATIO,
    SCHEDULER,
    SESSION,
    Isolation,
)
from support.autogroups import has_autogroups

pytestmark = [
    pytest.mark.alone,  # an idle class gets no time while others compute
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
]

_TRIALS, _PATIENCE_S = 4, 60

LOWER = """
import json, os, sys, threading, time
from stretto.background import priority
methods, foreground = json.loads(sys.argv[1])
wake = threading.Event()
threading.Thread(target=wake.wait, daemon=True).start()
found = priority.lower(methods, foreground_pid=foreground)
policies = [os.sched_getscheduler(task) for task in priority._threads()]
inside = priority.own_cgroup()
print(json.dumps([found.method, found.detail, found.ratio, policies, str(inside)]))
sys.stdout.flush()
if len(sys.argv) > 2:
    time.sleep(60)
"""


def lowered(methods, *, foreground=0, session=True, keep=False, cgroup=None):
    """What a process of its own finds; with its process if it continues."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOWER, json.dumps([methods, foreground])]
        + ["stay"] * keep,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=session,
        preexec_fn=None if cgroup is None else lambda: enter(cgroup),
    )
    if keep:
        row = json.loads(process.stdout.readline())
        return row, process
    try:
        out, errors = process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        if os.getloadavg()[0] > 2 * os.cpu_count():
            pytest.skip(f"others leave no processor time, load {os.getloadavg()[0]}")
        raise
    assert process.returncode == 0, errors
    return json.loads(out)


def measured(methods, decides, **how):
    """What a process of its own finds, once its ratio decides the question.

    On a busy machine a few milliseconds of two loops say little: they are repeated.
    """
    for _ in range(_TRIALS):
        row = lowered(methods, **how)
        if row[2] is None:
            pytest.skip(f"no processor time for two loops, load {os.getloadavg()[0]}")
        if decides(row[2]):
            return row
    if os.getloadavg()[0] > 4 * os.cpu_count():
        pytest.skip(f"others decide what two loops get, load {os.getloadavg()[0]}")
    return row


def is_low(ratio):
    return ratio <= MAX_RATIO


def is_equal(ratio):
    return ratio > 0.3


def enter(cgroup):
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))


def may_create_cgroups():
    try:
        made = priority.own_cgroup() / "stretto-test"
        made.mkdir()
        found = (made / "cpu.idle").exists()
        made.rmdir()
    except OSError:
        return False
    return found


cgroups = pytest.mark.skipif(not may_create_cgroups(), reason="no permission")
autogroups = pytest.mark.skipif(not has_autogroups(), reason="no autogroups")


@cgroups
def test_a_cgroup_that_is_idle_keeps_the_foreground_first_and_is_removed():
    method, detail, ratio, _, inside = measured([CGROUP, SESSION], is_low)
    assert method == CGROUP
    assert inside in detail
    assert Path(inside).name.startswith("stretto-background-")
    assert ratio <= MAX_RATIO
    assert not Path(inside).exists()


@cgroups
@pytest.mark.timeout(300)
def test_the_cgroup_of_a_background_that_was_killed_is_removed_by_the_next():
    (*_, inside), process = lowered([CGROUP], keep=True)
    assert Path(inside).exists()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert Path(inside).exists()
    lowered([CGROUP])
    assert not Path(inside).exists()


WORKER = """
import multiprocessing, multiprocessing.util, time  # as torch does
from stretto.background import priority
found = priority.lower(["cgroup"], test=False)
worker = multiprocessing.get_context("fork").Process(
    target=time.sleep, args=(60,), daemon=True
)
worker.start()
print(priority.own_cgroup())
"""


@cgroups
def test_a_cgroup_is_removed_where_the_script_left_workers_in_it():
    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=True,
    )
    made = Path(done.stdout.strip())
    assert made.name.startswith("stretto-background-")
    assert not made.exists()


@cgroups
def test_a_background_in_the_foregrounds_session_comes_second_too():
    method, _, ratio, *_ = measured(
        [CGROUP], is_low, foreground=os.getpid(), session=False
    )
    assert method == CGROUP
    assert ratio <= MAX_RATIO


@autogroups
def test_without_cgroups_the_session_keeps_the_foreground_first():
    method, detail, ratio, policies, _ = measured([SESSION, SCHEDULER], is_low)
    assert method == SESSION
    assert "nice 19" in detail
    assert set(policies) == {os.SCHED_IDLE}  # threads that ran before, too
    assert ratio <= MAX_RATIO


IN_SESSION = """
"$@" <&- &
wait
for i in 1 2 3 4 5 6 7 8 9; do
    case "$(cat /proc/self/autogroup)" in *' nice 0') break ;; esac
    sleep 1
done
cat /proc/self/autogroup
"""


@autogroups
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_session_gets_its_share_back_after_a_background_in_it_is_killed(how):
    code = LOWER.replace("print(json", "print(os.getpid()); print(json")
    code = code.replace("foreground_pid=foreground", "test=False")
    row = [sys.executable, "-c", code, json.dumps([[SESSION], 0]), "stay"]
    process = subprocess.Popen(
        ["/bin/sh", "-c", IN_SESSION, "sh", *row],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pid = int(process.stdout.readline())
    assert json.loads(process.stdout.readline())[0] == SESSION
    assert priority._nice_of(Path(f"/proc/{process.pid}/autogroup")) == "19"
    os.kill(pid, how)
    out, _ = process.communicate(timeout=_PATIENCE_S)
    assert out.endswith(" nice 0\n")


def test_a_foreground_that_begins_later_gets_the_session_back():
    calls = []
    found = Isolation(method=SESSION, detail="", raise_session=lambda: calls.append(1))
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        found.meet(process.pid)
        assert not calls
        found.meet(os.getpid())
        found.meet(os.getpid())
    finally:
        process.kill()
        process.wait()
    assert calls == [1]


def test_what_the_kernel_permits_later_is_tried_again(tmp_path, monkeypatch):
    texts = []

    def write_text(_, text):
        texts.append(text)
        if len(texts) < 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(Path, "write_text", write_text)
    priority._write(tmp_path / "autogroup", "19")
    assert texts == ["19"] * 3


@autogroups
def test_sched_idle_alone_does_nothing_across_sessions_and_that_is_found():
    method, _, ratio, *_ = measured([SCHEDULER], lambda ratio: not is_low(ratio))
    assert method == SCHEDULER
    assert ratio > MAX_RATIO
    assert not Isolation(method=method, detail="", ratio=ratio).works


def test_in_the_foregrounds_session_sched_idle_is_enough():
    row = measured([SESSION, SCHEDULER], is_low, foreground=os.getpid(), session=False)
    assert row[0] == SCHEDULER  # the session is the foreground's: left as it is
    assert row[2] <= MAX_RATIO


@pytest.fixture
def containers():
    """Two cgroups of equal weight, with a process in the first: its id, the second."""
    parent = priority.own_cgroup()
    made = [parent / f"stretto-test-{name}-{os.getpid()}" for name in ("one", "two")]
    for cgroup in made:
        cgroup.mkdir()
    process = subprocess.Popen(
        ["sleep", "600"], preexec_fn=lambda: enter(made[0]), start_new_session=True
    )
    yield process.pid, made[1]
    process.kill()
    process.wait()
    for cgroup in made:
        for _ in range(100):
            try:
                cgroup.rmdir()
                break
            except OSError:
                time.sleep(0.05)


@cgroups
def test_a_background_in_another_container_comes_second_to_the_foregrounds(containers):
    foreground, own = containers
    method, _, ratio, *_ = measured([CGROUP], is_low, foreground=foreground, cgroup=own)
    assert method == CGROUP
    assert ratio <= MAX_RATIO


@cgroups
def test_a_container_that_may_not_be_left_is_equal_to_the_foregrounds(containers):
    """Idle within its own container only, which the test finds."""
    foreground, own = containers
    limit = own / "cpu.cfs_quota_us"
    if limit.exists():
        limit.write_text("1000000")
    elif (own / "cpu.max").exists():
        (own / "cpu.max").write_text("1000000 100000")
    else:
        pytest.skip("this cgroup divides no processors")
    method, _, ratio, *_ = measured(
        [CGROUP], is_equal, foreground=foreground, cgroup=own
    )
    assert method == CGROUP
    assert not Isolation(method=method, detail="", ratio=ratio).works


def test_without_any_priority_the_test_finds_none():
    method, detail, ratio, *_ = measured([], is_equal)
    assert method == ""
    assert "no priority" in detail
    assert ratio > 0.3


def test_what_is_not_permitted_falls_back_and_says_why(monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(priority, "_enter_idle_cgroup", refused)
    monkeypatch.setattr(priority, "_lower_session", refused)
    monkeypatch.setattr(priority, "_lower_threads", refused)
    found = priority.lower(test=False)
    assert found.method == ""
    assert "cgroup: Permission denied; session: Permission denied" in str(found)
    assert not found.works
    assert "not tested" in str(found)


def test_restoring_undoes_in_reverse_and_survives_what_fails():
    calls = []

    def fails():
        calls.append("fails")
        raise PermissionError

    found = Isolation(
        method=CGROUP,
        detail="",
        undo=[lambda: calls.append("first"), fails, lambda: calls.append("last")],
    )
    found.restore()
    found.restore()
    assert calls == ["last", "fails", "first"]


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A folder in place of this process's cgroup."""
    monkeypatch.setattr(priority, "own_cgroup", lambda: tmp_path)
    (tmp_path / "cgroup.procs").touch()
    return tmp_path


def test_a_cgroup_of_an_equal_process_id_in_another_container_is_no_obstacle(cgroups):
    other = cgroups / f"stretto-background-{os.getpid()}"
    write(other, cgroup__procs="7\n")
    found = priority._enter_idle_cgroup()
    assert found.method == CGROUP
    assert (other / "cgroup.procs").read_text() == "7\n"


def test_an_empty_cgroup_that_had_this_process_id_is_removed(cgroups):
    left = cgroups / f"stretto-background-{os.getpid()}-00000000"
    left.mkdir()
    priority._enter_idle_cgroup()
    assert not left.exists()


@pytest.mark.parametrize(("is_old", "is_left"), [(True, False), (False, True)])
def test_an_old_empty_cgroup_is_removed_if_its_process_id_is_in_use_again(
    cgroups, is_old, is_left
):
    left = cgroups / f"stretto-background-{os.getppid()}-00000000"
    left.mkdir()
    if is_old:
        os.utime(left, (0.0, 0.0))
    priority._enter_idle_cgroup()
    assert left.exists() == is_left


def test_levels_with_limits_are_never_left(tmp_path):
    own = tmp_path / "root" / "service" / "job"
    write(tmp_path / "root", cgroup__procs="")
    write(tmp_path / "root" / "service", cgroup__procs="", memory__max="max\n")
    write(own, cgroup__procs="", memory__max="max\n", cpu__max="max 100000\n")
    root, service = tmp_path / "root", tmp_path / "root" / "service"
    assert list(priority._levels(own)) == [root, service, own]
    (service / "memory.max").write_text("1073741824\n")
    assert list(priority._levels(own)) == [service, own]
    (own / "cpu.max").write_text("50000 100000\n")
    assert list(priority._levels(own)) == [own]


@pytest.mark.parametrize(
    ("cgroups", "mounts", "expected"),
    [
        ("0::/a\n", "cgroup2 {root} cgroup2 rw 0 0\n", "a"),
        ("0::/not/here\n", "cgroup2 {root} cgroup2 rw 0 0\n", ""),
        (
            "4:cpu,cpuacct:/a\n0::/b\n",
            "cgroup2 /x cgroup2 rw 0 0\nc {root} cgroup rw,cpu,cpuacct 0 0\n",
            "a",
        ),
        (
            "4:cpuset:/b\n0::/a\n",
            "c /x cgroup rw,cpuset 0 0\nc {root} cgroup2 rw\n",
            "a",
        ),
    ],
)
def test_the_own_cgroup_is_found_in_both_versions(tmp_path, cgroups, mounts, expected):
    (tmp_path / "root" / "a").mkdir(parents=True)
    root = tmp_path / "root"
    write(tmp_path / "self", cgroup=cgroups, mounts=mounts.format(root=root))
    assert priority.own_cgroup(tmp_path) == root / expected


def test_the_own_cgroup_is_found_whatever_bytes_other_mounts_have(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    mounts = b"d /m\xfc\x85 ext4 rw 0 0\ncgroup2 %b cgroup2 rw 0 0\n" % bytes(root)
    write(tmp_path / "self", cgroup="0::/\n", mounts="")
    (tmp_path / "self" / "mounts").write_bytes(mounts)
    assert priority.own_cgroup(tmp_path) == root


def test_without_cgroups_there_is_an_error_that_says_so(tmp_path):
    write(tmp_path / "self", cgroup="0::/\n", mounts="proc /proc proc rw 0 0\n")
    with pytest.raises(OSError, match="no cgroup"):
        priority.own_cgroup(tmp_path)


def test_a_probe_leaves_this_process_as_it_is():
    before = priority.own_cgroup(), os.sched_getscheduler(0)
    found = priority.probe()
    assert found.method in priority.METHODS
    assert (priority.own_cgroup(), os.sched_getscheduler(0)) == before


def test_a_probe_that_gets_no_processor_time_ends_and_says_so():
    found = priority.probe(limit_s=0.0)
    assert not found.method
    assert not found.works
    assert "other programs take all processors" in found.detail


def test_a_busy_loop_ends_with_the_process_that_started_it():
    code = (
        "import os\n"
        "from stretto.background.priority import _Loop\n"
        "loop = _Loop(new_session=True)\n"
        "loop.start()\n"
        "print(loop._process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
