"""Kinds of torch's modules that burst models treat in ways of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

Dropout = nn.modules.dropout._DropoutNd  # noqa: SLF001
BatchNorm = nn.modules.batchnorm._BatchNorm  # noqa: SLF001
InstanceNorm = nn.modules.instancenorm._InstanceNorm  # noqa: SLF001

DROPS_ELEMENTS = (nn.Dropout, nn.AlphaDropout)
"""Dropouts of single elements; the others drop whole channels or rows."""


_functions: Any = torch._C._VariableFunctions  # noqa: SLF001
"""PyTorch's functions, also where a program has replaced those in ``torch``."""


def batch_norm(
    x: Tensor,
    norm: Any,
    statistics: tuple[Tensor | None, Tensor | None],
    parameters: tuple[Tensor | None, Tensor | None],
    *,
    training: bool = False,
    momentum: float = 0.0,
) -> Tensor:
    """Compute ``torch.nn.functional.batch_norm``, which a program may replace.

    Args:
        x: The norm's input.
        norm: The module, for its ``eps``.
        statistics: Mean and variance.
        parameters: Weight and bias.
        training: Whether those of the batch are used.
        momentum: The share of the batch in the running statistics.
    """
    if training:
        functional._verify_batch_size(x.shape)  # type: ignore[attr-defined]  # noqa: SLF001
    on = torch.backends.cudnn.enabled
    found: Tensor = _functions.batch_norm(
        x, *parameters, *statistics, training, momentum, norm.eps, on
    )
    return found


class _PlainNorm(nn.modules.batchnorm._BatchNorm):  # noqa: SLF001
    """A batch norm that computes what PyTorch's does, though a program replaces it."""

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            count = self.num_batches_tracked
            if count is not None:
                count.add_(1)
                if self.momentum is None:
                    momentum = 1.0 / float(count)
        means, variances = self.running_mean, self.running_var
        is_used = not self.training or self.track_running_stats
        return batch_norm(
            x,
            self,
            (means, variances) if is_used else (None, None),
            (self.weight, self.bias),
            training=self.training or (means is None and variances is None),
            momentum=momentum,
        )


PLAIN_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(kind.__name__, (_PlainNorm, kind), {"__module__": __name__})
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}
"""Batch norms for layers, by the classes of PyTorch's from which they are derived."""


def _plain_dropout(kind: type[nn.Module], name: str) -> type[nn.Module]:
    call: Any = getattr(functional, name)

    def forward(self: Any, x: Tensor) -> Tensor:
        found: Tensor = call(x, self.p, self.training)
        return found

    fields = {"forward": forward, "__module__": __name__}
    return type(kind.__name__, (kind,), fields)


PLAIN_DROPOUTS: dict[str, type[nn.Module]] = {
    name: _plain_dropout(kind, name)
    for kind, name in (
        (nn.Dropout, "dropout"),
        (nn.Dropout1d, "dropout1d"),
        (nn.Dropout2d, "dropout2d"),
        (nn.Dropout3d, "dropout3d"),
        (nn.AlphaDropout, "alpha_dropout"),
    )
}
"""Dropouts for layers, by the functions that forward calls. A program that replaces the
forward of PyTorch's dropouts does not change these."""


def drops_rows(dropout: nn.Module, dimensions: int) -> bool:
    """Return whether a dropout takes a tensor for one sample without a batch.

    It then drops whole rows of the first dimension.
    """
    return (isinstance(dropout, nn.Dropout1d) and dimensions == 2) or (
        isinstance(dropout, nn.Dropout3d) and dimensions == 4
    )
