"""A model's layers as plain data, and the builder that creates them.

A layer has its parameters, its multiply-accumulates and its values for one sample.
Multiply-accumulates count convolutions, linear layers and attention products; other
layers only move memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

ELEMENT_BYTES = 4
"""All models of the zoo are in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One trained tensor, by its name in PyTorch."""

    name: str

    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLayer:
    """One layer, a node of a graph."""

    name: str

    kind: str

    inputs: tuple[int, ...]
    """Indices of the layers whose values it reads; empty: the model's input."""

    parameters: tuple[Parameter, ...]

    macs: int
    """Multiply-accumulates for one sample, forward."""

    input_elements: int
    """Values read for one sample, excluding parameters."""

    output_elements: int
    """Values written for one sample: the activation."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of its parameters."""
        return ELEMENT_BYTES * sum(p.elements for p in self.parameters)

    @property
    def activation_bytes(self) -> int:
        """Bytes of its activation for one sample."""
        return ELEMENT_BYTES * self.output_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """A model's layers in the order of forward, each with its inputs.

    Consecutive layers that do not read each other are branches.
    """

    name: str

    sample: str
    """The form of one sample, for instance ``3x224x224`` or ``64 tokens``."""

    layers: tuple[GraphLayer, ...]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters in the order of forward, each once."""
        return tuple(p for layer in self.layers for p in layer.parameters)

    @property
    def elements(self) -> int:
        """Number of elements of all parameters: the model's size."""
        return sum(p.elements for p in self.parameters)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one sample's forward."""
        return sum(layer.macs for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Value:
    """Output of a layer: its index in the graph and its shape for one sample."""

    index: int

    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Size = int | tuple[int, int]


@final
class Builder:
    """Collects layers as a model's definition calls them in the order of forward."""

    def __init__(self, name: str, sample: str) -> None:
        self._name = name
        self._sample = sample
        self._layers: list[GraphLayer] = []

    def graph(self) -> ModelGraph:
        """Return the collected graph."""
        return ModelGraph(
            name=self._name, sample=self._sample, layers=tuple(self._layers)
        )

    def layer(
        self,
        kind: str,
        name: str,
        inputs: Sequence[Value],
        shape: tuple[int, ...],
        *,
        macs: int = 0,
        weights: Sequence[tuple[str, tuple[int, ...]]] = (),
    ) -> Value:
        """Add a layer of any kind; ``weights`` are named within the layer."""
        self._layers.append(
            GraphLayer(
                name=name,
                kind=kind,
                inputs=tuple(v.index for v in inputs if v.index >= 0),
                parameters=tuple(
                    Parameter(name=f"{name}.{part}", shape=dims)
                    for part, dims in weights
                ),
                macs=macs,
                input_elements=sum(v.elements for v in inputs),
                output_elements=math.prod(shape),
            )
        )
        return Value(len(self._layers) - 1, shape)

    def conv(
        self,
        name: str,
        x: Value,
        channels: int,
        kernel: Size,
        *,
        stride: int = 1,
        padding: Size = 0,
        groups: int = 1,
        bias: bool = False,
    ) -> Value:
        """Add a two-dimensional convolution."""
        high, wide = _pair(kernel)
        out = _window(self._name, x, (high, wide), stride, _pair(padding))
        weight = (channels, x.shape[0] // groups, high, wide)
        weights = [("weight", weight)] + ([("bias", (channels,))] if bias else [])
        macs = math.prod(weight) * math.prod(out)
        return self.layer(
            "conv", name, [x], (channels, *out), macs=macs, weights=weights
        )

    def batch_norm(self, name: str, x: Value) -> Value:
        """Add normalization over the batch, then the activation function in place."""
        size = (x.shape[0],)
        weights = [("weight", size), ("bias", size)]
        return self.layer("batch_norm", name, [x], x.shape, weights=weights)

    def pool(
        self,
        name: str,
        x: Value,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 0,
        round_up: bool = False,
    ) -> Value:
        """Add the maximum or the mean of each window."""
        pad = (padding, padding)
        out = _window(self._name, x, (kernel, kernel), stride, pad, round_up=round_up)
        return self.layer("pool", name, [x], (x.shape[0], *out))

    def global_pool(self, name: str, x: Value) -> Value:
        """Add the mean of each channel."""
        return self.layer("pool", name, [x], (x.shape[0],))

    def add(self, name: str, values: Sequence[Value]) -> Value:
        """Add the sum of values of one shape."""
        return self.layer("add", name, values, values[0].shape)

    def concat(self, name: str, values: Sequence[Value]) -> Value:
        """Add the concatenation of values along the channels."""
        channels = sum(v.shape[0] for v in values)
        return self.layer("concat", name, values, (channels, *values[0].shape[1:]))

    def linear(
        self,
        name: str,
        x: Value,
        features: int,
        *,
        bias: bool = True,
        weight_shape: tuple[int, ...] | None = None,
    ) -> Value:
        """Add a linear layer over the last dimension, or over all of an image.

        ``weight_shape`` is the tensor's shape if it is stored transposed.
        """
        image = len(x.shape) == 3
        rows = 1 if image or len(x.shape) == 1 else math.prod(x.shape[:-1])
        width = x.elements // rows
        weights = [("weight", weight_shape or (features, width))]
        weights += [("bias", (features,))] if bias else []
        shape = (features,) if rows == 1 and len(x.shape) != 2 else (rows, features)
        macs = rows * width * features
        return self.layer("linear", name, [x], shape, macs=macs, weights=weights)

    def layer_norm(self, name: str, x: Value) -> Value:
        """Add normalization of each position."""
        size = (x.shape[-1],)
        weights = [("weight", size), ("bias", size)]
        return self.layer("layer_norm", name, [x], x.shape, weights=weights)

    def attention(self, name: str, query: Value, key: Value, value: Value) -> Value:
        """Add products of queries with keys, and of the weights with values."""
        positions, width = query.shape
        macs = 2 * positions * key.shape[0] * width
        return self.layer(
            "attention", name, [query, key, value], query.shape, macs=macs
        )


def image(channels: int, size: int) -> Value:
    """Return the model's input: an image."""
    return Value(-1, (channels, size, size))


def tokens(length: int) -> Value:
    """Return the model's input: a sequence of token numbers."""
    return Value(-1, (length,))


def _pair(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _window(
    model: str,
    x: Value,
    kernel: tuple[int, int],
    stride: int,
    padding: tuple[int, int],
    *,
    round_up: bool = False,
) -> tuple[int, int]:
    """Return height and width of a sliding window's output."""
    out = []
    for size, reach, pad in zip(x.shape[1:], kernel, padding, strict=True):
        room = size + 2 * pad - reach
        if room < 0:
            raise SpecError(
                f"{model}: images are too small: {size} pixels remain where a window "
                f"of {reach} must fit; use larger ones"
            )
        steps = -(-room // stride) if round_up else room // stride
        out.append(steps + 1)
    return out[0], out[1]
