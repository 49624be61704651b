"""Inputs' classes and identity must not change the result.

Layers compute with plain tensors, while a class such as one for images with metadata
runs its own ``__torch_function__`` around each operation of one process. So when the
first input of a class arrives, the module computes it twice, with and without the
class, and both results must be the same.

Layers also compute with other tensors than a call's. So when a call first passes one
tensor twice, or one that forward reads elsewhere, the module computes it with copies
too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stretto.burst.boundary import plain
from stretto.burst.tracing.caches import keep_attributes
from stretto.burst.tracing.fakes import swapped
from stretto.burst.tracing.source_lines import line_of_forward
from stretto.burst.tracing.trial import tolerance_of
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from stretto.burst.checks.stale_guard import StaleParameterGuard
    from stretto.burst.tracing.layers import LayerGraph


@final
class InputClasses:
    """The classes of one model's inputs."""

    def __init__(self, module: nn.Module, stale_guard: StaleParameterGuard) -> None:
        self._module = module
        self._stale_guard = stale_guard
        self.known: set[type] = {Tensor, nn.Parameter}
        """Those that change no result."""
        self.known_same: set[tuple[Any, ...]] = {()}
        """Which inputs may be one tensor, see `LayerGraph.one_tensor_as`."""

    def require_no_effect(
        self,
        graph: LayerGraph,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        same: tuple[Any, ...],
    ) -> None:
        """Require that inputs' classes and identity change no result, on this rank.

        Args:
            graph: the capture that runs.
            args: of the call.
            kwargs: of the call.
            same: which inputs are one tensor.

        Raises:
            StrettoError: they do.
        """
        given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        if not all(map(len, given)):
            return  # no rows; these classes remain unknown
        kinds = {type(v) for v in given} - self.known
        try:
            with self._apart(graph):
                plain_args, plain_kwargs = pytree.tree_map_only(
                    Tensor, _copied, (args, dict(kwargs))
                )
                wanted, wanted_grads = self._results(plain_args, plain_kwargs)
                found, grads = self._results(args, kwargs)
                effect = ""
                if not _are_same(graph, found, wanted):
                    effect = "changes the result"
                elif not _are_same(graph, grads, wanted_grads, _largest(wanted_grads)):
                    effect = "changes the gradients"
        except Exception as exc:  # noqa: BLE001 - of the program's class
            first = (str(exc).splitlines() or [""])[0]
            effect = f"causes an error ({type(exc).__name__}: {first})"
        if effect and not kinds:
            number, other = same[0]
            where = f"{other!r}" if isinstance(other, str) else f"input {other}"
            raise StrettoError(
                f"{line_of_forward(self._module)}input {number} is the same tensor as "
                f"{where}, which {effect} in forward of {type(self._module).__name__}, "
                "whose layers compute with other tensors of equal values: pass a copy "
                "(x.clone()), or decide by an argument"
            )
        if effect:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise StrettoError(
                f"an input has the class {names}, which {effect} in forward of "
                f"{type(self._module).__name__}, whose layers compute with plain "
                "tensors: convert it to a plain tensor before calling the burst model"
            )
        self.known |= kinds
        self.known_same.add(same)

    def _results(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the outputs, and the gradients of parameters where they are known."""
        torch.manual_seed(0)
        copies: list[Tensor] = []

        def copy_of(tensor: Tensor) -> Tensor:
            made = tensor.detach().clone()
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
                copies.append(made)
            return made

        with swapped(self._module.named_modules(), copy_of):
            found = self._module.forward(*args, **kwargs)
            leaves = [
                plain(v) if isinstance(v, Tensor) else v
                for v in pytree.tree_leaves(found)
            ]
            return leaves, _gradients(leaves, [p for p in copies if p.requires_grad])

    @contextlib.contextmanager
    def _apart(self, graph: LayerGraph) -> Iterator[None]:
        """Leave the model and the program's random numbers as they are."""
        device = graph.arguments.device
        devices = [device] if device.type == "cuda" else []
        with (
            self._stale_guard.opened(),
            torch.random.fork_rng(devices=devices),
            keep_attributes(self._module),
            graph.caches_restored(),
            _single_rows_normalized(),
        ):
            yield


@contextlib.contextmanager
def _single_rows_normalized() -> Iterator[None]:
    """Let batch norms compute a rank's only sample: the batch has more."""
    functional: Any = nn.functional
    verify = functional._verify_batch_size  # noqa: SLF001
    functional._verify_batch_size = lambda _size: None  # noqa: SLF001
    try:
        yield
    finally:
        functional._verify_batch_size = verify  # noqa: SLF001


def _copied(tensor: Tensor) -> Tensor:
    made = plain(tensor).detach().clone()
    return made.requires_grad_(tensor.requires_grad)


def _gradients(outputs: list[Any], parameters: list[Tensor]) -> list[Any]:
    tracked = [v for v in outputs if isinstance(v, Tensor) and v.requires_grad]
    if not tracked or not parameters:
        return []
    weights = [
        torch.linspace(0.5, 1.5, v.numel(), dtype=v.dtype, device=v.device).view_as(v)
        for v in tracked
    ]
    try:
        grads = torch.autograd.grad(tracked, parameters, weights, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant=True" in str(error):
            return []
        raise
    return [
        torch.zeros_like(p) if g is None else g.to_dense()
        for p, g in zip(parameters, grads, strict=True)
    ]


def _are_same(
    graph: LayerGraph, found: list[Any], wanted: list[Any], largest: float = 0.0
) -> bool:
    return len(found) == len(wanted) and all(
        _is_same(graph, a, b, largest) for a, b in zip(found, wanted, strict=True)
    )


def _largest(tensors: Iterable[Tensor]) -> float:
    return max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)


def _is_same(graph: LayerGraph, found: Any, wanted: Any, largest: float) -> bool:
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        return not isinstance(wanted, Tensor) and not isinstance(found, Tensor)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if wanted.is_complex():
        found, wanted = torch.view_as_real(found), torch.view_as_real(wanted)
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    limit = tolerance_of(graph.precision_of(wanted.dtype))
    largest = max(largest, _largest([wanted[wanted.isfinite()]]))
    return torch.allclose(found, wanted, rtol=0.0, atol=limit * largest, equal_nan=True)
