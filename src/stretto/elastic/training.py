"""Training that continues when ranks are lost (experimental)."""

from __future__ import annotations

import contextlib
import io
import json
import operator
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from stretto import variable_names
from stretto._api.ddp import DistributedDataParallel
from stretto.boolean_options import bool_option
from stretto.elastic.batches import BatchSize, ShareSampler, Stamp, order_of, step_seed
from stretto.elastic.digests import ParameterDigests, gathered, minority
from stretto.elastic.draining import STATUS, Drain
from stretto.elastic.hanging import StepProgress
from stretto.elastic.undo import StepUndo
from stretto.errors import CommTimeout, RankDisagreement, SpecError, StrettoError
from stretto.logs import get_logger
from stretto.members.client import MemberClient
from stretto.members.launchers import loss_warning
from stretto.members.view import View, why_over
from stretto.resume.exact_load import load_exactly
from stretto.resume.fitting import (
    classes_of,
    in_one_line,
    kept_differences,
    model_differences,
)
from stretto.resume.manifests import Manifest
from stretto.resume.snapshots import JobSnapshots, copy_of
from stretto.runtime import backends
from stretto.runtime.failure import forget_frames
from stretto.runtime.presence import is_communication_error
from stretto.runtime.regroup import MemberGroup
from stretto.runtime.waits import wait_until_over
from stretto.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

_log = get_logger(__name__)

_PATIENCE_S = 1800.0
"""How long to wait for a membership: as long as ranks may take to start."""

_MAX_FAILURES = 5
"""Regroupings without a step between them; more are a fault of the program."""

_FRESH = [-1, -1]
"""The note of a rank that has no state yet."""

_OURS = ("batch_sampler", "batch_size", "drop_last", "sampler", "shuffle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The ranks that trained, and the first step that they trained."""

    generation: int

    first_step: int
    """The first step that these ranks committed, counted from 0."""

    ids: tuple[int, ...]
    """The members' ids, by rank."""


@final
class Elastic:
    """Trains with the ranks that are there, under ``stretto run --elastic MIN:MAX``.

    When a rank ends, the others keep their processes: they form a new group without it
    and run the current step again, with its samples divided among them. Parameters and
    optimizer are equal bit for bit on all of them. Without ``--elastic`` nothing is
    regrouped and a lost rank ends the job, as usual.

        run = stretto.Elastic(model, optimizer, batch="global:512")
        for batch in run.batches(dataset):
            with run.step():
                loss = loss_of(run.model(batch)) * run.weight
                loss.backward()
                optimizer.step()

    Experimental, on Gloo. The constructor makes a new default group;
    groups that the program made itself end there.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batch: str,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
        seed: int = 0,
        on_change: Callable[[int, int], None] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: str = "10 min",
        keep: int = 2,
        resume: bool | None = None,
        repair: bool = False,
    ) -> None:
        """Join the other ranks. Collective.

        Args:
            model: a stretto DDP, or a module to be wrapped in one.
            optimizer: of the model's parameters.
            batch: samples of a step: ``"global:512"`` in all, or ``"rank:32"`` on each.
            scheduler: has ``state_dict`` and ``load_state_dict``, as ``extra``.
            extra: anything else that a rank must get from another, by name.
            seed: of the samples' order and of torch's generator, which is set in each
                step from it, the step and the rank, so that a step can run again.
            on_change: called with the old and the new number of ranks.
            checkpoint: folder of snapshots, which rank 0 writes beside training. The
                job resumes from the newest one in it.
            every: how often: ``"100 steps"``, ``"30 s"``, ``"10 min"`` or ``"1 h"``.
            keep: how many snapshots to keep.
            resume: whether to resume from a snapshot. By default
                ``STRETTO_RESUME=never`` says no.
            repair: whether a rank whose parameters differ from those of most ranks gets
                their state. Otherwise a warning names it.

        Raises:
            SpecError: an option is invalid, or the snapshot was made with another seed,
                model, optimizer, scheduler or other names in ``extra``.
            PlanMismatch: the model has a feature that keeps its ranks.
            StrettoError: the ranks do not start, the keeper has ended, or a snapshot
                cannot be read.
        """
        self._batch = BatchSize.of(batch)
        repair = bool_option("repair", repair)
        if resume is not None:
            resume = bool_option("resume", resume)
        snapshots = None
        if checkpoint is not None:
            snapshots = JobSnapshots(checkpoint, every=every, keep=keep)
        if not isinstance(model, DistributedDataParallel):
            model = DistributedDataParallel(model)
        self.model: DistributedDataParallel = model
        """The DDP to call."""

        self.optimizer = optimizer
        self._kept: dict[str, Any] = {"optimizer": optimizer, **(extra or {})}
        if scheduler is not None:
            self._kept["scheduler"] = scheduler
        self._seed, self._on_change = _whole_number("seed", seed), on_change
        self._steps = self._epoch = self._done = self._calls = 0
        self._samples = 0
        self._run = 1
        self._has_begun = self._has_skipped = False
        self._received: dict[str, Any] | None = None
        self._snapshots, self._wants_resume = snapshots, resume
        self._division = 0
        self._failures = 0
        self._has_ended_epoch = False
        self._progress = StepProgress()
        ignored = model.parameters_to_ignore
        self._digests = ParameterDigests(
            [
                parameter
                for name, parameter in model.module.named_parameters()
                if name not in ignored  # frozen ones may differ, too
            ]
        )
        self._repair, self._has_warned = repair, False
        self._drain, self._leavers = Drain(), list[int]()
        self._lost: RuntimeError | None = None
        """The error of a rank that was found to be lost when a step was committed."""

        self._stamp: Stamp | None = None
        self._sampler: ShareSampler | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self.history: list[Membership] = []
        """The memberships since the job began, with the first step of each."""

        self._view: View | None = None
        self._is_following = False
        self._client = MemberClient.of_environment()
        self._group: MemberGroup | None = None
        if snapshots is not None and not (self._client and self._client.joins):
            self._resume(snapshots, wanted=resume)
        if self._client is not None:
            host = os.environ.get(variable_names.HOST_ADDRESS, "127.0.0.1")
            self._group = MemberGroup(model, host=host)
            self._is_fresh = self._client.joins
            model._on_loss = self._report  # noqa: SLF001
            self._client.drains = self._drain.listen()
            self._client.start(
                self._group.address,
                on_view=self._on_view,
                on_end=self._group.end,
                on_drain=self._drain.ask,
            )
            self._follow()
        elif self.size > 1:
            rows = self.model._agreement.gather("resume", self._note())  # noqa: SLF001
            self._require_same(rows)
            self._level(_positions(rows))
        if self._client is None:
            if snapshots is not None and (self.size == 1 or self._compares()):
                self._drain.listen()
            ids = tuple(range(self.size))
            self.history.append(
                Membership(generation=0, first_step=self._steps, ids=ids)
            )
            if self.size > 1 and self.rank == 0:
                has_snapshots = snapshots is not None
                _log.warning(
                    "%s", loss_warning(os.environ, has_snapshots=has_snapshots)
                )
        if self._steps and self.rank == 0:
            _log.warning("training resumes from step %d", self._steps)
        optimizers = {
            id(kept): kept
            for kept in self._kept.values()
            if isinstance(kept, torch.optim.Optimizer)
        }
        others = [kept for kept in self._kept.values() if id(kept) not in optimizers]
        self._undo = StepUndo(model.module, [*optimizers.values()], others, self._state)

    # What a program reads.

    @property
    def rank(self) -> int:
        """This process's rank; it may change with the membership."""
        return self.model._ranks.rank  # noqa: SLF001

    @property
    def size(self) -> int:
        """How many ranks train."""
        return self.model._ranks.size  # noqa: SLF001

    @property
    def generation(self) -> int:
        """Which membership this is, counted from 1; 0 without ``--elastic``."""
        return 0 if self._view is None else self._view.generation

    @property
    def steps(self) -> int:
        """How many steps are committed."""
        return self._steps

    @property
    def weight(self) -> float:
        """The factor of this rank's mean loss with which all samples count equally.

        1 where all ranks have equally many samples.
        """
        return 1.0 if self._stamp is None else self._stamp.weight

    # Samples.

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the epochs that are not trained yet, of this many from 0 on.

        A rank that joins or resumes begins with the present one. With
        ``range(number)`` it would execute the program's own work of earlier epochs,
        too: collectives, which other ranks do not make then, or a count of epochs
        without progress. Call `batches` once in each.
        """
        epoch = self._epoch
        while epoch < number:
            self._calls = epoch
            yield epoch
            epoch = max(epoch + 1, self._epoch)

    def batches(
        self,
        dataset: Any,
        loader_options: Mapping[str, Any] | None = None,
        *,
        shuffle: bool = True,
    ) -> Iterator[Any]:
        """Yield this rank's batches of one epoch; call it once per epoch on all ranks.

        Each sample is in one committed step of the epoch. Where a step has fewer
        samples than ranks, those without one get a sample with weight 0.

        Args:
            dataset: has a length and indices.
            loader_options: of torch's DataLoader, except those about batches.
            shuffle: whether each epoch has an order of its own.

        Raises:
            SpecError: an option is about batches or invalid, or the data set is empty.
            StrettoError: a batch was not trained in a `step` block.
        """
        options = dict(loader_options or {})
        if wrong := [name for name in _OURS if name in options]:
            raise SpecError(
                f"loader_options may not have {wrong[0]!r}: samples are divided among "
                "the ranks that are there. Pass batch= to Elastic and shuffle= here."
            )
        if not len(dataset):
            raise SpecError("the data set is empty")
        shuffle = bool_option("shuffle", shuffle)
        return self._epoch_of(dataset, options, shuffle=shuffle)

    def _epoch_of(
        self, dataset: Any, options: dict[str, Any], *, shuffle: bool
    ) -> Iterator[Any]:
        epoch, self._calls = self._calls, self._calls + 1
        if epoch < self._epoch:  # trained before this rank joined or the job resumed
            if self._client is not None and self._client.joins and not epoch:
                _log.warning(
                    "this rank joins in epoch %d. If the program's own collectives "
                    "follow an epoch, it would wait in those of earlier ones: "
                    "use `for epoch in run.epochs(...)`",
                    self._epoch,
                )
            self._skip(epoch)
            return
        if epoch > self._epoch:
            raise StrettoError(
                f"the loop over `batches` was left after {self._done} of "
                f"{self._samples} samples of epoch {self._epoch}, so the next epoch "
                "can't begin: ranks that join or resume begin within an epoch, and "
                "would leave it after another step. For a shorter epoch pass a part "
                "of the data set (torch.utils.data.Subset); leave the loop only at the "
                "end of training."
            )
        self._begin_training()
        self._has_ended_epoch = False  # the loop may have been left after its last step
        if self._done and len(dataset) != self._samples:
            raise SpecError(
                f"the data set has {len(dataset)} samples, but training stopped within "
                f"an epoch of {self._samples}: each sample could not be trained once. "
                "Use the same data set, or resume=False to begin again."
            )
        self._samples = len(dataset)
        order = order_of(self._samples, epoch=epoch, seed=self._seed, shuffle=shuffle)
        self._sampler = ShareSampler(order, self._batch)
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=self._sampler, **options
        )
        try:
            yield from self._rest_of(epoch, loader)
        finally:
            self._progress.rest()
        self._sampler = None

    # Note [What the program does after skipped epochs]
    # A program that counts epochs itself executes its own work of those that were
    # trained before, such as scheduler.step(). That is done in the state that this rank
    # has received, so it is undone before the state is used: by a step, or in a
    # snapshot. Between the last skipped epoch and either of them it can't be undone,
    # because nothing shows where the program's work ends. No rank gives its state to
    # others there: memberships are followed within an epoch only.

    def _skip(self, epoch: int) -> None:
        """Leave out an epoch that was trained before."""
        self._has_skipped = True
        is_last = epoch == self._epoch - 1 and not self._done
        if is_last and self.rank == 0 and self._received is not None:
            _log.warning(
                "%s trained before and have no batches. What the program does after "
                "each of them is undone when epoch %d begins, and by run.save(). If no "
                "epoch follows, call run.save() before you use scheduler= or extra=; "
                "better use `for epoch in run.epochs(...)`, which leaves these epochs "
                "out",
                "epoch 0 was" if not epoch else f"epochs 0 to {epoch} were",
                self._epoch,
            )

    def _undo_skipped(self) -> None:
        """Undo what the program did after epochs that were trained before."""
        if self._has_skipped and self._received is not None:
            run = self._run  # that of this start of the job, not of the snapshot's
            self._load(copy_of(self._received))  # which may be needed again
            self._run = run

    def _begin_training(self) -> None:
        """Begin to change the state that this rank has."""
        self._undo_skipped()
        self._has_begun, self._has_skipped, self._received = True, False, None

    def _rest_of(self, epoch: int, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch that are not trained yet."""
        sampler = self._sampler
        while self._epoch == epoch and sampler is not None:
            if self._done >= self._samples:  # all trained before this rank joined
                self._epoch, self._done = epoch + 1, 0
                break
            self._divide()
            sampler.stamps.clear()
            for batch in loader:
                stamp = sampler.stamps.popleft()
                self._look()
                if self._epoch != epoch:
                    break  # the others have begun a later one without this rank
                if stamp.division != self._division:
                    continue  # divided among other ranks
                before = self._steps
                self._stamp = stamp
                yield batch
                if self._steps == before and stamp.division == self._division:
                    raise StrettoError(
                        "a batch of `batches` was not trained: put each batch's "
                        "forward, backward and optimizer step into "
                        "`with run.step():`"
                    )
                if self._epoch != epoch:
                    break
            if self._epoch != epoch:
                self._progress.rest()
                self._end_epoch()

    def _end_epoch(self) -> None:
        """End an epoch together, if the others end it now."""
        if self._has_ended_epoch:
            self._meet()
            self._has_ended_epoch = False
        else:  # the others ended it before they gave their state to this rank
            self._has_skipped = True

    def _divide(self) -> None:
        if self._sampler is not None:
            self._sampler.divide(
                self._done, rank=self.rank, ranks=self.size, division=self._division
            )

    # A step.

    def step(self) -> ElasticStep:
        """Return a block in which one batch is trained.

        It begins without gradients. If ranks change within it, the block ends without
        an error and its batch counts as not trained: `batches` yields the same samples
        again, divided among the new ranks. `optimizer.step()` must be the block's last
        operation that involves other ranks.
        """
        return ElasticStep(self)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let this rank take its time, for what takes longer than steps.

        Otherwise a rank that makes no step for 30 s, or ten times a step's usual time,
        while others wait for it, is taken for one that hangs, and killed.
        """
        self._progress.rest()
        yield

    def _begin_step(self) -> None:
        if self._group is not None:
            self._group.release_one()
        self._begin_training()
        if self._snapshots is not None:
            self._snapshots.take_if_due(
                self._steps, self._manifest, self._state, rank=self.rank
            )
        self._undo.zero_grad()
        if self._client is not None:
            self._undo.begin_block()
            self._buffers = {
                name: buffer.detach().clone()
                for name, buffer in self.model.module.named_buffers()
            }
        self._progress.begin_step(self._steps)
        torch.manual_seed(step_seed(self._seed, step=self._steps, rank=self.rank))

    def _end_step(self, error: BaseException | None) -> bool:
        """End the block; return whether its error was one of a lost rank."""
        if error is None:
            self._commit()
            return False
        undo = self._undo
        if self._client is None or not _is_loss(error):
            return False
        if undo.began and undo.before is None:
            where = "after" if undo.ended else "within"
            raise StrettoError(
                f"a collective failed {where} optimizer.step() in the same "
                "`with run.step():` block, so that the block can't run again: move it "
                "behind the block"
            ) from error
        if (why := undo.undo(self._load)) is not None:
            raise StrettoError(
                "a rank was lost in a `with run.step():` block that has, or may have, "
                f"changed {why}, so that the block can't run again: change it after "
                "the block"
            ) from error
        self._discard()
        self._recover(error)
        return True

    def _commit(self) -> None:
        self._failures = 0
        self._steps += 1
        if self._stamp is not None:
            self._done += self._stamp.samples
            if self._done >= self._samples:
                self._epoch, self._done = self._epoch + 1, 0
                self._has_ended_epoch = True
        self._buffers = {}
        self._undo.end_block()
        self._progress.end_step()
        if self._compares():
            self._compare()

    def _compares(self) -> bool:
        """Return whether the group sends digests, which are values on the CPU."""
        backend = backends.of_group(self.model._backend)  # noqa: SLF001
        sends_them = backend is not None and backend.device_type == "cpu"
        return self.size > 1 and sends_them

    def _compare(self) -> None:
        """Compare parameters with other ranks', those of the last step first."""
        group, leaves = self.model.process_group, self._drain.is_wanted
        is_over = self.model._ranks.is_over  # noqa: SLF001
        try:
            differ, any_leaves = self._digests.result()
            if differ:
                self._name_different()
            if any_leaves:
                rows = gathered(torch.tensor(int(leaves)), group, is_over)
                self._leavers = [rank for rank, row in enumerate(rows) if row]
            self._digests.launch(self._steps, group, is_over, leaves=leaves)
        except RuntimeError as error:
            if not _is_loss(error):
                raise
            # Without a keeper, the next step's collectives raise the error of a loss.
            if self._client is not None:
                self._end_membership()
                self._lost = error

    def _name_different(self) -> None:
        """Name the ranks whose parameters differ, and give them others' if wanted."""
        group, is_over = self.model.process_group, self.model._ranks.is_over  # noqa: SLF001
        source, others = minority(self._digests.gather(group, is_over))
        names = ", ".join(map(str, others))
        if self.rank == 0 and (self._repair or not self._has_warned):
            text = "there is no majority"
            if source is not None:
                text = f"rank {names} differs from the others"
            _log.warning(
                "parameters are not equal on all ranks after step %d: %s%s. Check the "
                "memory and network of its host, and for code that only some ranks "
                "execute.",
                self._steps,
                text,
                ", and gets their state" if self._repair and source is not None else "",
            )
        self._has_warned = True
        if self._repair and source is not None:
            place = self._epoch, self._done, self._has_ended_epoch
            self._share_state(source, behind=self.rank in others)
            self._epoch, self._done, self._has_ended_epoch = place

    def _discard(self) -> None:
        """Undo what a failed block has changed."""
        self._undo.zero_grad()
        self._set_buffers(self._buffers)

    # Ranks.

    def _report(self) -> None:
        """Report, from any thread, that a collective failed."""
        if self._client is not None and self._group is not None:
            self._client.failed(self._group.generation)

    def _on_view(self, view: View) -> None:
        """End what waits in earlier generations; another thread calls this."""
        if self._group is None:
            return
        # Others may leave out a generation that this rank enters, and never answer.
        if self._is_following or not view.keeps(self._view):
            self._group.end(view.generation - 1)

    def _look(self) -> None:
        """Follow a new membership, if there is one, between two steps."""
        if self._recover_late():
            return
        if self._leavers or (self.size == 1 and self._drain.is_wanted):
            self._let_leave()
            return
        client, group = self._client, self._group
        if client is None or group is None or client.newest is None:
            return
        view = client.newest
        # A rank alone makes no collective that fails once its membership has ended.
        if view.generation <= group.generation and not group.has_ended:
            return
        # A view that came while this rank followed one has ended the latter.
        leaves = group.has_ended or not view.keeps(self._view) or self._leaves_now()
        if not leaves:
            return
        self._follow()

    def drain(self) -> None:
        """Let this rank leave the job between two steps, as SIGTERM does.

        Any thread may call it. The rank ends with exit status 143 before a batch, after
        two more steps at most. If others remain, they train on without it and lose no
        step. Otherwise, and without ``--elastic``, all ranks end, and rank 0 writes a
        snapshot before if there is a ``checkpoint``.

        Raises:
            SpecError: the process group is not Gloo, so ranks can't agree on a step.
        """
        if self.size > 1 and not self._compares():
            raise SpecError(
                "drain needs a Gloo process group: with another one, end all ranks and "
                "start the job again, which resumes with checkpoint="
            )
        self._drain.ask()

    def _let_leave(self) -> None:
        """Let the ranks leave that are to; all have committed the same steps."""
        leavers, self._leavers = self._leavers or [self.rank], []
        client, view = self._client, self._view
        least = int(os.environ.get(variable_names.MIN_RANKS, "1"))
        if client is None or view is None or self.size - len(leavers) < least:
            if client is not None and view is not None:
                client.drained(view.ids)
            if self._snapshots is not None and self.rank == 0:
                try:
                    self.save()
                except StrettoError as error:
                    _log.error("%s", error)
            self._leave()
        if self.rank in leavers:
            client.drained([view.ids[rank] for rank in leavers])
        self._follow()

    def _leave(self) -> NoReturn:
        """End this rank, which was asked to leave."""
        _log.warning("rank %d leaves after step %d", self.rank, self._steps)
        raise SystemExit(STATUS)

    # Note [Ranks join between two steps]
    # All ranks must leave for a larger membership after the same step. Rank 0 names
    # the step, once all have noted in the store that they know of the change: the one
    # that it is about to begin. No rank can end that step without rank 0, which begins
    # it after it has written the number, so all ranks read the number before they
    # begin a later step. A rank that knows of no change asks no store.

    def _leaves_now(self) -> bool:
        """Return whether all ranks leave for a larger membership now."""
        ranks = self.model._ranks  # noqa: SLF001
        store = ranks.store
        try:
            store.set(f"join/{ranks.rank}", "")
            knows = [f"join/{rank}" for rank in range(ranks.size)]
            if ranks.rank == 0 and not store.check(["join/after"]):
                if store.check(knows):
                    store.set("join/after", str(self._steps + 1))
                return False
            if not store.check(["join/after"]):
                return False
            return self._steps >= int(store.get("join/after"))
        except RuntimeError:
            return False  # the store's rank is lost, which the keeper reports

    def _meet(self) -> None:
        """Wait until all ranks have committed as many steps as this one.

        They have done so after a new membership, too, which a newcomer may be in that
        does not wait here.
        """
        if self._recover_late() or self._client is None or self.size == 1:
            return
        try:
            self._finish(dist.all_reduce(torch.zeros(1), async_op=True))
        except RuntimeError as error:
            if not _is_loss(error):
                raise
            self._recover(error)

    def _finish(self, work: Any) -> None:
        """Wait for a collective, or until the membership has ended."""
        wait_until_over(work, self.model._ranks.is_over)  # noqa: SLF001

    def _recover(self, cause: BaseException) -> None:
        """Follow the next membership after a failure."""
        self._failures += 1
        if self._failures > _MAX_FAILURES:
            raise StrettoError(
                f"collectives failed {self._failures} times without a step between "
                "them: the network between ranks failed, or ranks make different calls"
            ) from cause
        self._end_membership()
        self._follow()
        forget_frames(cause)

    def _end_membership(self) -> None:
        """End the present membership, which has lost a rank, on all ranks."""
        if self._group is not None:
            self._group.end(self._group.generation)
        self._report()

    def _recover_late(self) -> bool:
        """Follow the next membership after a loss that was noticed in a commit."""
        error, self._lost = self._lost, None
        if error is not None:
            self._recover(error)
        return error is not None

    def _follow(self) -> None:
        """Enter the newest membership; again, if ranks are lost meanwhile."""
        self._progress.rest()
        client, group = self._client, self._group
        if client is None or group is None:
            return
        self._is_following = True
        while True:
            view = client.next_view(group.generation, timeout_s=_PATIENCE_S)
            if view.rank(client.member) is None:
                if self._drain.is_wanted:
                    self._leave()
                self._wait_for_return(view, client, group)
                continue
            try:
                self._enter(view, client, group)
            except (RuntimeError, CommTimeout) as error:
                if not _is_loss(error):
                    raise
                why = why_over(view, client.newest, error, has_ended=group.has_ended)
                self._report()
                _log.info("membership %d was lost: %s", view.generation, why)
                forget_frames(error)
            else:
                self._is_following = False
                return
            finally:
                group.built()

    def _wait_for_return(
        self, view: View, client: MemberClient, group: MemberGroup
    ) -> None:
        """Ask to join again, after a membership without this rank.

        Its own last step may be one that the others have run without it.
        """
        _log.warning(
            "member %d was not reached by the others, which train as membership %d: it "
            "asks to join them again",
            client.member,
            view.generation,
        )
        group.skip(view.generation)
        self._is_fresh, self._has_begun = True, False
        client.ready(group.address)

    def _enter(self, view: View, client: MemberClient, group: MemberGroup) -> None:
        rank, size = view.ids.index(client.member), len(view.members)
        before = 0 if self._view is None else len(self._view.members)
        group.enter(view.generation, rank, size, view.members[0].address)
        self._digests.forget()
        self._leavers, self._lost = [], None
        notes = _positions(group.join(self._note(), self._require_same))
        if max(notes) == _FRESH:
            self._begin_again()
        else:
            self._level(notes)
        self._is_fresh = False
        self._view = view
        client.entered(view.generation)
        self._division += 1
        self._divide()
        self.history.append(
            Membership(generation=view.generation, first_step=self._steps, ids=view.ids)
        )
        if before and rank == 0:
            _log.warning(
                "membership %d: training continues on %s from step %d (before: %d)",
                view.generation,
                counted(size, "rank"),
                self._steps,
                before,
            )
        if before not in (0, size) and self._on_change is not None:
            self._on_change(before, size)

    # State.

    def save(self) -> None:
        """Write a snapshot now, on rank 0, and wait until it is on the disk.

        Call it after the last step and what the program does after it, such as
        ``scheduler.step()``, on all ranks. What it did after epochs that were trained
        before this start of the job is undone.

        Raises:
            SpecError: there is no ``checkpoint``.
            StrettoError: the snapshot cannot be written.
        """
        if self._snapshots is None:
            raise SpecError("save needs stretto.Elastic(..., checkpoint=FOLDER)")
        self._undo_skipped()
        if self.rank == 0:
            self._snapshots.take(self._manifest(), self._state())

    def _resume(self, snapshots: JobSnapshots, *, wanted: bool | None) -> None:
        """Take the state of the newest snapshot, if there is one and it is wanted."""
        found = snapshots.read(wanted=wanted)
        self._run = snapshots.run
        if found is None:
            return
        manifest, state = found
        if manifest.seed != self._seed:
            raise SpecError(
                f"the snapshot in {snapshots.folder} was made with seed="
                f"{manifest.seed}, and seed={self._seed} orders samples differently: "
                "use that seed, another folder, or resume=False to begin again"
            )
        self._receive_saved(state, snapshots.folder / manifest.file)
        self._run = snapshots.run
        snapshots.note(self._steps)

    def _receive_saved(self, state: dict[str, Any], path: Path) -> None:
        """Take a snapshot's state, which another version of the program may have made.

        Raises:
            SpecError: it does not fit what the program passes now.
        """
        error: Exception | None = None
        try:
            found = kept_differences(self._kept, state)
            if not found:
                self._receive(state)
        except Exception as raised:  # noqa: BLE001 - whatever an object's own code raises
            error = raised
            try:
                now = self.model.module.state_dict()
                found = model_differences(now, state["model"])
            except (LookupError, TypeError):
                found = []
            found = found or [f"its state can't be loaded ({in_one_line(error)})"]
        if found:
            raise SpecError(
                f"the snapshot {path} does not fit this program: {'; '.join(found)}. "
                "Restore the program that has written it, or begin again with "
                "resume=False, `stretto run --resume never` or another folder."
            ) from error

    def _manifest(self) -> Manifest:
        return Manifest(
            run=self._run,
            generation=self.generation,
            step=self._steps,
            epoch=self._epoch,
            done=self._done,
            samples=self._samples,
            seed=self._seed,
            ranks=self.size,
            file="",
            size_bytes=0,
            sha256="",
        )

    def _note(self) -> str:
        """Return how far this rank's state is, for the others."""
        is_fresh = self._client is not None and self._is_fresh
        at = _FRESH if is_fresh else [self._run, self._steps]
        options = {"seed": self._seed, "batch": str(self._batch)}
        model = self.model._described()  # noqa: SLF001
        return json.dumps([at, options, model, classes_of(self._kept)])

    def _require_same(self, rows: list[str]) -> None:
        """Require that all ranks divide samples equally.

        A rank that joins others, which train, ends alone where it does not, or where it
        has another model or other objects. The models of ranks that begin together are
        compared later.

        Raises:
            RankDisagreement: ranks have another ``seed`` or ``batch``, or another
                model, optimizer, scheduler or ``extra`` than those that train.
        """
        notes = _positions(rows)
        options = [json.loads(row)[1] for row in rows]
        models = [json.loads(row)[2] for row in rows]
        kept = [json.loads(row)[3] for row in rows]
        first = notes.index(max(notes))
        ends_alone = notes[self.rank] == _FRESH and max(notes) != _FRESH
        of_others = [
            rank
            for rank, at in enumerate(notes)
            if options[rank] != options[first]
            and (at != _FRESH or max(notes) == _FRESH)
        ]
        if of_others or (ends_alone and options[self.rank] != options[first]):
            rank = of_others[0] if of_others else self.rank
            raise RankDisagreement(
                f"rank {first} has {_words(options[first])} and rank {rank} "
                f"{_words(options[rank])}: each would divide samples in its own way. "
                "Pass the same seed= and batch= to Elastic on all ranks."
            )
        if ends_alone and models[self.rank] != models[first]:
            raise RankDisagreement(
                f"rank {first} trains {models[first]}, and rank {self.rank}, which "
                f"would join it, has {models[self.rank]}: was the script or its "
                "environment changed meanwhile? Restore it, or start the job again."
            )
        if ends_alone and kept[self.rank] != kept[first]:
            raise RankDisagreement(
                f"rank {first} passes {_words(kept[first])} to Elastic, and rank "
                f"{self.rank}, which would join it, {_words(kept[self.rank])}: was the "
                "script changed meanwhile? Restore it, or start the job again."
            )

    def _begin_again(self) -> None:
        """Begin as a job that is started again: all ranks that trained are lost."""
        if self.rank == 0:
            if self._snapshots is not None:
                self._resume(self._snapshots, wanted=self._wants_resume)
            _log.warning(
                "all ranks that had trained were lost: training begins again from "
                "step %d, %s",
                self._steps,
                "its newest snapshot" if self._steps else "because no snapshot is left",
            )
        if self.size > 1:
            self._share_state(0, behind=self.rank != 0)

    def _level(self, notes: list[list[int]]) -> None:
        """Give all ranks the state of one that is furthest; ``notes`` are by rank."""
        furthest = max(notes)
        if min(notes) < furthest:
            source = notes.index(furthest)
            self._share_state(source, behind=notes[self.rank] < furthest)

    def _receive(self, state: dict[str, Any]) -> None:
        """Take another rank's state, or a snapshot's."""
        self._has_ended_epoch = False
        self.history = [
            Membership(generation=generation, first_step=step, ids=tuple(ids))
            for generation, step, ids in state.get("history", [])
        ]
        if not self._has_begun:
            self._received = state
            state = copy_of(state)
        self._load(state)

    def _share_state(self, source: int, *, behind: bool) -> None:
        """Give the state of a rank to those that are behind it."""
        data = b""
        if source == self.rank:
            buffer = io.BytesIO()
            torch.save(self._state(), buffer)
            data = buffer.getvalue()
        group = self.model.process_group
        size = torch.tensor([len(data)])
        self._finish(dist.broadcast(size, group=group, group_src=source, async_op=True))
        payload = torch.zeros(int(size), dtype=torch.uint8)
        if data:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._finish(
            dist.broadcast(payload, group=group, group_src=source, async_op=True)
        )
        if behind:
            # From a rank of the same job, which runs the same program.
            stream = io.BytesIO(payload.numpy().tobytes())
            self._receive(torch.load(stream, weights_only=False))

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.module.state_dict(),
            "buffers": dict(self.model.module.named_buffers()),
            "kept": {name: value.state_dict() for name, value in self._kept.items()},
            "classes": classes_of(self._kept),
            "history": [
                (one.generation, one.first_step, list(one.ids)) for one in self.history
            ],
            "cursor": self._cursor(),
        }

    def _cursor(self) -> tuple[int, int, int, int, int]:
        """Return how far training is: step, epoch, its samples done and all, run.

        What the program does after an epoch is not done yet while ranks meet at its
        end, so a rank that gets this state begins with an epoch that has no batch left.
        """
        if self._has_ended_epoch:
            return self._steps, self._epoch - 1, self._samples, self._samples, self._run
        return self._steps, self._epoch, self._done, self._samples, self._run

    def _load(self, state: dict[str, Any]) -> None:
        self.model.module.load_state_dict(state["model"])
        self._set_buffers(state["buffers"])
        for name, value in self._kept.items():
            load_exactly(value, state["kept"][name])
        (
            self._steps,
            self._epoch,
            self._done,
            self._samples,
            self._run,
        ) = state["cursor"]

    @torch.no_grad()
    def _set_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set buffers to values by name; a forward may have made others since."""
        for name, buffer in self.model.module.named_buffers():
            if (value := values.get(name)) is None:
                continue
            if buffer.shape != value.shape:
                buffer.resize_(value.shape)
            buffer.copy_(value)


@final
class ElasticStep:
    """One batch's training, see `Elastic.step`."""

    def __init__(self, run: Elastic) -> None:
        self._run = run
        self.is_committed = False
        """Whether the block's own step counts, so that its loss is one of the run's."""

    def __enter__(self) -> Self:
        """Begin without gradients."""
        self._run._begin_step()  # noqa: SLF001
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Commit the step, or follow the new ranks."""
        is_lost = self._run._end_step(error)  # noqa: SLF001
        self.is_committed = error is None
        return is_lost


def _positions(rows: list[str]) -> list[list[int]]:
    """Return how far each rank's state is, of their notes."""
    return [json.loads(row)[0] for row in rows]


def _words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _whole_number(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise SpecError(f"{name} must be a whole number, got {value!r}") from None


def _is_loss(error: BaseException) -> bool:
    return isinstance(error, CommTimeout | dist.DistError) or (
        isinstance(error, RuntimeError) and is_communication_error(error)
    )
