"""What is done to tensors before they are sent, and after."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """What a compression offers: subclass it for your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and what `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The received tensor in the form of the original."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor itself."""
        del ctx
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16: half of float32's bytes."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor as float16, and its own type."""
        if not tensor.dtype.is_floating_point:
            return tensor, tensor.dtype
        return tensor.to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in the type it had."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The compressions that come with the library."""

    none = NoneCompressor

    fp16 = FP16Compressor
