"""Broken files and impossible options end in one line and a documented code."""

from __future__ import annotations

import json
import random

import pytest
from click.testing import CliRunner

from stretto import _api, zoo
from stretto.cli._main import group
from stretto.errors import StrettoError
from stretto.schema import codec

CODES = {0, 1, 2, 3}
ODD = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "1e-320", "-0.0"),
    *("1" + "0" * 400, "-1" + "0" * 5000, str(2**63), str(2**62), "-1", "0", "1", "3"),
    *('""', '"x"', '"ring"', '"\\u0000"', "null", "true", "[]", "{}", "[[]]", "1.5"),
)
OPTIONS = (
    *("--planner=ddp", "--planner=libra", "--planner=aiacc", "--planner=horovod"),
    *("--planner=asc-wfbp", "--planner=libra-m", "--planner=exhaustive", "--json"),
    *("--cap=0", "--cap=" + "9" * 400, "--cap=1", "--cap=x", "--unit=1", "--unit=4"),
    *("--lanes=3", "--lanes=99999999999999999999", "--lanes=0", "--lanes=-1"),
    *("--max-lanes=1", "--max-lanes=99999999999", "--cycle-ms=nan", "--cycle-ms=-1"),
    *("--cycle-ms=inf", "--groups=1", "--groups=" + "9" * 30, "--chunks=7"),
    *("--search=grid", "--search=literal", "--search=x", "--startup=mixed"),
    *("--startup=x", "--literal", "--corrected", "--dims=all", "--dims=", "--dims=x,y"),
    *("--dims=forward", "--dims=algorithm", "--time-limit=nan", "--time-limit=1e-9"),
    *("--fastest", "--robust", "--no-fusion", "--no-lanes", "--no-slices"),
)
PLAN_OPTIONS = (*OPTIONS, "--wire-dtype=bfloat16", "--wire-dtype=float32")
SIMULATE_OPTIONS = (
    *OPTIONS,
    *("--ranks=1", "--ranks=7", "--ranks=0", "--ranks=2,x", "--ranks=" + "9" * 40),
    *("--ranks=4,8,1000000000000", "--ranks="),
)


@pytest.fixture(scope="module")
def bodies() -> dict[str, str]:
    workload = zoo.workload("vgg11", device="v100")
    cluster = zoo.cluster("libra")
    plan = _api.plan(workload, cluster, "aiacc")
    values = {"workload": workload, "cluster": cluster, "plan": plan}
    return {kind: codec.encode(value).decode() for kind, value in values.items()}


def broken(text: str, rng: random.Random) -> bytes:
    """A file with one thing wrong: a value, a key, a byte, or its end missing."""
    how = rng.random()
    if how < 0.1:
        return text.encode()[: rng.randrange(len(text))]
    if how < 0.2:
        data = bytearray(text.encode())
        data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    body = json.loads(text)
    here = body
    while True:
        key = rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
        below = here[key]
        if not isinstance(below, dict | list) or not below or rng.random() < 0.15:
            break
        here = below
    if how < 0.3:
        del here[key]
        return json.dumps(body).encode()
    here[key] = "@odd@"
    return json.dumps(body).replace('"@odd@"', rng.choice(ODD)).encode()


def check(*args: str) -> None:
    result = CliRunner().invoke(group, args)
    error = result.exception
    if isinstance(error, StrettoError):
        assert str(error)
        assert "\n" not in str(error)
        return
    assert error is None or isinstance(error, SystemExit), (args, repr(error))
    assert result.exit_code in CODES


@pytest.mark.parametrize("seed", range(8))
def test_broken_files_never_give_a_traceback(seed, bodies, tmp_path) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        which = rng.choice(list(bodies))
        for kind, text in bodies.items():
            data = broken(text, rng) if kind == which else text.encode()
            (tmp_path / kind).write_bytes(data)
        files = [str(tmp_path / "workload"), str(tmp_path / "cluster")]
        if which == "plan":
            check("simulate", *files, "--plan", str(tmp_path / "plan"), "--json")
        else:
            planner = rng.choice(("ddp", "joint", "libra", "asc-wfbp", "horovod"))
            check("plan", *files, "--planner", planner)


@pytest.mark.parametrize("seed", range(8))
def test_impossible_options_never_give_a_traceback(seed, bodies, tmp_path) -> None:
    rng = random.Random(seed)
    for kind, text in bodies.items():
        (tmp_path / kind).write_text(text)
    files = [str(tmp_path / "workload"), str(tmp_path / "cluster")]
    for _ in range(20):
        check("plan", *files, *rng.sample(PLAN_OPTIONS, rng.randint(1, 3)))
        check("simulate", *files, *rng.sample(SIMULATE_OPTIONS, rng.randint(1, 3)))


@pytest.mark.parametrize(
    ("planner", "option", "said"),
    [
        ("ddp", "--lanes=3", "has no option --lanes; it has --cap, --first-cap"),
        ("wfbp", "--no-fusion", "it has no options"),
        ("horovod", "--cycle-ms=nan", "'--cycle-ms': nan is not a finite number"),
        ("horovod", "--cycle-ms=-1", "'--cycle-ms': -1.0 is not in the range x>0"),
        ("joint", "--max-lanes=5000", "--max-lanes must be from 1 to 1024, got 5000"),
        ("aiacc", "--unit=1", "--unit must be at least"),
    ],
)
def test_option_errors_name_flags(planner, option, said, bodies, tmp_path) -> None:
    for kind, text in bodies.items():
        (tmp_path / kind).write_text(text)
    for head in (("plan",), ("simulate",)):
        result = CliRunner().invoke(
            group,
            [
                *head,
                *(str(tmp_path / kind) for kind in ("workload", "cluster")),
                *("--planner", planner, option),
            ],
        )
        assert said in result.output + str(result.exception)
