"""Every model of the zoo trains as one process does, or is refused in a sentence."""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import zoo_models

pytestmark = [pytest.mark.dist, pytest.mark.timeout(450)]


SIZES = (2, 2, 2, 3, 4)
"""Numbers of ranks if a model is trained once."""


@pytest.mark.turns(8)
@pytest.mark.parametrize("name", zoo_models.CASES)
def test_a_model_trains_as_one_process_or_is_refused(name: str, pool: Any) -> None:
    case = zoo_models.CASES[name]
    seed = zlib.crc32(name.encode())
    size = 2 + seed % 3
    runs = [(size, case.shares[0]), (2 + (size - 1) % 3, case.shares[1])]
    if case.refused is not None:
        runs = [(2, case.shares[0])]
    elif "STRETTO_TEST_ALL" not in os.environ:
        runs = [(SIZES[seed % len(SIZES)], case.shares[seed // 3 % 2])]
    for ranks, shares in runs:
        found = pool("zoo_check", "train", name, ranks, seed, shares)
        for rank, (kind, value) in enumerate(found[:ranks]):
            assert kind == "value", f"rank {rank}: {value[0]}: {value[1]}\n{value[2]}"
            if case.refused is not None:
                assert "refused" in value, f"rank {rank} trained: {value}"
                assert case.refused in value["refused"], value["refused"]
                if case.names_line:
                    assert "zoo_models.py:" in value["refused"], value["refused"]
                continue
            assert "refused" not in value, value
            worst = {k: amount for k, amount in value.items() if amount > case.limit}
            assert not worst, f"rank {rank} of {ranks}, {shares} shares: {worst}"


VERIFIED = [
    "plain_mlp",
    "residual_network",
    "dense_network",
    "lstm_batch_first",
    "tied_embedding_and_head",
    "torch_encoder_batch_first",
    "vision_transformer",
    "floats_and_integers",
    "hf_bert_with_dropout",
    "hf_gpt2",
    "hf_convnext_with_drop_path",
]


@pytest.mark.turns(8)
@pytest.mark.parametrize("name", VERIFIED)
def test_verify_passes_and_leaves_no_trace_in_training(name: str, pool: Any) -> None:
    case = zoo_models.CASES[name]
    found = pool("zoo_check", "verify", name, 3, zlib.crc32(name.encode()))
    for rank, (kind, value) in enumerate(found[:3]):
        assert kind == "value", f"rank {rank}: {value[0]}: {value[1]}\n{value[2]}"
        assert "refused" not in value, value
        worst = {k: amount for k, amount in value.items() if amount > case.limit}
        assert not worst, f"rank {rank}: {worst}"


def test_verify_names_a_parameter_that_it_can_not_replace(pool: Any) -> None:
    found = pool("zoo_check", "verify", "parameters_read_from_containers", 2, 1)
    for kind, value in found[:2]:
        assert kind == "value", value
        assert "'first' from a container" in value["refused"]


@pytest.mark.parametrize("kind", ["attribute", "mode", "autocast", "uncapturable"])
def test_a_change_on_one_rank_is_one_error_on_all(kind: str, pool: Any) -> None:
    found = pool("zoo_check", "differ", kind)
    for outcome, value in found[:2]:
        assert outcome == "value", value
        assert value, "the forward continued"
    names = {value[0] for _, value in found[:2]}
    if kind == "uncapturable":
        assert names == {"RankDisagreement", "SpecError"}
        assert "mixes samples" in found[1][1][1]
    else:
        assert names == {"RankDisagreement"}
        assert "different operations" in found[0][1][1]


def test_a_model_that_is_gone_leaves_no_threads(pool: Any) -> None:
    found = pool("zoo_check", "threads_over_models", "plain_mlp")
    for rank, (kind, counts) in enumerate(found):
        assert kind == "value", counts
        assert counts[-1] <= counts[0], f"rank {rank}: {counts}"


@pytest.mark.parametrize(("size", "shares"), [(2, "uneven"), (3, "one")])
def test_models_that_pass_dictionaries_on_are_a_chain(
    size: int, shares: str, pool: Any
) -> None:
    for kind, value in pool("zoo_check", "chain", size, shares)[:size]:
        assert kind == "value", value
        assert value < 1e-9


def test_the_zoo_is_large_enough() -> None:
    refused = [case for case in zoo_models.CASES.values() if case.refused is not None]
    assert len(zoo_models.CASES) >= 60
    assert 15 <= len(refused) <= len(zoo_models.CASES) // 2
