"""Measure the layer profile of a real module: each layer's time by number of samples.

Every layer runs in its place between the others, forward and backward, so caches and
allocations are those of a step. The sum over layers is checked against whole steps of
the same round.
"""

from __future__ import annotations

import platform
import random
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stretto.boolean_options import bool_option
from stretto.burst.graph import capture
from stretto.burst.profiling.layer_rounds import LayerRounds
from stretto.burst.requirements import require_module
from stretto.burst.tracing.layers import INPUT, JOINED, LayerGraph, LayerNode
from stretto.burst.tracing.packing import Arguments, tensors_in
from stretto.cost.burst import samples_on, widths_of
from stretto.errors import NoisyProfile, SpecError
from stretto.measure.clocks import clock_for
from stretto.schema.burst import BatchTime, Layer, LayerProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from stretto.burst.profiling.layer_rounds import Loss

    MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

WITHIN_RATIO = 0.10
"""Allowed difference between the layers' sum and the whole step; beyond it, layer times
are scaled."""

MAX_REPEATS = 8
"""On a busy machine, rounds are repeated up to this many times, and those that agree
best are used."""

MIN_LAYER_S = 50e-6
"""A layer that takes less for the most samples is joined with a neighbor: calling it
takes about as long as its work."""


def profile(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    batch: int,
    gpus: int,
    kwargs: Mapping[str, Any] | None = None,
    widths: str | Sequence[int] = "powers",
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    name: str | None = None,
    repetitions: int = 10,
    warmup: int = 2,
    min_layer_s: float = MIN_LAYER_S,
    max_spread_ratio: float = 0.35,
    cuda_graphs: bool = True,
) -> LayerProfile:
    """Return each layer's times for the samples that a GPU gets of ``batch``, by width.

    The module's parameters, buffers and gradients are unchanged afterward.

    Args:
        module: on the device to measure, in ``train`` mode.
        example_inputs: its arguments; if they have too few samples, more are generated
            from them.
        batch: samples of a step over all GPUs.
        gpus: the most GPUs a layer may get.
        kwargs: further arguments of ``forward``.
        widths: the numbers of GPUs a layer may get, as for a plan.
        loss: computed from the output; its time counts with the last layer. Default:
            the sum of the mean squares of the output's floating-point tensors.
        optimizer: makes one for some parameters; its time for each layer's parameters
            is ``update_s``, which is 0 by default.
        name: the profile's; by default the module's class.
        repetitions: rounds that count; medians are taken. More are run while they
            differ too much.
        warmup: rounds before them.
        min_layer_s: a chain's layers are joined until none takes less.
        max_spread_ratio: limit of the whole step's interquartile range over its median,
            over rounds.
        cuda_graphs: on CUDA replay each layer as a graph, so that launches do not
            count.

    Raises:
        SpecError: the module can't be divided into layers, see `capture`.
        NoisyProfile: the rounds differ too much.
    """
    if repetitions < 2:
        raise SpecError(f"repetitions must be >= 2, got {repetitions}")
    cuda_graphs = bool_option("cuda_graphs", cuda_graphs)
    require_module(module, example_inputs, kwargs)
    example_inputs = tuple(example_inputs)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise SpecError(
            f"{type(module).__name__} has no parameter to train, so there is no "
            "backward to measure: set requires_grad of those that will be trained"
        )
    counts = sorted(
        {samples_on(batch, g) for g in widths_of(widths, gpus, batch)} | {batch}
    )
    graph = capture(module, example_inputs, kwargs)
    arguments, results = graph.arguments, graph.results
    given = arguments.tensors(example_inputs, dict(kwargs or {}))
    rows = {count: _packed_rows(arguments, given, count) for count in counts}
    example = rows[counts[-1]]
    of_output = loss or _mean_square

    def whole(packed: Tensor) -> Tensor:
        args, named = arguments.unpack(packed)
        return results.packed(module(*args, **named), len(packed))

    def loss_of(packed: Tensor) -> Tensor:
        return _required_loss(of_output(results.unpack(packed)))

    with _restored(module):
        graph = _joined(graph, example, loss_of, warmup, min_layer_s)
        rounds = LayerRounds(graph, whole, loss_of)
        if example.is_cuda and cuda_graphs:
            rounds.record_graphs(rows)
        for _ in range(warmup):
            for count in counts:
                rounds.run(count, rows[count], keep=False)
        every = rounds
        for _ in range(MAX_REPEATS):
            for _ in range(repetitions):
                for count in counts:
                    every.run(count, rows[count], keep=True)
            rounds = every.closest(repetitions)
            if max(map(rounds.spread_ratio, counts)) <= max_spread_ratio:
                break
        update_s = _update_times(graph, optimizer, example.device, repetitions)
        outside_s = 0.0
        if optimizer is not None:
            steps_s = _whole_steps(
                rounds, optimizer, rows[batch], rounds=repetitions, warmup=warmup
            )
            known_s = sum(rounds.whole_s(batch)) + sum(update_s.values())
            outside_s = max(0.0, median(steps_s) - known_s)
    found = _profile_of(
        graph, rounds, counts, update_s, name or graph.name, example, max_spread_ratio
    )
    return replace(found, outside_s=outside_s)


@contextmanager
def steps_of(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    batch: int,
    gpus: int,
    kwargs: Mapping[str, Any] | None = None,
    widths: str | Sequence[int] = "powers",
    loss: Loss | None = None,
    **_others: Any,
) -> Iterator[tuple[Callable[[int], None], tuple[int, ...]]]:
    """Yield a function that computes as one rank of a width, and the widths.

    Takes the arguments of `profile`. The module is unchanged afterward.
    """
    numbers = widths_of(widths, gpus, batch)
    arguments = Arguments(tuple(example_inputs), dict(kwargs or {}), module.forward)
    given = arguments.tensors(example_inputs, dict(kwargs or {}))
    rows = {g: _packed_rows(arguments, given, samples_on(batch, g)) for g in numbers}
    to_loss = loss or _mean_square

    def step(width: int) -> None:
        args, named = arguments.unpack(rows[width])
        to_loss(module(*args, **named)).backward()
        for parameter in module.parameters():
            parameter.grad = None

    with _restored(module):
        yield step, numbers


def _packed_rows(arguments: Arguments, given: list[Tensor], count: int) -> Tensor:
    return arguments.packing.pack([_rows(tensor, count) for tensor in given])


def _rows(example: Tensor, count: int) -> Tensor:
    """Return ``count`` samples; those beyond the example's are varied copies of them.

    A repeated sample is flipped along each of its sides. If the same few samples repeat
    over and over, a processor predicts every branch: pooling 64 images made from two
    took half the time of pooling 64 different images.

    Raises:
        SpecError: the example has no sample.
    """
    if not len(example):
        raise SpecError("the example inputs have no sample: pass at least one row")
    draw = random.Random(0)
    rows = list(example.detach()[:count])
    sides = tuple(range(example.dim() - 1))
    while len(rows) < count:
        row = example.detach()[len(rows) % len(example)]
        shifts = tuple(draw.randrange(side) for side in row.shape)
        rows.append(torch.roll(row, shifts, sides) if sides else row)
    return torch.stack(rows)


def _mean_square(output: Any) -> Tensor:
    """Return the sum of the mean squares of an output's floating tensors.

    Raises:
        SpecError: it has none.
    """
    floats = [t for t in tensors_in(output) if t.is_floating_point()]
    if not floats:
        raise SpecError(
            "the model returns no floating-point tensor: pass a loss that takes its "
            "output"
        )
    total: Tensor = torch.stack([t.float().square().mean() for t in floats]).sum()
    return total


def _required_loss(found: Any) -> Tensor:
    """Return a loss.

    Raises:
        SpecError: it is not a number with a gradient.
    """
    if not isinstance(found, Tensor):
        what = type(found).__name__
    elif found.numel() != 1:
        what = f"a tensor of shape {tuple(found.shape)}"
    elif not found.requires_grad:
        what = "a tensor without a gradient"
    else:
        return found
    raise SpecError(
        f"the loss must be one number that depends on the output, got {what}: return "
        "its mean, and do not detach it"
    )


def _made(optimizer: MakeOptimizer, parameters: list[nn.Parameter]) -> Any:
    """Return an optimizer for parameters.

    Raises:
        SpecError: the function makes something else.
    """
    found = optimizer(parameters)
    if not callable(getattr(found, "step", None)):
        raise SpecError(
            "the optimizer's function must return an optimizer for the parameters that "
            f"it gets, such as torch.optim.Adam(parameters), got {type(found).__name__}"
        )
    return found


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore what training steps change: values, gradients, random state."""
    tensors = [*module.parameters(), *module.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [parameter.grad for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = None  # otherwise backward would add to the saved gradient
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    with torch.random.fork_rng([d.index or 0 for d in devices]):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = gradient


def _joined(
    graph: LayerGraph, rows: Tensor, loss: Loss, warmup: int, min_s: float
) -> LayerGraph:
    """Return the graph with layers joined where one is too short to be timed."""
    trial = LayerRounds(graph, None, loss)
    for n in range(warmup + 3):
        trial.run(len(rows), rows, keep=n >= warmup)
    time_s = {
        node.name: sum(trial.layer_s(node.name, len(rows))) for node in graph.nodes
    }
    return graph.joined(_names_joined(graph, time_s, min_s))


def _names_joined(
    graph: LayerGraph, time_s: dict[str, float], min_s: float
) -> list[str]:
    """Return names of layers, short ones joined with the shorter chain neighbor."""
    before = {node.name: [i for i in node.inputs if i != INPUT] for node in graph.nodes}
    while True:
        after: dict[str, list[str]] = {name: [] for name in before}
        for name, inputs in before.items():
            for read in inputs:
                after[read].append(name)
        chained = [
            (inputs[0], name)
            for name, inputs in before.items()
            if len(inputs) == 1 and len(after[inputs[0]]) == 1
        ]
        short = [
            pair for pair in chained if min(time_s[pair[0]], time_s[pair[1]]) < min_s
        ]
        if not short:
            return list(before)
        one, two = min(short, key=lambda pair: time_s[pair[0]] + time_s[pair[1]])
        new = f"{one}{JOINED}{two}"
        time_s[new] = time_s[one] + time_s[two]
        inputs = before.pop(one)
        # Takes the place of the second: its inputs come before and stay there.
        before = {
            (new if name == two else name): (
                inputs if name == two else [new if r == two else r for r in reads]
            )
            for name, reads in before.items()
        }


def _update_times(
    graph: LayerGraph,
    optimizer: MakeOptimizer | None,
    device: torch.device,
    repetitions: int,
) -> dict[str, float]:
    """Return the optimizer's time for each layer's parameters, each with its own."""
    if optimizer is None:
        return {}
    clock = clock_for(device)
    found = {}
    for node in graph.nodes:
        parameters = [p for p in node.module.parameters() if p.requires_grad]
        if not parameters:
            continue
        made = _made(optimizer, parameters)
        times = []
        for _ in range(repetitions + 2):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            start = clock.mark()
            made.step()
            times.append((start, clock.mark()))
        # The first two create the optimizer's state.
        found[node.name] = median(clock.seconds(*pair) for pair in times[2:])
        for parameter in parameters:
            parameter.grad = None
    return found


def _whole_steps(
    timed: LayerRounds,
    optimizer: MakeOptimizer,
    inputs: Tensor,
    *,
    rounds: int,
    warmup: int,
) -> list[float]:
    """Time whole training steps as a script runs them, from zero_grad to the update."""
    assert timed.whole is not None  # noqa: S101 - only trial rounds lack it
    parameters = [
        p
        for node in timed.graph.nodes
        for p in node.module.parameters()
        if p.requires_grad
    ]
    if not parameters:
        return [0.0]
    made = _made(optimizer, parameters)
    clock = clock_for(inputs.device)
    marks = []
    for _ in range(warmup + rounds):
        start = clock.mark()
        made.zero_grad()
        timed.loss(timed.whole(inputs)).backward()
        made.step()
        marks.append((start, clock.mark()))
    made.zero_grad()
    return [clock.seconds(*pair) for pair in marks[warmup:]]


def _profile_of(
    graph: LayerGraph,
    rounds: LayerRounds,
    counts: Sequence[int],
    update_s: Mapping[str, float],
    name: str,
    example: Tensor,
    max_spread_ratio: float,
) -> LayerProfile:
    factors, spreads = {}, {}
    for count in counts:
        spreads[count] = rounds.spread_ratio(count)
        layers_s = sum(sum(rounds.layer_s(n.name, count)) for n in graph.nodes)
        factors[count] = sum(rounds.whole_s(count)) / layers_s
    worst = max(counts, key=spreads.__getitem__)
    if spreads[worst] > max_spread_ratio:
        raise NoisyProfile(
            f"steps of {worst} samples differ by {spreads[worst]:.0%} of their median "
            f"(quartiles) in the best of {MAX_REPEATS} times as many rounds; at most "
            f"{max_spread_ratio:.0%} are allowed: stop other programs on this machine, "
            "increase the repetitions, or allow a larger spread"
        )
    scale = {
        count: factor if abs(1 / factor - 1) > WITHIN_RATIO else 1.0
        for count, factor in factors.items()
    }
    return LayerProfile(
        name=name,
        device=_device_name(example.device),
        layers=tuple(
            _layer_of(node, rounds, scale, update_s.get(node.name, 0.0))
            for node in graph.nodes
        ),
        input_bytes=graph.input_bytes,
        whole=tuple(
            BatchTime(samples=count, forward_s=pair[0], backward_s=pair[1])
            for count, pair in ((count, rounds.whole_s(count)) for count in counts)
        ),
        provenance={
            "host": platform.node(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "repetitions": len(rounds.wholes[counts[0]]),
            "spread_ratio": spreads[worst],
            "layers_over_whole": {str(c): 1 / factors[c] for c in counts},
            "scaled_by": {str(c): f for c, f in scale.items() if f != 1.0},
        },
    )


def _layer_of(
    node: LayerNode, rounds: LayerRounds, scale: Mapping[int, float], update_s: float
) -> Layer:
    times = []
    for count, factor in scale.items():
        forward_s, backward_s = rounds.layer_s(node.name, count)
        times.append(
            BatchTime(
                samples=count,
                forward_s=forward_s * factor,
                backward_s=backward_s * factor,
            )
        )
    return Layer(
        name=node.name,
        inputs=tuple(name for name in node.inputs if name != INPUT),
        parameter_bytes=node.parameter_bytes,
        activation_bytes=node.activation_bytes,
        times=tuple(times),
        update_s=update_s,
        norms=node.num_batch_norms,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    kind = platform.processor() or platform.machine()
    return f"{kind}, {torch.get_num_threads()} threads"
