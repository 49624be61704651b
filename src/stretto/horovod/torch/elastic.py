"""Continue training when ranks join and leave.

Under ``stretto run --elastic MIN:MAX train.py`` the ranks that are left when one is
lost keep their processes, as Horovod's: `run` restores the last commit from memory,
makes new connections (`regrouping`), and calls the training function again. Ranks that
are started in place of lost ones join at a commit.

Without it, torchrun's elastic agent detects processes that end and hosts that join, and
restarts all processes with the available ranks,

```bash
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nnodes=1:4 --nproc-per-node=8 --max-restarts=100 --rdzv-backend=c10d
    --rdzv-endpoint=HOST:PORT train.py
```

and `run` makes the training function continue from the last commit. Restarted processes
execute the code before `run` as usual: they create models and optimizers, which then
take the committed values. Without the variable, PyTorch 2.13's remaining agents do not
send new agents the address of the meeting point.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from stretto import variable_names
from stretto.errors import RankDisagreement, SpecError
from stretto.horovod import world
from stretto.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from stretto.horovod.reduce_ops import Max
from stretto.horovod.torch.allreduce import allreduce
from stretto.horovod.torch.commits import Commits, folder_of
from stretto.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from stretto.horovod.torch.gradients import discard_gradients
from stretto.horovod.torch.regrouping import JobRanks, is_loss
from stretto.logs import get_logger
from stretto.runtime.failure import forget_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["ElasticSampler", "TorchState", "run"]

_log = get_logger(__name__)

_EXTRA_STATE = "_extra_state"
"""How the names of modules' extra state in a ``state_dict`` end."""

_TRIES = 3
"""Consecutive failures of a training function without a commit before it raises."""


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training function that is called again after ranks joined or left.

    ``func(state, ...)`` gets the last committed state, the same on all ranks:

    - A rank is lost, under ``stretto run --elastic``: the others restore their last
      commit, in the same processes, and the function is called again with that of
      rank 0, which has trained longest.
    - A rank is lost, otherwise: the error ends this process, the agent restarts all
      processes, and the function is called with the newest commit of any host. Without
      an agent the error ends the job.
    - `HorovodInternalError` with all ranks alive (they made different calls): the state
      is restored and the function is called again, in the same processes; after three
      times without a commit the error is raised.
    - `HostsUpdatedInterrupt`: the function is called again with the current state of
      rank 0.

    Reset callbacks are called after a restart, and before each further call. Gradients
    are no part of a state: those of a step that was lost are cleared.
    """

    @functools.wraps(func)
    def wrapper(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        world.init()
        ranks = JobRanks.of_process()
        if ranks is not None:
            return _run_on_members(ranks, func, state, args, kwargs)
        again = state.recover()
        skip_sync, failures, commits = False, 0, state.num_commits
        while True:
            if again:
                state.on_reset()
            again = True
            try:
                if not skip_sync:
                    state.sync()
                result = func(state, *args, **kwargs)
                state.end()
            except HorovodInternalError as exc:
                failures = 0 if state.num_commits > commits else failures + 1
                commits = state.num_commits
                if not _all_alive(exc) or failures >= _TRIES:
                    raise
                _log.warning("restored the last commit after: %s", exc)
                _rejoin()
                state.restore()
                state.discard_gradients()
                skip_sync = False
            except HostsUpdatedInterrupt as exc:
                skip_sync = exc.skip_sync
                _rejoin()
                state.discard_gradients()
            else:
                return result

    return wrapper


def _run_on_members(
    ranks: JobRanks,
    func: Callable[..., Any],
    state: TorchState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a training function on the ranks that are there, in this process."""
    state.follow(ranks)
    ranks.begin(state.serial)
    state.take(ranks)
    is_reset, failures, commits = ranks.joins, 0, state.num_commits
    while True:
        try:
            if not ranks.have_state:
                is_reset |= _recover_from_files(ranks, state)
            if is_reset:
                state.on_reset()
            is_reset = True
            state.sync()
            ranks.has_synced()
            result = func(state, *args, **kwargs)
            state.end()
        except HostsUpdatedInterrupt:
            ranks.change(state.serial, is_known=state.knows_of_ranks)
        except RuntimeError as exc:
            failures = 0 if state.num_commits > commits else failures + 1
            commits = state.num_commits
            if not is_loss(exc):
                raise
            ranks.recover(exc, state.serial)
            if ranks.is_smaller:
                failures = 0
            if failures >= _TRIES:
                raise
            forget_frames(exc)
            state.restore()
        else:
            return result
        state.take(ranks)
        state.discard_gradients()


def _recover_from_files(ranks: JobRanks, state: TorchState) -> bool:
    """Return whether there is a commit on disk, where no rank has one in memory."""
    found = state.recover()
    if not found and ranks.joins and world.rank() == 0:
        _log.warning(
            "all ranks that had trained were lost: training begins again. With %s, a "
            "folder on each host, commits are also written there.",
            variable_names.ELASTIC_DIR,
        )
    return found


def _all_alive(error: HorovodInternalError) -> bool:
    return error.__cause__ is None or isinstance(error.__cause__, RankDisagreement)


def _rejoin() -> None:
    world.shutdown()
    world.init()


class TorchState:
    """State that survives the loss of a rank.

    Models, optimizers, schedulers, samplers and other objects with ``state_dict`` and
    ``load_state_dict`` are saved through these; other values are copied and, for other
    ranks and for disk, pickled.

    Args:
        model: A model.
        optimizer: An optimizer.
        kwargs: Further objects and values; each becomes an attribute.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        self._names = sorted(kwargs)
        self._callbacks: list[Callable[[], None]] = []
        self._updates = 0
        self._saved: dict[str, Any] = {}
        self._root = 0
        self.serial = -1
        """The number of the last commit, over all restarts."""
        self.num_commits = 0
        self.knows_of_ranks = False
        """Whether any rank knew of other ranks when the hosts were checked last."""
        self._ranks: JobRanks | None = None
        folder = folder_of(os.environ)
        self._commits = None if folder is None else Commits(folder)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.save()

    def follow(self, ranks: JobRanks) -> None:
        """Check from now on whether there are other ranks to train with.

        Raises:
            SpecError: a model is not on the CPU.
        """
        self._ranks = ranks
        for name, value in self._values():
            tensors = value.parameters() if isinstance(value, torch.nn.Module) else ()
            for tensor in tensors:
                if tensor.device.type != "cpu":
                    raise SpecError(
                        f"state.{name} is on {tensor.device}, but under `stretto run "
                        "--elastic` hvd.elastic.run needs models on the CPU: use "
                        "torchrun, whose restarts continue from commits on disk"
                    )

    def take(self, ranks: JobRanks) -> None:
        """Let `sync` take the state that counts among these ranks."""
        self._root, self.serial = ranks.root, ranks.serial

    def discard_gradients(self) -> None:
        """Clear the gradients of all models and optimizers."""
        discard_gradients()
        for _, value in self._values():
            if isinstance(value, torch.nn.Module):
                for parameter in value.parameters():
                    parameter.grad = None
            elif isinstance(value, torch.optim.Optimizer):
                for group in value.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None

    def save(self) -> None:
        """Save the state in this process."""
        self._saved = {
            name: copy.deepcopy(value.state_dict() if _has_state(value) else value)
            for name, value in self._values()
        }

    def restore(self) -> None:
        """Restore the last saved state."""
        for name, value in self._values():
            saved = copy.deepcopy(self._saved[name])
            if _has_state(value):
                value.load_state_dict(saved)
            else:
                setattr(self, name, saved)

    def commit(self) -> None:
        """Save the state, also for the processes of a restart, and check for new hosts.

        Every rank must call it, at the same point. If an agent started it, the first
        process of each host writes the state to a folder of that host; the folder is
        removed when training ends.

        Raises:
            HostsUpdatedInterrupt: hosts joined or left.
        """
        self.save()
        self.serial += 1
        self.num_commits += 1
        if self._commits is not None and world.local_rank() == 0:
            self._commits.write(self.serial, self._saved)
        self.check_host_updates()

    def sync(self) -> None:
        """Copy one rank's state to all ranks, and save it.

        After a restart it is the rank with the newest commit, otherwise rank 0.
        """
        root = self._root
        for name, value in self._values():
            if isinstance(value, torch.nn.Module):
                self._sync_model(value, root, f"state.{name}")
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root)
            elif _has_state(value):
                label = f"state.{name}"
                value.load_state_dict(broadcast_object(value.state_dict(), root, label))
            else:
                setattr(self, name, broadcast_object(value, root, f"state.{name}"))
        self._root = 0
        self.save()

    def _sync_model(self, model: torch.nn.Module, root: int, label: str) -> None:
        state = model.state_dict()
        # What modules add with get_extra_state may have any type and size.
        extra = {k: v for k, v in state.items() if k.endswith(_EXTRA_STATE)}
        tensors = {k: v for k, v in state.items() if k not in extra}
        broadcast_parameters(tensors, root)
        if extra:
            extra = broadcast_object(extra, root, label)
            if world.rank() != root:
                model.load_state_dict(extra, strict=False)

    def recover(self) -> bool:
        """Load the newest commit of any host; return whether there is one.

        Every rank must call it. `sync` then sends the state to all.
        """
        mine = -1 if self._commits is None else self._commits.newest()
        serials = allgather_object(mine, name="state.newest")
        newest = max(serials)
        if newest < 0:
            return False
        self._root = serials.index(newest)
        self.serial = newest
        if world.rank() == self._root and self._commits is not None:
            self._saved.update(self._commits.read(newest))
            self.restore()
            _log.info("continuing from commit %d", newest)
        return True

    def end(self) -> None:
        """Delete commits when all ranks have arrived; training has ended."""
        if self._commits is None and self._ranks is None:
            return
        allgather_object(world.rank(), name="state.end")
        if self._commits is not None and world.local_rank() == 0:
            self._commits.clear()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call after ranks joined or left, before `sync`."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks."""
        self._updates = 0
        self.reset()
        for callback in self._callbacks:
            callback()

    def reset(self) -> None:
        """Do nothing; subclasses may run code before the reset callbacks."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record a launcher's report: hosts left (1), joined (2) or both (3)."""
        del timestamp
        self._updates |= update_res

    def check_host_updates(self) -> None:
        """Check on all ranks for a report of hosts that joined or left.

        Raises:
            HostsUpdatedInterrupt: on every rank, if any rank has such a report.
        """
        has_news = self._ranks is not None and self._ranks.has_news()
        bits = torch.tensor([self._updates & 1, self._updates >> 1 & 1, int(has_news)])
        removed, added, known = allreduce(bits, op=Max, name="state.updates").tolist()
        self.knows_of_ranks = bool(known)
        if removed or added or known:
            raise HostsUpdatedInterrupt(skip_sync=bool(removed and not added))

    def _values(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self._names]


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class ElasticSampler(Sampler[int]):
    """Divides the unseen part of an epoch among the current ranks.

    As with `torch.utils.data.DistributedSampler`, every rank gets the same number of
    samples, some of them twice if they do not divide evenly. Add it to the
    `TorchState`, call `record_batch` after each batch and `set_epoch` at an epoch's
    end.

    Args:
        dataset: Any object with a length.
        shuffle: Whether the order is random, different in each epoch.
        seed: Random seed of the order, the same on all ranks.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:  # noqa: FBT001, FBT002
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch with no samples seen."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of ``batch_size``."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its samples seen, over all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Load a `state_dict` and divide the remaining samples."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
        self.num_replicas = world.size()
        self.rank = world.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        again = itertools.cycle(self.remaining_indices)
        return itertools.islice(again, self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
