"""Detect modules and parameters that were replaced after a model was built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

if TYPE_CHECKING:
    from torch import nn


@final
class Structure:
    """A module's submodules and parameters at the time of building."""

    def __init__(self, module: nn.Module) -> None:
        self._rows: list[tuple[dict[str, Any], str, Any, str]] = []
        self._sizes: list[tuple[dict[str, Any], int, str, set[str]]] = []
        """Modules' own parameters at the time of building: number, place and names."""
        self.parameters: list[tuple[str, nn.Parameter]] = []
        """Each with its name, once."""
        self._types: list[tuple[torch.dtype, torch.device]] = []
        for prefix, part in module.named_modules():
            where = f"{prefix}." if prefix else ""
            own = part._parameters  # noqa: SLF001
            self._sizes.append((own, len(own), where, set(own)))
            for held in (part._modules, part._parameters):  # noqa: SLF001
                self._rows += [
                    (held, name, value, where + name) for name, value in held.items()
                ]
        self.parameters = list(module.named_parameters())
        self._types = [_kind(p) for _, p in self.parameters]

    def changed(self) -> str | None:
        """Return the name of something replaced, added, moved or removed, or None."""
        for held, name, value, full in self._rows:
            if held.get(name) is not value:
                return full
        for own, size, where, names in self._sizes:
            if len(own) != size:
                new = next((name for name in own if name not in names), None)
                if new is not None:
                    return where + new
        pairs = zip(self.parameters, self._types, strict=True)
        with _as_plain():
            return next((name for (name, p), kind in pairs if _kind(p) != kind), None)

    def lacked(self, name: str) -> bool:
        """Return whether a parameter or module that `changed` names is a new one."""
        return all(full != name for *_, full in self._rows)

    def trained(self) -> tuple[bool, ...]:
        """Return which parameters need a gradient now."""
        with _as_plain():
            return tuple(p.requires_grad for _, p in self.parameters)


def _as_plain() -> Any:
    """Return a context in which guarded parameters answer as fast as others."""
    return torch._C.DisableTorchFunctionSubclass()  # noqa: SLF001


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def described_tensors(module: nn.Module) -> list[str]:
    """Return name, sizes and type of each parameter and buffer, in order."""
    return [
        f"{name!r} of {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
