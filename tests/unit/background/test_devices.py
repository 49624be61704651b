"""Devices in one process: the emulated queue, and CUDA with stand-ins."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
import weakref

import pytest

from stretto.background.board import file_of
from stretto.background.devices import exclusive as exclusive_module
from stretto.background.devices import open_device
from stretto.background.devices.cuda import CudaDevice, GraphPieces, pieces
from stretto.background.devices.exclusive import ExclusiveDevice
from stretto.background.priority import Isolation
from stretto.errors import BackgroundError, SpecError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def queues():
    made = []

    def make():
        made.append(ExclusiveDevice("exclusive:a"))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


def test_unknown_devices_are_refused_with_the_known_ones():
    with pytest.raises(SpecError, match=r"one of cpu, cuda, exclusive.*got 'tpu:0'"):
        open_device("tpu:0")


def test_a_processor_runs_a_task_as_long_as_it_lasts():
    device = open_device("cpu")
    assert device.outstanding == 0
    assert device.start_task("a", waits=False, depth=1)
    assert device.outstanding == 1
    time.sleep(0.02)
    device.end_task()
    (task,) = device.ended()
    assert task.label == "a"
    assert task.length_s >= 0.02
    assert device.ended() == []
    assert device.preempts(Isolation(method="", detail="", ratio=0.01))
    assert not device.preempts(Isolation(method="", detail="", ratio=0.9))
    assert not device.preempts(Isolation(method="", detail=""))


def test_a_busy_device_is_not_waited_for_where_the_task_must_fit(queues):
    foreground, background = queues(), queues()
    assert foreground.take()
    assert not background.start_task("a", waits=False, depth=1)
    foreground.release()
    assert background.start_task("a", waits=False, depth=1)
    assert not foreground.take(patience_s=0.0)
    background.end_task()
    assert foreground.take()


def test_the_queue_serves_launches_in_their_order(queues):
    foreground, background = queues(), queues()
    order = []
    assert background.start_task("a", waits=True, depth=3)  # and two behind it

    def compute():
        foreground.take()
        order.append("foreground")
        foreground.release()

    thread = threading.Thread(target=compute)
    thread.start()
    while foreground._tickets == exclusive_module.deque():
        time.sleep(0.001)
    for i in range(3):
        if i:
            # No new launches: these have been in the queue since the first.
            background.start_task("a", waits=True, depth=1)
        order.append(f"task {i}")
        background.end_task()
    thread.join()
    assert order == ["task 0", "task 1", "task 2", "foreground"]


def test_withdrawn_launches_let_the_foreground_pass(queues):
    foreground, background = queues(), queues()
    background.start_task("a", waits=True, depth=4)
    background.end_task()
    assert not foreground.take(patience_s=0.0)
    background.withdraw()
    assert foreground.take()


def test_the_device_of_a_process_that_has_ended_is_served_on(queues):
    gone = os.fork()
    if gone == 0:
        ExclusiveDevice("exclusive:a").take()
        os._exit(0)
    os.waitpid(gone, 0)
    queue = queues()
    deadline = time.perf_counter() + 30
    while not queue.start_task("a", waits=False, depth=1):
        assert time.perf_counter() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ["fifo", "another user's"])
def test_a_queue_that_is_no_file_of_this_user_is_refused(queues, kind):
    path = file_of("exclusive:a", "queue")
    if kind == "fifo":
        os.mkfifo(path)
    elif os.geteuid():
        pytest.skip("only root may give a file away")
    else:  # its owner could truncate it, which would end who has it mapped
        path.touch()
        os.chown(path, 12345, -1)
    with pytest.raises(BackgroundError, match="queue is not a file of this user"):
        queues()


def test_a_full_queue_never_stops_the_foreground(queues, monkeypatch):
    monkeypatch.setattr(exclusive_module, "_TICKETS", 3)
    foreground, background = queues(), queues()
    background.start_task("a", waits=True, depth=3)
    assert not foreground.take(patience_s=0.0)
    background.end_task()
    background.withdraw()
    assert foreground.take()


@pytest.mark.parametrize(
    ("served", "upcoming"), [(0, 2**40), (7, 3), (2**64 - 1, 2**64 - 1), (0, 251)]
)
@pytest.mark.timeout(60)
def test_numbers_that_no_queue_has_are_those_of_an_empty_one(queues, served, upcoming):
    foreground, background = queues(), queues()
    background.start_task("a", waits=True, depth=2)
    words = foreground._words
    words[exclusive_module._SERVED] = served
    words[exclusive_module._NEXT] = upcoming
    assert foreground.take(patience_s=20.0)
    assert not background.start_task("a", waits=False, depth=1)
    background.end_task()
    foreground.release()
    assert background.start_task("a", waits=True, depth=2)


@pytest.mark.timeout(60)
def test_a_launch_that_something_else_removed_from_the_queue_is_made_again(queues):
    foreground, background = queues(), queues()
    assert foreground.take()
    found = []
    waits = threading.Thread(
        target=lambda: found.append(background.start_task("a", waits=True, depth=2))
    )
    waits.start()
    while len(background.tickets) < 2:
        time.sleep(0.001)
    foreground._words[exclusive_module._SERVED] = 2**63
    assert not waits.join(30.0)
    assert found == [True]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_queue_that_cannot_be_opened_says_both_ways_out(queues):
    path = file_of("exclusive:a", "queue")
    path.touch(mode=0o400)
    with pytest.raises(BackgroundError, match=r"remove it, or set STRETTO_RUNTIME_DIR"):
        queues()


@pytest.fixture
def stopped():
    """Lock a file as a process does that is stopped while it changes it."""

    @contextlib.contextmanager
    def lock(path):
        descriptor = os.open(path, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(descriptor)

    return lock


def test_the_foreground_gives_up_a_device_whose_queue_stays_locked(queues, stopped):
    foreground = queues()
    with stopped(foreground._path):
        assert not foreground.take(patience_s=0.01)
    assert foreground.take(patience_s=10.0)


def test_a_ticket_given_back_while_the_queue_is_locked_is_skipped(queues, stopped):
    foreground, background = queues(), queues()
    assert foreground.take()
    with stopped(foreground._path):
        foreground.release()
    assert background.start_task("a", waits=True, depth=1)


def test_a_queue_that_stays_locked_is_not_opened(queues, stopped, monkeypatch):
    monkeypatch.setattr(exclusive_module, "_OPEN_S", 0.01)
    with (
        stopped(queues()._path),
        pytest.raises(BackgroundError, match="locked by another process, which may be"),
    ):
        queues()


def test_a_file_that_is_no_queue_is_refused():
    from stretto.background.board import file_of

    file_of("exclusive:a", "queue").write_bytes(b"x" * 99)
    with pytest.raises(BackgroundError, match="is not a queue: remove it"):
        ExclusiveDevice("exclusive:a")
    file_of("exclusive:a", "queue").write_bytes(b"x" * 4096)
    with pytest.raises(BackgroundError, match="is not a queue: remove it"):
        ExclusiveDevice("exclusive:a")


class StandIn:
    """What `CudaDevice` uses of ``torch.cuda``; time moves when a test says so."""

    def __init__(self, *, initialized=False):
        self.now_ms = 0.0
        self.current = ["default"]
        self.capturing_now = False
        self.launched = []
        self.initialized = initialized
        outer = self

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing

            def record(self, stream):
                assert not outer.capturing_now
                assert stream == outer.current[-1]
                self.at_ms = outer.now_ms + 2.0 * len(outer.launched)

            def query(self):
                assert not outer.capturing_now
                return outer.now_ms >= self.at_ms

            def elapsed_time(self, end):
                return end.at_ms - self.at_ms

            def synchronize(self):
                outer.now_ms = max(outer.now_ms, self.at_ms)

        class CUDAGraph:
            def replay(self):
                outer.launched.append((self.segments, outer.current[-1]))

        self.Event, self.CUDAGraph = Event, CUDAGraph

    def is_initialized(self):
        return self.initialized

    def is_current_stream_capturing(self):
        return self.capturing_now

    def current_stream(self, device):
        assert device in (0, 1)
        return self.current[-1]

    def device_count(self):
        return 2

    def Stream(self, *, device, priority):  # noqa: N802 - torch's name
        return ("stream", device, priority)

    @contextlib.contextmanager
    def stream(self, stream):
        self.current.append(stream)
        yield
        self.current.pop()

    def graph_pool_handle(self):
        return "pool"

    @contextlib.contextmanager
    def graph(self, graph, *, pool, stream):
        assert pool == "pool"
        self.capturing = []
        yield
        graph.segments, graph.stream = self.capturing, stream


def test_cuda_tasks_run_on_the_program_s_stream_until_their_event():
    cuda = StandIn()
    device = CudaDevice("cuda:1", cuda)
    assert device.stream == ("stream", 1, 0)
    assert device.foreground_stream() == ("stream", 1, -3)
    device.start_task("a", waits=False, depth=2)
    assert cuda.current == ["default"]
    assert device.outstanding == 1
    cuda.launched.append("kernel")
    device.end_task()
    assert device.outstanding == 1  # its event has not been reached
    assert device.ended() == []
    cuda.now_ms = 2.0
    (task,) = device.ended()
    assert (task.label, task.length_s) == ("a", pytest.approx(2e-3))
    assert device.outstanding == 0
    assert not device.preempts(Isolation(method="", detail="", ratio=0.0))


@pytest.mark.parametrize("from_start", [True, False])
def test_a_captured_cuda_task_is_not_timed_and_asks_no_event(from_start):
    cuda = StandIn(initialized=True)
    device = CudaDevice("cuda", cuda)
    device.start_task("before", waits=False, depth=2)
    cuda.launched.append("kernel")
    device.end_task()
    cuda.capturing_now = from_start
    device.start_task("captured", waits=False, depth=2)
    cuda.capturing_now = True
    assert device.outstanding == 1
    device.end_task()
    assert device.outstanding == 0
    assert device.ended() == []
    cuda.capturing_now = False
    assert device.outstanding == 1
    cuda.now_ms = 2.0
    (task,) = device.ended()
    assert task.label == "before"


def test_closing_waits_for_cuda_tasks():
    cuda = StandIn()
    device = CudaDevice("cuda", cuda)
    device.start_task("a", waits=False, depth=1)
    cuda.launched.append("kernel")
    device.end_task()
    device.close()
    assert device.outstanding == 0


def test_mps_makes_a_client_of_low_priority_before_cuda_is_initialized(tmp_path):
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    device = CudaDevice("cuda:0", StandIn())
    assert "no MPS" in str(device.isolate(0, environment))
    (tmp_path / "control").touch()
    assert device.isolate(0, environment).method == "mps"
    assert environment["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    late = CudaDevice("cuda:0", StandIn(initialized=True))
    assert late.isolate(0, environment).method == "mps"  # as the program was started
    environment.pop("CUDA_MPS_CLIENT_PRIORITY")
    assert "CUDA was initialized before" in str(late.isolate(0, environment))


def test_names_of_cuda_devices_have_a_number():
    with pytest.raises(SpecError, match="cuda:0"):
        CudaDevice("cuda:x", StandIn())


def test_a_missing_cuda_device_is_refused():
    with pytest.raises(SpecError, match="no device cuda:2: PyTorch sees 2 GPUs"):
        CudaDevice("cuda:2", StandIn())


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], []),
        ([2.0], [range(1)]),
        ([0.2, 0.2, 0.2], [range(2), range(2, 3)]),
        ([0.1, 0.9, 0.1], [range(1), range(1, 2), range(2, 3)]),
        ([0.25, 0.25, 0.5, 0.0], [range(2), range(2, 4)]),
    ],
)
def test_segments_are_joined_up_to_the_length_of_a_piece(times, expected):
    assert pieces(times, 0.5) == expected


@pytest.mark.parametrize(("times", "length"), [([-1.0], 1.0), ([1.0], 0.0)])
def test_times_of_pieces_must_be_possible(times, length):
    with pytest.raises(SpecError):
        pieces(times, length)


def test_a_graph_is_replayed_in_the_order_of_its_capture_a_lease_each():
    cuda = StandIn()
    device = CudaDevice("cuda:0", cuda)
    segments = [lambda i=i: cuda.capturing.append(i) for i in range(5)]
    job = GraphPieces(device, segments, [0.2e-3] * 5, cuda=cuda)
    assert len(job) == 3
    leases = []

    @contextlib.contextmanager
    def lease(label):
        leases.append(label)
        device.start_task(label, waits=False, depth=1)
        yield
        device.end_task()

    job.replay(lease)
    assert cuda.launched == [(part, "default") for part in ([0, 1], [2, 3], [4])]
    assert leases == ["piece 0", "piece 1", "piece 2"]
    with pytest.raises(SpecError, match="one time per segment"):
        GraphPieces(device, segments, [0.1], cuda=cuda)


def test_what_a_process_took_before_it_ran_another_program_is_withdrawn(
    queues, monkeypatch
):
    former = queues()
    assert former.start_task("a", waits=True, depth=3)
    assert not queues().start_task("a", waits=False, depth=1)
    monkeypatch.setattr(exclusive_module, "_opened", weakref.WeakSet())
    assert queues().start_task("a", waits=False, depth=1)
    former._tickets.clear()


def test_an_interrupt_while_a_task_waits_withdraws_its_launches(queues, monkeypatch):
    foreground, background = queues(), queues()
    assert foreground.take()

    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(exclusive_module.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        background.start_task("a", waits=True, depth=2)
    assert not background._tickets
    foreground.release()
    assert foreground.take(patience_s=0.0)


def test_a_task_that_must_not_wait_never_begins_with_a_launch_that_waits(queues):
    foreground, background = queues(), queues()
    assert background.start_task("a", waits=True, depth=2)
    assert not foreground.take(patience_s=0.0)
    background.end_task()
    assert background.start_task("a", waits=True, depth=2)  # one is behind foreground's
    background.end_task()
    assert foreground.take(patience_s=0.0)
    assert not background.start_task("a", waits=False, depth=1)
