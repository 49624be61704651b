"""Sums that show whether parameters are equal bit for bit."""

from __future__ import annotations

import pytest
import torch

from stretto.elastic.digests import ParameterDigests, digest_of, minority


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_one_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    before = digest_of([tensor])
    tensor[3, 5] = torch.nextafter(tensor[3, 5].float(), torch.tensor(100.0)).to(dtype)
    if dtype in (torch.bfloat16, torch.float16):
        tensor[3, 5] = 23.5
    assert digest_of([tensor]) != before


def test_equal_tensors_have_equal_digests_whatever_their_layout() -> None:
    tensor = torch.randn(2, 3, 4, 4)
    other = tensor.clone(memory_format=torch.channels_last)
    assert digest_of([tensor]) == digest_of([other])
    assert digest_of([torch.tensor([float("nan")])]) == digest_of(
        [torch.tensor([float("nan")])]
    )


def test_tensors_in_another_order_have_another_digest() -> None:
    one, two = torch.ones(3), torch.zeros(3)
    assert digest_of([one, two]) != digest_of([two, one])


@pytest.mark.parametrize(
    ("tensors", "elements", "parts"),
    [(0, 1, 1), (16, 8, 1), (17, 8, 2), (1, 524_288, 1), (2, 524_288, 2), (999, 8, 16)],
)
def test_few_parameters_are_compared_in_each_step(
    tensors: int, elements: int, parts: int
) -> None:
    parameters = [torch.zeros(elements) for _ in range(tensors)]
    assert ParameterDigests(parameters).parts == parts


def test_the_majority_is_right() -> None:
    assert minority([7, 7, 3, 7]) == (0, [2])
    assert minority([3, 7, 7]) == (1, [0])
    assert minority([3, 7]) == (None, [0, 1])
    assert minority([5, 5]) == (0, [])
