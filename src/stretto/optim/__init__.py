"""The optimizer and schedule of AIACC-Training, for programs to use.

The paper names both and gives no formula; these are this package's interpretation.

`AdamSGD` (in `adam_sgd`) begins as Adam and ends as SGD; `LinearDecay` (in
`linear_decay`) lowers the learning rate along a line after a warm-up.
"""

from stretto.optim.adam_sgd import AdamSGD
from stretto.optim.linear_decay import LinearDecay

__all__ = ["AdamSGD", "LinearDecay"]
