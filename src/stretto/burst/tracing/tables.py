"""Find batch norms whose values do not come from the samples.

# Note [Norms of tables]
A model may normalize a table, such as a codebook: each rank has all of its values, so
the statistics are those of one process without communication, and joining them would
count each value once per rank. Such a norm runs unchanged, and each rank of its layer
makes the same updates of the running statistics, whatever samples it has.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from stretto.burst.tracing.comparing import BATCHES, follows
from stretto.burst.tracing.source_lines import line_of_forward
from stretto.burst.tracing.torch_modules import BatchNorm
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator


@final
class NormInputs:
    """Sizes of what batch norms are called with, by the number of samples."""

    def __init__(self) -> None:
        self._sizes: dict[int, dict[int, list[int]]] = {}

    @contextlib.contextmanager
    def noted(self, batch: int) -> Iterator[None]:
        """Note the calls of a forward with a number of samples."""
        sizes: dict[int, list[int]] = defaultdict(list)
        self._sizes[batch] = sizes

        def note(module: nn.Module, given: Any) -> None:
            if isinstance(module, BatchNorm) and given and isinstance(given[0], Tensor):
                with torch._C.DisableTorchFunction():  # noqa: SLF001 - not forward's
                    sizes[id(module)].append(given[0].numel())

        vars(note)["is_stretto"] = True
        handle = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def tables(self, module: nn.Module) -> frozenset[str]:
        """Return the names of norms whose input is the same for all samples.

        Raises:
            SpecError: a norm is called with such an input and with samples.
        """
        found = set()
        first, other = (self._sizes.get(batch, {}) for batch in BATCHES)
        for name, part in module.named_modules():
            sizes = zip(first.get(id(part), ()), other.get(id(part), ()), strict=False)
            kinds = {follows(one, two) is False for one, two in sizes}
            if len(kinds) > 1:
                raise SpecError(
                    f"{line_of_forward(module)}batch norm {name!r} normalizes samples "
                    "and a tensor that is the same for all: its statistics of both "
                    "can't be computed by several ranks. Use a norm for each"
                )
            if kinds == {True}:
                found.add(name)
        return frozenset(found)
