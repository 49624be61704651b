"""Horovod's callbacks of ``fit``, with its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from stretto.horovod.keras3.epoch_callbacks import (
    BroadcastInitialState,
    LearningRateMultiplier,
    LearningRateWarmup,
    MetricAverage,
)
from stretto.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

_log = get_logger(__name__)


class BroadcastGlobalVariablesCallback(BroadcastInitialState):
    """Start training on all ranks with one rank's weights and optimizer state.

    They are sent as training begins, and for a model that its first step builds, after
    this step. Seeds of random layers stay each rank's own.

    Args:
        root_rank: The rank whose state is sent.
        device: Has no effect.
        local_variables: Variables that stay each rank's own.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any = None
    ) -> None:
        del device
        super().__init__(root_rank)
        for variable in local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Keep a variable each rank's own."""
        self.keep_local(var)


class MetricAverageCallback(MetricAverage):
    """Average an epoch's metrics over ranks, for the callbacks after it.

    Args:
        device: Has no effect.
    """

    def __init__(self, device: str = "") -> None:
        del device
        super().__init__()


class _HorovodRate(LearningRateMultiplier):
    """The common base of Horovod's two callbacks of the learning rate."""

    momentum_correction: bool

    def on_train_begin(self, logs: Any = None) -> None:
        """Find the number of steps."""
        super().on_train_begin(logs)
        if self.momentum_correction and getattr(self.model.optimizer, "momentum", None):
            _log.warning(
                "momentum_correction has no effect: Keras 3 compiles the momentum into "
                "the step. Pass momentum_correction=False to silence this."
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the learning rate to the epoch's metrics, as ``lr``."""
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["lr"] = self.learning_rate()


class LearningRateScheduleCallback(_HorovodRate):
    """Set the learning rate in a range of epochs.

    Args:
        initial_lr: The rate that is multiplied.
        multiplier: Returns the factor at an epoch; or a number, whose power with the
            number of epochs since ``start_epoch`` is the factor.
        start_epoch: The first epoch.
        end_epoch: The epoch after the last; None means no end.
        staircase: Whether the rate changes between epochs only.
        momentum_correction: Has no effect in Keras 3; one log line says so for an
            optimizer with momentum.
        steps_per_epoch: Number of steps; None means what ``fit`` knows.

    Raises:
        ValueError: ``initial_lr`` is None.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,  # noqa: FBT001, FBT002
        momentum_correction: bool = True,  # noqa: FBT001, FBT002
        steps_per_epoch: int | None = None,
    ) -> None:
        if initial_lr is None:
            raise ValueError("initial_lr must be a number, got None")
        given = multiplier

        def power(epoch: float) -> float:
            return float(given ** (epoch - start_epoch))  # type: ignore[operator]

        super().__init__(
            initial_lr,
            given if callable(given) else power,
            start_epoch=start_epoch,
            end_epoch=end_epoch,
            staircase=staircase,
            steps_per_epoch=steps_per_epoch,
        )
        self.momentum_correction = momentum_correction


class LearningRateWarmupCallback(_HorovodRate, LearningRateWarmup):
    """Raise the learning rate step by step, from the rate over the number of ranks.

    Args:
        initial_lr: The full rate, reached after the warm-up.
        warmup_epochs: Number of epochs until then.
        momentum_correction: Has no effect in Keras 3; one log line says so for an
            optimizer with momentum.
        steps_per_epoch: Number of steps; None means what ``fit`` knows.
        verbose: 1 logs the end of the warm-up on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,  # noqa: FBT001, FBT002
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            warmup_epochs,
            initial_lr=initial_lr,
            steps_per_epoch=steps_per_epoch,
            verbose=verbose,
        )
        self.momentum_correction = momentum_correction


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """A ``keras.callbacks.ModelCheckpoint`` that keeps the best model only.

    Set its ``filepath`` before training.

    Args:
        monitor: As in Keras.
        verbose: As in Keras.
        save_weights_only: As in Keras.
        mode: As in Keras.
        save_freq: As in Keras.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,  # noqa: FBT001, FBT002
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=f"best{ending}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
