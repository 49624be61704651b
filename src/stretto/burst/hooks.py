"""Hooks of the program: the whole model's own ones, and those of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """Return a parameter's hooks on its gradient, except the executor's."""
    held = getattr(parameter, "_backward_hooks", None) or {}
    return [h for h in held.values() if not getattr(h, "is_stretto", False)]


def post_hooks(parameter: Tensor) -> list[Any]:
    """Return a parameter's hooks that follow the accumulation of its gradient."""
    return list(
        (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    )


# The whole model's own forward hooks run on each rank's share.


def before(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as the model's pre-hooks return them."""
    with_kwargs = module._forward_pre_hooks_with_kwargs  # noqa: SLF001
    for key, hook in list(module._forward_pre_hooks.items()):  # noqa: SLF001
        call: Any = hook
        if key in with_kwargs:
            found = call(module, args, kwargs)
            if found is not None:
                args, kwargs = found
            continue
        found = call(module, args)
        if found is not None:
            args = found if isinstance(found, tuple) else (found,)
    return args, kwargs


def after(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Return the output as the model's hooks return it."""
    with_kwargs = module._forward_hooks_with_kwargs  # noqa: SLF001
    for key, hook in list(module._forward_hooks.items()):  # noqa: SLF001
        call: Any = hook
        found = (
            call(module, args, kwargs, output)
            if key in with_kwargs
            else call(module, args, output)
        )
        output = output if found is None else found
    return output
