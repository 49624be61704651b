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

# Note [A shadow that was replaced]
A graph keeps the shadows with which it computed, and a later forward may use others: a
parameter was frozen meanwhile, or got another storage. So gradients do not stay in a
shadow: each is added to those of its parameter when it arrives.
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
        self._grads: dict[int, Tensor] = {}
        """See Note [A shadow that was replaced]."""

    def use_for(self, modules: Iterable[nn.Module]) -> None:
        """Use shadows for the trained parameters that these modules hold directly."""
        self._places = []
        seen: set[int] = set()
        for module in modules:
            if id(module) in seen:
                continue
            seen.add(id(module))
            for name, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is not None and parameter.requires_grad:
                    self._places.append((module._parameters, name, parameter))  # noqa: SLF001
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
        def arrived(shadow: Tensor) -> None:
            shadows, kept = weak(), original()
            if shadows is None or kept is None:
                raise StrettoError(MODEL_GONE)
            shadows._arrived(kept, shadow)  # noqa: SLF001

        shadow.register_post_accumulate_grad_hook(arrived)
        return shadow

    def _arrived(self, parameter: nn.Parameter, shadow: Tensor) -> None:
        grad, shadow.grad = shadow.grad, None
        if grad is not None:  # a function's backward may return None
            held = self._grads.get(id(parameter))
            if held is not None:
                with torch.no_grad():
                    grad = held + grad
            self._grads[id(parameter)] = grad
        self._ready(parameter)

    def grad(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter that arrived through the layers."""
        return self._grads.get(id(parameter))

    def set_grad(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Replace the gradient of a parameter that arrived through the layers."""
        if grad is None:
            self._grads.pop(id(parameter), None)
        else:
            self._grads[id(parameter)] = grad

    def clear(self) -> None:
        """Drop all gradients that have not been delivered."""
        self._grads.clear()

    def forget(self) -> None:
        """Drop all shadows: other layers run on this rank from now on."""
        self._by_id.clear()
        self._grads.clear()

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
