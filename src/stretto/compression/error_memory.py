"""The state of error feedback: a vector per parameter, saved under its name."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


@final
class ErrorMemory:
    """One vector per parameter, found by the parameter object itself.

    Buckets change with the plan and parameters do not, so what error feedback keeps
    outlives a plan. Parameters are not kept alive: the Reducer keeps its hook's state.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def get(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's vector, if it has one."""
        row = self._rows.get(id(parameter))
        if row is None or row[0]() is not parameter:
            return None
        return row[1]

    def put(self, parameter: Tensor, vector: Tensor) -> None:
        """Set a parameter's vector, as many values as the parameter has."""
        self._rows[id(parameter)] = (weakref.ref(parameter), vector)

    def pop(self, parameter: Tensor) -> Tensor | None:
        """Remove a parameter's vector and return it, if it has one."""
        vector = self.get(parameter)
        self._rows.pop(id(parameter), None)
        return vector

    def copy(self) -> ErrorMemory:
        """Return another memory of the same vectors."""
        other = ErrorMemory()
        other._rows |= self._rows
        return other

    def saved(self, model: nn.Module) -> dict[str, Tensor]:
        """Return copies of the vectors by the names of ``model``'s parameters."""
        found = ((name, self.get(p)) for name, p in _named(model))
        return {name: v.clone() for name, v in found if v is not None}

    def load(self, model: nn.Module, vectors: Mapping[str, Tensor]) -> None:
        """Replace everything by vectors that `saved` returned.

        Raises:
            SpecError: a name or a size is not one of the model's.
        """
        named = dict(_named(model))
        for name, vector in vectors.items():
            if name not in named:
                raise SpecError(
                    f"the saved error feedback has {name!r}, a parameter that this "
                    "model lacks: load it into the model that it was saved for"
                )
            if vector.numel() != named[name].numel():
                raise SpecError(
                    f"the saved error feedback of {name!r} has {vector.numel()} "
                    f"values, the parameter {named[name].numel()}: load it into the "
                    "model that it was saved for"
                )
        self._rows.clear()
        for name, vector in vectors.items():
            parameter = named[name]
            self.put(parameter, vector.detach().clone().to(parameter.device))


def _named(model: nn.Module) -> list[tuple[str, Any]]:
    """Return parameters by the names that they have without DDP."""
    module = model.module if isinstance(model, TorchDDP) else model
    return list(module.named_parameters())


def clear_not_finite(vector: Tensor) -> None:
    """Set values that are NaN or infinite to zero, so that no later step sends them."""
    torch.nan_to_num_(vector, nan=0.0, posinf=0.0, neginf=0.0)
