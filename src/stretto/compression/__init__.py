"""Gradient compression with error feedback, as DDP communication hooks.

- `hooks`: the hooks themselves (for programs).
- `top_k`: send the largest values of each gradient (for `hooks`, and programs).
- `power_sgd`: keep the state of PyTorch's own PowerSGD hook by parameter (for `hooks`,
  and programs).
- `error_memory`: what both keep and save (for `power_sgd` and `top_k`).
"""

from stretto.compression.hooks import power_sgd_hook, top_k_hook
from stretto.compression.power_sgd import PowerSGD
from stretto.compression.top_k import TopK

__all__ = ["PowerSGD", "TopK", "power_sgd_hook", "top_k_hook"]
