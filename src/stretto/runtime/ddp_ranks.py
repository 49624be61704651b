"""The base of stretto's DDP: agreement, lanes and a table of parameters.

`ddp_reducer` derives from it, and `ddp` from that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from stretto import variable_names
from stretto._version import __version__
from stretto.background.named_device import open_named
from stretto.errors import PlanMismatch, SpecError, StrettoError
from stretto.foreground_marks import StepMarker
from stretto.runtime import backends
from stretto.runtime.agreement import (
    Agreement,
    described,
    require_matching_setup,
)
from stretto.runtime.failure import FailureReporter
from stretto.runtime.lanes import LanePool
from stretto.runtime.nan_check import NanCheck
from stretto.runtime.plan_binding import (
    parameter_rows,
    schedules_of,
    sparse_parameters,
)
from stretto.runtime.presence import is_communication_error
from stretto.runtime.read_only import shown_value
from stretto.runtime.store import ranks_of
from stretto.runtime.torch_compat import backend_of
from stretto.runtime.weak_call import weakly
from stretto.schema import Bucket, Plan
from stretto.schema.plan import WIRE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist
    from torch import nn

    from stretto.runtime.bucket_schedule import BucketSchedule
    from stretto.runtime.ranks import Ranks, TensorRow


class RankedDDP(TorchDDP):
    """PyTorch's class with what a plan needs: ranks, lanes, and parameters by name.

    ``_attach`` must run before PyTorch's own constructor, which builds the Reducer.
    """

    # Plain values and class attributes work before nn.Module is initialized.
    _ranks: Ranks
    _agreement: Agreement
    _failures: FailureReporter
    _numerics: NanCheck | None
    _timeout_s: float | None
    _device_used: torch.device
    _backend: str
    _lane_backend: str
    _chosen_lane_backend: str | None
    _nan: tuple[str, int]
    _ignored: frozenset[str]
    _unplannable: str | None
    _same_names = True
    """Whether all ranks give the parameters the same names."""

    _trained: list[tuple[TensorRow, nn.Parameter]] | None = None
    _lane_pool: LanePool | None = None
    _pools = 0
    _on_loss: Callable[[], None] | None = None
    """Called when a collective fails, if the ranks may then regroup."""

    _is_over: Callable[[], bool] | None = None
    """Returns whether these ranks were given up for others."""

    # The model, as planners see it.

    @shown_value
    def backend(self) -> str:
        """The backend of the lanes: ``gloo``, ``nccl``, ``local`` or another one."""
        return self._lane_backend

    def tensor_table(self) -> tuple[TensorRow, ...]:
        """Return parameters that require gradients, in ``named_parameters()`` order."""
        return tuple(row for row, _ in self._table(self.module))

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and parameters in the order of `tensor_table`."""
        return [(row.name, p) for row, p in self._table(self.module)]

    def left_to_ddp(self) -> str | None:
        """Return why this model can't be planned automatically, or ``None``."""
        rows = self._table(self.module)
        device = self._device_used
        if self._unplannable is not None:
            return self._unplannable
        if not self._same_names:
            return (
                "ranks give the model's parameters different names, or another order; "
                "plans know parameters by name."
            )
        if self._use_python_reducer:
            return "plans need DDP's own Reducer, not torch._dynamo's python_reducer."
        if not (
            backends.supported(self._backend)
            and backends.supported(self._lane_backend)
            and backends.get(self._lane_backend).device_type == device.type
        ):
            return (
                "plans run on gloo, local or hierarchical with tensors on the CPU and "
                f"on nccl with tensors on a GPU, but this model uses "
                f"{self._lane_backend} and {device.type}."
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

    def lane(self, number: int) -> Any:
        """Return the communicator of a lane; open it if necessary. Collective.

        It works as ``group=`` of ``torch.distributed`` collectives. Measuring these
        lanes shows what the plans that use them will see.
        """
        return self._pool().lane(number)

    # Ranks and lanes.

    def _attach(
        self, group: dist.ProcessGroup, module: nn.Module, timeout_s: float | None
    ) -> None:
        """Join the ranks of ``group``; nothing is sent."""
        open_named()
        self._marker = StepMarker()
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._timeout_s = timeout_s
        self._device_used = device
        self._backend = backend_of(group, device)
        self._lane_backend = backends.for_lanes(
            self._backend, self._chosen_lane_backend
        )
        is_over = self._is_over or (lambda: False)
        self._ranks = ranks_of(group, timeout_s=timeout_s, is_over=is_over)
        self._agreement = Agreement(self._ranks)
        # Weak: a dropped model must be freed at once, as with DDP.
        self._failures = FailureReporter(
            self._ranks,
            weakly(self._abort_lanes),
            key=partial(_key_of, self._agreement),
            hand_over=self._on_loss,
        )
        self._numerics = NanCheck.of(
            *self._nan,
            ranks=self._ranks,
            agreement=self._agreement,
            parameters=[(row.name, p) for row, p in self._table(module)],
        )

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
        if not backends.supported(self._backend):
            # Such a group may have no store to meet in.
            if trouble is not None:
                raise trouble
            if plan is not None:
                self._schedules(module, plan)  # says that plans can't run there
            return
        rows = [row for row, _ in self._table(module)]
        if plan is not None and trouble is None:
            try:
                self._schedules(module, plan)
            except StrettoError as exc:
                trouble = exc
        self._same_names = require_matching_setup(
            self._agreement,
            self._ranks,
            purpose=purpose,
            rows=rows,
            plan=plan,
            trouble=trouble,
            settings=settings or {},
        )

    def _lane_backend_trouble(self) -> StrettoError | None:
        """Return the error if the chosen backend of lanes can't be had."""
        name = self._lane_backend
        if name != self._backend and not backends.supported(name):
            source = variable_names.LANE_BACKEND
            if self._chosen_lane_backend is not None:
                source = "lane_backend"
            known = ", ".join(map(repr, backends.names()))
            return SpecError(f"{source} must be one of {known}, got {name!r}")
        if name != self._backend:
            try:
                backends.get(name)
            except StrettoError as exc:
                return exc
        return None

    def _described(self) -> str:
        """Return the model and the versions that run it, which ranks must share."""
        tensors = described([row for row, _ in self._table(self.module)])
        return f"stretto {__version__}, torch {torch.__version__}, {tensors}"

    def _table(self, module: nn.Module) -> list[tuple[TensorRow, nn.Parameter]]:
        """Return rows and parameters in the order of DDP's parameter list.

        Once DDP has built its Reducer, they are the ones that it was built with.
        """
        if self._trained is not None:
            return self._trained
        return parameter_rows(module, self._ignored)

    def _schedules(self, module: nn.Module, plan: Plan) -> list[BucketSchedule]:
        """Return the schedule of each bucket of ``plan``.

        Raises:
            PlanMismatch: the plan is for another model, or needs a feature that this
                runtime does not support.
        """
        if self._unplannable is not None:
            raise PlanMismatch(f"{self._unplannable} Leave it out, or pass plan=None.")
        backends.get(self._backend)  # also carries what is not in a bucket
        return schedules_of(
            plan,
            self._table(module),
            module,
            backend=self._lane_backend,
            device=self._device_used,
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

    def _abort_lanes(self) -> None:
        """Close the lanes' connections after a failure."""
        if self._lane_pool is not None:
            self._lane_pool.abort()

    def _raise_named(self, place: str, exc: Exception) -> None:
        """Raise the error that names the lost rank, if ``exc`` is from a collective.

        Any other exception is unchanged. An exception that is its own cause is a cycle,
        which keeps the model and DDP's hooks alive until garbage collection.
        """
        if not backends.supported(self._backend):
            return
        if is_communication_error(exc) and not isinstance(exc, StrettoError):
            raise self._failures.report(place, exc) from exc


def _key_of(agreement: Agreement) -> str:
    """Return the key that separates a model's failure from other models' failures.

    A copied model that never met has no number; its failure is that of the group.
    """
    return "group" if agreement.number is None else str(agreement.number)
