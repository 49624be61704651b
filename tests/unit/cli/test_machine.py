from __future__ import annotations

import os

import pytest

from stretto.cli import _machine


def test_an_interface_that_is_asked_for_and_missing_is_wrong_with_one_that_is_there():
    (check,) = _machine.interface_checks({"GLOO_SOCKET_IFNAME": "ib0"}, ["lo", "eth1"])
    assert check.status == "wrong"
    assert "ib0" in check.found
    assert check.remedy == "export GLOO_SOCKET_IFNAME=eth1"
    (check,) = _machine.interface_checks({"GLOO_SOCKET_IFNAME": "lo,lo"}, ["lo"])
    assert (check.status, check.found) == ("ok", "lo")


def test_a_transport_that_this_build_lacks_is_wrong():
    said = "has TCP\ndefault works\n"
    (check,) = _machine.gloo_checks(said, {})
    assert (check.status, check.found) == ("ok", "transports TCP")
    (check,) = _machine.gloo_checks(said, {"GLOO_DEVICE_TRANSPORT": "ibverbs"})
    assert check.status == "wrong"
    assert check.remedy == "unset GLOO_DEVICE_TRANSPORT"


def test_a_default_device_that_fails_is_reported_with_gloos_reason():
    said = "has TCP\ndefault fails: makeDeviceForHostname(): no address\n"
    (check,) = _machine.gloo_checks(said, {})
    assert check.status == "wrong"
    assert "no address" in check.found
    (silent,) = _machine.gloo_checks("", {})
    assert silent.status == "wrong"


def test_this_machine_has_a_transport():
    (check,) = _machine.gloo_checks(_machine.try_gloo(), os.environ)
    assert check.status == "ok", check
    assert "TCP" in check.found


def test_limits_that_a_usual_plan_passes_are_reported_with_the_line_that_raises_them():
    few, short = _machine.limit_checks(descriptors=512, threads=100)
    assert few.status == short.status == "note"
    assert "512" in few.found
    assert few.remedy.startswith("ulimit -n ")
    assert short.remedy.startswith("ulimit -u ")
    for check in _machine.limit_checks(descriptors=None, threads=None):
        assert check.status == "ok"
        assert "any number" in check.found


@pytest.mark.parametrize(
    ("built", "loaded", "devices", "status", "words"),
    [
        ((2, 30, 7), (2, 30, 7), 1, "ok", "as built and as loaded"),
        ((2, 30, 7), (2, 32, 3), 1, "note", "2.32.3 is loaded"),
        ((2, 28, 9), None, 1, "ok", "2.28.9"),
        (None, None, 2, "note", "though there are devices"),
        (None, None, 0, "ok", "not in this build"),
    ],
)
def test_nccl_is_reported_as_built_and_as_loaded(built, loaded, devices, status, words):
    check = _machine.nccl_check(built, loaded, devices)
    assert check.status == status
    assert words in check.found
    assert bool(check.remedy) == (status != "ok")


def test_mps_is_found_by_its_daemons_pipes(tmp_path):
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert "not installed" in _machine.mps_check(environment, None).found
    assert "not running" in _machine.mps_check(environment, "a path").found
    (tmp_path / "control").touch()
    assert "serves" in _machine.mps_check(environment, "a path").found


def test_settings_in_nccls_files_are_reported_with_their_file():
    settings = {
        "NCCL_MAX_CTAS": ("4", "/etc/nccl.conf"),
        "NCCL_NET": ("Socket", "the environment"),
    }
    (check,) = _machine.file_checks(settings)
    assert "NCCL_MAX_CTAS=4 is set in /etc/nccl.conf" in check.found
    assert check.status == "note"
