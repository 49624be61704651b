"""Start and end: launchers, process groups, and what is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import stretto.horovod.torch as hvd
from stretto.lab.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.dist.conftest import Ranks

pytestmark = pytest.mark.dist

CYCLES = 40


def launch(
    folder: Path, script: str, environments: list[dict[str, str]]
) -> list[tuple[Any, str]]:
    """What each process printed last, as JSON, and what it wrote to its log."""
    file = folder / "script.py"
    file.write_text(
        "import json, logging, os, threading\nimport torch\n"
        "import stretto.horovod.torch as hvd\n" + textwrap.dedent(script)
    )
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        and not name.startswith("HOROVOD_")
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(file)],
            env={
                **clean,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    found = []
    try:
        for process in processes:
            out, log = process.communicate(timeout=90)
            assert process.returncode == 0, log
            found.append((json.loads(out.splitlines()[-1]), log))
    finally:
        for process in processes:
            process.kill()
    return found


def by_horovod(size: int, **more: str) -> list[dict[str, str]]:
    """The variables of Horovod's launcher, two ranks on a host."""
    port = free_port()
    return [
        {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(size),
            "HOROVOD_LOCAL_RANK": str(rank % 2),
            "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_CROSS_RANK": str(rank // 2),
            "HOROVOD_CROSS_SIZE": str((size + 1) // 2),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            **more,
        }
        for rank in range(size)
    ]


def test_horovods_variables_make_a_job(tmp_path: Path) -> None:
    found = launch(
        tmp_path,
        """
        hvd.init()
        hvd.init()  # does nothing
        assert torch.distributed.is_initialized()
        even = hvd.add_process_set([0, 2])
        if even.included():
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=even)
            assert total.item() == 2
        member = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
        place += [hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous(), member]
        # Ends by itself, without shutdown().
        print(json.dumps(place))
        """,
        by_horovod(
            3,
            HOROVOD_DYNAMIC_PROCESS_SETS="1",
            HOROVOD_FUSION_THRESHOLD="1000000",
            HOROVOD_CYCLE_TIME="0.5",
            HOROVOD_NUM_NCCL_STREAMS="3",
            HOROVOD_AUTOTUNE="1",
            HOROVOD_TYPO="1",
        ),
    )
    assert [place for place, _ in found] == [
        [0, 3, 0, 2, 0, 2, False, 3.0],
        [1, 3, 1, 2, 0, 1, False, 3.0],
        [2, 3, 0, 1, 1, 2, False, 3.0],
    ]
    for _, log in found:
        assert log.count("HOROVOD_AUTOTUNE, HOROVOD_TYPO") == 1
        assert log.count("no effect") == 1


def test_a_rank_that_was_late_meets_the_others_when_they_try_again(
    tmp_path: Path,
) -> None:
    found = launch(
        tmp_path,
        """
        import time
        from pathlib import Path

        failed = Path(__file__).with_name("failed")
        hvd.init()
        hvd.shutdown()
        text = ""
        if os.environ["HOROVOD_RANK"] == "0":
            os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "0.2"
            try:
                hvd.init()
            except hvd.HorovodInternalError as exc:
                text = str(exc)
            os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "60"
            failed.touch()
        os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "60"
        while not failed.exists():
            time.sleep(0.01)
        hvd.init()
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        print(json.dumps([total, text]))
        """,
        by_horovod(2),
    )
    assert [total for (total, _), _ in found] == [2.0, 2.0]
    assert "rank 1 did not arrive" in found[0][0][1]


def test_starting_and_ending_leaves_nothing(tmp_path: Path) -> None:
    found = launch(
        tmp_path,
        f"""
        import time
        from pathlib import Path

        def counts():
            return [
                len(os.listdir("/proc/self/fd")),
                len(os.listdir("/proc/self/task")),
                threading.active_count(),
                int(Path("/proc/self/statm").read_text().split()[1]),
            ]

        def left():
            # A thread of Gloo that is ending still counts, with its sockets.
            found = [counts()]
            for _ in range(40):
                time.sleep(0.05)
                found.append(counts())
            return [min(each) for each in zip(*found)]

        seen = []
        for cycle in range({CYCLES}):
            hvd.init(process_sets=[hvd.ProcessSet([0])])
            total = hvd.allreduce(torch.ones(1000), op=hvd.Sum)
            assert total[0] == 2 and hvd.is_initialized()
            hvd.shutdown()
            assert not hvd.is_initialized() and not torch.distributed.is_initialized()
            if cycle in (9, {CYCLES - 1}):
                seen.append(left())
        print(json.dumps(seen))
        """,
        by_horovod(2),
    )
    for (early, late), _ in found:
        assert all(a <= b for a, b in zip(late[:3], early[:3], strict=True))
        assert (late[3] - early[3]) * 4096 < 8 * 2**20, "memory grows"


def test_a_process_without_a_launcher_is_a_job_of_one(tmp_path: Path) -> None:
    ((found, log),) = launch(
        tmp_path,
        """
        whole = hvd.ProcessSet([0])
        hvd.init(process_sets=[whole])
        assert whole.process_set_id == 0
        ones = torch.ones(3, requires_grad=True)
        hvd.allreduce(ones, process_set=whole).sum().backward()
        assert ones.grad.tolist() == [1, 1, 1]
        assert torch.equal(hvd.allgather(ones), ones)
        assert torch.equal(hvd.broadcast(ones, 0), ones)
        assert torch.equal(hvd.alltoall(ones), ones)
        assert torch.equal(hvd.reducescatter(ones), ones)
        hvd.barrier()
        hvd.shutdown()
        hvd.init()
        print(json.dumps([hvd.rank(), hvd.size(), hvd.local_size(), hvd.join()]))
        """,
        [{}],
    )
    assert found == [0, 1, 1, 0]
    assert log == ""


def kept_group(rank: int, size: int) -> list[Any]:
    """An own process group stays, and works beside."""
    seen = []
    for _ in range(3):
        hvd.init()
        hvd.allreduce(torch.ones(2))
        theirs = torch.ones(1)
        dist.all_reduce(theirs)
        seen.append(theirs.item())
        hvd.shutdown()
        hvd.shutdown()  # nothing left to do
    dist.barrier()
    if rank < 2:
        hvd.init(comm=[1, 0])
        seen += [hvd.rank(), hvd.size()]
        seen.append(hvd.allgather(torch.tensor([rank])).tolist())
        hvd.shutdown()
    else:
        with pytest.raises(ValueError, match="not one of these"):
            hvd.init(comm=[0, 1])
    wrongs: list[Any] = [{"comm": [rank, rank]}, {"comm": [rank, size]}]
    wrongs += [{"comm": "world"}, {"process_sets": "static"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="init"):
            hvd.init(**wrong)
    assert not hvd.is_initialized()
    dist.barrier()
    try:
        hvd.init(process_sets=[hvd.ProcessSet([rank])])
    except hvd.HorovodInternalError as exc:
        seen.append(str(exc))
    assert not hvd.is_initialized()
    dist.barrier()
    with pytest.raises(ValueError, match="below"):
        hvd.init(process_sets=[hvd.ProcessSet([0, size])])
    dist.barrier()
    hvd.init()
    assert hvd.size() == size
    hvd.shutdown()
    return seen


def test_a_process_group_that_is_there_is_used_and_kept(ranks: Ranks) -> None:
    found = ranks(kept_group, 3)
    texts = {seen[-1] for seen in found}
    assert len(texts) == 1
    assert "[1]" in texts.pop()
    assert found[0][:-1] == [3.0, 3.0, 3.0, 1, 2, [1, 0]]
    assert found[1][:-1] == [3.0, 3.0, 3.0, 0, 2, [1, 0]]


def test_torchrun_makes_a_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, stretto.horovod.torch as hvd\n"
        "for _ in range(3):\n"
        "    hvd.init()\n"
        "    found = hvd.allgather(torch.tensor([hvd.local_rank()])).tolist()\n"
        "    place = (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size())\n"
        "    hvd.shutdown()\n"
        f"open(r'{tmp_path}/' + str(place[0]), 'w').write(str((place, found)))\n"
    )
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*run, "--nproc-per-node=2", str(script)],
        env=environment,
        timeout=90,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        text = (tmp_path / str(rank)).read_text()
        assert text == str(((rank, 2, 2, 1), [0, 1]))


@pytest.mark.parametrize("server", ["agent", "rank 0"])
def test_a_part_of_a_job_waits_for_no_other_rank(tmp_path: Path, server: str) -> None:
    own = {"TORCHELASTIC_USE_AGENT_STORE": "", "MASTER_PORT": str(free_port())}
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time, torch, stretto.horovod.torch as hvd\n"
        f"os.environ.update({own if server == 'rank 0' else {}})\n"
        "mine = int(os.environ['RANK'])\n"
        f"path = r'{tmp_path}/'\n"
        "if mine == 1:\n"
        "    while not os.path.exists(path + '2'):\n"
        "        time.sleep(0.05)\n"
        "    sys.exit()\n"
        "for _ in range(2):\n"
        "    hvd.init(comm=[2, 0])\n"
        "    found = hvd.allgather(torch.tensor([mine])).tolist()\n"
        "    place = (hvd.rank(), hvd.size())\n"
        "    hvd.shutdown()\n"
        "open(path + str(mine), 'w').write(str((place, found)))\n"
    )
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*run, "--nproc-per-node=3", str(script)],
        env=environment,
        timeout=90,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "0").read_text() == str(((1, 2), [2, 0]))
    assert (tmp_path / "2").read_text() == str(((0, 2), [2, 0]))
