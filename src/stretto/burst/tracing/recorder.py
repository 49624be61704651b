"""Record the tensor operations of one forward, with every size concrete.

# Note [How a module is recorded]
The module's own Python code runs, on tensors without storage. A function mode
intercepts each call of a torch function. Calls of ``torch.nn`` modules and of
``autograd.Function`` are intercepted and recorded as one operation, so that their
hooks, state and backward are unchanged. Sizes and decisions are plain numbers, as in a
usual run; comparing the records of two batches finds those that follow the number of
samples, see ``operations``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from stretto.burst.boundary import checkpoint_hook, in_checkpoint
from stretto.burst.memory import tensors_among
from stretto.burst.tracing.addresses import identities_refused, refuse_address
from stretto.burst.tracing.around import (
    dispatch_modes_now,
    is_of_user,
    saved_hooks_now,
)
from stretto.burst.tracing.copied_norms import CopiedNorms, is_of, torch_forward
from stretto.burst.tracing.dropout_rows import require_rows
from stretto.burst.tracing.fakes import (
    AbstractRecorder,
    held_by,
    lists_of_constants,
    storage_of,
    swapped,
)
from stretto.burst.tracing.freezing import may_read_users
from stretto.burst.tracing.inner_calls import (
    CallsOfModule,
    InnerCall,
    inner_call,
)
from stretto.burst.tracing.patching import patched
from stretto.burst.tracing.questions import collectives_refused, seeds_refused
from stretto.burst.tracing.records import SOURCE, Context, Fixed, Record, Recording, Ref
from stretto.burst.tracing.replaced import (
    is_torchs_forward,
    line_of,
    own_function,
    refused_inside,
)
from stretto.burst.tracing.rerun import TorchCalls
from stretto.burst.tracing.settings import ModuleSettings
from stretto.burst.tracing.source_lines import line_setting, source_line
from stretto.burst.tracing.torch_modules import BatchNorm, Dropout
from stretto.burst.tracing.views import step_of, viewed, written_through
from stretto.burst.tracing.writes import (
    buffers_of,
    is_torchs,
    require_known_state,
    write_error,
    written_argument,
)
from stretto.errors import SpecError

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from stretto.burst.tracing.fakes import Fakes, RecordingMode
    from stretto.burst.tracing.reads import Reads
    from stretto.burst.tracing.views import Steps


_REFUSED = {
    "register_hook": "its effect on the gradient is outside the recorded operations",
    "retain_grad": "the gradient would be of another tensor",
    "backward": "gradients within forward can't be split over ranks",
    "register_post_accumulate_grad_hook": "forward can't hook gradients",
    "requires_grad_": "what needs a gradient must not change in forward",
    "set_": "the storage of a tensor must not change in forward",
    "resize_": "the storage of a tensor must not change in forward",
}


def is_leaf(module: nn.Module, root: nn.Module) -> bool:
    """Return whether a module is one operation: torch's own, or one with hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if module is root:
        return False
    if (
        module._forward_hooks  # noqa: SLF001
        or module._forward_pre_hooks  # noqa: SLF001
        or module._backward_hooks  # noqa: SLF001
        or module._backward_pre_hooks  # noqa: SLF001
    ):
        return True
    forward = getattr(type(module), "forward", None)
    return (
        "forward" not in module.__dict__
        and is_torchs_forward(forward)
        and forward is not nn.Sequential.forward
    )


def leaves_of(root: nn.Module) -> list[bool]:
    """Return which modules are one operation."""
    return [is_leaf(part, root) for part in root.modules()]


_LAYOUT = {
    Tensor.dim_order,
    Tensor.is_contiguous,
    Tensor.storage_offset,
    Tensor.stride,
}
"""Functions that say how a tensor lies in memory."""

_READ_OUT = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__repr__,
    Tensor.__format__,
}
"""Functions that give a tensor's values, and that no operator calls."""

_SEED = 0x5EED_0FF0_57E7


class UnseenTensor(SpecError):
    """Forward reads a tensor without values that the recording did not see made."""


@final
class OperationRecorder(AbstractRecorder, TorchFunctionMode):
    """Records operations while it is entered."""

    def __init__(
        self,
        root: nn.Module,
        mode: RecordingMode,
        trained: dict[int, str],
        batch: int,
        check: Callable[[int, Record], None] | None,
        calls: TorchCalls,
    ) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._batch = batch
        self._check = check
        self._calls = calls
        self.recording = Recording(calls)
        self._root = root
        self._mode = mode
        self._refs: dict[int, Ref | Fixed] = {}
        self._alive: list[Any] = []
        self._written: dict[int, list[_Write]] = {}
        """By storage: what was written into it."""

        self._views: dict[int, tuple[Tensor, Steps]] = {}
        """By id: of which tensor it is a view, and how it is made."""

        self._modules = {id(part): name for name, part in root.named_modules()}
        self._parameters = {
            id(part): tuple(part._parameters.values())  # noqa: SLF001
            for part in root.modules()
        }
        self._copied = CopiedNorms(
            part
            for part in root.modules()
            if part is not root and not is_leaf(part, root)
        )
        self._settings = ModuleSettings(root)
        self._depth = 0
        self._saved = saved_hooks_now()
        self.modes = 0
        """The number of modes of operators around the call of the model."""
        self._default = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._draws = 0
        self._seed = _SEED
        self._last_draw = ""
        self._in_dropout = 0
        self._around: Any = None
        """The hook of the checkpoint around the running operation."""
        self._own_run: nn.Module | None = None
        """The module that runs as one operation."""
        self._norms: list[str] = []
        self._keeps_state = False
        self._given: set[int] = set()
        """The memory of the parameters that the running operation is given or owns."""
        self._borrowed: dict[str, None] = {}
        self._lifted: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors that were made from data by constructors, with their values."""
        self._autocast: list[tuple[str, torch.dtype, bool, bool]] = []
        self._fakes: dict[int, Tensor] = {}
        self._trained = trained
        """Parameters' names by their memory."""
        self.registered: frozenset[int] = frozenset()
        """The ids of the model's parameters, which forward may also hold elsewhere."""
        self._in_reentrant = 0
        self._held: set[int] = set()
        """The memory of what modules hold, and of constants."""
        self._memory_written: set[int] = set()
        self._inputs: set[int] = set()
        """The ids of the tensors with which the model is called."""
        self._input_memory: set[int] = set()
        self._running = ""
        """The name of the module that runs as one operation."""
        self.varying: set[int] = set()
        """The memory of what is computed from samples, parameters or buffers."""

    # Tensors.

    def knows(self, tensor: Tensor, ref: Ref | Fixed) -> None:
        """Give a tensor a name."""
        self._refs[id(tensor)] = ref
        if isinstance(ref, Fixed):
            self._held.add(storage_of(tensor))
        self._alive.append(tensor)

    def knows_cached(self, tensor: Tensor, name: str) -> None:
        """Give a tensor that an earlier call left in a cache a name."""
        self.knows(tensor, Fixed(name))
        self.recording.cached[name] = tensor

    def ref(self, tensor: Tensor, place: str) -> Ref | Fixed:
        """Return a tensor's name."""
        found = self._refs.get(id(tensor))
        if found is not None:
            return self._current(tensor, found, place)
        if isinstance(tensor, FakeTensor):
            made = self._lifted.get(id(tensor))
            if made is not None:
                name = self._constant(made[1], place)
                self.knows(tensor, name)
                return name
            raise UnseenTensor(
                f"{place}: reads a tensor that was made by something capture does not "
                "see (a compiled or scripted function, a constructor such as "
                "torch.FloatTensor(3), or an earlier call that kept it): make it by a "
                "torch function such as torch.empty, or move it into a module"
            )
        return self._constant(tensor, place)

    def _constant(self, tensor: Tensor, place: str) -> Fixed:
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            raise SpecError(
                f"{place}: reads a tensor that needs a gradient but is not a parameter "
                "of the model: make it a torch.nn.Parameter of a module"
            )
        for name, value in self.recording.constants.items():
            if value is tensor:
                return Fixed(name)
        # No attribute of a module has such a name.
        name = f"<constant {len(self.recording.constants)}>"
        self.recording.constants[name] = tensor
        return Fixed(name)

    def _refuse_unregistered(self, given: Any, result: Any, place: str = "") -> None:
        """Refuse a parameter of no module if a gradient would arrive at it."""
        found = next(
            (
                tensor
                for _, tensor in _leaves(given)
                if isinstance(tensor, nn.Parameter)
                and not isinstance(tensor, FakeTensor)
                and tensor.requires_grad
                and id(tensor) not in self.registered
            ),
            None,
        )
        if found is None or not any(t.requires_grad for _, t in _leaves(result)):
            return
        raise SpecError(
            f"{place or source_line()}: reads a torch.nn.Parameter of shape "
            f"{tuple(found.shape)} that needs a gradient but is not a parameter of the "
            "model: register it, for example by an nn.ModuleList or nn.ParameterDict "
            "instead of a list or dict, or freeze it by requires_grad_(False)"
        )

    def _current(self, tensor: Tensor, ref: Ref | Fixed, place: str) -> Ref | Fixed:
        """Return the name of a tensor after all writes into its memory.

        See Note [Writes through views].
        """
        if not self._written or not isinstance(tensor, FakeTensor):
            return ref
        number = ref.number if isinstance(ref, Ref) else -1
        owner, steps = self._views.get(id(tensor), (None, ()))
        later = [
            write
            for write in self._written.get(storage_of(tensor), ())
            if write.tensor != id(tensor) and write.number > number
        ]
        if not later:
            return ref
        for write in later:
            if owner is None or write.owner != id(owner):
                raise SpecError(
                    f"{write.place}: writes in place into memory that {place} reads "
                    "through another tensor: it is unknown which layers see it. Write "
                    "it as an operation that returns a new tensor"
                )
        assert owner is not None  # noqa: S101
        context = self.recording.records[number].context
        args = (self.ref(owner, place), steps)
        return self._derived(viewed, args, tensor, place, context)

    def _derived(
        self, target: Any, args: Any, tensor: Tensor, place: str, context: Context
    ) -> Ref:
        """Record an operation that forward has done by memory that tensors share."""
        record = Record(
            kind="call_function",
            target=target,
            args=args,
            kwargs={},
            place=place,
            context=context,
            aliases=target is viewed,
        )
        self._add(record, tensor, [])
        return Ref(len(self.recording.records) - 1)

    def _write_owner(self, target: Tensor, record: Record, number: int) -> None:
        """Record the tensor that owns the memory again, if it is known."""
        owner, steps = self._views.get(id(target), (target, ()))
        is_untracked = owner.requires_grad and not torch.is_grad_enabled()
        made = self._refs.get(id(target))
        if is_untracked or not isinstance(made, Ref) or made.number != number:
            return
        write = self._written[storage_of(target)].pop()
        before = self.ref(owner, record.place) if steps else made
        if steps:
            args, context = (before, made, steps), record.context
            self._derived(written_through, args, owner, record.place, context)
        write.owner = id(owner)
        self._written[storage_of(target)].append(write)

    # Operations.

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and record it unless a recorded module runs it."""
        func, kwargs = own_function(func), kwargs or {}
        if func in _LAYOUT:
            self._note_layout_read(func, args[0], sys._getframe(1))  # noqa: SLF001
        refuse_address(func)
        if func in _READ_OUT and (found := self._read_out(func, args, kwargs)):
            if not self._depth:
                self._calls.add(func, args, kwargs, found[0])
            return found[0]
        if self._depth:
            self._note_borrowed((args, kwargs))
            result = func(*args, **kwargs)
            self._refuse_unregistered((args, kwargs), result)
            return result
        result = self._torch_function(func, args, kwargs)
        self._calls.add(func, args, kwargs, result)
        return result

    def _read_out(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Return a constant's values as no tensor, or None if it has none."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            given = (self._fake(args[0]), *args[1:])
        return self._mode.values.read_out(func, given, kwargs)

    def _torch_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function, and record it if it gives tensors."""
        name = getattr(func, "__name__", str(func))
        if self._asks_for_gradient(func, name, args, kwargs):
            return func(*args, **kwargs)
        if self._copied.counts(name, args, source_line):
            return func(*args, **kwargs)
        if is_of(func) and (norm := self._copied.normalizing(args, kwargs)) is not None:
            return self._copied_norm(norm, *args, **kwargs)
        if name in _REFUSED:
            place = source_line()
            # Its transforms mark what they derive by themselves.
            if torch._C._functorch.maybe_current_level() is not None:  # noqa: SLF001
                raise SpecError(
                    f"{place}: torch.func.grad and its like can't be recorded: "
                    "gradients within forward can't be split over ranks. Write the "
                    "derivative as operations or as a torch.autograd.Function, or "
                    "compute it outside of the model"
                )
            raise SpecError(
                f"{place}: {name} in forward is not captured: {_REFUSED[name]}. Move "
                "it out of the model, or write it as a torch.autograd.Function"
            )
        if func is torch.autograd.grad:
            raise SpecError(
                f"{source_line()}: torch.autograd.grad in forward is not captured: it "
                "reads other layers' backward. Compute gradients outside of the model"
            )
        if name == "__set__":
            raise SpecError(
                f"{source_line()}: sets {func.__self__.__name__!r} of a tensor in "
                "forward: write it as an operation that gives a new tensor"
            )
        if name == "__get__":
            return self._property(func, args)
        if func is Tensor.new:
            return self._legacy_new(*args, **kwargs)
        kind: str = "call_function"
        target: Any = func
        method = _method_of(func)
        if method is not None:
            kind, target = "call_method", method
        return self.operation(kind, target, func, args, kwargs)

    def _note_borrowed(self, value: Any) -> None:
        """Record parameters that an operation reads without being given them."""
        for _, tensor in _leaves(value):
            if isinstance(tensor, FakeTensor):
                storage = storage_of(tensor)
                name = self._trained.get(storage)
                if name is not None and storage not in self._given:
                    self._borrowed[name] = None

    def _asks_for_gradient(self, func: Any, name: str, args: Any, kwargs: Any) -> bool:
        """Return whether a call requests a gradient of a computed tensor.

        No other gradient depends on it, and nothing else holds the tensor.
        """
        value = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
        is_set = name == "__set__" and func.__self__.__name__ == "requires_grad"
        if not (is_set or name == "requires_grad_") or value is not True:
            return False
        ref = self._refs.get(id(args[0]))
        return (
            isinstance(ref, Ref) and ref != SOURCE and id(args[0]) not in self._inputs
        )

    def _legacy_new(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record ``x.new(...)`` as what it is for sizes or for values."""
        target = "new_empty"
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            target = "new_tensor"
        elif len(args) != 1 or isinstance(args[0], int):
            args = (args or (0,),)
        call = getattr(Tensor, target)
        return self.operation("call_method", target, call, (tensor, *args), kwargs)

    def _property(self, func: Any, args: Any) -> Any:
        name = func.__self__.__name__
        value = func(*args)
        if name in ("requires_grad", "is_leaf", "grad_fn"):
            self._note_gradient_read(args[0], sys._getframe(3))  # noqa: SLF001
        is_grad = name in ("grad", "_grad", "_base") and may_read_users(
            sys._getframe(3).f_globals.get("__name__")  # noqa: SLF001
        )
        # A parameter has no gradient at capture, and may have one later.
        if not is_grad and not (
            isinstance(value, Tensor) and isinstance(args[0], Tensor)
        ):
            return value
        if name in ("grad", "_grad", "_base"):
            raise SpecError(
                f"{source_line()}: reads .{name} of a tensor in forward, which is not "
                "known when layers run on other ranks: compute it outside of the model"
            )
        return self.operation("call_function", getattr, _attribute, (args[0], name), {})

    def _note_layout_read(
        self, func: Any, tensor: Tensor, caller: types.FrameType
    ) -> None:
        """Note that the user's code reads how a tensor lies in memory."""
        if not may_read_users(caller.f_globals.get("__name__")):
            return
        if not isinstance(self._refs.get(id(tensor)), Fixed):
            place = self.recording.reads_layout or source_line()
            self.recording.reads_layout = place
            if func is Tensor.storage_offset:
                place = self.recording.reads_offset or source_line()
                self.recording.reads_offset = place

    def _note_gradient_read(self, tensor: Tensor, caller: types.FrameType) -> None:
        """Note that the user's code reads whether a tensor needs a gradient."""
        if not may_read_users(caller.f_globals.get("__name__")):
            return
        self.recording.asks_for_gradients = True
        ref = self._refs.get(id(tensor))
        may_need = tensor.is_floating_point() or tensor.is_complex()
        if may_need and not isinstance(ref, Fixed) and not tensor.requires_grad:
            place = self.recording.without_gradient or source_line()
            self.recording.without_gradient = place

    def operation(
        self,
        kind: str,
        target: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run something as one operation and record it."""
        if torch.get_default_dtype() is not self._default:
            raise SpecError(
                f"{source_line()}: runs under another torch.set_default_dtype() than "
                "the call of the model, which layers would not: set it outside of the "
                "model, or pass dtype to what makes tensors"
            )
        self._refuse_modes_within()
        self._depth += 1
        try:
            return self._operation(kind, target, call, args, kwargs, source_line())
        finally:
            self._depth -= 1

    def _refuse_modes_within(self) -> None:
        """Refuse hooks on saved tensors and modes of operators that forward enters."""
        what = ""
        if (now := saved_hooks_now()) != self._saved and is_of_user(now):
            what = "torch.autograd.graph.saved_tensors_hooks"
        elif (modes := dispatch_modes_now())[self.modes :]:
            what = next(
                (type(m).__name__ for m in modes[self.modes :] if is_of_user(m)), ""
            )
        if what:
            raise SpecError(
                f"{source_line()}: runs within {what} in forward, which layers on "
                "other ranks would not enter: enter it around the call of the model, "
                "or compute this in a torch.autograd.Function"
            )

    def _operation(
        self,
        kind: str,
        target: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: str,
    ) -> Any:
        real_args, real_kwargs = self._fake(args), self._fake(kwargs)
        tensors = [t for _, t in _leaves((args, kwargs))]
        before = [_version(t) for t in tensors]
        named = None
        if tensors:
            named = (self._named(args, place), self._named(kwargs, place))
        self._draws, self._norms, self._keeps_state = 0, [], False
        self._inner: list[InnerCall] = []
        self._has_own_lines = target is apply_function
        self._of_module: CallsOfModule | None = None
        self._given = {storage_of(t) for _, t in _leaves((real_args, real_kwargs))}
        if kind == "call_module":
            part = self._root.get_submodule(target)
            self._given |= {storage_of(p) for p in part.parameters()}
            if not type(part).__module__.startswith("torch.") or _has_hooks(part):
                self._has_own_lines, self._of_module = True, CallsOfModule()
        self._borrowed = {}
        self._running = target if kind == "call_module" else ""
        self._around = checkpoint_hook()
        result = call(*real_args, **real_kwargs)
        self._refuse_unregistered(tensors, result, place)
        written = [t for t, v in zip(tensors, before, strict=True) if _version(t) != v]
        if not written and not _holds(result):
            return result
        if self._of_module is not None:
            given = (t for _, t in _leaves(result) if isinstance(t, FakeTensor))
            self._inner = self._of_module.before([*given, *written])
        record = Record(
            kind=kind,
            target=target,
            args=named[0] if named else args,
            kwargs=named[1] if named else kwargs,
            place=place,
            context=Context(
                grad=torch.is_grad_enabled(), autocast=tuple(self._autocast)
            ),
            draws=self._draws > 0,
            norms=tuple(self._norms),
            keeps_state=self._keeps_state,
            inner=tuple(self._inner),
            borrowed=tuple(self._borrowed),
            keeps_values=(
                not written
                and kind != "call_module"
                and torch.is_grad_enabled() is self._grad
                and len(tensors) == 1
                and _keeps_values(real_args, result, self._inner)
            ),
        )
        if kind == "call_method" and target == "__setitem__":
            record.kind, record.target = "call_function", set_item
        self._note_writes(record, written, args, kwargs)
        number = len(self.recording.records)
        self._add(record, args[0] if record.target is set_item else result, tensors)
        if written:
            self._write_owner(written[0], record, number)
        return result

    def _note_writes(
        self, record: Record, written: list[Tensor], args: Any, kwargs: Any
    ) -> None:
        if not written:
            return
        target = written[0]
        ref = self._refs.get(id(target))
        shown = self._fakes.get(id(target), target)
        if (
            isinstance(ref, Fixed)
            or not isinstance(target, FakeTensor)
            or storage_of(shown) in self._held
        ):
            what = repr(ref.name) if isinstance(ref, Fixed) else "that it reads"
            if isinstance(ref, Fixed) and ref.name in self.recording.constants:
                raise SpecError(
                    f"{record.place}: writes into a tensor that no module holds: make "
                    "it with torch.tensor or torch.empty, or copy it with clone()"
                )
            raise SpecError(write_error(record.place, what, record))
        record.writes = written_argument(record, args, kwargs, target)
        if target._is_view():  # noqa: SLF001
            record.aliases = True
        number = len(self.recording.records)
        self._written.setdefault(storage_of(target), []).append(
            _Write(id(target), record.place, number)
        )
        self.recording.writers.setdefault(storage_of(target), []).append(number)

    def _add(self, record: Record, result: Any, given: list[Tensor]) -> None:
        number = len(self.recording.records)
        if self._check is not None:
            self._check(number, record)
        self.recording.records.append(record)
        storages = {storage_of(t) for t in given if isinstance(t, FakeTensor)}
        for path, tensor in _leaves(result):
            record.tensors[path] = tensor
            if storage_of(tensor) in storages:
                record.aliases = True
                if len(given) == 1 and given[0] is not tensor:
                    self._note_view(record, path, tensor, given[0])
            self.knows(tensor, Ref(number, path))

    def _note_view(
        self, record: Record, path: tuple[Any, ...], tensor: Tensor, base: Tensor
    ) -> None:
        step = step_of(record, path)
        if step is not None and tensor.requires_grad == base.requires_grad:
            owner, steps = self._views.get(id(base), (base, ()))
            self._views[id(tensor)] = (owner, (*steps, step))

    def _named(self, value: Any, place: str) -> Any:
        if isinstance(value, Tensor):
            return self.ref(value, place)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._named(v, place) for v in value))
        if isinstance(value, (tuple, list)):
            return type(value)(self._named(v, place) for v in value)
        if type(value) is dict or isinstance(value, dict):
            return {k: self._named(v, place) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(
                *(self._named(v, place) for v in (value.start, value.stop, value.step))
            )
        return value

    def _fake(self, value: Any) -> Any:
        """Replace tensors with values that belong to no module by fake ones."""
        if isinstance(value, Tensor):
            if isinstance(value, FakeTensor):
                return value
            if id(value) not in self._fakes:
                self._alive.append(value)
                self._fakes[id(value)] = self._mode.from_tensor(value)
                self._mode.values.hold(self._fakes[id(value)], value)
                self._held.add(storage_of(self._fakes[id(value)]))
            return self._fakes[id(value)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._fake(v) for v in value))
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            return type(value)(self._fake(v) for v in value)
        if type(value) is dict:
            return {k: self._fake(v) for k, v in value.items()}
        return value

    # Modules and functions.

    def module(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Run a module, as one operation if it is a leaf."""
        if self._depth:
            return self._module_within(call, module, args, kwargs)
        if (
            id(module) not in self._modules
            or not is_leaf(module, self._root)
            or not self._has_own_parameters(module)
        ):
            return call(module, *args, **kwargs)
        result = self._leaf(call, module, args, kwargs)
        self._calls.add(module, args, kwargs, result)
        return result

    def _module_within(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Run a module within an operation, and note a norm or dropout."""
        if call is not torch_forward and (why := refused_inside(module)) is not None:
            raise SpecError(f"{source_line()}: {why}")
        # Layers are computed without a checkpoint that is around the operation.
        is_dropped = isinstance(module, Dropout) and (
            not module.p or checkpoint_hook() is self._around
        )
        if (
            module.training
            and isinstance(module, BatchNorm | Dropout)
            and not is_dropped
            and in_checkpoint()
        ):
            what, also = "update its statistics twice", ""
            if isinstance(module, Dropout):
                what = "draw other masks than on its first run"
                also = (
                    ", or call torch.nn.functional.dropout there, in a checkpoint with "
                    "use_reentrant=False"
                )
            raise SpecError(
                f"{source_line()}: {type(module).__name__} is in a checkpoint, which "
                f"runs it again in backward: it would {what}. Move it out of the "
                f"checkpoint{also}"
            )
        if isinstance(module, nn.RNNBase):
            self._require_own_time(module, args, kwargs)
        if isinstance(module, BatchNorm):
            self._norms.append(self._modules.get(id(module), ""))
        if not isinstance(module, Dropout):
            return call(module, *args, **kwargs)
        if module.training and module.p and module is not self._own_run:
            given = next(iter((*args, *kwargs.values())), None)
            within = self._root.get_submodule(self._running) if self._running else None
            require_rows(given, self._batch, source_line(), within)
        self._in_dropout += 1
        try:
            return call(module, *args, **kwargs)
        finally:
            self._in_dropout -= 1

    def _require_own_time(self, module: nn.RNNBase, args: Any, kwargs: Any) -> None:
        """Refuse a recurrent module whose steps are the samples, before it takes them.

        Without values each of many steps is slow.
        """
        given = next(iter((*args, *kwargs.values())), None)
        if not isinstance(given, Tensor) or self._batch < _MANY_STEPS:
            return
        time, rows = (*given.shape[:-1], 1)[:2]
        if module.batch_first and given.dim() == 3:
            time, rows = rows, time
        if time and time % self._batch == 0 and rows % self._batch:
            kind = type(module).__name__
            raise SpecError(
                f"{source_line()}: {kind} mixes samples: they are its steps in time, "
                "so that each depends on those before it, which may be on other ranks. "
                f"Create {kind} with batch_first=True, or transpose its input"
            )

    def _leaf(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Run a module as one operation."""
        place = source_line()
        self._refuse_leaf(module, place)
        _require_own_forwards(module, self._modules[id(module)])

        def run(*more: Any, **named: Any) -> Any:
            # Counted as within itself: a norm or dropout is recorded as such.
            buffers = buffers_of(module)
            versions = [_version(b) for _, b, _ in buffers]
            before, draws = set(self._memory_written), self._draws
            self._own_run = module
            try:
                result = self.module(call, module, more, named)
            finally:
                self._own_run = None
            for (name, buffer, owner), version in zip(buffers, versions, strict=True):
                new = storage_of(buffer) in self._memory_written - before
                if _version(buffer) != version or new:
                    require_known_state(owner, name, place)
                    if in_checkpoint() or self._in_reentrant:
                        raise SpecError(
                            f"{place}: {type(module).__name__} is in a checkpoint, "
                            "which runs it again in backward: it would update "
                            f"{name!r} twice. Move it out of the checkpoint"
                        )
                    self._keeps_state |= not isinstance(owner, BatchNorm)
            if self._keeps_state or self._draws > draws:
                _require_uncached(module, place)
            own = {storage_of(buffer) for _, buffer, _ in buffers}
            if not is_torchs(module):
                self._require_no_writes(self._memory_written - before - own, place)
            return result

        return self.operation(
            "call_module", self._modules[id(module)], run, args, kwargs
        )

    def _copied_norm(self, norm: nn.Module, input: Tensor, *_: Any, **__: Any) -> Any:  # noqa: A002
        """Record torch's forward of a norm. See Note [Copied norms]."""
        self._refuse_leaf(norm, source_line())

        def run(rows: Tensor) -> Any:
            return self._module_within(torch_forward, norm, (rows,), {})

        name = self._modules[id(norm)]
        return self.operation("call_module", name, run, (input,), {})

    def _refuse_leaf(self, module: nn.Module, place: str) -> None:
        """Refuse a module that would do other things when it runs as an operation."""
        if (change := self._settings.change_in(module)) is not None:
            raise SpecError(f"{place}: {change}")
        if (
            self._in_reentrant
            and isinstance(module, BatchNorm)
            and module.training
            and module.track_running_stats
        ):
            raise SpecError(
                f"{place}: {type(module).__name__} is in a checkpoint, which runs it "
                "again in backward: it would update its statistics twice. Move it out "
                "of the checkpoint"
            )
        if getattr(module, "scale_grad_by_freq", False):
            raise SpecError(
                f"{place}: {type(module).__name__} with scale_grad_by_freq divides a "
                "word's gradient by its count in the batch, which one rank "
                "does not know. Leave out scale_grad_by_freq"
            )

    def _has_own_parameters(self, module: nn.Module) -> bool:
        """Return whether a module runs with its own parameters.

        ``torch.func.functional_call`` runs it with other tensors.
        """
        return all(
            one is two
            for part in module.modules()
            for one, two in zip(
                part._parameters.values(),  # noqa: SLF001
                self._parameters.get(id(part), ()),
                strict=False,
            )
        )

    def _require_no_writes(self, storages: Collection[Any], place: str) -> None:
        """Refuse what hooks of a module write into buffers of other modules."""
        if not storages:
            return
        for name, buffer, owner in buffers_of(self._root):
            if storage_of(buffer) in storages:
                where = self._modules.get(id(owner), "")
                full = f"{where}.{name}" if where else name
                raise SpecError(
                    f"{place}: a hook or the code of a module writes into the buffer "
                    f"{full!r} of another in forward: ranks would differ in it, as "
                    "each runs other layers and samples. Update it outside of the model"
                )

    def function(
        self, call: Callable[..., Any], kind: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run an ``autograd.Function`` as one operation."""
        if threading.get_ident() != self._thread:
            return call(kind, *args, **kwargs)
        if self._depth:
            if kind is torch.utils.checkpoint.CheckpointFunction:
                raise SpecError(
                    f"{source_line()}: a checkpoint with use_reentrant=True inside a "
                    "module that has hooks hides its gradients: pass "
                    "use_reentrant=False"
                )
            return call(kind, *args, **kwargs)
        self._calls.has_functions = True
        if kind is torch.utils.checkpoint.CheckpointFunction:
            return self._reentrant(args[0], args[2:])
        result = self.operation(
            "call_function", apply_function, call, (kind, *args), kwargs
        )
        self._calls.add(kind, args, kwargs, result)
        return result

    @property
    def is_within(self) -> bool:
        """Whether an operation runs now."""
        return self._depth > 0

    def _reentrant(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the function of a checkpoint with ``use_reentrant=True``."""
        self._in_reentrant += 1
        try:
            result = run(*args)
        finally:
            self._in_reentrant -= 1
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - not forward's own calls
            needs = any(tensor.requires_grad for _, tensor in _leaves(args))
            gives = any(tensor.requires_grad for _, tensor in _leaves(result))
        if gives and not needs:
            raise SpecError(
                f"{source_line()}: a checkpoint with use_reentrant=True, none of "
                "whose inputs needs a gradient, gives no gradient to the parameters in "
                "it: pass use_reentrant=False, or freeze them"
            )
        return result

    def drew(self, operator: Any, args: Any, kwargs: Any) -> None:
        """Record that random numbers were drawn."""
        self._last_draw = source_line()
        self._require_own_seed()
        # Another seed, so that an earlier state is noticed.
        self._seed += 1
        torch.default_generator.manual_seed(self._seed)
        if kwargs.get("generator") is not None:
            raise SpecError(
                f"{source_line()}: draws random numbers from a generator of its own: "
                "ranks draw by sample, from seeds of their own. Leave out generator="
            )
        if self._in_dropout:
            return
        schema = operator._schema  # noqa: SLF001
        for i, argument in enumerate(schema.arguments):
            if argument.name in ("dropout_p", "dropout"):
                value = args[i] if i < len(args) else kwargs.get(argument.name, 0.0)
                if not value:
                    return
        self._draws += 1

    def _require_own_seed(self) -> None:
        """Refuse a forward that draws and sets the generator."""
        if self._last_draw and torch.initial_seed() != self._seed:
            raise SpecError(
                f"{self._last_draw}: draws random numbers where forward sets a seed or "
                "a state of the generator: ranks draw by sample, from seeds of their "
                "own. Set seeds outside of the model"
            )

    def called(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operator that an operation calls."""
        self._note_varying(operator, args, kwargs, result)
        if not self._depth:
            return
        place = source_line() if self._has_own_lines else ""
        call = inner_call(operator, args, kwargs, result, place, self._varies)
        if self._of_module is None:
            self._inner.append(call)
        else:
            self._of_module.add(call, args, kwargs, result)

    def _note_varying(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note results that are computed from what differs between calls."""
        varies = torch.Tag.nondeterministic_seeded in operator.tags or any(
            storage_of(tensor) in self.varying
            for tensor in tensors_among((*args, *kwargs.values()))
        )
        fixed = self.recording.fixed_memory
        for tensor in tensors_among(result):
            if varies:
                self.varying.add(storage_of(tensor))
                fixed.discard(storage_of(tensor))
            else:  # its memory may have been another tensor's
                self.varying.discard(storage_of(tensor))
                fixed.add(storage_of(tensor))

    def _varies(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self.varying

    def lifted(self, tensor: Tensor, value: Tensor) -> None:
        """Record the value of a tensor that was made from data."""
        self._lifted[id(tensor)] = tensor, value
        self._calls.made(tensor, value)

    def wrote(self, tensors: Iterable[Tensor]) -> None:
        """Record that an operation writes into tensors, wherever it is called."""
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage in self._input_memory:
                raise self._writes_input(source_line())
            self._memory_written.add(storage)
            self.recording.fixed_memory.discard(storage)
            name = self._trained.get(storage)
            if name is not None:
                raise self._writes_parameter(name)

    def called_with(self, tensors: Iterable[Tensor]) -> None:
        """Record the tensors with which the model is called."""
        for tensor in tensors:
            self._inputs.add(id(tensor))
            self._input_memory.add(storage_of(tensor))

    def _writes_input(self, place: str) -> SpecError:
        what = ""
        if self._running:
            kind = type(self._root.get_submodule(self._running)).__name__
            what = f"module {self._running!r} ({kind}) "
        return SpecError(
            f"{place}: {what}writes in place into an input of the model. The program's "
            "own tensor would keep its values, as layers compute with copies: write it "
            "as an operation that returns a new tensor (inplace=False), or clone() the "
            "input first"
        )

    def _writes_parameter(self, name: str) -> SpecError:
        way = "Update it outside of the model, after the optimizer's step"
        owner = self._root.get_submodule(name.rpartition(".")[0])
        if getattr(owner, "max_norm", None) is not None:
            way = "Leave out max_norm, and limit the norms after each optimizer's step"
        return SpecError(
            f"{source_line()}: writes into the parameter {name!r} in forward: ranks "
            f"would differ in it, as each runs other layers and samples. {way}"
        )

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Leave what runs in the context out of the recording."""
        recorder, self._mode.recorder = self._mode.recorder, None
        try:
            with torch._C.DisableTorchFunction():  # noqa: SLF001
                yield
        finally:
            self._mode.recorder = recorder

    def autocast_entered(self, entry: tuple[str, torch.dtype, bool, bool]) -> None:
        """Record that the module begins an autocast region."""
        self._autocast.append(entry)

    def autocast_left(self) -> None:
        """Record that the module ends an autocast region."""
        self._autocast.pop()

    def finish(self, output: Any) -> Recording:
        """Return the recording, with the forward's result.

        Raises:
            SpecError: a norm of the user's counted a batch without normalizing it as
                torch's does.
        """
        if (left := self._copied.left()) is not None:
            name = f"{self._modules[id(left[0])]}.num_batches_tracked"
            raise SpecError(write_error(left[1], repr(name)))
        self.recording.output = output
        self.recording.refs = self._refs
        return self.recording


@dataclass
class _Write:
    """An operation that wrote into memory."""

    tensor: int
    """The id of the tensor through which it wrote."""

    place: str
    number: int

    owner: int | None = None
    """The id of the tensor that owns the memory and has been recorded again."""


_MANY_STEPS = 100
"""Number of samples from which a size that follows them is no accident."""

_LAYOUT_OPERATORS = {"_to_copy", "_unsafe_view", "alias", "clone", "expand", "view"}
"""Operators whose result has the argument's values if shape and type are the same."""


def _keeps_values(args: Any, result: Any, inner: Sequence[InnerCall]) -> bool:
    """Return whether an operation only copies its first argument, or returns it."""
    given = args[0] if args else None
    return (
        isinstance(given, Tensor)
        and isinstance(result, Tensor)
        and len(inner) <= 1
        and all(call.operator in _LAYOUT_OPERATORS for call in inner)
        and (given is result or bool(inner))
        and given.shape == result.shape
        and given.dtype == result.dtype
        and given.device == result.device
        and given.requires_grad == result.requires_grad
    )


def _has_hooks(part: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in part.modules())  # noqa: SLF001


def apply_function(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an ``autograd.Function``."""
    return kind.apply(*args, **kwargs)


def _method_of(func: Any) -> str | None:
    """Return the name under which ``torch.Tensor`` has a function as a method now."""
    name = _method_name(func)
    return name if name is not None and getattr(Tensor, name, None) is func else None


@functools.cache
def _method_name(func: Any) -> str | None:
    """Return the name under which it had it, before a program replaced it.

    It may differ from the function's own: ``__pow__`` is a function named ``pow``.
    """
    name = getattr(func, "__name__", None)
    if name is not None and func in (
        getattr(Tensor, name, None),
        getattr(torch._C.TensorBase, name, None),  # noqa: SLF001
    ):
        return str(name)
    return next((key for key, value in vars(Tensor).items() if value is func), None)


def _attribute(tensor: Tensor, name: str) -> Any:
    return getattr(tensor, name)


def set_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """Write into a part of a tensor and return the tensor."""
    tensor[index] = value
    return tensor


def _require_uncached(module: nn.Module, place: str) -> None:
    """Refuse a parametrization with state or random numbers that is cached."""
    held: Any = parametrize
    if held._cache_enabled and parametrize.is_parametrized(module):  # noqa: SLF001
        raise SpecError(
            f"{place}: this layer has a parametrization that changes its state or "
            "draws random numbers, and is called within torch.nn.utils.parametrize."
            "cached(), leave that out: layers compute a parametrization at each use"
        )


def _require_own_forwards(module: nn.Module, name: str) -> None:
    """Refuse a user-defined batch norm or dropout inside a module that has hooks.

    Elsewhere its operations are recorded. Here torch's forward would replace it.
    """
    for path, part in module.named_modules():
        if not isinstance(part, (BatchNorm, Dropout)):
            continue
        forward: Any = part.__dict__.get("forward", type(part).forward)
        if is_torchs_forward(forward):
            continue
        full = ".".join(filter(None, (name, path)))
        kind = "batch norm" if isinstance(part, BatchNorm) else "dropout"
        if type(part).__module__.startswith("torch.nn.modules."):
            raise SpecError(
                f"{line_of(forward)}: replaces the forward of {full!r}, PyTorch's "
                f"{type(part).__name__} in a module that runs as one operation: ranks "
                f"compute PyTorch's {kind} there instead. Leave its forward as it is, "
                "and do what yours adds in a forward of the model's"
            )
        code = getattr(inspect.unwrap(forward), "__code__", None)
        place = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
        raise SpecError(
            f"{place}module {full!r} ({type(part).__name__}) is a {kind} with a "
            "forward of its own and has hooks, or is inside a module that has: ranks "
            f"compute torch's {kind} there instead. Remove the hooks, or don't derive "
            f"{type(part).__name__} from torch's {kind}"
        )


def _version(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001


def _holds(value: Any) -> bool:
    return next(_leaves(value), None) is not None


def _leaves(value: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield the tensors in a value, with their paths, in order."""
    return iter(_leaves_at(value, ()))


def _leaves_at(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, (tuple, list)):
        if isinstance(value, torch.Size):
            return []
        parts: Iterable[tuple[Any, Any]] = enumerate(value)
    elif isinstance(value, dict):
        parts = value.items()
    else:
        return []
    found = []
    for key, part in parts:
        if isinstance(part, Tensor):
            found.append(((*path, key), part))
        elif isinstance(part, (tuple, list, dict)):
            found += _leaves_at(part, (*path, key))
    return found


def _refuse_replaced(root: nn.Module, before: dict[str, Tensor | None]) -> None:
    """Refuse a change of what modules hold, except caches: see Note [Caches]."""
    after = held_by(root)
    for name in {**before, **after}:
        if name in before and name in after and before[name] is after[name]:
            continue
        owner, _, key = name.rpartition(".")
        part = root.get_submodule(owner)
        is_kept = key in part._buffers and isinstance(after[name], FakeTensor)  # noqa: SLF001
        if is_kept and key in part._non_persistent_buffers_set:  # noqa: SLF001
            continue
        way = "Update it outside of the model"
        if is_kept:
            way = (
                "If it is a table that is the same in each call, register it with "
                "persistent=False, or make it outside of the model"
            )
        raise SpecError(
            f"{line_setting(part, key)}forward of {type(part).__name__} replaces, "
            f"adds or removes its parameter or buffer {name!r}, which layers on "
            f"other ranks would not. {way}"
        )


def record(
    root: nn.Module,
    run: Callable[[Tensor], Any],
    source: tuple[tuple[int, ...], torch.dtype, torch.device],
    fakes: Fakes,
    reads: Reads | None = None,
    check: Callable[[int, Record], None] | None = None,
    kept: Iterable[Tensor] = (),
) -> Recording:
    """Record what ``run`` does with an input of a shape, in the current modes.

    ``run`` gets the input and returns the output's tensors, as a tree. The plain state
    that it reads is added to ``reads``. ``check`` may raise at an operation. ``kept``
    are tensors that an earlier call left in caches.
    """
    mode = fakes.mode
    shape, dtype, device = source
    trained = fakes.trained()
    registered = frozenset(id(parameter) for parameter in root.parameters())
    every = root.named_modules()
    with swapped(every, fakes.of, leaves_replaced=True) as named:
        calls = TorchCalls(root.modules(), device.type)
        recorder = OperationRecorder(root, mode, trained, shape[0], check, calls)
        recorder.registered = registered
        for name, tensor in named.items():
            recorder.knows(tensor, Fixed(name))
            recorder.varying.add(storage_of(tensor))
        for prefix, part in root.named_modules():
            for name, value in vars(part).items():
                if isinstance(value, Tensor):
                    full = f"{prefix}.{name}" if prefix else name
                    recorder.knows(value, Fixed(full))
        held = {id(tensor) for tensor in named.values()}
        for number, tensor in enumerate(kept):
            if id(tensor) not in held:
                recorder.knows_cached(tensor, f"<cached {number}>")
        noted = contextlib.nullcontext() if reads is None else reads.noted()
        mode.recorder = recorder
        devices = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), patched(recorder), mode:
                torch.manual_seed(_SEED)  # nothing is drawn while recording
                batch = torch.empty(shape, dtype=dtype, device=device)
                recorder.knows(batch, SOURCE)
                recorder.recording.source = batch
                recorder.varying.add(storage_of(batch))
                mode.values.leave_out(batch)
                recorder.modes = len(dispatch_modes_now())
                with (
                    recorder,
                    lists_of_constants(mode.values),
                    noted,
                    seeds_refused(),
                    collectives_refused(),
                    identities_refused(recorder._inputs),  # noqa: SLF001
                ):
                    before = held_by(root)
                    recorder.recording.returned = output = run(batch)
                recorder._require_own_seed()  # noqa: SLF001
                _refuse_replaced(root, before)
                named_output = recorder._named(output, "the output")  # noqa: SLF001
        finally:
            mode.recorder = None
        return recorder.finish(named_output)
