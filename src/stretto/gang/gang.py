"""Train on several devices in the idle time of their foregrounds.

# Note [What a gang computes]
A step has N micro-batches. Its gradient is the mean of theirs, as in one process that
accumulates them, up to the order of summation. Data and random numbers belong to the
micro-batch, not to the rank: the loop chooses data by (step, index), and torch's
generators are seeded by (seed, step, index). So the result does not depend on who had
time. With the claims of a step (`Gang.state_dict`) it can be replayed bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from stretto.errors import CommTimeout, SpecError
from stretto.gang.claims import Claims
from stretto.runtime.agreement import Agreement
from stretto.runtime.failure import FailureReporter
from stretto.runtime.store import own_connection, ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from stretto.background.lease import Background

_OVERDUE = 3.0
"""Times the usual length after which a micro-batch is claimed again."""

_LEAST_OVERDUE_S = 1.0
_LOOK_EVERY_S = 0.05
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05


@final
class Gang:
    """Trains one model on several ranks, each in its own device's idle time.

        gang = stretto.Gang(model, micro_batches=64, background=background)
        for step in range(steps):
            for index in gang.claims():
                loss = loss_of(model, batch_of(step, index))
                loss.backward()
            gang.reduce()
            optimizer.step()

    Each rank claims micro-batches while it has its device, so a rank with much time
    does many of them and one with none does none. `claims` starts from no gradients,
    and `reduce` leaves the mean over all micro-batches in ``.grad``, equal on all
    ranks. Micro-batches of one step must have equally many samples.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        micro_batches: int,
        background: Background | None = None,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Build a gang; every rank must. Parameters and buffers become rank 0's.

        Args:
            model: whose gradients are summed.
            micro_batches: how many a step has.
            background: leases this rank's device for each micro-batch.
            seed: of the random numbers of all steps.
            process_group: the ranks; the default group if ``None``.
            timeout_s: how long a rank waits for another; the group's if ``None``.

        Raises:
            SpecError: an argument is invalid.
            RankDisagreement: ranks have different arguments or models.
            CommTimeout: a rank did not arrive.
        """
        if micro_batches < 1:
            raise SpecError(f"micro_batches must be at least 1, got {micro_batches}")
        self._model, self._count, self._seed = model, micro_batches, seed
        self._background = background
        self._group = process_group or dist.distributed_c10d._get_default_group()  # noqa: SLF001
        self._ranks = ranks_of(self._group, timeout_s=timeout_s)
        self._agreement = Agreement(self._ranks)
        self._failures = FailureReporter(self._ranks, _nothing, key=self._key)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        rows = [
            (n, tuple(p.shape), str(p.dtype), p.requires_grad)
            for n, p in model.named_parameters()
        ]
        self._agreement.require_same(
            "build a gang",
            {
                "micro_batches": str(micro_batches),
                "seed": str(seed),
                "parameters": hashlib.blake2b(repr(rows).encode()).hexdigest()[:16],
            },
        )
        self._store = own_connection(self._ranks)
        self.step = 0
        """Steps that have been reduced."""

        self._done: list[int] = []
        self._replayed: list[int] | None = None
        self._usual_s = 0.0
        self._is_open = False
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                self._await(dist.broadcast(tensor, *self._root(), async_op=True))

    def _key(self) -> str:
        return f"gang/{self._agreement.serial}"

    def _root(self) -> tuple[int, dist.ProcessGroup]:
        return self._ranks.names[0], self._group

    def _await(self, work: Any) -> None:
        self._failures.wait(work, "a sum of a gang")

    # claims

    def claims(self) -> Iterator[int]:
        """Yield the micro-batches of the step that this rank computes.

        The iteration ends when all micro-batches of the step have been computed. What
        the loop's body adds to ``.grad`` counts when the next index is asked for. If
        the body raises an error or leaves the loop, another rank computes its
        micro-batch.

        Raises:
            SpecError: a batch norm would use statistics that differ between ranks.
            CommTimeout: another rank is lost.
        """
        self._require_no_statistics()
        for parameter in self._parameters:
            parameter.grad = None
        self._done, self._is_open = [], True
        if self._replayed is not None:
            for index in self._replayed:
                yield from self._computed(index, None)
            self._replayed = None
            return
        claims = Claims(
            self._step_store(self.step), rank=self._ranks.rank, count=self._count
        )
        while (claimed := self._next(claims)) is not None:
            yield from self._computed(claimed, claims)

    def _step_store(self, step: int) -> Any:
        return PrefixStore(f"{self._key()}/{step}", self._store)

    def _next(self, claims: Claims) -> int | None:
        """Return a claimed micro-batch, with the device; ``None`` at the step's end."""
        waited_since_s = time.perf_counter()
        finished, pause_s = -1, _PAUSE_S
        while True:
            if not claims.all_claimed and self._has_device():
                index = claims.claim()
                if index is not None:
                    return index
                self._leave_device()
            index = self._take_over(claims)
            if index is not None:
                return index
            now_finished = claims.finished
            if now_finished >= self._count:
                return None
            if now_finished != finished:
                finished, waited_since_s = now_finished, time.perf_counter()
            self._require_others(time.perf_counter() - waited_since_s)
            if claims.all_claimed:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    def _take_over(self, claims: Claims) -> int | None:
        limit_s = max(_LEAST_OVERDUE_S, _OVERDUE * self._usual_s)
        index = claims.claim_overdue(limit_s)
        while index is not None and not self._has_device():
            if claims.is_complete:
                return None
        return index

    def _require_others(self, waited_s: float) -> None:
        """Require that no rank is lost while nothing is finished."""
        if waited_s < _LEAST_OVERDUE_S:
            return
        why = self._failures.others_failed()
        if why is None and waited_s > self._ranks.timeout_s:
            why = f"no micro-batch was finished within {self._ranks.timeout_s:g} s"
        if why is not None:
            error: CommTimeout = self._failures.report(
                f"step {self.step} of a gang", RuntimeError(f"timed out: {why}")
            )
            raise error

    def _has_device(self) -> bool:
        """Wait for the device a short time."""
        if self._background is None:
            return True
        return self._background.wait("micro-batch", timeout_s=_LOOK_EVERY_S)

    def _leave_device(self) -> None:
        if self._background is not None:
            self._background.end_task()

    def _computed(self, index: int, claims: Claims | None) -> Iterator[int]:
        before = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        began_s = time.perf_counter()
        counts = False
        try:
            with torch.random.fork_rng(devices=self._devices()):
                torch.manual_seed(self._seed_of(index))
                yield index
            self._leave_device()
            self._note_length(time.perf_counter() - began_s)
            counts = claims is None or claims.finish(index)
        finally:
            self._leave_device()
            self._add(before, counts=counts)
        if counts:
            self._done.append(index)

    def _devices(self) -> list[int]:
        found = {p.device.index for p in self._parameters if p.device.type == "cuda"}
        return sorted(index or 0 for index in found)

    def _seed_of(self, index: int) -> int:
        text = f"{self._seed}/{self.step}/{index}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(digest) >> 1

    def _note_length(self, length_s: float) -> None:
        weight = 0.3 if self._usual_s else 1.0
        self._usual_s += weight * (length_s - self._usual_s)

    def _add(self, before: Sequence[Tensor | None], *, counts: bool) -> None:
        """Add the gradients of a micro-batch to those before it, or drop them."""
        for parameter, held in zip(self._parameters, before, strict=True):
            own = parameter.grad if counts else None
            if held is None:
                parameter.grad = own
            elif own is None:
                parameter.grad = held
            else:
                parameter.grad = held.add_(own)

    def _require_no_statistics(self) -> None:
        for name, part in self._model.named_modules():
            if (
                isinstance(part, nn.modules.batchnorm._NormBase)  # noqa: SLF001
                and part.training
                and part.track_running_stats
            ):
                raise SpecError(
                    f"{name or type(part).__name__} updates running statistics, which "
                    "would depend on who computes which micro-batch: use GroupNorm or "
                    "LayerNorm, or call eval() on it"
                )

    # the sum

    def reduce(self) -> None:
        """Leave the mean gradient over all micro-batches in ``.grad`` on every rank.

        A parameter that no micro-batch used keeps ``None``.

        Raises:
            SpecError: `claims` has not been called for this step.
            CommTimeout: another rank is lost; its part of the step is lost with it.
        """
        if not self._is_open:
            raise SpecError("reduce() ends a step: loop over claims() before it")
        self._is_open = False
        used = torch.tensor([float(p.grad is not None) for p in self._parameters])
        if self._parameters:
            used = used.to(self._parameters[0].device)
            self._await(dist.all_reduce(used, group=self._group, async_op=True))
        by_kind: dict[Any, list[Tensor]] = defaultdict(list)
        for parameter, ranks in zip(self._parameters, used.tolist(), strict=True):
            if ranks:
                by_kind[parameter.dtype, parameter.device].append(parameter)
        for parameters in by_kind.values():
            self._sum(parameters)
        if self._ranks.rank == 0 and self.step:
            # All ranks have left the step before this one.
            Claims(self._step_store(self.step - 1), rank=0, count=self._count).remove()
        self.step += 1

    def _sum(self, parameters: Sequence[Tensor]) -> None:
        rows = [
            torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            for p in parameters
        ]
        flat = torch.cat([row.reshape(-1) for row in rows]).div_(self._count)
        self._await(dist.all_reduce(flat, group=self._group, async_op=True))
        sizes = [p.numel() for p in parameters]
        for parameter, part in zip(parameters, flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to go on, or to replay its last step.

        Collective: every rank must call it, after `reduce`. It has the number of steps
        and, for each rank, the micro-batches of the last step in their order.
        """
        rows = self._agreement.gather("save a gang", json.dumps(self._done))
        return {
            "step": self.step,
            "seed": self._seed,
            "micro_batches": self._count,
            "last_claims": [json.loads(row) for row in rows],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a checkpoint's step.

        Raises:
            SpecError: the checkpoint is of a gang with another seed or step size.
        """
        for key, own in (("seed", self._seed), ("micro_batches", self._count)):
            if state[key] != own:
                raise SpecError(f"{key} is {own}, and {state[key]} in the checkpoint")
        self.step = int(state["step"])

    def replay(self, state: Mapping[str, Any]) -> None:
        """Compute a checkpoint's last step again, with the same claims.

        The next `claims` and `reduce` give its gradients bit for bit, if parameters and
        data are those of that step and the ranks are as many.

        Raises:
            SpecError: the checkpoint is of another number of ranks, or of no step.
        """
        table = state["last_claims"]
        if len(table) != self._ranks.size or not state["step"]:
            raise SpecError(
                f"the checkpoint has claims of {len(table)} ranks after "
                f"{state['step']} steps; this gang has {self._ranks.size} ranks"
            )
        self.load_state_dict(state)
        self.step -= 1
        self._replayed = list(table[self._ranks.rank])


def _nothing() -> None:
    """Close nothing: the process group is the program's."""
