"""Run DDP's own set-up with a plan's buckets in place of DDP's rule.

`DistributedDataParallel._ddp_init_helper` asks ``dist`` for a bucket assignment and
builds a ``dist.Reducer`` from it, with arguments that change from release to release.
Instead of writing that call again per release, this module runs the same function with
its own ``dist`` in the function's globals, which answers those two requests and
forwards all others. Nothing outside that one call sees it.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from stretto.errors import PlanMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

_NEEDED = {"dist", "_compute_bucket_assignment_by_size", "Reducer"}


@final
class _Dist:
    """``torch.distributed``, except for the two names that set a Reducer's buckets."""

    def __init__(
        self,
        model: TorchDDP,
        indices: Sequence[Sequence[int]] | None,
        group: dist.ProcessGroup,
    ) -> None:
        self._model = model
        self._indices = None if indices is None else [list(b) for b in indices]
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def _compute_bucket_assignment_by_size(
        self, parameters: list[torch.Tensor], *limits: Any
    ) -> tuple[list[list[int]], list[int]]:
        if self._indices is None:
            rule: Any = getattr(dist, "_compute_bucket_assignment_by_size")  # noqa: B009
            by_rule: tuple[list[list[int]], list[int]] = rule(parameters, *limits)
            return by_rule
        # DDP reverses both lists, because it assigns in order of declaration.
        sizes = [
            sum(parameters[i].numel() * parameters[i].element_size() for i in bucket)
            for bucket in self._indices
        ]
        return self._indices[::-1], sizes[::-1]

    def Reducer(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        mine, base = self._group, self._model.process_group
        swapped = [mine if value is base else value for value in args]
        named = {k: mine if value is base else value for k, value in kwargs.items()}
        if not any(v is mine for v in (*swapped, *named.values())):
            raise _unsupported("Reducer takes no process group")
        reducer: Any = getattr(dist, "Reducer")  # noqa: B009
        return reducer(*swapped, **named)


def build_reducer(
    model: TorchDDP,
    indices: Sequence[Sequence[int]] | None,
    group: dist.ProcessGroup,
    arguments: tuple[Any, ...],
) -> None:
    """Give ``model`` a Reducer with exactly these buckets, in this order.

    ``indices`` are positions in DDP's parameter list, ``None`` for the buckets of DDP's
    rule; ``group`` is the Reducer's process group; ``arguments`` are those of
    ``_ddp_init_helper``.

    Raises:
        PlanMismatch: this version of PyTorch builds its Reducer differently.
    """
    helper: Any = TorchDDP._ddp_init_helper  # noqa: SLF001
    code = helper.__code__
    if helper.__closure__ is not None or not _NEEDED.issubset(code.co_names):
        raise _unsupported("DDP sets its Reducer up in another way")
    borrowed = types.FunctionType(
        code,
        {**helper.__globals__, "dist": _Dist(model, indices, group)},
        helper.__name__,
        helper.__defaults__,
    )
    borrowed(model, *arguments)


def _unsupported(what: str) -> PlanMismatch:
    return PlanMismatch(
        f"plans are not supported with PyTorch {torch.__version__}: {what}, unlike "
        "2.11 to 2.15. Install one of these, or pass plan=None for plain DDP."
    )
