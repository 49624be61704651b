"""A burst model as the wrappers of PyTorch's functions see it, see `torch_calls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from stretto.burst.checks.joined_calls import (
    NUM_VALUES,
    combined,
    require_same_call,
)
from stretto.burst.checks.separable import why_together
from stretto.burst.gathered_outputs import gathered_unevenly
from stretto.burst.held_activations import kept_module_of
from stretto.errors import RankDisagreement, StrettoError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from stretto.burst.checks.changes import Changes
    from stretto.burst.checks.joined_calls import JoinedCall
    from stretto.burst.checks.optimizer_use import OptimizerUse
    from stretto.burst.checks.stale_guard import StaleParameterGuard
    from stretto.burst.ownership import Ownership
    from stretto.burst.rank_groups import RankGroups


@final
class TorchSeam:
    """Answers what a wrapper asks of one model, and records what it reports.

    Args:
        module: the user's module.
        serial: number of the model, equal on all ranks.
        ownership: which rank holds which parameter.
        rank_groups: the model's connections.
        stale_guard: knows the optimizers of the model.
        changes: what the program does to gradients and parameters.
        uses: how optimizers use gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        serial: int,
        ownership: Ownership,
        rank_groups: RankGroups,
        stale_guard: StaleParameterGuard,
        changes: Changes,
        uses: OptimizerUse,
    ) -> None:
        self.module = module
        self.order = serial
        self.ownership = ownership
        self._rank_groups = rank_groups
        self._stale_guard = stale_guard
        self._changes = changes
        self._uses = uses
        self.backward_failed: weakref.WeakMethod[Callable[..., None]] | None = None
        """Called with an exception from a backward, see `report_failure`."""
        self.why_unsent: weakref.WeakMethod[Callable[..., str]] | None = None
        """Returns why gradients are not those of the global batch, or nothing: of all
        parameters, or of those with which it is called."""
        self._is_replaced = False
        """Whether a later model over the same module has taken its place."""
        self._is_preparing = False
        """Whether the step that runs only makes an optimizer's state."""

    def replace(self) -> None:
        """End the model's use: a later one over the same module takes its place."""
        self._is_replaced = True
        self._stale_guard.runs((), ())

    def require_in_use(self) -> None:
        """Require that no later model has taken this one's place, as on all ranks.

        Raises:
            StrettoError: one has.
        """
        if self._is_replaced:
            raise StrettoError(
                "another BurstParallel was built over the same module and replaces "
                "this one: use the later one"
            )

    def require_sent(
        self, way: str, parameters: Iterable[Tensor] | None = None
    ) -> None:
        """Require that gradients are those of the global batch.

        Args:
            way: what to do after a backward that sends them.
            parameters: whose gradients; default: all.

        Raises:
            StrettoError: they are this rank's own, since a backward in `no_sync`.
        """
        ask = None if self.why_unsent is None else self.why_unsent()
        why = "" if ask is None else ask(parameters)
        if why and self._rank_groups.ranks.size > 1:
            error = StrettoError(f"{why}: {way} after that one")
            self._rank_groups.refusals.tell(error)
            raise error

    def join(
        self, value: Tensor, call: JoinedCall, place: str, *, is_max: bool
    ) -> Tensor:
        """Return the ranks' values of one element combined. Collective.

        Raises:
            RankDisagreement: other ranks made another call.
            CommTimeout: a rank was lost.
        """
        if self._rank_groups.ranks.size == 1:
            return value
        result = combined(self.values_of_ranks(value, call, place), is_max=is_max)
        return torch.full_like(value, result)

    def values_of_ranks(
        self, value: Tensor, call: JoinedCall, place: str
    ) -> list[float]:
        """Return the ranks' values of one element, by rank. Collective.

        Raises:
            RankDisagreement: other ranks made another call.
            CommTimeout: a rank was lost.
        """
        ranks = self._rank_groups.ranks
        if ranks.size == 1:
            return [float(value)]
        rows = torch.zeros(
            (ranks.size, NUM_VALUES), dtype=torch.float64, device=value.device
        )
        rows[ranks.rank] = torch.tensor(call.row(float(value)), dtype=torch.float64)
        with self._rank_groups.guard(place):
            self._rank_groups.reduce_number(rows, dist.ReduceOp.SUM)
        found: list[list[float]] = rows.tolist()
        require_same_call(found, ranks, self.module)
        return [row[0] for row in found]

    def require_same_scale(self, scale: Tensor, call: JoinedCall) -> None:
        """Require that all ranks unscale gradients by the same factor. Collective.

        Raises:
            RankDisagreement: they don't.
        """
        scales = self.values_of_ranks(scale, call, "comparing the scaler's scales")
        if len(set(scales)) > 1:
            shown = ", ".join(f"{1 / scale:g}" for scale in scales)
            raise RankDisagreement(
                f"ranks scale their losses by different factors ({shown}, by rank), so "
                "their gradients can't be added: give GradScaler the same init_scale "
                "on all ranks, and load the same state into it"
            )

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record that an optimizer of the model's parameters takes a step.

        Raises:
            StrettoError: it reads all gradients together, and each rank holds only
                some; or gradients are this rank's own, since a backward in `no_sync`.
        """
        self.require_sent(
            "call optimizer.step()",
            (p for group in optimizer.param_groups for p in group["params"]),
        )
        self._is_preparing = False
        if not self.ownership.is_whole():
            if self._stale_guard.is_preparing(optimizer):
                self._is_preparing = True
                return
            with self._stale_guard.opened():
                found = why_together(optimizer, args, kwargs)
            if found is not None:
                error = StrettoError(
                    f"{found}, and this plan does not run every layer on every rank: "
                    "use an optimizer that treats each parameter separately, or a plan "
                    "with all ranks for every layer"
                )
                self._rank_groups.refusals.tell(error)
                raise error
        self._stale_guard.before_step(optimizer)

    def before_use(self, optimizer: Optimizer) -> None:
        """Record that an optimizer's step uses the gradients as they are now."""
        if not self._is_preparing:
            used = self._changes.before_step(
                p for group in optimizer.param_groups for p in group["params"]
            )
            self._uses.before_step(optimizer, used.values())
            self._stale_guard.is_stepping = True

    def after_step(self) -> None:
        """Record that an optimizer of the model's parameters has taken a step."""
        self._stale_guard.is_stepping = False
        self._changes.after_step()
        self._uses.after_step()

    def before_backward(self, losses: Iterable[Tensor]) -> None:
        """Check the tensors from which a backward starts.

        Raises:
            StrettoError: one depends on an activation that a forward hook kept, or on
                outputs gathered from ranks with other numbers of samples.
        """
        gathered = gathered_unevenly(losses)
        if gathered is not None:
            with self._rank_groups.inside_step():
                raise StrettoError(
                    f"{gathered} gives a burst model's outputs the gradients of other "
                    "ranks' losses, and ranks have other numbers of samples, so their "
                    "sum can't be weighted: give each rank the same number of samples, "
                    "or detach() what comes from other ranks"
                )
        name = kept_module_of(losses)
        if name is not None:
            with self._rank_groups.inside_step():
                raise StrettoError(
                    f"the loss uses an activation that a forward hook of {name!r} has "
                    "kept, so its gradient would not enter the model by an output: "
                    "return the tensor as an output of the model, or detach() it in "
                    "the hook"
                )

    def report_failure(self, error: BaseException, *, has_ended: bool) -> None:
        """Record an exception from a backward; whether this model's part had ended."""
        failed = None if self.backward_failed is None else self.backward_failed()
        if failed is not None:
            failed(error, has_ended=has_ended)

    def clips(self, limit: float) -> None:
        """Record that gradients are clipped, by the norm or by value."""
        self._uses.clips(limit)

    def look_at_gradients(self) -> None:
        """Record what the program has done to gradients so far."""
        self._changes.look_at_gradients()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply this rank's gradients by a factor that is equal on all ranks."""
        for parameter in self.module.parameters():
            if (grad := parameter.grad) is not None:
                grad.mul_(factor.to(grad.dtype))
        self.gradients_were_scaled()

    def gradients_were_scaled(self) -> None:
        """Record that gradients have just been scaled equally on all ranks."""
        self._changes.gradients_were_scaled()
