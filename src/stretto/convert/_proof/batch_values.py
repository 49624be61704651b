"""Abstract values: how a value depends on the samples of a batch.

`interpreter` computes with them instead of numbers. A loss is proved to be a mean if
its value is `Linear` of degree 0: then the mean of the ranks' gradients is the gradient
of the whole batch.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import libcst as cst

if TYPE_CHECKING:
    from collections.abc import Iterable

    _Kind = TypeVar("_Kind")


class Why(enum.Enum):
    """Why a loss cannot be shown to be a mean."""

    ACROSS = "combines samples of the batch with each other"
    SELECTED = (
        "divides by a number that depends on the samples, such as a mask's sum, so "
        "ranks with different numbers count equally"
    )
    NONLINEAR = (
        "computes with a mean or a sum over samples in a way that is not linear, such "
        "as a product, a root or a maximum"
    )
    DECIDED = "depends on a decision on the rank's samples"
    COUNTED = (
        "depends on the number of a rank's samples, which is a part of the batch's, in "
        "a way that is not shown to be proportional"
    )
    SIZED = "combines the samples with a fixed number of elements, one for each of them"
    PLACED = "sets something at a fixed place of the batch, which each rank has once"
    DRAWN = "depends on a number that each rank draws for itself"
    BACKWARD = "has a backward that is not shown to treat each sample by itself"
    UNREAD = "cannot be read here"
    MIXED = "adds values that grow differently with the number of samples"


class Unset(enum.Enum):
    """A constant whose value is not known."""

    UNSET = 0


UNSET = Unset.UNSET


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that does not depend on the batch."""

    value: Hashable = UNSET
    grad: bool = False
    """Whether it may depend on parameters."""
    uniform: bool = False
    """Whether all elements of a tensor are certainly equal."""
    shape: tuple[int | Count | None, ...] | None = None
    """The sizes of a tensor, ``None`` where one is not known."""
    counted: bool = False
    """Whether it has a dimension of the samples, along which elements are equal."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor with an axis of samples, or something made of such tensors."""

    axis: int | None = 0
    """Where the samples are; ``None`` is unknown."""
    ndim: int | None = None
    least: int = 1
    """The smallest number of dimensions that it may have, if ``ndim`` is unknown."""
    degree: int = 0
    """The power of the number of samples by which it is multiplied."""
    even: bool = True
    """Whether each sample has the same number of elements."""
    shifted: cst.CSTNode | None = None
    """Where something that is `Linear` was added to each element."""
    raw: bool = False
    """Whether it is a part of a loader's batch, a tensor or a collection."""
    whole: bool = False
    """Whether it is a loader's whole batch."""
    opaque: cst.CSTNode | None = None
    """The call that made it, which cannot be read."""
    trusted: bool = False
    """Whether that call is of a library whose losses are means."""
    copies: int = 1
    """How many groups of all samples it consists of."""
    thin: bool = False
    """Whether the samples may be its only dimension."""
    single: bool = False
    """Whether its last dimension has one element."""
    sorted: bool = False
    """Whether values of the batch decide on the order of its samples."""
    turned: bool = False
    """Whether the samples are its last dimension, if it is a matrix."""
    layer: cst.Call | None = None
    """The call of a layer that takes a batch only if this has ``rank`` dimensions."""
    rank: int = 0
    kind: str = ""
    """``bool`` for a condition, ``order`` for indices that reorder samples."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A sum over samples, divided by a power of their number."""

    degree: int = 0
    """0 for a mean, 1 for a sum."""
    mixed: bool = False
    """Whether parts have different degrees."""


@dataclass(frozen=True, slots=True)
class Item:
    """A value of one sample, in a loop over samples."""

    degree: int = 0
    place: str = ""
    """``here`` for the sample's own place in the batch, ``moved`` for a number computed
    from it."""


@dataclass(frozen=True, slots=True)
class Count:
    """A number proportional to a power of the number of samples."""

    degree: int = 1
    exact: bool = True
    """Whether it is the number itself."""
    affine: bool = False
    """Whether a constant was added, or it was rounded: it may only be a size."""
    grad: bool = False
    """Whether it may depend on parameters."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A random number that differs by rank."""


@dataclass(frozen=True, slots=True)
class Unproved:
    """A value that depends on the batch in another way."""

    why: Why
    node: cst.CSTNode


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a tensor."""

    of: Rows


@dataclass(frozen=True, slots=True)
class SliceValue:
    """A slice."""

    lower: Value
    upper: Value
    step: Value

    @property
    def ends(self) -> tuple[Value, Value]:
        """Return where it begins and where it ends."""
        return self.lower, self.upper

    @property
    def is_whole(self) -> bool:
        """Return whether it takes everything."""
        begins = self.lower in (NONE, Constant(0))
        return begins and self.upper == NONE and self.step in (NONE, Constant(1))


@dataclass(frozen=True, slots=True)
class Seq:
    """A tuple or a list of known length."""

    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Iter:
    """Something to iterate over, with one value for all elements."""

    item: Value
    samples: bool = False
    """Whether there is one element for each sample."""
    chosen: bool = False
    """Whether some samples may be left out."""


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """A list, a dict or an object of a class of the script."""

    key: int
    kind: cst.ClassDef | str


@dataclass(frozen=True, slots=True)
class Func:
    """A function of the script, with what its names refer to."""

    node: cst.FunctionDef | cst.Lambda
    home: int
    """The frame in which it was defined."""
    receiver: Value | None = None
    owner: cst.ClassDef | None = None


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the script."""

    node: cst.ClassDef
    home: int


@dataclass(frozen=True, slots=True)
class LibraryName:
    """A name of a library."""

    name: str


@dataclass(frozen=True, slots=True)
class LibraryResult:
    """The result of a library call on values that do not depend on the batch."""

    name: str
    node: cst.Call
    args: tuple[Value, ...] = ()
    options: tuple[tuple[str, Value], ...] = ()

    def option(self, name: str, place: int = -1) -> Value | None:
        """Return an argument, given by name or by position."""
        for key, value in self.options:
            if key == name:
                return value
        return self.args[place] if 0 <= place < len(self.args) else None


@dataclass(frozen=True, slots=True)
class BoundMethod:
    """A method of a value that is no object of the script."""

    of: Value
    name: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of several values."""

    values: frozenset[Value]


Value = (
    Constant
    | Rows
    | Linear
    | Item
    | Count
    | Draw
    | Unproved
    | Shape
    | SliceValue
    | Seq
    | Iter
    | ObjectRef
    | Func
    | Class
    | LibraryName
    | LibraryResult
    | BoundMethod
    | OneOf
)

NONE = Constant(None)
ELLIPSIS = Constant(...)
_MOST = 12
"""The largest number of values of a `OneOf`."""


def is_of_batch(value: Value) -> bool:
    """Return whether a value depends on a rank's samples or random numbers."""
    if isinstance(value, Seq):
        return any(is_of_batch(v) for v in value.items)
    if isinstance(value, Iter):
        return is_of_batch(value.item)
    if isinstance(value, LibraryResult):
        return any(is_of_batch(v) for v in value.args) or any(
            is_of_batch(v) for _, v in value.options
        )
    if isinstance(value, OneOf):
        return any(is_of_batch(v) for v in value.values)
    return isinstance(value, Rows | Linear | Item | Unproved | Draw)


def has_count(value: Value) -> bool:
    """Return whether a value is, or contains, a number of samples."""
    if isinstance(value, Seq):
        return any(has_count(v) for v in value.items)
    if isinstance(value, Iter):
        return has_count(value.item)
    if isinstance(value, OneOf):
        return any(has_count(v) for v in value.values)
    if isinstance(value, SliceValue):
        return any(has_count(v) for v in (*value.ends, value.step))
    if isinstance(value, LibraryResult):
        return any(has_count(v) for v in (*value.args, *dict(value.options).values()))
    return isinstance(value, Count)


def first_rows(values: Iterable[Value]) -> Rows | None:
    """Return the first tensor with samples among values and their elements."""
    return _first(values, Rows)


def first_bad(values: Iterable[Value]) -> Unproved | None:
    """Return the first value that cannot be classified among values."""
    return _first(values, Unproved)


def _first(values: Iterable[Value], kind: type[_Kind]) -> _Kind | None:
    """Return the first value of a kind among values and their elements."""
    for value in values:
        if isinstance(value, kind):
            return value
        inner: _Kind | None = None
        if isinstance(value, Seq):
            inner = _first(value.items, kind)
        elif isinstance(value, Iter):
            inner = _first([value.item], kind)
        elif isinstance(value, OneOf):
            inner = _first(value.values, kind)
        elif isinstance(value, LibraryResult):
            inner = _first([*value.args, *(v for _, v in value.options)], kind)
        if inner is not None:
            return inner
    return None


def first_nonlinear(values: Iterable[Value], node: cst.CSTNode) -> Unproved | None:
    """Return what keeps a function of values from treating each sample by itself.

    Such a function is not linear, so it may get neither a result over samples nor rows
    that contain one, or a power of the number of samples.
    """
    for value in values:
        if isinstance(value, Linear):
            return Unproved(Why.NONLINEAR, node)
        if isinstance(value, Rows) and value.shifted is not None:
            return Unproved(Why.ACROSS, value.shifted)
        if isinstance(value, Rows) and value.degree:
            return Unproved(Why.NONLINEAR, node)
    return None


def is_list_of_samples(value: Value) -> bool:
    """Return whether a value is a list with a part of each sample."""
    return isinstance(value, Iter) and value.samples and isinstance(value.item, Item)


def join(one: Value, other: Value, node: cst.CSTNode) -> Value:
    """Return a value that stands for either of two."""
    if one == other:
        return one
    for a, b in ((one, other), (other, one)):
        if isinstance(a, Unproved):
            return a
        if isinstance(a, Constant):
            if isinstance(b, Constant):
                shape = a.shape if a.shape == b.shape else None
                counted = a.counted or b.counted
                return Constant(grad=a.grad or b.grad, shape=shape, counted=counted)
            if a.value is None or not isinstance(b, Count | Draw | OneOf):
                return b
            if isinstance(b, Draw):
                return b
            if isinstance(b, Count):
                return Unproved(Why.UNREAD, node)
    if isinstance(one, Seq) and isinstance(other, Seq):
        if len(one.items) == len(other.items):
            pairs = zip(one.items, other.items, strict=True)
            return Seq(tuple(join(a, b, node) for a, b in pairs))
        parts = [*one.items, *other.items]
        return Iter(joined(parts, node))
    if isinstance(one, Iter) and isinstance(other, Iter):
        return Iter(
            join(one.item, other.item, node),
            one.samples or other.samples,
            one.chosen or other.chosen,
        )
    if isinstance(one, Iter) and isinstance(other, Seq):
        return replace(one, item=joined([one.item, *other.items], node))
    if isinstance(other, Iter) and isinstance(one, Seq):
        return join(other, one, node)
    if isinstance(one, Rows) and isinstance(other, Rows):
        return _join_rows(one, other, node)
    if isinstance(one, Linear) and isinstance(other, Linear):
        return Unproved(Why.MIXED, node)
    if isinstance(one, Count) and isinstance(other, Count):
        if one.degree == other.degree:
            return Count(
                one.degree,
                exact=False,
                affine=one.affine or other.affine,
                grad=one.grad or other.grad,
            )
        return Unproved(Why.UNREAD, node)
    of_data = (Rows, Linear, Item, Count, Draw)
    if isinstance(one, of_data) and isinstance(other, of_data):
        for a, b in ((one, other), (other, one)):
            if isinstance(a, Rows) and a.opaque is not None and isinstance(b, Linear):
                return a
        return Unproved(Why.UNREAD, node)
    values = _values(one) | _values(other)
    return Constant() if len(values) > _MOST else OneOf(values)


def joined(values: Iterable[Value], node: cst.CSTNode) -> Value:
    """Return a value that stands for any of several; without any, a constant."""
    out: Value | None = None
    for value in values:
        out = value if out is None else join(out, value, node)
    return Constant() if out is None else out


def _values(value: Value) -> frozenset[Value]:
    return value.values if isinstance(value, OneOf) else frozenset([value])


def _join_rows(one: Rows, other: Rows, node: cst.CSTNode) -> Value:
    if one.degree != other.degree:
        return Unproved(Why.MIXED, node)
    return replace(
        one,
        axis=one.axis if one.axis == other.axis else None,
        ndim=one.ndim if one.ndim == other.ndim else None,
        least=min(one.least, other.least),
        even=one.even and other.even,
        shifted=one.shifted or other.shifted,
        raw=one.raw or other.raw,
        whole=one.whole or other.whole,
        opaque=one.opaque if one.opaque is not None else other.opaque,
        trusted=one.trusted or other.trusted,
        copies=max(one.copies, other.copies),
        thin=one.thin or other.thin,
        sorted=one.sorted or other.sorted,
        turned=one.turned or other.turned,
        kind=one.kind if one.kind == other.kind else "",
    )


def with_elements(values: Iterable[Value]) -> list[Value]:
    """Return values, and those in tuples and lists in place of these."""
    out: list[Value] = []
    for value in values:
        if isinstance(value, Seq):
            out += with_elements(value.items)
        elif isinstance(value, Iter):
            out.append(value.item)
        elif isinstance(value, OneOf):
            out += with_elements(value.values)
        else:
            out.append(value)
    return out
