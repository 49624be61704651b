"""Whether a rank's parameters of layers that it does not run are current.

A state that is read while they are not is refused: it would hold old values.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from stretto.runtime.agreement import Ranks


@final
class Freshness:
    """Watches one module on one rank."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own: tuple[nn.Parameter, ...] = ()
        self._foreign: tuple[str, ...] = ()
        self._own_versions = -1
        self.is_stale = False
        """Whether there was a training forward since others' parameters came."""
        for part in module.modules():
            part.register_state_dict_pre_hook(_Told(self, "check"))
        module.register_load_state_dict_post_hook(_Told(self, "loaded"))

    def runs(self, own: Sequence[nn.Parameter], foreign: Sequence[str]) -> None:
        """The parameters of layers run here, and the names of the other layers."""
        self._own, self._foreign = tuple(own), tuple(foreign)

    def refreshed(self) -> None:
        """All parameters have come."""
        self.is_stale = False
        self._own_versions = self._versions()

    def loaded(self) -> None:
        """A whole state was loaded."""
        self.is_stale = False
        self._own_versions = -1

    def check(self) -> None:
        """Refuses a state that is not current.

        Raises:
            StrettoError: naming a layer of which it is not.
        """
        if not self._foreign:
            return
        stepped = self._own_versions >= 0 and self._own_versions != self._versions()
        if self.is_stale or stepped:
            raise StrettoError(
                f"{self._ranks.name(self._ranks.rank)} does not run layer "
                f"{self._foreign[0]!r} and has no current parameters of it: let all "
                "ranks call full_state_dict(), or refresh() after optimizer.step()"
            )

    def _versions(self) -> int:
        return sum(parameter._version for parameter in self._own)  # noqa: SLF001


@final
class _Told:
    """Calls a method while its object is there; a copied module calls none."""

    def __init__(self, told: Freshness | None, method: str) -> None:
        self._told = None if told is None else weakref.ref(told)
        self._method = method

    def __call__(self, *_args: Any) -> None:
        told = None if self._told is None else self._told()
        if told is not None:
            getattr(told, self._method)()

    def __reduce__(self) -> Any:
        return _Told, (None, self._method)
