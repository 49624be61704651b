"""Ordinary programs under the default, against DDP."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import stretto
from stretto.schema import Bucket
from support.checks import Lines
from support.nets import mlp
from support.plans import plan_of_buckets

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = torch.device("cuda", 0)
TorchDDP = nn.parallel.DistributedDataParallel
STEPS = 16


def net() -> nn.Module:
    return mlp(32, 256, 256, 4, between=nn.Tanh, seed=3).to(DEVICE)


def data(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 32, generator=generator).to(DEVICE)


class Run:
    """A program with one of both classes."""

    def __init__(self, ddp: Callable[..., Any], rank: int) -> None:
        self.ddp, self.rank = ddp, rank

    def wrapped(self, module: nn.Module, **options: Any) -> Any:
        return self.ddp(module, device_ids=[0], **options)

    def train(
        self,
        model: Any,
        *,
        before: Callable[[Any], None] = lambda _: None,
        autocast: torch.dtype | None = None,
        accumulate: int = 1,
    ) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(accumulate):
                last = micro == accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    with torch.autocast(
                        "cuda", dtype=autocast, enabled=autocast is not None
                    ):
                        out = model(data(self.rank, step * accumulate + micro))
                    out.float().square().mean().backward()
            before(model)
            optimizer.step()
            found.append(next(model.parameters()).detach().clone())
        return found


def plain(run: Run) -> Any:
    return run.train(run.wrapped(net()))


def views(run: Run) -> Any:
    return run.train(run.wrapped(net(), gradient_as_bucket_view=True))


def static(run: Run) -> Any:
    return run.train(run.wrapped(net(), static_graph=True))


def unused(run: Run) -> Any:
    return run.train(run.wrapped(net(), find_unused_parameters=True))


def accumulation(run: Run) -> Any:
    return run.train(run.wrapped(net()), accumulate=3)


def clipping(run: Run) -> Any:
    return run.train(
        run.wrapped(net()),
        before=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01),
    )


def autocast(run: Run) -> Any:
    return run.train(run.wrapped(net()), autocast=torch.bfloat16)


def half(run: Run) -> Any:
    model = run.wrapped(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(data(run.rank, step)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append(next(model.parameters()).detach().clone())
    return found


def bfloat16(run: Run) -> Any:
    model = run.wrapped(net().to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(run.rank, step).to(torch.bfloat16)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def sync_batch_norm(run: Run) -> Any:
    module = nn.Sequential(net(), nn.BatchNorm1d(4))
    module = nn.SyncBatchNorm.convert_sync_batchnorm(module).to(DEVICE)
    return run.train(run.wrapped(module))


def hook_bf16(run: Run) -> Any:
    model = run.wrapped(net())
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return run.train(model)


def hook_power(run: Run) -> Any:
    model = run.wrapped(net())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=4
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return run.train(model)


def compiled(run: Run) -> Any:
    model = run.wrapped(net())
    return run.train(torch.compile(model, backend="aot_eager"))


def side_stream(run: Run) -> Any:
    """The whole training on a stream of its own."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = plain(run)
    stream.synchronize()
    return found


PROGRAMS = {
    function.__name__: function
    for function in (
        plain,
        views,
        static,
        unused,
        accumulation,
        clipping,
        autocast,
        half,
        bfloat16,
        sync_batch_norm,
        hook_bf16,
        hook_power,
        compiled,
        side_stream,
    )
}


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def rank_runs(rank: int, size: int) -> dict[str, Any]:
    lines = Lines()
    found: dict[str, Any] = {}
    for name, program in PROGRAMS.items():
        try:
            torch.manual_seed(7)
            theirs = program(Run(TorchDDP, rank))
            torch.manual_seed(7)
            ours = program(Run(stretto.DistributedDataParallel, rank))
            found[name] = same(ours, theirs)
        except Exception as error:  # noqa: BLE001 - the test shows it
            found[name] = f"{type(error).__name__}: {error}"
    found["lines"] = lines.lines
    return found


def test_programs_train_as_under_ddp_bit_for_bit(gpu_ranks: Any) -> None:
    found = gpu_ranks(rank_runs, 2, timeout_s=150)
    print(found)
    for one in found:
        del one["lines"]
        assert one == dict.fromkeys(one, True)


def planned(overlap: str = "backward") -> Any:
    names = [("4.bias", "4.weight"), ("2.bias", "2.weight"), ("0.bias", "0.weight")]
    buckets = [
        Bucket(tensors=n, lane=i % 2, slices=i + 1, resource=None, wire_dtype="float32")
        for i, n in enumerate(names)
    ]
    plan = plan_of_buckets(buckets, ranks=2, lanes=2, overlap=overlap)

    def ddp(module: nn.Module, **more: Any) -> Any:
        return stretto.DistributedDataParallel(
            module, plan=plan, overlap="auto" if overlap == "forward" else None, **more
        )

    return ddp


def rank_runs_planned(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("plain", "views", "accumulation", "clipping", "half", "side_stream"):
        program = PROGRAMS[name]
        theirs = program(Run(TorchDDP, rank))
        found[name] = same(program(Run(planned(), rank)), theirs)
        overlapped = program(Run(planned(overlap="forward"), rank))
        found[f"{name}, forward"] = same(overlapped, theirs)
    return found


@pytest.mark.parametrize("memory", ["", "expandable_segments:True"])
def test_planned_programs_train_as_under_ddp_bit_for_bit(
    gpu_ranks: Any, memory: str
) -> None:
    settings = {"PYTORCH_ALLOC_CONF": memory} if memory else {}
    for found in gpu_ranks(rank_runs_planned, 2, timeout_s=200, **settings):
        assert found == dict.fromkeys(found, True)


def rank_on_gloo(rank: int, size: int) -> dict[str, Any]:
    """DDP on Gloo with parameters on a device, as with one process per old GPU."""
    torch.cuda.set_device(0)
    lines = Lines()
    found = {}
    for name in ("plain", "accumulation", "half"):
        program = PROGRAMS[name]
        theirs = program(Run(TorchDDP, rank))
        found[name] = same(program(Run(stretto.DistributedDataParallel, rank)), theirs)
    return {"found": found, "lines": lines.lines}


@pytest.mark.parametrize("group", ["gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
def test_gloo_and_mixed_groups_train_as_under_ddp(gpu_ranks: Any, group: str) -> None:
    for one in gpu_ranks(rank_on_gloo, 2, group=group):
        print(one["lines"])
        assert one["found"] == dict.fromkeys(one["found"], True)
