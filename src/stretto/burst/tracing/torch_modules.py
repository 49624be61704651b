"""Kinds of torch's modules that burst models treat in ways of their own."""

from __future__ import annotations

from torch import nn

Dropout = nn.modules.dropout._DropoutNd  # noqa: SLF001
BatchNorm = nn.modules.batchnorm._BatchNorm  # noqa: SLF001
InstanceNorm = nn.modules.instancenorm._InstanceNorm  # noqa: SLF001
