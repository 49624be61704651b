"""Compare burst-parallel training with one process, every model on 1 to 4 ranks.

    .venv/bin/python benchmarks/burst_equality.py [--model M] [--ranks N] [--dtype T]

20 steps of random plans with even, uneven and one-sided shares of the samples: the
largest relative difference of loss, of gradients at every step, and of the state
afterward. Target for losses and gradients: 1e-5 in float32, 1e-10 in float64. *grad*
is relative to the largest value of the whole gradient. *tensor_grad*, a stricter
measure, is relative to the largest of the same tensor. It leaves out tensors whose
gradient is below 1000 roundings of the whole one's largest value: it may be zero within
rounding, like that of a key's bias.

The benchmark compares three figures. *own course*: both train on, so that each step's
rounding affects all later ones. *same state*: before each step the state is set to the
one process's, which leaves the executor's own error in a step. *one process* (from the
part with 1 rank): the same model in one process with its samples in another order,
which is the same sum in another order and shows the effect of rounding alone; and, in
float32, the difference between the one process and float64 in a step from the same
state.

Each choice of model, ranks, type, rate and batch is a separate part; the result holds
the parts that were run, each with its settings. Activations are smooth: with ReLU,
rounding switches units on and off. The models with batch norms amplify rounding step by
step, so they train with a small learning rate; ``--rate`` and ``--batch`` set others.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from _record import RESULTS, store

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from stretto.burst.executor import BurstParallel
from stretto.lab.ports import free_port
from support import burst_ranks

RATES = {
    "vgg11": 0.01,
    "vgg16": 0.01,
    "transformer": 0.01,
    "inception": 1e-4,
    "wide resnet": 1e-4,
}
SHARES = ("even", "uneven", "one")
DTYPES = {"float64": torch.float64, "float32": torch.float32}
REACH = {"float64": 1e-10, "float32": 1e-5}
BATCH = 9
ORDERS = 9
"""Number of sample orders in which the one process is compared with itself."""

KINDS = ("loss", "grad", "tensor_grad")
KINDS = (*KINDS, *(f"same_state_{kind}" for kind in KINDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=RATES, action="append")
    parser.add_argument("--ranks", type=int, action="append", choices=(1, 2, 3, 4))
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--plans", type=int, default=3, help="of each kind of shares")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, help="learning rate, kept beside")
    parser.add_argument("--batch", type=int, default=BATCH, help="kept beside too")
    parser.add_argument("--short", action="store_true", help="to see that it runs")
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.short:
        options.plans, options.steps = 1, 3
    if "RANK" in os.environ:
        run(options)
        return
    name = "burst_equality_short" if options.short else "burst_equality"
    path = RESULTS / f"{name}.json"
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    for size in options.ranks or (1, 2, 3, 4):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            launch(size, [*sys.argv[1:], "--out", str(out)])
            parts |= json.loads(out.read_text())
        parts = dict(sorted(parts.items()))
        store(
            name,
            {
                "what": "largest relative differences from one process",
                "reach": REACH,
                "worst": worst_of(parts),
                "parts": parts,
            },
        )


def worst_of(parts: dict) -> dict:
    """Group numbers of ranks by all other properties of the parts."""
    found: dict[str, dict] = {}
    for part in parts.values():
        settings = f"rate {part['rate']:g}, batch {part['batch']}"
        row = found.setdefault(f"{part['model']}, {part['dtype']}, {settings}", {})
        for kind in (*KINDS, "state"):
            row[kind] = max(row.get(kind, 0.0), part[kind])
        alone = part.get("one_process", {})
        row |= {f"one_process_{kind}": value for kind, value in alone.items()}
    return found


def launch(size: int, arguments: list[str]) -> None:
    port = free_port()
    environment = os.environ | {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments], env=environment | {"RANK": str(r)}
        )
        for r in range(size)
    ]
    try:
        failed = [p.wait(timeout=1800) for p in processes]
    finally:
        for process in processes:
            process.kill()
    if any(failed):
        raise SystemExit(f"ranks ended with {failed}")


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = {}
    for kind in options.model or RATES:
        rate = options.rate or RATES[kind]
        for dtype in options.dtype or DTYPES:
            torch.set_default_dtype(DTYPES[dtype])
            rows, state = [], 0.0
            # One rank has one plan, and one way to share.
            cases = options.plans * len(SHARES) if size > 1 else 1
            for seed in range(cases):
                shares = SHARES[seed % len(SHARES)]
                found, after = case(kind, rate, options, seed, shares)
                rows.append(found)
                state = max(state, after)
            part = {
                "model": kind,
                "dtype": dtype,
                "ranks": size,
                "rate": rate,
                "batch": options.batch,
                "steps": options.steps,
                "cases": cases,
                **summary(torch.stack(rows), REACH[dtype]),
                "state": state,
            }
            if size == 1:
                part["one_process"] = one_process(kind, rate, options)
            settings = f"rate {rate:g}, batch {options.batch}"
            parts[f"{kind}, {dtype}, {size} ranks, {settings}"] = part
            if rank == 0:
                print(json.dumps(part), file=sys.stderr, flush=True)
    if rank == 0:
        Path(options.out).write_text(json.dumps(parts))
    dist.barrier()
    dist.destroy_process_group()


def summary(rows: torch.Tensor, reach: float) -> dict:
    """Return the worst, and steps beyond the target, by case, step and kind."""
    worst = rows.amax(0)
    found: dict = dict(zip(KINDS, worst.amax(0).tolist(), strict=True))
    beyond = {
        name: [step for step, value in enumerate(column) if not value <= reach]
        for name, column in zip(KINDS, worst.T.tolist(), strict=True)
    }
    if any(beyond.values()):
        found["steps_beyond_reach"] = {k: v for k, v in beyond.items() if v}
    return found


def case(
    kind: str, rate: float, options: argparse.Namespace, seed: int, shares: str
) -> tuple[torch.Tensor, float]:
    """Return the worst differences by step and kind, and of the final state."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = burst_ranks.make_model(kind)
    model = copy.deepcopy(reference)
    example, _ = burst_ranks.make_data(kind, 2, 0)
    plan = burst_ranks.random_plan(model, example, size, seed)
    burst = BurstParallel(model, plan, example_inputs=(example,))
    counts = burst_ranks.shares_of(options.batch, size, shares)
    ours, theirs = sgd(burst, rate), sgd(reference, rate)

    def differences(x: torch.Tensor, y: torch.Tensor, truth: float) -> list[float]:
        burst.zero_grad()
        mine = burst_ranks.part(x, counts, rank), burst_ranks.part(y, counts, rank)
        loss = nn.functional.cross_entropy(burst(mine[0]), mine[1])
        loss.backward()
        found = burst_ranks.global_loss(loss, counts, rank)
        return [abs(found - truth) / truth, *worst_grads(burst.module, reference)]

    rows = []
    for step in range(options.steps):
        x, y = burst_ranks.make_data(kind, options.batch, step)
        before = state_of(reference)
        truth = backward(reference, x, y)
        row = differences(x, y, truth)
        own = state_of(burst.module)
        grads = [None if p.grad is None else p.grad.clone() for p in burst.parameters()]
        put(burst.module, before)
        rows.append([*row, *differences(x, y, truth)])
        put(burst.module, own)
        for parameter, grad in zip(burst.parameters(), grads, strict=True):
            parameter.grad = grad
        ours.step()
        theirs.step()
    found = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    state = burst.full_state_dict()
    after = max(
        burst_ranks.worst(state[name].double(), value.double())
        for name, value in reference.state_dict().items()
    )
    return found, after


def one_process(kind: str, rate: float, options: argparse.Namespace) -> dict:
    """Return differences of one process from itself in other sample orders."""
    found = []
    for order in range(ORDERS):
        reference = burst_ranks.make_model(kind)
        other, same = copy.deepcopy(reference), copy.deepcopy(reference)
        optimizers = [sgd(model, rate) for model in (reference, other)]
        draw = torch.Generator().manual_seed(100 + order)
        for step in range(options.steps):
            x, y = burst_ranks.make_data(kind, options.batch, step)
            put(same, state_of(reference))
            truth = backward(reference, x, y)
            row = []
            places = torch.randperm(options.batch, generator=draw)
            for model in (other, same):
                loss = backward(model, x[places], y[places])
                row += [abs(loss - truth) / truth, *worst_grads(model, reference)]
            found.append(row)
            for optimizer in optimizers:
                optimizer.step()
    worst = torch.tensor(found, dtype=torch.float64).amax(0).tolist()
    named = dict(zip(KINDS, worst, strict=True))
    if torch.get_default_dtype() == torch.float32:
        named |= from_float64(kind, rate, options)
    return named


def from_float64(kind: str, rate: float, options: argparse.Namespace) -> dict:
    """Return differences of one process in float32 from a float64 step, same state."""
    model = burst_ranks.make_model(kind)
    exact = copy.deepcopy(model).double()
    optimizer = sgd(model, rate)
    found = []
    for step in range(options.steps):
        x, y = burst_ranks.make_data(kind, options.batch, step)
        put(exact, state_of(model))
        loss = backward(model, x, y)
        truth = backward(exact, x if kind == "transformer" else x.double(), y)
        found.append([abs(loss - truth) / truth, *worst_grads(exact, model)])
        optimizer.step()
    worst = torch.tensor(found, dtype=torch.float64).amax(0).tolist()
    names = (f"{name}_from_float64" for name in KINDS)
    return dict(zip(names, worst, strict=False))


def worst_grads(model: nn.Module, reference: nn.Module) -> tuple[float, float]:
    """Return differences relative to the largest of all, and of each tensor."""
    pairs = [
        (p.grad, q.grad)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
        if q.grad is not None
    ]
    scales = [float(q.abs().max()) for _, q in pairs]
    floor = 1000 * torch.finfo(pairs[0][1].dtype).eps * max(scales)
    off = [
        (float((p - q).abs().max()), scale)
        for (p, q), scale in zip(pairs, scales, strict=True)
        if p is not None  # other ranks run its layer
    ]
    each = [difference / scale for difference, scale in off if scale > floor]
    return max((d for d, _ in off), default=0.0) / max(scales), max(each, default=0.0)


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return float(loss.detach())


def state_of(model: nn.Module) -> list[torch.Tensor]:
    everything = [*model.parameters(), *model.buffers()]
    return [tensor.detach().clone() for tensor in everything]


def put(model: nn.Module, state: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(
            [*model.parameters(), *model.buffers()], state, strict=True
        ):
            tensor.copy_(value)


if __name__ == "__main__":
    main()
