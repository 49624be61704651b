"""Leaf tensors with which layers compute in place of their parameters.

# Note [Two gradients of one parameter]
A loss may also use a parameter directly: an L2 penalty, a temperature. The gradients
that arrive through the layers are added over the ranks, already weighted; a direct
gradient belongs to this rank's loss and must be weighted first. Autograd adds both
before any hook sees them, so layers compute with a shadow: another leaf on the same
storage. The layers' gradient arrives in the shadow, the direct one in the parameter.

# Note [Hooks hold nothing]
Garbage collection does not see what autograd's hooks hold. A hook on a tensor that held
its model would keep the model, its threads and its connections until the process ends.
Hooks therefore refer to models and parameters weakly.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from stretto.errors import StrettoError
from stretto.runtime.torch_compat import without_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MODEL_GONE = (
    "backward: the burst model of this loss was deleted before its backward, so its "
    "gradients can't be delivered. Keep the model until backward has ended."
)


@final
class Shadows:
    """The shadows of one model's parameters on one rank."""

    def __init__(self, ready: Callable[[nn.Parameter], None]) -> None:
        self._ready = ready
        self._by_id: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    def use_for(
        self, modules: Iterable[nn.Module], loose: Iterable[nn.Parameter]
    ) -> None:
        """Use shadows for the trained parameters that these modules hold directly.

        ``loose`` are parameters that no module computes with, only the loss.
        """
        self._places = []
        seen: set[int] = set()
        kept = {id(parameter): parameter for parameter in loose}
        for module in modules:
            if id(module) in seen:
                continue
            seen.add(id(module))
            for name, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is not None and parameter.requires_grad:
                    self._places.append((module._parameters, name, parameter))  # noqa: SLF001
                    kept[id(parameter)] = parameter
        for key in self._by_id.keys() - kept.keys():
            del self._by_id[key]
        for parameter in kept.values():
            self._make(parameter)

    def _make(self, parameter: nn.Parameter) -> nn.Parameter:
        found = self._by_id.get(id(parameter))
        if found is not None and found[1].data_ptr() == parameter.data_ptr():
            return found[1]
        shadow = nn.Parameter(parameter.detach())
        self._by_id[id(parameter)] = (parameter, shadow)

        # See Note [Hooks hold nothing].
        weak, original = weakref.ref(self), weakref.ref(parameter)

        @without_dynamo
        def arrived(_shadow: Tensor) -> None:
            shadows, kept = weak(), original()
            if shadows is None or kept is None:
                raise StrettoError(MODEL_GONE)
            shadows._ready(kept)  # noqa: SLF001

        shadow.register_post_accumulate_grad_hook(arrived)
        return shadow

    def grad(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter that arrived through the layers."""
        found = self._by_id.get(id(parameter))
        return None if found is None else found[1].grad

    def set_grad(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Replace the gradient of a parameter's shadow."""
        if id(parameter) in self._by_id:
            self._by_id[id(parameter)][1].grad = grad

    def clear(self) -> None:
        """Drop all gradients that have not been delivered."""
        for _, shadow in self._by_id.values():
            shadow.grad = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the modules hold shadows while a forward runs that needs gradients."""
        if not torch.is_grad_enabled():
            yield
            return
        for owner, name, parameter in self._places:
            owner[name] = self._make(parameter)
        try:
            yield
        finally:
            for owner, name, parameter in self._places:
                owner[name] = parameter
