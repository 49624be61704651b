from __future__ import annotations

from pathlib import Path

import pytest

from stretto.cli import doctor
from stretto.errors import PlanMismatch
from stretto.runtime.backends import nccl_settings
from stretto.runtime.backends.nccl_settings import LAUNCH_ORDER, OrderSetting


def settings(**values):
    return {name: (value, "the environment") for name, value in values.items()}


def test_the_environment_comes_first_then_ones_own_file_then_the_systems():
    files = {
        Path("/srv/u/.nccl.conf"): "NCCL_MAX_CTAS=4\n# NCCL_NET=IB\nNCCL_ALGO = Ring",
        Path("/etc/nccl.conf"): "NCCL_MAX_CTAS=9\nNCCL_PROTO=LL\nno setting",
    }
    environment = {"HOME": "/srv/u", "NCCL_PROTO": "Simple", "PATH": "/bin"}
    assert nccl_settings.nccl_settings(environment, files.get) == {
        "NCCL_PROTO": ("Simple", "the environment"),
        "NCCL_MAX_CTAS": ("4", "/srv/u/.nccl.conf"),
        "NCCL_ALGO": ("Ring", "/srv/u/.nccl.conf"),
    }
    named = {**environment, "NCCL_CONF_FILE": "/my.conf"}
    found = nccl_settings.nccl_settings(named, files.get)
    assert found["NCCL_MAX_CTAS"] == ("9", "/etc/nccl.conf")


@pytest.mark.parametrize("name", nccl_settings.CTA_VARIABLES)
def test_what_overrides_a_plans_ctas_is_refused_or_logged(name):
    found = settings(**{name: "8"})
    (warning,) = nccl_settings.check_settings(found, sets_ctas=False)
    assert f"{name}=8 in the environment" in warning
    with pytest.raises(PlanMismatch, match=rf"{name}=8 in the environment .*unset"):
        nccl_settings.check_settings(found, sets_ctas=True)


def test_what_only_changes_costs_is_logged_and_nothing_else_is():
    found = settings(NCCL_NET="Socket", CUDA_DEVICE_MAX_CONNECTIONS="1")
    network, queue = nccl_settings.check_settings(found, sets_ctas=True)
    assert "NCCL_NET=Socket" in network
    assert "overlap" in queue
    harmless = settings(NCCL_DEBUG="INFO", CUDA_DEVICE_MAX_CONNECTIONS="8")
    assert nccl_settings.check_settings(harmless, sets_ctas=True) == []


def test_the_order_of_launches_is_set_in_time_or_logged_or_refused():
    def order(found, lanes, *, launched=False):
        return nccl_settings.launch_order(found, lanes=lanes, launched=launched)

    assert order({}, 1) is OrderSetting.FIXED
    assert order({}, 2) is OrderSetting.SET
    assert order({}, 2, launched=True) is OrderSetting.TOO_LATE
    yes, no = (settings(**{LAUNCH_ORDER: value}) for value in ("1", "0"))
    assert order(yes, 2, launched=True) is OrderSetting.FIXED
    assert order(no, 1) is OrderSetting.FIXED
    with pytest.raises(PlanMismatch, match=rf"2 lanes.*{LAUNCH_ORDER}=0.*unset"):
        order(no, 2)


def test_doctor_reports_every_variable_that_a_plan_meets():
    met = {*nccl_settings.CTA_VARIABLES, *nccl_settings.OTHER_VARIABLES}
    assert met <= set(doctor.OVERRIDES)
