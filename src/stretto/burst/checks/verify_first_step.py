"""`BurstParallel(verify=True)`: compare one small step on the ranks with one process.

Every rank computes a few random rows with the module itself, then all compute them with
the captured layers on the layers' ranks. Outputs, the gradients of the layers that a
rank runs, and these layers' buffers after the step must be the same except for
rounding. Meanwhile parameters are perturbed and random draws are constants, as in
`stretto.burst.tracing.trial`; everything is restored afterward.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from stretto.burst.memory import in_memory
from stretto.burst.tracing.caches import keep_attributes
from stretto.burst.tracing.fakes import swapped
from stretto.burst.tracing.layer_runs import edges_of, largest_of
from stretto.burst.tracing.torch_modules import BatchNorm
from stretto.burst.tracing.trial import (
    ConstantDraws,
    RandomInputs,
    tolerance_of,
    without_inner_dropout,
)
from stretto.errors import SpecError, StrettoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stretto.burst.dropout import Draws
    from stretto.burst.rank_groups import RankGroups
    from stretto.burst.tracing.layers import LayerGraph, LayerNode

SEEDS = (1, 2)
"""A step is wrong only if it exceeds both: rounding may flip a unit in one of them."""

_MIN_RATIO = 1e-2
"""Relative to the model's largest gradient; smaller gradients may be mere rounding."""

_ROUNDED, _MAX_ROUNDED = 4.0, 1e-3
"""Changes of parameters by which rounding is estimated, in units of their last bit; and
the limit of such estimates, relative to the model's largest gradient."""


def require_comparable(module: nn.Module, graph: LayerGraph, batch_norm: str) -> None:
    """Require that one process with the whole batch computes the same as the ranks.

    Raises:
        SpecError: batch norms use the statistics of each rank's own samples, or forward
            would not use copies of parameters.
    """
    for node in graph.nodes if batch_norm != "sync" else ():
        if any(isinstance(part, BatchNorm) for part in node.module.modules()):
            raise SpecError(
                f"verify=True compares with one process, and layer {node.name!r} has a "
                'batch norm that batch_norm="local" computes differently on purpose: '
                'use batch_norm="sync", or leave verify out'
            )
    for name, parameter in module.named_parameters():
        if id(parameter) in graph.held_elsewhere:
            raise SpecError(
                f"verify=True can't compare {graph.name}: its forward reads the "
                f"parameter {name!r} from a container, where no copy can replace it. "
                "Leave out verify=True, or read the parameter from its module"
            )


@final
class SmallStep:
    """A small step's rows, and one process's results for them.

    Args:
        module: with equal parameters and buffers on all ranks.
        graph: its layers.
        own: the layers that this rank runs.
        rank_groups: the ranks' connections.
        seed: the same on all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: LayerGraph,
        own: Sequence[LayerNode],
        rank_groups: RankGroups,
        seed: int,
    ) -> None:
        self._module, self._graph, self._own = module, graph, own
        self._rank_groups = rank_groups
        self._numbers = RandomInputs(seed, values=graph.results.trial_values)
        self._twins: dict[int, Tensor] = {}
        self._packed_rows: Tensor | None = None
        self._roundings: dict[int, float] | None = None
        self._output: Tensor | None = None
        self._cotangent: Tensor | None = None
        ranks = rank_groups.ranks
        self._shares = [2 + (rank == ranks.size - 1) for rank in range(ranks.size)]
        start = sum(self._shares[: ranks.rank])
        self._mine = slice(start, start + self._shares[ranks.rank])

    def difference(
        self, examples: Sequence[Tensor], draws: Draws, run: Callable[[Tensor], Tensor]
    ) -> str:
        """Return what differs from one process, or nothing. Collective.

        Args:
            examples: the model's input tensors, from which rows are made.
            draws: the executor's, to hold its dropout constant.
            run: the executor's forward of this rank's packed rows.

        Raises:
            CommTimeout: a rank was lost.
        """
        device = examples[0].device
        devices = [device] if device.type == "cuda" else []
        # A forward of another number of samples is recorded with its own draws.
        self._graph.require_count(sum(self._shares))
        packed = self._packed(examples)
        with (
            torch.random.fork_rng(devices=devices),
            keep_attributes(self._module),
            self._graph.caches_restored(),
            without_inner_dropout(self._module),
            self._changed_values(),
            self._graph.ambient.set(device),
            draws.still(),
        ):
            try:
                self._run_alone(packed)
                self._packed_rows = packed
                trouble = ""
            except StrettoError:
                raise
            except Exception as error:  # noqa: BLE001 - becomes one error on all ranks
                first = (str(error).splitlines() or [""])[0]
                trouble = f"one process fails: {type(error).__name__}: {first}"
            if any(row[0] for row in self._rank_groups.exchange([int(bool(trouble))])):
                return trouble
            with ConstantDraws():
                output = run(packed[self._mine])
                if self._cotangent is not None:
                    # The executor weights a rank's gradients by its share of the batch.
                    weight = sum(self._shares) / max(1, len(output))
                    _backward(output, self._cotangent[self._mine] * weight)
            return self._compared(output)

    def _packed(self, examples: Sequence[Tensor]) -> Tensor:
        """Return the rows of the first rank's example, the same on all ranks."""
        number = sum(self._shares)
        rows = self._numbers.rows([e.detach() for e in examples], number)
        packed = in_memory(self._graph.arguments.packing.pack(rows))
        with self._rank_groups.guard("sending the rows to verify"):
            self._rank_groups.broadcast(packed, 0)
        return packed

    def _run_alone(self, packed: Tensor) -> None:
        with swapped(self._module.named_modules(), self._twin):
            wanted = self._forward(packed)
            if wanted.requires_grad:
                self._cotangent = self._numbers.normal(wanted.shape, wanted)
                packing = self._graph.results.packing
                assert packing is not None  # noqa: S101
                for part in packing.parts if not packing.is_one else ():
                    if not part.dtype.is_floating_point:
                        self._cotangent[:, part.start : part.start + part.length] = 0
                with ConstantDraws():  # a checkpoint draws again
                    _backward(wanted, self._cotangent)
            self._output = wanted.detach()

    def _forward(self, packed: Tensor) -> Tensor:
        """Return the packed output of the user's module."""
        args, kwargs = self._graph.arguments.unpack(packed)
        with ConstantDraws():
            output = self._module.forward(*args, **kwargs)
        return self._graph.results.packed(output, len(packed))

    def _twin(self, tensor: Tensor) -> Tensor:
        made = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        self._twins[id(tensor)] = made
        return made

    def _compared(self, output: Tensor) -> str:
        wanted = self._output
        assert wanted is not None  # noqa: S101
        limit = self._limit(wanted)
        differs = _differs(output.detach(), wanted[self._mine], largest_of(wanted))
        if differs > limit:
            return f"the output differs by {differs:.2g} of its largest value"
        grads = [t.grad for t in self._twins.values() if t.grad is not None]
        floor = _MIN_RATIO * max((largest_of(grad) for grad in grads), default=0.0)
        for node in self._own:
            for name, parameter in node.module.named_parameters():
                truth = self._twins[id(parameter)].grad
                found = parameter.grad
                if truth is None and found is None:
                    continue
                if truth is None or found is None:
                    which = "no gradient" if found is None else "a gradient"
                    return f"{name!r} of layer {node.name!r} has {which}"
                largest = max(floor, largest_of(truth))
                differs = _differs(found, truth, largest)
                limit = self._limit(found)
                if differs > limit and differs <= limit + _MAX_ROUNDED / _MIN_RATIO:
                    rounding = self._rounding_of(parameter)
                    most = _MAX_ROUNDED / _MIN_RATIO * floor
                    limit += min(_ROUNDED * rounding, most) / (largest or 1e-30)
                if differs > limit:
                    return (
                        f"the gradient of {name!r} in layer {node.name!r} differs by "
                        f"{differs:.2g} of its largest value"
                    )
            for name, buffer in node.module.named_buffers():
                truth = self._twins.get(id(buffer))
                if truth is None:
                    continue
                differs = _differs(buffer, truth, largest_of(truth))
                if differs > self._limit(buffer):
                    return (
                        f"buffer {name!r} of layer {node.name!r} differs by "
                        f"{differs:.2g} of its largest value after the step"
                    )
        return ""

    def _rounding_of(self, parameter: Tensor) -> float:
        """Return how much a gradient changes with the last bits of parameters.

        Where values cancel, as the gradient of a bias before a batch norm does, only
        rounding is left, which differs for a layer that runs sample by sample.
        """
        if self._roundings is None:
            self._roundings = {}
            with contextlib.suppress(Exception):  # it computed before
                self._roundings = self._estimated()
        return self._roundings.get(id(parameter), 0.0)

    def _estimated(self) -> dict[int, float]:
        changed: dict[int, Tensor] = {}

        def other(tensor: Tensor) -> Tensor:
            made = tensor.detach().clone()
            if isinstance(tensor, nn.Parameter):
                if made.is_floating_point():
                    step = _ROUNDED * torch.finfo(made.dtype).eps
                    made *= 1 + step * self._numbers.normal(made.shape, made)
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            changed[id(tensor)] = made
            return made

        assert self._packed_rows is not None  # noqa: S101
        assert self._cotangent is not None  # noqa: S101
        with swapped(self._module.named_modules(), other):
            found = self._forward(self._packed_rows)
            with ConstantDraws():
                _backward(found, self._cotangent)
        return {
            number: largest_of(one.grad - truth)
            for number, one in changed.items()
            if one.grad is not None and (truth := self._twins[number].grad) is not None
        }

    def _limit(self, tensor: Tensor) -> float:
        return tolerance_of(self._graph.precision_of(tensor.dtype))

    @contextlib.contextmanager
    def _changed_values(self) -> Iterator[None]:
        """Perturb parameters and remove their gradients and hooks temporarily."""
        parameters = list(self._module.parameters())
        every = [*parameters, *self._module.buffers()]
        with torch.no_grad():
            values = [tensor.detach().clone() for tensor in every]
        kept = [(p, p.grad, _user_hooks(p)) for p in parameters]
        try:
            for parameter in parameters:
                parameter.grad = None
                for held, hooks in _user_hooks(parameter):
                    for key in hooks:
                        del held[key]
                # By the values of some, forward decides what it runs.
                is_free = id(parameter) not in self._graph.decided
                if is_free and parameter.is_floating_point():
                    with torch.no_grad():
                        parameter.add_(self._numbers.noise_for(parameter.detach()))
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(every, values, strict=True):
                    tensor.copy_(value)
            for parameter, grad, every_hooks in kept:
                parameter.grad = grad
                for held, hooks in every_hooks:
                    ours = dict(held)
                    held.clear()
                    # Keys count up, so they preserve the order.
                    held.update(sorted({**ours, **hooks}.items()))


def _backward(output: Tensor, gradient: Tensor) -> None:
    torch.autograd.backward(edges_of([output]), [gradient])


def _user_hooks(parameter: Tensor) -> list[tuple[Any, dict[int, Any]]]:
    """Return a parameter's hooks except the executor's, with what holds them."""
    found = []
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        held = getattr(parameter, name, None)
        if held:
            theirs = {
                key: hook
                for key, hook in held.items()
                if not getattr(hook, "is_stretto", False)
            }
            found.append((held, theirs))
    return found


def _differs(found: Tensor, wanted: Tensor, largest: float) -> float:
    """Return the largest relative difference; infinite if they can't be compared."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if found.is_complex():
        found = torch.view_as_real(found.detach().resolve_conj())
        wanted = torch.view_as_real(wanted.detach().resolve_conj())
    if not found.is_floating_point():
        return 0.0 if torch.equal(found, wanted) else float("inf")
    if not found.numel():
        return 0.0
    one, two = found.detach().double(), wanted.detach().double()
    same = (one == two) | (torch.isnan(one) & torch.isnan(two))
    apart = torch.where(same, 0.0, (one - two).abs())
    worst = float(apart.nan_to_num(nan=float("inf")).max())
    return worst / (largest or 1e-30)
