"""PyTorch's CUDA calls, answered by the CPU.

PyTorch's tests of DDP put models on ``cuda:RANK`` and pass ``device_ids``. What they
check (gradients, buffers, errors, hooks, ``join``) is the same on the CPU, so every
name of a CUDA device is read as the CPU here, and streams and events, which order work
on a device, become nothing: on a CPU every operation has ended when its call returns.

Only for a process of its own: names in ``torch`` are replaced and never put back.
"""

from __future__ import annotations

import contextlib
import functools
import unittest
from typing import Any

import batch_norm
import torch
import torch.distributed as dist
from torch import nn

CPU = torch.device("cpu")

FACTORIES = [
    "arange",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "tensor",
    "zeros",
    "zeros_like",
]


def on_cpu(device: Any) -> Any:
    """``cuda``, ``cuda:1``, ``1`` and devices of that kind are the CPU."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return CPU
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str) and device.startswith("cuda"):
        return CPU
    return device


class Stream:
    """A queue of device work that is always empty."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CPU

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, _other: Any) -> None:
        pass

    def wait_event(self, _event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event:
    """A mark in a queue that is always empty."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any, **__: Any) -> None:
        pass

    def wait(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def import_tests(size: int) -> Any:
    """PyTorch's test module, with CUDA's names in ``torch`` replaced around it.

    Tests that ask for more than ``size`` GPUs say so as the reason they are skipped.
    """
    # What asks for GPUs is applied while the module is imported; the rest comes after,
    # for the import compiles functions with TorchScript, which reads their source.
    _decorators(size)
    import torch.testing._internal.distributed.distributed_test as tests

    _tensors_and_modules()
    _cuda(size)
    batch_norm.install()
    tests.autocast = functools.partial(torch.amp.autocast, "cpu")
    tests.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")
    tests.DDPUnevenTestInput = _smaller(tests.DDPUnevenTestInput)
    tests.torch = _Torch()
    return tests


class _Torch:
    """``torch``, but for ``torch.device(1)``, which a machine without GPUs has not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *place: Any) -> torch.device:
        return CPU if on_cpu(place[0]) == CPU else torch.device(*place)


def _smaller(case: Any) -> Any:
    """Images of 32 x 32 for those of 1000 x 1000, on which a CPU spends minutes."""

    def make(*args: Any, inp: Any, **kwargs: Any) -> Any:
        if isinstance(inp, torch.Tensor) and inp.dim() == 4:
            inp = inp[..., :32, :32]
        return case(*args, inp=inp, **kwargs)

    return make


def _tensors_and_modules() -> None:
    for name in FACTORIES:
        setattr(torch, name, _with_device(getattr(torch, name)))
    tensor_to, module_to = torch.Tensor.to, nn.Module.to

    def to(function: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        mapped = [on_cpu(a) for a in args[:1]] + list(args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(self, *mapped, **kwargs)

    def same(self: Any, *_: Any, **__: Any) -> Any:
        return self

    torch.Tensor.to = functools.partialmethod(functools.partial(to, tensor_to))  # type: ignore
    nn.Module.to = functools.partialmethod(functools.partial(to, module_to))  # type: ignore
    torch.Tensor.cuda = same  # type: ignore
    nn.Module.cuda = same  # type: ignore
    torch.Tensor.record_stream = lambda *_: None  # type: ignore


def _with_device(function: Any) -> Any:
    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return mapped


def _cuda(size: int) -> None:
    cuda: Any = torch.cuda
    cuda.set_device = lambda *_: None
    cuda.current_device = lambda: dist.get_rank()
    cuda.device_count = lambda: size
    cuda.synchronize = lambda *_, **__: None
    cuda.manual_seed = torch.manual_seed
    # Names of their own: TorchDynamo registers each once.
    cuda.Stream = type("CudaStream", (Stream,), {})
    cuda.Event = type("CudaEvent", (Event,), {})
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.current_stream = lambda *_: Stream()
    cuda.device = lambda _device: contextlib.nullcontext()
    torch.Stream, torch.Event = Stream, Event  # type: ignore
    torch.accelerator.current_stream = lambda *_: Stream()  # type: ignore


def _decorators(size: int) -> None:
    import torch.testing._internal.common_distributed as common

    def enough(wanted: int, *_: Any, **__: Any) -> Any:
        def decorate(function: Any) -> Any:
            if wanted <= size:
                return function
            return unittest.skip(f"needs {wanted} ranks, here are {size}")(function)

        return decorate

    common.skip_if_lt_x_gpu = enough
    common.skip_if_no_gpu = lambda function: function
    common.nccl_skip_if_lt_x_gpu = lambda _backend, wanted: enough(wanted)


def without_devices(kwargs: dict[str, Any]) -> dict[str, Any]:
    """DDP's arguments for a module on the CPU: ``device_ids`` must be left out."""
    return {k: v for k, v in kwargs.items() if k not in ("device_ids", "output_device")}
