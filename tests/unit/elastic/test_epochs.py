"""Which epochs a rank that resumes or joins executes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from stretto.elastic.training import Elastic
from stretto.errors import SpecError
from stretto.resume.manifests import manifests_in
from stretto.resume.snapshots import read_newest

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


def counted(folder: Path, epochs: int) -> tuple[Elastic, Any, Any]:
    """Train with a loop that counts epochs itself."""
    run, optimizer, scheduler = made(folder)
    for _ in range(epochs):
        for batch in run.batches(DATA):
            with run.step():
                run.model(batch).square().mean().backward()
                optimizer.step()
        scheduler.step()
    return run, optimizer, scheduler


def saved_scheduler(folder: Path) -> int:
    """Return how often the newest snapshot's scheduler has stepped."""
    found = read_newest(folder)
    assert found is not None
    count: int = found[1]["kept"]["scheduler"]["last_epoch"]
    return count


def test_a_finished_job_that_starts_again_saves_no_work_of_skipped_epochs(
    tmp_path: Path,
) -> None:
    for run in (1, 2, 3):
        counted(tmp_path, 2)[0].save()
        assert (manifests_in(tmp_path)[0].run, saved_scheduler(tmp_path)) == (run, 2)


def test_a_finished_job_has_its_state_after_it_has_saved_it(tmp_path: Path) -> None:
    counted(tmp_path, 2)[0].save()
    run, _, scheduler = counted(tmp_path, 2)
    run.save()
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (2, [0.025])


def test_a_job_that_saves_before_the_end_of_skipped_epochs_undoes_the_rest(
    tmp_path: Path,
) -> None:
    counted(tmp_path, 2)[0].save()
    run, optimizer, scheduler = made(tmp_path)
    for _ in range(3):
        for batch in run.batches(DATA):
            with run.step():
                run.model(batch).square().mean().backward()
                optimizer.step()
        run.save()
        scheduler.step()
    assert scheduler.last_epoch == 3


def test_a_step_behind_skipped_epochs_undoes_their_work(tmp_path: Path) -> None:
    counted(tmp_path, 2)[0].save()
    run, optimizer, scheduler = counted(tmp_path, 2)
    with run.step():
        run.model(DATA[0]).square().mean().backward()
        optimizer.step()
    assert scheduler.last_epoch == 2


def test_a_snapshot_within_an_epoch_saves_no_work_of_skipped_ones(
    tmp_path: Path,
) -> None:
    counted(tmp_path, 2)[0].save()
    run, optimizer, _ = made(tmp_path, every="1 step")
    for _ in range(2):
        assert not list(run.batches(DATA))
        optimizer.param_groups[0]["lr"] = 7.0
    batches = run.batches(DATA)
    for _ in range(2):
        batch = next(batches)
        with run.step():
            run.model(batch).square().mean().backward()
            optimizer.step()
    run._snapshots._writer.wait()  # type: ignore[union-attr]
    found = read_newest(tmp_path)
    assert found is not None
    assert found[0].step == 7
    assert found[1]["kept"]["optimizer"]["param_groups"][0]["lr"] == 0.025


def test_a_job_that_may_have_finished_warns_of_work_of_skipped_epochs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counted(tmp_path, 2)[0].save()
    assert "trained before" not in caplog.text
    counted(tmp_path, 2)
    assert caplog.text.count("epochs 0 to 1 were trained before") == 1
    assert "run.epochs" in caplog.text


def test_a_rank_that_returns_to_a_later_epoch_leaves_its_own(tmp_path: Path) -> None:
    others = counted(tmp_path, 2)[0]._state()
    run, optimizer, scheduler = made(tmp_path)
    run._has_begun = False  # as that of a rank that was left out
    run._look = lambda: run._receive(others) if run.steps == 1 else None  # type: ignore[method-assign]
    trained_steps = []
    for _ in range(3):
        for batch in run.batches(DATA):
            with run.step():
                run.model(batch).square().mean().backward()
                optimizer.step()
            trained_steps.append(run.steps)
            run._has_begun = run.steps > 1
        scheduler.step()
    assert (trained_steps, scheduler.last_epoch) == ([1, 7, 8, 9], 3)


def test_a_seed_is_a_whole_number(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"seed must be a whole number, got 0\.5"):
        made(tmp_path, seed=0.5)
