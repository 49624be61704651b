"""A background's tasks on a device."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

import stretto
from stretto.background.devices.cuda import CudaDevice, GraphPieces


@pytest.fixture(autouse=True)
def _boards(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path))


def test_tasks_are_timed_on_a_stream_of_low_priority() -> None:
    device = CudaDevice("cuda:0")
    assert device.stream.priority == 0
    assert device.foreground_stream().priority < 0
    x = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    device.start_task("product", waits=False, depth=1)
    y = x @ x
    device.end_task()
    device.close()
    (task,) = device.ended()
    assert task.label == "product"
    assert 0 < task.length_s < 1
    assert device.outstanding == 0
    assert torch.equal(y, x @ x)


def test_a_job_of_graphs_computes_what_it_computes_eagerly() -> None:
    device = CudaDevice("cuda:0")
    torch.manual_seed(0)
    weights = [torch.randn(512, 512, device="cuda") / 20 for _ in range(6)]
    x = torch.randn(512, 512, device="cuda")
    values = [torch.empty_like(x) for _ in weights]

    def segment(i: int) -> Any:
        def run() -> None:
            torch.mm(values[i - 1] if i else x, weights[i], out=values[i])

        return run

    segments = [segment(i) for i in range(6)]
    for run in segments:
        run()
    torch.cuda.synchronize()
    wanted = values[-1].clone()
    job = GraphPieces(device, segments, [0.2e-3] * 6)
    assert len(job) == 3
    for value in values:
        value.zero_()
    torch.cuda.synchronize()
    background = stretto.Background("cuda:0")
    for _ in range(3):
        job.replay(background.lease)
    torch.cuda.synchronize()
    assert torch.equal(values[-1], wanted)
    assert background.statistics.tasks == 9
    background.close()


def test_kernels_of_the_foreground_come_first() -> None:
    """What waits behind a background's queue on an equal stream, and on ours."""
    device = CudaDevice("cuda:0")
    torch.manual_seed(0)
    many = [torch.randn(4096, 4096, device="cuda") for _ in range(2)]
    small = torch.randn(1024, 1024, device="cuda")

    def behind(stream: Any) -> float:
        torch.cuda.synchronize()
        with torch.cuda.stream(device.stream):
            for _ in range(40):
                torch.mm(many[0], many[1])
        begin = time.perf_counter()
        with torch.cuda.stream(stream):
            for _ in range(10):
                torch.mm(small, small)
        stream.synchronize()
        took = time.perf_counter() - begin
        torch.cuda.synchronize()
        return took

    equal, first = torch.cuda.Stream(), device.foreground_stream()
    for stream in (equal, first):
        behind(stream)
    times = {
        name: statistics.median(behind(stream) for _ in range(7))
        for name, stream in (("equal", equal), ("first", first))
    }
    print(times)
    assert times["first"] < times["equal"]
