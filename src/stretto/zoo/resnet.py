"""Residual networks: He et al., CVPR 2016; wide ones: Zagoruyko and Komodakis, 2016.

As in most libraries, a block's stride is on its 3x3 convolution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.zoo.graph import Builder, image

if TYPE_CHECKING:
    from stretto.zoo.graph import LayerGraph, Value


def resnet(
    name: str, blocks: tuple[int, ...], image_size: int, *, width: int = 64
) -> LayerGraph:
    """Build a residual network of bottleneck blocks.

    Args:
        name: the graph's name.
        blocks: number of blocks of each of the four stages.
        image_size: height and width of its images.
        width: channels of the first stage's 3x3 convolutions; 128 in the wide ones.
    """
    net = Builder(name, f"3x{image_size}x{image_size}")
    x = net.conv("conv1", image(3, image_size), 64, 7, stride=2, padding=3)
    x = net.pool("maxpool", net.batch_norm("bn1", x), 3, stride=2, padding=1)
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            x = _bottleneck(
                net,
                f"layer{stage + 1}.{block}",
                x,
                inner=width << stage,
                channels=256 << stage,
                stride=stride,
            )
    net.linear("fc", net.global_pool("avgpool", x), 1000)
    return net.graph()


def _bottleneck(
    net: Builder, name: str, x: Value, *, inner: int, channels: int, stride: int
) -> Value:
    y = net.batch_norm(f"{name}.bn1", net.conv(f"{name}.conv1", x, inner, 1))
    y = net.conv(f"{name}.conv2", y, inner, 3, stride=stride, padding=1)
    y = net.batch_norm(f"{name}.bn2", y)
    y = net.batch_norm(f"{name}.bn3", net.conv(f"{name}.conv3", y, channels, 1))
    skip = x
    if x.shape[0] != channels:
        skip = net.conv(f"{name}.downsample.0", x, channels, 1, stride=stride)
        skip = net.batch_norm(f"{name}.downsample.1", skip)
    return net.add(f"{name}.add", [y, skip])
