"""A rank's place in its job, in the variables that torchrun and most launchers set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T", int, float)

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Rank, size, rank and size on the host, and the host's index."""

PORT = 29500
"""The port of rank 0's store, if the launcher sets none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's place, as far as its launcher sets it; ``None`` if it does not.

    Raises:
        SpecError: the rank is outside of the size.
    """

    rank: int

    size: int

    local_rank: int | None = None

    local_size: int | None = None

    host: int | None = None
    """Index of the host."""

    address: str = "127.0.0.1"
    """Address of rank 0's store."""

    port: int = PORT

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise SpecError(
                f"rank must be from 0 to size - 1, got rank {self.rank} of "
                f"{self.size}: see RANK and WORLD_SIZE, or HOROVOD_RANK and "
                "HOROVOD_SIZE"
            )


def launched_place(
    environment: Mapping[str, str], names: tuple[str, ...] = NAMES
) -> Place | None:
    """Return a rank's place, or ``None`` if no launcher has set it.

    Args:
        environment: Variables by name.
        names: Of the variables, in the order of `NAMES`. Those of the address are
            always ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises:
        SpecError: a value is not a number, or a rank is outside of its size.
    """
    rank, size, local_rank, local_size, host = (
        whole_number(environment, name) for name in names
    )
    if rank is None or size is None:
        return None
    port = whole_number(environment, "MASTER_PORT")
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host=host,
        address=environment.get("MASTER_ADDR") or "127.0.0.1",
        port=PORT if port is None else port,
    )


def whole_number(environment: Mapping[str, str], name: str) -> int | None:
    """Return a variable's whole number, or ``None`` if it is not set or empty.

    Raises:
        SpecError: it is not a whole number.
    """
    return _parsed(environment, name, int, "a whole number")


def decimal_number(environment: Mapping[str, str], name: str) -> float | None:
    """Return a variable's number, or ``None`` if it is not set or empty.

    Raises:
        SpecError: it is not a number.
    """
    return _parsed(environment, name, float, "a number")


def _parsed(
    environment: Mapping[str, str], name: str, parse: Callable[[str], T], what: str
) -> T | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        return parse(text)
    except ValueError as exc:
        raise SpecError(f"{name} must be {what}, got {text!r}") from exc
