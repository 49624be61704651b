"""The wheel without extras: what it needs, what it does, what it refuses.

The environment has the wheel and its own requirements only, which are linked from the
environment of the tests: nothing is downloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]

CORE = {"click", "msgspec", "numpy", "rich", "scipy", "torch"}
"""The requirements of the package itself."""

TRAINING = """\
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
held = [torch.zeros(2, 4) for _ in range(2)]
dist.all_gather(held, model.module.weight.detach())
sys.stdout.write(f"{type(model).__module__} {torch.equal(*held)}\\n")
dist.barrier()
dist.destroy_process_group()
"""


def required(name: str, extra: str = "") -> Iterator[tuple[str, str]]:
    """The names and extras that an installed package requires."""
    for line in distribution(name).requires or ():
        yield from wanted(Requirement(line), extra)


def wanted(requirement: Requirement, extra: str) -> Iterator[tuple[str, str]]:
    if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
        yield from ((requirement.name, each) for each in ("", *requirement.extras))


def link(name: str, site: Path) -> None:
    """Make an installed package visible in another environment."""
    found = distribution(name)
    tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    for top in tops:
        target = site / top
        if not target.exists():
            target.symlink_to(Path(str(found.locate_file(top))).resolve())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, without extras."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, timeout=120, capture_output=True)
    [wheel] = folder.glob("*.whl")
    home = folder / "environment"
    venv.create(home, symlinks=True)
    install = [sys.executable, "-m", "pip", "--python", home / "bin" / "python"]
    subprocess.run(
        [*install, "install", "--quiet", "--no-index", "--no-deps", wheel],
        check=True,
        timeout=300,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    [site] = home.glob("lib/python*/site-packages")
    [info] = site.glob("stretto-*.dist-info")
    todo = {
        pair
        for line in Distribution.at(info).requires or ()
        for pair in wanted(Requirement(line), "")
    }
    assert {name for name, _ in todo} == CORE
    done: set[tuple[str, str]] = set()
    while todo:
        name, extra = todo.pop()
        link(name, site)
        done.add((name, extra))
        todo |= set(required(name, extra)) - done
    return home


def run(home: Path, *command: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    left_out = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    program, *arguments = command
    return subprocess.run(
        [home / "bin" / program, *arguments],
        cwd=cwd,
        env={
            **environment,
            "PATH": f"{home / 'bin'}:{environment['PATH']}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "STRETTO_PLAN_CACHE": "off",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_extras_are_absent(plain: Path, tmp_path: Path) -> None:
    code = (
        "from importlib.util import find_spec\n"
        "import stretto\n"
        "print(stretto.__file__)\n"
        "print([n for n in ('libcst', 'optuna', 'sklearn', 'hypothesis', 'pytest')"
        " if find_spec(n)])\n"
    )
    done = run(plain, "python", "-c", code, cwd=tmp_path)
    where, found = done.stdout.splitlines()
    assert Path(where).is_relative_to(plain)
    assert found == "[]"


def test_help_names_every_command(plain: Path, tmp_path: Path) -> None:
    done = run(plain, "stretto", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "convert" in done.stdout


def test_it_plans(plain: Path, tmp_path: Path) -> None:
    for arguments in (
        "zoo show resnet152 -o workload.json",
        "zoo cluster libra -o cluster.json",
        "plan workload.json cluster.json -o plan.json",
        "report workload.json cluster.json plan.json -o page.html",
    ):
        done = run(plain, "stretto", *arguments.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.json").is_file()
    assert (tmp_path / "page.html").is_file()


def test_two_ranks_train(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    done = run(
        plain,
        "stretto",
        *("run", "--standalone", "--nproc-per-node", "2", "train.py"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["stretto._api.ddp True"] * 2


@pytest.mark.parametrize(
    "command", ["convert train.py", "run --convert --standalone train.py"]
)
def test_converting_names_the_extra(plain: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    done = run(plain, "stretto", *command.split(), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "stretto: error: converting scripts needs LibCST, which is not installed: "
        'pip install "stretto[convert]"\n'
    )


def test_importing_convert_is_an_import_error(plain: Path, tmp_path: Path) -> None:
    code = "try: import stretto.convert\nexcept ImportError as e: print(e, e.name)"
    done = run(plain, "python", "-c", code, cwd=tmp_path)
    assert done.stdout.endswith('pip install "stretto[convert]" libcst\n'), done.stderr


def test_the_demo_names_its_extra(plain: Path, tmp_path: Path) -> None:
    done = run(plain, "stretto", "demo", "--quick", cwd=tmp_path)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert 'pip install "stretto[demo]"' in line
    assert not (tmp_path / "demo-out").exists()
