"""Why a model's communication does not overlap with the next forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable


def why_backward(
    model: Any, parameters: Iterable[tuple[str, nn.Parameter]]
) -> str | None:
    """Return what prevents it, of the model's options and modules, or ``None``.

    ``model`` is one of DDP's class; it ends its backward as without a forward plan.
    """
    options = (
        ("find_unused_parameters", "which parameters were used is reduced as well"),
        ("mixed_precision", "it copies parameters before each forward"),
        ("_use_python_reducer", "it has no buckets"),
    )
    for name, why in options:
        if getattr(model, name, None):
            return f"{name.lstrip('_')} is set: {why}"
    if model.static_graph and not model._gradients_come_once:  # noqa: SLF001
        return "static_graph delays communication to the end of its first backward"
    if model._numerics is not None:  # noqa: SLF001
        return "nan= looks at gradients as backward ends"
    if model._comm_hooks or model._builtin_hook is not None:  # noqa: SLF001
        return "a communication hook waits for buckets in backward"
    for module in model.module.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return (
                f"{type(module).__name__} is a ScriptModule, which reads parameters "
                "without asking Python"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return "an embedding has sparse gradients"
    for name, parameter in parameters:
        if type(parameter) is not nn.Parameter:
            return (
                f"parameter {name!r} is of class {type(parameter).__name__}, not "
                "nn.Parameter"
            )
        if parameter.device.type != "cpu":
            return f"parameter {name!r} is on {parameter.device.type}, not on the CPU"
        if hasattr(parameter, "_in_backward_optimizers"):
            return f"parameter {name!r} is updated in backward by an optimizer there"
    return None
