"""What a rank does with a case: train it by a burst plan and by one process."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import zoo_models
import zoo_rank
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stretto.burst.executor import BurstParallel
from stretto.burst.graph import capture
from stretto.errors import RankDisagreement, SpecError, StrettoError
from stretto.schema.burst import BurstPlan, LayerGpus
from support.burst_ranks import shares_of

STEPS = 3


def plan_of(graph: Any, gpus: int, seed: int, *, offset: bool = True) -> BurstPlan:
    """A random plan for a captured model."""
    draw = random.Random(seed)
    layers = []
    for node in graph.nodes:
        width = draw.randint(1, gpus)
        first = draw.randint(0, gpus - width) if offset and draw.random() < 0.4 else 0
        layers.append(LayerGpus(layer=node.name, first_gpu=first, gpus=width))
    return BurstPlan(
        profile_digest=graph.digest,
        gpus=gpus,
        batch=8,
        amplification_limit=None,
        layers=tuple(layers),
    )


def rows(inputs: Any, start: int, end: int) -> Any:
    """Some rows of every tensor."""
    return pytree.tree_map_only(Tensor, lambda t: t[start:end], inputs)


def loss_of(output: Any) -> Tensor:
    """A mean over samples of a smooth function of all floating outputs."""
    leaves = [
        torch.view_as_real(leaf) if leaf.is_complex() else leaf
        for leaf in pytree.tree_leaves(_plain(output))
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]
    total: Any = 0.0
    for i, leaf in enumerate(leaves):
        flat = leaf.double().flatten(1)
        weight = torch.linspace(0.5, 1.5, flat.shape[1])
        total = total + (torch.tanh(flat * weight) + 0.1 * flat**2).mean(1) / (i + 1)
    loss: Tensor = total.mean()
    return loss


def _plain(output: Any) -> Any:
    if isinstance(output, dict) or hasattr(output, "to_tuple"):
        return {k: _plain(v) for k, v in dict(output).items()}
    return output


def call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = inputs
    return model(*args, **kwargs)


def example_of(case: zoo_models.Case) -> Any:
    return case.data(3, torch.Generator().manual_seed(99))


def made(case: zoo_models.Case) -> nn.Module:
    torch.manual_seed(5)
    model = case.make()
    model.train()
    if case.prepare is not None:
        case.prepare(model)
    return model


class Node(NamedTuple):
    name: str


class Outline(NamedTuple):
    """What a plan needs of a captured model."""

    digest: str
    nodes: tuple[Node, ...]


_OUTLINES: dict[str, Outline] = {}
"""Outlines of the cases that rank 0 has captured."""


def outline_of(case: zoo_models.Case, model: nn.Module, group: Any) -> Outline:
    """Capture once, on rank 0, what all ranks' plans need: capturing takes longest.

    Raises:
        SpecError: the model is refused, as each rank finds for itself.
    """

    def captured() -> Outline:
        args, kwargs = example_of(case)
        own = copy.deepcopy(model) if case.copies else made(case)
        graph = capture(own, args, kwargs)
        return Outline(graph.digest, tuple(Node(node.name) for node in graph.nodes))

    held: list[Any] = [None]
    if dist.get_rank(group) == 0:
        with contextlib.suppress(SpecError):
            held[0] = _OUTLINES[case.name] = _OUTLINES.get(case.name) or captured()
    dist.broadcast_object_list(held, group=group, group_src=0)
    return held[0] or captured()


def train(
    name: str,
    size: int,
    seed: int,
    shares: str,
    batch: int = 9,
    **more: Any,
) -> dict[str, Any]:
    """Differences from one process, or the sentence with which it is refused."""
    if dist.get_rank() >= size:
        return {}
    case = zoo_models.CASES[name]
    group = zoo_rank.GROUPS[size]
    model = made(case)
    reference: Any = copy.deepcopy(model) if case.copies else made(case)
    args, kwargs = example_of(case)
    options = {"example_kwargs": kwargs} if kwargs else {}
    try:
        graph = outline_of(case, model, group)
    except SpecError as exc:
        return {"refused": str(exc)}
    try:
        burst: Any = BurstParallel(
            model,
            plan_of(graph, size, seed),
            example_inputs=args,
            process_group=group,
            **options,
            **more,
        )
        if case.draws:
            reference = BurstParallel(
                reference,
                plan_of(graph, 1, seed),
                example_inputs=args,
                process_group=zoo_rank.GROUPS[1],
                **options,
            )
    except (SpecError, RankDisagreement) as exc:
        return {"refused": str(exc)}
    mine, plain = burst.module, getattr(reference, "module", reference)
    if not case.draws:
        plain = reference
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (mine, plain)
    ]
    found = {"output": 0.0, "grad": 0.0}
    rank, counts = dist.get_rank(group), shares_of(batch, size, shares)
    start = sum(counts[:rank])
    for step in range(STEPS):
        inputs = case.data(batch, torch.Generator().manual_seed(step))
        if case.change is not None:
            case.change(mine, step)
            case.change(plain, step)
        try:
            output = call(burst, rows(inputs, start, start + counts[rank]))
        except StrettoError as exc:
            return {"refused": str(exc)}
        wanted = call(reference, inputs)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(output).backward()
        loss_of(wanted).backward()
        found["output"] = max(
            found["output"],
            difference(output, rows(_plain(wanted), start, start + counts[rank])),
        )
        found["grad"] = max(found["grad"], worst_grad(mine, plain))
        for optimizer in optimizers:
            optimizer.step()
    state, wanted_state = burst.full_state_dict(), plain.state_dict()
    # What is zero but for rounding, such as a bias before a softmax that starts at
    # zero, has no scale of its own: the model's is what it was summed from.
    largest = max(
        (float(p.detach().abs().max()) for p in plain.parameters() if p.numel()),
        default=0.0,
    )
    found["state"] = max(
        (worst(state[key], v, 1e-2 * largest) for key, v in wanted_state.items()),
        default=0.0,
    )
    missing = {k for k, p in plain.named_parameters() if p.grad is not None}
    have = [None] * size
    dist.all_gather_object(
        have, {k for k, p in mine.named_parameters() if p.grad is not None}, group
    )
    found["gradients on no rank"] = float(len(missing - set().union(*have)))
    found["gradients too many"] = float(len(set().union(*have) - missing))
    return found


def difference(output: Any, wanted: Any) -> float:
    mine, truth = (
        [leaf for leaf in pytree.tree_leaves(_plain(o)) if isinstance(leaf, Tensor)]
        for o in (output, wanted)
    )
    assert len(mine) == len(truth)
    return max(worst(a, b) for a, b in zip(mine, truth, strict=True))


def worst(found: Any, wanted: Any, floor: float = 1e-30) -> float:
    """Largest difference, relative to the largest value or the floor."""
    if not isinstance(wanted, Tensor):
        return float(found != wanted)
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    if wanted.is_complex():
        found, wanted = (torch.view_as_real(t.resolve_conj()) for t in (found, wanted))
    found, wanted = found.detach().double(), wanted.detach().double()
    scale = float(wanted.abs().max())
    return float((found - wanted).abs().max()) / max(scale, floor)


def worst_grad(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest error of this rank's gradients, relative to the largest."""
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    grads = [float(q.grad.abs().max()) for _, q in pairs if q.grad is not None]
    scale = max(grads, default=0.0) or 1.0
    found = [0.0]
    for p, q in pairs:
        if p.grad is not None:
            if q.grad is None:  # an optimizer would move a parameter by weight decay
                return float("inf")
            found.append(float((p.grad - q.grad).abs().max()))
    return max(found) / scale


def verify(name: str, size: int, seed: int) -> dict[str, Any]:
    """Train as `train` does, with ``verify=True``."""
    return train(name, size, seed, "uneven", verify=True)


def chain(size: int, shares: str, batch: int = 9) -> float:
    """How far two burst models, the one reading the other's dictionary, are apart.

    From one process, in their parameters after some steps.
    """
    if dist.get_rank() >= size:
        return 0.0
    group = zoo_rank.GROUPS[size]
    torch.manual_seed(5)
    models = [zoo_models.GivesDictionary(), zoo_models.TakesDictionary()]
    plain = copy.deepcopy(models)
    x = torch.randn(2, 8)
    examples = [(x,), (pytree.tree_map_only(Tensor, Tensor.detach, plain[0](x)),)]
    made = [
        BurstParallel(
            model,
            plan_of(capture(copy.deepcopy(model), example), size, seed),
            example_inputs=example,
            process_group=group,
        )
        for seed, (model, example) in enumerate(zip(models, examples, strict=True))
    ]
    both = [
        torch.optim.SGD([p for m in some for p in m.parameters()], lr=0.1)
        for some in (models, plain)
    ]
    rank, counts = dist.get_rank(group), shares_of(batch, size, shares)
    start = sum(counts[:rank])
    for step in range(STEPS):
        x = torch.randn(batch, 8, generator=torch.Generator().manual_seed(step))
        for optimizer in both:
            optimizer.zero_grad()
        loss_of(made[1](made[0](x[start : start + counts[rank]]))).backward()
        loss_of(plain[1](plain[0](x))).backward()
        for optimizer in both:
            optimizer.step()
    return max(
        worst(burst.full_state_dict()[key], value)
        for burst, model in zip(made, plain, strict=True)
        for key, value in model.state_dict().items()
    )


def differ(kind: str) -> list[str]:
    """What each forward raises where rank 1 alone changes the model after a step."""
    rank = dist.get_rank()
    if rank > 1:
        return []
    torch.manual_seed(5)
    model: Any = nn.Sequential(
        zoo_models.Scheduled("number"), nn.Linear(3, 3), nn.Dropout(0.5)
    )
    burst = BurstParallel(
        model,
        plan_of(capture(copy.deepcopy(model), (torch.randn(2, 8),)), 2, 3),
        example_inputs=(torch.randn(2, 8),),
        process_group=zoo_rank.GROUPS[2],
    )
    burst(torch.randn(3, 8)).sum().backward()
    autocast = False
    if rank == 1:
        if kind == "attribute":
            model[0].epoch = 2
        elif kind == "mode":
            model[2].eval()
        elif kind == "uncapturable":
            model[0].forward = lambda x: x.softmax(0)[:, :3]
        else:
            autocast = True
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            burst(torch.randn(3, 8))
    except StrettoError as exc:
        return [type(exc).__name__, str(exc)]
    return []


def threads_over_models(name: str) -> list[int]:
    """This rank's threads after each of three models in a row is gone."""
    counts = []
    for _ in range(3):
        train(name, dist.get_world_size(), seed=3, shares="even")
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))  # noqa: PTH208
    return counts
