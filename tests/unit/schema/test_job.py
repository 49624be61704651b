"""Job files: what they may hold, and how bad ones are refused."""

from __future__ import annotations

import json

import pytest

from stretto.errors import SpecError
from stretto.schema import codec
from stretto.schema.job import GpuRange, Job

PLAIN = {
    "kind": "job",
    "schema_version": 1,
    "made_by": "ana",
    "name": "vgg",
    "role": "foreground",
    "command": ["train.py", "--epochs", "90"],
    "directory": "/shared/vgg",
    "gpus": {"minimum": 2, "maximum": 8},
}


def decoded(**changes):
    body = {k: v for k, v in (PLAIN | changes).items() if v is not None}
    return codec.decode(json.dumps(body).encode(), Job, source="job.json")


def test_a_short_file_has_defaults():
    job = decoded()
    assert (job.launch, job.priority, job.restart.attempts) == ("stretto run", 0, 3)
    assert codec.decode(codec.encode(job), Job) == job


@pytest.mark.parametrize(
    ("changes", "place", "rule"),
    [
        ({"gpus": {"minimum": -1, "maximum": 2}}, "$.gpus.minimum", "must be >= 1"),
        ({"gpus": {"minimum": 4, "maximum": 2}}, "$.gpus.maximum", "must be >= 4"),
        ({"gpus": {"minimum": "2", "maximum": 2}}, "$.gpus.minimum", "Expected `int`"),
        ({"gpus": {"maximum": 2}}, "$.gpus.minimum", "is missing"),
        ({"gpus": {"least": 1, "maximum": 2}}, "$.gpus.least", "is called minimum now"),
        ({"gpus": {"minimum": 1, "most": 2}}, "$.gpus.most", "is called maximum now"),
        ({"role": "boss"}, "$.role", "one of foreground, background"),
        ({"command": []}, "$.command", "must be a list such as"),
        ({"command": "train.py"}, "$.command", "Expected `array`"),
        ({"command": ["a\0b"]}, "$.command[0]", "NUL"),
        ({"command": ["a", "b" * 131_072]}, "$.command[1]", "has 131072 bytes"),
        ({"environment": {"A": "b" * 131_070}}, "$.environment.A", "has 131072 bytes"),
        ({"command": ["b" * 131_071] * 9}, "$.command", "at most 1048576"),
        ({"directory": "vgg"}, "$.directory", "absolute path"),
        ({"directory": ""}, "$.directory", "must not be empty"),
        ({"directory": None}, "$.directory", "is missing"),
        ({"name": "../x"}, "$.name", "letters, digits"),
        ({"name": "x" * 64}, "$.name", "1 to 63"),
        ({"environment": {"RANK": "0"}}, "$.environment.RANK", "set by the cluster"),
        (
            {"environment": {"STRETTO_CLUSTER_ATTEMPT": ""}},
            "$.environment.STRETTO_CLUSTER_ATTEMPT",
            "set by the cluster",
        ),
        ({"environment": {"A B": "0"}}, "$.environment.A B", "is not the name"),
        ({"after": ["vgg"]}, "$.after[0]", "cannot start after itself"),
        ({"after": ["a", "a"]}, "$.after[1]", "is a duplicate"),
        ({"priority": 5000}, "$.priority", "must be <= 1000"),
        ({"batch": 0}, "$.batch", "must be >= 1"),
        ({"memory_bytes": -1}, "$.memory_bytes", "must be >= 0"),
        ({"launch": "bash -c"}, "$.launch", "one of stretto run"),
        ({"gang": {"kind": "claims"}}, "$.gang", "only a background job"),
        (
            {"role": "background", "burst": {"factory": "a.py:f"}},
            "$.burst",
            "no burst plan",
        ),
        ({"burst": {"factory": "a.py"}}, "$.burst.factory", "FILE.py:NAME"),
        (
            {"burst": {"factory": "a.py:f", "amplification_limit": 0.5}},
            "$.burst.amplification_limit",
            "must be >= 1",
        ),
        ({"restart": {"signal": "KILL"}}, "$.restart.signal", "one of TERM"),
        ({"restart": {"grace_s": 1e9}}, "$.restart.grace_s", "one day"),
        ({"restart": {"attempts": -1}}, "$.restart.attempts", "must be >= 0"),
        (
            {"background": {"allow": True, "max_loss": 1.5}},
            "$.background.max_loss",
            "must be < 1",
        ),
        ({"shell": "rm"}, "$.shell", "is an unknown key"),
        ({"kind": "plan"}, "$.kind", "must be 'job'"),
    ],
)
def test_a_bad_job_file_is_refused_with_its_place(changes, place, rule):
    with pytest.raises(SpecError) as caught:
        decoded(**changes)
    assert caught.value.place == place
    assert rule in str(caught.value)
    assert str(caught.value).startswith("job.json: ")


def test_a_range_holds_its_ends():
    assert GpuRange(minimum=3, maximum=3).minimum == 3


def test_a_value_of_the_environment_is_named_by_its_key():
    with pytest.raises(SpecError, match=r"\$\.environment\.B: Expected `str`"):
        decoded(environment={"A": "1", "B": 2})
