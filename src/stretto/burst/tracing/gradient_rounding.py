"""Measure how much rounding changes a layer's gradients.

# Note [Rounding in a backward]
A gradient may be a sum of terms that cancel, so it may be far smaller than what its
backward computed with: the layer norm of a row of equal values multiplies gradients by
1 / sqrt(eps), and those of this row add up to zero. What remains is rounding, which
differs with the number of rows, as the gradients do where samples are mixed.

The rounding is what gradients change by when inputs and the output's gradient change
by one unit in the last place, a few times in random directions. It is never taken for
more than rounding of the largest gradient inside the layer may amount to, because a
backward may also change because it counts its calls. So a limit is far below any
gradient of other samples that matters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from stretto.burst.tracing.layer_runs import has_gradient, largest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Gradients = list[Tensor | None]
"""Gradients of inputs and parameters, in the same order in each run."""

_TIMES = 6
"""Runs with values changed in the last place."""

_MARGIN = 32.0
"""How far rounding may exceed what was measured."""

_MAX_INPUT = 1e3
"""Larger inputs, such as word numbers beside floats, are ignored for rounding."""


@final
class GradientRounding:
    """The rounding of one layer's gradients, see Note [Rounding in a backward].

    Args:
        inputs: The layer's inputs, by name.
        given: The gradient of its output; None without one.
        run: Returns gradients for other inputs and another gradient of the output;
            None: only the usual rounding is needed.
        largest_inside: Returns the largest gradient inside the layer's backward.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        given: Tensor | None,
        run: Callable[[Mapping[str, Tensor], Tensor], Gradients] | None = None,
        largest_inside: Callable[[], float] = float,
    ) -> None:
        self._inputs = inputs
        self._given = given if given is not None and has_gradient(given) else None
        self._run = run
        self._largest_inside = largest_inside
        self._measured: float | None = None

    @property
    def usual(self) -> float:
        """The rounding of sums of terms as large as the output's gradient."""
        return 0.0 if self._given is None else self._of(largest_of(self._given))

    @property
    def measured(self) -> float:
        """The rounding of this layer, if it is more than usual."""
        if self._measured is None:
            self._measured = self._measure()
        return self._measured

    def _of(self, terms: float) -> float:
        given = self._given
        assert given is not None  # noqa: S101
        inputs = max(map(largest_of, self._inputs.values()), default=0.0)
        eps = float(torch.finfo(given.dtype).eps)
        terms *= min(max(1.0, inputs), _MAX_INPUT)
        return 8.0 * eps * terms * math.sqrt(given.numel())

    def _measure(self) -> float:
        given = self._given
        if given is None or self._run is None or not bool(given.isfinite().all()):
            return self.usual
        limit = self._of(self._largest_inside())
        if limit <= self.usual:
            return self.usual
        wanted = self._run(self._inputs, given)
        random = torch.Generator().manual_seed(0)
        most = 0.0
        for _ in range(_TIMES):
            inputs = {n: _moved(x, random) for n, x in self._inputs.items()}
            found = self._run(inputs, _moved(given, random))
            most = max(most, *_differences(wanted, found), 0.0)
        return max(self.usual, min(limit, _MARGIN * most))


def _differences(wanted: Gradients, found: Gradients) -> Iterator[float]:
    for one, two in zip(wanted, found, strict=True):
        if one is not None and two is not None and one.shape == two.shape:
            yield largest_of(one - two)


def _moved(tensor: Tensor, random: torch.Generator) -> Tensor:
    """Return values changed by at most a unit in the last place."""
    if not tensor.is_floating_point():
        return tensor
    eps = float(torch.finfo(tensor.dtype).eps)
    signs = torch.randint(-1, 2, tensor.shape, generator=random).to(tensor)
    return tensor + tensor * signs * eps


def largest_gradient(output: Tensor, backward: Callable[[], object]) -> float:
    """Return the largest finite gradient that is computed between operations.

    Args:
        output: The result whose backward it is.
        backward: Runs that backward.
    """
    found = [0.0]

    def note(grads: tuple[Tensor | None, ...], *_: object) -> None:
        found.extend(largest_of(g) for g in grads if isinstance(g, Tensor))

    ops, undo = [output.grad_fn], []
    seen = set(ops)
    while ops:
        op = ops.pop()
        if op is None:
            continue
        undo.append(op.register_hook(note))
        new = {before for before, _ in op.next_functions} - seen
        seen |= new
        ops += new
    try:
        backward()
    finally:
        for hook in undo:
            hook.remove()
    return max(found)
