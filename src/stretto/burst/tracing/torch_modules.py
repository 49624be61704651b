"""Kinds of torch's modules that burst models treat in ways of their own."""

from __future__ import annotations

from torch import nn

Dropout = nn.modules.dropout._DropoutNd  # noqa: SLF001
BatchNorm = nn.modules.batchnorm._BatchNorm  # noqa: SLF001
InstanceNorm = nn.modules.instancenorm._InstanceNorm  # noqa: SLF001

DROPS_ELEMENTS = (nn.Dropout, nn.AlphaDropout)
"""Dropouts of single elements; the others drop whole channels or rows."""


def drops_rows(dropout: nn.Module, dimensions: int) -> bool:
    """Return whether a dropout takes a tensor for one sample without a batch.

    It then drops whole rows of the first dimension.
    """
    return (isinstance(dropout, nn.Dropout1d) and dimensions == 2) or (
        isinstance(dropout, nn.Dropout3d) and dimensions == 4
    )
