"""One slice's reduction in a narrower type, on lanes of stand-ins."""

import pytest
import torch

from stretto.runtime.narrow_lanes import NarrowReduce, Scratch


class StandIn:
    """A lane of two ranks that have equal values, and works like a backend's."""

    def __init__(self, *, gives_works):
        self._gives_works = gives_works
        self.waits = 0

    def size(self):
        return 2

    def rank(self):
        return 0

    def wait(self):
        self.waits += 1

    def alltoall_base(self, got, sent, _got_sizes, _sent_sizes, opts):
        assert not opts.asyncOp
        half = got.numel() // 2
        got[:half] = got[half:] = sent[:half]
        return self if self._gives_works else None


@pytest.mark.parametrize("gives_works", [True, False])
def test_a_lane_may_give_no_work_where_its_stream_is_in_order(gives_works):
    lane = StandIn(gives_works=gives_works)
    reduce = NarrowReduce(
        lane=lane, wire=torch.bfloat16, scratch=Scratch(), error_feedback=False
    )
    values = torch.tensor([1.0, 1.0])
    reduce(values)
    assert torch.equal(values, torch.tensor([2.0, 2.0]))
    assert lane.waits == (2 if gives_works else 0)
