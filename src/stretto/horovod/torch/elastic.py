"""Training that goes on when ranks come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """A training function that is called again after ranks came or went."""
    raise NotImplementedError


class TorchState:
    """State that survives the loss of a rank."""

    def __init__(
        self,
        model: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        raise NotImplementedError


class ElasticSampler(Sampler[int]):
    """Divides what of an epoch is not yet seen among the ranks that are there."""

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:  # noqa: FBT001, FBT002
        raise NotImplementedError
