"""A snapshot that another version of the program has written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from stretto.elastic.training import Elastic
from stretto.errors import RankDisagreement, SpecError
from stretto.resume import fitting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def job(
    folder: Path,
    *,
    width: int = 1,
    optimizer_of: Any = torch.optim.Adam,
    scheduler_of: Any = None,
    names: tuple[str, ...] = (),
    resume: bool | None = None,
) -> Elastic:
    net = torch.nn.Linear(3, width)
    optimizer = optimizer_of(net.parameters())
    scheduler = scheduler_of(optimizer) if scheduler_of else None
    extra = {name: torch.nn.Linear(1, 1) for name in names}
    run = Elastic(
        net,
        optimizer,
        batch="global:4",
        scheduler=scheduler,
        extra=extra,
        checkpoint=folder,
        resume=resume,
    )
    with run.step():
        run.model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    run.save()
    return run


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)


CHANGES: list[Any] = [
    ({}, {"names": ("ema",)}, "'ema' in extra= is passed, and the snapshot has no"),
    ({"names": ("ema",)}, {}, "has a state of 'ema' in extra=, which is not passed"),
    ({}, {"scheduler_of": step_lr}, "scheduler= is passed, and the snapshot has no"),
    ({"scheduler_of": step_lr}, {}, "has a state of scheduler=, which is not passed"),
    (
        {"scheduler_of": step_lr},
        {"scheduler_of": cosine},
        "scheduler= is of CosineAnnealingLR, in the snapshot of StepLR",
    ),
    ({}, {"optimizer_of": sgd}, "the optimizer is of SGD, in the snapshot of Adam"),
    (
        {},
        {"optimizer_of": torch.optim.AdamW},
        "the optimizer is of AdamW, in the snapshot of Adam",
    ),
    (
        {},
        {"width": 2},
        r"weight has the shape \(2, 3\) in the model and \(1, 3\) in the snapshot",
    ),
    (
        {},
        {
            "optimizer_of": lambda them: torch.optim.Adam(
                [{"params": [p]} for p in them]
            )
        },
        "its state can't be loaded .*different number of parameter groups",
    ),
]


@pytest.mark.parametrize(("before", "after", "text"), CHANGES)
def test_a_snapshot_of_another_program_is_refused(
    tmp_path: Path, before: Any, after: Any, text: str
) -> None:
    job(tmp_path, **before)
    with pytest.raises(SpecError, match=text):
        job(tmp_path, **after)


def test_the_error_names_the_snapshot(tmp_path: Path) -> None:
    job(tmp_path)
    with pytest.raises(SpecError, match=r"run1-membership0-step1\.pt does not fit"):
        job(tmp_path, width=2)


def test_the_error_names_what_to_do(tmp_path: Path) -> None:
    job(tmp_path)
    with pytest.raises(SpecError, match="begin again with resume=False, `stretto run"):
        job(tmp_path, width=2)


def test_the_way_out_begins_again(tmp_path: Path) -> None:
    job(tmp_path)
    assert job(tmp_path, width=2, resume=False).steps == 1


def test_a_snapshot_without_classes_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.elastic.training.classes_of", lambda _: {})
    job(tmp_path)
    assert job(tmp_path).steps == 2


def test_other_options_are_another_optimizer_where_no_classes_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.elastic.training.classes_of", lambda _: {})
    job(tmp_path)
    with pytest.raises(SpecError, match="of SGD, in the snapshot of another class"):
        job(tmp_path, optimizer_of=sgd)


def test_some_of_many_different_tensors_are_named() -> None:
    now = {str(i): torch.zeros(1) for i in range(9)}
    found = fitting.model_differences(now, {})
    assert len(found) == 5
    assert found[-1] == "5 other tensors differ, too"


def test_a_rank_that_joins_with_other_objects_ends(tmp_path: Path) -> None:
    run = job(tmp_path)
    run._client, run._is_fresh = object(), True  # type: ignore[assignment]
    mine = run._note()
    run._is_fresh = False
    run._kept["ema"] = torch.nn.Linear(1, 1)
    others = run._note()
    with pytest.raises(RankDisagreement, match="ema='Linear' to Elastic"):
        run._require_same([mine, others])
