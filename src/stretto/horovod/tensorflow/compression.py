"""Compress tensors before they are sent, and decompress them after."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class TensorCompressor:
    """The interface of a compression: subclass it for your own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and what `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the received tensor in the form of the original."""
        raise NotImplementedError


class _Unchanged(TensorCompressor):
    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        del ctx
        return tensor


class _Float16(TensorCompressor):
    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        if not tensor.dtype.is_floating:
            return tensor, tensor.dtype
        return tf.cast(tensor, tf.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx)


class Compression:
    """The compressions that the library provides."""

    none = _Unchanged

    fp16 = _Float16
