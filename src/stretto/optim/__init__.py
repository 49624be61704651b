"""The optimizer and the schedule of AIACC-Training, in our reading.

`AdamSGD` (in `adam_sgd`) begins as Adam and ends as SGD; `LinearDecay` (in
`linear_decay`) lowers the learning rate along a line after a warm-up.
"""

from stretto.optim.adam_sgd import AdamSGD
from stretto.optim.linear_decay import LinearDecay

__all__ = ["AdamSGD", "LinearDecay"]
