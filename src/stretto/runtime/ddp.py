"""A DDP that executes a plan."""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from stretto.errors import PlanMismatch, StrettoError
from stretto.logs import get_logger
from stretto.runtime import backends
from stretto.runtime.agreement import (
    Agreement,
    ranks_of,
    require_matching_setup,
    require_plan_applied,
)
from stretto.runtime.ddp_group import WatchedGroup
from stretto.runtime.ends import at_the_end
from stretto.runtime.failure import FailureReporter
from stretto.runtime.lanes import LanePool
from stretto.runtime.nan_check import NanCheck, check_words
from stretto.runtime.negotiated.front import (
    STATIC,
    NegotiatedFront,
    check_order,
    refused,
)
from stretto.runtime.plan_binding import (
    ignored_names,
    parameter_rows,
    routes_of,
    sparse_parameters,
    why_unplannable,
)
from stretto.runtime.planned_group import PlannedGroup
from stretto.runtime.presence import is_communication_error
from stretto.runtime.recording.step import StepWatch
from stretto.runtime.static_graph import GradientCounts
from stretto.runtime.torch_compat import (
    arguments_of,
    backend_of,
    build_reducer,
    on_lanes,
    process_group_of,
    warn_of_whole_compile,
    without_dynamo,
)
from stretto.schema import Bucket, Plan
from stretto.schema.plan import WIRE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from stretto.runtime.agreement import TensorRow
    from stretto.runtime.bucket_schedule import BucketSchedule
    from stretto.runtime.recording.step import AbstractStepObserver, BucketRow

_log = get_logger(__name__)

_graph_task_id = torch._C._current_graph_task_id  # noqa: SLF001


class DistributedDataParallel(TorchDDP):
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
        lane_backend: The backend of the lanes: ``"local"`` is shared memory, for ranks
            on one host. By default the environment variable ``STRETTO_LANE_BACKEND``,
            or else the process group's own backend.
        **kwargs: Passed on to PyTorch's class.

    Raises:
        PlanMismatch: the plan is for another model, or needs a feature that this
            runtime does not support.
        RankDisagreement: ranks have different plans, models or versions.
        CommTimeout: a rank did not arrive.
        SpecError: ``nan`` or ``nan_patience`` is invalid.
    """

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
        **kwargs: Any,
    ) -> None:
        group = process_group_of(module, args, kwargs)
        arguments = arguments_of(module, args, kwargs)
        self._ignored = ignored_names(module, arguments)
        self._unplannable = why_unplannable(arguments)
        self._built: Any = None
        self._trained: list[tuple[TensorRow, nn.Parameter]] | None = None
        # Attributes that a subclass sets before it calls this constructor.
        self._counts_steps = self.__dict__.get("_counts_steps", False)
        compared = self.__dict__.pop("_compared", {})
        trouble = self.__dict__.pop("_trouble", None)
        # Plain values may be set before nn.Module is initialized; the Reducer, which
        # needs them, is built within PyTorch's own __init__.
        self._comm_ready = False
        self._alone = False
        self._rule_buckets: list[list[int]] | None = None
        self._iterations = 0
        self._release_planned: weakref.finalize[..., Any] | None = None
        self._lane_pool: LanePool | None = None
        self._pools = 0
        self._plan: Plan | None = None
        self._waiting_plan: Plan | None = None
        self._planned: PlannedGroup | None = None
        self._watched: WatchedGroup | None = None
        self._micro_steps = False
        self._asked_whether_compiled = False
        self._observer: AbstractStepObserver | None = None
        self._observer_handles: list[Any] = []
        self._step_watch: StepWatch | None = None
        self._builtin_hook: Any = None
        self._negotiated: NegotiatedFront | None = None
        self._gradient_counts: GradientCounts | None = None
        self._gradients_come_once = False
        negotiates = check_order(
            order,
            {
                "lanes": lanes is not None,
                "unit_bytes": unit_bytes is not None,
                "plan": plan is not None,
                "record": record is not None,
                "nan": nan != "off",
                "error_feedback": error_feedback,
                "lane_backend": lane_backend is not None,
                "mixed_precision": kwargs.get("mixed_precision") is not None,
                "delay_all_reduce_named_params": bool(
                    kwargs.get("delay_all_reduce_named_params")
                ),
            },
        )
        check_words(nan, nan_patience)
        self._error_feedback = error_feedback
        self._nan = (nan, nan_patience)
        self._chosen_lane_backend = lane_backend
        self._attach(group, module, timeout_s)
        compared = {**compared, "lane_backend": self._lane_backend}
        trouble = trouble or self._lane_backend_trouble()
        self._meet(module, plan, "build a model", settings=compared, trouble=trouble)
        if plan is not None:
            try:
                self._planned = self._build_group(module, group, plan)
            except RuntimeError as exc:
                self._raise_named("the opening of a plan's lanes", exc)
                raise
            self._plan = plan
            self._own_planned()
        try:
            super().__init__(module, *args, **kwargs)
        except RuntimeError as exc:
            self._raise_named("a collective of the model's set-up", exc)
            raise
        self._comm_ready = True
        self._trained = self._table(self.module)
        self._stand_alone()
        if negotiates and self._ranks.size > 1:
            self._negotiate(lanes, unit_bytes)
        if record is not None:
            self.observe(record)

    def _negotiate(self, lanes: int | None, unit_bytes: int | None) -> None:
        """Replace the Reducer by the negotiated engine."""
        table = [(row.name, p) for row, p in self._table(self.module)]
        self._negotiated = NegotiatedFront(
            self, self._ranks, table, lanes=lanes, unit_bytes=unit_bytes
        )
        self.reducer._remove_autograd_hooks()  # noqa: SLF001

    # Plans.

    @property
    def plan(self) -> Plan | None:
        """The plan in use; ``None`` means PyTorch's own rule.

        A copied or unpickled model applies its plan in its first training step, which
        is the first operation that all ranks do with it together.
        """
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
        if _graph_task_id() != -1:
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
        if self._observer is not None:
            self.observe(self._observer)

    def _take_up(self, plan: Plan | None) -> None:
        """Execute ``plan`` on every rank, or leave every rank unchanged."""

        def all_prepared(trouble: Exception | None) -> None:
            require_plan_applied(self._agreement, self._ranks, plan, trouble)

        self._replace_reducer(plan, all_prepared)

    def _replace_reducer(
        self, plan: Plan | None, agree: Callable[[Exception | None], None]
    ) -> None:
        """Build the Reducer and lanes of a plan and use them if all ranks can.

        ``agree`` gets this rank's error, if any. It returns on every rank or raises on
        every rank; if it raises, every rank is unchanged.
        """
        before = (self._planned, self._plan, self._watched, self.reducer, self.logger)
        trouble: Exception | None = None
        planned = None
        try:
            if plan is not None:
                planned = self._build_group(self.module, self.process_group, plan)
            self._rebuild_reducer(planned, plan)
        except (StrettoError, torch.OutOfMemoryError, MemoryError) as exc:
            trouble = exc  # this rank's own: reported to the others
        except RuntimeError as exc:
            trouble = exc
            if planned is None and plan is not None:  # a peer did not arrive
                trouble = self._failures.report("the opening of a plan's lanes", exc)
        try:
            agree(trouble)
        except BaseException:
            if self.reducer is not before[3]:
                self.reducer._remove_autograd_hooks()  # noqa: SLF001
            self._planned, self._plan, self._watched, self.reducer, self.logger = before
            if planned is not None:
                planned.release()
            raise
        self._retire(before[3], before[4])
        self._restore_reducer_state()
        self._keep_used_map(before[3])

    def _retire(self, reducer: Any, logger: Any) -> None:
        """Take an old Reducer out of service; its logged iterations still count."""
        self._own_planned()
        # Remove its parameter hooks now, not when the last reference is dropped.
        reducer._remove_autograd_hooks()  # noqa: SLF001
        if logger is not None:
            data = logger._get_ddp_logging_data()  # noqa: SLF001
            self._iterations += data.ints_map.get("iteration", 0)

    def _own_planned(self) -> None:
        """Release the plan's group when the model is freed or gets another one."""
        old, self._release_planned = self._release_planned, None
        if old is not None:
            old()
        if self._planned is not None:
            self._release_planned = weakref.finalize(self, self._planned.release)
            self._release_planned.atexit = False

    def _keep_used_map(self, reducer: Any) -> None:
        """Keep the last backward's report of unused parameters.

        It is only an output: the next backward writes it before it is read.
        """
        # A static graph's new Reducer does not look for unused parameters.
        if self.find_unused_parameters and not self._gradients_come_once:
            theirs: Any = self.reducer
            used = theirs._get_local_used_map()  # noqa: SLF001
            used.copy_(reducer._get_local_used_map())  # noqa: SLF001

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return DDP's log, with the sum of iterations logged under all plans.

        DDP logs the first ten iterations of a Reducer and every hundredth after them,
        each when the next one starts. Each plan has its own Reducer, whose last
        iterations may be missing, so the sum is at most the number of steps.
        """
        parent: Any = super()
        data: dict[str, Any] = parent._get_ddp_logging_data()  # noqa: SLF001
        if self._iterations and "iteration" in data:
            data["iteration"] += self._iterations
        return data

    # The end of a reduced backward. Every rank reaches it equally often, whatever it
    # does between steps: all ranks have launched all buckets of that backward.

    def _has_reduced(self) -> bool:
        """Return whether the last backward's reduction has finished."""
        try:
            self.reducer._check_reducer_finalized()  # noqa: SLF001
        except RuntimeError:
            return False
        return True

    def _backward_reduced(self) -> None:
        """Record the end of a backward whose gradients were reduced."""
        if not self._has_reduced():
            return  # gradients are missing: DDP reports that in the next forward
        if self._gradient_counts is not None:
            counts, self._gradient_counts = self._gradient_counts, None
            self._gradients_come_once = counts.end()
        # A second backward in the same forward needs the rebuilt buckets. If they are
        # known, this does not communicate. Not after forward: with DDP's own mixed
        # precision, parameters then still have their narrow types.
        in_forward = getattr(TorchDDP, "_active_ddp_module", None) is self
        known = self._planned is not None or self._rule_buckets is not None
        if in_forward and known and self.reducer._rebuild_buckets():  # noqa: SLF001
            self._has_rebuilt_buckets = True
        if self._counts_steps:
            key = (str(self.process_group.group_name), self._agreement.serial)
            at_the_end(key, self._step_reduced)

    def _step_reduced(self) -> None:
        """Run a subclass's work at the end of a reduced backward."""

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
            self._routes(self.module, plan)
        except StrettoError as exc:
            trouble = exc
        if self.static_graph and not self._gradients_come_once:
            # Note [A new Reducer for a static graph] in `runtime.static_graph`.
            trouble = PlanMismatch(
                "static_graph=True, and a parameter has no gradient or several in a "
                "backward, which a plan applied later does not support."
            )
        agree(trouble)  # before any rank waits for another in the opening of lanes
        self._replace_reducer(plan, agree)
        if self._observer is not None:
            self.observe(self._observer)

    def _restore_rule(self) -> None:
        """Restore DDP's buckets from the next step on, without communication.

        The buckets are the last ones that DDP rebuilt, so the new Reducer does not have
        to ask other ranks. Every rank must call this at the same point.
        """
        if self._plan is None:
            return
        reducer, logger = self.reducer, self.logger
        self._waiting_plan = None
        self._rebuild_reducer(None, None)
        self._retire(reducer, logger)
        self._restore_reducer_state()
        self._keep_used_map(reducer)
        if self._observer is not None:
            self.observe(self._observer)

    def _rebuild_rule(self) -> None:
        """Make DDP rebuild its buckets now rather than in the next forward.

        Every rank must call it at the end of the first reduced backward.
        """
        # Returns False, without communication, if DDP does not rebuild or already has.
        if self._planned is None and self.reducer._rebuild_buckets():  # noqa: SLF001
            self._has_rebuilt_buckets = True

    def _probe_pools(self) -> tuple[LanePool, LanePool]:
        """Return lanes to measure, and lanes whose first one is for the agreement.

        The first are the model's own. The caller closes the second if they differ.
        """
        lanes = self._pool()
        if backends.get(self._lane_backend).completes_on_host:
            return lanes, lanes
        self._pools += 1
        return lanes, LanePool(
            self._ranks,
            serial=f"{self._agreement.serial}/{self._pools}/agree",
            backend=backends.ON_HOST,
            device=torch.device("cpu"),
        )

    def _release_lanes(self) -> None:
        """Close all lanes; call it only without a plan, when nothing uses them."""
        if self._planned is None and self._lane_pool is not None:
            self._lane_pool.close()
            self._lane_pool = None
            self._pools += 1

    def _rebuild_reducer(self, planned: PlannedGroup | None, plan: Plan | None) -> None:
        """Give the model a new Reducer; the old one keeps its hooks."""
        self._planned, self._plan = planned, plan
        with self._as_constructed():
            # DDP reads the module once. What is replaced, moved, renamed or removed in
            # it later changes nothing for its Reducer, and so nothing for a new one.
            parameters, expect_sparse, names = self._built
            find_unused = self.find_unused_parameters
            # A static graph does not search for unused parameters, and here has none.
            self.find_unused_parameters = find_unused and not self._gradients_come_once
            try:
                self._ddp_init_helper(
                    parameters, expect_sparse, names, self.static_graph
                )
            finally:
                self.find_unused_parameters = find_unused

    @contextlib.contextmanager
    def _as_constructed(self) -> Iterator[None]:
        """Make parameters require gradients as when the model was built.

        DDP's Reducer keeps the parameters that it was built with, even if some are
        frozen or unfrozen later; a new Reducer must keep the same ones.
        """
        frozen = [p for _, p in self._table(self.module) if not p.requires_grad]
        try:
            for p in frozen:
                p.requires_grad_(True)  # noqa: FBT003 - as PyTorch's
            yield
        finally:
            for p in frozen:
                p.requires_grad_(False)  # noqa: FBT003 - as PyTorch's

    def _stand_alone(self) -> None:
        """With one rank, remove the Reducer's hooks: there is nothing to reduce.

        A step then costs the same as in plain PyTorch; DDP itself copies every gradient
        into its bucket and back (about 10 % of a small network's step). Features that
        need the Reducer, such as a communication hook, keep it.
        """
        self._alone = (
            self._ranks.size == 1
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

    def lane(self, number: int) -> Any:
        """Return the communicator of a lane; open it if necessary. Collective.

        It works as ``group=`` of ``torch.distributed`` collectives. Measuring these
        lanes shows what the plans that use them will see.
        """
        return self._pool().lane(number)

    def release_unused_lanes(self) -> None:
        """Close the lanes that the plan in use does not need.

        All ranks must call this at the same point, with no collective in flight.
        """
        if self._lane_pool is not None:
            self._lane_pool.retain(() if self._planned is None else self._planned.needs)

    def left_to_ddp(self) -> str | None:
        """Return why this model can't be planned automatically, or ``None``."""
        rows = self._table(self.module)
        device = self._device_used
        if self._unplannable is not None:
            return self._unplannable
        if self._use_python_reducer:
            return "plans need DDP's own Reducer, not torch._dynamo's python_reducer."
        if not (
            backends.supported(self._backend)
            and backends.supported(self._lane_backend)
            and backends.get(self._lane_backend).device_type == device.type
        ):
            return (
                "plans run on gloo or local with tensors on the CPU and on nccl with "
                f"tensors on a GPU, but this model uses {self._lane_backend} and "
                f"{device.type}."
            )
        if len(devices := {str(p.device) for _, p in rows}) > 1:
            return f"the model's parameters are on {' and '.join(sorted(devices))}."
        sparse = sparse_parameters(self.module)
        if any(id(p) in sparse for _, p in rows):
            return "the model has sparse gradients, whose size differs in each step."
        for row, _ in rows:
            if row.dtype not in WIRE_DTYPES:
                return f"parameter {row.name!r} is of type {row.dtype}."
        if self.mixed_precision is not None:
            return "mixed_precision changes the type of gradients within the Reducer."
        return None

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and parameters in the order of `tensor_table`."""
        return [(row.name, p) for row, p in self._table(self.module)]

    def tensor_table(self) -> tuple[TensorRow, ...]:
        """Return parameters that require gradients, in ``named_parameters()`` order."""
        return tuple(row for row, _ in self._table(self.module))

    def deferred_plan(self, lanes: int, *, planner: str) -> Plan:
        """Return a plan that sends everything after backward, over all lanes.

        There is one bucket per type and device, with as many slices as lanes. A
        parameter with sparse gradients has its own bucket with one slice.
        """
        rows = self._table(self.module)
        sparse = sparse_parameters(self.module)
        groups: dict[tuple[str, ...], list[str]] = {}
        for row, parameter in reversed(rows):
            key: tuple[str, ...] = (row.dtype, str(parameter.device))
            if id(parameter) in sparse:
                key = (*key, row.name)
            groups.setdefault(key, []).append(row.name)
        return Plan(
            planner=planner,
            workload_digest="",
            ranks=self._ranks.size,
            overlap="none",
            lanes=lanes,
            buckets=tuple(
                Bucket(
                    tensors=tuple(names),
                    slices=1 if key[2:] else lanes,
                    wire_dtype=key[0],
                )
                for key, names in groups.items()
            ),
        )

    def ready_order(self) -> tuple[str, ...]:
        """Return names in the order in which the last reduced backward made them ready.

        Empty before the first backward, and with one rank, which reduces nothing.
        """
        return tuple(sorted(times := self.ready_s(), key=times.__getitem__))

    def ready_s(self) -> dict[str, float]:
        """Return when each gradient of the last reduced backward was ready, in seconds.

        Times count from the end of forward, on the host's clock; the Reducer records
        these anyway. Empty before the first backward, and with one rank.
        """
        names = [row.name for row in self.tensor_table()]
        stats_ns = self.reducer.get_backward_stats()
        if not any(stats_ns):
            return {}
        return {n: ns * 1e-9 for n, ns in zip(names, stats_ns, strict=True)}

    # Observation.

    @property
    def backend(self) -> str:
        """The backend of the lanes: ``gloo``, ``nccl``, ``local`` or another one."""
        return self._lane_backend

    @property
    def observed(self) -> bool:
        """Whether an observer receives every step."""
        return self._observer is not None

    def observe(self, observer: AbstractStepObserver | None) -> None:
        """Report every step to ``observer`` from now on; ``None`` stops it.

        Without an observer no hook is installed, so there is no cost.
        """
        for handle in self._observer_handles:
            handle.remove()
        self._observer_handles = []
        self._step_watch = None
        self._observer = observer
        if self._planned is not None:
            self._planned.observe(observer)
        if observer is None:
            return
        rows = self._table(self.module)
        observer.attached([row.name for row, _ in rows], self._bucket_rows())
        # Weak, because objects kept by a parameter's hook are never freed with the
        # parameter.
        self._step_watch = watch = StepWatch(observer)
        weak = weakref.WeakMethod(watch.gradient_ready)
        self._observer_handles = [
            self.register_forward_pre_hook(watch.forward_started),
            self.register_forward_hook(watch.forward_ended),
            *(
                parameter.register_post_accumulate_grad_hook(
                    partial(_call, weak, index)
                )
                for index, (_, parameter) in enumerate(rows)
                if parameter.requires_grad  # not frozen since
            ),
        ]

    def _bucket_rows(self) -> list[BucketRow]:
        if self._planned is None:
            return []
        dtypes = {row.name: row.dtype for row in self.tensor_table()}
        return [route.row(dtypes[route.tensors[0]]) for route in self._planned.routes]

    # Overridden methods of DDP.

    def _ddp_init_helper(self, *arguments: Any) -> None:
        if self._built is None:
            self._built = arguments[:3]
        if self._numerics is not None:
            self._numerics.renewed(views=self.gradient_as_bucket_view)
        parent: Any = super()
        if self._planned is None:
            self._watched = self._watch()
            if self._watched is None:
                parent._ddp_init_helper(*arguments)  # noqa: SLF001
                return
            try:
                build_reducer(self, self._rule_buckets, self._watched, arguments)
            except PlanMismatch:  # plans do not support this PyTorch; DDP works
                self._watched = None
                parent._ddp_init_helper(*arguments)  # noqa: SLF001
            return
        if self._use_python_reducer:
            raise PlanMismatch(
                "torch._dynamo.config.optimize_ddp is 'python_reducer', which has no "
                "buckets for a plan to set. Set it to 'ddp_optimizer', or pass "
                "plan=None."
            )
        self._watched = None
        indices = [route.parameters for route in self._planned.routes]
        build_reducer(self, indices, self._planned, arguments)

    def _watch(self) -> WatchedGroup | None:
        """Return the group in front of DDP's process group if there is no plan.

        On Gloo with several ranks it names a lost rank; elsewhere it only counts steps,
        if a subclass needs that.
        """
        planned = backends.supported(self._backend)
        waits = (
            planned
            and backends.get(self._backend).completes_on_host
            and (self._ranks.size > 1 or self._numerics is not None)
            and not self._use_python_reducer
            and self._device_used.type == "cpu"
        )
        if not waits and self._numerics is not None:
            self._numerics.blind(f"without a plan, on {self._device_used.type}")
        counts = self._counts_steps and planned
        if self._use_python_reducer or not (waits or counts):
            return None
        return WatchedGroup(
            base=self.process_group,
            device=self._device_used,
            failures=self._failures,
            kind=backends.get(self._backend).kind,
            waits=waits,
            numerics=self._numerics if waits else None,
            buckets=self._rule_buckets,
            rebuilt=weakref.WeakMethod(self._note_rule),
            reduced=weakref.WeakMethod(self._backward_reduced),
        )

    def _note_rule(self, buckets: list[list[int]]) -> None:
        self._rule_buckets = buckets

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output, as DDP does."""
        if self._alone:
            return self._forward_alone(inputs, kwargs)
        parent: Any = super()
        try:
            if self._negotiated is not None:
                return self._negotiated.forward(inputs, kwargs)
            return parent.forward(*inputs, **kwargs)
        except RuntimeError as exc:
            self._raise_named("a collective of forward", exc)
            raise

    def _raise_named(self, place: str, exc: Exception) -> None:
        """Raise the error that names the lost rank, if ``exc`` is from a collective.

        Any other exception is unchanged. An exception that is its own cause is a cycle,
        which keeps the model and DDP's hooks alive until garbage collection.
        """
        if is_communication_error(exc) and not isinstance(exc, StrettoError):
            raise self._failures.report(place, exc) from exc

    def _forward_alone(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.device_ids:
            ddp: Any = self
            moved, moved_kwargs = ddp.to_kwargs(inputs, kwargs, self.device_ids[0])
            return self.module(*moved[0], **moved_kwargs[0])
        return self.module(*inputs, **kwargs)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._begin_step(compiled=torch.compiler.is_compiling())
        parent: Any = super()
        return parent._pre_forward(*inputs, **kwargs)  # noqa: SLF001

    @without_dynamo
    def _begin_step(self, *, compiled: bool) -> None:
        # TorchDynamo, which traces forward of a compiled model, can't look into a
        # process group.
        if self._planned is not None and not self._asked_whether_compiled:
            self._asked_whether_compiled = True
            warn_of_whole_compile(self.module, self._ranks, around=compiled)
        group = self._planned or self._watched
        if group is not None:
            # Another forward may run within a backward (a hook, an evaluating thread):
            # that backward's step continues.
            reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
            group.begin_forward(reduces=reduces)
        if torch.is_grad_enabled():
            self._micro_steps = not self.require_backward_grad_sync
            if self._gradient_counts is not None and not self._micro_steps:
                self._gradient_counts.begin()
            if self._waiting_plan and self.training and not self._micro_steps:
                self._apply_waiting_plan(self._waiting_plan)

    def _apply_waiting_plan(self, plan: Plan) -> None:
        """Apply the original's plan to a copy, unless the copy trains other tensors."""
        try:
            self.apply_plan(plan)
        except PlanMismatch as exc:
            self._waiting_plan = None
            if self._ranks.rank == 0:
                _log.warning(
                    "stretto: the copied model keeps DDP's buckets, because the plan "
                    "of the original no longer fits: %s",
                    exc,
                )

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

    def _bucket_groups(self) -> tuple[object, Sequence[Any]]:
        """Return the owner of the buckets, and a group for each or one for all."""
        if self._planned is None:
            return None, (self.process_group,)
        return self._planned, self._planned.bucket_groups()

    def _need_reducer(self) -> None:
        """Restore the Reducer of a single rank."""
        if self._negotiated is not None:
            raise refused("a communication hook")
        if self._alone:
            self._alone = False
            self._take_up(self._plan)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._need_reducer()
        parent: Any = super()
        parent._register_builtin_comm_hook(comm_hook_type)  # noqa: SLF001
        self._builtin_hook = comm_hook_type
        self._pass_through()
        self._hand_over(str(comm_hook_type))

    def _pass_through(self) -> None:
        """Give a C++ hook the works of the model's own group."""
        group = self._planned or self._watched
        if group is not None:
            group.pass_through()

    def _hand_over(self, name: str) -> None:
        if self._numerics is not None:
            self._numerics.blind("a communication hook has taken over")
        if self._planned is None:
            return
        self._planned.hand_over()
        if self._comm_ready and self._ranks.rank == 0:
            _log.warning(
                "%s: communication hook %s takes over: the plan's %d buckets stay, its "
                "lanes and slices are used only where the hook asks the Reducer to "
                "reduce",
                self._ranks.name(0),
                name,
                len(self._planned.routes),
            )

    def __getstate__(self) -> dict[str, Any]:
        observer = self._observer
        self.observe(None)
        parent: Any = super()
        attributes: dict[str, Any] = parent.__getstate__()
        for name, value in attributes.items():
            if name.endswith("_hooks") and isinstance(value, dict):
                attributes[name] = value.copy()  # without the observer's
        if observer is not None:
            self.observe(observer)
        attributes.update(_observer=None, _observer_handles=[], _step_watch=None)
        attributes["_waiting_plan"] = self.plan
        for name in (
            "_built",
            "_trained",
            "_plan",
            "_planned",
            "_release_planned",
            "_watched",
            "_numerics",
            "_failures",
            "_agreement",
            "_ranks",
            "_negotiated",
            "_gradient_counts",
        ):
            attributes.pop(name, None)
        attributes.pop("_lane_pool", None)
        return attributes

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._built = None
        self._trained = None
        self._plan = None
        self._planned = None
        self._release_planned = None
        self._rule_buckets = None
        self._iterations = 0
        self._negotiated = None
        self._gradient_counts = None
        self._gradients_come_once = False
        self._micro_steps = False
        # DDP builds its Reducer in the default group; prepare for that.
        self.process_group = dist.distributed_c10d._get_default_group()  # noqa: SLF001
        self._attach(self.process_group, self.module, self._timeout_s)
        parent: Any = super()
        parent.__setstate__(state)
        self._trained = self._table(self.module)
        if self.static_graph:
            self._count_gradients()
        self._stand_alone()

    # Parts.

    def _attach(
        self, group: dist.ProcessGroup, module: nn.Module, timeout_s: float | None
    ) -> None:
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._timeout_s = timeout_s
        self._device_used = device
        self._backend = backend_of(group, device)
        self._lane_backend = backends.for_lanes(
            self._backend, self._chosen_lane_backend
        )
        self._ranks = ranks_of(group, timeout_s=timeout_s)
        self._agreement = Agreement(self._ranks)
        self._lane_pool = None
        self._pools = 0
        # Weak: a dropped model must be freed at once, as with DDP.
        abort = weakref.WeakMethod(self._abort_lanes)
        self._failures = FailureReporter(
            self._ranks, partial(_call, abort), key=partial(_key_of, self._agreement)
        )
        self._numerics = NanCheck.of(
            *self._nan,
            ranks=self._ranks,
            agreement=self._agreement,
            parameters=[(row.name, p) for row, p in self._table(module)],
        )

    def _pool(self) -> LanePool:
        """Return the model's lanes; a plan opens them when needed, on all ranks."""
        if self._lane_pool is None:
            self._lane_pool = LanePool(
                self._ranks,
                serial=f"{self._agreement.serial}/{self._pools}",
                backend=self._lane_backend,
                device=self._device_used,
            )
        return self._lane_pool

    def _abort_lanes(self) -> None:
        if self._lane_pool is not None:
            self._lane_pool.abort()

    def _meet(
        self,
        module: nn.Module,
        plan: Plan | None,
        purpose: str,
        *,
        settings: Mapping[str, str] | None = None,
        trouble: StrettoError | None = None,
    ) -> None:
        """Require that all ranks have the same plan, model and settings."""
        if plan is None and not backends.supported(self._backend):
            if trouble is not None:
                raise trouble
            return  # such a group may have no store to meet in
        rows = [row for row, _ in self._table(module)]
        if plan is not None and trouble is None:
            try:
                self._routes(module, plan)
            except StrettoError as exc:
                trouble = exc
        require_matching_setup(
            self._agreement,
            self._ranks,
            purpose=purpose,
            rows=rows,
            plan=plan,
            trouble=trouble,
            settings=settings or {},
        )

    def _build_group(
        self, module: nn.Module, group: dist.ProcessGroup, plan: Plan
    ) -> PlannedGroup:
        return PlannedGroup(
            base=group,
            device=self._device_used,
            routes=self._routes(module, plan),
            pool=self._pool(),
            failures=self._failures,
            deferred=plan.overlap == "none",
            backend=backends.get(self._lane_backend),
            kind=backends.get(self._backend).kind,
            error_feedback=self._error_feedback,
            numerics=self._numerics,
            reduced=weakref.WeakMethod(self._backward_reduced),
        )

    def _lane_backend_trouble(self) -> StrettoError | None:
        """Return the error if the chosen backend of lanes does not exist."""
        if self._lane_backend != self._backend:
            try:
                backends.get(self._lane_backend)
            except PlanMismatch as exc:
                return exc
        return None

    def _table(self, module: nn.Module) -> list[tuple[TensorRow, nn.Parameter]]:
        """Return rows and parameters in the order of DDP's parameter list.

        Once DDP has built its Reducer, they are the ones that it was built with.
        """
        if self._trained is not None:
            return self._trained
        return parameter_rows(module, self._ignored)

    def _routes(self, module: nn.Module, plan: Plan) -> list[BucketSchedule]:
        if self._unplannable is not None:
            raise PlanMismatch(f"{self._unplannable} Leave it out, or pass plan=None.")
        backends.get(self._backend)  # also carries what is not in a bucket
        return routes_of(
            plan,
            self._table(module),
            module,
            backend=self._lane_backend,
            device=self._device_used,
        )

    def _set_static_graph(self) -> None:
        """Declare the graph static, as DDP does, and count gradients once."""
        parent: Any = super()
        parent._set_static_graph()  # noqa: SLF001
        self._count_gradients()

    def _count_gradients(self) -> None:
        self._gradients_come_once = False
        if self._ranks.size == 1:
            return
        self._gradient_counts = GradientCounts(
            [p for _, p in self._table(self.module) if p.requires_grad]
        )

    def _restore_reducer_state(self) -> None:
        """Copy the old Reducer's settings to a new Reducer."""
        reducer: Any = self.reducer
        logger: Any = self.logger
        c10d: Any = dist
        self._has_rebuilt_buckets = False
        if self.static_graph and not self._gradients_come_once:
            self._static_graph_delay_allreduce_enqueued = False
            reducer._set_static_graph()  # noqa: SLF001
            logger._set_static_graph()  # noqa: SLF001
        if self.mixed_precision is not None:
            reducer._set_mixed_precision_param_dtype(  # noqa: SLF001
                self.mixed_precision.param_dtype
            )
        for hook, state in self._comm_hooks:
            c10d._register_comm_hook(reducer, state, hook)  # noqa: SLF001
        if self._builtin_hook is not None:
            c10d._register_builtin_comm_hook(reducer, self._builtin_hook)  # noqa: SLF001
            self._pass_through()
        if self._planned is not None and (self._comm_hooks or self._builtin_hook):
            self._planned.hand_over()
        in_backward = any(
            hasattr(p, "_in_backward_optimizers") for p in self._module_parameters
        )
        if in_backward and self._lazy_init_ran:
            reducer._set_optimizer_in_backward()  # noqa: SLF001


def _key_of(agreement: Agreement) -> str:
    """Return the key that separates a model's failure from other models' failures.

    A copied model that never met has no number; its failure is that of the group.
    """
    return "group" if agreement.number is None else str(agreement.number)


def _call(method: Callable[[], Any], *args: Any) -> None:
    """Call a weak method while its object lives."""
    found = method()
    if found is not None:
        found(*args)
