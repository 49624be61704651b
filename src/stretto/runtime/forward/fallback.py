"""Why a model's communication does not overlap with the next forward.

# Note [Extensions that get tensors from Python]
A compiled extension that converts Python's tensors itself (pybind) may read a
parameter's address without asking. It must link torch's Python library, which can be
found in its file. Operators that an extension registers (``torch.ops``) ask.
"""

from __future__ import annotations

import mmap
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable


def why_backward(
    model: Any, parameters: Iterable[tuple[str, nn.Parameter]]
) -> str | None:
    """Return which option, module or parameter prevents overlap, or ``None``.

    ``model`` is of DDP's class. With a reason, its backward waits for communication.
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


_LINKED = b"libtorch_python"

_seen_modules: dict[str, str | None] = {}
_counted = 0


def new_reader() -> str | None:
    """Return what code loaded into this process may read parameters unseen."""
    global _counted
    if len(sys.modules) != _counted:
        _counted = len(sys.modules)
        _look_at_modules()
    found = next((why for why in _seen_modules.values() if why), None)
    if found is None and _forbids_recompiling():
        return "torch.compiler.set_stance forbids what a pending parameter may cause"
    return found


def _look_at_modules() -> None:
    own = str(Path(torch.__file__).parent)
    for name, module in list(sys.modules.items()):
        if name in _seen_modules:
            continue
        file = getattr(module, "__file__", None)
        links = (
            isinstance(file, str)
            and file.endswith(tuple(EXTENSION_SUFFIXES))
            and not file.startswith(own)
            and _links_torch(Path(file))
        )
        _seen_modules[name] = (
            f"the extension {name} takes tensors from Python, and may read parameters "
            "without asking"
            if links
            else None
        )


def _links_torch(file: Path) -> bool:
    try:
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return content.find(_LINKED) >= 0
    except (OSError, ValueError):
        return False


def _forbids_recompiling() -> bool:
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    stance = getattr(getattr(frames, "_stance", None), "stance", "default")
    return stance not in ("default", "force_eager")
