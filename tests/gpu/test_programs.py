"""Ordinary programs under the default, against DDP."""

from __future__ import annotations

import contextlib
from dataclasses import replace
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


def adamw(run: Run, **kind: bool) -> Any:
    """Parameters and states, with a rate that a scheduler changes after each step."""
    model = run.wrapped(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(run.rank, step)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    states = [
        value.detach().clone()
        for state in optimizer.state.values()
        for value in state.values()
    ]
    return [*(p.detach().clone() for p in model.parameters()), *states]


def foreach(run: Run) -> Any:
    return adamw(run, foreach=True)


def fused(run: Run) -> Any:
    return adamw(run, fused=True)


def early_reads(run: Run) -> Any:
    """What a program reads on another stream as soon as backward has returned."""
    model = run.wrapped(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    aside = torch.cuda.Stream()
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(run.rank, step)).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            found += [p.detach().clone() for p in model.parameters()]
        torch.cuda.current_stream().wait_stream(aside)
        found.append(model(data(run.rank, step)).detach().clone())
    return found


def reused_memory(run: Run) -> Any:
    """Gradients that are freed and whose memory is filled at once, with large ones."""
    model = run.wrapped(mlp(32, 2048, 2048, 4, between=nn.Tanh, seed=3).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(STEPS):
        model(data(run.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        filled = [torch.full((2048, 2048), 3e9, device=DEVICE) for _ in range(4)]
        found.append(filled[0][0, :4] + next(model.parameters()).detach()[0, :4])
    return [*found, *(p.detach().clone() for p in model.parameters())]


class Pixels(nn.Module):
    """Convolutions and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        layers: list[nn.Module] = []
        for inputs, outputs in ((2, 32), (32, 64), (64, 4)):
            layers += [nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs)]
        self.layers = nn.Sequential(*layers)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        images = rows.view(4, 2, 8, 8)
        if self.layers[0].weight.is_contiguous(memory_format=torch.channels_last):
            images = images.to(memory_format=torch.channels_last)
        found: torch.Tensor = self.layers(images).flatten(1)
        return found


def channels_last(run: Run) -> Any:
    torch.backends.cudnn.deterministic = True
    module = Pixels().to(DEVICE, memory_format=torch.channels_last)
    return run.train(run.wrapped(module))


def float16(run: Run) -> Any:
    model = run.wrapped(net().half())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(run.rank, step).half()).float().square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def inductor(run: Run) -> Any:
    return run.train(run.wrapped(torch.compile(net())))


def captured(run: Run) -> Any:
    """Forward and backward as a CUDA graph, as PyTorch's notes on CUDA show it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = run.wrapped(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        given = data(run.rank, 0)
        for step in range(14):
            given.copy_(data(run.rank, step))
            optimizer.zero_grad()
            model(given).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        model(given).square().mean().backward()
    found = []
    for step in range(14, 14 + STEPS):
        given.copy_(data(run.rank, step))
        graph.replay()
        optimizer.step()
        found.append(next(model.parameters()).detach().clone())
    torch.cuda.synchronize()
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
        foreach,
        fused,
        early_reads,
        reused_memory,
        channels_last,
        float16,
        inductor,
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


def rank_captures(rank: int, size: int) -> Any:
    found = captured(Run(TorchDDP, rank))
    lines = Lines()
    ours = captured(Run(stretto.DistributedDataParallel, rank))
    return {"equal": same(ours, found), "lines": lines.lines}


def test_a_captured_step_is_replayed_as_under_ddp(gpu_ranks: Any) -> None:
    settings = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    for found in gpu_ranks(rank_captures, 2, timeout_s=60, **settings):
        print(found["lines"])
        assert found["equal"]


def planned(overlap: str = "backward", asked: str | None = None) -> Any:
    names = [("4.bias", "4.weight"), ("2.bias", "2.weight"), ("0.bias", "0.weight")]
    buckets = [
        Bucket(tensors=n, lane=i % 2, slices=i + 1, resource=None, wire_dtype="float32")
        for i, n in enumerate(names)
    ]
    plan = plan_of_buckets(buckets, ranks=2, lanes=2, overlap=overlap)
    if overlap == "forward":
        plan = replace(plan, launch=(2, 0, 1))

    def ddp(module: nn.Module, **more: Any) -> Any:
        return stretto.DistributedDataParallel(module, plan=plan, overlap=asked, **more)

    return ddp


ON_PLANS = (
    "plain",
    "views",
    "accumulation",
    "clipping",
    "half",
    "side_stream",
    "foreach",
    "fused",
    "early_reads",
    "reused_memory",
)


def rank_runs_planned(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    lines = Lines()
    for name in ON_PLANS:
        program = PROGRAMS[name]
        theirs = program(Run(TorchDDP, rank))
        for overlap, asked in (
            ("backward", None),
            ("forward", "auto"),
            ("forward", "forward"),
            ("forward", "backward"),
        ):
            if name == "reused_memory" and overlap == "forward" and asked != "auto":
                continue
            ours = program(Run(planned(overlap, asked), rank))
            found[f"{name}, {overlap}, {asked}"] = same(ours, theirs)
    found["lines"] = [line for line in lines.lines if "no overlap with" in line]
    return found


@pytest.mark.parametrize("memory", ["", "expandable_segments:True"])
def test_planned_programs_train_as_under_ddp_bit_for_bit(
    gpu_ranks: Any, memory: str
) -> None:
    settings = {"PYTORCH_ALLOC_CONF": memory} if memory else {}
    for found in gpu_ranks(rank_runs_planned, 2, timeout_s=200, **settings):
        lines = found.pop("lines")
        assert found == dict.fromkeys(found, True)
        assert all("is on cuda, not on the CPU" in line for line in lines), lines


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
