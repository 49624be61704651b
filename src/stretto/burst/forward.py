"""One forward: each layer's turn on this rank, with samples moved in between."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from stretto.burst.clock import FORWARD
from stretto.burst.dropout import Draws, DropoutDraw, dropouts_of, one_by_one
from stretto.burst.graph import INPUT, norm_calls
from stretto.burst.norm import BatchNorm, NormSync
from stretto.burst.redistribute import Move, absent, tied
from stretto.burst.steps import types_of
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stretto.burst.clock import StepClock
    from stretto.burst.course import Course, Turn
    from stretto.burst.graph import LayerGraph
    from stretto.burst.links import Links, Width
    from stretto.burst.redistribute import Mover
    from stretto.burst.steps import LayerStep, Steps
    from stretto.burst.sync import GradientSync


Held = Tensor | tuple[Tensor, ...]
"""What a rank holds of a layer's output: its rows; or, of a layer that it passes over,
what backward has to come by."""


@final
class Forward:
    """Runs a model's layers on one rank."""

    def __init__(
        self,
        module: nn.Module,
        links: Links,
        mover: Mover,
        clock: StepClock,
        *,
        device: torch.device,
        seed: int,
    ) -> None:
        self._module = module
        self._links = links
        self._mover = mover
        self._clock = clock
        self._device = device
        self.draws = Draws(seed)
        self.sync: GradientSync | None = None
        self._norms: dict[str, list[NormSync]] = {}
        self._stands_for: dict[Any, Any] = {}
        self._types: dict[tuple[int, torch.dtype], dict[str, torch.dtype]] = {}
        # Backward passes through it where a rank has no parameters of its own.
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def prepare(
        self, graph: LayerGraph, widths: Mapping[str, Width], batch_norm: str
    ) -> None:
        """Makes ready for a graph's layers."""
        for node in graph.nodes:
            for name, part in dropouts_of(node.module):
                self._stands_for[part] = DropoutDraw(part, name, self.draws)
            self._norms[node.name] = []
            group = self._links.group(widths[node.name])
            made: dict[str, NormSync] = {}
            for name, part in node.module.named_modules():
                if isinstance(part, BatchNorm):
                    self._stands_for.pop(part, None)
                    if group is not None and batch_norm == "sync":
                        made[name] = NormSync(
                            part,
                            layer=node.name,
                            links=self._links,
                            group=group,
                            clock=self._clock,
                        )
                        self._stands_for[part] = made[name]
            if made:  # one module may be called twice
                self._norms[node.name] = [made[name] for name in norm_calls(node)]

    def __call__(
        self,
        steps: Steps,
        course: Course,
        batch: Tensor,
        *,
        input_needs: bool,
        stamp: bool,
    ) -> Tensor:
        """The output for this rank's share.

        ``input_needs``: whether any rank's input needs a gradient; ``stamp``: whether
        layers are timed.
        """
        grad = torch.is_grad_enabled()
        types = self._types_of(steps)
        tag = self._mover.next_tags(2 * course.num_numbers)
        moves = {
            number: Move(self._mover, transfer, tag=tag + 2 * number, layer=layer)
            for number, transfer, layer in course.moves
        }
        held: dict[str, Held] = {INPUT: batch}
        training = self._module.training
        needs = False
        with self._standing():
            first = self._anchor if grad and input_needs else None
            for number in course.input_starts:
                moves[number].begin(batch, first)
            for turn in course.turns:
                step = turn.step
                needs = grad and (step.trains or input_needs)
                inputs = [
                    held[name] if number is None else moves[number].end()
                    for name, number in turn.takes
                ]
                output: Held
                if turn.is_passed:
                    output = _ways_of(inputs)
                else:
                    if stamp:
                        self._clock.begin(step.node.name, FORWARD)
                    output = self._turn(turn, inputs, needs, types)
                    if stamp:
                        self._clock.other()
                        self._clock.stamp(output, step.node.name)
                for name in step.last_of:
                    held.pop(name, None)
                if turn.starts:
                    output = self._here(output, step, needs, types)
                    for number in turn.starts:
                        moves[number].begin(output, self._anchor if needs else None)
                held[step.node.name] = output
        if training or steps.draws:
            self.draws.step += 1
        self.draws.samples = None
        if course.output_takes is not None:
            output = moves[course.output_takes].end()
        else:
            output = self._here(output, step, needs, types)
        if needs and not output.requires_grad:
            output = tied(output, [self._anchor])
        return output

    def _turn(
        self,
        turn: Turn,
        given: list[Held],
        needs: bool,  # noqa: FBT001
        types: Mapping[str, torch.dtype],
    ) -> Tensor:
        """A layer's output on one of its ranks."""
        node = turn.step.node
        if not len(turn.samples):
            return self._without(turn.step, given, needs, types)
        inputs: list[Tensor] = given  # type: ignore[assignment]  # samples are tensors
        self.draws.samples = turn.samples
        if turn.step.is_alone:
            output = one_by_one(node.module, inputs, node.name, self.draws)
        else:
            output = node.module(*inputs)
        if output.dtype != types[node.name] or output.shape[1:] != node.output_shape:
            raise StrettoError(
                f"layer {node.name!r} gave {tuple(output.shape[1:])} {output.dtype} "
                f"for a sample where {node.output_shape} {types[node.name]} was "
                "captured: build the model anew after changing its type or sizes"
            )
        if needs and turn.is_tied:
            behind = [x for x in inputs if x.requires_grad]
            return tied(output, behind) if behind else output
        return output

    def _without(
        self,
        step: LayerStep,
        inputs: list[Held],
        needs: bool,  # noqa: FBT001
        types: Mapping[str, torch.dtype],
    ) -> Tensor:
        """A layer's output on one of its ranks that has no samples of it."""
        norms = [norm for norm in self._norms[step.node.name] if norm.is_synced]
        for norm in norms:
            norm.absent(self._device)
        return self._here(
            _ways_of(inputs),
            step,
            needs,
            types,
            passed=partial(self._pass_by, step.node.name, norms),
        )

    def _here(
        self,
        held: Held,
        step: LayerStep,
        needs: bool,  # noqa: FBT001
        types: Mapping[str, torch.dtype],
        *,
        passed: Callable[[], None] | None = None,
    ) -> Tensor:
        """What a rank holds of a layer's output, as a tensor."""
        if isinstance(held, Tensor):
            return held
        return absent(
            step.node.output_shape,
            types[step.node.name],
            self._device,
            [*held, self._anchor] if needs else [],
            passed=passed,
        )

    def _pass_by(self, layer: str, norms: list[NormSync]) -> None:
        for norm in reversed(norms):
            norm.absent_back(self._device)
        assert self.sync is not None  # noqa: S101
        self.sync.absent(layer)

    def _types_of(self, steps: Steps) -> Mapping[str, torch.dtype]:
        kind = self._device.type
        graph = steps.graph
        if not torch.is_autocast_enabled(kind):
            return {node.name: node.output_dtype for node in graph.nodes}
        key = (id(graph), torch.get_autocast_dtype(kind))
        if key not in self._types:
            self._types[key] = types_of(graph)
        return self._types[key]

    @contextlib.contextmanager
    def _standing(self) -> Iterator[None]:
        """Batch norms and dropouts behave as the layers' ranks need, for one forward.

        As an attribute of the module, which goes before its class's ``forward``: the
        user's module is the same again afterwards.
        """
        for module, stand in self._stands_for.items():
            module.__dict__["forward"] = stand
        try:
            yield
        finally:
            for module in self._stands_for:
                del module.__dict__["forward"]


def _ways_of(inputs: list[Held]) -> tuple[Tensor, ...]:
    """What backward has to come by behind a layer's inputs, each once."""
    found: dict[int, Tensor] = {}
    for held in inputs:
        for tensor in (held,) if isinstance(held, Tensor) else held:
            if tensor.requires_grad:
                found[id(tensor)] = tensor
    return tuple(found.values())
