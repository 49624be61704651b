"""Keep PyTorch from warning a user of hooks that stretto has added.

A compiled model's call warns of hooks on all modules, and raises where warnings are
errors. The hooks of a measurement ignore the wrapper that the warning is about.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, final

from torch.nn.modules import module as modules

_MESSAGE = r"Using `torch.compile\(module\)` when there are global hooks"

_open: set[int] = set()
_filters: list[Any] = []


@final
class QuietHooks:
    """No warning of global hooks until `remove`; create it before adding them.

    Hooks that the program has added before are still reported.
    """

    def __init__(self) -> None:
        if not _open and not modules._has_any_global_hook():  # noqa: SLF001
            warnings.filterwarnings("ignore", message=_MESSAGE)
            _filters.append(warnings.filters[0])
        _open.add(id(self))

    def remove(self) -> None:
        """Restore the warning."""
        _open.discard(id(self))
        if _open or not _filters:
            return
        with contextlib.suppress(ValueError):  # the program has reset its filters
            warnings.filters.remove(_filters.pop())  # type: ignore[attr-defined]
            getattr(warnings, "_filters_mutated", lambda: None)()
