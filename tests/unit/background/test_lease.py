"""`stretto.Background` and `stretto.Foreground` in one process."""

from __future__ import annotations

import dis
import itertools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stretto
from stretto import foreground_marks, variable_names
from stretto.background import foreground as foreground_module
from stretto.background import named_device
from stretto.background.board import COMMUNICATING, COMPUTING, WAITING, Mark
from stretto.background.devices.base import EndedTask
from stretto.background.devices.exclusive import ExclusiveDevice
from stretto.background.foreground_view import ForegroundView
from stretto.background.pacing import Policy, Reason
from stretto.background.paired_steps import StepRecord
from stretto.background.windows import KNOWN_AFTER, Window
from stretto.errors import BackgroundError, SpecError
from stretto.foreground_marks import NO_MARKS, StepMarker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
DEVICE = "cpu:7"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def foreground():
    with stretto.Foreground(DEVICE) as made:
        yield made


def background(**options):
    return stretto.Background(DEVICE, isolates=False, **options)


def test_without_a_foreground_every_lease_opens_at_once():
    with background() as job:
        for _ in range(3):
            with job.lease():
                pass
        assert job.wait("other")
        found = job.statistics
    assert found.tasks == 3
    assert found.running_s <= found.elapsed_s
    assert 0.0 <= found.share <= 1.0
    assert found.isolation == "not asked for"


def test_a_lease_waits_for_a_wait_of_the_foreground_that_fits(foreground):
    with background(adapts=False) as job:
        assert job.wait(timeout_s=0.0) is False
        assert job._reason is Reason.STALE
        foreground.step()
        assert job.wait(timeout_s=0.0) is False
        assert job._reason is Reason.COMPUTING
        with foreground.waiting("network"):
            assert job.wait(timeout_s=0.0) is False
            assert job._reason is Reason.UNKNOWN
        foreground.set_windows([Window(begin_s=0.0, length_s=60.0, kind="network")])
    with background(adapts=False) as job:
        job.wait(timeout_s=0.0)
        foreground.step()
        foreground.step()
        with foreground.waiting("network"):
            assert job.wait(timeout_s=5.0)  # the prediction is enough
        job.end_task()
        assert not job.wait(timeout_s=0.0)


def test_a_task_that_was_held_up_does_not_change_the_usual_length():
    def usual_s(*lengths_s):
        with background() as job:
            for length_s in lengths_s:
                job._add_ended(EndedTask("", length_s, 0.0))
            return job._usual_s[""]

    assert usual_s(0.002) == 0.002
    assert usual_s(*[0.002] * 6, 0.9) == 0.002
    assert usual_s(*[0.002] * 6, 0.004, 0.004) == 0.004  # the first of many
    assert usual_s(0.5, *[0.002] * 8) == 0.002


def test_a_first_task_that_was_longest_is_not_published_as_usual_for_ever():
    with background() as job:
        for length_s in (60.0, *[0.002] * 8):
            job._add_ended(EndedTask("", length_s, 0.0))
        job._add_ended(EndedTask("other", 0.001, 0.0))
        assert job._status.usual_s == 0.002


def test_idle_time_that_no_task_used_is_counted_by_reason(foreground):
    with background() as job:  # its first step is a control step
        for _ in range(3):
            foreground.step()
            job.wait(timeout_s=0.0)
            with foreground.waiting("network"):
                job.wait(timeout_s=0.01)
        found = job.statistics
        assert set(found.unused_s) >= {"a control step runs"}
        assert set(found.unused_s).isdisjoint({"the foreground computes"})
        assert 0.0 < found.idle_ratio <= 1.0
        assert found.used_ratio == 0.0


def test_an_error_in_a_task_ends_its_lease():
    with background() as job:
        with pytest.raises(KeyError), job.lease():
            raise KeyError
        assert job.statistics.tasks == 1


def test_marks_are_written_only_while_a_background_reads(foreground):
    board = foreground._board
    before = board.last_number
    foreground.step()
    with foreground.waiting("network"):
        pass
    assert board.last_number == before
    with background():
        assert foreground.is_read
        foreground.step()
        outer = foreground.waiting("network", uses_device=True)
        with outer, foreground.waiting("inner"):  # counts as the outer one
            pass
        marks = board.marks_after(before)
    assert [(m.step, m.kind) for m in marks] == [
        (2, "other"),
        (2, "network"),
        (2, "other"),
    ]
    assert not foreground.is_read


def test_calls_after_closing_do_nothing(foreground):
    with background():
        foreground.close()
        foreground.step()
        foreground.begin_wait("network")
        foreground.end_wait()


def test_a_closed_foreground_has_no_background(foreground):
    with background():
        foreground.step()
        assert foreground.background is not None
        foreground.close()
        foreground.set_windows((Window(begin_s=0.0, length_s=1.0, kind="a"),))
        assert foreground.background is None
        assert not foreground.is_read


def test_windows_that_are_predicted_later_reach_the_background(foreground):
    with background(adapts=False) as job:
        for _ in range(2):
            job.wait(timeout_s=0.0)
            foreground.step()
        for length_s in (1000.0, 0.0):
            window = Window(begin_s=0.0, length_s=length_s, kind="network")
            foreground.set_windows((window,))
            foreground.step()
            job.wait(timeout_s=0.0)
            with foreground.waiting("network"):
                opens = job.wait(timeout_s=0.0)
                job.end_task()
            assert opens is (length_s > 0.0)


def test_a_background_counts_the_foregrounds_that_it_was_beside():
    with background() as job:
        job.wait()
        assert job.statistics.foregrounds == 0
        for _ in range(2):
            with stretto.Foreground(DEVICE):
                job.wait(timeout_s=0.0)
        assert job.statistics.foregrounds == 2


@pytest.mark.parametrize("asks", [False, True])
def test_a_foreground_that_ends_before_a_lease_is_asked_for_was_missed(asks):
    with background() as job:
        job.wait(timeout_s=0.0)
        assert not job.statistics.has_missed_foregrounds
        with stretto.Foreground(DEVICE) as foreground:
            foreground.step()
            if asks:
                job.wait(timeout_s=0.0)
        job.wait(timeout_s=0.0)
        found = job.statistics
    assert (found.foregrounds, found.has_missed_foregrounds) == (int(asks), not asks)


def in_a_child(call):
    """Return the exit status of a forked child that makes a call."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(int(bool(call())))
        except SpecError:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_leaves_the_queue_to_its_parent():
    def trains():
        foreground.step()
        with foreground.waiting("network"):
            pass
        foreground.close()

    with stretto.Foreground("exclusive:a") as foreground:
        foreground.step()
        served = foreground._device._words[2], foreground._device._words[1]
        assert in_a_child(trains) == 0
        after = foreground._device._words[2], foreground._device._words[1]
        assert after == served


def test_a_forked_child_has_no_lease_of_its_parents_device():
    with stretto.Background("exclusive:a") as job:
        job.wait()
        assert in_a_child(job.end_task) == 0
        assert job._device._tickets
        assert in_a_child(job.wait) == 2
        assert job.wait()


def test_a_forked_child_ends_without_touching_the_device(monkeypatch):
    with background() as job:
        closed = []
        monkeypatch.setattr(job._device, "close", lambda: closed.append(os.getpid()))
        child = os.fork()
        if child == 0:
            job.close()
            os._exit(len(closed))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert job.wait()


def test_no_marks_accept_everything():
    NO_MARKS.step()
    NO_MARKS.begin_wait("network", uses_device=True)
    NO_MARKS.end_wait()


def test_a_device_has_one_foreground(foreground):
    with pytest.raises(BackgroundError, match=f"{os.getpid()}, which is this one: use"):
        stretto.Foreground(DEVICE)


def test_models_mark_on_every_foreground_of_the_process(foreground):
    marker = StepMarker()
    with (
        stretto.Foreground("cpu:8") as other,
        background(),
        stretto.Background("cpu:8", isolates=False),
    ):
        for _ in range(3):
            marker.begin_step()
            marker.wait("all-reduce", lambda: None)
            marker.end_step()
        marks = [
            one._board.marks_after(one._board.last_number - 9)
            for one in (foreground, other)
        ]
        seen = [[(m.step, m.state, m.kind) for m in each] for each in marks]
    assert seen[0] == seen[1]
    assert seen[0][-2:] == [(3, WAITING, "all-reduce"), (3, COMPUTING, "other")]


def test_a_foreground_that_closes_within_a_wait_leaves_the_others_their_marks(
    foreground,
):
    marker, other = StepMarker(), stretto.Foreground("cpu:8")
    marker.wait("all-reduce", other.close)
    assert foreground_marks.current() is foreground
    assert foreground._waits == 0


def test_the_named_device_is_opened_beside_one_of_the_script(foreground, monkeypatch):
    monkeypatch.setenv(variable_names.FOREGROUND, "cpu:8")
    monkeypatch.setattr(named_device, "_is_opened", False)
    named_device.open_named()
    (opened,) = [one for one in foreground_module._opened if one is not foreground]
    with opened:
        assert opened.device_name == "cpu:8"


def test_a_named_device_that_the_script_has_opened_is_its_own(
    foreground, monkeypatch, caplog
):
    monkeypatch.setenv(variable_names.FOREGROUND, DEVICE)
    monkeypatch.setattr(named_device, "_is_opened", False)
    named_device.open_named()
    assert not caplog.records


def test_a_process_that_trains_without_marks_is_reported(monkeypatch, caplog):
    monkeypatch.setenv(variable_names.FOREGROUND, "cpu:8")
    monkeypatch.setattr(named_device, "_is_opened", False)
    with stretto.Foreground("cpu:7"):  # the program marks its steps itself
        named_device.warn_of_no_foreground()
    assert not caplog.records
    named_device.warn_of_no_foreground()
    assert "a background takes cpu:8 for free" in caplog.text


@pytest.mark.parametrize(
    "options", [{"max_loss": -1.0}, {"depth": 0}, {"margin": float("nan")}]
)
def test_invalid_limits_are_refused(options):
    with pytest.raises(SpecError):
        background(**options)
    background().close()  # and nothing is left claimed


def test_a_closed_background_says_so():
    job = background()
    job.close()
    job.close()
    with pytest.raises(SpecError, match="closed"):
        job.wait()


def test_a_limit_that_cannot_be_met_closes_it_and_is_logged_once(foreground, caplog):
    with background(policy=Policy.OUTSTANDING, max_loss=0.01) as job:
        job.wait(timeout_s=0.0)
        with caplog.at_level(logging.WARNING, logger="stretto"):
            for _ in range(3000):
                had = not (job.gate.is_control or job.gate.is_closed)
                job._step_ended(
                    StepRecord(duration_s=1.5 if had else 1.0, had_task=had)
                )
        assert job._controller.closings > 1
        assert foreground.background is not None
    lines = [r.getMessage() for r in caplog.records]
    assert len([line for line in lines if "max_loss=0.01" in line]) == 1


def test_tasks_that_fit_no_window_are_reported_once(foreground, caplog):
    with background(adapts=False) as job:
        job._usual_s[""] = 0.5
        with caplog.at_level(logging.WARNING, logger="stretto"):
            for step in range(200):  # one is a task that is measured again
                job._step_ended(StepRecord(duration_s=1.0, had_task=step == 100))
    assert [
        r.getMessage().count("no window fits its tasks of 0.5 s")
        for r in caplog.records
    ] == [1]


def test_tasks_that_fit_no_window_are_reported_although_others_fit(foreground, caplog):
    foreground.set_windows([Window(begin_s=0.0, length_s=0.4, kind="network")])
    with background(adapts=False) as job:
        job.wait(timeout_s=0.0)
        job._usual_s |= {"short": 0.001, "long": 0.5}
        job._label = "long"
        with caplog.at_level(logging.WARNING, logger="stretto"):
            for _ in range(200):
                job._step_ended(StepRecord(duration_s=1.0, had_task=False))
    (line,) = [r.getMessage() for r in caplog.records]
    assert "no window fits its tasks of 0.5 s; the longest is 0.4 s" in line


def test_a_background_that_has_no_task_to_run_is_not_said_to_fit_no_window(
    foreground, caplog
):
    """It loads data, for instance."""
    foreground.set_windows([Window(begin_s=0.0, length_s=60.0, kind="network")])
    with background(adapts=False) as job:
        job.wait(timeout_s=0.0)
        job._usual_s[""] = 0.5
        with caplog.at_level(logging.WARNING, logger="stretto"):
            for _ in range(200):
                job._step_ended(StepRecord(duration_s=100.0, had_task=False))
    assert not caplog.records


def test_a_task_that_fits_no_window_is_measured_again_after_ever_more_steps():
    """The first task of a job is often its longest."""
    with background(adapts=False) as job:
        job._label = "batch"
        again = []
        for step in range(100):
            job._too_long_label = "batch"
            if "batch" not in job._usual_s:
                again.append(step)
                job._usual_s["batch"] = 0.5
            job._step_ended(StepRecord(duration_s=1.0, had_task=False))
    assert again == [0, 10, 30, 70]


def test_a_task_is_measured_again_where_steps_end_with_computation(foreground):
    foreground.set_windows([Window(begin_s=0.0, length_s=60.0, kind="network")])
    with background(adapts=False) as job:
        job.wait(timeout_s=0.0)
        job._usual_s["batch"] = 600.0
        for _ in range(30):
            foreground.step()
            with foreground.waiting("network"):
                if job.wait("batch", timeout_s=0.0):
                    break
            assert not job.wait("batch", timeout_s=0.0)
            assert job._reason is Reason.COMPUTING
        assert job.has_lease


TRAINING = """
import json, sys, time
import torch, stretto
torch.manual_seed(0)
torch.set_num_threads(1)
nn = torch.nn
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = stretto.Foreground("cpu:3")
print("ready", flush=True)
losses = []
if sys.argv[1] == "beside":
    while not job.is_read:
        time.sleep(0.01)
for _ in range(40):
    job.step()
    loss = model(torch.randn(16, 32)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    with job.waiting("network"):
        time.sleep(0.004)
    optimizer.step()
    losses.append(loss.item().hex())
print(json.dumps(losses), flush=True)
"""


def trained(how):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, how], stdout=subprocess.PIPE, text=True
    )
    beside = None
    assert process.stdout.readline() == "ready\n"
    if how == "beside":
        program = Path(__file__).parents[2] / "support" / "background_jobs.py"
        options = {"device": "cpu:3", "task_s": 0.001, "policy": "OUTSTANDING"}
        beside = subprocess.Popen(
            [sys.executable, program, "background", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    out, _ = process.communicate(timeout=100)
    if beside is not None:
        said, _ = beside.communicate("", timeout=60)
        assert json.loads(said.splitlines()[-1])["tasks"] > 0
    return json.loads(out)


def test_the_foregrounds_values_are_equal_bit_for_bit_with_and_without_background():
    assert trained("beside") == trained("alone")


def test_no_task_starts_while_communication_uses_a_device_that_it_keeps_busy():
    records = []
    for idles, waits in ((True, True), (False, False)):
        view = ForegroundView(records.append, idles_in_communication=idles)
        view.add([Mark(1, 1, 0.0, COMMUNICATING, "all-reduce")])
        assert view.situation(0.1, 0).is_waiting is waits
        view.add([Mark(2, 1, 0.2, WAITING, "receive")])
        assert view.situation(0.3, 0).is_waiting


def test_a_step_whose_marks_are_lost_is_not_learned():
    records = []
    view = ForegroundView(records.append)
    for number, step, time_s in ((1, 1, 0.0), (2, 2, 1.0), (3, 3, 2.0)):
        view.add([Mark(number, step, time_s, COMPUTING, "")])
    assert [r.duration_s for r in records] == [1.0]  # the first was seen in part
    view.add([Mark(9, 5, 9.0, COMPUTING, ""), Mark(10, 6, 10.5, COMPUTING, "")])
    assert len(records) == 1
    view.add([Mark(11, 7, 12.0, COMPUTING, "")])
    assert [r.duration_s for r in records] == [1.0, 1.5]


def test_the_next_wait_is_expected_where_it_began_in_earlier_steps():
    view = ForegroundView(lambda step: None)
    numbers = itertools.count(1)

    def mark(step, time_s, state=COMPUTING):
        view.add([Mark(next(numbers), step, time_s, state, "network")])

    for step in range(KNOWN_AFTER + 2):  # waits at 10, short, and at 30 to 40
        mark(step, 100.0 * step)
        for begin_s, end_s in ((10.0, 11.0), (30.0, 40.0)):
            mark(step, 100.0 * step + begin_s, WAITING)
            mark(step, 100.0 * step + end_s)
    at_s = 100.0 * (KNOWN_AFTER + 2)
    mark(KNOWN_AFTER + 2, at_s)
    assert view.until_wait_s(at_s + 4.0, 0.5) == 6.0
    assert view.until_wait_s(at_s + 4.0, 5.0) == 26.0
    assert view.until_wait_s(at_s + 4.0, 50.0) == 96.0  # none: until the next step
    mark(KNOWN_AFTER + 2, at_s + 10.0, WAITING)
    assert view.until_wait_s(at_s + 10.5, 0.5) == 19.5


def test_steps_with_tasks_are_counted_because_only_their_loss_is_known(foreground):
    with background(adapts=False, policy=Policy.OUTSTANDING) as job:
        job._decide("")
        for number in range(6):
            foreground.step()
            job._decide("")
            if number in (2, 3):
                assert job.wait(timeout_s=5.0)
                job.end_task()
        found = job.statistics
        assert 0.0 < found.task_steps_s < found.steps_s
        assert found.task_steps_ratio == found.task_steps_s / found.steps_s


def test_a_task_in_a_step_that_is_never_complete_is_no_use_of_idle_time(foreground):
    """Such as the last task of a background that runs out of memory in it."""
    with background(adapts=False, policy=Policy.OUTSTANDING) as job:
        job.wait(timeout_s=0.0)
        for _ in range(4):
            foreground.step()
            with foreground.waiting("network"):
                assert job.wait(timeout_s=5.0)
                job.end_task()
        foreground.step()
        job.wait(timeout_s=5.0)
        before_s = job.statistics.beside_s
        job._device._running = "", job._device._running[1] - 20.0
        job.end_task()
        assert job.statistics.running_s > 20.0
        assert job.statistics.beside_s == before_s > 0.0


def test_ranks_agree_on_a_models_steps_whenever_each_has_opened_its_device():
    """A rank that joins later counts from 0, and so does each other rank then."""

    def numbers(before):
        with stretto.Foreground(DEVICE) as foreground, background():
            for steps in (before, 3):
                marker = StepMarker()
                for _ in range(steps):
                    marker.begin_step()
                    marker.end_step()
            last = foreground._board.last_number
            return [mark.step for mark in foreground._board.marks_after(last - 3)]

    assert numbers(before=20) == numbers(before=0) == [1, 2, 3]


def test_a_step_has_a_request_if_the_background_waited_in_it():
    records = []
    view = ForegroundView(records.append)
    view.request_ended(-1.0)
    numbers = itertools.count(1)

    def begin(step, time_s):
        view.add([Mark(next(numbers), step, time_s, COMPUTING, "other")])

    begin(1, 0.0)
    begin(2, 1.0)  # the first step's begin is unknown
    begin(3, 2.0)
    view.request_began(2.5)
    begin(4, 3.0)
    begin(5, 4.0)
    view.request_ended(4.5)
    begin(6, 5.0)
    begin(7, 6.0)
    found = {record.number: record.had_request for record in records}
    assert found == {2: False, 3: True, 4: True, 5: True, 6: False}


def test_a_background_that_computes_and_takes_no_lease_is_reported_once(
    foreground, caplog, monkeypatch
):
    used_s, now_s = itertools.count(), itertools.count(100)
    monkeypatch.setattr(
        foreground_module.time, "clock_gettime", lambda _clock: next(used_s)
    )
    monkeypatch.setattr(foreground_module, "perf_counter", lambda: next(now_s))
    with background() as job:
        for _ in range(40):
            foreground._look()
        assert "has computed for 11 s without a lease" in caplog.text
        assert len(caplog.records) == 1
        caplog.clear()
        foreground._has_warned_of = 0
        for _ in range(40):  # it takes leases, and computes between them too
            job._status.tasks += 1
            job._board.publish(job._status)
            foreground._look()
            foreground._look()
    assert not caplog.records


def interruption_points(code):
    """Return the instructions before which Python calls the handlers of signals."""
    found = set()
    for one, following in itertools.pairwise(dis.get_instructions(code)):
        # In a return the call would be outside of its handlers.
        if one.opname.startswith("CALL") and following.opname != "RETURN_VALUE":
            found.add(following.offset)
        if "JUMP_BACKWARD" in one.opname:
            found.add(one.argval)
    return found


INTERRUPTED = ("lease.py", "exclusive.py", "board.py", "contextlib.py")


def interrupted_at(number, call):
    """Interrupt a call at one of these points; return whether there is such a point."""
    left = itertools.count(number, -1)

    def trace(frame, event, _arg):
        if Path(frame.f_code.co_filename).name not in INTERRUPTED:
            return None
        frame.f_trace_opcodes = True
        points = interruption_points(frame.f_code)

        def look(inner, event, _arg):
            if event == "opcode" and inner.f_lasti in points and not next(left):
                sys.settrace(None)
                raise KeyboardInterrupt
            return look

        return look

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # or Python 3.12 traces no instructions
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupt_at_any_point_of_a_lease_leaves_the_device_free(depth):
    other = ExclusiveDevice("exclusive:i")
    with stretto.Background(
        "exclusive:i", depth=depth, policy=Policy.OUTSTANDING
    ) as job:

        def lease():
            job.wait("a")
            job.end_task()

        number, kept = 0, []
        while interrupted_at(number, lease):
            if not other.take(patience_s=0.0) or job.has_lease:
                kept.append(number)
            other.release()
            assert job.wait("b", timeout_s=10.0)
            job.withdraw()
            number += 1
        assert number > 20
        assert not kept
    other.close()


@pytest.mark.parametrize("role", ["Background", "Foreground"])
def test_a_process_that_becomes_another_program_leaves_its_device(role, tmp_path):
    code = (
        "import os, sys, stretto\n"
        f"job = stretto.{role}('exclusive:x')\n"
        "job.wait() if hasattr(job, 'wait') else job.step()\n"
        "os.execlp('cat', 'cat', '-')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdin.write(b"line\n")
    process.stdin.flush()
    try:
        assert process.stdout.readline() == b"line\n"  # the other program runs
        with getattr(stretto, role)("exclusive:x"):
            device = ExclusiveDevice("exclusive:x")
            assert device.take(patience_s=0.0)
            device.close()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("role", ["Background", "Foreground"])
def test_a_process_that_cannot_become_another_program_keeps_its_device(role):
    with getattr(stretto, role)("exclusive:x"):
        with pytest.raises(FileNotFoundError):
            os.execv("/no/such/program", ["program"])
        with pytest.raises(BackgroundError, match=f"has a {role.lower()} already"):
            getattr(stretto, role)("exclusive:x")
