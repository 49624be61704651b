"""The workload of an unmodified training script, observed while it runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stretto.errors import SpecError
from stretto.main_module import require_script, run_file
from stretto.measure.backward import DEFAULT_WARMUP, StepObserver
from stretto.measure.steady import DEFAULT_MAX_SPREAD_RATIO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from stretto.schema import Workload


class _Enough(BaseException):
    """Leaves the script; not an `Exception`, so that the script does not catch it."""


def profile_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    name: str | None = None,
    batch_per_rank: int | None = None,
    warmup: int = DEFAULT_WARMUP,
    repetitions: int = 10,
    max_spread_ratio: float = DEFAULT_MAX_SPREAD_RATIO,
    on_step: Callable[[int], None] | None = None,
) -> Workload:
    """Measure the workload of a training script, and stop it after enough steps.

    The model is the first module called with gradients enabled that has parameters that
    require gradients. For a ``DistributedDataParallel`` it is the module inside, and
    its gradients are not exchanged while it is observed. Under torchrun every rank must
    call this; each step then counts as its slowest rank's.

    Args:
        script: The file.
        arguments: The script's ``sys.argv`` after its own name.
        name: The workload's name, the script's by default.
        batch_per_rank: As for `StepObserver.workload`.
        warmup: Steps left out.
        repetitions: Steps that count.
        max_spread_ratio: As for `StepObserver.workload`.
        on_step: Called with the number of steps seen, after each.

    Raises:
        SpecError: the script is missing, ends before enough steps, or steps
            parameters that the observed model lacks.
        NoisyProfile: the steps differ too much.
    """
    require_script(script)
    watcher = _Watcher(
        name=name or script.stem,
        batch_per_rank=batch_per_rank,
        warmup=warmup,
        repetitions=repetitions,
        max_spread_ratio=max_spread_ratio,
        on_step=on_step,
    )
    saved_argv, saved_path = sys.argv, list(sys.path)
    saved_main = sys.modules["__main__"]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with watcher:
            run_file(str(script))
    except _Enough:
        pass
    except SystemExit as end:
        if watcher.workload is None and end.code not in (None, 0):
            raise
    finally:
        sys.argv, sys.path[:] = saved_argv, saved_path
        sys.modules["__main__"] = saved_main
    if watcher.workload is None:
        raise watcher.refusal()
    return watcher.workload


@final
class _Watcher:
    """Finds the model that a script trains, and ends the script after enough steps."""

    def __init__(
        self,
        *,
        on_step: Callable[[int], None] | None,
        warmup: int,
        repetitions: int,
        **options: Any,
    ) -> None:
        self.workload: Workload | None = None
        self._options = {"warmup": warmup, **options}
        self._enough = warmup + repetitions
        self._on_step = on_step
        self._observer: StepObserver | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles.append(register_module_forward_pre_hook(self._called))
        self._handles.append(register_optimizer_step_pre_hook(self._optimizing))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if self._observer is not None:
            self._observer.close()

    def _called(self, module: nn.Module, _args: Any) -> None:
        if self._observer is not None or not torch.is_grad_enabled():
            return
        if not any(p.requires_grad for p in module.parameters()):
            return
        model = module
        if isinstance(module, DistributedDataParallel):
            self._handles.append(module.register_forward_pre_hook(_silence))
            _silence(module, ())
            model = module.module
        group = dist.group.WORLD if dist.is_initialized() else None
        self._observer = StepObserver(model, group=group, on_step=self._seen)
        self._observer.__enter__()
        # It watches every call of every module, so it is removed once the model is
        # found.
        self._handles.pop(0).remove()

    def _optimizing(
        self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any
    ) -> None:
        if self._observer is None:
            return
        known = {id(p) for p in self._observer.model.parameters()}
        for entry in optimizer.param_groups:
            strange = [p for p in entry["params"] if id(p) not in known]
            if strange:
                raise SpecError(
                    f"the optimizer steps {len(strange)} parameters that "
                    f"{type(self._observer.model).__name__}, the first module the "
                    "script calls, lacks: put all trained parameters into one module "
                    "and call that"
                )

    def _seen(self, count: int) -> None:
        if self._on_step is not None:
            self._on_step(count)
        if count >= self._enough:
            self._conclude()
            raise _Enough

    def _conclude(self) -> None:
        assert self._observer is not None  # noqa: S101 - called by it
        # While the process group exists: the script may destroy it when it is left.
        group = dist.group.WORLD if dist.is_initialized() else None
        self.workload = self._observer.workload(group=group, **self._options)

    def refusal(self) -> SpecError:
        if self._observer is None:
            return SpecError(
                "the script ended without calling a module that has parameters to "
                "train; profile the script that trains"
            )
        return SpecError(
            f"the script ended after {len(self._observer.steps)} whole steps, but "
            f"{self._enough} are needed: train for longer, or lower --steps"
        )


def _silence(module: nn.Module, _args: Any) -> None:
    """Do what ``no_sync`` does, for every forward from now on."""
    module.require_backward_grad_sync = False  # type: ignore[assignment]
