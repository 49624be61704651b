"""Timelines out of CUDA events."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stretto.runtime import DistributedDataParallel, Recorder
from support.plans import plan_in_turn

DEVICE = torch.device("cuda", 0)


def rank_records(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(1)
    module = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).to(DEVICE)
    groups = [(f"{i}.bias", f"{i}.weight") for i in (3, 2, 1, 0)]
    plan = plan_in_turn(groups, ranks=size, lanes=2, slices=2)
    recorder = Recorder(device=DEVICE)
    model = DistributedDataParallel(module, device_ids=[0], plan=plan, record=recorder)
    x = torch.randn(256, 2048, device=DEVICE)
    for _ in range(5):
        model(x).square().mean().backward()
    timeline = recorder.timeline
    assert timeline is not None
    return {
        "spans": [(s.track, s.name, s.start_s, s.end_s, s.args) for s in timeline.spans]
    }


def test_slices_end_on_their_lanes_after_backward_has_begun(gpu_ranks: Any) -> None:
    for found in gpu_ranks(rank_records, 2):
        spans = found["spans"]
        by_name = {name: (start, end) for _, name, start, end, _ in spans}
        forward, backward = by_name["forward"], by_name["backward"]
        assert forward[0] <= forward[1] <= backward[0] + 1e-4 < backward[1]
        sends = [span for span in spans if span[4]["kind"] == "send"]
        assert len(sends) == 8  # four buckets of two slices
        assert {track for track, *_ in sends} == {"lane0", "lane1"}
        for _, _, start, end, _ in sends:
            assert backward[0] <= start <= end
        # What is sent takes time on the device: no event was recorded at its launch.
        assert sum(end - start for _, _, start, end, _ in sends) > 1e-4
