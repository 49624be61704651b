"""`DistributedOptimizer`: reduce gradients during backward."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from typing import TYPE_CHECKING, Any

from stretto.horovod.process_sets import ProcessSet, global_process_set
from stretto.horovod.reduce_ops import Average, ReduceOp, require_no_adasum
from stretto.horovod.torch.compression import Compression
from stretto.horovod.torch.gradients import GradientReducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


class _Distributed:
    """The methods that override the optimizer's own class."""

    # Set by DistributedOptimizer; the class behind it is any torch.optim class.
    param_groups: list[dict[str, Any]]
    op: ReduceOp
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    _parameter_names: dict[torch.Tensor, str]
    _reducer: GradientReducer
    _synchronized: bool
    _should_synchronize: bool

    @property
    def backward_passes_per_step(self) -> int:
        """Number of backward passes whose gradients one step adds up."""
        return self._reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Make a step add up the gradients of ``passes`` backward passes.

        Raises:
            ValueError: ``passes`` is less than 1.
        """
        self._reducer.set_passes(_at_least_one(passes))

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; called by `step`.

        A parameter without a gradient on this rank gets zeros, because other ranks may
        have one.

        Raises:
            HorovodInternalError: a rank is lost, or ranks have different gradients.
        """
        self._reducer.synchronize(self.param_groups)
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` within the context use the gradients unchanged."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce gradients, unless that is skipped, and step.

        Gradients that ``closure`` computes are reduced each time it is called.
        """
        base: Any = super()
        if not self._should_synchronize:
            self._synchronized = False
            return base.step(closure) if closure is not None else base.step()
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() "
                "context after optimizer.synchronize(): gradients are reduced twice, "
                "which takes time. Write `with optimizer.skip_synchronize(): "
                "optimizer.step()`.",
                stacklevel=3,
            )
        if closure is None or self._reducer.under_way:
            self.synchronize()
        self._synchronized = False
        if closure is None:
            return base.step()
        given = closure

        def with_reduction() -> Any:
            loss = given()
            self._reducer.synchronize(self.param_groups)
            return loss

        return base.step(with_reduction)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients as the optimizer's own method does.

        Raises:
            AssertionError: gradients are being reduced.
        """
        if self._reducer.under_way:
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or "
                "synchronize(): it would clear gradients while they are being reduced. "
                "Call step() or synchronize() first."
            )
        base: Any = super()
        base.zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state as the optimizer does; end a partial step on all ranks."""
        if self._reducer.under_way:
            self._reducer.abandon(self.param_groups)
        self._synchronized = False
        self._should_synchronize = True
        base: Any = super()
        base.load_state_dict(*args, **kwargs)


# ``load_state_dict`` and unpickling let PyTorch wrap the class's step, which calls the
# hooks of a step. The base class's step is wrapped already: they would run twice.
_Distributed.step.hooked = True  # type: ignore[attr-defined]


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Any = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class that reduces gradients over ranks.

    It shares state and parameter groups with ``optimizer``, which must not be used any
    more. Each gradient is sent when it is ready. From the second step on the gradients
    are a tensor set of the engine: once ranks have had them in the same order for some
    steps, there is no more negotiation.

    Args:
        optimizer: The optimizer that steps.
        named_parameters: Pairs of name and parameter; by default they are numbered.
        compression: Compression of gradients on the wire.
        backward_passes_per_step: Backward passes whose gradients a step adds up.
        op: How gradients of ranks are combined.
        gradient_predivide_factor: With op Average, gradients are divided by it before
            they are added up, and by ranks / factor after.
        num_groups: Number of groups in which gradients are sent, each when it is
            complete; 0 sends each on its own. The engine joins small ones anyway.
        groups: Number of groups, or lists of parameters to send together.
        sparse_as_dense: Send sparse gradients as dense ones; the optimizer gets sparse
            ones.
        process_set: Ranks that train together; on other ranks a step is local.

    Raises:
        ValueError: names are missing, duplicated, or not pairs; a group or a number is
            invalid; a predivide factor is given with an op other than Average.
        NotImplementedError: op is Adasum.
    """
    require_no_adasum(op, "DistributedOptimizer")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError(
            f"gradient_predivide_factor needs op=Average, got op={op!r} and "
            f"gradient_predivide_factor={gradient_predivide_factor:g}"
        )
    names = _names(optimizer, named_parameters)
    reducer = GradientReducer(
        names,
        compression=compression,
        passes=_at_least_one(backward_passes_per_step),
        op=op,
        predivide=gradient_predivide_factor,
        groups=_groups(names, num_groups, groups),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    base = type(optimizer)
    cls: Any = type(base.__name__, (_Distributed, base), {"__doc__": base.__doc__})
    found: Any = object.__new__(cls)
    # A scheduler created earlier has set a step method on the old optimizer, which
    # would hide ours.
    kept = {k: v for k, v in vars(optimizer).items() if k not in ("step", "zero_grad")}
    vars(found).update(
        kept,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        _parameter_names={parameter: name for name, parameter in names},
        _reducer=reducer,
        _synchronized=False,
        _should_synchronize=True,
    )
    distributed: torch.optim.Optimizer = found
    return distributed


def _at_least_one(passes: int) -> int:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be >= 1, got {passes}")
    return passes


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Any
) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer's parameters with their names, sorted by name."""
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        found = [(f"noname.{i:06d}", p) for i, p in enumerate(mine)]
    else:
        found = list(named_parameters)
    for pair in found:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                "named_parameters must contain pairs of name and parameter, as from "
                f"model.named_parameters(), got a {type(pair).__name__}"
            )
    names = [name for name, _ in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"names of parameters must differ, got {', '.join(twice)} more than once. "
            "Put the models into one module, or add a prefix to each one's names."
        )
    known = {id(parameter) for _, parameter in found}
    unnamed = [p for p in mine if id(p) not in known]
    if unnamed:
        shapes = ", ".join(str(list(p.shape)) for p in unnamed[:8])
        raise ValueError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's {len(mine)} "
            f"parameters, of shapes {shapes}. Pass model.named_parameters() of the "
            "whole model."
        )
    wanted = {id(p) for p in mine}
    return sorted((n, p) for n, p in found if id(p) in wanted)


def _groups(
    names: list[tuple[str, torch.Tensor]], num_groups: int, groups: Any
) -> list[list[int]]:
    """Return the indices of parameters to send together."""
    if groups is not None and num_groups:
        warnings.warn(
            "num_groups is ignored because groups is given", DeprecationWarning, 3
        )
    wanted = num_groups if groups is None else groups
    if isinstance(wanted, int):
        if wanted < 0:
            raise ValueError(f"groups must be a number >= 0 or lists, got {wanted}")
        if wanted == 0:
            return []
        count = len(names)
        share, more = divmod(count, min(wanted, count) or 1)
        bounds = [i * share + min(i, more) for i in range(min(wanted, count) + 1)]
        return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
    if not isinstance(wanted, list) or not all(
        isinstance(group, list | tuple) for group in wanted
    ):
        raise ValueError(
            "groups must be a number or a list of lists of parameters, got "
            f"{type(wanted).__name__}"
        )
    index_of = {id(parameter): i for i, (_, parameter) in enumerate(names)}
    found = [[index_of.get(id(p), -1) for p in group] for group in wanted]
    flat = [i for group in found for i in group]
    if -1 in flat or len(set(flat)) < len(flat):
        raise ValueError(
            "groups must contain parameters of the optimizer, each in at most one "
            "group: one is not the optimizer's, or is duplicated"
        )
    return [group for group in found if group]
