"""Finish a module's parameters when the module is called.

# Note [Hooks only while something is pending]
Every module of the model has a pre-hook from an optimizer's step to the end of the next
forward, and none at other times. A copy or pickle of a module that is made in between
contains what a hook leaves there: a function of the standard library that does nothing,
so that a file can be loaded without this package.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stretto.runtime.forward.member import BucketMember, Overlap

_KEY = "stretto-finish"
"""The hook's key among a module's; handles of other hooks have numbers."""

_INERT = contextlib.nullcontext().__exit__
"""Accepts what a pre-hook gets, and returns None."""


@final
class _FinishingHook:
    """The pre-hook of one module."""

    __slots__ = ("_below", "_is_root", "_overlap", "_own")

    def __init__(
        self,
        overlap: Overlap,
        own: tuple[BucketMember, ...],
        below: tuple[BucketMember, ...],
        *,
        is_root: bool,
    ) -> None:
        self._overlap = overlap
        self._own = own
        self._below = below
        self._is_root = is_root

    def __call__(self, module: nn.Module, _args: Any) -> None:
        if not torch.is_grad_enabled():
            self._overlap.finish_all()
            return
        if self._is_root:
            self._overlap.enter()
        # An evaluating module may look at what is below it before it calls that.
        for member in self._own if module.training else self._below:
            if member.guarded:
                self._overlap.touch(member)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._overlap.finish_all(keep_hooks=True)
        return _INERT

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._overlap.finish_all(keep_hooks=True)
        return _INERT.__reduce_ex__(protocol)


@final
class ModuleHooks:
    """The hooks of a model's modules."""

    def __init__(self, overlap: Overlap, root: nn.Module) -> None:
        self._overlap = overlap
        self._root = root
        self._installed = False
        self._compiled: tuple[nn.Module, ...] = ()
        self._rows: list[tuple[nn.Module, _FinishingHook]] = []
        self.at_entry: tuple[BucketMember, ...] = ()
        """Members inside compiled modules, whose hooks would be compiled, too."""

    def build(self, members: Iterable[BucketMember]) -> None:
        """Make the hooks of all modules outside of compiled ones."""
        of = {id(member.parameter): member for member in members}
        modules = list(self._root.modules())
        self._compiled = tuple(m for m in modules if _is_compiled(m))
        inside = {id(m) for top in self._compiled for m in top.modules()}
        self.at_entry = tuple(
            dict.fromkeys(
                member
                for top in self._compiled
                for member in _members(top.parameters(), of)
            )
        )
        self._rows = [
            (
                module,
                _FinishingHook(
                    self._overlap,
                    _members(module.parameters(recurse=False), of),
                    _members(module.parameters(), of),
                    is_root=module is self._root,
                ),
            )
            for module in modules
            if id(module) not in inside
        ]

    def clear(self) -> None:
        """Drop the model's modules."""
        self.remove()
        self._rows, self._compiled, self.at_entry = [], (), ()
        del self._root

    def changed(self) -> bool:
        """Return whether modules were compiled since, or nothing was built."""
        if not self._rows and not self._compiled:
            return True
        return any(_is_compiled(module) for module, _ in self._rows)

    def install(self) -> None:
        """Add the hooks."""
        if not self._installed:
            self._installed = True
            for module, reader in self._rows:
                module._forward_pre_hooks[_KEY] = reader  # type: ignore[index]  # noqa: SLF001

    def remove(self) -> None:
        """Remove the hooks."""
        if self._installed:
            self._installed = False
            for module, _ in self._rows:
                module._forward_pre_hooks.pop(_KEY, None)  # type: ignore[call-overload]  # noqa: SLF001


def _members(
    parameters: Iterable[nn.Parameter], of: Mapping[int, BucketMember]
) -> tuple[BucketMember, ...]:
    found = (of.get(id(parameter)) for parameter in parameters)
    return tuple(member for member in found if member is not None)


def _is_compiled(module: nn.Module) -> bool:
    return (
        module.__dict__.get("_compiled_call_impl") is not None
        or type(module).__name__ == "OptimizedModule"
    )
