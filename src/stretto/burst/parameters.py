"""Send parameters from the ranks that hold them to others.

A rank trains the layers that it runs. Other layers have their initial values on it, or
those last sent to it; their gradients are ``None``, so optimizers skip them.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from stretto.burst.memory import in_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from stretto.burst.rank_groups import RankGroups
    from stretto.burst.tracing.layers import LayerGraph


@torch.no_grad()
def bring(
    rank_groups: RankGroups, graph: LayerGraph, roots: Mapping[str, int], context: str
) -> None:
    """Give all ranks the parameters and buffers of each layer's root."""
    for node in graph.nodes:
        if node.name in roots:
            what = f"{context} of layer {node.name!r}"
            bring_tensors(rank_groups, node.tensors(), roots[node.name], what)


@torch.no_grad()
def bring_tensors(
    rank_groups: RankGroups, tensors: Iterable[Tensor], root: int, context: str
) -> None:
    """Give all ranks ``root``'s values of some tensors."""
    if rank_groups.ranks.size == 1:
        return
    for tensor in tensors:
        whole = in_memory(tensor.detach())
        with rank_groups.guard(context):
            rank_groups.broadcast(whole, root)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


@torch.no_grad()
def bring_gradients(
    rank_groups: RankGroups, graph: LayerGraph, roots: Mapping[str, int]
) -> None:
    """Give all ranks the gradients of each layer's root."""
    if rank_groups.ranks.size == 1:
        return
    for node in graph.nodes:
        held = list(node.module.parameters()) if node.name in roots else []
        if not held:
            continue
        context = f"sending gradients of layer {node.name!r}"
        present = [parameter.grad is not None for parameter in held]
        flags = torch.tensor(present, dtype=torch.int64, device=held[0].device)
        bring_tensors(rank_groups, [flags], roots[node.name], context)
        for parameter, is_present in zip(held, flags.tolist(), strict=True):
            if not is_present:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bring_tensors(rank_groups, [parameter.grad], roots[node.name], context)


def bring_states(
    rank_groups: RankGroups,
    graph: LayerGraph,
    roots: Mapping[str, int],
    optimizers: Sequence[Optimizer],
    device: torch.device,
) -> None:
    """Give all ranks the optimizer states of each layer's parameters on its root."""
    if rank_groups.ranks.size == 1:
        return
    for optimizer in optimizers:
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for node in graph.nodes:
            if node.name not in roots:
                continue
            mine = [p for p in node.module.parameters() if id(p) in known]
            root = roots[node.name]
            is_root = rank_groups.ranks.rank == root
            states = [optimizer.state.get(p, {}) for p in mine] if is_root else None
            context = f"sending the optimizer's state of layer {node.name!r}"
            with rank_groups.guard(context):
                found = _broadcast_states(rank_groups, states, root, device)
            if not is_root:
                for parameter, state in zip(mine, found, strict=True):
                    if state:
                        optimizer.state[parameter] = state


def _broadcast_states(
    rank_groups: RankGroups, states: list[Any] | None, root: int, device: torch.device
) -> list[Any]:
    text = b""
    if states is not None:
        file = io.BytesIO()
        torch.save(states, file)
        text = file.getvalue()
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    rank_groups.broadcast(size, root)
    body = torch.empty(int(size), dtype=torch.uint8, device=device)
    if text:
        body.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    rank_groups.broadcast(body, root)
    if states is not None:
        return states
    file = io.BytesIO(body.cpu().numpy().tobytes())
    found: list[Any] = torch.load(file, map_location=device, weights_only=True)
    return found
