"""Sum tensors over the members of a gang, on connections of their own.

The sum is staged through the host and sent by Gloo: a communication kernel on a device
would keep it from its foreground while other members are late.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch

from stretto.errors import StrettoError
from stretto.runtime import backends
from stretto.runtime.lanes import LanePool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from stretto.runtime.ranks import Ranks

_LOOK_EVERY = timedelta(seconds=0.2)
_END_S = 1.0


class SumFailed(Exception):
    """A sum that can't end; the members decide what follows."""


@final
class MemberSums:
    """One set of members' connections."""

    def __init__(self, ranks: Ranks, *, members: Sequence[int], serial: str) -> None:
        """Connect; every member must.

        Args:
            ranks: of the group.
            members: the ranks that take part.
            serial: a name that no other connections have.

        Raises:
            SumFailed: it is impossible.
        """
        self._timeout_s = ranks.timeout_s
        self._works: list[Any] = []
        self._pool: LanePool | None = None
        if len(members) == 1:
            return
        place = dataclasses.replace(
            ranks,
            rank=members.index(ranks.rank),
            size=len(members),
            names=tuple(ranks.names[member] for member in members),
        )
        on_cpu = torch.device("cpu")
        pool = LanePool(place, serial=serial, backend=backends.ON_HOST, device=on_cpu)
        try:
            self._lane = pool.lane(0)
        except (StrettoError, RuntimeError) as exc:
            raise SumFailed(str(exc).splitlines()[0]) from exc
        self._pool = pool

    def mean_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        count: int,
        is_in_vain: Callable[[], bool],
    ) -> list[Tensor | None]:
        """Return the sum of all members' gradients over ``count``.

        ``None`` for a parameter that has no gradient on any member.

        Args:
            parameters: with this member's gradients, which stay as they are.
            count: the divisor.
            is_in_vain: returns whether the sum can't end.

        Raises:
            SumFailed: a member is lost, or a connection.
        """
        used = torch.tensor([float(p.grad is not None) for p in parameters])
        if parameters:
            self._sum(used, is_in_vain)
        by_kind: dict[Any, list[int]] = defaultdict(list)
        for i, parameter in enumerate(parameters):
            if used[i]:
                by_kind[parameter.dtype, parameter.device].append(i)
        found: list[Tensor | None] = [None] * len(parameters)
        for (_, device), numbers in by_kind.items():
            those = [parameters[i] for i in numbers]
            rows = [
                torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                for p in those
            ]
            flat = torch.cat([row.detach().reshape(-1) for row in rows])
            flat = flat.div_(count).cpu()
            self._sum(
                torch.view_as_real(flat) if flat.is_complex() else flat, is_in_vain
            )
            parts = flat.to(device).split([p.numel() for p in those])
            for i, parameter, part in zip(numbers, those, parts, strict=True):
                found[i] = part.view_as(parameter)
        return found

    def _sum(self, tensor: Tensor, is_in_vain: Callable[[], bool]) -> None:
        if self._pool is None:
            return
        deadline = time.perf_counter() + self._timeout_s
        try:
            work = self._lane.allreduce([tensor])
            self._works = [work]
            while not self._has_ended(work):
                if time.perf_counter() > deadline:
                    raise SumFailed("timed out")
                if is_in_vain():
                    raise SumFailed("another member has failed")
        except RuntimeError as exc:
            raise SumFailed(str(exc).splitlines()[0]) from exc
        self._works = []

    def _has_ended(self, work: Any) -> bool:
        """Wait a moment; return whether a collective has ended.

        Raises:
            RuntimeError: it has failed.
        """
        try:
            work.wait(_LOOK_EVERY)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # the error may be the end of the wait before
        return True

    def close(self) -> None:
        """End the connections at once, and what is sent on them."""
        if self._pool is None:
            return
        self._pool.abort()
        deadline = time.perf_counter() + _END_S
        while not all(work.is_completed() for work in self._works):
            if time.perf_counter() > deadline:
                _unfinished.append(self._pool)  # closing it would wait
                return
            time.sleep(0.01)
        self._pool.close()


_unfinished: list[LanePool] = []
