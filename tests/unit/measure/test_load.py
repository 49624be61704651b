"""What runs beside communication within a training step, and changes nothing of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.autograd_engine import queue_callback
from stretto.measure.load import convolutions

CPU = torch.device("cpu")


def test_the_load_runs_in_a_callback_of_backward_where_gradients_are_disabled():
    ran = []

    def callback():
        load = convolutions(CPU)
        load()
        ran.append(torch.is_grad_enabled())

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda _: queue_callback(callback))
    weight.sum().backward()
    assert ran == [False]


def test_the_load_draws_no_random_numbers():
    before = torch.get_rng_state()
    convolutions(CPU)()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_load_is_invisible_to_hooks_of_all_modules():
    called = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: called.append(module)
    )
    try:
        convolutions(CPU)()
    finally:
        handle.remove()
    assert called == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_load_does_not_depend_on_a_script_s_default_type_and_device(dtype):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            convolutions(CPU)()
    finally:
        torch.set_default_dtype(before)
