"""Densely connected networks: Huang et al., CVPR 2017."""

from __future__ import annotations

from stretto.zoo.graph import Builder, LayerGraph, image

_GROWTH = 32
_BOTTLENECK = 4


def densenet(name: str, blocks: tuple[int, ...], image_size: int) -> LayerGraph:
    """Build a network of dense blocks with the given numbers of layers."""
    net = Builder(name, f"3x{image_size}x{image_size}")
    x = net.conv("features.conv0", image(3, image_size), 64, 7, stride=2, padding=3)
    x = net.batch_norm("features.norm0", x)
    x = net.pool("features.pool0", x, 3, stride=2, padding=1)
    for number, count in enumerate(blocks, start=1):
        for inner in range(1, count + 1):
            at = f"features.denseblock{number}.denselayer{inner}"
            y = net.batch_norm(f"{at}.norm1", x)
            y = net.conv(f"{at}.conv1", y, _BOTTLENECK * _GROWTH, 1)
            y = net.batch_norm(f"{at}.norm2", y)
            y = net.conv(f"{at}.conv2", y, _GROWTH, 3, padding=1)
            x = net.concat(f"{at}.concat", [x, y])
        if number < len(blocks):
            at = f"features.transition{number}"
            x = net.batch_norm(f"{at}.norm", x)
            x = net.conv(f"{at}.conv", x, x.shape[0] // 2, 1)
            x = net.pool(f"{at}.pool", x, 2, stride=2)
    x = net.batch_norm("features.norm5", x)
    net.linear("classifier", net.global_pool("avgpool", x), 1000)
    return net.graph()
