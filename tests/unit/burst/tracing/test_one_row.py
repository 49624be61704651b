"""Batch norms on a rank with one row, whose backward PyTorch computes wrongly on CPUs.

Strides of a dimension of size 1 say nothing, but PyTorch reads them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.burst.graph import capture
from stretto.burst.tracing.one_row import PlainRows, normalized


class Tokens(nn.Module):
    """A norm between a first token and those that it normalizes, as in CvT."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(5, 5 * 8), nn.Linear(40, 2)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        first, rest = self.embed(x).view(-1, 5, 8).split([1, 4], 1)
        image = rest.permute(0, 2, 1).view(-1, 8, 2, 2)
        rest = self.norm(self.conv(image)).view(-1, 8, 4).permute(0, 2, 1)
        tokens = torch.cat((first, rest), 1)
        return self.head(tokens.flatten(1))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_norm_before_tokens_that_a_slice_takes_is_captured(is_frozen):
    torch.manual_seed(0)
    model = Tokens().double()
    model.norm.train(not is_frozen)
    capture(model, (torch.randn(6, 5, dtype=torch.float64),))


@pytest.mark.parametrize("is_odd", [False, True])
def test_one_row_has_the_gradient_of_more(is_odd):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8).double().eval()
    x = torch.randn(2, 8, 2, 2, dtype=torch.float64)
    way = torch.randn(2, 4, 8, dtype=torch.float64)
    found = []
    for count in (1, 2):
        # The stride of the first dimension is that of no format if it has size 1.
        sliced = torch.cat((way[:count, :1], way[:count]), 1)[:, 1:]
        odd = sliced.permute(0, 2, 1).view(count, 8, 2, 2)
        given = (odd if is_odd else x[:count]).detach().requires_grad_()
        back = odd.contiguous() if is_odd else odd
        normalized(norm, given).backward(back)
        found.append(given.grad[:1])
    assert torch.allclose(*found)


def test_an_instance_norm_before_a_permuted_image_is_captured():
    torch.manual_seed(0)

    class Permuted(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.last = nn.Linear(3, 24), nn.LayerNorm(2)
            self.norm = nn.InstanceNorm2d(2, affine=True)

        def forward(self, x):
            image = self.norm(self.embed(x).view(-1, 2, 3, 4))
            return self.last(image.permute(0, 2, 3, 1)).flatten(1)

    capture(Permuted().double(), (torch.randn(6, 3, dtype=torch.float64),))


def test_an_instance_norm_of_one_row_has_the_gradient_of_more():
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(4, affine=True).double()
    image = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    back = torch.randn_like(image).contiguous(memory_format=torch.channels_last)
    found = []
    for count in (1, 2):
        given = image[:count].clone().requires_grad_()
        PlainRows(norm)(given).backward(back[:count])
        found.append(given.grad[:1])
    assert torch.allclose(*found)
