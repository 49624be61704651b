"""One rank of the demo: ``python -m stretto.demo.worker SCRATCH`` inside the lab.

Measures the job and the network, plans every method on rank 0, and trains each of them
on its own replica. The methods take turns step by step, so that a noisy moment affects
all of them equally. The results are written into the scratch folder for the command.
"""

from __future__ import annotations

import logging
import math
import platform
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from stretto._api.measuring import probe
from stretto._api.planning import plan as make_plan
from stretto._api.planning import simulate
from stretto._version import __version__
from stretto.demo import tasks
from stretto.demo.driver import OUTCOME_FILE, SETTINGS_FILE, plan_file
from stretto.demo.settings import (
    BUCKET_SIZES_MIB,
    DemoOutcome,
    DemoSettings,
    MethodOutcome,
    size_label,
)
from stretto.planners.base import predicted_s
from stretto.runtime import DistributedDataParallel, Recorder
from stretto.schema import Plan, Timeline
from stretto.tune import DeferredProfile, deferred_plan
from stretto.units import format_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.schema import Cluster, Workload

_MIB = 2**20
SAME_START: dict[str, Any] = {"init_sync": False}
"""All ranks make their models from the same seed, so no model needs to be sent."""

_STARTED_S = perf_counter()

UNMEASURED_STEPS = 2
"""First steps of each method, whose times do not count: DDP rebuilds its buckets."""

RECORDED_STEPS = 3
"""Last steps of each method, of which a timeline is kept."""


def say(text: str) -> None:
    """Print a line of progress, from rank 0 to standard error."""
    if dist.get_rank() == 0:
        sys.stderr.write(f"demo: {perf_counter() - _STARTED_S:4.0f} s  {text}\n")
        sys.stderr.flush()


@dataclass(kw_only=True)
class Task:
    """The data, loss and model that all methods share."""

    settings: DemoSettings
    batches: tasks.Batches

    @classmethod
    def of(cls, settings: DemoSettings, *, ranks: int | None = None) -> Self:
        """Return the task that the settings describe, for this rank.

        ``ranks`` is how many of the first ranks share it; all of them if ``None``.
        """
        if settings.model == "convnet":
            inputs, targets = tasks.digits()
        else:
            inputs, targets = tasks.text(32)
        batches = tasks.Batches(
            inputs,
            targets,
            batch_per_rank=settings.batch_per_rank,
            rank=dist.get_rank(),
            ranks=ranks or dist.get_world_size(),
            seed=settings.seed,
        )
        return cls(settings=settings, batches=batches)

    def model(self) -> nn.Module:
        """Return a new model, the same for every method."""
        torch.manual_seed(self.settings.seed)
        make = (
            tasks.ConvNet if self.settings.model == "convnet" else tasks.DemoTransformer
        )
        return make() if self.settings.width is None else make(self.settings.width)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return a new optimizer."""
        return torch.optim.SGD(
            model.parameters(), lr=self.settings.learning_rate, momentum=0.9
        )


class Trainee:
    """A replica that one method trains."""

    def __init__(self, task: Task, model: TorchDDP) -> None:
        self.model = model
        self._task = task
        self._optimizer = task.optimizer(model)
        self._step = 0
        self.steps_s: list[float] = []
        self.losses: list[float] = []

    def step(self) -> float:
        """Return this rank's seconds of one whole step, begun by all ranks at once."""
        dist.barrier()
        begin = perf_counter()
        self.run()
        return perf_counter() - begin

    def run(self) -> None:
        """Run one whole step: input, forward, loss, backward, optimizer."""
        inputs, targets = self._task.batches(self._step)
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        loss.backward()
        self._optimizer.step()
        self._step += 1
        self.losses.append(float(loss.detach()))

    def measured_step(self) -> None:
        """Run one step and keep its time, the slowest rank's."""
        duration = torch.tensor([self.step()], dtype=torch.float64)
        dist.all_reduce(duration, op=dist.ReduceOp.MAX)
        self.steps_s.append(float(duration[0]))

    def gradients(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the reduced gradients of one backward; parameters stay unchanged."""
        self.model.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), targets).backward()
        return {
            name: parameter.grad.clone()
            for name, parameter in self.model.module.named_parameters()
            if parameter.grad is not None
        }


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train, and the plan that predicts it."""

    name: str
    description: str
    plan: Plan
    stock: bool = False
    """Whether PyTorch's own DDP trains; otherwise stretto's executes the plan."""
    cap_mib: float | None = None
    """Bucket size of PyTorch's own DDP; ``None``: its default."""

    def trainee(self, task: Task) -> Trainee:
        """Return a new replica trained by this method."""
        if self.stock:
            model = TorchDDP(task.model(), bucket_cap_mb=self.cap_mib, **SAME_START)
            return Trainee(task, model)
        return self.watched_trainee(task)

    def watched_trainee(self, task: Task) -> Trainee:
        """Return a new replica whose plan stretto's DDP executes."""
        model = DistributedDataParallel(task.model(), plan=self.plan, **SAME_START)
        return Trainee(task, model)


def measure_workload(task: Task) -> Workload:
    """Measure the workload in training steps that defer communication."""
    settings = task.settings
    model = DistributedDataParallel(task.model(), **SAME_START)
    trainee = Trainee(task, model)
    profile = DeferredProfile(model)
    model.apply_plan(deferred_plan(model))
    profile.start()
    warmup = 3
    for _ in range(warmup + settings.profile_steps):
        dist.barrier()
        profile.begin_step()
        trainee.run()
        profile.end_step()
    profile.stop()
    return profile.workload(
        name=settings.model, warmup=warmup, max_spread_ratio=math.inf
    )


def plan_methods(workload: Workload, cluster: Cluster) -> list[Method]:
    """Return every method with its plan, equal on all ranks, bucket sizes first."""
    methods = [
        Method(
            name=f"ddp {size_label(size)}",
            description=f"PyTorch DDP, {size_label(size)} buckets",
            plan=make_plan(
                workload,
                cluster,
                "ddp",
                cap_bytes=None if size is None else round(size * _MIB),
            ),
            stock=True,
            cap_mib=size,
        )
        for size in BUCKET_SIZES_MIB
    ]
    methods += [
        Method(
            name="single",
            description="one all-reduce after backward",
            plan=make_plan(workload, cluster, "single"),
        ),
        Method(
            name="mg-wfbp",
            description="MG-WFBP's greedy merging, one lane",
            plan=make_plan(workload, cluster, "mg-wfbp"),
        ),
        Method(
            name="stretto",
            description="fusion, lanes and slices together",
            plan=make_plan(workload, cluster, "joint"),
        ),
    ]
    return methods


def shared(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def screen(task: Task, methods: list[Method]) -> dict[str, float]:
    """Return DDP's median step time by bucket size, measured in turns."""
    trainees = {m.name: m.trainee(task) for m in methods}
    # DDP's first step has buckets that its second step rebuilds.
    for _ in range(task.settings.screening_warmup):
        for trainee in trainees.values():
            trainee.step()
    for _ in range(task.settings.screening_steps):
        for trainee in trainees.values():
            trainee.measured_step()
    return {n: statistics.median(t.steps_s) for n, t in trainees.items()}


def train(
    task: Task, methods: list[Method]
) -> tuple[dict[str, Trainee], dict[str, Timeline]]:
    """Train all methods, one step of each in turn, and record a timeline of each.

    Stock DDP cannot be observed from inside. For its timeline a replica executes the
    same buckets in the same order, on one lane of stretto's DDP, beside the last steps.
    """
    trainees = {m.name: m.trainee(task) for m in methods}
    total = task.settings.steps
    recorders: dict[str, Recorder] = {}
    watched: dict[str, Trainee] = {}
    for step in range(total):
        if step == total - RECORDED_STEPS:
            for method in methods:
                trainee = trainees[method.name]
                if method.stock:
                    trainee = watched[method.name] = method.watched_trainee(task)
                    trainee.step()
                recorders[method.name] = observe(trainee, method)
        names = list(trainees) if step % 2 else list(trainees)[::-1]
        for name in names:
            if step < UNMEASURED_STEPS:
                trainees[name].step()
            else:
                trainees[name].measured_step()
            if name in watched:
                watched[name].step()
        if step % max(1, total // 6) == 0 or step == total - 1:
            loss = trainees["stretto"].losses[-1]
            say(f"step {step + 1} of {total} by each method, loss {loss:.4f}")
    return trainees, {name: typical(r) for name, r in recorders.items()}


def observe(trainee: Trainee, method: Method) -> Recorder:
    """Return a recorder that observes a trainee from now on."""
    model = trainee.model
    assert isinstance(model, DistributedDataParallel)  # noqa: S101
    recorder = Recorder(keep=RECORDED_STEPS, name=f"{method.name}, measured")
    model.observe(recorder)
    return recorder


def typical(recorder: Recorder) -> Timeline:
    """Return the recorded step of median duration."""
    timelines = sorted(recorder.timelines, key=lambda t: t.end_s)
    return timelines[len(timelines) // 2]


def gradient_difference(task: Task, ours: Method, theirs: Method) -> float:
    """Return the largest difference of two methods' gradients on one model and batch.

    It is relative to the largest gradient of each tensor.
    """
    inputs, targets = task.batches(10**6)
    found = [m.trainee(task).gradients(inputs, targets) for m in (ours, theirs)]
    worst = 0.0
    for name, reference in found[1].items():
        scale = float(reference.abs().max()) or 1.0
        worst = max(worst, float((found[0][name] - reference).abs().max()) / scale)
    return worst


def main() -> None:
    """Run the rank."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    scratch = Path(sys.argv[1])
    settings = DemoSettings.load(scratch / SETTINGS_FILE)
    dist.init_process_group("gloo")
    task = Task.of(settings)
    workload, cluster, methods = measured(task, settings)
    by_name = {m.name: m for m in methods}
    chosen, sizes_s = with_best_size(task, by_name)
    say(f"training {settings.steps} steps by each of {len(chosen)} methods")
    trainees, timelines = train(task, chosen)
    ours = by_name["stretto"]
    difference = gradient_difference(task, ours, chosen[1])
    # Each rank's last loss is of its own part of the batch: the mean over all ranks
    # counts.
    finals = {name: _mean_over_ranks(t.losses) for name, t in trainees.items()}
    if dist.get_rank() == 0:
        out = Path(settings.out)
        workload.save(out / "workload.json")
        cluster.save(out / "cluster.json")
        for method in chosen:
            method.plan.save(plan_file(out, method.name))
            timelines[method.name].save(scratch / f"measured-{method.name}.json")
            predicted = simulate(workload, cluster, method.plan).timeline
            predicted.save(scratch / f"predicted-{method.name}.json")
        # The widest family of the methods: `stretto compare` prints the same bound.
        bound = ours.plan.predicted
        if bound is None:
            raise AssertionError("a planner's plan has no prediction")
        DemoOutcome(
            methods=[
                MethodOutcome(
                    name=m.name,
                    description=m.description,
                    steps_s=trainees[m.name].steps_s,
                    losses=finals[m.name],
                    predicted_step_s=predicted_s(m.plan),
                )
                for m in chosen
            ],
            bucket_sizes_s=sizes_s,
            gradient_difference=difference,
            bound_s=bound.lower_bound_s,
            bound_scope=bound.bound_scope,
            parameters=sum(p.numel() for p in task.model().parameters()),
            ranks=dist.get_world_size(),
            environment=_environment(),
        ).save(scratch / OUTCOME_FILE)
    dist.barrier()
    dist.destroy_process_group()


def measured(
    task: Task, settings: DemoSettings
) -> tuple[Workload, Cluster, list[Method]]:
    """Measure the task and the network; return them, and rank 0's methods."""
    say(f"measuring {settings.model}: backward without communication")
    workload = measure_workload(task)
    say(
        f"backward {format_s(workload.backward_s)}, the rest of a step "
        f"{format_s(workload.forward_s)}; measuring the network"
    )
    cluster = probe(name="lab", budget_s=settings.probe_budget_s)
    methods = plan_methods(workload, cluster) if dist.get_rank() == 0 else None
    found: tuple[Workload, Cluster, list[Method]] = shared((workload, cluster, methods))
    return found


def with_best_size(
    task: Task, by_name: Mapping[str, Method]
) -> tuple[list[Method], dict[str, float]]:
    """Try DDP's bucket sizes; return the methods to train, and each size's time."""
    sized = [m for m in by_name.values() if m.stock]
    say(f"trying DDP's bucket sizes: {', '.join(size_label(m.cap_mib) for m in sized)}")
    sizes_s = shared(screen(task, sized))
    best = by_name[min(sizes_s, key=sizes_s.__getitem__)]
    chosen = [
        by_name["single"],
        replace(sized[0], name="ddp", description="PyTorch DDP with default options"),
        replace(
            best,
            name="ddp-best",
            description=f"{best.description}, the best of {len(sized)} sizes",
        ),
        by_name["mg-wfbp"],
        by_name["stretto"],
    ]
    return chosen, {size_label(m.cap_mib): sizes_s[m.name] for m in sized}


def _environment() -> dict[str, str]:
    return {
        "stretto": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread per rank",
    }


def _mean_over_ranks(losses: list[float]) -> list[float]:
    table = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(table)
    mean: list[float] = (table / dist.get_world_size()).tolist()
    return mean


if __name__ == "__main__":
    main()
