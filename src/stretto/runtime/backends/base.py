"""The contract of a communication backend that lanes may use."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from stretto.errors import CommTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Store

    from stretto.runtime.bucket_schedule import BucketSchedule
    from stretto.runtime.ranks import Ranks
    from stretto.runtime.recording.step import AbstractStepObserver

Need = tuple[int, int | None]
"""A lane and the resource that a collective on it may use."""


class LaneFailure(CommTimeout):
    """A collective of one lane failed; the cause of a model's `CommTimeout`.

    The model's error also names the bucket, and the ranks that caused it.
    """


class Lane(Protocol):
    """An open lane; any backend object of torch has these methods.

    Every call returns a `torch.distributed.Work` at once. A lane starts its calls in
    the order in which they were made, which is the same on every rank; those in flight
    share no memory. The work's ``wait`` raises `RuntimeError` where the collective
    failed. Tensors are contiguous and on the backend's type of device; ``opts`` are
    those of torch.distributed, where ``None`` means the defaults (a sum, rank 0).
    """

    def rank(self) -> int:
        """Return this process's rank in the lane."""

    def size(self) -> int:
        """Return the number of ranks."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce one tensor over all ranks, in place, to the same bits on each.

        ``opts.reduceOp`` is a sum, minimum, maximum, product or bitwise and.
        """

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Give every rank the values of ``opts.rootRank``'s tensor."""

    def _allgather_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        """Fill ``output`` with every rank's tensor, in rank order."""

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Any:
        """Send each rank its part of ``tensor``; no splits mean equal parts."""

    def barrier(self, opts: Any = None) -> Any:
        """Wait until every rank has made this call."""


class AbstractLanes(abc.ABC):
    """The open lanes of one model on one rank.

    Opening is collective: every rank must ask for the same lanes in the same order.
    """

    @abc.abstractmethod
    def open(self, needs: Sequence[Need]) -> dict[Need, Any]:
        """Return a `Lane` for each need; open those that are missing.

        Needs of one lane may share one object.

        Raises:
            CommTimeout: a rank did not connect.
            PlanMismatch: a rank can't open a lane; the same on every rank.
        """

    def open_for(
        self, needs: Sequence[Need], algorithms: Container[str]
    ) -> dict[Need, Any]:
        """Return `open`'s lanes, each with ``using(algorithm)`` for these algorithms.

        That method returns the lane as one whose collectives use an algorithm; all
        collectives of a lane still run in the order of their calls. Called only with
        what the backend's ``algorithms`` lists; with no algorithm to choose, a lane
        needs no such method.
        """
        del algorithms
        return self.open(needs)

    @abc.abstractmethod
    def retain(self, lanes: Container[int]) -> None:
        """Release the other lanes."""

    @abc.abstractmethod
    def abort(self) -> None:
        """End every connection at once, so that no peer waits for this rank."""

    @abc.abstractmethod
    def close(self) -> None:
        """End every lane after its collectives are done."""


class AbstractStreamLaunch(abc.ABC):
    """Launches buckets whose completion only the device's streams see."""

    @abc.abstractmethod
    def future(self) -> torch.futures.Future[Any]:
        """Return a future that orders streams when it is waited for."""

    @abc.abstractmethod
    def launcher(
        self,
        schedule: BucketSchedule,
        reduces: Sequence[Any],
        observer: AbstractStepObserver | None,
    ) -> Callable[[torch.Tensor, Any], dist.Work]:
        """Return what launches one bucket."""


class AbstractBackend(abc.ABC):
    """The contract of a backend; one object serves all models."""

    name: ClassVar[str]
    """The name by which it is chosen; that of torch.distributed if torch has it."""

    device_type: ClassVar[str]
    """Tensors that it sends in slices, on several lanes, without a copy."""

    completes_on_host: ClassVar[bool]
    """Whether waiting for a work blocks the host until its result is there, so that
    failures and ends can be observed on the host."""

    algorithms: ClassVar[tuple[str, ...]] = ("ring",)
    """The algorithms that the buckets of a plan may name."""

    pairs_by_order: ClassVar[bool] = False
    """Whether sends and receives are paired by their order alone, without tags, and
    must be posted as one group to not wait for each other."""

    regroups: ClassVar[bool] = False
    """Whether a process can make its groups again for other ranks, while an older
    group's peers are lost."""

    ends_at_exit: ClassVar[bool]
    """Whether its lanes must be closed while the interpreter still runs."""

    @property
    @abc.abstractmethod
    def kind(self) -> Any:
        """Torch's ``ProcessGroup.BackendType``; ``CUSTOM`` if torch lacks it."""

    def is_available(self) -> bool:
        """Return whether this machine and this build of torch have it."""
        return True

    def max_resource(self, device: torch.device) -> int | None:
        """Return the resource that all lanes together may use, or None for no limit."""
        del device
        return None

    def library_versions(self) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return its library's version as torch was built and as loaded, if known."""
        return None, None

    def settings(self, environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Return each variable that its library reads: the value and its source."""
        del environment
        return {}

    def prepare_process(self) -> None:  # noqa: B027 - most need nothing
        """Set what must be set before a model's first collective in this process."""

    @abc.abstractmethod
    def check(self, needs: Sequence[Need], ranks: int, device: torch.device) -> None:
        """Require that this process can open lanes.

        Raises:
            PlanMismatch: with the obstacle, both numbers, and the remedy.
        """

    @abc.abstractmethod
    def lanes(
        self,
        *,
        ranks: Ranks,
        store_for: Callable[[str], Store],
        device: torch.device,
        end_requests: Callable[[], None] | None,
        notes: Store,
    ) -> AbstractLanes:
        """Return the lanes of a model, none of them open.

        ``store_for`` returns the store in which ranks find each other, by lane;
        ``end_requests`` ends requests to it that are under way. ``notes`` is on another
        connection: there a rank says that it can't open a lane.
        """

    @abc.abstractmethod
    def collectives_per_slice(self, resource: int | None) -> int:
        """Return how many collectives send one slice with this resource."""

    @abc.abstractmethod
    def stream_launch(self, device: torch.device) -> AbstractStreamLaunch | None:
        """Return what launches buckets on streams; ``None`` if the host waits."""
