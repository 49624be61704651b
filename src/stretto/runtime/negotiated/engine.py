"""The negotiated engine: collectives in any order, from any thread, on every rank.

The names below are final; bodies follow.

```python
engine = Engine.of_group(dist.group.WORLD, options=EngineOptions(lanes=2))
handle = engine.submit(Request(name="x", kind=Kind.ALLREDUCE, ...), tensor)
engine.submit_group("g", [(request, tensor), ...])        # atomic
handle.poll(); handle.wait(timeout_s=None); handle.result # output(s)
engine.join()                                             # last rank to join
gradients = engine.register("model", requests)            # TensorSet
gradients.submit(index, tensor); gradients.wait()
engine.close()
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

    from stretto.runtime.agreement import Ranks
    from stretto.runtime.negotiated.options import EngineOptions
    from stretto.runtime.negotiated.requests import Request


@final
class Handle:
    """One submitted request."""

    def poll(self) -> bool:
        """Whether it has ended, well or not; never waits."""
        raise NotImplementedError

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        """Sleeps until it has ended and gives `result`.

        Raises:
            RankDisagreement: ranks asked for different things; same text everywhere.
            CommTimeout: a rank is gone, or ``timeout_s`` passed (may be waited for
                again).
            StrettoError: the engine was closed.
        """
        raise NotImplementedError

    @property
    def result(self) -> torch.Tensor:
        """The output: in place (the tensor submitted) where ``output`` was it."""
        raise NotImplementedError

    @property
    def received_splits(self) -> tuple[int, ...]:
        """All-to-all: rows received from each rank."""
        raise NotImplementedError


@final
class TensorSet:
    """Tensors that every rank submits once per step, for instance all gradients."""

    def submit(self, index: int, tensor: torch.Tensor, *, used: bool = True) -> None:
        """Submits the member at ``index`` (of the requests registered), in place."""
        raise NotImplementedError

    def wait(self) -> tuple[int, ...]:
        """Ends the step: all members reduced; members that no rank used."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the set; to be called by every rank."""
        raise NotImplementedError


@final
class Engine:
    """Collectives in any order from any thread, agreed on without a master.

    One per set of ranks (process set). Only these ranks construct it.
    """

    def __init__(self, ranks: Ranks, *, options: EngineOptions, observer: Any = None):
        raise NotImplementedError

    @classmethod
    def of_group(
        cls,
        group: dist.ProcessGroup,
        *,
        options: EngineOptions,
        timeout_s: float | None = None,
        observer: Any = None,
    ) -> Engine:
        """The engine of a process group's ranks, over the group's store."""
        raise NotImplementedError

    def submit(
        self,
        request: Request,
        tensor: torch.Tensor | None,
        output: torch.Tensor | None = None,
    ) -> Handle:
        """Asks for a collective and returns at once.

        ``output`` takes the result (may be ``tensor``: in place); ``None``: a new one.

        Raises:
            SpecError (a ValueError): the name is pending already, or the tensor is
                not as the request says.
        """
        raise NotImplementedError

    def submit_group(
        self,
        group: str,
        rows: Sequence[tuple[Request, torch.Tensor, torch.Tensor | None]],
    ) -> list[Handle]:
        """Asks for several that are launched together or fail together."""
        raise NotImplementedError

    def register(self, name: str, requests: Sequence[Request]) -> TensorSet:
        """Declares tensors that all ranks submit once per step; collective."""
        raise NotImplementedError

    def join(self) -> int:
        """Contributes zeros to all-reduces until all have joined; the last to join."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends threads and connections; pending handles fail."""
        raise NotImplementedError
