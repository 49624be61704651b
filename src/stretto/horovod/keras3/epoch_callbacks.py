"""Callbacks of ``fit``, on every backend of Keras 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from stretto.errors import SpecError, StrettoError
from stretto.horovod import world
from stretto.horovod.exceptions import HorovodInternalError
from stretto.horovod.keras3.model_state import broadcast_state, synchronize_variables
from stretto.horovod.keras3.optimizer_class import reduces, turn_jit_off
from stretto.horovod.numpy_arrays import run
from stretto.horovod.process_sets import global_process_set
from stretto.horovod.reduce_ops import Average
from stretto.horovod.torch.allreduce import allreduce_async
from stretto.horovod.torch.functions import allgather_object
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

_log = get_logger(__name__)


def _require_equal_steps(steps: int | None) -> None:
    """Require that all ranks have as many steps in an epoch.

    Raises:
        SpecError: they do not.
    """
    by_rank = allgather_object(steps, name="steps of an epoch")
    known = {n for n in by_rank if n is not None}
    if len(known) > 1:
        rows = "; ".join(f"rank {rank}: {n}" for rank, n in enumerate(by_rank))
        raise SpecError(
            f"ranks have different numbers of steps in an epoch ({rows}): each step "
            "needs all ranks. Give each rank as many batches, for instance with "
            f"steps_per_epoch={min(known)}, or leave out the samples that are left "
            "when they are divided."
        )


def _pause(model: Any, name: str) -> None:
    """Wait for ranks that reduce gradients at a place where none is in a step.

    Raises:
        HorovodInternalError: a rank is lost, or is at another place.
    """
    if world.size() == 1 or not reduces(model):
        return
    if keras.backend.backend() == "jax":
        # Steps are under way after they have returned.
        synchronize_variables(model)
        keras.ops.convert_to_numpy(model.optimizer.iterations)
    try:
        world.current().member(global_process_set).rounds.pause(name)
    except StrettoError as exc:
        raise HorovodInternalError(str(exc)) from exc


_END_OF_EPOCH = (
    "the end of an epoch (fewer batches, or stopped, for instance by TerminateOnNaN)"
)
_END_OF_FIT = (
    "the end of fit (fewer epochs, or stopped, for instance by EarlyStopping without "
    "MetricAverage before it)"
)


class BroadcastInitialState(keras.callbacks.Callback):  # type: ignore[misc]
    """Start training on all ranks with one rank's weights and optimizer state.

    Put it first. On TensorFlow it also turns jit_compile off, with one log line. If
    the optimizer reduces gradients, a rank that leaves an epoch or ``fit`` while others
    are in a step ends all of them at once, by an error that names it. If it does not,
    and Keras's own step trains the model, one log line says so.

    Args:
        root: The rank whose state is sent.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self.root = root
        self._is_done = False
        self._local: set[int] = set()

    def keep_local(self, variable: Any) -> None:
        """Keep a variable each rank's own."""
        self._local.add(id(variable))

    def set_model(self, model: Any) -> None:
        """Note the model, before Keras compiles its steps."""
        super().set_model(model)
        turn_jit_off(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast in each ``fit``, if the model is built.

        Raises:
            SpecError: ranks have different numbers of steps in an epoch, or different
                variables.
        """
        del logs
        if world.size() > 1:
            if reduces(self.model):
                _require_equal_steps(self.params.get("steps"))
            else:
                self._warn_of_plain_optimizer()
        # Another `fit` may have another model, or weights from a file.
        self._is_done = False
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first step of a model that the step has built."""
        del batch, logs
        self._broadcast()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Wait for ranks that are still in the epoch.

        Raises:
            HorovodInternalError: a rank takes another step, or is lost.
        """
        del epoch, logs
        _pause(self.model, _END_OF_EPOCH)

    def on_train_end(self, logs: Any = None) -> None:
        """Wait for ranks that are still in ``fit``.

        Raises:
            HorovodInternalError: a rank takes another step, or is lost.
        """
        del logs
        _pause(self.model, _END_OF_FIT)

    def _warn_of_plain_optimizer(self) -> None:
        """Warn that ranks train apart, unless the model's own step may reduce."""
        optimizer = getattr(self.model, "optimizer", None)
        # A class of the model's own may use a tape that reduces.
        if optimizer is None or not type(self.model).__module__.startswith("keras."):
            return
        _log.warning(
            "the optimizer of model %s, %s, does not reduce gradients: after this "
            "start each rank trains its own model. Pass it to DistributedOptimizer "
            "before compile(); a model from a file or a configuration has a plain one, "
            "so read files with load_model of this package.",
            self.model.name,
            type(optimizer).__name__,
        )

    def _broadcast(self) -> None:
        if not self._is_done:
            broadcast_state(self.model, self.root, self._local)
            self._is_done = True


class MetricAverage(keras.callbacks.Callback):  # type: ignore[misc]
    """Average an epoch's metrics over ranks, for the callbacks after it.

    Put it before callbacks that read metrics: EarlyStopping, ReduceLROnPlateau,
    ModelCheckpoint. All ranks must have the same metrics.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace the numbers in ``logs`` by the ranks' averages."""
        del epoch
        names = sorted(n for n, value in (logs or {}).items() if np.ndim(value) == 0)
        if not names or world.size() == 1:
            return
        _pause(self.model, _END_OF_EPOCH)
        values = np.array([float(logs[name]) for name in names])
        averages = run(allreduce_async, values, name="metrics", op=Average)
        logs.update(zip(names, averages.tolist(), strict=True))


class LearningRateMultiplier(keras.callbacks.Callback):  # type: ignore[misc]
    """Set the learning rate in a range of epochs.

    Args:
        initial_lr: The rate that is multiplied; None means the optimizer's as training
            begins.
        multiplier: Returns the factor at an epoch, which has a fraction unless
            ``staircase``.
        start_epoch: The first epoch.
        end_epoch: The epoch after the last; None means no end.
        staircase: Whether the rate changes between epochs only.
        steps_per_epoch: Number of steps; None means what ``fit`` knows.
    """

    def __init__(
        self,
        initial_lr: float | None,
        multiplier: Callable[[float], float],
        *,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def learning_rate(self) -> float:
        """Return the optimizer's learning rate."""
        rate = self.model.optimizer.learning_rate
        return float(keras.ops.convert_to_numpy(rate))

    def on_train_begin(self, logs: Any = None) -> None:
        """Find the initial rate and the number of steps.

        Raises:
            SpecError: the optimizer has a schedule of its own, or the number of steps
                isn't known.
        """
        del logs
        optimizer: Any = self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        schedule = getattr(inner, "_learning_rate", None)
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            raise SpecError(
                f"the optimizer's learning rate is a {type(schedule).__name__}, which "
                f"{type(self).__name__} can't change: pass a number as learning_rate"
            )
        if self.initial_lr is None:
            self.initial_lr = self.learning_rate()
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise SpecError(
                    "the number of steps of an epoch isn't known: pass "
                    f"steps_per_epoch to {type(self).__name__}"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        del logs
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of a step."""
        del logs
        ended = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or ended or (self.staircase and batch):
            return
        part = 0.0 if self.staircase else batch / (self.steps_per_epoch or 1)
        rate = (self.initial_lr or 0.0) * self.multiplier(self._epoch + part)
        synchronize_variables(self.model)
        self.model.optimizer.learning_rate = rate


class LearningRateWarmup(LearningRateMultiplier):
    """Raise the learning rate step by step to what it is as training begins.

    From the rate divided by the number of ranks, for which the rate of one process was
    multiplied by it: the usual start for large batches (Goyal et al., arXiv:1706.02677,
    section 2.2).

    Args:
        epochs: Number of epochs until the full rate.
        initial_lr: The full rate; None means the optimizer's as training begins.
        steps_per_epoch: Number of steps; None means what ``fit`` knows.
        verbose: 1 logs the end of the warm-up on rank 0.
    """

    def __init__(
        self,
        epochs: int = 5,
        *,
        initial_lr: float | None = None,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # So that the last step of the warm-up has the full rate.
            done = epoch + 1 / (self.steps_per_epoch or 1)
            size = world.size()
            return (done * (size - 1) / epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=epochs,
            staircase=False,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the end of the warm-up."""
        del logs
        is_last = self.end_epoch is not None and epoch == self.end_epoch - 1
        if is_last and self.verbose > 0 and world.rank() == 0:
            _log.info(
                "epoch %d: the learning rate has reached %g",
                epoch + 1,
                self.learning_rate(),
            )
