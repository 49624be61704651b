"""Refuse a loss on an activation that a forward hook inside the model has kept.

# Note [Activations that hooks keep]
Such a tensor is inside the model, where gradients are of the mean loss over the global
batch and other ranks wait for them in order. A gradient that enters there, and not
through one of the model's outputs, lacks the rank's weight and may leave other ranks
waiting. So each forward marks the autograd nodes of tensors that hooks see. Before each
backward, the graph behind the loss is searched for these marks, up to the models'
outputs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stretto.burst.boundary import is_output

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MARK = "stretto.burst.held_activations"


@contextlib.contextmanager
def marked(
    module: nn.Module, hooked: Iterable[tuple[str, nn.Module]], entry: Any
) -> Iterator[bool]:
    """Mark tensors that forward hooks of a module's parts see while its layers run.

    Args:
        module: the user's.
        hooked: its parts that have forward hooks, with their names.
        entry: the autograd node of the model's input, which is outside.

    Yields:
        Whether there are such hooks.
    """
    handles: list[Any] = []
    # Except the whole model's own hooks, which see its outputs.
    for name, part in hooked:
        if part is module:
            continue

        def mark(_part: Any, *seen: Any, name: str = name) -> None:
            for tensor in pytree.tree_leaves(seen):
                node = tensor.grad_fn if isinstance(tensor, Tensor) else None
                if node is not None and node is not entry:
                    metadata: Any = node.metadata
                    metadata[_MARK] = name

        handles += [
            part.register_forward_pre_hook(mark, prepend=True, with_kwargs=True),
            part.register_forward_hook(mark, prepend=True, with_kwargs=True),
            part.register_forward_hook(mark, with_kwargs=True),
        ]
    try:
        yield bool(handles)
    finally:
        for handle in handles:
            handle.remove()


def start_of(loss: Any) -> Any:
    """Return the autograd node of a tensor, or of one of its ``GradientEdge``."""
    return loss.grad_fn if isinstance(loss, Tensor) else loss.node


def kept_module_of(losses: Iterable[Tensor]) -> str | None:
    """Return the name of a module whose activation a loss uses, if there is one."""
    seen: set[Any] = set()
    left: list[Any] = [start_of(loss) for loss in losses]
    while left:
        node = left.pop()
        if node is None or node in seen or is_output(node):
            continue
        seen.add(node)
        if (name := node.metadata.get(_MARK)) is not None:
            return str(name)
        left += [source for source, _ in node.next_functions]
    return None
