"""Xception: Chollet, CVPR 2017."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.zoo.graph import Builder, LayerGraph, image

if TYPE_CHECKING:
    from stretto.zoo.graph import Value


def xception(name: str, image_size: int) -> LayerGraph:
    """Build Xception with its entry, middle and exit flow."""
    net = Builder(name, f"3x{image_size}x{image_size}")
    x = net.conv("conv1", image(3, image_size), 32, 3, stride=2)
    x = net.conv("conv2", net.batch_norm("bn1", x), 64, 3)
    x = net.batch_norm("bn2", x)
    x = _block(net, "block1", x, (128, 128), stride=2, relu_first=False)
    x = _block(net, "block2", x, (256, 256), stride=2)
    x = _block(net, "block3", x, (728, 728), stride=2)
    for number in range(4, 12):
        x = _block(net, f"block{number}", x, (728, 728, 728), stride=1)
    x = _block(net, "block12", x, (728, 1024), stride=2)
    x = net.batch_norm("bn3", _separable(net, "conv3", x, 1536))
    x = net.batch_norm("bn4", _separable(net, "conv4", x, 2048))
    net.linear("fc", net.global_pool("avgpool", x), 1000)
    return net.graph()


def _separable(net: Builder, name: str, x: Value, channels: int) -> Value:
    """Add a convolution of each channel, then one over the channels of each pixel."""
    y = net.conv(f"{name}.conv1", x, x.shape[0], 3, padding=1, groups=x.shape[0])
    return net.conv(f"{name}.pointwise", y, channels, 1)


def _block(
    net: Builder,
    name: str,
    x: Value,
    channels: tuple[int, ...],
    *,
    stride: int,
    relu_first: bool = True,
) -> Value:
    y, place = x, 1 if relu_first else 0
    for width in channels:
        y = _separable(net, f"{name}.rep.{place}", y, width)
        y = net.batch_norm(f"{name}.rep.{place + 1}", y)
        place += 3
    skip = x
    if stride > 1:
        y = net.pool(f"{name}.pool", y, 3, stride=stride, padding=1)
        skip = net.conv(f"{name}.skip", x, channels[-1], 1, stride=stride)
        skip = net.batch_norm(f"{name}.skipbn", skip)
    return net.add(f"{name}.add", [y, skip])
