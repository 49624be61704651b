"""Run one forward: each layer on this rank, with samples moved in between.

# Note [Outputs without a gradient]
Backward ends at a layer that returns integers or a mask. If floats moved to its ranks,
other ranks wait for their gradients. So backward passes through that layer's inputs
from the next layer on the same rank that reads it.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from stretto.burst.activation_transfer import Move, absent, tied
from stretto.burst.dropout import Draws, DropoutDraw, dropouts_of, one_by_one
from stretto.burst.norm import NormSync
from stretto.burst.timings import FORWARD
from stretto.burst.tracing.layers import INPUT, norm_calls
from stretto.burst.tracing.one_row import PlainRows
from stretto.burst.tracing.torch_modules import BatchNorm, Dropout, InstanceNorm
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stretto.burst.activation_transfer import ActivationTransfer
    from stretto.burst.rank_groups import RankGroups, RankRange
    from stretto.burst.schedule import (
        ExecutionPlan,
        LayerExecution,
        LayerStep,
        RankSchedule,
    )
    from stretto.burst.timings import StepClock
    from stretto.burst.tracing.layers import LayerGraph, LayerNode


Held = Tensor | tuple[Tensor, ...]
"""A rank's part of a layer's output: its rows; or, for a layer that it does not run,
the tensors that backward must pass through."""


@final
class Forward:
    """Runs a model's layers on one rank."""

    def __init__(
        self,
        module: nn.Module,
        rank_groups: RankGroups,
        activations: ActivationTransfer,
        clock: StepClock,
        *,
        device: torch.device,
        seed: int,
    ) -> None:
        self._module = module
        self._rank_groups = rank_groups
        self._activations = activations
        self._clock = clock
        self._device = device
        self.draws = Draws(seed, device)
        self._dropouts: dict[LayerGraph, list[Any]] = {}
        self._norms: dict[LayerNode, list[NormSync]] = {}
        self._stands_for: dict[LayerGraph, dict[Any, Any]] = {}
        self._graph: LayerGraph | None = None
        """The graph of the running forward."""
        # Backward passes through it if a rank has no parameters of its own.
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def prepare(
        self, graph: LayerGraph, widths: Mapping[str, RankRange], batch_norm: str
    ) -> None:
        """Prepare a graph's layers."""
        stands: dict[Any, Any] = {}
        self._dropouts[graph] = []
        for node in graph.nodes:
            for name, part in dropouts_of(node.module):
                if part not in stands:
                    stands[part] = DropoutDraw(part, name, self.draws)
                layers = stands[part].layers
                layers[node.name] = len(layers)
                self._dropouts[graph].append(part)
            self._norms[node] = []
            group = self._rank_groups.group(widths[node.name])
            made: dict[str, NormSync] = {}
            called = norm_calls(node)
            for name, part in node.module.named_modules():
                if isinstance(part, InstanceNorm) and "forward" not in vars(part):
                    stands[part] = PlainRows(part)
                if not isinstance(part, BatchNorm) or name not in called:
                    continue  # see Note [Norms of tables]
                if group is not None and batch_norm == "sync":
                    made[name] = NormSync(
                        part,
                        layer=node.name,
                        rank_groups=self._rank_groups,
                        group=group,
                        clock=self._clock,
                    )
                    stands[part] = made[name]
            if made:  # one module may be called twice
                self._norms[node] = [made[name] for name in called]
        self._stands_for[graph] = stands

    def forget(self, graph: LayerGraph) -> None:
        """Drop everything that `prepare` made for a graph."""
        del self._stands_for[graph], self._dropouts[graph]
        for node in graph.nodes:
            del self._norms[node]

    def draws_in(self, plan: ExecutionPlan) -> bool:
        """Return whether a forward draws random numbers, as one process would."""
        return plan.draws and (
            any(part.training and part.p for part in self._dropouts[plan.graph])
            or any(step.is_alone for step in plan.layers)
        )

    def __call__(
        self,
        plan: ExecutionPlan,
        schedule: RankSchedule,
        batch: Tensor,
        *,
        input_needs: bool,
        stamp: bool,
    ) -> Tensor:
        """Return the output for this rank's share.

        ``input_needs``: whether any rank's input needs a gradient; ``stamp``: whether
        layers are timed.
        """
        grad = torch.is_grad_enabled()
        tag = self._activations.next_tags(2 * schedule.num_numbers)
        moves = {
            number: Move(
                self._activations,
                transfer,
                tag=tag + 2 * number,
                layer=layer,
                of_input=number in schedule.input_starts,
            )
            for number, transfer, layer in schedule.moves
        }
        held: dict[str, Held] = {INPUT: batch}
        ways: dict[str, tuple[Tensor, ...]] = {}
        training = self._module.training
        needs = False
        self._graph = plan.graph
        with self._standing(plan.graph):
            first = self._anchor if grad and input_needs else None
            for number in schedule.input_starts:
                moves[number].begin(batch, first)
            for execution in schedule.layers:
                step = execution.step
                needs = grad and (step.trains or input_needs)
                inputs = [
                    held[name] if number is None else moves[number].end()
                    for name, number in execution.takes
                ]
                # See Note [Outputs without a gradient].
                extra = [w for name, _ in execution.takes for w in ways.get(name, ())]
                if needs and not _has_gradient(step.node.output_dtype):
                    ways[step.node.name] = _ways_of([*inputs, tuple(extra)])
                    needs, extra = False, []
                output: Held
                if execution.is_passed:
                    output = _ways_of([*inputs, tuple(extra)]) if needs else ()
                else:
                    if stamp:
                        self._clock.begin(step.node.name, FORWARD)
                    output = self._execute(execution, inputs, tuple(extra), needs)
                    if stamp:
                        self._clock.other()
                        self._clock.stamp(output, step.node.name)
                for name in step.last_of:
                    held.pop(name, None)
                    ways.pop(name, None)
                if execution.starts:
                    output = self._here(output, step, needs)
                    for number in execution.starts:
                        moves[number].begin(output, self._anchor if needs else None)
                held[step.node.name] = output
        if training or plan.draws:
            self.draws.step += 1
        self.draws.samples = None
        if schedule.output_takes is not None:
            output = moves[schedule.output_takes].end()
        else:
            output = self._here(output, step, needs)
        if needs and not output.requires_grad:
            output = tied(output, [self._anchor])
        return output

    def _execute(
        self,
        execution: LayerExecution,
        given: list[Held],
        extra: tuple[Tensor, ...],
        needs: bool,  # noqa: FBT001
    ) -> Tensor:
        """Return a layer's output on one of its ranks; tie it to ``extra`` too."""
        node = execution.step.node
        if not len(execution.samples):
            return self._without(execution.step, [*given, extra], needs)
        inputs: list[Tensor] = given  # type: ignore[assignment]  # samples are tensors
        self.draws.begin(node.name, execution.samples)
        if execution.step.is_alone:
            output = one_by_one(node.module, inputs, node.name, self.draws)
        else:
            output = node.module(*inputs)
        if output.dtype != node.output_dtype or output.shape[1:] != node.output_shape:
            raise StrettoError(
                f"layer {node.name!r} gave {tuple(output.shape[1:])} {output.dtype} "
                f"for a sample where {node.output_shape} {node.output_dtype} was "
                "captured: build BurstParallel again after changing the model's type "
                "or sizes"
            )
        if needs and execution.is_tied:
            behind = [x for x in (*inputs, *extra) if x.requires_grad]
            return tied(output, behind) if behind else output
        return output

    def _without(
        self,
        step: LayerStep,
        inputs: list[Held],
        needs: bool,  # noqa: FBT001
    ) -> Tensor:
        """Return a layer's output on one of its ranks that has no samples of it."""
        if step.node.keeps_state:
            self._advance(step.node)
        norms = [norm for norm in self._norms[step.node] if norm.is_synced]
        for norm in norms:
            norm.absent(self._device)
        return self._here(
            _ways_of(inputs),
            step,
            needs,
            passed=partial(self._pass_by, norms),
        )

    def _advance(self, node: LayerNode) -> None:
        """Let a layer without samples change its state as the other ranks' copies do.

        It runs on one row of zeros, whose output is dropped; batch norms of samples and
        dropouts are skipped.
        """
        assert self._graph is not None  # noqa: S101
        kinds = {n.name: (n.output_shape, n.output_dtype) for n in self._graph.nodes}
        kinds[INPUT] = self._graph.input_shape, self._graph.input_dtype
        rows = [
            torch.zeros((1, *shape), dtype=dtype, device=self._device)
            for shape, dtype in (kinds[name] for name in node.inputs)
        ]
        called = norm_calls(node)
        passed = [
            part
            for name, part in node.module.named_modules()
            if isinstance(part, Dropout)
            or (isinstance(part, BatchNorm) and name in called)
        ]
        was = [vars(part).get("forward") for part in passed]
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            for part in passed:
                part.__dict__["forward"] = _unchanged
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                node.module(*rows)
        finally:
            for part, forward in zip(passed, was, strict=True):
                del part.__dict__["forward"]
                if forward is not None:
                    part.__dict__["forward"] = forward

    def _here(
        self,
        held: Held,
        step: LayerStep,
        needs: bool,  # noqa: FBT001
        *,
        passed: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return a rank's part of a layer's output, as a tensor."""
        if isinstance(held, Tensor):
            return held
        return absent(
            step.node.output_shape,
            step.node.output_dtype,
            self._device,
            [*held, self._anchor] if needs else [],
            passed=passed,
        )

    def _pass_by(self, norms: list[NormSync]) -> None:
        for norm in reversed(norms):
            norm.absent_back(self._device)

    @contextlib.contextmanager
    def _standing(self, graph: LayerGraph) -> Iterator[None]:
        """Replace batch norms and dropouts as the layers' ranks need, for one forward.

        The replacement is an attribute of the module, which takes precedence over its
        class's ``forward``; the user's module is restored afterward.
        """
        stands = self._stands_for[graph]
        for module, stand in stands.items():
            module.__dict__["forward"] = stand
        try:
            yield
        finally:
            for module in stands:
                del module.__dict__["forward"]


def _has_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _unchanged(x: Tensor) -> Tensor:
    return x


def _ways_of(inputs: list[Held]) -> tuple[Tensor, ...]:
    """Return the tensors that backward must pass through behind a layer's inputs."""
    found: dict[int, Tensor] = {}
    for held in inputs:
        for tensor in (held,) if isinstance(held, Tensor) else held:
            if tensor.requires_grad:
                found[id(tensor)] = tensor
    return tuple(found.values())
