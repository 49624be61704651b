"""NumPy arrays reduced over ranks: the part that all frameworks but torch share.

# Note [Staging]
A framework reuses the memory that a callback reads as soon as the callback returns, and
`TensorSet` reduces in place. So `submit` copies each array into memory of its own, and
`wait` hands this memory out: it is the caller's, until `recycle` returns it.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from stretto.errors import SpecError, StrettoError
from stretto.runtime.negotiated import CollectiveKind, Op, Request
from stretto.runtime.negotiated.requests import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.runtime.negotiated import Engine, TensorSet

_LINEAR = (Op.SUM, Op.AVERAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRow:
    """One array that every rank submits once per step.

    Raises:
        SpecError: arrays of this dtype can't be sent.
    """

    name: str

    shape: tuple[int, ...]

    dtype: np.dtype[Any]
    """Native byte order; bfloat16 is that of ``ml_dtypes``."""

    def __post_init__(self) -> None:
        wire_dtype(self.dtype, self.name)

    @property
    def bytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def wire_dtype(dtype: np.dtype[Any], name: str) -> str:
    """Return the name of the engine's dtype for arrays of ``dtype``.

    Complex numbers travel as pairs of real numbers.

    Raises:
        SpecError: the engine has no such dtype.
    """
    found = {"complex64": "float32", "complex128": "float64"}.get(
        dtype.name, dtype.name
    )
    if found not in DTYPES or not dtype.isnative:
        raise SpecError(
            f"array {name!r}: dtype must be one of {', '.join(DTYPES)}, complex64 or "
            f"complex128, got {dtype}. Convert it first."
        )
    return found


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a contiguous array's memory as a tensor; complex numbers as pairs."""
    if array.dtype.kind == "c":
        # A view of another size needs a dimension.
        pairs = array[..., np.newaxis].view(array.real.dtype)
        return torch.from_numpy(pairs)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def request_for(
    row: ArrayRow,
    *,
    kind: CollectiveKind = CollectiveKind.ALLREDUCE,
    op: Op = Op.SUM,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Request:
    """Return the engine's request for an array, with its whole shape.

    Raises:
        SpecError: the reduction isn't defined for complex numbers.
    """
    pair = (2,) if row.dtype.kind == "c" else ()
    if pair and kind is CollectiveKind.ALLREDUCE and op not in _LINEAR:
        raise SpecError(
            f"array {row.name!r}: {op} isn't provided for {row.dtype}. Reduce real "
            "and imaginary parts separately."
        )
    return Request(
        name=row.name,
        kind=kind,
        dtype=wire_dtype(row.dtype, row.name),
        shape=(*row.shape, *pair),
        op=op,
        prescale=prescale,
        postscale=postscale,
    )


@final
class Exchange:
    """Arrays that all ranks reduce together, once per step.

    Every rank constructs it, with the same rows. In each step every index is submitted
    once, in any order and from any thread, then `wait` returns the results.

    Args:
        engine: The ranks.
        name: Equal on all ranks, and unique among the engine's sets in use.
        rows: The arrays; names are distinct.
        op: The reduction.
        prescale: Factor on each rank's values before the reduction.
        postscale: Factor on the results.
        sequence: As in `stretto.runtime.negotiated.Request`.

    Raises:
        SpecError: names are not distinct, or a dtype isn't supported.
        RankDisagreement: ranks have different rows.
        CommTimeout: a rank did not construct it in time.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        rows: Sequence[ArrayRow],
        *,
        op: Op = Op.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        sequence: str = "",
    ) -> None:
        self.rows = tuple(rows)
        self.name = name
        self._lock = threading.Lock()
        self._staged: list[np.ndarray[Any, Any] | None] = [None] * len(self.rows)
        self._spare: list[list[np.ndarray[Any, Any]]] = []
        requests = [
            request_for(row, op=op, prescale=prescale, postscale=postscale)
            for row in self.rows
        ]
        self._set: TensorSet | None = (
            engine.register(name, requests, sequence=sequence) if requests else None
        )
        self._submit = [
            self._set.submitter(i) for i in range(len(requests)) if self._set
        ]

    @property
    def in_stable_order(self) -> bool:
        """Whether arrays leave in an order that ranks no longer negotiate."""
        return self._set is not None and self._set.in_stable_order

    @property
    def begun(self) -> bool:
        """Whether a step is partly submitted, or submitted and not waited for."""
        return any(array is not None for array in self._staged)

    def submit(
        self, index: int, array: np.ndarray[Any, Any], *, used: bool = True
    ) -> None:
        """Copy an array and begin its reduction; never wait for other ranks.

        The array may be of any strides, and may be changed when this has returned.

        Raises:
            SpecError: it was already submitted in this step, or has another shape or
                dtype than its row.
            CommTimeout: a rank is lost.
        """
        row = self.rows[index]
        if array.shape != row.shape or array.dtype != row.dtype:
            raise SpecError(
                f"array {row.name!r} of {self.name} must be {row.dtype} of shape "
                f"{list(row.shape)}, got {array.dtype} of shape {list(array.shape)}"
            )
        with self._lock:
            if self._staged[index] is not None:
                raise SpecError(
                    f"array {row.name!r} of {self.name} was submitted twice in a step: "
                    "call wait() between two steps"
                )
            staging = (
                self._spare[index].pop()
                if self._spare and self._spare[index]
                else np.empty(row.shape, row.dtype)
            )
            self._staged[index] = staging
        np.copyto(staging, array)
        self._submit[index](tensor_of(staging), used=used)

    def wait(
        self, outputs: Sequence[np.ndarray[Any, Any]] | None = None
    ) -> list[np.ndarray[Any, Any]]:
        """End the step and return the results, in the order of the rows.

        Args:
            outputs: Arrays that receive the results. Without them, the results are
                memory that this object does not use again, see `recycle`.

        Raises:
            SpecError: an array is missing.
            StrettoError: another rank abandoned the step, so there are no results.
            CommTimeout: a rank is lost.
        """
        whole = self._set is None or self._set.wait().whole
        arrays = self._taken()
        if not whole:
            raise StrettoError(
                f"a step of {self.name} has no results: on some rank an error ended it "
                "before all arrays were submitted. Check the ranks' logs for the "
                "first error."
            )
        if outputs is None:
            return arrays
        for output, array in zip(outputs, arrays, strict=True):
            np.copyto(output, array)
        self.recycle(arrays)
        return list(outputs)

    def _taken(self) -> list[np.ndarray[Any, Any]]:
        with self._lock:
            arrays = [array for array in self._staged if array is not None]
            self._staged = [None] * len(self.rows)
        return arrays

    def recycle(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Return the memory of results, for later steps; do not read it after this."""
        with self._lock:
            if not self._spare:
                self._spare = [[] for _ in self.rows]
            for spare, array in zip(self._spare, arrays, strict=True):
                if not spare:
                    spare.append(array)

    def abandon(self) -> None:
        """End a step that an error cut short; peers' `wait` raises.

        It takes part in one step of the others, even if nothing was submitted yet.

        Raises:
            CommTimeout: a rank is lost.
        """
        if self._set is not None:
            self._set.abandon()
        self._taken()

    def close(self) -> None:
        """End the exchange; every rank must call it, between steps."""
        if self._set is not None:
            self._set.close()
