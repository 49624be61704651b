"""Compare a snapshot's state with what the program that reads it passes.

``load_state_dict`` of optimizers and schedulers takes whatever it gets, so a program
that was changed would continue with a mixture of both, or end in its first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHOWN = 4
"""How many tensors of a model to name."""


def classes_of(kept: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the classes of what a run keeps, by name.

    Args:
        kept: optimizer, scheduler and what is in ``extra``.
    """
    return {name: type(value).__name__ for name, value in kept.items()}


def kept_differences(kept: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Return how what a run keeps differs from what a snapshot has of it.

    Args:
        kept: optimizer, scheduler and what is in ``extra``.
        state: the snapshot's; one of an earlier version has no ``classes``.
    """
    saved, classes = state["kept"], state.get("classes", {})
    found = [
        f"{_argument(name)} is passed, and the snapshot has no state of it"
        for name in kept
        if name not in saved
    ]
    found += [
        f"the snapshot has a state of {_argument(name)}, which is not passed"
        for name in saved
        if name not in kept
    ]
    for name, value in kept.items():
        if name not in saved or not _is_of_torch(value):
            continue
        before, now = classes.get(name), type(value).__name__
        if before is not None and before != now:
            found.append(f"{_argument(name)} is of {now}, in the snapshot of {before}")
        elif before is None and _has_other_options(value, saved[name]):
            found.append(
                f"{_argument(name)} is of {now}, in the snapshot of another class"
            )
    return found


def model_differences(now: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return how a model's tensors differ from a snapshot's by name and shape.

    Args:
        now: the model's state.
        saved: the snapshot's.
    """
    found = [
        f"the model has {name}, the snapshot has not"
        for name in now
        if name not in saved
    ]
    found += [
        f"the snapshot has {name}, the model has not"
        for name in saved
        if name not in now
    ]
    found += [
        f"{name} has the shape {_shape(value)} in the model and "
        f"{_shape(saved[name])} in the snapshot"
        for name, value in now.items()
        if name in saved and _shape(value) != _shape(saved[name])
    ]
    if len(found) > _SHOWN:
        found[_SHOWN:] = [f"{len(found) - _SHOWN} other tensors differ, too"]
    return found


def in_one_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _argument(name: str) -> str:
    """Return where a program passes an object to ``stretto.Elastic``."""
    if name == "optimizer":
        return "the optimizer"
    return "scheduler=" if name == "scheduler" else f"{name!r} in extra="


def _is_of_torch(value: Any) -> bool:
    """Return whether a class has states that others' ``load_state_dict`` takes."""
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    return isinstance(value, kinds)


def _has_other_options(value: Any, saved: Any) -> bool:
    """Return whether an optimizer and its state each have options of their own.

    Other versions of torch may only add some.
    """
    if not isinstance(value, torch.optim.Optimizer):
        return False
    mine = {key for group in value.param_groups for key in group}
    other = {key for group in saved["param_groups"] for key in group}
    others_only = other - mine - {"initial_lr"}  # a scheduler's
    return bool(mine - other - {"initial_lr"}) and bool(others_only)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
