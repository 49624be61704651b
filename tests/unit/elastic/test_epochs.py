"""Which epochs a rank that resumes or joins executes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from stretto.elastic.training import Elastic
from stretto.errors import SpecError
from stretto.resume.manifests import manifests_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)

DATA = [torch.full((3,), float(i)) for i in range(12)]


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(folder: Path, **options: Any) -> tuple[Elastic, Any, Any]:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    options = {"batch": "global:4", "scheduler": scheduler, **options}
    run = Elastic(net, optimizer, checkpoint=folder, **options)
    return run, optimizer, scheduler


def trained(folder: Path, epochs: int) -> tuple[list[int], int, list[float]]:
    """Return the epochs executed, the steps at the end and the learning rates."""
    run, optimizer, scheduler = made(folder)
    executed = []
    for epoch in run.epochs(epochs):
        for batch in run.batches(DATA):
            with run.step():
                run.model(batch).square().mean().backward()
                optimizer.step()
        scheduler.step()
        executed.append(epoch)
    run.save()
    return executed, run.steps, scheduler.get_last_lr()


def test_a_job_that_resumes_begins_with_the_first_epoch_not_trained(
    tmp_path: Path,
) -> None:
    assert trained(tmp_path, 2) == ([0, 1], 6, [0.025])
    assert trained(tmp_path, 5) == ([2, 3, 4], 15, [0.003125])
    assert trained(tmp_path, 5) == ([], 15, [0.003125])


def test_a_resumed_job_that_counts_epochs_itself_writes_newer_snapshots(
    tmp_path: Path,
) -> None:
    for run in (1, 2, 3):
        elastic, optimizer, scheduler = made(tmp_path)
        for _ in range(run):
            for batch in elastic.batches(DATA):
                with elastic.step():
                    elastic.model(batch).square().mean().backward()
                    optimizer.step()
            scheduler.step()
        elastic.save()
        newest = manifests_in(tmp_path)[0]
        assert (newest.run, newest.epoch) == (run, run)


def test_a_seed_is_a_whole_number(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"seed must be a whole number, got 0\.5"):
        made(tmp_path, seed=0.5)
