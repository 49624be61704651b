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
    from collections.abc import Iterator, Mapping

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
            with self._apart(graph), torch.no_grad():
                plain_args, plain_kwargs = pytree.tree_map_only(
                    Tensor, _copied, (args, dict(kwargs))
                )
                wanted = self._outputs(plain_args, plain_kwargs)
                found = self._outputs(args, kwargs)
                is_same = len(found) == len(wanted) and all(
                    _is_same(graph, a, b) for a, b in zip(found, wanted, strict=True)
                )
            effect = "" if is_same else "changes the result"
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

    def _outputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        torch.manual_seed(0)
        with swapped(self._module.named_modules(), _copy_of):
            found = self._module.forward(*args, **kwargs)
        leaves = pytree.tree_leaves(found)
        return [plain(v) if isinstance(v, Tensor) else v for v in leaves]

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
        ):
            yield


def _copied(tensor: Tensor) -> Tensor:
    return plain(tensor).clone()


def _copy_of(tensor: Tensor) -> Tensor:
    made = tensor.detach().clone()
    return nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made


def _is_same(graph: LayerGraph, found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        return not isinstance(wanted, Tensor) and not isinstance(found, Tensor)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    limit = tolerance_of(graph.precision_of(wanted.dtype))
    usual = wanted[wanted.isfinite()]
    largest = float(usual.abs().max()) if usual.numel() else 0.0
    return torch.allclose(found, wanted, rtol=0.0, atol=limit * largest, equal_nan=True)
