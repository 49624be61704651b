"""What the probe does with lanes, which are backends rather than process groups."""

import torch.distributed as dist

from stretto.measure.network import barrier


class Lane:
    """Stands for a backend, for which torch's own barrier warns on a GPU's machine."""

    waits = 0

    def barrier(self, *, opts):
        assert isinstance(opts, dist.BarrierOptions)
        return self

    def wait(self):
        self.waits += 1


def test_a_lane_has_its_own_barrier():
    lane = Lane()
    barrier(lane)
    assert lane.waits == 1
