"""A model that waits: sizes, gradients and order of a workload."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from stretto.errors import SpecError
from stretto.schema import TensorSpec, Workload
from stretto.testing import EmulatedModel

ROWS = (
    # Ready in this order; needed in another than its opposite.
    ("last.weight", 40, "float32", 0.001, 0.001),
    ("last.bias", 8, "float64", 0.002, 0.003),
    ("first.norm.weight", 12, "bfloat16", 0.002, 0.002),
    ("scale", 4, "float32", 0.004, 0.0),
)


def workload(*rows, forward_s=0.004, backward_s=0.006):
    return Workload(
        name="w",
        framework="none",
        device="none",
        batch_per_rank=1,
        forward_s=forward_s,
        backward_s=backward_s,
        tensors=tuple(
            TensorSpec(
                name=name, bytes=size, dtype=dtype, ready_s=ready, needed_s=needed
            )
            for name, size, dtype, ready, needed in rows or ROWS
        ),
    )


def test_parameters_have_the_names_sizes_and_types_of_the_tensors():
    found = {
        name: (p.numel() * p.element_size(), str(p.dtype).removeprefix("torch."))
        for name, p in EmulatedModel(workload()).named_parameters()
    }
    assert found == {name: (size, dtype) for name, size, dtype, _, _ in ROWS}


def test_every_element_has_the_gradient_of_the_output():
    model = EmulatedModel(workload())
    for kept in (False, True, True):
        model.zero_grad(set_to_none=not kept)
        (3 * model()).backward()
        for name, p in model.named_parameters():
            assert torch.equal(p.grad, torch.full_like(p, 3)), name


def test_gradients_of_two_backwards_add_up():
    model = EmulatedModel(workload())
    for factor in (1, 2):
        (factor * model()).backward()
    assert all(torch.all(p.grad == 3) for p in model.parameters())


def test_gradients_do_not_share_memory():
    model = EmulatedModel(workload())
    model().backward()
    places = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(places) == len(ROWS)


def test_the_output_is_the_sum_of_the_input():
    assert EmulatedModel(workload())(torch.ones(2, 3)).item() == 6


def test_gradients_are_ready_in_the_order_of_the_workload():
    model = EmulatedModel(workload())
    order = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model().backward()
    assert order == [name for name, *_ in ROWS]


def test_modules_are_called_in_the_order_of_need():
    model = EmulatedModel(workload())
    order = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: order.append(name))
    model()
    assert order == ["", "last", "first.norm", "last"]


def test_forward_and_backward_take_their_times():
    model = EmulatedModel(workload())
    begin_s = time.perf_counter()
    out = model()
    between_s = time.perf_counter()
    out.backward()
    assert between_s - begin_s >= 0.004
    assert time.perf_counter() - between_s >= 0.006


def test_no_gradient_is_ready_before_its_time():
    model = EmulatedModel(workload())
    at_s = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: at_s.append(time.perf_counter()))
    out = model()
    begin_s = time.perf_counter()
    out.backward()
    for found_s, (_, _, _, ready_s, _) in zip(at_s, ROWS, strict=True):
        assert found_s - begin_s >= ready_s


def test_what_follows_a_wait_happens_later():
    model = EmulatedModel(workload())
    model.get_submodule("first.norm").register_forward_pre_hook(
        lambda *_: time.sleep(0.02)
    )
    begin_s = time.perf_counter()
    model()
    assert time.perf_counter() - begin_s >= 0.024


def test_an_evaluation_has_no_graph():
    model = EmulatedModel(workload())
    with torch.no_grad():
        assert not model(torch.ones(2)).requires_grad
        assert not model().requires_grad


@pytest.mark.parametrize(
    "names", [("a.b", "a"), ("a", "a.b"), ("forward",), ("_parts.a",)]
)
def test_a_name_that_cannot_be_a_parameters_is_refused(names):
    rows = [(name, 4, "float32", 0.001, 0.001) for name in names]
    with pytest.raises(SpecError, match="cannot be a parameter"):
        EmulatedModel(workload(*rows))


def test_a_type_without_gradients_is_refused():
    one = workload()
    tensors = (replace(one.tensors[0], dtype="int32"), *one.tensors[1:])
    with pytest.raises(SpecError, match=r"'last\.weight' is of type int32"):
        EmulatedModel(replace(one, tensors=tensors))
