"""Make PyTorch's own functions aware of burst-parallel models.

A rank holds only the gradients of the layers that it runs. `GradScaler` and
`clip_grad_norm_` read all gradients together, so they would decide differently on each
rank. Installed once, these wrappers join the ranks' values where burst parameters are
involved, and leave everything else to PyTorch. Every rank must make these calls in the
same order, as it must call the model.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stretto.burst.checks.joined_calls import CLIP, NORM, SCALER, call_for
from stretto.burst.hooks import count_registered
from stretto.errors import SpecError
from stretto.runtime.torch_compat import without_dynamo
from stretto.step_hooks import reads_only

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.optim import Optimizer

    from stretto.burst.checks.joined_calls import JoinedCall
    from stretto.burst.torch_seam import TorchSeam
    from stretto.runtime.agreement import Ranks


_models: weakref.WeakSet[TorchSeam] = weakref.WeakSet()
_installed = threading.Lock()
_looking = threading.Event()
_last = threading.local()
_backwards: weakref.WeakKeyDictionary[TorchSeam, int] = weakref.WeakKeyDictionary()
"""Each model's last backward, numbered over all models."""
_numbers = itertools.count(1)
_shares: dict[int, list[tuple[Any, tuple[float, ...]]]] = {}
"""By each backward, the shares of outputs that it has reached, with their ranks."""

_BACKWARDS = 4
"""Number of backward passes of which shares are kept: one may run inside another."""

_OWN = -1
"""Key of this module's hooks among an optimizer's own, which PyTorch numbers from 0."""


def add(model: TorchSeam) -> None:
    """Register a model with the wrappers, and install them once."""
    _models.add(model)
    if _installed.acquire(blocking=False):  # never released: installed for good
        _install()


def models() -> list[TorchSeam]:
    """Return the burst models that exist."""
    return list(_models)


def remove(model: TorchSeam) -> None:
    """Forget a model that is no longer used."""
    _models.discard(model)


def look_before_backward() -> None:
    """Let models check the start of each backward, from now on."""
    _looking.set()


def backward_ended(model: TorchSeam) -> None:
    """Record that this model's backward is the last one."""
    _backwards[model] = next(_numbers)


def note_shares(ranks: Ranks, shares: tuple[float, ...]) -> None:
    """Record that the backward that runs has reached outputs with these shares."""
    task = torch._C._current_graph_task_id()  # noqa: SLF001
    if task not in _shares:
        while len(_shares) >= _BACKWARDS:
            del _shares[next(iter(_shares))]
        _shares[task] = []
    row = ((ranks.size, ranks.rank), shares)
    if row not in _shares[task]:
        _shares[task].append(row)


def shares_of_backward(ranks: Ranks) -> list[tuple[float, ...]]:
    """Return the different shares of the backward that runs, on as many ranks."""
    task = torch._C._current_graph_task_id()  # noqa: SLF001
    of = ranks.size, ranks.rank
    return [shares for other, shares in _shares.get(task, ()) if other == of]


def _models_of(parameters: Iterable[Tensor]) -> list[TorchSeam]:
    held = list(parameters)
    found = [m for m in models() if any(m.ownership.holds(p) for p in held)]
    return sorted(found, key=lambda model: model.order)


def _of_optimizer(optimizer: Optimizer) -> list[TorchSeam]:
    if not _models:
        return []
    return _models_of(p for group in optimizer.param_groups for p in group["params"])


def _is_ours(optimizer: Optimizer) -> bool:
    return bool(_of_optimizer(optimizer))


def _install() -> None:
    count_registered()
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    autograd: Any = torch.autograd
    autograd._engine_run_backward = _observed(autograd._engine_run_backward)  # noqa: SLF001
    scaler: Any = torch.amp.GradScaler
    scaler._unscale_grads_ = _joined_unscale(scaler._unscale_grads_)
    module: Any = clip_grad
    norm, clip = module._get_total_norm, module._clip_grads_with_norm_  # noqa: SLF001
    cell = _decorated(norm)
    if cell is not None:
        norm = module._no_grad(cell.cell_contents)  # noqa: SLF001
        cell.cell_contents = _joined_norm(cell.cell_contents)
    elif hasattr(torch.nn.utils, "get_total_norm"):
        torch.nn.utils.get_total_norm = _joined_norm(norm)
    module._get_total_norm = _noted_norm(norm)  # noqa: SLF001
    module._clip_grads_with_norm_ = _joined_clip(norm, clip)
    group = module._group_tensors_by_device_and_dtype  # noqa: SLF001
    module._group_tensors_by_device_and_dtype = _none_or_grouped(group)  # noqa: SLF001
    cell = _decorated(module.clip_grad_value_)
    if cell is not None:
        cell.cell_contents = _noted_values(cell.cell_contents)
    else:
        module.clip_grad_value_ = _noted_values(module.clip_grad_value_)
        torch.nn.utils.clip_grad_value_ = module.clip_grad_value_


# Note [Functions that were imported before]
# A script may have imported a function of PyTorch before the first burst model is
# built; then a new function under the same name is never called. These functions are
# wrapped by PyTorch's own decorator. Every reference is to that one wrapper, which
# reads the function to call from its closure, where it can be replaced.


def _decorated(wrapper: Any) -> Any:
    """Return the closure cell of what `_no_grad` wrapped; ``None`` if missing."""
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    return wrapper.__closure__[names.index("func")] if "func" in names else None


# Note [Hooks of a step]
# PyTorch calls global hooks before an optimizer's own ones, and after them when the
# step has ended. An own hook may scale gradients before the step or move parameters
# after it, so models look behind the last own hook before and ahead of the first own
# one after. PyTorch makes the iterator over the own hooks after the global ones ran.


@reads_only(_is_ours)
@without_dynamo
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    models = _of_optimizer(optimizer)
    for model in models:
        model.before_step(optimizer, args, kwargs)
    if models:
        before = optimizer._optimizer_step_pre_hooks  # noqa: SLF001
        after = optimizer._optimizer_step_post_hooks  # noqa: SLF001
        before.pop(_OWN, None)
        before[_OWN] = _before_use
        rest = {key: hook for key, hook in after.items() if key != _OWN}
        after.clear()
        after[_OWN] = _after_use
        after.update(rest)


@without_dynamo
def _before_use(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    for model in _of_optimizer(optimizer):
        model.before_use(optimizer)


@without_dynamo
def _after_use(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    for model in _of_optimizer(optimizer):
        model.after_step()


@reads_only(_is_ours)
@without_dynamo
def _after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    # An optimizer that is copied or saved in between steps has its own hooks only.
    for hooks in (
        optimizer._optimizer_step_pre_hooks,  # noqa: SLF001
        optimizer._optimizer_step_post_hooks,  # noqa: SLF001
    ):
        hooks.pop(_OWN, None)


def _observed(run: Any) -> Any:
    @functools.wraps(run)
    def observed(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _looking.is_set():
            for model in models():
                model.before_backward(t_outputs)
        first = next(_numbers)
        before = only_returns_gradients()
        _thread.only_returns = not kwargs.get("accumulate_grad", True)
        try:
            return run(t_outputs, *args, **kwargs)
        except BaseException as exc:
            if torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - no outer one
                for model in models():
                    has_ended = _backwards.get(model, 0) > first
                    model.report_failure(exc, has_ended=has_ended)
            raise
        finally:
            _thread.only_returns = before

    return observed


_thread = threading.local()


def only_returns_gradients() -> bool:
    """Return whether this thread runs a `torch.autograd.grad`, which adds to none.

    Its caller uses what it returns. So does a function that computes its forward again
    in its backward, such as a reversible block, for a gradient of its own inputs.
    """
    return getattr(_thread, "only_returns", False)


def _joined_unscale(unscale: Any) -> Any:
    @functools.wraps(unscale)
    def joined(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        models = _of_optimizer(optimizer)
        given = [p for group in optimizer.param_groups for p in group["params"]]
        for model in models:
            model.look_at_gradients()
        inverse = args[0] if args else kwargs["inv_scale"]
        for model in models:
            call = call_for(SCALER, model.module, model.ownership, given)
            model.require_same_scale(inverse, call)
        found: dict[torch.device, Tensor] = unscale(self, optimizer, *args, **kwargs)
        for model in models:
            model.gradients_were_scaled()
            flags = list(found.values())
            if not flags:  # this rank holds no gradient of this optimizer
                device = args[1].device if len(args) > 1 else kwargs["found_inf"].device
                flags = [torch.zeros((), dtype=torch.float32, device=device)]
                found[device] = flags[0]
            largest = torch.stack([flag.to(flags[0].device) for flag in flags]).max()
            call = call_for(SCALER, model.module, model.ownership, given)
            place = "joining the scaler's check"
            largest = model.join(largest, call, place, is_max=True)
            for flag in flags:
                flag.fill_(largest.to(flag.device))
        return found

    return joined


def _none_or_grouped(group: Any) -> Any:
    """Accept no tensors: a rank that runs no layer has no gradients to clip."""

    @functools.wraps(group)
    def grouped(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if _models and tensors and not tensors[0]:
            return {}
        return group(tensors, *args, **kwargs)

    return grouped


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
        held = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        total: Tensor = get_norm(held, norm_type, False, foreach)  # noqa: FBT003
        if not held:  # this rank holds no gradients; the others' enter this number
            total = total.to(torch.get_default_dtype())
        # Only the caller knows which parameters these gradients belong to.
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
        if not held:  # this rank holds none of the parameters' gradients
            models = [model for model, _ in _models_of_gradients([])]
        for model in models:
            model.look_at_gradients()
            model.clips(max_norm)
        if models:
            total = joint_norm(held, models, norm_type, CLIP)
            total_norm.copy_(total)
        if error_if_nonfinite and not bool(torch.isfinite(total_norm)):
            # PyTorch's own message.
            get_norm([total_norm], norm_type, True, foreach)  # noqa: FBT003
        clip(held, max_norm, total_norm, foreach)
        for model in models:
            model.gradients_were_scaled()

    return joined


def _noted_values(clip: Any) -> Any:
    @functools.wraps(clip)
    def noted(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> None:
        one = isinstance(parameters, Tensor)
        held = [parameters] if one else list(parameters)
        for model in _models_of(held):
            model.clips(clip_value)
        clip(held, clip_value, *args, **kwargs)

    return noted


def _joined_norm(get_norm: Any) -> Any:
    @functools.wraps(get_norm)
    def joined(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - as PyTorch's
        foreach: bool | None = None,  # noqa: FBT001 - as PyTorch's
    ) -> Tensor:
        held = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        found = _models_of_gradients(held)
        if not found:
            return get_norm(held, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        device = held[0].device if held else torch.device("cpu")
        total = _joined_over(
            [t for t in held if not any(id(t) in owned for _, owned in found)],
            [
                (
                    model,
                    call_for(
                        NORM, model.module, model.ownership, owned.values(), norm_type
                    ),
                    [
                        t
                        for t in held
                        if id(t) in owned and model.ownership.is_first(owned[id(t)])
                    ],
                )
                for model, owned in found
            ],
            float(norm_type),
            device,
        ).to(held[0].dtype if held else torch.get_default_dtype())
        if error_if_nonfinite:  # PyTorch's own message
            get_norm([total], norm_type, True, foreach)  # noqa: FBT003
        return total

    return joined


def _models_of_gradients(
    tensors: list[Tensor],
) -> list[tuple[TorchSeam, dict[int, Tensor]]]:
    """Return the models whose gradients are among tensors, and these by their ids.

    Only those whose ranks hold different gradients. A rank that passes none takes part
    for the model of the last backward: other ranks may pass that model's.
    """
    partial = sorted(
        (m for m in models() if not m.ownership.is_whole()),
        key=lambda model: model.order,
    )
    given = {id(t) for t in tensors}
    found, without = [], []
    for model in partial:
        grads: dict[int, Tensor] = {
            id(p.grad): p for p in model.module.parameters() if p.grad is not None
        }
        owned = {key: p for key, p in grads.items() if key in given}
        if owned:
            found.append((model, owned))
        elif model in _backwards:
            without.append(model)
    if not tensors and without:
        found.append((max(without, key=_backwards.__getitem__), {}))
    return found


@torch.no_grad()
def joint_norm(
    parameters: Sequence[Tensor],
    models: Sequence[TorchSeam],
    norm_type: float,
    kind: int = NORM,
) -> Tensor:
    r"""Return the norm of all gradients together, the same on all ranks. Collective.

    $(\sum_i |g_i|^p)^{1/p}$ with $p$ = ``norm_type``, the largest $|g_i|$ for infinity.
    A burst layer's gradient counts on its first rank, other parameters' on every rank.

    Args:
        parameters: whose gradients count.
        models: the burst models that own some of them, in an order equal on all ranks.
        norm_type: above 0.
        kind: of the call, see `JoinedCall`.

    Raises:
        SpecError: ``norm_type`` is invalid.
        RankDisagreement: other ranks made another call.
        StrettoError: the last backward was in `no_sync`.
        CommTimeout: a rank was lost.
    """
    grads = [(p, p.grad) for p in parameters if p.grad is not None]
    device = parameters[0].device if parameters else torch.device("cpu")
    return _joined_over(
        [g for p, g in grads if not any(m.ownership.holds(p) for m in models)],
        [
            (
                model,
                call_for(kind, model.module, model.ownership, parameters, norm_type),
                [g for p, g in grads if model.ownership.is_first(p)],
            )
            for model in models
        ],
        norm_type,
        device,
    )


@torch.no_grad()
def _joined_over(
    others: list[Tensor],
    rows: Sequence[tuple[TorchSeam, JoinedCall, list[Tensor]]],
    norm_type: float,
    device: torch.device,
) -> Tensor:
    """Return the norm of what each model's ranks count, and of this rank's others."""
    if not norm_type > 0:
        raise SpecError(f"norm_type must be > 0, got {norm_type}")
    for model, _, _ in rows:
        model.require_sent("ask for the norm, and clip,")
    is_max = math.isinf(norm_type)

    def part(some: list[Tensor]) -> Tensor:
        if not some:
            return torch.zeros(1, dtype=torch.float64, device=device)
        norms = [torch.linalg.vector_norm(g, norm_type).double() for g in some]
        every = torch.stack([norm.to(device) for norm in norms])
        return (every.max() if is_max else every.pow(norm_type).sum()).reshape(1)

    parts = [part(others)]
    for model, call, counted in rows:
        place = "the norm of all gradients"
        parts.append(model.join(part(counted), call, place, is_max=is_max))
    every = torch.cat(parts)
    return every.max() if is_max else every.sum() ** (1.0 / norm_type)
