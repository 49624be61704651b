"""Overlap with the next forward, against the same buckets without it.

Ranks poison what is pending (``STRETTO_POISON``): buckets count as unfinished until
something reads, and a read that finishes nothing finds NaN.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import stretto
from stretto import step_counts, variable_names
from stretto.background import step_reports
from stretto.burst import torch_calls
from stretto.errors import StrettoError
from stretto.lab.ports import free_port
from stretto.runtime import DistributedDataParallel
from stretto.runtime.recording.step import AbstractStepObserver
from stretto.tune.forced import FORCED_FORWARD
from support.forward_models import MODELS, OPTIMIZERS, SHAPE
from support.plans import plan_in_turn, reversed_names
from support.ranks import rank_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stretto.schema import Plan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

STEPS = 6
READ = 3
"""In this step parameters and states are read right after the optimizer's step."""


def plans(net: nn.Module, ranks: int, share: int = 2) -> tuple[Plan, Plan]:
    """The same buckets with backward alone, and launched in another order."""
    names = reversed_names(net)
    groups = [names[i : i + share] for i in range(0, len(names), share)]
    backward = plan_in_turn(groups, ranks=ranks, lanes=2, slices=2)
    turned = (0, *range(len(groups) - 1, 0, -1))
    return backward, replace(backward, overlap="forward", launch=turned)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(SHAPE, generator=generator)


def state_of(optimizers: list[Any]) -> list[Any]:
    found: list[Any] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                found += [
                    value.clone() if isinstance(value, torch.Tensor) else value
                    for value in optimizer.state[p].values()
                ]
    return found


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def train(
    make: Callable[[], nn.Module],
    optimizers_of: Any,
    plan: Plan,
    rank: int,
    *,
    none: bool = True,
    **settings: Any,
) -> list[Any]:
    """Losses of all steps; parameters and states of some."""
    torch.manual_seed(3)
    net = make()
    model = DistributedDataParallel(net, plan=plan, **settings)
    optimizers = optimizers_of(net)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers]
    found: list[Any] = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=none)
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        found.append(loss.item())
        if step in (READ, STEPS - 1):
            found.append(state_of(optimizers))
            found.append([p.detach().clone() for p in net.parameters()])
    return found


def rank_compares(rank: int, size: int) -> dict[str, bool]:
    os.environ[variable_names.POISON] = "1"
    cases: list[tuple[str, str, bool, bool]] = []
    for number, name in enumerate(OPTIMIZERS):
        views = bool(number % 2)
        kinds = ("Convolutions", "Tied") if name != "Muon" else ("Tied", "Inner")
        cases += [(kind, name, views, True) for kind in kinds[: 3 - size // 2]]
    for kind in MODELS:
        cases += [(kind, "Adam", views, True) for views in (False, True)]
        cases.append((kind, "SGD momentum", False, False))
    found = {}
    for kind, name, views, none in cases:
        make, optimizers = MODELS[kind], OPTIMIZERS[name]
        both = [
            train(
                make,
                optimizers,
                plan,
                rank,
                none=none,
                gradient_as_bucket_view=views,
            )
            for plan in plans(make(), size)
        ]
        found[f"{kind} {name} {views=} {none=}"] = same(*both)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_parameters_states_and_losses_are_those_of_backward_alone(
    ranks: Any, size: int
) -> None:
    for found in ranks(rank_compares, size, timeout_s=100):
        assert [name for name, equal in found.items() if not equal] == []
        assert len(found) > 35


# What a step leaves pending, with works that never seem to end.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Case:
    """A model that has made two steps, and whose third is pending."""

    def __init__(self, size: int, steps: int = 3) -> None:
        os.environ[variable_names.POISON] = "1"
        torch.manual_seed(1)
        self.net = Net()
        self.model = DistributedDataParallel(self.net, plan=plans(self.net, size)[1])
        self.optimizer: Any = torch.optim.Adam(self.net.parameters(), lr=0.01)
        for _ in range(steps):
            self.step()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8) * (1 + dist.get_rank())).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def pending(self) -> list[str]:
        return [
            n for n, p in self.net.named_parameters() if type(p) is not nn.Parameter
        ]


def rank_leaves_pending(rank: int, size: int) -> list[Any]:
    case = Case(size)
    found: list[Any] = [case.pending()]
    order: list[Any] = []
    for name in ("first", "second", "last"):
        module = getattr(case.net, name)
        module.register_forward_hook(lambda *_: order.append(case.pending()))
    case.model(torch.ones(2, 8))
    return [*found, *order]


def test_each_module_finishes_its_own_bucket(ranks: Any) -> None:
    everything = [
        f"{module}.{name}"
        for module in ("first", "second", "last")
        for name in ("weight", "bias")
    ]
    for found in ranks(rank_leaves_pending, 2):
        assert found == [everything, everything[2:], everything[4:], []]


READS: dict[str, Callable[[Case], Any]] = {
    "norm": lambda c: float(c.net.first.weight.norm()),
    "data": lambda c: c.net.first.weight.data.clone(),
    "numpy": lambda c: torch.from_numpy(c.net.last.bias.detach().numpy().copy()),
    "state_dict": lambda c: list(c.model.state_dict().values()),
    "deepcopy": lambda c: list(copy.deepcopy(c.net).state_dict().values()),
    "pickle": lambda c: list(
        torch.load(_saved(c.net), weights_only=False).state_dict().values()
    ),
    "vector": lambda c: nn.utils.parameters_to_vector(c.net.parameters()),
    "optimizer state": lambda c: state_of([c.optimizer]),
    "optimizer state_dict": lambda c: [
        list(s.values()) for s in c.optimizer.state_dict()["state"].values()
    ],
    "gradient": lambda c: [p.grad.clone() for p in c.net.parameters()],
    "gradient numpy": lambda c: [
        p.grad.numpy().copy().tolist() for p in c.net.parameters()
    ],
    "gradient norm": lambda c: nn.utils.clip_grad_norm_(c.net.parameters(), 0.1),
    "write": lambda c: _written(c),
    "load": lambda c: _loaded(c),
    "evaluation": lambda c: _evaluated(c.model),
    "evaluation of the module": lambda c: _evaluated(c.net),
    "evaluation of a part": lambda c: _evaluated(c.net.first),
    "average": lambda c: _averaged(c),
    "functional": lambda c: torch.func.functional_call(
        c.net, dict(c.net.named_parameters()), (torch.ones(1, 8),)
    ),
    "vmap": lambda c: torch.func.vmap(lambda x: c.net.first.weight @ x)(
        torch.ones(2, 8)
    ),
    "inference": lambda c: _inferred(c),
    "broadcast": lambda c: _broadcast(c),
    "second step": lambda c: _stepped_again(c),
    "rate": lambda c: _changed_rate(c),
    "new group": lambda c: _new_group(c),
    "no optimizer": lambda c: _own_update(c),
    "half": lambda c: list(c.net.half().state_dict().values()),
    "text": lambda c: str(c.net.first.bias),
}
"""What programs do between a step and the next forward."""


def _saved(net: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return file


def _written(case: Case) -> Any:
    with torch.no_grad():
        case.net.first.weight.mul_(0.5)
        case.net.last.bias += 1.0
    return None


def _loaded(case: Case) -> Any:
    case.net.load_state_dict(
        {name: value * 0.5 for name, value in case.net.state_dict().items()}
    )
    return None


def _evaluated(net: nn.Module) -> Any:
    net.eval()
    with torch.no_grad():
        found = net(torch.ones(1, 8))
    net.train()
    return found


def _averaged(case: Case) -> Any:
    average = torch.optim.swa_utils.AveragedModel(case.net)
    average.update_parameters(case.net)
    return list(average.state_dict().values())


def _inferred(case: Case) -> Any:
    with torch.inference_mode():
        return case.net.first.weight.sum().clone()


def _broadcast(case: Case) -> Any:
    dist.broadcast(case.net.first.weight, src=0)
    return None


def _stepped_again(case: Case) -> Any:
    case.optimizer.step()
    return None


def _changed_rate(case: Case) -> Any:
    case.optimizer.param_groups[0]["lr"] = 0.5
    return None


def _new_group(case: Case) -> Any:
    case.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    return None


def _own_update(case: Case) -> Any:
    with torch.no_grad():
        for p in case.net.parameters():
            p.sub_(p.grad, alpha=0.1)
    return None


def rank_reads(rank: int, size: int) -> dict[str, Any]:
    found = {}
    for name, read in READS.items():
        outcomes = []
        for forward in (False, True):
            os.environ[variable_names.POISON] = "1"
            torch.manual_seed(1)
            case = Case.__new__(Case)
            case.net = Net()
            case.model = DistributedDataParallel(
                case.net, plan=plans(case.net, size)[forward]
            )
            case.optimizer = torch.optim.Adam(case.net.parameters(), lr=0.01)
            for _ in range(3):
                case.step()
            if forward and not case.pending():
                outcomes.append("nothing is pending")
            value = read(case)
            if name != "half":
                case.optimizer.zero_grad()
                case.step()
            outcomes.append(
                [value, [p.detach().clone() for p in case.net.parameters()]]
            )
        found[name] = len(outcomes) == 2 and same(*outcomes)
    return found


def test_whatever_reads_earlier_is_exact(ranks: Any) -> None:
    for found in ranks(rank_reads, 2, timeout_s=100):
        assert [name for name, equal in found.items() if not equal] == []


def rank_reads_gradients(rank: int, size: int) -> list[Any]:
    """Between backward and step: what programs do with gradients."""
    found = []
    for forward in (False, True):
        torch.manual_seed(1)
        os.environ[variable_names.POISON] = "1"
        net = Net()
        model = DistributedDataParallel(net, plan=plans(net, size)[forward])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        rows: list[Any] = []
        kept: list[Any] = []
        for step in range(12):
            optimizer.zero_grad()
            model(torch.ones(2, 8) * (1 + rank + step)).square().mean().backward()
            if step == 3:
                rows.append(nn.utils.clip_grad_norm_(net.parameters(), 0.01))
            if step == 4:
                kept = [p.grad for p in net.parameters()]
            if step == 5:
                rows.append([g.clone() for g in kept])
            if step == 6:
                net.first.weight.grad = net.last.weight.new_ones(16, 8)
            if step == 7:
                net.first.bias.grad, net.second.bias.grad = (
                    net.second.bias.grad,
                    net.first.bias.grad,
                )
            if step == 8:
                net.second.weight.grad = None
            if step == 9:
                with model.no_sync():
                    model(torch.ones(1, 8)).mean().backward()
                model(torch.ones(1, 8) * rank).mean().backward()
            if step == 10:
                for p in net.parameters():
                    p.grad.mul_(0.5)
            optimizer.step()
        rows.append([p.detach().clone() for p in net.parameters()])
        found.append(rows)
    return [same(*found), len(found[0])]


def test_gradients_that_a_program_uses_are_complete(ranks: Any) -> None:
    assert ranks(rank_reads_gradients, 2) == [[True, 3]] * 2


# What falls back, with a word.


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("stretto").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class OwnOptimizer(torch.optim.SGD):
    """A subclass, which may do anything."""


class Kept(nn.Linear):
    """Keeps another tensor of its weight's memory."""

    def keep(self) -> None:
        self.alias = self.weight.detach()


def rank_falls_back(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def run(
        name: str,
        net: nn.Module,
        optimizer_of: Any = torch.optim.SGD,
        prepare: Any = None,
        **settings: Any,
    ) -> None:
        lines = Lines()
        model = DistributedDataParallel(net, plan=plans(net, size)[1], **settings)
        optimizer = optimizer_of(net.parameters(), lr=0.1)
        if prepare is not None:
            prepare(model, optimizer)
        pending = False
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            pending = pending or any(
                type(p) is not nn.Parameter for p in net.parameters()
            )
        logging.getLogger("stretto").removeHandler(lines)
        found[name] = (pending, lines.lines)

    os.environ[variable_names.POISON] = "1"
    run("usual", Net())
    run("unused", Net(), find_unused_parameters=True)
    run("static", Net(), static_graph=True)
    run("nan", Net(), nan="warn")
    run("script", nn.Sequential(torch.jit.script(nn.Linear(8, 4)), nn.Linear(4, 4)))
    run("subclass", Net(), OwnOptimizer)
    run(
        "declared",
        Net(),
        lambda *a, **k: stretto.separable(OwnOptimizer(*a, **k)),
    )
    run(
        "post-hook",
        Net(),
        prepare=lambda _, o: o.register_step_post_hook(lambda *_: None),
    )
    kept = Kept(8, 4)
    run("alias", nn.Sequential(kept, nn.Linear(4, 4)), prepare=lambda *_: kept.keep())
    run(
        "hook",
        Net(),
        prepare=lambda m, _: m.register_comm_hook(
            None,
            default_hooks.allreduce_hook,
        ),
    )
    # Hooks of stretto for all optimizers, which read nothing of these.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps"
        step_counts.create(path, size)
        os.environ[variable_names.STEP_COUNTS] = str(path)
        step_reports.report_steps()
    torch_calls._install()
    run("other jobs", Net())
    return found


@pytest.mark.filterwarnings("ignore")
def test_what_prevents_overlap_is_named_once(ranks: Any) -> None:
    words = {
        "unused": "find_unused_parameters",
        "static": "static_graph",
        "nan": "nan=",
        "script": "ScriptModule",
        "subclass": "OwnOptimizer",
        "post-hook": "step hooks",
        "alias": "'0.weight'",
        "hook": "communication hook",
    }
    first, second = ranks(rank_falls_back, 2)
    assert first["usual"] == (True, [])
    assert first["declared"] == (True, [])
    assert first["other jobs"] == (True, [])
    for name, word in words.items():
        pending, lines = first[name]
        assert not pending, name
        assert sum("no overlap with forward" in line for line in lines) == 1, (
            name,
            lines,
        )
        assert word in " ".join(lines), (name, lines)
    assert all(lines == [] for _, lines in second.values())


# Ends and failures.


def rank_is_killed(rank: int, size: int) -> list[Any]:
    case = Case(size, steps=2)
    os.environ.pop(variable_names.POISON)
    dist.barrier()
    case = Case(size, steps=2)
    before = [p.detach().clone() for p in case.net.parameters()]
    states = state_of([case.optimizer])
    if rank == 1:
        # The other rank's buckets wait for this one's, which never come.
        os._exit(7)
    try:
        case.step()
        case.backward()
    except StrettoError as error:
        after = [p.detach().clone() for p in case.net.parameters()]
        return [
            type(error).__name__,
            "rank 1" in str(error),
            same(before, after),
            same(states, state_of([case.optimizer])),
        ]
    return ["no error"]


def test_a_lost_rank_is_named_and_nothing_is_updated(ranks: Any) -> None:
    first, second = ranks(rank_is_killed, 2, errors=True)
    assert first == ["CommTimeout", True, True, True]
    assert second is None


class Entered(nn.Module):
    """Report to the other rank through the store that forward has come this far."""

    def __init__(self) -> None:
        super().__init__()
        self.store: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.store is not None:
            self.store.set("entered", "1")
        return x


def rank_has_a_late_peer(rank: int, size: int) -> list[Any]:
    """Rank 1 sends nothing before rank 0 has made its step and begun its forward."""
    os.environ[variable_names.POISON] = "1"
    store = dist.distributed_c10d._get_default_store()
    torch.manual_seed(1)
    entered = Entered()
    net = nn.Sequential(entered, Net())
    model = DistributedDataParallel(net, plan=plans(net, size)[1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8) * (rank + step)).square().mean()
        if step == 2 and rank == 1:
            store.wait(["entered"])
        loss.backward()
        optimizer.step()
        if step == 2 and rank == 0:
            pending = sum(type(p) is not nn.Parameter for p in net.parameters())
            entered.store = store
    return [pending if rank == 0 else 6, [p.detach() for p in net.parameters()]]


def test_backward_and_step_return_before_communication_ends(ranks: Any) -> None:
    """It would hang if anything before the first module with parameters waited."""
    first, second = ranks(rank_has_a_late_peer, 2)
    assert first[0] == second[0] == 6
    assert same(first[1], second[1])


ENDS_AT_ONCE = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from torch import nn
from stretto.runtime import DistributedDataParallel
from stretto.schema import Bucket, Plan

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
net = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8))
names = [name for name, _ in net.named_parameters()]
plan = Plan(
    planner="test",
    workload_digest="",
    ranks=2,
    overlap="forward",
    lanes=2,
    buckets=tuple(
        Bucket(tensors=(n,), lane=i % 2, wire_dtype="float32")
        for i, n in enumerate(names[::-1])
    ),
)
model = DistributedDataParallel(net, plan=plan)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 64)).square().mean()
    if step == 2 and rank == 0:
        time.sleep(2.0)
    loss.backward()
    optimizer.step()
pending = any(type(p) is not nn.Parameter for p in net.parameters())
if rank == 0:
    net[0].weight.sum()
print("pending" if pending else "finished")
"""


def test_a_process_that_ends_right_after_its_step_still_sends() -> None:
    """Rank 1 ends before rank 0 has sent its gradients, which then need rank 1."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS_AT_ONCE, str(Path(__file__).parent)],
            env=rank_environment(rank, 2, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], texts
    assert "pending" in texts[1]


def both_models(size: int) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield equal nets and their models without and with overlap with forward."""
    for forward in (False, True):
        os.environ[variable_names.POISON] = "1"
        torch.manual_seed(1)
        net = Net()
        yield net, DistributedDataParallel(net, plan=plans(net, size)[forward])


def is_pending(net: nn.Module) -> bool:
    return any(type(p) is not nn.Parameter for p in net.parameters())


def copies(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def rank_drops_its_model(rank: int, size: int) -> list[Any]:
    """The update is executed though the model has been dropped."""
    outcomes = []
    for net, model in both_models(size):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
        pending = is_pending(net)
        del model, optimizer
        gc.collect()
        left = is_pending(net)
        hooks = sum(len(m._forward_pre_hooks) for m in net.modules())
        outcomes.append([pending, left, hooks, copies(net)])
    return [same(outcomes[0][3], outcomes[1][3]), *outcomes[1][:3]]


def test_a_dropped_model_s_step_is_executed(ranks: Any) -> None:
    assert ranks(rank_drops_its_model, 2) == [[True, True, False, 0]] * 2


def rank_uses_a_closure(rank: int, size: int) -> list[Any]:
    outcomes = []
    for net, model in both_models(size):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8) * (rank + 1)).square().mean()
            loss.backward()
            return loss

        for step in range(5):
            loss = (
                optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
            )
            losses.append(float(loss))
        pending = is_pending(net)
        outcomes.append([losses, copies(net), pending])
    return [same(outcomes[0][:2], outcomes[1][:2]), outcomes[1][2]]


def test_a_step_with_a_closure_is_deferred_after_it(ranks: Any) -> None:
    assert ranks(rank_uses_a_closure, 2) == [[True, True]] * 2


def reads_until(ended: threading.Event, net: nn.Module) -> None:
    while not ended.wait(0.001):
        for parameter in net.parameters():
            parameter.sum()


def rank_reads_in_a_thread(rank: int, size: int) -> list[Any]:
    """A thread of the program reads parameters from step 3 to step 5."""
    outcomes: list[Any] = []
    for net, model in both_models(size):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        ended = threading.Event()
        reader = threading.Thread(target=reads_until, args=(ended, net))
        pending = []
        for step in range(8):
            optimizer.zero_grad()
            model(batch(rank, step)[:, :8]).square().mean().backward()
            optimizer.step()
            pending.append(is_pending(net))
            if step == 2:
                reader.start()
                pending.append(is_pending(net))
            if step == 5:
                ended.set()
                reader.join()
        outcomes.append([copies(net), pending])
    return [same(outcomes[0][0], outcomes[1][0]), *outcomes[1][1][2:]]


def test_nothing_is_pending_beside_another_thread(ranks: Any) -> None:
    before, beside, after = [True, False], [False] * 3, [True] * 2
    for found in ranks(rank_reads_in_a_thread, 2):
        assert found == [True, *before, *beside, *after]


def rank_uses_an_old_graph(rank: int, size: int) -> list[str]:
    """A backward of a graph made before the step fails as with DDP."""
    found = []
    for net, model in both_models(size):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        first, second = (model(torch.ones(2, 8)).square().mean() for _ in range(2))
        first.backward()
        optimizer.step()
        try:
            second.backward()
        except RuntimeError as error:
            found.append(str(error).partition(":")[0])
    return found


def test_a_graph_from_before_the_step_fails_as_with_ddp(ranks: Any) -> None:
    first, second = ranks(rank_uses_an_old_graph, 2)
    assert first == second
    assert len(first) == 2
    assert first[0] == first[1]


class _Hidden(torch.autograd.Function):
    """Reads a parameter as a compiled extension does: without asking its class."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            value = weight.detach().clone()
        ctx.save_for_backward(x, value)
        return x @ value.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class HiddenReader(nn.Module):
    """Reads its last layer's weight without asking its class, in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4, bias=False)
        self.hides = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if not self.hides:
            return self.last(x)
        return _Hidden.apply(x, self.last.weight)


def rank_reads_unseen(rank: int, size: int) -> list[Any]:
    found = []
    for forward in (False, True):
        os.environ[variable_names.POISON] = "1"
        torch.manual_seed(1)
        net = HiddenReader()
        plan = plans(net, size, 1)[forward]
        model = DistributedDataParallel(net, plan=plan)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for hides in (True, True, True, False, False, True, False, True, True):
            net.hides = hides
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    return found


def test_reads_that_ask_no_class_are_exact(ranks: Any) -> None:
    for expected, got in ranks(rank_reads_unseen, 2):
        assert got == expected


def rank_has_views(rank: int, size: int) -> list[int]:
    os.environ[variable_names.POISON] = "1"
    net = Net()
    plan = plans(net, size)[1]
    model = DistributedDataParallel(net, plan=plan, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        found.append(sum(type(p) is not nn.Parameter for p in net.parameters()))
    return found


def test_gradients_that_are_views_of_buckets_overlap_in_each_step(ranks: Any) -> None:
    assert ranks(rank_has_views, 2) == [[0, 6, 6, 6]] * 2


class TracedPart(nn.Module):
    """Evaluates a traced copy of a layer, which has the layer's own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def rank_traces(rank: int, size: int) -> list[Any]:
    outcomes = []
    for forward in (False, True):
        os.environ[variable_names.POISON] = "1"
        torch.manual_seed(1)
        net = TracedPart()
        model = DistributedDataParallel(net, plan=plans(net, size)[forward])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        traced: Any = None
        found: list[Any] = []
        for step in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            if step == 2:
                traced = torch.jit.trace(net.last, torch.ones(1, 8))
            if step >= 2:
                found.append(traced(torch.ones(1, 8)).detach())
        outcomes.append(found)
    return [same(*outcomes)]


@pytest.mark.filterwarnings("ignore")
def test_a_traced_module_reads_the_updated_values(ranks: Any) -> None:
    assert ranks(rank_traces, 2) == [[True]] * 2


def rank_forks(rank: int, size: int) -> list[bool]:
    case = Case(size)
    pending = case.pending()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        finite = bool(case.net.first.weight.isfinite().all())
        os.write(writer, b"1" if finite else b"0")
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 1)
    os.waitpid(child, 0)
    return [len(pending) == 6, said == b"1"]


@pytest.mark.filterwarnings("ignore")
def test_a_forked_process_finds_the_updated_values(ranks: Any) -> None:
    assert ranks(rank_forks, 2) == [[True, True]] * 2


def rank_runs_the_example(rank: int, size: int) -> list[bool]:
    os.environ[variable_names.POISON] = "1"
    path = Path(__file__).parents[2] / "examples" / "forward_overlap.py"
    example: dict[str, Any] = runpy.run_path(str(path))
    os.environ.update(
        {variable_names.TUNE_SCHEDULE: FORCED_FORWARD, "STRETTO_PLAN_CACHE": "off"}
    )
    jobs = [example["Job"](overlap) for overlap in ("backward", "auto")]
    for job in jobs:
        job.train(24)
    return [same(*(list(job.model.parameters()) for job in jobs))]


@pytest.mark.filterwarnings("ignore")
def test_the_example_is_equal_bit_for_bit(ranks: Any) -> None:
    assert ranks(rank_runs_the_example, 2) == [[True]] * 2


# Options and observers.


def rank_passes_options(rank: int, size: int) -> list[Any]:
    found: list[Any] = []
    backward, forward = plans(Net(), size)
    for plan, overlap in (
        (forward, None),
        (forward, "backward"),
        (forward, "forward"),
        (backward, "backward"),
        (backward, "forward"),
        ("auto", "forward"),
        (forward, "never"),
        (forward, "auto"),
    ):
        try:
            model = stretto.DDP(Net(), plan=plan, overlap=overlap)
        except StrettoError as error:
            found.append(str(error).partition(":")[0])
        else:
            found.append(model.plan.overlap)
    return found


def test_the_option_overlap_decides_what_a_plan_may_do(ranks: Any) -> None:
    refused = "overlap='forward' needs a plan that was made for it, not"
    for found in ranks(rank_passes_options, 2):
        assert found[:4] == ["backward", "backward", "forward", "backward"]
        assert found[4] == f"{refused} a plan with overlap 'backward'"
        assert found[5] == f"{refused} plan='auto'"
        assert "got 'never'" in found[6]
        assert found[7] == "forward"


class Ends(AbstractStepObserver):
    """Counts what happens, also slices that end late."""

    takes_late_ends = True

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.ended = 0

    def attached(self, tensors: Any, buckets: Any) -> None:
        pass

    def forward_started(self, now_s: float) -> None:
        pass

    def forward_ended(self, now_s: float) -> None:
        pass

    def backward_started(self, now_s: float) -> None:
        pass

    def gradient_ready(self, tensor: int, now_s: float) -> None:
        pass

    def bucket_launched(self, bucket: int, now_s: float) -> None:
        self.launched.append(bucket)

    def slice_finished(
        self, bucket: int, lane: int, elements: int, now_s: float
    ) -> None:
        self.ended += 1

    def backward_computed(self, now_s: float) -> None:
        pass

    def backward_ended(self, now_s: float) -> None:
        pass


def rank_is_observed(rank: int, size: int) -> list[Any]:
    os.environ[variable_names.POISON] = "1"
    torch.manual_seed(1)
    net, ends = Net(), Ends()
    plan = plans(net, size)[1]
    model = DistributedDataParallel(net, plan=plan, record=ends)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
    pending = sum(type(p) is not nn.Parameter for p in net.parameters())
    net.first.weight.sum()
    model.state_dict()
    return [pending, ends.launched[-3:], len(ends.launched), ends.ended, plan.launch]


def test_an_observer_that_takes_late_ends_sees_the_launch_order(ranks: Any) -> None:
    for pending, last, launched, ended, order in ranks(rank_is_observed, 2):
        assert pending == 6
        assert last == list(order)
        assert launched == 4 * 3
        assert ended == 4 * 3 * 2


def compiled(net: Net, model: Any, how: str) -> Any:
    if how == "wrapped block":
        net.second = torch.compile(net.second, backend="eager")
    elif how == "compiled block":
        net.second.compile(backend="eager")
    elif how == "compiled net":
        net.compile(backend="eager")
    else:
        return torch.compile(model, backend="eager")
    return model


def rank_compiles(rank: int, size: int) -> list[Any]:
    found = []
    for how in ("wrapped block", "compiled block", "compiled net", "compiled model"):
        outcomes = []
        for forward in (False, True):
            os.environ[variable_names.POISON] = "1"
            torch.manual_seed(1)
            torch._dynamo.reset()
            net = Net()
            model = DistributedDataParallel(net, plan=plans(net, size)[forward])
            run = compiled(net, model, how)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            losses = []
            for step in range(5):
                optimizer.zero_grad()
                loss = run(torch.ones(2, 8) * (rank + step)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            pending = is_pending(net)
            outcomes.append([losses, copies(net)])
        found.append((how, same(*outcomes), pending))
    return found


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_are_exact(ranks: Any) -> None:
    """A model compiled around DDP does not overlap; others do."""
    for found in ranks(rank_compiles, 2):
        assert found == [
            ("wrapped block", True, True),
            ("compiled block", True, True),
            ("compiled net", True, True),
            ("compiled model", True, False),
        ]


def rank_compiles_around(rank: int, size: int, what: str) -> list[Any]:
    outcomes = []
    for forward in (False, True):
        os.environ[variable_names.POISON] = "1"
        torch.manual_seed(1)
        torch._dynamo.reset()
        net = Net()
        model = DistributedDataParallel(net, plan=plans(net, size)[forward])
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

        def update(o: Any = optimizer) -> None:
            o.step()

        def penalty(x: torch.Tensor, n: Net = net) -> torch.Tensor:
            return x * n.last.weight.sum()

        step: Any = update
        if what == "step":
            step = torch.compile(update, backend="eager")
        read: Any = torch.compile(penalty, backend="eager", fullgraph=True)
        found: list[Any] = []
        for number in range(8):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8) * (rank + number)).square().mean()
            loss.backward()
            step()
            if what == "penalty" and number > 2:
                found.append(read(torch.ones(2)).detach())
            found.append(loss.detach())
        outcomes.append([found, [p.detach().clone() for p in net.parameters()]])
    return [same(*outcomes)]


@pytest.mark.repeat
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["step", "penalty"])
def test_code_compiled_around_the_model_is_exact(ranks: Any, what: str) -> None:
    """It neither fails nor is compiled again in each step."""
    assert ranks(rank_compiles_around, 2, what) == [[True]] * 2
