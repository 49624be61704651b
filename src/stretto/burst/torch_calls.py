"""What PyTorch's own functions must know of burst-parallel models.

A rank holds gradients of the layers that it runs. `GradScaler` and `clip_grad_norm_`
look at all gradients together, so they would decide otherwise on each rank. Installed
once, these wrappers join what the ranks see where burst parameters are involved, and
leave everything else to PyTorch. Every rank must make these calls in the same order, as
it must call the model.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stretto.errors import SpecError, StrettoError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.optim import Optimizer


class Model(Protocol):
    """What the wrappers need of a burst-parallel model."""

    @property
    def order(self) -> int:
        """A number by which every rank sorts its models alike."""

    def owns(self, parameter: Tensor) -> bool:
        """Whether the parameter belongs to the model."""

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank is the first that holds the parameter's gradient."""

    def is_whole(self) -> bool:
        """Whether every rank runs every layer."""

    def reduce_number(self, value: Tensor, operation: Any, place: str) -> None:
        """All-reduce a number over the model's ranks in place."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer of the model's parameters takes a step."""


_models: weakref.WeakSet[Any] = weakref.WeakSet()
_installed = threading.Lock()
_last = threading.local()


def add(model: Model) -> None:
    """Let the wrappers know a model, and install them once."""
    _models.add(model)
    if _installed.acquire(blocking=False):  # never released: installed for good
        _install()


def _models_of(parameters: Iterable[Tensor]) -> list[Model]:
    held = list(parameters)
    found = [m for m in list(_models) if any(m.owns(p) for p in held)]
    return sorted(found, key=lambda model: model.order)


def _of_optimizer(optimizer: Optimizer) -> list[Model]:
    if not _models:
        return []
    return _models_of(p for group in optimizer.param_groups for p in group["params"])


def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)
    scaler: Any = torch.amp.GradScaler
    scaler._unscale_grads_ = _joined_unscale(scaler._unscale_grads_)
    module: Any = clip_grad
    norm, clip = module._get_total_norm, module._clip_grads_with_norm_  # noqa: SLF001
    module._get_total_norm = _noted_norm(norm)  # noqa: SLF001
    module._clip_grads_with_norm_ = _joined_clip(norm, clip)
    if hasattr(torch.nn.utils, "get_total_norm"):
        torch.nn.utils.get_total_norm = _refused_norm(torch.nn.utils.get_total_norm)


def _before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    for model in _of_optimizer(optimizer):
        model.before_step(optimizer)


def _joined_unscale(unscale: Any) -> Any:
    @functools.wraps(unscale)
    def joined(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        found: dict[torch.device, Tensor] = unscale(self, optimizer, *args, **kwargs)
        for model in _of_optimizer(optimizer):
            flags = list(found.values())
            if not flags:  # this rank holds no gradient of this optimizer
                device = args[1].device if len(args) > 1 else kwargs["found_inf"].device
                flags = [torch.zeros((), dtype=torch.float32, device=device)]
                found[device] = flags[0]
            most = torch.stack([flag.to(flags[0].device) for flag in flags]).max()
            most = most.reshape(1)
            model.reduce_number(most, dist.ReduceOp.MAX, "joining the scaler's check")
            for flag in flags:
                flag.fill_(most[0].to(flag.device))
        return found

    return joined


def _noted_norm(get_norm: Any) -> Any:
    @functools.wraps(get_norm)
    def noted(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - as PyTorch's
        foreach: bool | None = None,  # noqa: FBT001 - as PyTorch's
    ) -> Tensor:
        _last.norm = None
        if not _models:
            return get_norm(tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        total: Tensor = get_norm(tensors, norm_type, False, foreach)  # noqa: FBT003
        # Which parameters these gradients belong to is known only to the caller.
        _last.norm = (total, float(norm_type), error_if_nonfinite)
        return total

    return noted


def _joined_clip(get_norm: Any, clip: Any) -> Any:
    @functools.wraps(clip)
    def joined(
        parameters: Any,
        max_norm: float,
        total_norm: Tensor,
        foreach: bool | None = None,  # noqa: FBT001 - as PyTorch's
    ) -> None:
        noted, _last.norm = getattr(_last, "norm", None), None
        if noted is None or noted[0] is not total_norm:
            clip(parameters, max_norm, total_norm, foreach)
            return
        _, norm_type, error_if_nonfinite = noted
        one = isinstance(parameters, Tensor)
        held = [parameters] if one else list(parameters)
        models = _models_of(held)
        if models:
            total = joint_norm(held, models, norm_type)
            total_norm.copy_(total)
        if error_if_nonfinite and not bool(torch.isfinite(total_norm)):
            # PyTorch's own words.
            get_norm([total_norm], norm_type, True, foreach)  # noqa: FBT003
        clip(held, max_norm, total_norm, foreach)

    return joined


def _refused_norm(get_norm: Any) -> Any:
    @functools.wraps(get_norm)
    def refused(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        held = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        partial = [model for model in list(_models) if not model.is_whole()]
        grads = {id(t) for t in held}
        for model in partial:
            for parameter in model.parameters():
                if parameter.grad is not None and id(parameter.grad) in grads:
                    raise StrettoError(
                        "get_total_norm sees only the gradients of layers that this "
                        "rank runs: use torch.nn.utils.clip_grad_norm_ or the model's "
                        "clip_grad_norm_, which count the other ranks' too"
                    )
        found: Tensor = get_norm(held, *args, **kwargs)
        return found

    return refused


@torch.no_grad()
def joint_norm(
    parameters: Sequence[Tensor], models: Sequence[Model], norm_type: float
) -> Tensor:
    r"""Return the norm of all gradients together, the same on all ranks. Collective.

    $(\sum_i |g_i|^p)^{1/p}$ with $p$ = ``norm_type``, the largest $|g_i|$ for infinity.
    A burst layer's gradient counts on its first rank, other parameters' on every rank.

    Args:
        parameters: whose gradients count.
        models: the burst models that own some of them, in an order equal on all ranks.
        norm_type: above 0.

    Raises:
        SpecError: ``norm_type`` is invalid.
        CommTimeout: a rank was lost.
    """
    if not norm_type > 0:
        raise SpecError(f"norm_type must be > 0, got {norm_type}")
    is_max = math.isinf(norm_type)
    operation = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    grads = [(p, p.grad) for p in parameters if p.grad is not None]
    device = parameters[0].device if parameters else torch.device("cpu")

    def part(some: list[Tensor]) -> Tensor:
        if not some:
            return torch.zeros(1, dtype=torch.float64, device=device)
        norms = [torch.linalg.vector_norm(g, norm_type).double() for g in some]
        every = torch.stack([norm.to(device) for norm in norms])
        return (every.max() if is_max else every.pow(norm_type).sum()).reshape(1)

    parts = [part([g for p, g in grads if not any(m.owns(p) for m in models)])]
    for model in models:
        mine = part([g for p, g in grads if model.counts(p)])
        model.reduce_number(mine, operation, "the norm of all gradients")
        parts.append(mine)
    every = torch.cat(parts)
    return every.max() if is_max else every.sum() ** (1.0 / norm_type)
