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
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, final

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
        self._known: weakref.WeakKeyDictionary[LayerGraph, _Known] = (
            weakref.WeakKeyDictionary()
        )
        """Inputs that change no result, by the capture that runs."""

    def known_in(self, graph: LayerGraph) -> set[type]:
        """Return the classes that change no result of a capture."""
        return self._known_of(graph).classes

    def is_known(self, graph: LayerGraph, same: tuple[Any, ...]) -> bool:
        """Return whether it changes no result that some inputs are one tensor.

        See `LayerGraph.one_tensor_as`.
        """
        return same in self._known_of(graph).same

    def _known_of(self, graph: LayerGraph) -> _Known:
        found = self._known.get(graph)
        if found is None:
            found = self._known[graph] = _Known({Tensor, nn.Parameter}, {()})
        return found

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
        given = _tensors_in((args, kwargs))
        if not all(map(len, given)):
            return  # no rows; these classes remain unknown
        known = self._known_of(graph)
        kinds = {type(v) for v in given} - known.classes
        try:
            with self._apart(graph):
                plain_args, plain_kwargs = pytree.tree_map_only(
                    Tensor, _copied, (args, dict(kwargs))
                )
                copies = _tensors_in((plain_args, plain_kwargs))
                trained = [v for v in given if v.requires_grad and not _has_hooks(v)]
                trained = list({id(v): v for v in trained}.values())
                wanted, wanted_grads, of_inputs = self._results(
                    plain_args, plain_kwargs, [*copies, *trained]
                )
                found, grads, of_given = self._results(args, kwargs, trained)
                summed = [
                    _added([of_inputs[id(v)], *_of_copies(v, given, copies, of_inputs)])
                    for v in trained
                ]
                own = [of_given[id(v)] for v in trained]
                effect = ""
                if not _are_same(graph, found, wanted):
                    effect = "changes the result"
                elif not (
                    _are_same(graph, grads, wanted_grads, _largest(wanted_grads))
                    and _are_same(graph, own, summed, _largest(summed))
                ):
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
        known.classes.update(kinds)
        known.same.add(same)

    def _results(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        inputs: list[Tensor],
    ) -> tuple[list[Any], list[Any], dict[int, Tensor]]:
        """Return the outputs, and gradients of parameters and inputs if they are known.

        Those of inputs by the inputs' ids.
        """
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
            needed = [p for p in copies if p.requires_grad]
            tracked = [x for x in inputs if x.requires_grad]
            grads = _gradients(leaves, [*needed, *tracked])
            of_inputs = {id(x): torch.zeros_like(plain(x)) for x in inputs}
            of_inputs |= zip(map(id, tracked), grads[len(needed) :], strict=False)
            return leaves, grads[: len(needed)], of_inputs

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


class _Known(NamedTuple):
    classes: set[type]

    same: set[tuple[Any, ...]]


def _tensors_in(values: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(values) if isinstance(v, Tensor)]


def _has_hooks(tensor: Tensor) -> bool:
    """Return whether hooks would see the gradients that are computed here."""
    return bool(tensor._backward_hooks)  # noqa: SLF001


def _of_copies(
    tensor: Tensor, given: list[Tensor], copies: list[Tensor], grads: dict[int, Tensor]
) -> list[Tensor]:
    """Return the gradients of a tensor's copies."""
    pairs = zip(given, copies, strict=True)
    return [grads[id(copy)] for one, copy in pairs if one is tensor]


def _added(grads: list[Tensor]) -> Tensor:
    return torch.stack([plain(grad) for grad in grads]).sum(0)


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
    return max(
        (float(t.detach().abs().max()) for t in tensors if t.numel()), default=0.0
    )


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
