"""The class that users put in place of DDP."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stretto import runtime, variable_names
from stretto.errors import RankDisagreement, SpecError, StrettoError
from stretto.logs import get_logger
from stretto.runtime import backends
from stretto.runtime.ddp import UNSETTLED
from stretto.runtime.negotiated.reducer import NEGOTIATED
from stretto.runtime.torch_compat import with_arguments_of, without_dynamo
from stretto.runtime.weak_call import weakly
from stretto.schema import NARROWER, Plan
from stretto.tune import AutoPlan, TuneOptions
from stretto.tune.artifacts import RunArtifacts, title_of
from stretto.tune.forced import schedule

if TYPE_CHECKING:
    from torch import nn

    from stretto.tune import OnSettled, TuningResult

AUTO = "auto"
DDP_RULE = "ddp"


BACKWARD = "backward"
EXACT, BY_PARTS = CLIPPINGS = "exact", "parts"
OVERLAPS = (BACKWARD, "forward", AUTO)

_COMPARED = ("order", "lanes", "unit_bytes", "nan", "nan_patience")
"""Options of the runtime that must be equal on all ranks."""


_log = get_logger(__name__)


class DistributedDataParallel(runtime.DistributedDataParallel):
    """PyTorch's DistributedDataParallel with a planned overlap of communication.

    Every argument, method and `isinstance` check of PyTorch's class works, and
    gradients are DDP's.

    Args:
        module: The module to be parallelized.
        *args: Passed on to PyTorch's class.
        plan: ``"auto"`` measures the first steps and the network, plans and applies the
            plan while every step trains; ``"ddp"`` or ``None`` keeps PyTorch's own
            rule; a `Plan` or the path of a plan file is executed unchanged.
        on_settled: Called with ``"auto"``'s result, a `TuningResult`.
        wire_dtype: With ``"auto"``, the type in which gradients may travel, narrower
            than their own: ``"float16"`` or ``"bfloat16"``. A plan has its own.
        tune: With ``"auto"``, options of the search within the run; see `TuneOptions`.
        overlap: ``"auto"`` (experimental) lets communication also overlap with the next
            forward where that is faster and nothing in the program prevents it: with
            ``plan="auto"`` the profiled steps and trials decide, otherwise the plan.
            ``"forward"`` requires a plan that was made for it; ``"backward"`` executes
            such a plan without it. By default ``STRETTO_OVERLAP``, or else
            ``"backward"``.
        exact_clipping: ``False`` (experimental) lets plans that overlap with the next
            forward exchange buckets in halves, so that clipping by the global norm
            waits for sums only; see the page on overlap with the next forward. The
            clipping factor then differs from the exact one in its last bits. By default
            ``False`` if ``STRETTO_CLIPPING`` is ``parts``, else ``True``.
        **kwargs: Passed on to PyTorch's class, and ``record``, ``timeout_s``,
            ``error_feedback``, ``nan``, ``nan_patience``, ``order``, ``lanes``,
            ``unit_bytes`` and ``lane_backend`` to
            `stretto.runtime.DistributedDataParallel`.

    Raises:
        SpecError: an option is invalid, a plan file is broken, or wire_dtype is
            combined with a plan.
        PlanMismatch: a plan was made for another model.
        RankDisagreement: ranks have different plans, models or versions.
        CommTimeout: a rank did not arrive in time.
    """

    _begins_late = False

    @with_arguments_of(runtime.DistributedDataParallel.__init__)
    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        plan: Plan | str | Path | None = AUTO,
        on_settled: OnSettled | None = None,
        wire_dtype: str | None = None,
        tune: TuneOptions | None = None,
        overlap: str | None = None,
        exact_clipping: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self._auto: AutoPlan | None = None
        self._artifacts: RunArtifacts | None = None
        negotiates = kwargs.get("order") == NEGOTIATED
        if plan == AUTO:
            plan = (
                DDP_RULE if negotiates else os.environ.get(variable_names.PLAN) or AUTO
            )
        # A rank that cannot continue still meets the others, so that none of them
        # waits.
        self._trouble: StrettoError | None = _invalid(
            plan, tune, wire_dtype, on_settled
        )
        if self._trouble is not None:
            plan = tune = wire_dtype = None
        automatic = plan == AUTO
        options = tune or TuneOptions()
        # What the runtime's constructor compares between ranks, in its first meeting.
        self._compared = {
            "plan": repr(plan) if automatic or plan == DDP_RULE else "a plan",
            "wire_dtype": repr(wire_dtype),
            **{name: repr(kwargs[name]) for name in _COMPARED if name in kwargs},
        }
        overlap = overlap or os.environ.get(variable_names.OVERLAP) or BACKWARD
        self._compared["overlap"] = repr(overlap)
        self._compared[variable_names.TUNE_SCHEDULE] = repr(
            os.environ.get(variable_names.TUNE_SCHEDULE, "")
        )
        if automatic:
            self._compared["tune"] = repr(options)
        if wire_dtype is not None and not automatic:
            self._trouble = SpecError(
                f"wire_dtype={wire_dtype!r} needs plan='auto': a plan's buckets have "
                "their own wire_dtype, and DDP's rule sends gradients in their own "
                "type. Plan with `stretto plan --wire-dtype`."
            )
        if automatic or plan == DDP_RULE:
            plan = None
        elif isinstance(plan, str | Path):
            try:
                plan = Plan.load(plan)
            except StrettoError as exc:
                self._trouble, plan = exc, None
        if self._trouble is None:
            try:
                plan = _with_overlap(plan, overlap, automatic=automatic)
            except StrettoError as exc:
                self._trouble = exc
        self._counts_steps = self._plans_itself = automatic
        if exact_clipping is None:
            chosen = os.environ.get(variable_names.CLIPPING) or EXACT
            if chosen not in CLIPPINGS:
                self._trouble = self._trouble or SpecError(
                    f"{variable_names.CLIPPING} must be {' or '.join(CLIPPINGS)}, "
                    f"got {chosen!r}"
                )
            exact_clipping = negotiates or chosen != BY_PARTS
        super().__init__(
            module, *args, plan=plan, exact_clipping=exact_clipping, **kwargs
        )
        self._on_settled = on_settled
        rank = self._ranks.rank
        # Its state is by bucket, and it gathers records through the group's store.
        if not negotiates and backends.supported(self._backend):
            self._artifacts = RunArtifacts.of_environment(rank, title=title_of(self))
            if self._artifacts is not None and rank == 0:
                weakref.finalize(self, self._artifacts.end)
        self._tuning = wire_dtype, options
        self._may_forward = overlap == AUTO
        if not automatic or self._ranks.size == 1:
            return
        # Without a meeting in the constructor, ranks may build models in any order:
        # tuning begins where all have reduced one.
        self._begins_late = not self._meets_in_init
        if not self._begins_late and self._can_plan():
            self._auto = self._new_tuning()

    def _begin_late(self) -> None:
        """Begin tuning at the end of the first reduced backward, if ranks are equal."""
        if self._join_config.enable:
            return  # ranks may have different numbers of steps
        self._begins_late = False
        try:
            self._meet_first()
        except RankDisagreement as exc:
            if self._ranks.rank == 0:
                _log.warning("DDP's rule is kept: %s", exc)
            return
        if self._can_plan():
            self._auto = self._new_tuning()

    def _new_tuning(self) -> AutoPlan:
        wire_dtype, options = self._tuning
        return AutoPlan(
            self,
            name=type(self.module).__name__.lower(),
            wire_dtype=wire_dtype,
            on_settled=weakly(self._settled),
            on_unfinished=self._artifacts and self._artifacts.unfinished,
            options=options,
            forward=self._may_forward,
        )

    # Other ranks. A settled plan stays, and is watched no longer; a search that has not
    # settled begins again, because its figures are those of the old ranks.

    def _tuning_note(self) -> str:
        if self._auto is None:
            return ""
        return "settled" if self._auto.settled else UNSETTLED

    def _ranks_changed(self, tuning: str) -> None:
        self._stop_tuning("the ranks have changed")
        if tuning == UNSETTLED and self._can_plan():
            self._auto = self._new_tuning()

    def _can_plan(self) -> bool:
        """Return whether measuring can lead to a better plan than DDP's rule."""
        if self._ranks.size == 1:
            return False
        reason = self.left_to_ddp()
        if reason is not None and self._ranks.rank == 0:
            _log.warning("DDP's rule is kept: %s", reason)
        return reason is None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output, as DDP does."""
        self._before_forward()  # no condition here: TorchDynamo would depend on it
        # Not `super()`, see Note [TorchDynamo and super] in `stretto.runtime.ddp`.
        return runtime.DistributedDataParallel.forward(self, *inputs, **kwargs)

    @without_dynamo
    def _before_forward(self) -> None:
        """Count an evaluation, or record a step; other ranks do not take part."""
        auto, artifacts = self._auto, self._artifacts
        if auto is not None and not torch.is_grad_enabled():
            auto.evaluated()
        if artifacts is None or not torch.is_grad_enabled():
            return
        if auto is None or auto.settled:
            artifacts.before_forward(self)
            if artifacts.done:
                self._artifacts = None

    def _step_reduced(self) -> None:
        """Measure, plan and apply, until tuning is done."""
        super()._step_reduced()
        if self._begins_late:
            self._begin_late()
        if self._auto is not None:
            self._auto.reduced()
            if self._auto is not None and self._auto.done:
                self._auto = None

    def _begin_captured(self) -> None:
        """End tuning: a graph keeps the buckets and lanes it was captured with."""
        if self._auto is not None:
            self._stop_tuning("a step is captured as a CUDA graph")
            if self._ranks.rank == 0:
                _log.warning(
                    "a step is captured as a CUDA graph: its buckets stay as they are, "
                    "and automatic planning ends"
                )
        super()._begin_captured()

    def _settled(self, settled: TuningResult) -> None:
        if self._artifacts is not None:
            self._artifacts.settled(settled)
        if self._on_settled is not None:
            self._on_settled(settled)

    def apply_plan(self, plan: Plan | None) -> None:
        """Apply another plan from the next step on; automatic planning ends.

        As `stretto.runtime.DistributedDataParallel.apply_plan`, whose errors it raises.
        """
        super().apply_plan(plan)
        self._plans_itself = False
        self._stop_tuning("a plan was applied by hand")

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register a communication hook as DDP does; automatic planning ends.

        Every rank must call it after the same step.
        """
        check: Any = self._check_comm_hook
        check(hook)  # DDP's own check, before anything changes
        self._stop_tuning_for_hook()
        super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register one of DDP's hooks in C++; automatic planning ends."""
        self._stop_tuning_for_hook()
        super()._register_builtin_comm_hook(comm_hook_type)

    def _stop_tuning_for_hook(self) -> None:
        if self._plans_itself and self._has_reduced():
            # The hook was written for DDP's buckets: PowerSGD on Gloo hangs with more.
            # After an unfinished reduction DDP raises in the next forward; keep that.
            self._restore_rule()
        self._stop_tuning("a communication hook was registered")

    def _stop_tuning(self, reason: str) -> None:
        """End tuning, because the caller has decided."""
        auto, self._auto, self._begins_late = self._auto, None, False
        if auto is not None:
            auto.abandon(reason)

    def __getstate__(self) -> dict[str, Any]:
        attributes = super().__getstate__()
        # A copy is a separate model, which its user may train or not.
        return {
            **attributes,
            "_auto": None,
            "_artifacts": None,
            "_counts_steps": False,
            "_begins_late": False,
        }


_WIRE_DTYPES = tuple(sorted({dtype for found in NARROWER.values() for dtype in found}))


def _invalid(
    plan: object, tune: object, wire_dtype: object, on_settled: object
) -> SpecError | None:
    """Return the error if an argument has no meaning for any model."""
    if not isinstance(plan, Plan | str | Path | None):
        return SpecError(
            "plan must be 'auto', 'ddp', None, a Plan or the path of a plan file, got "
            f"{plan!r}"
        )
    if not isinstance(tune, TuneOptions | None):
        return SpecError(f"tune must be a TuneOptions, got {tune!r}")
    if wire_dtype not in (None, *_WIRE_DTYPES):
        names = " or ".join(map(repr, _WIRE_DTYPES))
        return SpecError(f"wire_dtype must be {names}, got {wire_dtype!r}")
    if on_settled is not None and not callable(on_settled):
        return SpecError(f"on_settled must be callable, got {on_settled!r}")
    if plan == AUTO:
        try:
            schedule()
        except SpecError as exc:
            return exc
    return None


def require_overlap(plan: Plan | None, overlap: str | None, *, automatic: bool) -> None:
    """Require that the option ``overlap`` is valid and that the plan fits it.

    Raises:
        SpecError: it is not, or the plan was not made for it.
    """
    if overlap not in OVERLAPS:
        choices = " or ".join(map(repr, OVERLAPS))
        raise SpecError(
            f"overlap (or {variable_names.OVERLAP}) must be {choices}, got {overlap!r}"
        )
    poison = os.environ.get(variable_names.POISON, "")
    if overlap != BACKWARD and poison not in ("", "0", "1"):
        raise SpecError(f"{variable_names.POISON} must be 1 or 0, got {poison!r}")
    if overlap == "forward" and (plan is None or plan.overlap != "forward"):
        what = "plan='auto'" if automatic else "DDP's own buckets"
        if plan is not None:
            what = f"a plan with overlap {plan.overlap!r}"
        raise SpecError(
            f"overlap='forward' needs a plan that was made for it, not {what}: "
            "plan with planner 'joint' and its dimension 'forward', and pass the plan; "
            "or use overlap='auto'."
        )


def _with_overlap(plan: Plan | None, overlap: str, *, automatic: bool) -> Plan | None:
    """Return the plan to execute with the option ``overlap``.

    Raises:
        SpecError: the option is invalid, or the plan does not fit it.
    """
    require_overlap(plan, overlap, automatic=automatic)
    if overlap == AUTO:
        return plan
    if overlap == "forward":
        _log.warning(
            "overlap='forward' is experimental: compare a run with overlap='backward' "
            "before you rely on it"
        )
        return plan
    if plan is None or plan.overlap != "forward":
        return plan
    return replace(plan, overlap=BACKWARD, launch=(), predicted=None)
