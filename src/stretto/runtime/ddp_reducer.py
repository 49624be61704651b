"""A DDP whose Reducer is built for a plan, and can be replaced between two steps."""

from __future__ import annotations

import contextlib
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from stretto.errors import PlanMismatch, StrettoError
from stretto.logs import get_logger
from stretto.runtime import backends
from stretto.runtime.after_backward import at_the_end
from stretto.runtime.ddp_group import WatchedGroup
from stretto.runtime.ddp_ranks import RankedDDP
from stretto.runtime.forward.undisturbed import has_modes, undisturbed
from stretto.runtime.planned_group import PlannedGroup
from stretto.runtime.read_only import shown_value
from stretto.runtime.recording.step import StepWatch, require_observer
from stretto.runtime.static_graph import GradientCounts
from stretto.runtime.torch_compat import build_reducer, pass_logged_iterations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from stretto.runtime.bucket_schedule import BucketSchedule
    from stretto.runtime.forward.reads import ReadWatch
    from stretto.runtime.recording.step import AbstractStepObserver, BucketRow
    from stretto.schema import Plan

_log = get_logger(__name__)


class _Form(NamedTuple):
    """The properties of a parameter that a Reducer stores when it is built."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


def _form(parameter: torch.Tensor) -> _Form:
    strides = parameter.stride() if parameter.layout is torch.strided else ()
    return _Form(parameter.dtype, parameter.shape, strides)


class ReplaceableReducerDDP(RankedDDP):
    """Gives DDP's Reducer a plan's buckets and process group, and another one later."""

    _error_feedback: bool
    _exact_clipping = True
    """Whether plans that overlap with forward send whole all-reduces."""

    _built: Any = None
    _built_forms: Sequence[_Form] = ()
    _plan: Plan | None = None
    _waiting_plan: Plan | None = None
    _planned: PlannedGroup | None = None
    _release_planned: weakref.finalize[..., Any] | None = None
    _watched: WatchedGroup | None = None
    _rule_buckets: list[list[int]] | None = None
    _iterations = 0
    _is_new_reducer = False
    """Whether the Reducer followed another one and has reduced no backward yet."""

    _is_rebuild_due = False
    """Whether such a Reducer rebuilds its buckets in the next forward."""

    _builtin_hook: Any = None
    _gradient_counts: GradientCounts | None = None
    _gradients_come_once = False
    _other_gradient_counts: Mapping[str, int] = MappingProxyType({})
    _observer: AbstractStepObserver | None = None
    _step_watch: StepWatch | None = None
    _changes_ranks = False
    """Whether ranks may be lost or join while the model trains."""

    _reads: ReadWatch | None = None
    _end_reads: weakref.finalize[..., Any] | None = None
    _reads_seen: set[str]
    """Names of parameters whose reads in forward have been seen."""

    _said_of_forward: set[str]
    """Warnings that were given."""

    _counts_steps = False
    """Whether `_step_reduced` is called; a subclass may set it."""

    def _attach(
        self, group: dist.ProcessGroup, module: nn.Module, timeout_s: float | None
    ) -> None:
        super()._attach(group, module, timeout_s)
        self._reads_seen = set()
        self._said_of_forward = set()

    # Observation.

    @shown_value
    def observed(self) -> bool:
        """Whether an observer receives every step."""
        return self._observer is not None

    def observe(self, observer: AbstractStepObserver | None) -> None:
        """Report every step to ``observer`` from now on; ``None`` stops it.

        Without an observer no hook is installed, so there is no cost.

        Raises:
            SpecError: ``observer`` is not an observer.
        """
        require_observer(observer)
        self._observe(observer)

    # A subclass may use the public names for methods of its own.

    def _observe(self, observer: AbstractStepObserver | None) -> None:
        if self._step_watch is not None:
            self._step_watch.remove()
            self._step_watch = None
        self._observer = observer
        if self._planned is not None:
            self._planned.observe(observer)
        if observer is None:
            return
        rows = self._table(self.module)
        observer.attached([row.name for row, _ in rows], self._bucket_rows())
        self._step_watch = StepWatch(observer, self, [p for _, p in rows])

    def _bucket_rows(self) -> list[BucketRow]:
        if self._planned is None:
            return []
        dtypes = {row.name: row.dtype for row in self.tensor_table()}
        return [
            schedule.row(dtypes[schedule.tensors[0]])
            for schedule in self._planned.schedules
        ]

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

    # One Reducer: DDP's rule or a plan's buckets.

    def _ddp_init_helper(self, *arguments: Any) -> None:
        if self._built is None:
            self._built = arguments[:3]
            self._built_forms = [_form(p) for p in arguments[0]]
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
        indices = [schedule.parameters for schedule in self._planned.schedules]
        build_reducer(self, indices, self._planned, arguments)

    def _overlap_with_forward(self, planned: PlannedGroup) -> None:
        """Let a forward plan's communication overlap with forward, if it can.

        This is decided in the plan's first forward, when the model's options are known.
        """
        planned.may_overlap = False
        if self._ranks.size == 1:
            return
        # Most programs do not overlap with forward.
        from stretto.runtime.forward.overlap import ForwardOverlap

        table = [(row.name, p) for row, p in self._table(self.module)]
        why = self._why_backward(table)
        if why is not None:
            self._warn_of_backward(why)
            return
        planned.overlap_with_forward(
            ForwardOverlap(
                self.module,
                table,
                planned.schedules,
                views=self.gradient_as_bucket_view,
                sender=planned.sender,
                marker=self._marker,
                logs=self._ranks.rank == 0,
                seen=self._reads_seen,
                said=self._said_of_forward,
            )
        )

    def _why_backward(self, table: Sequence[tuple[str, nn.Parameter]]) -> str | None:
        if self._changes_ranks:
            return "its ranks may change (stretto.Elastic), at the end of whole steps"
        # Most programs do not overlap with forward.
        from stretto.runtime.forward.fallback import why_backward

        return why_backward(self, table)

    def _warn_of_backward(self, why: str) -> None:
        if self._ranks.rank == 0 and why not in self._said_of_forward:
            self._said_of_forward.add(why)
            _log.warning("no overlap with forward: %s", why)

    # What the program reads, for plans that overlap with forward.

    def _watch_reads(self) -> str | None:
        """Watch reads from the next `ReadWatch.backward_ended` on.

        Returns:
            Why communication can't overlap with forward; then nothing is watched.
        """
        # Most programs do not overlap with forward.
        from stretto.runtime.forward.overlap import is_poisoned
        from stretto.runtime.forward.reads import ReadWatch

        self._release_reads()
        table = [(row.name, p) for row, p in self._table(self.module)]
        why = self._why_backward(table)
        if why is None:
            self._reads = ReadWatch(
                self.module,
                table,
                seen=self._reads_seen,
                poisons=is_poisoned(),
                by_parts=not self._exact_clipping,
            )
            self._end_reads = weakref.finalize(self, self._reads.release)
            self._end_reads.atexit = False
        return why

    def _release_reads(self) -> None:
        """Watch reads no longer."""
        self._reads = None
        end, self._end_reads = self._end_reads, None
        if end is not None:
            end()

    def _finish_forward(self) -> None:
        """Finish what is under way between a backward and the next forward."""
        if self._reads is not None:
            self._reads.finish_all()
        if self._planned is not None and self._planned.overlap is not None:
            self._planned.overlap.finish_all()

    def _build_group(
        self, module: nn.Module, group: dist.ProcessGroup, plan: Plan
    ) -> PlannedGroup:
        """Open a plan's lanes, together with the other ranks."""
        halves = (
            plan.overlap == "forward"
            and not self._exact_clipping
            and self._ranks.size > 1
        )
        return PlannedGroup(
            base=group,
            device=self._device_used,
            schedules=self._schedules(module, plan),
            pool=self._pool(),
            failures=self._failures,
            marker=self._marker,
            deferred=plan.overlap == "none",
            backend=backends.get(self._lane_backend),
            kind=backends.get(self._backend).kind,
            error_feedback=self._error_feedback,
            numerics=self._numerics,
            reduced=weakref.WeakMethod(self._backward_reduced),
            overlaps=plan.overlap == "forward",
            launch=() if halves else plan.launch,
            halves=halves,
        )

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
            self._numerics.warn_unchecked(
                f"without a plan, on {self._device_used.type}"
            )
        counts = self._counts_steps and planned
        if self._use_python_reducer or not (waits or counts):
            return None
        return WatchedGroup(
            base=self.process_group,
            device=self._device_used,
            failures=self._failures,
            marker=self._marker,
            kind=backends.get(self._backend).kind,
            waits=waits,
            numerics=self._numerics if waits else None,
            buckets=self._rule_buckets,
            rebuilt=weakref.WeakMethod(self._note_rule),
            reduced=weakref.WeakMethod(self._backward_reduced),
        )

    def _note_rule(self, buckets: list[list[int]]) -> None:
        """Remember the buckets that DDP rebuilt."""
        self._rule_buckets = buckets

    # Another Reducer.

    def _replace_reducer(
        self, plan: Plan | None, agree: Callable[[Exception | None], None]
    ) -> None:
        """Build the Reducer and lanes of a plan and use them if all ranks can.

        ``agree`` gets this rank's error, if any. It returns on every rank or raises on
        every rank; if it raises, every rank is unchanged.
        """
        self._finish_forward()
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
            trouble = None  # its traceback has this frame, in a cycle
            raise
        self._adopt_reducer(before[3], before[4])

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
        """Make parameters what they were when the model was built.

        DDP's Reducer keeps the parameters that it was built with, with their types and
        shapes, even if some are frozen, unfrozen, emptied or converted later; a new
        Reducer must keep the same ones.
        """
        parameters = () if self._built is None else self._built[0]
        changed = [
            (p, p.data, form)
            for p, form in zip(parameters, self._built_forms, strict=True)
            if _form(p) != form
        ]
        frozen = [p for p in parameters if not p.requires_grad]
        try:
            for p, _, form in changed:
                p.data = torch.empty_strided(
                    form.shape, form.strides, dtype=form.dtype, device=p.device
                )
            for p in frozen:
                p.requires_grad_(True)  # noqa: FBT003 - as PyTorch's
            yield
        finally:
            for p in frozen:
                p.requires_grad_(False)  # noqa: FBT003 - as PyTorch's
            for p, data, _ in changed:
                p.data = data

    def _schedules(self, module: nn.Module, plan: Plan) -> list[BucketSchedule]:
        with self._as_constructed():
            return super()._schedules(module, plan)

    def _adopt_reducer(self, old: Any, old_logger: Any) -> None:
        """Use the new Reducer from now on, with the settings of the old one."""
        self._own_planned()
        self._retire(old, old_logger)
        self._restore_reducer_state()
        self._keep_used_map(old)
        self._is_new_reducer, self._is_rebuild_due = True, False
        if self._observer is not None:
            self._observe(self._observer)

    def _retire(self, reducer: Any, logger: Any) -> None:
        """Take an old Reducer out of service; its logged iterations still count."""
        # Remove its parameter hooks now, not when the last reference is dropped.
        reducer._remove_autograd_hooks()  # noqa: SLF001
        if logger is not None:
            data = logger._get_ddp_logging_data()  # noqa: SLF001
            self._iterations += data.ints_map.get("iteration", 0)

    def _begin_captured(self) -> None:
        """Prepare for a step that is captured as a CUDA graph."""
        pass_logged_iterations(self)

    def _own_planned(self) -> None:
        """Release the plan's group when the model is freed or gets another one."""
        old, self._release_planned = self._release_planned, None
        if old is not None:
            old()
        if self._planned is not None:
            self._release_planned = weakref.finalize(self, self._planned.release)
            self._release_planned.atexit = False

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

    def _pass_through(self) -> None:
        """Give a C++ hook the works of the model's own group."""
        group = self._planned or self._watched
        if group is not None:
            group.pass_through()

    def _keep_used_map(self, reducer: Any) -> None:
        """Keep the last backward's report of unused parameters.

        It is only an output: the next backward writes it before it is read.
        """
        # A static graph's new Reducer does not look for unused parameters.
        if self.find_unused_parameters and not self._gradients_come_once:
            theirs: Any = self.reducer
            used = theirs._get_local_used_map()  # noqa: SLF001
            used.copy_(reducer._get_local_used_map())  # noqa: SLF001

    def _restore_rule(self) -> None:
        """Restore DDP's buckets from the next step on, without communication.

        The buckets are the last ones that DDP rebuilt, so the new Reducer does not have
        to ask other ranks. Every rank must call this at the same point.
        """
        if self._plan is None:
            return
        self._finish_forward()
        reducer, logger = self.reducer, self.logger
        self._waiting_plan = None
        self._rebuild_reducer(None, None)
        self._adopt_reducer(reducer, logger)

    def _rebuild_rule(self) -> None:
        """Make DDP rebuild its buckets now rather than in the next forward.

        Every rank must call it at the end of the first reduced backward.
        """
        # Returns False, without communication, if DDP does not rebuild or already has.
        if self._planned is None and self.reducer._rebuild_buckets():  # noqa: SLF001
            self._has_rebuilt_buckets = True

    def _rebuild_outside_modes(self) -> None:
        """Rebuild a new Reducer's buckets outside the modes of the program's forward.

        DDP rebuilds once, in the second forward. A plan's Reducer does it in another
        one, which may run in a transform of ``torch.func`` or within fake tensors.
        """
        self._is_rebuild_due = False
        if has_modes():
            with undisturbed():
                if self.reducer._rebuild_buckets():  # noqa: SLF001
                    self._has_rebuilt_buckets = True

    def release_unused_lanes(self) -> None:
        """Close the lanes that the plan in use does not need.

        All ranks must call this at the same point, with no collective in flight.
        """
        if self._lane_pool is not None:
            self._lane_pool.retain(() if self._planned is None else self._planned.needs)

    def _release_lanes(self) -> None:
        """Close all lanes; call it only without a plan, when nothing uses them."""
        if self._planned is None and self._lane_pool is not None:
            self._lane_pool.close()
            self._lane_pool = None
            self._pools += 1

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
            self._other_gradient_counts = counts.end()
            self._gradients_come_once = not self._other_gradient_counts
        # A second backward in the same forward needs the rebuilt buckets. If they are
        # known, this does not communicate. Not after forward: with DDP's own mixed
        # precision, parameters then still have their narrow types.
        in_forward = getattr(TorchDDP, "_active_ddp_module", None) is self
        known = self._planned is not None or self._rule_buckets is not None
        if in_forward and known and self.reducer._rebuild_buckets():  # noqa: SLF001
            self._has_rebuilt_buckets = True
        if self._is_new_reducer:
            self._is_new_reducer, self._is_rebuild_due = False, True
        if self._counts_steps:
            key = (str(self.process_group.group_name), self._agreement.serial)
            at_the_end(key, self._step_reduced)

    def _step_reduced(self) -> None:
        """Run a subclass's work at the end of a reduced backward."""

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
            [(r.name, p) for r, p in self._table(self.module) if p.requires_grad]
        )
