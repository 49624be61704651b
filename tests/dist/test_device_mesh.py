"""Data parallelism on a mesh, beside tensor and pipeline parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import stretto
from stretto import variable_names
from stretto.errors import SpecError
from support.checks import Lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.dist.conftest import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

WIDTH, STEPS = 8, 24


def _mesh(kind: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", kind))


def _samples(step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(2 * step + part)
    return torch.randn(8, WIDTH, generator=generator)


def _sharded(mesh: DeviceMesh) -> nn.Sequential:
    """Return a model of which some parameters are sharded and others are not."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)
    )
    return parallelize_module(
        net, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()}
    )


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    # After forward a sharded parameter is no longer among the module's own.
    return [p.detach().clone() for p in optimizer.param_groups[0]["params"]]


def _trained_in_tensors(model: nn.Module, mesh: DeviceMesh) -> list[Tensor]:
    optimizer = _optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(_samples(step, mesh["data"].get_local_rank()))
        output.square().mean().backward()
        optimizer.step()
    return _parameters_of(optimizer)


def _stage_net(place: int) -> nn.Sequential:
    torch.manual_seed(place)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 + place)
    ]
    return nn.Sequential(*layers)


def _trained_in_a_pipeline(
    wrap: Callable[[nn.Module], nn.Module], mesh: DeviceMesh, kind: Any
) -> list[Tensor]:
    place, part = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    model = wrap(_stage_net(place))
    stage = PipelineStage(
        model, place, 2, torch.device("cpu"), group=mesh["pipeline"].get_group()
    )
    pipeline = kind(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = _optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        if place == 0:
            pipeline.step(_samples(step, part))
        else:
            pipeline.step(target=torch.zeros(8, WIDTH), losses=[])
        optimizer.step()
    return _parameters_of(optimizer)


def _require_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def _beside_tensors(rank: int, size: int) -> None:
    mesh = _mesh("tensor")
    data = mesh["data"]
    wanted = _trained_in_tensors(TorchDDP(_sharded(mesh), device_mesh=data), mesh)
    tuned = stretto.DDP(_sharded(mesh), device_mesh=data)
    _require_equal(_trained_in_tensors(tuned, mesh), wanted)
    plan = tuned.plan
    assert plan is not None
    assert plan.planner == "forced"
    sizes = {row.name: row.bytes for row in tuned.tensor_table()}
    assert sizes["1.weight"] == 4 * WIDTH * 16 // 2
    planned = stretto.DDP(_sharded(mesh), device_mesh=data, plan=plan)
    _require_equal(_trained_in_tensors(planned, mesh), wanted)
    negotiated = stretto.DDP(_sharded(mesh), device_mesh=data, order="negotiated")
    _require_equal(_trained_in_tensors(negotiated, mesh), wanted)


def _beside_a_pipeline(rank: int, size: int) -> None:
    mesh = _mesh("pipeline")
    data = mesh["data"]

    def ours(net: nn.Module) -> stretto.DDP:
        return stretto.DDP(net, device_mesh=data)

    def theirs(net: nn.Module) -> TorchDDP:
        return TorchDDP(net, device_mesh=data)

    wanted = _trained_in_a_pipeline(theirs, mesh, Schedule1F1B)
    _require_equal(_trained_in_a_pipeline(ours, mesh, Schedule1F1B), wanted)
    # PyTorch's class fails here: its Reducer counts each parameter twice.
    _require_equal(_trained_in_a_pipeline(ours, mesh, ScheduleGPipe), wanted)


def _split(rank: int, size: int) -> None:
    """A schedule whose gradients of weights DDP does not see is refused."""
    mesh = _mesh("pipeline")
    place = mesh["pipeline"].get_local_rank()
    stages = []
    for number in (place, place + 2):
        torch.manual_seed(number)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        model = stretto.DDP(net, device_mesh=mesh["data"])
        stages.append(
            PipelineStage(
                model,
                number,
                4,
                torch.device("cpu"),
                group=mesh["pipeline"].get_group(),
            )
        )
    pipeline = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
    if place == 0:  # it waits for the other stage's gradients
        with pytest.raises(RuntimeError):
            pipeline.step(_samples(0, 0))
        return
    with pytest.raises(SpecError, match=r"apart from those of inputs .*Schedule1F1B"):
        pipeline.step(target=torch.zeros(8, WIDTH), losses=[])


def _refused(rank: int, size: int) -> None:
    mesh = _mesh("tensor")
    group = mesh["data"].get_group()
    with pytest.raises(SpecError, match=r"'1\.weight' is a DTensor .*device_mesh=mesh"):
        stretto.DDP(_sharded(mesh), process_group=group)


def _ignored(rank: int, size: int) -> None:
    mesh = _mesh("tensor")
    net = nn.Sequential(_sharded(mesh), nn.Linear(WIDTH, WIDTH))
    names = [f"0.{name}" for name, _ in net[0].named_parameters()]
    stretto.DDP._set_params_and_buffers_to_ignore_for_model(net, names)
    model = stretto.DDP(net, process_group=mesh["data"].get_group())
    model(_samples(0, rank)).sum().backward()
    assert [row.name for row in model.tensor_table()] == ["1.weight", "1.bias"]


def _same_dimension(rank: int, size: int) -> None:
    mesh = _mesh("tensor")
    log = Lines()
    stretto.DDP(_sharded(mesh), device_mesh=mesh["tensor"])
    first = mesh["tensor"].get_local_rank() == 0
    assert any("sharded over the same ranks" in line for line in log.lines) == first


@pytest.mark.parametrize("train", [_beside_tensors, _beside_a_pipeline])
def test_parameters_are_those_of_ddp(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, train: Callable[[int, int], None]
) -> None:
    monkeypatch.setenv(variable_names.TUNE_SCHEDULE, "forced")
    ranks(train, 4, timeout_s=120)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(_split, id="zero bubble schedules are refused"),
        pytest.param(_refused, id="DTensors without a mesh are refused"),
        pytest.param(_ignored, id="ignored DTensors are left alone"),
        pytest.param(_same_dimension, id="averaging over a sharded dimension is noted"),
    ],
)
def test_dtensors(ranks: Ranks, check: Callable[[int, int], None]) -> None:
    ranks(check, 4, timeout_s=60)
