"""PyTorch's PowerSGD hook, with its errors kept by parameter.

# Note [What PyTorch's hook keeps by bucket]
``powerSGD_hook`` keeps its errors and low-rank factors by the bucket's index. When the
buckets change (a new plan, DDP's own rebuilding, a job that resumes), what it kept is
of other parameters. So `PowerSGD` notes which parameters each bucket had. At the first
bucket that differs, it takes the errors of this bucket and all later ones by parameter
(the Reducer passes buckets in the order of their indices, so none of these is under
way), and gives them to the new buckets. The factors of these are drawn again.

An error that is NaN or infinite would return in every later step. Such values become
zero, and factors that are not finite are drawn again. Factors were summed over ranks,
so all ranks decide the same.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)

from stretto.compression.error_memory import ErrorMemory, clear_not_finite
from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.futures import Future

_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")


@final
class PowerSGD:
    """Options and state of `power_sgd_hook`, with PyTorch's ``PowerSGDState``.

    Args:
        rank: Rank of the matrices that are sent in place of a gradient, at least 1.
        start_step: Number of steps to average whole first, at least 2: PyTorch's hook
            needs two, and recommends a tenth of the training.
        process_group: The ranks; ``None`` for the default group.
            ``register_lane_hook`` sets it.
        **options: Other arguments of ``PowerSGDState``, such as
            ``min_compression_rate``.

    Raises:
        SpecError: ``rank`` or ``start_step`` is out of range.
    """

    def __init__(
        self,
        rank: int = 1,
        start_step: int = 1000,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        for name, value, least in (("rank", rank, 1), ("start_step", start_step, 2)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SpecError(
                    f"{name} must be a whole number of at least {least}, got {value!r}"
                )
        self.process_group = process_group
        self._options = {"rank": rank, "start_step": start_step, **options}
        self.torch_state = PowerSGDState(
            process_group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start_step,
            **options,
        )
        self._errors = ErrorMemory()
        self._layouts: dict[int, list[weakref.ref[Tensor]]] = {}

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a copy of this rank's errors by parameter name, and the step count.

        Every rank has its own, so each saves and loads its own. The low-rank factors
        are left out: they are drawn again.

        Args:
            model: The model, in DDP or not.
        """
        errors = self._errors.copy()
        self._collect(self._layouts, errors)
        kind, key, *rest = self._rng().get_state()
        return {
            "step": self.torch_state.iter,
            "rng": [kind, key.tolist(), *rest],
            "errors": errors.saved(model),
        }

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Continue with what `state_dict` returned, on every rank.

        Raises:
            SpecError: it is not for this model.
        """
        self._errors.load(model, state["errors"])
        self._layouts.clear()
        for name in _MEMORIES:
            getattr(self.torch_state, name).clear()
        self.torch_state.iter = state["step"]
        self._rng().set_state(tuple(state["rng"]))

    def average(self, bucket: Any) -> Future[torch.Tensor]:
        """Start PyTorch's hook on a ``dist.GradBucket``, with its own errors."""
        torch_state, index = self.torch_state, bucket.index()
        torch_state.process_group = self.process_group
        self._match_layout(index, bucket.parameters(), bucket.buffer())
        error = torch_state.error_dict.get(index)
        if error is not None:
            clear_not_finite(error)
        for name in _MEMORIES[1:]:
            factors = getattr(torch_state, name).get(index)
            if factors is not None and not bool(torch.isfinite(factors).all()):
                torch_state.p_memory_dict.pop(index, None)
                torch_state.q_memory_dict.pop(index, None)
        averaged: Future[torch.Tensor] = powerSGD_hook(torch_state, bucket)
        return averaged

    def _match_layout(
        self, index: int, parameters: Sequence[Tensor], buffer: Tensor
    ) -> None:
        """Hand on what was kept for other buckets by parameter."""
        if self._is_kept(index, parameters):
            return
        old = [number for number in self._layouts if number >= index]
        self._collect(old, self._errors)
        for number in old:
            del self._layouts[number]
            for name in _MEMORIES:
                getattr(self.torch_state, name).pop(number, None)
        self._layouts[index] = [weakref.ref(p) for p in parameters]
        kept = [self._errors.pop(parameter) for parameter in parameters]
        if self.torch_state.use_error_feedback and any(e is not None for e in kept):
            self.torch_state.error_dict[index] = torch.cat(
                [
                    buffer.new_zeros(parameter.numel())
                    if error is None
                    else error.to(buffer)
                    for error, parameter in zip(kept, parameters, strict=True)
                ]
            )

    def _collect(self, indices: Iterable[int], into: ErrorMemory) -> None:
        """Note the errors of some buckets by parameter."""
        for index in indices:
            flat, start = self.torch_state.error_dict.get(index), 0
            for reference in self._layouts[index]:
                parameter = reference()
                if flat is None or parameter is None:
                    break
                end = start + parameter.numel()
                into.put(parameter, flat[start:end])
                start = end

    def _rng(self) -> Any:
        return self.torch_state.rng

    def _is_kept(self, index: int, parameters: Sequence[Tensor]) -> bool:
        """Return whether a bucket has the parameters that it had before."""
        layout = self._layouts.get(index, [])
        return len(layout) == len(parameters) and all(
            reference() is parameter
            for reference, parameter in zip(layout, parameters, strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of a model starts without errors and process group.
        return self._options

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)
