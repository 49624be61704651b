"""The optimizer and schedule of AIACC-Training, for programs to use.

The paper names both and gives no formula; these are this package's interpretation.

- `adam_sgd`: `AdamSGD`, which begins as Adam and ends as SGD (for programs).
- `linear_decay`: `LinearDecay`, which lowers the learning rate along a line after a
  warm-up (for programs).
"""

from stretto.optim.adam_sgd import AdamSGD
from stretto.optim.linear_decay import LinearDecay

__all__ = ["AdamSGD", "LinearDecay"]
