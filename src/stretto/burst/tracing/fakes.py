"""Replace a module's parameters and buffers with tensors without values."""

from __future__ import annotations

import abc
import contextlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from stretto.burst.tracing.constant_values import (
    ConstantValues,
    reads_values,
    written_by,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_DEVICE = torch.ops.prim.device.default
_LIFT = torch.ops.aten.lift_fresh.default
"""Makes a tensor without values of one that a constructor made."""


class AbstractRecorder(abc.ABC):
    """Receives the operations that fake tensors intercept."""

    @abc.abstractmethod
    def drew(self, operator: Any, args: Any, kwargs: Any) -> None:
        """Record that random numbers were drawn."""

    @abc.abstractmethod
    def called(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record that an operator was called."""

    @abc.abstractmethod
    def lifted(self, tensor: Tensor, value: Tensor) -> None:
        """Record the value of a tensor that was made from data."""

    @abc.abstractmethod
    def wrote(self, tensors: Iterable[Tensor]) -> None:
        """Record that an operation writes into tensors, wherever it is called."""


@final
class RecordingMode(FakeTensorMode):
    """Fake tensors that intercept operations that draw random numbers.

    Kernels ask a fake tensor for its device several times in each call, so that
    question is answered directly.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # Code in C++ that asks for an address gets an error, and not a null pointer.
        self._allow_unsafe_data_ptr_access = False
        self.recorder: AbstractRecorder | None = None
        self.values = ConstantValues(storage_of)
        self._inside = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if self._inside:  # a part of another operation
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        recorder = self.recorder
        if recorder is not None:
            if torch.Tag.nondeterministic_seeded in func.tags:
                recorder.drew(func, args, kwargs or {})
            if func._schema.is_mutable:  # noqa: SLF001
                recorder.wrote(list(written_by(func, args, kwargs or {})))
        self._inside = True
        try:
            result = self._result(func, types, args, kwargs or {})
        finally:
            self._inside = False
        if recorder is not None:
            recorder.called(func, args, kwargs or {}, result)
        if func is _LIFT and recorder is not None and type(args[0]) is Tensor:
            assert isinstance(result, Tensor)  # noqa: S101
            recorder.lifted(result, args[0])
        return result

    def _result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator, with values where its result's size depends on them."""
        if self.recorder is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = args
        if reads_values(func):
            found = self.values.computed(func, args, kwargs, self.from_tensor)
            if found is not None:
                return found[0]
            given = self.values.with_numbers(func, args, self.from_tensor)
        result = super().__torch_dispatch__(func, types, given, kwargs)
        self.values.note(func, args, kwargs, result)
        return result


@contextlib.contextmanager
def lists_of_constants(values: ConstantValues) -> Iterator[None]:
    """Let modes see ``tolist()`` of a constant, which calls operators otherwise."""
    kind: Any = FakeTensor
    own = kind.tolist

    def tolist(tensor: Tensor) -> Any:
        call = Tensor.tolist if values.has_value(tensor) else own
        return call(tensor)

    kind.tolist = tolist
    try:
        yield
    finally:
        kind.tolist = own


@contextlib.contextmanager
def swapped(
    modules: Iterable[tuple[str, nn.Module]],
    make: Callable[[Tensor], Tensor],
    *,
    leaves_replaced: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Give modules other parameters and buffers temporarily; yield these by name.

    Those that modules share stay shared. ``leaves_replaced``: whether those that were
    replaced meanwhile stay.
    """
    memo: dict[int, Tensor] = {}
    names: dict[str, Tensor] = {}
    undo: list[tuple[dict[str, Any], str, Any, Any]] = []
    seen: set[int] = set()
    try:
        for prefix, part in modules:
            for held in (part._parameters, part._buffers):  # noqa: SLF001
                if id(held) in seen:  # see Note [Copied norms]
                    continue
                seen.add(id(held))
                for name, tensor in held.items():
                    # An earlier call may have registered a buffer without values.
                    if tensor is None or isinstance(tensor, FakeTensor):
                        continue
                    if id(tensor) not in memo:
                        memo[id(tensor)] = make(tensor)
                        full = f"{prefix}.{name}" if prefix else name
                        names[full] = memo[id(tensor)]
                    undo.append((held, name, tensor, memo[id(tensor)]))
                    held[name] = memo[id(tensor)]  # type: ignore[assignment]
        yield names
    finally:
        for held, name, tensor, made in reversed(undo):
            if not leaves_replaced or held.get(name) is made:
                held[name] = tensor


def held_by(root: nn.Module) -> dict[str, Tensor | None]:
    """Return every parameter and buffer that modules hold now, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, part in root.named_modules()
        for held in (part._parameters, part._buffers)  # noqa: SLF001
        for name, tensor in held.items()
    }


@final
class Fakes:
    """Tensors without values for a module's parameters and buffers, made once."""

    def __init__(self, root: nn.Module) -> None:
        self.mode = RecordingMode()
        self._root = root
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        held = {id(t): t for t in (*root.parameters(), *root.buffers())}
        self._shared = Counter(storage_of(t) for t in held.values() if _is_plain(t))
        self._changing = {
            id(buffer)
            for part in root.modules()
            if isinstance(part, nn.modules.batchnorm._NormBase)  # noqa: SLF001
            for buffer in part._buffers.values()  # noqa: SLF001
        }
        """The ids of statistics, which forward updates."""

    def trained(self) -> dict[int, str]:
        """Return the memory of each parameter, with its name."""
        return {
            storage_of(self.of(parameter)): name
            for name, parameter in self._root.named_parameters()
        }

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's twin without values."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._make(tensor)
            twin = self._made[id(tensor)][1]
            if id(tensor) in self._changing:
                self.mode.values.leave_out(twin)
            else:
                self.mode.values.hold(twin, tensor)
        return self._made[id(tensor)][1]

    def _make(self, tensor: Tensor) -> Tensor:
        if not _is_plain(tensor) or self._shared[storage_of(tensor)] != 1:
            return self.mode.from_tensor(tensor)
        # Does the same by hand, in a tenth of the time.
        empty = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        twin = FakeTensor(self.mode, empty, tensor.device)
        if isinstance(tensor, nn.Parameter):
            # As an argument, torch takes this from 2.12 on only.
            twin._is_param = True  # noqa: SLF001
        return twin.requires_grad_(tensor.requires_grad)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a dense leaf that alone fills its storage."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_leaf
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_view()  # noqa: SLF001
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )


_ADDRESS: Any = getattr(torch._C, "_storage_address", None)  # noqa: SLF001


def storage_of(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory."""
    if _ADDRESS is not None:  # no function that a recorder intercepts
        return int(_ADDRESS(tensor))
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Leave out PyTorch's log of an operation that fails on tensors without values.

    It logs a whole traceback, of an error that is then raised in one sentence.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)
