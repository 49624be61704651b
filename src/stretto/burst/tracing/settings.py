"""Refuse a forward that changes modes and plain values that PyTorch's modules read.

Layers run these modules as they were before forward. An assignment is refused where it
is made, by ``patching``. A write into a module's ``__dict__`` is seen only later: when
the module is called, or when forward has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from stretto.errors import SpecError

if TYPE_CHECKING:
    from torch import nn

_KINDS = (bool, int, float, str, tuple, type(None))
"""Types of values that a module of PyTorch reads when it is called."""


@final
class ModuleSettings:
    """The settings of a model's modules before forward.

    These are the mode of any module, and plain values that one of PyTorch's own reads
    when it is called, such as a dropout's rate.
    """

    def __init__(self, root: nn.Module) -> None:
        self._before = {
            id(part): (
                part,
                {k: v for k, v in vars(part).items() if is_setting(part, k, v)},
            )
            for part in root.modules()
        }

    def change(self) -> SpecError | None:
        """Return the error of a change of any module, without its line."""
        return self._first([part for part, _ in self._before.values()])

    def change_in(self, module: nn.Module) -> SpecError | None:
        """Return the error of a change of a module or one inside it."""
        return self._first(module.modules())

    def restore(self) -> None:
        """Undo all changes."""
        for part, values in self._before.values():
            vars(part).update(values)

    def _first(self, parts: Any) -> SpecError | None:
        for part in parts:
            _, values = self._before.get(id(part), (part, {}))
            now = vars(part)
            for name, value in values.items():
                new = now.get(name, value)
                if new is not value and new != value:
                    return changes(part, name)
        return None


def is_change(module: nn.Module, name: str, value: Any) -> bool:
    """Return whether an assignment to an attribute changes a setting."""
    before = vars(module).get(name, value)
    if name == "training":
        return value is not before
    return (
        is_setting(module, name, value)
        and is_setting(module, name, before)
        and before != value
    )


def changes(module: nn.Module, name: str) -> SpecError:
    """Return the error of a forward that changes a setting; its line comes before."""
    kind = type(module).__name__
    if name == "training":
        return SpecError(
            f"changes the mode (train or eval) of a {kind} in forward, which layers "
            "on other ranks would not: set it outside of the model, such as in its "
            "method train()"
        )
    return SpecError(
        f"changes {name!r} of a {kind} in forward, which layers on other ranks would "
        "not: call the function of torch.nn.functional with the value, or set it in "
        "the training loop"
    )


def is_setting(module: nn.Module, name: str, value: Any) -> bool:
    """Return whether an attribute is a mode, or a plain value that torch reads."""
    if name == "training":
        return True
    of_torch = type(module).__module__.startswith("torch.nn.modules.")
    return of_torch and isinstance(value, _KINDS)
