"""A job that was stopped continues from its snapshot as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.errors import SpecError
from stretto.resume.manifests import manifests_in

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

SAMPLES, EPOCHS = 37, 3

STOPPED_AT = (3, 8, 9)
"""Within an epoch, and at the ends of two."""

DRAINED_AT = 11
"""One rank is asked to leave before this step's batch; all leave two steps later."""


class Stopped(Exception):
    """A job is stopped here."""


def train(
    folder: str | None,
    *,
    stop: int | None = None,
    drain: int | None = None,
    seed: int = 0,
    name: str = "average",
) -> Any:
    """Train with a program that knows nothing of snapshots but their folder."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], 0.5)
    average = torch.optim.swa_utils.AveragedModel(net)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(6, generator=generator), i % 3) for i in range(SAMPLES)]
    run = stretto.Elastic(
        stretto.DistributedDataParallel(net, plan="ddp"),
        optimizer,
        batch="global:8",
        scheduler=scheduler,
        extra={name: average},
        seed=seed,
        checkpoint=folder,
        every="1000 steps",
    )
    first = run.steps
    for _ in range(EPOCHS):
        for inputs, targets in run.batches(data):
            if run.steps == stop:
                run.save()
                raise Stopped
            if run.steps == drain and run.rank == 1:
                run.drain()
            with run.step():
                loss = nn.functional.cross_entropy(run.model(inputs), targets)
                (loss * run.weight).backward()
                optimizer.step()
            average.update_parameters(net)
        scheduler.step()
    values = [net.state_dict(), average.state_dict(), optimizer.state_dict()]
    return str(values), scheduler.last_epoch, first, run.steps


def rank_stops_and_resumes(rank: int, size: int, folder: str) -> Any:
    torch.set_printoptions(precision=17)
    whole = train(None)
    firsts = []
    for stop in STOPPED_AT:
        with pytest.raises(Stopped):
            train(folder, stop=stop)
        torch.distributed.barrier()  # rank 0 has written the snapshot
        firsts.append(manifests_in(Path(folder))[0].step)
    with pytest.raises(SystemExit) as left:
        train(folder, drain=DRAINED_AT)
    assert left.value.code == 128 + 15
    torch.distributed.barrier()
    firsts.append(manifests_in(Path(folder))[0].step)
    resumed = train(folder)
    return whole[0] == resumed[0], whole[1:], resumed[1:], firsts


def test_a_job_stopped_four_times_ends_as_one_that_was_not(
    ranks: Any, tmp_path: Path
) -> None:
    for same, whole, resumed, firsts in ranks(
        rank_stops_and_resumes, 2, str(tmp_path / "snapshots"), timeout_s=110.0
    ):
        assert same
        assert whole == (EPOCHS, 0, 15)
        assert resumed == (EPOCHS, DRAINED_AT + 2, 15)
        assert firsts == [*STOPPED_AT, DRAINED_AT + 2]


def rank_changes_the_seed(rank: int, size: int, folder: str) -> str:
    with pytest.raises(Stopped):
        train(folder, stop=2)
    torch.distributed.barrier()
    with pytest.raises(SpecError) as caught:
        train(folder, seed=1)
    return str(caught.value)


def test_another_order_of_samples_is_refused(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "snapshots")
    for text in ranks(rank_changes_the_seed, 2, folder):
        assert "seed=0" in text


def rank_renames_what_it_keeps(rank: int, size: int, folder: str) -> str:
    with pytest.raises(Stopped):
        train(folder, stop=2)
    torch.distributed.barrier()
    with pytest.raises(SpecError) as caught:
        train(folder, name="mean")
    return str(caught.value)


def test_a_snapshot_of_another_program_ends_all_ranks(
    ranks: Any, tmp_path: Path
) -> None:
    folder = str(tmp_path / "snapshots")
    for text in ranks(rank_renames_what_it_keeps, 2, folder):
        assert "'mean' in extra= is passed" in text
