"""A DDP that executes a plan.

`RankedDDP` holds ranks, lanes and parameters, `ReplaceableReducerDDP` builds and
replaces the Reducer, and this class is for users: its arguments, plans, steps, hooks
and copies.

# Note [TorchDynamo and super]
Where TorchDynamo can't continue, it splits a method and resumes it as another function.
From Python 3.12 on, ``super()`` without arguments fails there: it takes the function's
first argument for ``self``. So methods that a compiled step may call name the class.
"""

from __future__ import annotations

import json
import math
import os
import sys
import weakref
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex, cast

import torch
import torch.distributed as dist

from stretto import variable_names
from stretto.autograd_engine import graph_task_id
from stretto.boolean_options import bool_option
from stretto.errors import (
    PlanMismatch,
    RankDisagreement,
    SpecError,
    StrettoError,
)
from stretto.logs import get_logger
from stretto.runtime import backends
from stretto.runtime.agreement import require_plan_applied
from stretto.runtime.ddp_reducer import ReplaceableReducerDDP
from stretto.runtime.device_mesh import split_backward, take_local_shards
from stretto.runtime.failure import forget_frames
from stretto.runtime.nan_check import check_options
from stretto.runtime.negotiated.reducer import (
    NEGOTIATED,
    STATIC,
    NegotiatedReducer,
    refused,
)
from stretto.runtime.plan_binding import (
    ignored_names,
    lane_backend_for,
    why_unplannable,
)
from stretto.runtime.read_only import shown_value
from stretto.runtime.recording.step import require_observer
from stretto.runtime.static_graph import raise_as_static, unsupported
from stretto.runtime.torch_compat import (
    arguments_of,
    backend_of,
    is_captured,
    on_lanes,
    process_group_of,
    warn_of_whole_compile,
    with_arguments_of,
    without_dynamo,
)
from stretto.runtime.waits import BoundedGroup
from stretto.schema import Plan, codec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from torch import nn

    from stretto.runtime.forward.overlap import ForwardOverlap
    from stretto.runtime.recording.step import AbstractStepObserver

_log = get_logger(__name__)

UNSETTLED = "runs"
"""State of tuning that has not settled, as ranks report it to each other."""

_NOT_COPIED = (
    "_agreement",
    "_built",
    "_built_forms",
    "_changes_ranks",
    "_end_reads",
    "_failures",
    "_gradient_counts",
    "_gradients_come_once",
    "_is_new_reducer",
    "_is_over",
    "_is_rebuild_due",
    "_iterations",
    "_lane_pool",
    "_marker",
    "_meets_in_init",
    "_micro_steps",
    "_negotiated",
    "_numerics",
    "_observer",
    "_on_loss",
    "_other_gradient_counts",
    "_plan",
    "_planned",
    "_pools",
    "_ranks",
    "_reads",
    "_reads_seen",
    "_release_planned",
    "_rule_buckets",
    "_said_of_forward",
    "_same_names",
    "_step_watch",
    "_to_meet",
    "_trained",
    "_watched",
)
"""Attributes of one process's model, which a copy or a pickle begins without."""


class DistributedDataParallel(ReplaceableReducerDDP):
    """PyTorch's DistributedDataParallel, with communication according to a plan.

    Every argument and every method of PyTorch's class works. With ``plan=None`` it
    behaves like that class, including bucket rule and all-reduce.

    Args:
        module: The module to parallelize.
        *args: Passed on to PyTorch's class.
        plan: Sets which gradients share a bucket, when they are sent, and on how many
            lanes.
        record: An observer of every step, for instance a `Recorder`.
        timeout_s: How long a rank waits for another in an agreement or in a planned
            collective; ``None`` uses the process group's timeout.
        error_feedback: Whether to add the rounding error of a narrower wire type to the
            next step's gradients, which takes as much memory as the gradients.
        nan: Action on gradients that are NaN or infinite: ``"off"``, ``"warn"`` or
            ``"raise"``, which reports the step, the parameter and the rank of origin.
        nan_patience: Number of consecutive steps with such gradients to allow first; a
            GradScaler's first steps overflow, for which 20 is enough.
        order: ``"negotiated"`` for models whose gradients become ready in an order that
            differs between ranks: each is reduced when it is ready on all ranks,
            without buckets or a plan. ``"static"`` is DDP's behavior.
        lanes: With a negotiated order, the number of units sent concurrently.
        unit_bytes: With a negotiated order, the size of one all-reduce.
        exact_clipping: ``False`` lets plans that overlap with the next forward exchange
            buckets in halves, so that clipping by the global norm
            (``torch.nn.utils.clip_grad_norm_``) waits for sums only. The norm is summed
            in another order than PyTorch's, which changes its last bits.
        lane_backend: The backend of the lanes: ``"local"`` is shared memory, for ranks
            on one host; ``"hierarchical"`` is that within hosts and Gloo across them.
            By default the environment variable ``STRETTO_LANE_BACKEND``, or else the
            process group's own backend.
        **kwargs: Passed on to PyTorch's class.

    Raises:
        PlanMismatch: the plan is for another model, or needs a feature that this
            runtime does not support.
        RankDisagreement: ranks have different plans, models or versions.
        CommTimeout: a rank did not arrive.
        SpecError: ``record``, ``order``, ``lanes``, ``unit_bytes``, ``nan``,
            ``nan_patience``, ``timeout_s``, ``lane_backend``, ``error_feedback`` or
            ``exact_clipping`` is invalid. Ranks where it is not raise
            `RankDisagreement`.
    """

    _comm_ready = False
    _alone = False
    _meets_in_init = True
    _to_meet: tuple[Any, ...] | None = None
    """The values that the first meeting compares, until it has taken place."""

    _micro_steps = False
    _asked_whether_compiled = False
    _warned_of_split = False
    _negotiated: NegotiatedReducer | None = None

    @with_arguments_of(torch.nn.parallel.DistributedDataParallel.__init__)
    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        plan: Plan | None = None,
        record: AbstractStepObserver | None = None,
        timeout_s: float | None = None,
        error_feedback: bool = False,
        nan: str = "off",
        nan_patience: int = 0,
        order: str = STATIC,
        lanes: int | None = None,
        unit_bytes: int | None = None,
        lane_backend: str | None = None,
        exact_clipping: bool = True,
        **kwargs: Any,
    ) -> None:
        group = process_group_of(module, args, kwargs)
        arguments = arguments_of(module, args, kwargs)
        unshardable = take_local_shards(module, arguments, group)
        self._ignored = ignored_names(module, arguments)
        self._unplannable = why_unplannable(arguments)
        # Attributes that a subclass sets before it calls this constructor.
        compared = self.__dict__.pop("_compared", {})
        trouble = self.__dict__.pop("_trouble", None) or unshardable
        try:
            error_feedback = bool_option("error_feedback", error_feedback)
            exact_clipping = bool_option("exact_clipping", exact_clipping)
        except SpecError as exc:
            trouble = trouble or exc
            error_feedback, exact_clipping = False, True
        given = {
            "lanes": lanes is not None,
            "unit_bytes": unit_bytes is not None,
            "plan": plan is not None,
            "record": record is not None,
            "nan": nan != "off",
            "error_feedback": error_feedback,
            "lane_backend": lane_backend is not None,
            "exact_clipping": not exact_clipping,
            "mixed_precision": kwargs.get("mixed_precision") is not None,
            "delay_all_reduce_named_params": bool(
                kwargs.get("delay_all_reduce_named_params")
            ),
        }
        try:
            _check_order(order, given)
            _check_count("lanes", lanes)
            _check_count("unit_bytes", unit_bytes)
            check_options(nan, nan_patience)
            _check_timeout(timeout_s)
            require_observer(record)
            _check_lane_backend(lane_backend)
        except StrettoError as exc:
            # It still meets the other ranks, so that none of them waits.
            trouble = trouble or exc
            order, nan, timeout_s = STATIC, "off", None
            lane_backend = lane_backend if isinstance(lane_backend, str) else None
        negotiates = order == NEGOTIATED
        self._error_feedback = error_feedback
        self._exact_clipping = exact_clipping
        self._nan = (nan, nan_patience)
        self._chosen_lane_backend = lane_backend or _lane_backend_for(
            plan, group, module
        )
        self._attach(group, module, timeout_s)
        compared = {
            **compared,
            "lane_backend": self._lane_backend,
            "timeout_s": "the process group's"
            if timeout_s is None
            else f"{timeout_s:g}",
            "exact_clipping": repr(exact_clipping),
            "error_feedback": repr(error_feedback),
        }
        trouble = trouble or self._lane_backend_trouble()
        if trouble is None and backends.supported(self._lane_backend):
            backends.get(self._lane_backend).prepare_process()
        # A rank whose arguments DDP itself refuses never comes to the others, and
        # with init_sync=False DDP's constructor waits for no rank.
        self._meets_in_init = (
            plan is not None
            or trouble is not None
            or negotiates
            or bool(arguments.get("init_sync", True))
        )
        self._to_meet = module, group, plan, compared, trouble
        try:
            super().__init__(module, *args, **kwargs)
        except RuntimeError as exc:
            self._raise_named("a collective of the model's set-up", exc)
            raise
        if self._meets_in_init:
            self._meet_first()  # where DDP has not built a Reducer
        self._comm_ready = True
        self._trained = self._table(self.module)
        self._stand_alone()
        if negotiates and self._ranks.size > 1:
            self._negotiate(lanes, unit_bytes)
        if record is not None:
            self._observe(record)

    def _build_params_for_reducer(self) -> Any:
        """Return DDP's answer; the ranks meet before its first collective."""
        parent: Any = super()
        found = parent._build_params_for_reducer()  # noqa: SLF001
        if self._meets_in_init:
            self._meet_first()
        return found

    def _meet_first(self) -> None:
        """Meet the other ranks and open the lanes of a first plan, if not done before.

        Raises:
            StrettoError: this rank can't continue.
            RankDisagreement: ranks have different models, versions or settings.
            CommTimeout: a rank did not arrive.
        """
        to_meet, self._to_meet = self._to_meet, None
        if to_meet is None:
            return
        module, group, plan, settings, trouble = to_meet
        self._meet(module, plan, "build a model", settings=settings, trouble=trouble)
        if plan is None:
            return
        try:
            self._planned = self._build_group(module, group, plan)
        except RuntimeError as exc:
            self._raise_named("the opening of a plan's lanes", exc)
            raise
        self._plan = plan
        self._own_planned()

    def _negotiate(self, lanes: int | None, unit_bytes: int | None) -> None:
        """Replace the Reducer by the negotiated engine."""
        table = [(row.name, p) for row, p in self._table(self.module)]
        self._negotiated = NegotiatedReducer(
            self,
            self._ranks,
            table,
            lanes=lanes,
            unit_bytes=unit_bytes,
            marker=self._marker,
        )
        self.reducer._remove_autograd_hooks()  # noqa: SLF001

    # Plans.

    @shown_value
    def plan(self) -> Plan | None:
        """The plan in use; ``None`` means PyTorch's own rule.

        A copied or unpickled model applies its plan at the end of its first reduced
        backward, which is the first operation that all ranks do with it together.
        """
        return self._own_plan

    @property
    def _own_plan(self) -> Plan | None:
        return self._plan or self._waiting_plan

    def apply_plan(self, plan: Plan | None) -> None:
        """Execute another plan from the next step on.

        Every rank must call it, between two steps. ``None`` restores PyTorch's bucket
        rule and all-reduce. Gradients, hooks and settings are unchanged.

        Raises:
            PlanMismatch: the plan is for another model, or needs a feature that this
                runtime does not support.
            RankDisagreement: ranks have different plans.
            CommTimeout: a rank did not arrive.
        """
        if self._negotiated is not None:
            raise refused("apply_plan")
        if graph_task_id() != -1:
            raise StrettoError(
                "apply_plan must be called between two steps, not within backward"
            )
        if self._micro_steps and self.find_unused_parameters:
            raise StrettoError(
                "apply_plan must be called between two steps, not between the "
                "micro-steps of one: the record of parameters used under no_sync "
                "would be lost, and their gradients never reduced. Call it after the "
                "next backward outside no_sync."
            )
        # DDP reports a step that was not finished (parameters without gradients).
        self.reducer._check_reducer_finalized()  # noqa: SLF001
        self._waiting_plan = None
        self._meet(self.module, plan, "apply a plan")
        self._take_up(plan)
        self._stand_alone()

    def _take_up(self, plan: Plan | None) -> None:
        """Execute ``plan`` on every rank, or leave every rank unchanged."""

        def all_prepared(trouble: Exception | None) -> None:
            require_plan_applied(self._agreement, self._ranks, plan, trouble)

        self._replace_reducer(plan, all_prepared)

    def _change_plan(
        self, plan: Plan, agree: Callable[[Exception | None], None]
    ) -> None:
        """Execute another plan from the next step on.

        Every rank must call it at the end of the same reduced backward, where
        `_step_reduced` is called. ``agree`` is as for `_replace_reducer`.
        """
        self._waiting_plan = None
        trouble: Exception | None = None
        try:
            self._schedules(self.module, plan)
        except StrettoError as exc:
            trouble = exc
        if self.static_graph and not self._gradients_come_once:
            trouble = PlanMismatch(unsupported(self._other_gradient_counts))
        agree(trouble)  # before any rank waits for another in the opening of lanes
        self._replace_reducer(plan, agree)

    def _step_reduced(self) -> None:
        """Apply the original's plan to a copy; a subclass does more."""
        parent: Any = super()
        parent._step_reduced()  # noqa: SLF001
        waits = self._waiting_plan is not None and not self._join_config.enable
        if waits and not is_captured(self._device_used):
            self._apply_waiting_plan()

    def _apply_waiting_plan(self) -> None:
        """Apply the original's plan to a copy, unless the copy trains other tensors.

        Not in a forward, where DDP waits for no rank: a rank may make one of its own.
        """
        plan, self._waiting_plan = self._waiting_plan, None
        if plan is None or self._comm_hooks or self._builtin_hook is not None:
            return
        try:
            self._meet(self.module, plan, "apply a plan")
            self._change_plan(
                plan, partial(require_plan_applied, self._agreement, self._ranks, plan)
            )
        except (PlanMismatch, RankDisagreement) as exc:
            if self._ranks.rank == 0:
                _log.warning(
                    "the copied model keeps DDP's buckets, because the plan of the "
                    "original no longer fits: %s",
                    exc,
                )

    # Other ranks.

    def _leave_ranks(self) -> list[Any]:
        """Give up the ranks, after a failed step too; return what to release later.

        The Reducer and the lanes may still hold collectives that never end, so that
        their release waits. `_join_ranks` must follow.
        """
        old = [self.reducer, self._planned, self._watched, self._lane_pool]
        forget_frames(self._failures.error)
        self.reducer._remove_autograd_hooks()  # noqa: SLF001
        self._waiting_plan = self._own_plan
        self._plan = self._planned = self._watched = self._lane_pool = None
        self._micro_steps = False
        return old

    def _join_ranks(
        self,
        group: dist.ProcessGroup,
        note: str,
        require: Callable[[list[str]], None],
    ) -> list[str]:
        """Train with the ranks of another group from the next step on.

        All ranks of the group must call it, whatever they have trained with before. All
        execute the plan of the group's first rank, or else DDP's rule with the buckets
        that some rank knows.

        Args:
            group: the new process group.
            note: anything that the others must know.
            require: called with each rank's note before anything else is done; raises
                where this rank can't train with the others.

        Returns: each rank's note.

        Raises:
            RankDisagreement: ranks have different models or versions.
            CommTimeout: a rank is lost.
            RuntimeError: a rank is lost while lanes open.
        """
        self.process_group = group
        self._attach(group, self.module, self._timeout_s)
        tuning = self._tuning_note()
        mine = {
            "buckets": self._rule_buckets,
            "plan": self._waiting_plan and codec.encode(self._waiting_plan).decode(),
            "tuning": tuning,
            "note": note,
        }
        texts = self._agreement.gather("regroup", json.dumps(mine))
        rows = [json.loads(text) for text in texts]
        notes = [row["note"] for row in rows]
        require(notes)
        # A rank may have seen DDP rebuild its buckets when another was lost.
        self._rule_buckets = next((r["buckets"] for r in rows if r["buckets"]), None)
        self._waiting_plan = None
        # A plan under trial is not one to keep.
        plan = None if rows[0]["tuning"] == UNSETTLED else rows[0]["plan"]
        decoded = None if plan is None else codec.decode(plan.encode(), Plan)
        self._meet(self.module, decoded, "regroup")
        self._take_up(decoded)
        self._stand_alone()
        self._ranks_changed(rows[0]["tuning"])
        return notes

    def _distributed_broadcast_coalesced(
        self, tensors: Any, buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        group: Any = self.process_group
        if self._changes_ranks:
            group = BoundedGroup(group, self._ranks.is_over)
        torch_dist: Any = dist
        torch_dist._broadcast_coalesced(  # noqa: SLF001
            group, tensors, buffer_size, authoritative_rank
        )

    def _tuning_note(self) -> str:
        """Return what new ranks must know of tuning: `UNSETTLED` until it settles."""
        return ""

    def _ranks_changed(self, tuning: str) -> None:
        """Continue with other ranks; ``tuning`` is the first rank's note."""

    # A step.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output, as DDP does."""
        if self._alone:
            return self._forward_alone(inputs, kwargs)
        try:
            if self._negotiated is not None:
                return self._negotiated.forward(inputs, kwargs)
            # Not `super()`, see Note [TorchDynamo and super].
            parent: Any = ReplaceableReducerDDP
            output = parent.forward(self, *inputs, **kwargs)
            self._end_forward()  # no condition: TorchDynamo would depend on it
        except RuntimeError as exc:
            self._raise_named("a collective of forward", exc)
            if self.static_graph:
                raise_as_static(exc)
            raise
        return output

    def no_sync(self) -> Any:
        """Return a context in which gradients are not averaged, as DDP's.

        Raises:
            SpecError: a pipeline schedule uses it that computes gradients of weights
                apart, which DDP does not average.
        """
        self._refuse_split_backward(sys._getframe(1))  # noqa: SLF001
        parent: Any = ReplaceableReducerDDP  # see Note [TorchDynamo and super]
        return parent.no_sync(self)

    @without_dynamo
    def _refuse_split_backward(self, caller: FrameType) -> None:
        why = split_backward(caller)
        if why is None or self._warned_of_split:
            return
        if not self.find_unused_parameters:
            raise SpecError(why)  # DDP fails there, by an assertion
        self._warned_of_split = True
        _log.warning(why)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._begin_step(compiled=torch.compiler.is_compiling())
        parent: Any = ReplaceableReducerDDP  # see Note [TorchDynamo and super]
        return parent._pre_forward(self, *inputs, **kwargs)  # noqa: SLF001

    @without_dynamo
    def _end_forward(self) -> None:
        if self._reads is not None:
            self._reads.end_forward()
        if self._planned is not None and self._planned.overlap is not None:
            self._planned.overlap.end_forward()

    def _begin_overlap(self, overlap: ForwardOverlap, *, compiled: bool) -> None:
        """Finish what this forward can't wait for until it is read."""
        if compiled or self._join_config.enable:
            overlap.armed = False
            overlap.finish_all()
            overlap.warn(
                "the whole model is compiled, so its reads of parameters don't show"
                if compiled
                else "ranks may join"
            )
        if not self.training:
            overlap.finish_all()
        overlap.begin_forward()

    @without_dynamo
    def _begin_step(self, *, compiled: bool) -> None:
        # TorchDynamo, which traces forward of a compiled model, can't look into a
        # process group.
        captures = is_captured(self._device_used)
        if captures:
            self._begin_captured()
        if self._planned is not None and not self._asked_whether_compiled:
            self._asked_whether_compiled = True
            warn_of_whole_compile(self.module, self._ranks, around=compiled)
        group = self._planned or self._watched
        if group is not None:
            # Another forward may run within a backward (a hook, an evaluating thread):
            # that backward's step continues.
            reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
            group.begin_forward(reduces=reduces)
        if self._planned is not None:
            self._planned.joins = self._join_config.enable
        if self._reads is not None:
            if compiled or self._join_config.enable:
                self._release_reads()
            else:
                self._reads.begin_forward()
        if self._planned is not None:
            if self._planned.may_overlap:
                self._overlap_with_forward(self._planned)
            if self._planned.overlap is not None:
                self._begin_overlap(self._planned.overlap, compiled=compiled)
        if torch.is_grad_enabled():
            if self._is_rebuild_due:
                self._rebuild_outside_modes()
            self._marker.begin_step()
            self._micro_steps = not self.require_backward_grad_sync
            if self._gradient_counts is not None and not self._micro_steps:
                self._gradient_counts.begin()

    # One rank.

    def _stand_alone(self) -> None:
        """With one rank, remove the Reducer's hooks: there is nothing to reduce.

        A step then costs the same as in plain PyTorch; DDP itself copies every gradient
        into its bucket and back (about 10 % of a small network's step). Features that
        need the Reducer, such as a communication hook, keep it.
        """
        self._alone = (
            self._ranks.size == 1
            and backends.supported(self._backend)
            and not self._comm_hooks
            and self._builtin_hook is None
            and self._numerics is None
            and self.mixed_precision is None
            and not self._delay_all_reduce_all_params
            and not self._use_python_reducer
            and not any(
                hasattr(p, "_in_backward_optimizers") for p in self._module_parameters
            )
        )
        if self._alone:
            self.reducer._remove_autograd_hooks()  # noqa: SLF001

    def _forward_alone(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():  # every forward is a step: nothing is reduced
            self._marker.end_step()
            self._marker.begin_step()
        if self.device_ids:
            ddp: Any = self
            moved, moved_kwargs = ddp.to_kwargs(inputs, kwargs, self.device_ids[0])
            return self.module(*moved[0], **moved_kwargs[0])
        return self.module(*inputs, **kwargs)

    def _need_reducer(self) -> None:
        """Restore the Reducer of a single rank."""
        if self._negotiated is not None:
            raise refused("a communication hook")
        if self._alone:
            self._alone = False
            self._take_up(self._plan)

    # Communication hooks.

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook as DDP does.

        The plan's buckets stay, but the hook controls what is sent.
        """
        self._need_reducer()
        super().register_comm_hook(state, hook)
        self._hand_over(getattr(hook, "__qualname__", repr(hook)))

    def register_lane_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Register one of PyTorch's communication hooks over the plan's lanes.

        For instance ``powerSGD_hook`` with a ``PowerSGDState``: for each bucket,
        ``state.process_group`` is a group of the bucket's own. A hook that takes a
        process group as its state, as PyTorch's default hooks do, gets that (pass
        ``state=None``). With another plan, tensors that PowerSGD keeps by bucket are
        dropped. Slices do not apply.
        """
        # Weak, because the Reducer keeps the hook.
        groups_of = weakref.WeakMethod(self._bucket_groups)
        self.register_comm_hook(
            state, on_lanes(hook, lambda: cast("Any", groups_of())())
        )

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._need_reducer()
        parent: Any = super()
        parent._register_builtin_comm_hook(comm_hook_type)  # noqa: SLF001
        self._builtin_hook = comm_hook_type
        self._pass_through()
        self._hand_over(str(comm_hook_type))

    def _bucket_groups(self) -> tuple[object, Sequence[Any]]:
        """Return the owner of the buckets, and a group for each or one for all."""
        if self._planned is None:
            return None, (self.process_group,)
        return self._planned, self._planned.bucket_groups()

    def _hand_over(self, name: str) -> None:
        if self._numerics is not None:
            self._numerics.warn_unchecked("a communication hook has taken over")
        if self._planned is None:
            return
        self._finish_forward()
        self._planned.hand_over()
        if self._comm_ready and self._ranks.rank == 0:
            _log.warning(
                "%s: communication hook %s takes over: the plan's %d buckets stay, its "
                "lanes and slices are used only where the hook asks the Reducer to "
                "reduce",
                self._ranks.name(0),
                name,
                len(self._planned.schedules),
            )

    # Copies and pickles.

    def __getstate__(self) -> dict[str, Any]:
        self._finish_forward()
        observer = self._observer
        self._observe(None)
        parent: Any = super()
        attributes: dict[str, Any] = parent.__getstate__()
        for name, value in attributes.items():
            if name.endswith("_hooks") and isinstance(value, dict):
                attributes[name] = value.copy()  # without the observer's
        if observer is not None:
            self._observe(observer)
        attributes["_waiting_plan"] = self._own_plan
        for name in _NOT_COPIED:
            attributes.pop(name, None)
        return attributes

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = {k: v for k, v in state.items() if k not in _NOT_COPIED}
        self.__dict__.update(state)
        self._counts_steps = self._waiting_plan is not None
        # DDP builds its Reducer in the default group; prepare for that.
        self.process_group = dist.distributed_c10d._get_default_group()  # noqa: SLF001
        self._attach(self.process_group, self.module, self._timeout_s)
        parent: Any = super()
        parent.__setstate__(state)
        self._trained = self._table(self.module)
        if self.static_graph:
            self._count_gradients()
        self._stand_alone()


def _check_lane_backend(value: object) -> None:
    """Require the name of a backend, or None.

    Raises:
        SpecError: it is something else.
    """
    if value is not None and not isinstance(value, str):
        raise SpecError(
            f"lane_backend must be a name or None, got {value!r}: make a backend of "
            "your own known by stretto.runtime.backends.register(backend) on every "
            "rank, and pass its name."
        )


def _check_count(name: str, value: object) -> None:
    """Require a positive whole number, or None.

    Raises:
        SpecError: it is something else.
    """
    if value is not None and not (
        isinstance(value, SupportsIndex) and index(value) > 0
    ):
        raise SpecError(f"{name} must be a positive whole number, got {value!r}")


def _check_timeout(timeout_s: object) -> None:
    """Require a time in seconds, or None.

    Raises:
        SpecError: it is not a positive, finite number.
    """
    if timeout_s is None:
        return
    if not isinstance(timeout_s, SupportsFloat) or not 0 < float(timeout_s) < math.inf:
        raise SpecError(f"timeout_s must be a positive number, got {timeout_s!r}")


def _lane_backend_for(
    plan: Plan | None, group: dist.ProcessGroup, module: nn.Module
) -> str | None:
    """Return the backend that the algorithms of a plan need, unless one is set."""
    chosen = None if plan is None else lane_backend_for(plan)
    if chosen is None or os.environ.get(variable_names.LANE_BACKEND):
        return None
    wanted = backends.get(chosen).device_type
    if any(p.device.type != wanted for p in module.parameters()):
        return None  # the plan is refused
    if backend_of(group, torch.device("cpu")) != backends.ON_HOST:
        return None
    if dist.get_rank(group) == 0:
        _log.warning(
            "the plan reduces buckets in two levels, which sums in another order than "
            "DDP does: gradients are DDP's within rounding, not bit for bit"
        )
    return chosen


def _check_order(order: str, given: Mapping[str, bool]) -> None:
    """Require a known order, and options that fit it; ``given`` lists the others.

    Raises:
        SpecError: ``order`` is invalid.
        StrettoError: an option that needs buckets was given.
    """
    if order not in (STATIC, NEGOTIATED):
        raise SpecError(f"order must be {STATIC!r} or {NEGOTIATED!r}, got {order!r}")
    if order == STATIC:
        for name in ("lanes", "unit_bytes"):
            if given.get(name):
                raise SpecError(
                    f"{name} is for order={NEGOTIATED!r}; with order={STATIC!r} the "
                    "plan sets it."
                )
        return
    for name, present in given.items():
        if present and name not in ("lanes", "unit_bytes"):
            raise refused(name)
