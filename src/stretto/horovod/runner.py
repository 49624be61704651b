"""`horovod.run`: calls a function on every rank of a new job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
) -> list[Any]:
    """What every rank returned, by rank."""
    raise NotImplementedError
