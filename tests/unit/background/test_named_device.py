"""A device's name, with ranks as launchers give them."""

from __future__ import annotations

import pytest

from stretto.background.named_device import device_name

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1"}
HOROVOD = {"HOROVOD_RANK": "7", "HOROVOD_LOCAL_RANK": "3"}


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "cpu:0-0"),
        (TORCHRUN, "cpu:5-1"),
        (HOROVOD, "cpu:7-3"),
        (TORCHRUN | HOROVOD, "cpu:5-1"),
        ({"RANK": "5", **HOROVOD}, "cpu:5-0"),
    ],
)
def test_a_name_has_the_launchers_ranks(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    for each in TORCHRUN | HOROVOD:
        monkeypatch.delenv(each, raising=False)
    for each, value in variables.items():
        monkeypatch.setenv(each, value)
    assert device_name("cpu:{rank}-{local_rank}") == name
