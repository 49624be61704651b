"""Variables of launchers and settings."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import HashStore

from stretto.errors import SpecError
from stretto.horovod.environment import HorovodSettings, place, settings, unknown
from stretto.horovod.topology import arrange, exchange
from stretto.rank_variables import Place
from stretto.runtime.ranks import Ranks

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "h0",
    "MASTER_PORT": "1234",
}
HOROVOD = {
    "HOROVOD_RANK": "2",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h7",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "99",
}


def test_places_of_torchrun_and_of_horovods_launcher() -> None:
    wanted = Place(
        rank=5, size=8, local_rank=1, local_size=4, host=1, address="h0", port=1234
    )
    assert place(TORCHRUN) == wanted
    assert place({**HOROVOD, **TORCHRUN}) == wanted
    assert place(HOROVOD) == Place(
        rank=2, size=4, local_rank=0, local_size=2, host=1, address="h7", port=99
    )
    assert place({**HOROVOD, "MASTER_ADDR": "m", "MASTER_PORT": "1"}) == Place(
        rank=2, size=4, local_rank=0, local_size=2, host=1, address="m", port=1
    )
    assert place({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}) == Place(rank=0, size=1)
    assert place({}) is None
    assert place({"RANK": "0"}) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"HOROVOD_RANK": "-1", "HOROVOD_SIZE": "2"},
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "0"},
    ],
)
def test_a_place_that_can_not_be_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(SpecError, match="RANK"):
        place(wrong)


def test_settings_with_horovods_units() -> None:
    assert settings({}) == HorovodSettings()
    assert settings(
        {
            "HOROVOD_FUSION_THRESHOLD": "67108864",
            "HOROVOD_CYCLE_TIME": "3.5",
            "HOROVOD_NUM_NCCL_STREAMS": "4",
            "HOROVOD_CACHE_CAPACITY": "2048",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30",
            "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
            "HOROVOD_TIMELINE": "t.json",
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        }
    ) == HorovodSettings(
        unit_bytes=64 * 2**20,
        cycle_s=0.0035,
        lanes=4,
        known_requests=2048,
        stall_s=7.0,
        timeout_s=30.0,
        dynamic_process_sets=True,
        timeline="t.json",
        mark_cycles=True,
    )
    assert settings({"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_s == float("inf")
    assert settings({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}).timeout_s is None
    assert settings({"HOROVOD_DYNAMIC_PROCESS_SETS": "0"}) == HorovodSettings()
    for name in ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"):
        with pytest.raises(SpecError, match=name):
            settings({name: "often"})


def test_a_fusion_threshold_that_cuts_to_dust_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert settings({"HOROVOD_FUSION_THRESHOLD": "0"}).unit_bytes == 64 * 2**10
    assert "HOROVOD_FUSION_THRESHOLD=0 is raised" in caplog.text


def test_names_without_effect() -> None:
    silent = {**HOROVOD, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CYCLE_TIME": "1"}
    assert unknown({**TORCHRUN, **silent, "HOROVOD_STRETTO_X": "1"}) == []
    more = {"HOROVOD_TYPO": "1", "HOROVOD_AUTOTUNE": "1"}
    assert unknown({**silent, **more}) == ["HOROVOD_AUTOTUNE", "HOROVOD_TYPO"]


def test_a_host_whose_name_can_not_be_looked_up_has_a_topology(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> str:
        raise OSError("no network in these tests")

    monkeypatch.setattr(socket, "gethostname", refuse)
    alone = Ranks(rank=0, size=1, names=(0,), store=HashStore(), timeout_s=5.0)
    assert exchange(alone, None).local_size == 1


def test_topology_of_even_and_of_uneven_hosts() -> None:
    found = [arrange(["a", "a", "b", "b"], [0, 1, 0, 1], r) for r in range(4)]
    assert [t.local_rank for t in found] == [0, 1, 0, 1]
    assert [t.cross_rank for t in found] == [0, 0, 1, 1]
    assert {(t.local_size, t.cross_size, t.is_homogeneous) for t in found} == {
        (2, 2, True)
    }
    found = [arrange(["a", "b", "b"], [0, 0, 1], r) for r in range(3)]
    assert [t.local_size for t in found] == [1, 2, 2]
    assert [(t.cross_rank, t.cross_size) for t in found] == [(0, 2), (1, 2), (0, 1)]
    assert not any(t.is_homogeneous for t in found)
