"""Hooks of the program: the whole model's own ones, and those of parameters.

# Note [Hooks of nodes]
A program may take a parameter's node from autograd and register a hook there, where no
gradient of a burst model arrives. A node can't be asked for its hooks, but all of them
share one dictionary, which the handle of one more hook refers to. As this is slow,
nodes are asked only after a hook of some node was registered.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.hooks
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
HOOKS_OF_ALL: dict[str, dict[int, Any]] = {
    kind: getattr(nn.modules.module, "_global" + kind) for kind in HOOKS
}
"""The hooks of all modules, by their kind."""


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """Return a parameter's hooks on its gradient, except the executor's."""
    held = getattr(parameter, "_backward_hooks", None) or {}
    return [h for h in held.values() if not getattr(h, "is_stretto", False)]


def post_hooks(parameter: Tensor) -> list[Any]:
    """Return a parameter's hooks that follow the accumulation of its gradient."""
    return list(
        (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    )


def is_of_several(hook: Any) -> bool:
    """Return whether `torch.autograd.graph.register_multi_grad_hook` made a hook."""
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_qualname.startswith("register_multi_grad_hook.")


_counted = threading.Lock()
_count = [0]


def count_registered() -> None:
    """Count hooks of autograd's nodes from now on."""
    if _counted.acquire(blocking=False):  # never released: installed for good
        node: Any = torch.autograd.Function
        register = node._register_hook  # noqa: SLF001

        def counted(held: Any, hook: Any) -> Any:
            if hook is not _nothing and not _is_pytorchs(hook):
                _count[0] += 1
            return register(held, hook)

        node._register_hook = staticmethod(counted)  # noqa: SLF001


def _is_pytorchs(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.")


def times_registered() -> int:
    """Return how many hooks of nodes a program has registered."""
    return _count[0]


def hooks_of_node(parameter: Tensor) -> list[Any]:
    """Return the hooks of a parameter's node in autograd, see Note [Hooks of nodes]."""
    if not parameter.requires_grad or parameter.is_inference():
        return []
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        view: Any = parameter.view_as(parameter)
    node = view.grad_fn.next_functions[0][0]
    found: list[Any] = []
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)
        found += (h for h in handle.hooks_dict_ref().values() if h is not _nothing)
        handle.remove()
    return found


def _nothing(*_: Any) -> None:
    pass


def code_of(hook: Any) -> Any:
    """Return the code that a call of a hook runs; None if it is written in C."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    call = type(hook).__call__
    return getattr(hook, "__code__", None) or getattr(call, "__code__", None)


def place_of(hook: Any) -> str:
    """Return where a function is written, as the start of a sentence."""
    code = code_of(hook)
    return f"{code.co_filename}:{code.co_firstlineno}: " if code is not None else ""


# The whole model's own forward hooks run on each rank's share.


# So do hooks of all modules, which PyTorch would call for the burst model itself: they
# may ask for the module's class.


def before(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    of_all: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as the model's pre-hooks return them.

    ``of_all``: whether hooks of all modules are called too.
    """
    with_kwargs = module._forward_pre_hooks_with_kwargs  # noqa: SLF001
    of_kind = HOOKS_OF_ALL["_forward_pre_hooks"] if of_all else {}
    held = module._forward_pre_hooks  # noqa: SLF001
    for key, hook in (*of_kind.items(), *held.items()):
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
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    *,
    of_all: bool = False,
) -> Any:
    """Return the output as the model's hooks return it; ``of_all`` as for `before`."""
    with_kwargs = {*module._forward_hooks_with_kwargs, *_with_kwargs}  # noqa: SLF001
    of_kind = HOOKS_OF_ALL["_forward_hooks"] if of_all else {}
    held = module._forward_hooks  # noqa: SLF001
    for key, hook in (*of_kind.items(), *held.items()):
        call: Any = hook
        found = (
            call(module, args, kwargs, output)
            if key in with_kwargs
            else call(module, args, output)
        )
        output = output if found is None else found
    return output


_with_kwargs: dict[int, bool] = nn.modules.module._global_forward_hooks_with_kwargs  # noqa: SLF001


_one, _two, _three, _four = HOOKS_OF_ALL.values()


def has_of_all() -> bool:
    """Return whether there are hooks of all modules."""
    return bool(_one or _two or _three or _four)


def backward_of_all(module: nn.Module) -> Any:
    """Return what calls hooks of all modules in a model's backward; None without."""
    found, begun = (list(HOOKS_OF_ALL[kind].values()) for kind in HOOKS[2:])
    if not (found or begun):
        return None
    return torch.utils.hooks.BackwardHook(module, found, begun)
