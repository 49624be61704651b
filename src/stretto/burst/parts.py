"""Construct the parts of a burst model and connect them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from stretto.burst.activation_transfer import ActivationTransfer
from stretto.burst.backward_pass import BackwardPass
from stretto.burst.captures import Captures
from stretto.burst.checks.backward_use import BackwardUse
from stretto.burst.checks.changes import Changes
from stretto.burst.checks.constant_buffers import ConstantBuffers
from stretto.burst.checks.hook_use import HookUse
from stretto.burst.checks.input_classes import InputClasses
from stretto.burst.checks.later_of_all import LaterHooksOfAllModules
from stretto.burst.checks.optimizer_use import OptimizerUse
from stretto.burst.checks.recheck import Recheck
from stretto.burst.checks.replicas import Replicas
from stretto.burst.checks.stale_guard import StaleParameterGuard
from stretto.burst.forward import Forward
from stretto.burst.forward_exchange import ForwardExchange
from stretto.burst.ownership import Ownership
from stretto.burst.rank_groups import RankGroups
from stretto.burst.rank_meeting import RankMeeting
from stretto.burst.shadows import Shadows
from stretto.burst.timings import StepClock, Timings
from stretto.burst.torch_seam import TorchSeam
from stretto.runtime.agreement import Ranks

if TYPE_CHECKING:
    import torch.distributed as dist

    from stretto.runtime.agreement import Agreement


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BurstSettings:
    """Arguments of `BurstParallel` that must be equal on all ranks."""

    batch_norm: str

    seed: int

    bucket_bytes: int

    lanes: int

    verify: bool

    def __str__(self) -> str:
        return (
            f"batch_norm={self.batch_norm}, seed={self.seed}, "
            f"bucket_bytes={self.bucket_bytes}, lanes={self.lanes}, "
            f"verify={self.verify}"
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """The parts of a burst model; `stretto.burst` describes each."""

    module: nn.Module
    """The user's."""

    settings: BurstSettings

    device: torch.device
    """The device of the module's parameters."""

    ranks: Ranks

    meeting: RankMeeting

    rank_groups: RankGroups

    ownership: Ownership

    captures: Captures
    """Empty before the model is set up."""

    # A step.

    forward: Forward

    activations: ActivationTransfer

    backward: BackwardPass

    shadows: Shadows

    clock: StepClock

    timings: Timings

    # Checks.

    exchange: ForwardExchange

    backwards: BackwardUse

    hooks: HookUse

    later_of_all: LaterHooksOfAllModules

    input_classes: InputClasses

    constants: ConstantBuffers

    uses: OptimizerUse

    replicas: Replicas

    changes: Changes

    recheck: Recheck

    stale_guard: StaleParameterGuard

    seam: TorchSeam


def parts_of(
    module: nn.Module,
    settings: BurstSettings,
    group: dist.ProcessGroup,
    ranks: Ranks,
    agreement: Agreement,
    meeting: RankMeeting,
) -> Parts:
    """Return the parts of a model, connected with each other.

    Args:
        module: the user's.
        settings: equal on all ranks.
        group: whose backend connections use.
        ranks: of this group.
        agreement: of these ranks.
        meeting: of these ranks; it gets the model's connections.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    rank_groups = RankGroups(
        ranks,
        serial=agreement.serial,
        backend=group._get_backend(device).name(),  # noqa: SLF001
        device=device,
        lanes=settings.lanes,
    )
    meeting.rank_groups = rank_groups
    rank_groups.elsewhere = agreement.others_wait
    weak = weakref.ref(rank_groups)
    agreement.is_over = lambda: _is_ended(weak)

    def texts_of(what: str) -> partial[list[str]]:
        """Return a collective that returns every rank's text on its optimizers, say."""
        return partial(meeting.gather, f"compare {what}", place=f"comparing {what}")

    clock = StepClock()
    activations = ActivationTransfer(rank_groups, clock)
    timings = Timings(clock)
    ownership = Ownership(ranks)
    uses = OptimizerUse(ranks, texts_of("optimizers"))
    backwards = BackwardUse(ranks, texts_of("backward passes"), rank_groups.end)
    hooks = HookUse(ranks, texts_of("hooks"))
    constants = ConstantBuffers(ranks, texts_of("buffers"))
    replicas, changes = Replicas(ranks), Changes(ranks)
    recheck = Recheck(module)
    stale_guard = StaleParameterGuard(
        module, ranks, rank_groups.refusals.tell, uses.zeroes
    )
    seam = TorchSeam(
        module,
        serial=agreement.serial,
        ownership=ownership,
        rank_groups=rank_groups,
        stale_guard=stale_guard,
        changes=changes,
        uses=uses,
    )
    backward = BackwardPass(
        rank_groups=rank_groups,
        ownership=ownership,
        seam=seam,
        activations=activations,
        stale_guard=stale_guard,
        changes=changes,
        uses=uses,
        backwards=backwards,
        hooks=hooks,
        timings=timings,
        clock=clock,
        device=device,
    )
    return Parts(
        module=module,
        settings=settings,
        device=device,
        ranks=ranks,
        meeting=meeting,
        rank_groups=rank_groups,
        ownership=ownership,
        captures=Captures(module, ownership, stale_guard, device),
        forward=Forward(
            module,
            rank_groups,
            activations,
            clock,
            device=device,
            seed=settings.seed,
        ),
        activations=activations,
        backward=backward,
        shadows=Shadows(backward.gradient_arrived),
        clock=clock,
        timings=timings,
        exchange=ForwardExchange(
            rank_groups,
            clock,
            checks=(backwards, hooks, constants, uses, replicas, changes, recheck),
            hooks=hooks,
        ),
        backwards=backwards,
        hooks=hooks,
        later_of_all=LaterHooksOfAllModules(module, hooks, stale_guard),
        input_classes=InputClasses(module, stale_guard),
        constants=constants,
        uses=uses,
        replicas=replicas,
        changes=changes,
        recheck=recheck,
        stale_guard=stale_guard,
        seam=seam,
    )


def _is_ended(rank_groups: weakref.ref[RankGroups]) -> bool:
    found = rank_groups()
    return found is not None and found.failures.error is not None
