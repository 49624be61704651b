from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner

from stretto.background.priority import Isolation
from stretto.cli import doctor
from stretto.errors import LabError


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.11.0", "ok"),
        ("2.13.0+cpu", "ok"),
        ("2.14.1", "ok"),
        ("2.15.0", "note"),
        ("3.0.0a0+git123", "note"),
        ("2.10.1", "wrong"),
        ("1.13.1", "wrong"),
        ("unknown", "wrong"),
    ],
)
def test_torch_outside_the_tested_range_is_reported_with_the_line_to_run(
    version, status
):
    check = doctor.torch_version_check(version)
    assert check.status == status
    assert version in check.found
    assert bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize("name", doctor.OVERRIDES)
def test_a_variable_that_overrides_a_plan_is_reported(name):
    (check,) = doctor.environment_checks({name: "8", "PATH": "/bin"})
    assert check.status == "note"
    assert f"{name}=8" in check.found
    assert f"unset {name}" in check.remedy


@pytest.mark.parametrize(("value", "status"), [("1", "note"), ("8", "ok")])
def test_one_cuda_connection_is_reported_because_it_ends_overlap(value, status):
    (check,) = doctor.environment_checks({"CUDA_DEVICE_MAX_CONNECTIONS": value})
    assert check.status == status
    assert ("overlap" in check.found) == (status == "note")


@pytest.mark.parametrize(("value", "status"), [("0", "note"), ("1", "ok")])
def test_a_launch_order_that_is_switched_off_is_reported(value, status):
    (check,) = doctor.environment_checks({"NCCL_LAUNCH_ORDER_IMPLICIT": value})
    assert check.status == status
    assert ("deadlock" in check.found) == (status == "note")


def test_a_clean_environment_is_said_to_be_clean():
    (check,) = doctor.environment_checks({"PATH": "/bin"})
    assert check.status == "ok"


def test_why_a_lab_fails_is_reported():
    def refused():
        raise LabError("no namespaces here")

    assert doctor.lab_failure(refused, []) == "no namespaces here"
    assert doctor.lab_failure(lambda: 0, []) is None
    failure = doctor.lab_failure(lambda: 124, ["it took too long"])
    assert "124" in failure
    assert "too long" in failure


def test_the_json_is_one_object_with_every_check(monkeypatch):
    monkeypatch.setenv("NCCL_NET", "Socket")
    result = CliRunner().invoke(doctor.command, ["--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert sorted(report) == ["checks", "stretto"]
    names = [check["name"] for check in report["checks"]]
    assert {"python", "torch", "gloo", "environment", "lab"} <= set(names)
    assert {"interfaces", "gloo transport", "descriptors", "threads"} <= set(names)
    assert "nccl" in names
    for check in report["checks"]:
        assert sorted(check) == ["found", "name", "remedy", "status"]
        assert check["status"] in ("ok", "note", "wrong")
        assert check["remedy"] or check["status"] == "ok"
    assert any("NCCL_NET=Socket" in check["found"] for check in report["checks"])


def test_what_is_wrong_ends_with_1_and_is_in_the_text(monkeypatch):
    monkeypatch.setattr(doctor, "FIRST_TORCH", (98, 0))
    monkeypatch.setattr(doctor, "LAST_TORCH", (99, 0))
    monkeypatch.setattr(doctor, "_lab_checks", lambda: iter(()))
    result = CliRunner().invoke(doctor.command, [])
    assert result.exit_code == 1
    assert "wrong  torch" in result.output
    assert "-> pip install 'torch>=2.11,<2.15'" in result.output


@pytest.fixture
def jax_installed(monkeypatch):
    def install(*plugins):
        monkeypatch.setattr(doctor.metadata, "version", lambda _name: "0.10.2")
        points = [EntryPoint(name, "x", "jax_plugins") for name in plugins]
        monkeypatch.setattr(doctor.metadata, "entry_points", lambda **_group: points)

    return install


def test_jax_on_cpu_is_reported_with_the_options_that_let_it_overlap(jax_installed):
    jax_installed()
    (check,) = doctor.jax_checks({})
    assert check.status == "note"
    assert "joins all gradients into one all-reduce" in check.found
    assert "compiler_options=stretto.jax.compile_options()" in check.remedy


def test_jax_on_cpu_without_the_combiner_is_fine(jax_installed):
    jax_installed()
    flags = "--xla_disable_hlo_passes=cpu-all-reduce-combiner"
    (check,) = doctor.jax_checks({"XLA_FLAGS": flags})
    assert check.status == "ok"


@pytest.mark.parametrize(
    ("platforms", "says"), [("cuda", "runs on CPUs only"), ("cpu", "one all-reduce")]
)
def test_jax_with_a_plugin_runs_on_the_cpu_if_a_variable_says_so(
    jax_installed, platforms, says
):
    jax_installed("xla_cuda12")
    (check,) = doctor.jax_checks({"JAX_PLATFORMS": platforms})
    assert says in check.found


def test_without_jax_there_is_no_line_on_it(monkeypatch):
    def missing(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    assert not list(doctor.jax_checks({}))


def test_the_isolation_of_background_jobs_is_reported_with_what_would_help():
    works = Isolation(method="cgroup", detail="cgroup /x with cpu.idle", ratio=0.004)
    check = doctor.isolation_check(works)
    assert check.status == "ok"
    assert "cpu.idle" in check.found
    assert "0.004" in check.found
    assert check.remedy == ""
    fails = Isolation(method="scheduler", detail="SCHED_IDLE", ratio=0.98)
    check = doctor.isolation_check(fails)
    assert check.status == "note"
    assert "0.980" in check.found
    assert "Delegate=cpu" in check.remedy
