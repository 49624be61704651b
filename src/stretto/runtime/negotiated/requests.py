"""Requests of the negotiated engine: values that ranks compare."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class CollectiveKind(enum.StrEnum):
    """The requested collective."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    REGISTER = "register"
    """Declares a tensor set; ranks compare its members."""
    UNREGISTER = "unregister"
    """Ends a tensor set."""


class Op(enum.StrEnum):
    """How an all-reduce or a reduce-scatter combines the ranks' values."""

    SUM = "sum"
    """In the tensors' own type: integers beyond its range wrap around."""
    AVERAGE = "average"
    """Divides the sum by the number of ranks; integers truncate toward zero."""
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


_REDUCING = (CollectiveKind.ALLREDUCE, CollectiveKind.REDUCESCATTER)

DTYPES: Mapping[str, int] = {
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Supported element types, with their bytes."""

DEVICES = ("cpu", "cuda")
"""Supported types of devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One collective on one named tensor, as one rank describes it.

    Ranks match requests by name. ``rows`` and ``splits`` may differ between ranks;
    everything else must be equal, or the request fails on every rank.

    Raises:
        SpecError: a value breaks a rule of its kind.
    """

    name: str

    kind: CollectiveKind

    dtype: str = "uint8"
    """The name that torch prints, without ``torch.``: one of `DTYPES`."""

    shape: tuple[int, ...] = ()
    """Whole shape; for all-gather and all-to-all, without the first dimension."""

    device: str = "cpu"
    """Type of device: one of `DEVICES`."""

    op: Op = Op.SUM

    prescale: float = 1.0
    """Factor on every rank's values before they are combined."""

    postscale: float = 1.0
    """Factor on the combined values."""

    root: int = 0
    """The rank, within the engine's ranks, whose values a broadcast sends."""

    rows: int = 0
    """For all-gather: this rank's first dimension."""

    splits: tuple[int, ...] = ()
    """For all-to-all: rows that this rank sends to each rank."""

    group: str = ""
    """Requests of one group are launched together or fail together."""

    group_size: int = 0
    """Number of requests in that group."""

    owner: str = ""
    """Which of the caller's objects submits it, where names can't tell."""

    members: tuple[Request, ...] = ()
    """For register: the tensor set's members, sorted by name."""

    sequence: str = ""
    """Requests of one sequence, and steps of its tensor sets, are made one at a time,
    in the same order on every rank. Ranks at different ones fail, instead of waiting.
    """

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("a request's name must not be empty")
        if self.dtype not in DTYPES:
            raise SpecError(
                f"{self.kind} {self.name!r}: dtype must be one of "
                f"{', '.join(DTYPES)}, got {self.dtype}"
            )
        if self.device not in DEVICES:
            raise SpecError(
                f"{self.kind} {self.name!r}: the device must be one of "
                f"{', '.join(DEVICES)}, got {self.device}"
            )
        if self.kind is CollectiveKind.REDUCESCATTER and not self.shape:
            raise SpecError(
                f"reducescatter {self.name!r}: a scalar has no first dimension to "
                "scatter. Add one with reshape(1)."
            )
        if self.kind in _REDUCING and not (
            math.isfinite(self.prescale) and math.isfinite(self.postscale)
        ):
            raise SpecError(
                f"{self.kind} {self.name!r}: prescale and postscale must be finite, "
                f"got {self.prescale} and {self.postscale}"
            )
        if self.dtype == "bool" and self.kind in _REDUCING and self.op is Op.AVERAGE:
            raise SpecError(
                f"{self.kind} {self.name!r}: booleans have no average. Use sum (any), "
                "product (all), or cast first."
            )

    @property
    def place(self) -> str:
        """The request's name in messages."""
        return f"{self.kind} {self.name!r}"

    @property
    def elements(self) -> int:
        """Number of elements in ``shape``."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of ``shape``."""
        return self.elements * DTYPES[self.dtype]

    @property
    def common(self) -> tuple[Any, ...]:
        """The values that must be equal on every rank."""
        return tuple(getattr(self, name) for name in _COMMON)


_WORDS = {
    "kind": "operations",
    "dtype": "dtypes",
    "shape": "shapes",
    "device": "devices",
    "op": "reductions",
    "prescale": "prescale factors",
    "postscale": "postscale factors",
    "root": "root ranks",
    "group": "groups",
    "group_size": "numbers of requests in the group",
    "owner": "owners",
    "members": "members",
}
_COMMON = tuple(_WORDS)


def difference(by_rank: Sequence[Request], names: Sequence[int]) -> str | None:
    """Return what ranks disagree on, the same text everywhere, or ``None``.

    ``by_rank`` contains each rank's request of one name; ``names`` the global number of
    each rank.
    """
    first = by_rank[0]
    if all(r is first or r.common == first.common for r in by_rank[1:]):
        return None
    for key in _COMMON:
        values: dict[Any, list[int]] = {}
        for rank, request in zip(names, by_rank, strict=True):
            values.setdefault(getattr(request, key), []).append(rank)
        if len(values) == 1:
            continue
        if key == "members":
            return _members_differ(values, first.name)
        parts = "; ".join(f"{_ranks(who)}: {_shown(v)}" for v, who in values.items())
        place = first.name if key == "kind" else f"{first.kind} {first.name!r}"
        return (
            f"ranks submitted {place} with different {_WORDS[key]}: {parts}. Every "
            "rank must submit the same."
        )
    return None


def _members_differ(
    values: Mapping[tuple[Request, ...], Sequence[int]], name: str
) -> str:
    found = _first_difference(values)
    if found is None:
        return f"ranks registered {name!r} with different members"
    member, key, text = found
    if key:
        return (
            f"ranks registered {member!r} of {name!r} with different {key}: {text}. "
            "Build the same model everywhere."
        )
    return (
        f"ranks registered different tensors as {name!r}: {member!r} {text}. Build "
        "the same model everywhere."
    )


def _first_difference(
    values: Mapping[tuple[Request, ...], Sequence[int]],
) -> tuple[str, str, str] | None:
    """Return the first member that differs, in what, and how; by rank.

    What differs is empty if only some ranks have the member.
    """
    tables = [({m.name: m for m in members}, who) for members, who in values.items()]
    (mine, my_ranks), (theirs, their_ranks) = tables[:2]
    for member in sorted({*mine, *theirs}):
        if member not in mine or member not in theirs:
            has, lacks = (
                (my_ranks, their_ranks) if member in mine else (their_ranks, my_ranks)
            )
            return member, "", f"exists on {_ranks(has)}, not on {_ranks(lacks)}"
        for key in _COMMON:
            a, b = getattr(mine[member], key), getattr(theirs[member], key)
            if a != b:
                text = f"{_ranks(my_ranks)}: {_shown(a)}; "
                text += f"{_ranks(their_ranks)}: {_shown(b)}"
                return member, _WORDS[key], text
    return None


def out_of_sequence(by_rank: Mapping[int, tuple[Request, ...]]) -> str:
    """Return the text of ranks that are at different places of a sequence.

    ``by_rank`` contains the tensors that each rank reduces, or one request of another
    kind; ranks that have not begun are left out.
    """
    places: dict[tuple[Request, ...], list[int]] = {}
    for rank, requests in by_rank.items():
        places.setdefault(requests, []).append(rank)
    parts = []
    for requests, who in places.items():
        if all(request.kind is CollectiveKind.ALLREDUCE for request in requests):
            count = len(requests)
            what = f"{count} tensor{'' if count == 1 else 's'} to reduce"
        else:
            what = requests[0].name
        parts.append(f"{_ranks(who)}: {what}")
    text = f"ranks are at different places of the program: {'; '.join(parts)}. "
    reducing = {
        requests: who
        for requests, who in places.items()
        if all(request.kind is CollectiveKind.ALLREDUCE for request in requests)
    }
    found = _first_difference(reducing) if len(reducing) > 1 else None
    if found is not None:
        member, key, how = found
        differs = f"differs in its {key} ({how})" if key else how
        text += f"{member!r} {differs}. "
    return text + (
        "Every rank must reduce the same tensors in each step, and take the same "
        "number of steps; what a rank lacks is zeros there."
    )


def _ranks(numbers: Sequence[int]) -> str:
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {', '.join(map(str, numbers))}"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return str(value) if value != "" else "none"


def encode(request: Request) -> dict[str, Any]:
    """Return a request as plain values, which `decode` reads."""
    plain: dict[str, Any] = {"name": request.name, "kind": request.kind.value}
    for key, default in _DEFAULTS:
        value = getattr(request, key)
        if value != default:
            plain[key] = value
    if request.members:
        plain["members"] = [encode(member) for member in request.members]
    return plain


_DEFAULTS = tuple(
    (f.name, f.default) for f in fields(Request) if f.name not in ("name", "kind")
)


def decode(plain: Mapping[str, Any]) -> Request:
    """Return the request that `encode` wrote."""
    values = dict(plain)
    values["kind"] = CollectiveKind(values["kind"])
    if "op" in values:
        values["op"] = Op(values["op"])
    for key in ("shape", "splits"):
        if key in values:
            values[key] = tuple(values[key])
    if "members" in values:
        values["members"] = tuple(decode(member) for member in values["members"])
    return Request(**values)
