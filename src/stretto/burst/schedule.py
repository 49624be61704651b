"""Compute each layer's needs in a forward, and one rank's share of them, once.

# Note [Layers passed over]
A rank outside a layer's ranks has neither its samples nor its parameters. It does not
run the layer: anything that backward must reach there is passed on to the next layer,
and a tensor is made only where samples arrive again. Moves in which a rank neither
sends nor receives are left out of its schedule. The rest keep their order, which is the
same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import fx, nn

from stretto.burst.dropout import draws_otherwise, dropouts_of
from stretto.burst.rank_groups import RankRange
from stretto.burst.tracing.layers import INPUT, LayerGraph, LayerNode
from stretto.burst.tracing.sample_positions import source_line_of
from stretto.burst.tracing.torch_modules import BatchNorm
from stretto.errors import PlanMismatch, SpecError
from stretto.sim.sample_layout import Numbers, Transfer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.schema.burst import BurstPlan
    from stretto.sim.sample_layout import Layouts


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LayerStep:
    """Execution of one layer in a forward."""

    node: LayerNode

    width: RankRange

    takes: tuple[tuple[str, int | None], ...]
    """Its inputs: the layer, and the number of its move if it has to move."""

    starts: tuple[tuple[int, RankRange | None], ...]
    """Moves of its output: number, and the ranks it goes to."""

    last_of: tuple[str, ...]
    """Inputs of which it is the last reader."""

    trains: bool
    """Whether it or a layer before it has a parameter that needs a gradient."""

    is_alone: bool
    """Whether samples are computed one by one, because it draws random numbers."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ExecutionPlan:
    """Execution of all layers."""

    graph: LayerGraph

    layers: tuple[LayerStep, ...]

    input_starts: tuple[tuple[int, RankRange | None], ...]

    output_takes: int | None
    """The number of the output's move back to the ranks' shares."""

    names: tuple[str, ...]
    """The layer that each move's samples come from, by number."""

    draws: bool
    """Whether a layer draws random numbers."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerExecution:
    """One layer on one rank."""

    step: LayerStep

    samples: Numbers
    """The rank's samples, in the order of its rows."""

    is_passed: bool
    """Whether the rank is outside the layer's ranks, see Note [Layers passed over]."""

    takes: tuple[tuple[str, int | None], ...]
    """Its inputs: the layer, and the number of its move if this rank takes part."""

    starts: tuple[int, ...]
    """Moves of its output in which this rank takes part."""

    shares: tuple[int, ...]
    """Samples of each of the layer's ranks."""

    is_tied: bool
    """Whether samples moved before it, so that backward must always pass through it:
    other ranks wait for the gradients."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSchedule:
    """Execution of all layers on one rank."""

    layers: tuple[LayerExecution, ...]

    input_starts: tuple[int, ...]

    output_takes: int | None

    moves: tuple[tuple[int, Transfer, str], ...]
    """Moves in which this rank takes part: number, rows, the layer they come from."""

    num_numbers: int
    """Moves of all ranks, for tags."""


def rank_ranges_of(
    plan: BurstPlan, graph: LayerGraph, ranks: int
) -> dict[str, RankRange]:
    """Return each layer's ranks.

    Raises:
        PlanMismatch: the plan is for another model, or for more ranks.
    """
    if plan.gpus > ranks:
        raise PlanMismatch(
            f"the plan needs {plan.gpus} ranks but the job has {ranks}: re-plan for "
            f"{ranks} with `stretto burst plan --gpus {ranks}`, or start {plan.gpus}"
        )
    names = [entry.layer for entry in plan.layers]
    if names != [node.name for node in graph.nodes]:
        odd = sorted(set(names) ^ {node.name for node in graph.nodes})
        what = f": {odd[0]!r} is in only one" if odd else " in another order"
        raise PlanMismatch(
            f"the plan's layers are not those of this {graph.name}{what}. Run "
            "`stretto burst profile` and plan again"
        )
    if plan.profile_digest != graph.digest:
        raise PlanMismatch(
            f"the plan was made for a model with digest {plan.profile_digest}, but "
            f"this {graph.name} has {graph.digest}: sizes or edges differ. Run "
            "`stretto burst profile` and plan again"
        )
    return {entry.layer: (entry.first_gpu, entry.gpus) for entry in plan.layers}


def later_widths(
    graph: LayerGraph,
    planned: LayerGraph,
    widths: Mapping[str, RankRange],
    width_of: Mapping[int, RankRange],
) -> tuple[dict[str, RankRange], str | None]:
    """Return the ranks of another capture's layers, and the first that can't have any.

    A layer runs where its tensors are trained. Names do not tell: those of operations
    count, and in evaluation a model may run fewer. A layer without tensors may run
    anywhere: where the one before it does.

    Args:
        graph: the other capture, as of evaluation.
        planned: the capture of the plan.
        widths: the ranks of its layers.
        width_of: the ranks of each parameter, by id.
    """
    owner = {
        id(p): node.name for node in planned.nodes for p in node.module.parameters()
    }
    known = {id(t) for node in planned.nodes for t in node.tensors()}
    trained = dict(width_of)
    for node in planned.nodes:
        for tensor in node.trained_and_changed():
            trained.setdefault(id(tensor), widths[node.name])
    names = {node.name for node in graph.nodes}
    first = widths[planned.nodes[0].name]
    found: dict[str, RankRange] = {}
    for node in graph.nodes:
        held = node.tensors()
        owners = {owner[id(t)] for t in held if id(t) in owner} - {node.name}
        ranks = {trained[id(t)] for t in held if id(t) in trained}
        # A name stands for its parameters while gradients are sent.
        if len(ranks) > 1 or owners & names or (owners and node.name in widths):
            return found, node.name
        if ranks:
            (found[node.name],) = ranks
        elif node.name in widths:
            found[node.name] = widths[node.name]
        elif any(
            id(buffer) not in known and name not in graph.constants
            for name, buffer in node.module.named_buffers()
        ):
            return found, node.name  # a buffer that no rank was sent
        else:
            found[node.name] = found.get(node.inputs[0], first)
    return found, None


def execution_plan_of(
    graph: LayerGraph, widths: Mapping[str, RankRange]
) -> ExecutionPlan:
    """Return the execution of all layers under a plan.

    Raises:
        SpecError: a layer mixes samples in a way that can't be split over ranks.
    """
    held: dict[str, RankRange | None] = {INPUT: None, **widths}
    numbers: dict[tuple[str, RankRange | None], int] = {}
    starts: dict[str, list[tuple[int, RankRange | None]]] = {}
    last: dict[str, str] = {}

    def take(name: str, width: RankRange | None) -> int | None:
        if held[name] == width:
            return None
        if (name, width) not in numbers:
            numbers[name, width] = len(numbers)
            starts.setdefault(name, []).append((numbers[name, width], width))
        return numbers[name, width]

    takes = {}
    for node in graph.nodes:
        _refuse_functional_norms(node)
        takes[node.name] = tuple(
            (name, take(name, widths[node.name])) for name in node.inputs
        )
        last |= dict.fromkeys(node.inputs, node.name)
    output_takes = take(graph.output, None)
    trains: dict[str, bool] = {INPUT: False}
    layers = []
    for node in graph.nodes:
        trains[node.name] = any(trains[name] for name in node.inputs) or any(
            p.requires_grad for p in node.module.parameters()
        )
        layers.append(
            LayerStep(
                node=node,
                width=widths[node.name],
                takes=takes[node.name],
                starts=tuple(starts.get(node.name, ())),
                last_of=tuple(n for n in node.inputs if last[n] == node.name),
                trains=trains[node.name],
                is_alone=draws_otherwise(node.module),
            )
        )
        if layers[-1].is_alone:
            _require_samples_alone(node)
    return ExecutionPlan(
        graph=graph,
        layers=tuple(layers),
        input_starts=tuple(starts.get(INPUT, ())),
        output_takes=output_takes,
        names=tuple(name for name, _ in numbers),
        draws=any(
            step.is_alone
            or any(part.training for _, part in dropouts_of(step.node.module))
            for step in layers
        ),
    )


def schedule_of(plan: ExecutionPlan, layouts: Layouts, rank: int) -> RankSchedule:
    """Return one rank's schedule for these shares."""
    rows: list[tuple[RankRange | None, tuple[tuple[int, RankRange | None], ...]]]
    rows = [(None, plan.input_starts)]
    rows += [(step.width, step.starts) for step in plan.layers]
    moves: dict[int, Transfer] = {}
    real = set()
    for source, starts in rows:
        for number, target in starts:
            transfer = layouts.transfer(source, target, rank)
            if transfer is not None:
                real.add(number)
                if not transfer.is_idle:
                    moves[number] = transfer
    layers = []
    moved_before: dict[str, bool] = {}
    for step in plan.layers:
        first, width = step.width
        every = layouts.samples(step.width)
        moved_before[step.node.name] = any(
            number in real or moved_before.get(name, False)
            for name, number in step.takes
        )
        layers.append(
            LayerExecution(
                step=step,
                samples=every[rank],
                is_passed=not first <= rank < first + width,
                takes=tuple(
                    (name, number if number in moves else None)
                    for name, number in step.takes
                ),
                starts=tuple(n for n, _ in step.starts if n in moves),
                shares=tuple(len(some) for some in every[first : first + width]),
                is_tied=moved_before[step.node.name],
            )
        )
    output = plan.output_takes
    return RankSchedule(
        layers=tuple(layers),
        input_starts=tuple(n for n, _ in plan.input_starts if n in moves),
        output_takes=output if output in moves else None,
        moves=tuple((n, moves[n], plan.names[n]) for n in sorted(moves)),
        num_numbers=len(plan.names),
    )


def _require_samples_alone(node: LayerNode) -> None:
    """Refuse layers that can't run sample by sample, as random numbers require."""
    what = "updates a buffer in forward" if node.keeps_state else ""
    for part in node.module.modules():
        if isinstance(part, BatchNorm) and (part.training or part.running_mean is None):
            what = "normalizes over the batch"
    if what:
        place = next(
            (source_line_of(op) for op in _operations(node) if op.meta.get("draws")), ""
        )
        raise SpecError(
            f"{place}: layer {node.name!r} draws random numbers and {what}, which "
            "can't be computed sample by sample: use torch.nn.Dropout, or draw in a "
            "module of its own whose input has a row for each sample. Modules that are "
            "called twice are one layer with what is between the calls: draw before "
            "the first or after the last"
        )


def _operations(node: LayerNode) -> list[fx.Node]:
    graph = node.module.graph
    assert isinstance(graph, fx.Graph)  # noqa: S101
    return list(graph.nodes)


_TRAINING = 5
"""Position of ``training`` among the arguments of batch norm functions."""


def _refuse_functional_norms(node: LayerNode) -> None:
    norms = (nn.functional.batch_norm, torch.batch_norm)
    for part in node.module.modules():
        if isinstance(part, fx.GraphModule):
            for op in part.graph.nodes:
                if op.op != "call_function" or op.target not in norms:
                    continue
                given = op.args[_TRAINING] if len(op.args) > _TRAINING else False
                if op.kwargs.get("training", given) and _reads_samples(op):
                    raise SpecError(
                        f"{source_line_of(op)}: layer {node.name!r} normalizes over "
                        "the batch by a function, whose statistics can't be those of "
                        "all ranks: use a torch.nn.BatchNorm module"
                    )


def _reads_samples(op: fx.Node) -> bool:
    """Return whether an operation's input is computed from the layer's inputs."""
    seen: set[fx.Node] = set()
    left = list(op.all_input_nodes)
    while left:
        node = left.pop()
        if node.op == "placeholder":
            return True
        if node not in seen:
            seen.add(node)
            left += node.all_input_nodes
    return False
