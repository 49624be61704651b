"""Converted scripts on two ranks print what the originals print in one process."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from stretto.convert import (
    Choices,
    Evaluation,
    Kind,
    Target,
    convert_bytes,
    script_of_notebook,
)
from stretto.lab.ports import free_port

pytestmark = [pytest.mark.dist, pytest.mark.timeout(2400)]

HERE = Path(__file__).parent
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Script:
    """One script and what is to be known to compare it."""

    name: str
    tolerance: float = 1e-5
    """Relative, and absolute beside what the printed digits round."""
    first_epoch: int = 0
    """What the converted script's first ``set_epoch`` says."""
    noise_rows: int = 0
    """Rows of the noise that a step draws for the whole batch."""
    arguments: tuple[str, ...] = ()
    saves: str = ""

    def __str__(self) -> str:
        return self.name


SCRIPTS = [
    Script(name="plain.py", saves="digits_net.pth"),
    Script(
        name="arguments.py",
        first_epoch=1,
        arguments=("--save-model",),
        saves="digits_cnn.pt",
    ),
    # Gradients of bfloat16 products are rounded to 8 bits, by each rank its own.
    Script(name="amp.py", tolerance=5e-3),
    Script(name="accumulate.py"),
    Script(name="several_loaders.py"),
    Script(name="batch_sizes.py"),
    Script(name="containers.py"),
    Script(name="schedule.py", first_epoch=1, saves="checkpoints/best.pt"),
    Script(name="resume.py", saves="checkpoint.pth.tar"),
    Script(name="gan.py", noise_rows=32),
    Script(name="trainer.py", saves="trainer.pt"),
    Script(name="tutorial.py", saves="tutorial.pt"),
    Script(name="notebook.ipynb"),
    Script(name="phases.py"),
    Script(name="language_model.py", first_epoch=1),
    Script(name="vae.py", first_epoch=1),
    Script(name="heads.py"),
    Script(name="several_models.py"),
    Script(name="data_parallel.py"),
    Script(name="downloads.py"),
    Script(name="downloads_in_main.py"),
    Script(name="compact.py", saves="compact.pt"),
    Script(name="metrics.py"),
    Script(name="sentences.py", saves="bert-out/model.safetensors"),
]
if importlib.util.find_spec("transformers") is None:
    SCRIPTS = [s for s in SCRIPTS if s.name != "sentences.py"]

SOME = ("plain.py", "several_loaders.py", "schedule.py", "trainer.py", "gan.py")


def run(jobs, folder, name, size):
    """What each script printed on each rank."""
    folder.mkdir(exist_ok=True)
    listed = folder / f"{name}.json"
    listed.write_text(json.dumps(jobs))
    outs = [folder / f"{name}{rank}.out" for rank in range(size)]
    processes = []
    for rank, out in enumerate(outs):
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if size > 1:
            variables |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
            }
        program = [sys.executable, HERE / "rank_of_scripts.py", listed, out]
        log = out.with_suffix(".log").open("w")
        processes.append(
            subprocess.Popen(
                program,
                env={**os.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )
        log.close()
    try:
        end = time.perf_counter() + 700
        while time.perf_counter() < end:
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = "\n".join(o.with_suffix(".log").read_text()[-3000:] for o in outs)
    assert all(out.exists() for out in outs), logs
    return [json.loads(out.read_text()) for out in outs]


def as_script(text, name):
    return script_of_notebook(text, name=name) if name.endswith(".ipynb") else text


def jobs_of(texts, folder):
    folder.mkdir()
    jobs = []
    for script in SCRIPTS:
        if script.name not in texts:
            continue
        path = folder / Path(script.name).with_suffix(".py")
        path.write_text(as_script(texts[script.name], script.name))
        jobs.append(
            {
                "name": script.name,
                "path": str(path),
                "port": free_port(),
                "first_epoch": script.first_epoch,
                "noise_rows": script.noise_rows,
                "arguments": script.arguments,
            }
        )
    return jobs


def converted(choices, names=None):
    out = {}
    for script in SCRIPTS:
        if names is not None and script.name not in names:
            continue
        data = (HERE / "scripts" / script.name).read_bytes()
        out[script.name] = convert_bytes(data, name=script.name, choices=choices).after
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Originals in one process; converted for ours on two ranks and on one."""
    folder = tmp_path_factory.mktemp("runs")
    texts = {s.name: (HERE / "scripts" / s.name).read_text() for s in SCRIPTS}
    ours = converted(Choices())
    # Other ways for some only, to save time: the code differs in few places.
    some = {name: ours[name] for name in SOME}
    plain = converted(
        Choices(target=Target.DDP, evaluation=Evaluation.RANK0), names=SOME
    )
    return {
        "original": run(jobs_of(texts, folder / "a"), folder / "ra", "original", 1),
        "two ranks": run(jobs_of(ours, folder / "b"), folder / "rb", "ours", 2),
        "one rank": run(jobs_of(some, folder / "c"), folder / "rc", "alone", 1),
        "plain DDP": run(jobs_of(plain, folder / "d"), folder / "rd", "plain", 2),
    }


def numbers(text):
    return [float(n) for n in NUMBER.findall(text)]


def same(got, expected, tolerance):
    """Whether two outputs say the same but for rounding."""
    assert NUMBER.sub("#", got) == NUMBER.sub("#", expected)
    for a, b in zip(numbers(got), numbers(expected), strict=True):
        # Two roundings of the last printed digit, the sixth or an earlier one.
        assert a == pytest.approx(b, rel=tolerance, abs=2e-6 + tolerance * 0.1), got
    assert len(numbers(got)) > 3


@pytest.mark.parametrize(
    ("how", "script"),
    [("two ranks", s) for s in SCRIPTS]
    + [(h, s) for h in ("one rank", "plain DDP") for s in SCRIPTS if s.name in SOME],
    ids=str,
)
def test_losses_are_those_of_one_process(runs, how, script):
    original = runs["original"][0][script.name]
    assert original["error"] is None, original["error"]
    first, *others = [r[script.name] for r in runs[how]]
    assert first["error"] is None, first["error"]
    assert [o["error"] for o in others] == [None] * len(others)
    assert [o["text"] for o in others] == [""] * len(others)
    same(first["text"], original["text"], script.tolerance)


@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if s.saves], ids=lambda s: s.name
)
def test_a_checkpoint_has_the_originals_format_and_values(runs, script):
    def load(where):
        folder = Path(runs[where][0][script.name]["folder"])
        return torch.load(folder / script.saves, weights_only=False)

    flat = {name: list(leaves(load(name))) for name in ("original", "two ranks")}
    assert [k for k, _ in flat["two ranks"]] == [k for k, _ in flat["original"]]
    for (key, got), (_, want) in zip(flat["two ranks"], flat["original"], strict=True):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=key)
        elif isinstance(want, float):
            assert got == pytest.approx(want, rel=1e-4), key
        else:
            assert got == want, key


def leaves(value, path=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{place}]")
    else:
        yield path, value


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="runs with the others"
)
def test_a_transformers_script_is_converted_even_where_it_is_not_installed():
    data = (HERE / "scripts/sentences.py").read_bytes()
    conversion = convert_bytes(data, name="sentences.py", choices=Choices())
    compile(conversion.after, "sentences.py", "exec")
    assert "unwrap(model).save_pretrained" in conversion.after
    assert not [n for n in conversion.notes if n.kind is Kind.OPEN]
