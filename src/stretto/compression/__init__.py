"""Gradient compression with error feedback, as DDP communication hooks.

`hooks` holds the hooks. `top_k` sends the largest values of each gradient; `power_sgd`
keeps the state of PyTorch's own PowerSGD hook by parameter. `error_memory` is what both
keep and save.
"""

from stretto.compression.hooks import power_sgd_hook, top_k_hook
from stretto.compression.power_sgd import PowerSGD
from stretto.compression.top_k import TopK

__all__ = ["PowerSGD", "TopK", "power_sgd_hook", "top_k_hook"]
