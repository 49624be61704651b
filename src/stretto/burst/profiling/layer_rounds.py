"""Rounds of steps that mark where each layer begins and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from stretto.burst.tracing.layers import INPUT, LayerGraph
from stretto.measure.clocks import clock_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.measure.clocks import AbstractClock

Loss = Callable[[Any], Tensor]


@final
@dataclass
class LayerRounds:
    """Forward and backward times of layers and of the whole, by samples and round."""

    graph: LayerGraph

    whole: Callable[[Tensor], Tensor] | None

    loss: Loss

    calls: dict[tuple[str, int], Callable[..., Tensor]] = field(default_factory=dict)
    """Layers replayed as CUDA graphs, by name and samples."""

    layers: dict[tuple[str, int], list[tuple[float, float]]] = field(
        default_factory=dict
    )

    wholes: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def run(self, count: int, rows: Tensor, *, keep: bool) -> None:
        """Run one step by layers and one whole step."""
        clock = clock_for(rows.device)
        marks = self._by_layers(clock, count, rows)
        _drop_gradients(self.graph)
        whole = None
        if self.whole is not None:
            whole = _timed_step(clock, self.whole, self.loss, rows)
            _drop_gradients(self.graph)
        if not keep:
            return
        for name, (forward, backward) in marks.items():
            pair = (clock.seconds(*forward), clock.seconds(*backward))
            self.layers.setdefault((name, count), []).append(pair)
        if whole is not None:
            self.wholes.setdefault(count, []).append(whole)

    def spread_ratio(self, count: int) -> float:
        """Return the distance between the whole steps' quartiles over their median."""
        totals = [sum(pair) for pair in self.wholes[count]]
        low, _, high = quantiles(totals, n=4)
        return (high - low) / median(totals)

    def closest(self, number: int) -> LayerRounds:
        """Return the given number of rounds whose whole steps are closest together.

        Other programs only ever make a round longer, and each by another amount, so
        undisturbed rounds are the ones that agree.
        """
        layers, wholes = {}, {}
        for count, pairs in self.wholes.items():
            totals = [sum(pair) for pair in pairs]
            order = sorted(range(len(totals)), key=totals.__getitem__)
            widths = [
                totals[last] - totals[first]
                for first, last in zip(order, order[number - 1 :], strict=False)
            ]
            start = widths.index(min(widths))
            kept = sorted(order[start : start + number])
            wholes[count] = [pairs[i] for i in kept]
            for key, times in self.layers.items():
                if key[1] == count:
                    layers[key] = [times[i] for i in kept]
        return replace(self, layers=layers, wholes=wholes)

    def layer_s(self, name: str, count: int) -> tuple[float, float]:
        """Return medians of forward and backward."""
        return _medians(self.layers[name, count])

    def whole_s(self, count: int) -> tuple[float, float]:
        """Return medians of forward and backward of the whole step."""
        return _medians(self.wholes[count])

    def _by_layers(
        self, clock: AbstractClock, count: int, rows: Tensor
    ) -> dict[str, tuple[tuple[Any, Any], tuple[Any, Any]]]:
        graph = self.graph
        outputs: dict[str, Tensor] = {INPUT: rows}
        given: dict[str, list[Tensor]] = {}
        forward: dict[str, tuple[Any, Any]] = {}
        for node in graph.nodes:
            given[node.name] = [_cut(outputs[name]) for name in node.inputs]
            call = self.calls.get((node.name, count), node.module)
            start = clock.mark()
            output = call(*given[node.name])
            if node.name == graph.output:
                output = self.loss(output)
            forward[node.name] = (start, clock.mark())
            outputs[node.name] = output
        gradients: dict[str, Tensor | None] = {graph.output: None}
        marks = {}
        for node in reversed(graph.nodes):
            start = clock.mark()
            if outputs[node.name].requires_grad:
                # The inputs are leaves here; their .grad receives the gradient.
                torch.autograd.backward(outputs[node.name], gradients[node.name])
            for name, tensor in zip(node.inputs, given[node.name], strict=True):
                if tensor.grad is not None:
                    had = gradients.get(name)
                    gradients[name] = tensor.grad if had is None else had + tensor.grad
            marks[node.name] = (forward[node.name], (start, clock.mark()))
        return marks

    def record_graphs(self, rows: Mapping[int, Tensor]) -> None:
        """Record each layer's kernels for each number of samples."""
        for count, tensor in rows.items():
            values = {INPUT: tensor}
            for node in self.graph.nodes:
                inputs = tuple(_cut(values[name]) for name in node.inputs)
                # With gradients: what is recorded has those of the inputs that need
                # one, as in a step.
                output = node.module(*inputs)
                needs = output.requires_grad
                # Its graph must be gone: nodes that sum gradients would stay on this
                # stream, which a recording may not wait for.
                values[node.name] = output.detach().requires_grad_(needs)
                del output
                alone = _Alone(node.module)
                torch.cuda.make_graphed_callables(alone, inputs)
                self.calls[node.name, count] = alone


@final
class _Alone(nn.Module):
    """A layer in a module of its own, which recording may change."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(*inputs)
        return out


def _cut(tensor: Tensor) -> Tensor:
    """Return the tensor as a layer's input at which its backward ends."""
    return tensor.detach().requires_grad_(
        tensor.requires_grad and tensor.is_floating_point()
    )


def _drop_gradients(graph: LayerGraph) -> None:
    for node in graph.nodes:
        for parameter in node.module.parameters():
            parameter.grad = None


def _timed_step(
    clock: AbstractClock, whole: Callable[[Tensor], Tensor], loss: Loss, rows: Tensor
) -> tuple[float, float]:
    start = clock.mark()
    value = loss(whole(rows))
    middle = clock.mark()
    value.backward()
    end = clock.mark()
    return clock.seconds(start, middle), clock.seconds(middle, end)


def _medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
