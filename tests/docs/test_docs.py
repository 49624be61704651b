"""What the documentation shows runs: Python blocks, command lines, links."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

import stretto.testing
from stretto.cli import run as run_command
from stretto.cli._main import group
from stretto.testing.instances import capped_cluster, small_workload
from support.plans import plan_in_turn

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

NOT_RUN = re.compile(r"<!-- not run: .+ -->")
"""Before a block: it isn't run, and why."""

CONTINUES = "<!-- continues -->"
"""Before a block: the page's previous block of the language runs first."""


def blocks(language):
    """Return every fenced block of a language that is to be run."""
    return list(_blocks(language))


def _blocks(language):
    for page in PAGES:
        lines = page.read_text().splitlines()
        begin, so_far = None, ""
        for number, line in enumerate(lines):
            if begin is None and line.strip() == f"```{language}":
                begin = number
            elif begin is not None and line.strip() == "```":
                before = next((x for x in reversed(lines[:begin]) if x.strip()), "")
                text = "\n".join(lines[begin + 1 : number])
                so_far = so_far + "\n" + text if before == CONTINUES else text
                if not NOT_RUN.search(before):
                    yield pytest.param(
                        so_far, id=f"{page.relative_to(ROOT)}:{begin + 1}"
                    )
                begin = None


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    """A process group of one rank, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRETTO_PLAN_CACHE", "off")
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("text", blocks("python"))
def test_a_python_block_runs(text, one_rank):
    names = {"model": torch.nn.Linear(4, 2), "torch": torch, "x": torch.ones(4, 4)}
    exec(compile(text, "<block>", "exec"), names)


def command_lines(text):
    """Every call of `stretto` in a block of shell lines."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while "stretto" in words:
            words = words[words.index("stretto") + 1 :]
            if "--" in words:
                cut = words.index("--")
                yield words[:cut]
                words = words[cut + 1 :]
            else:
                yield words
                break


def option_names(command):
    return {
        name
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help", "-h"}


TORCHRUN = {"--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"}


@pytest.mark.parametrize("text", blocks("bash"))
def test_a_command_line_names_commands_and_options_that_exist(text):
    for words in command_lines(text):
        command, name = group, "stretto"
        context = click.Context(group)
        words = list(words)
        while isinstance(command, click.Group) and words:
            found = command.get_command(context, words[0])
            assert found is not None, f"no command {words[0]!r} in {command.name}"
            command, name = found, words.pop(0)
        known = option_names(command)
        for word in words:
            if word.endswith(".py"):
                break  # what follows belongs to the script
            option = word.split("=")[0]
            if not option.startswith("-") or option.lstrip("-")[:1].isdigit():
                continue
            allowed = known | (TORCHRUN if name == "run" else set())
            assert option in allowed, f"stretto {name} has no option {option}"


@pytest.mark.parametrize("text", blocks("bash"))
def test_a_documented_run_is_one_that_torchrun_can_start(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "other.py"):
        (tmp_path / name).touch()
    plan_in_turn([["weight"]], ranks=2).save(tmp_path / "plan.json")
    started = []

    def record(arguments, **_options):
        started.append(get_args_parser().parse_args(list(arguments)))

    def record_here(arguments):
        started.append(SimpleNamespace(training_script=arguments[0]))

    monkeypatch.setattr(run_command, "_launch", record)
    monkeypatch.setattr(run_command, "_run_here", record_here)  # a background
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for variable in run_command.SETTINGS.values():
        monkeypatch.setenv(variable, "")  # what the command sets is removed again
    lines = [words[1:] for words in command_lines(text) if words[:1] == ["run"]]
    for words in lines:
        run_command.command.main(words, standalone_mode=False)
    assert len(started) == len(lines)
    for parsed in started:
        assert not parsed.training_script.startswith("-")


def test_blocks_of_both_kinds_are_found():
    assert len(blocks("python")) >= 3
    assert len(blocks("bash")) >= 10
    assert list(command_lines("torchrun --no-python stretto run a.py  # x")) == [
        ["run", "a.py"]
    ]


def test_links_between_pages_lead_somewhere():
    missing = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert missing == []


def page_blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.S)


GUIDES = {
    "docs/how-to/add-a-planner.md": "planner_checks",
    "docs/how-to/add-a-technique.md": "technique_checks",
}


@pytest.mark.parametrize("page", GUIDES)
def test_a_guides_class_passes_the_suite(page):
    names = {"__name__": "guide"}
    exec(compile(page_blocks(page, "python")[0], page, "exec"), names)
    [kind] = [v for v in names.values() if getattr(v, "__module__", "") == "guide"]
    checks = getattr(stretto.testing, GUIDES[page])(kind)
    assert checks
    for check in checks:
        check()


@pytest.mark.parametrize("page", GUIDES)
def test_a_guides_entry_point_works(page, tmp_path, monkeypatch):
    text = page_blocks(page, "toml")[0]
    [(group_name, entries)] = tomllib.loads(text)["project"]["entry-points"].items()
    [(name, value)] = entries.items()
    module = value.partition(":")[0]
    (tmp_path / f"{module}.py").write_text(page_blocks(page, "python")[0])
    info = tmp_path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group_name}]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    if group_name == "stretto.techniques":
        names = {}
        exec(compile(page_blocks(page, "python")[-1], page, "exec"), names)
        assert names["options"].techniques == ("predicted", name)
        return
    workload, cluster = small_workload(), capped_cluster()
    assert stretto.plan(workload, cluster, name).planner == name
    for line in page_blocks(page, "bash"):
        for words in command_lines(line):
            monkeypatch.chdir(tmp_path)
            workload.save("workload.json")
            cluster.save("cluster.json")
            result = CliRunner().invoke(group, words)
            assert result.exit_code == 0, result.output


def resolved(name):
    package, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(package), attribute)


FRAMEWORKS = {
    "stretto.horovod.tensorflow": "tensorflow",
    "stretto.jax": "jax",
    "stretto.keras": "keras",
}


def test_every_public_name_is_in_the_reference():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    listed = set(re.findall(r"^::: ([\w.]+)$", pages, re.M))
    public = set((ROOT / "tests/architecture/public_names.txt").read_text().split())
    assert listed <= public
    missing = tuple(
        f"{package}."
        for package, needed in FRAMEWORKS.items()
        if importlib.util.find_spec(needed) is None
    )
    listed, public = (
        {name for name in names if not name.startswith(missing)}
        for names in (listed, public)
    )
    documented = [resolved(name) for name in listed]
    missing = {
        name
        for name in public - listed
        if not any(resolved(name) is value for value in documented)
    }
    assert missing == {"stretto.__version__"}
