"""Train on several devices in the idle time of their foregrounds.

# Note [What a gang computes]
A step has N micro-batches. Its gradient is the mean of theirs, as in one process that
accumulates them, up to the order of summation. Data and random numbers belong to the
micro-batch, not to the rank: the loop chooses data by (step, index), and torch's
generators are seeded by (seed, step, index). So the result does not depend on who had
time. With the claims of a step (`Gang.state_dict`) it can be replayed bit for bit.

# Note [A step survives its members]
A member's gradients stay apart from the sum until all members have the sum and the step
has ended (`membership.py`). If a member is lost before, the sum is dropped, the others
compute its micro-batches, and sum again over connections without it. That is why the
sum belongs to the loop over claims: it may have to yield more of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn

from stretto.errors import SpecError
from stretto.gang.claims import Claims
from stretto.gang.membership import SILENT_S, GangMembership, GangStore
from stretto.gang.sums import MemberSums, SumFailed
from stretto.logs import get_logger
from stretto.runtime.agreement import Agreement
from stretto.runtime.failure import FailureReporter
from stretto.runtime.store import own_connection, ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from stretto.background.lease import Background

_log = get_logger(__name__)

_OVERDUE = 3.0
"""Times the usual length after which a micro-batch is claimed again."""

_MIN_OVERDUE_S = 1.0
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

    If a rank is lost, the others compute its micro-batches of the step and continue
    without it, unless it holds the store.
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
            timeout_s: how long a rank waits for another; the group's if ``None``. A
                rank waits for its own device without limit.

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
        store = GangStore(own_connection(self._ranks), self._ranks, self._key())
        self._membership = GangMembership(store, self._ranks)
        self.step = 0
        """Steps that have been reduced."""

        self._done: list[int] = []
        self._replayed: dict[int, list[int]] | None = None
        self._usual_s = 0.0
        self._has_warned = False
        self._claims: Claims | None = None
        self._last_claims: Claims | None = None
        self._means: list[Tensor | None] | None = None
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                self._await(dist.broadcast(tensor, *self._root(), async_op=True))
        self._sums: MemberSums | None = None
        self._sums_epoch = 0
        with self._following_failures():
            self._connected()

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks that have not been lost, in their order."""
        return tuple(self._ranks.names[m] for m in self._membership.members)

    def _key(self) -> str:
        return f"gang/{self._agreement.serial}"

    def _root(self) -> tuple[int, dist.ProcessGroup]:
        return self._ranks.names[0], self._group

    def _await(self, work: Any) -> None:
        self._failures.wait(work, "the broadcast of a gang's parameters")

    # claims

    def claims(self) -> Iterator[int]:
        """Yield the micro-batches of the step that this rank computes.

        The loop ends when all micro-batches of the step have been computed and
        their gradients are summed. What the loop's body adds to ``.grad`` counts when
        the next index is asked for. If the body raises an error or leaves the loop,
        another rank computes its micro-batch.

        Raises:
            SpecError: a batch norm would use statistics that differ between ranks, or
                the last step has not ended with `reduce`.
            CommTimeout: the store is lost, or the others have removed this rank.
        """
        self._require_no_statistics()
        self._membership.require_open()
        if self._claims is not None:
            raise SpecError("claims() begins a step: call reduce() for the last one")
        for parameter in self._parameters:
            parameter.grad = None
        self._done, self._means = [], None
        self._claims = claims = Claims(
            self._membership.claims_store, rank=self._ranks.rank, count=self._count
        )
        yield from self._computed_again(claims)
        while self._means is None:
            while (claimed := self._next(claims)) is not None:
                yield from self._computed(claimed, claims)
            self._sum_up(claims)

    def _computed_again(self, claims: Claims) -> Iterator[int]:
        """Yield what this rank has computed in the step that is replayed, if any."""
        rows, self._replayed = self._replayed, None
        if rows is None:
            return
        claims.assign({index: rank for rank, row in rows.items() for index in row})
        for index in rows[self._ranks.rank]:
            yield from self._computed(index, claims)

    def _next(self, claims: Claims, *, computes: bool = True) -> int | None:
        """Return a claimed micro-batch, with the device; ``None`` if all are computed.

        Args:
            claims: of this step.
            computes: whether this rank claims any.

        Raises:
            SpecError: no rank claims any, and some are missing.
        """
        if not computes:
            claims.leave()
        waited_since_s = time.perf_counter()
        finished, pause_s = -1, _PAUSE_S
        while True:
            self._look(claims)
            if computes and not claims.all_claimed:
                if self._has_device():
                    index = claims.claim()
                    if index is not None:
                        return index
                    self._leave_device()
                else:  # it waits for its own foreground, which may take any time
                    waited_since_s = time.perf_counter()
            index = self._take_over(claims) if computes else None
            if index is not None:
                return index
            now_finished = claims.finished
            if claims.is_complete:
                return None
            if not computes and claims.all_left(self._membership.members):
                raise SpecError(
                    f"step {self.step} of a gang: every rank left its loop over "
                    f"claims() early, and {self._count - now_finished} of "
                    f"{self._count} micro-batches have no gradient: let the loop end "
                    "by itself on at least one rank"
                )
            if now_finished != finished:
                finished, waited_since_s = now_finished, time.perf_counter()
            if time.perf_counter() - waited_since_s > self._ranks.timeout_s:
                self._membership.give_up(
                    f"step {self.step} of a gang: no micro-batch was finished within "
                    f"{self._ranks.timeout_s:g} s"
                )
                waited_since_s = time.perf_counter()
            if claims.all_claimed or not computes:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    def _look(self, claims: Claims) -> None:
        """Return what members have claimed that are lost by now."""
        self._membership.look()
        lost = self._membership.lost_in_step - claims.lost
        if lost:
            claims.lose(lost)

    def _overdue_s(self) -> float:
        return max(_MIN_OVERDUE_S, _OVERDUE * self._usual_s)

    def _take_over(self, claims: Claims) -> int | None:
        index = claims.claim_overdue(self._overdue_s())
        while index is not None and not self._has_device():
            self._look(claims)
            if claims.is_complete:
                return None
        return index

    def _has_device(self) -> bool:
        """Wait for the device a short time."""
        if self._background is None:
            return True
        return self._background.wait("micro-batch", timeout_s=_LOOK_EVERY_S)

    def _leave_device(self) -> None:
        if self._background is not None:
            self._background.end_task()

    def _computed(self, index: int, claims: Claims) -> Iterator[int]:
        before = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        buffers = _states(self._model)
        began_s = time.perf_counter()
        counts = False
        try:
            with torch.random.fork_rng(devices=self._devices()):
                torch.manual_seed(self._seed_of(index))
                yield index
            self._leave_device()
            self._look_at_buffers(buffers)
            self._note_length(time.perf_counter() - began_s)
            counts = claims.finish(index)
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

    def _look_at_buffers(self, before: Mapping[str, tuple[int, int]]) -> None:
        """Warn once if a micro-batch has changed the model's buffers."""
        if self._has_warned:
            return
        after = _states(self._model)
        names = [name for name in after if after[name] != before.get(name)]
        if names:
            self._has_warned = True
            _log.warning(
                "%s: forward changes the buffer %s%s: its values depend on which rank "
                "computes which micro-batch, so the gang may train another model than "
                "one process",
                self._ranks.name(self._ranks.rank),
                names[0],
                f" and {len(names) - 1} more" if names[1:] else "",
            )

    # the sum

    def reduce(self) -> None:
        """Leave the mean gradient over all micro-batches in ``.grad`` on every rank.

        A parameter that no micro-batch used keeps ``None``.

        Raises:
            SpecError: `claims` has not been called for this step, or every rank left
                its loop early.
            CommTimeout: the store is lost, or the others have removed this rank.
        """
        claims = self._claims
        if claims is None:
            raise SpecError("reduce() ends a step: loop over claims() before it")
        while self._means is None:  # the loop was left early
            self._next(claims, computes=False)
            self._sum_up(claims)
        for parameter, mean in zip(self._parameters, self._means, strict=True):
            parameter.grad = mean
        self._claims = self._means = None
        self.step += 1

    def _sum_up(self, claims: Claims) -> None:
        """Sum over the members, and end the step unless one of them is lost."""
        membership = self._membership
        membership.patience_s = SILENT_S + self._overdue_s()
        means = None
        with self._following_failures():
            if (sums := self._connected()) is not None:
                means = sums.mean_gradients(
                    self._parameters,
                    count=self._count,
                    is_in_vain=membership.has_trouble,
                )
        if means is not None and membership.end_step(json.dumps(self._done)):
            self._means = means
            if self._last_claims is not None:
                self._last_claims.remove()
            is_first = self._ranks.rank == membership.members[0]
            self._last_claims = claims if is_first else None

    @contextlib.contextmanager
    def _following_failures(self) -> Iterator[None]:
        """Follow what the members decide if a sum fails."""
        began_s = time.perf_counter()
        try:
            yield
        except SumFailed as exc:
            self._disconnect()
            self._membership.fail(str(exc), began_s)

    def _connected(self) -> MemberSums | None:
        """Return the members' connections; ``None`` if one has been lost meanwhile.

        Raises:
            SumFailed: they can't connect.
        """
        membership = self._membership
        if self._sums is None or self._sums_epoch != membership.epoch:
            self._disconnect()
            if not membership.meet("open"):
                return None
            self._sums_epoch = membership.epoch
            self._sums = MemberSums(
                self._ranks,
                members=membership.members,
                serial=f"{self._key()}/{membership.epoch}",
            )
        return self._sums

    def _disconnect(self) -> None:
        if self._sums is not None:
            self._sums.close()
            self._sums = None

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to continue, or to replay its last step.

        Any member may call it after `reduce`; the others need not. It has the number of
        steps and, for each member, the micro-batches of the last step in their order.
        """
        notes = self._membership.last_notes()
        return {
            "step": self.step,
            "seed": self._seed,
            "micro_batches": self._count,
            "last_claims": [json.loads(note) if note else [] for note in notes],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after a checkpoint's step.

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
        data are those of that step and the members are as many.

        Raises:
            SpecError: the checkpoint is of another number of members, or of no step.
        """
        table, members = state["last_claims"], self._membership.members
        if len(table) != len(members) or not state["step"]:
            raise SpecError(
                f"the checkpoint has claims of {len(table)} ranks after "
                f"{state['step']} steps; this gang has {len(members)} ranks"
            )
        self.load_state_dict(state)
        self.step -= 1
        self._replayed = {
            member: list(row) for member, row in zip(members, table, strict=True)
        }


def _states(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return each buffer's identity and the number of changes in place."""
    return {
        name: (id(buffer), 0 if buffer.is_inference() else buffer._version)  # noqa: SLF001
        for name, buffer in model.named_buffers()
    }


def _nothing() -> None:
    """Close nothing: the process group is the program's."""
