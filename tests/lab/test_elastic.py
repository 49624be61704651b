"""Training that loses hosts and links, against the same memberships in one process.

`make test-faults` runs all; `make test` those that are not marked ``faults``.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from stretto.elastic.training import Membership
from stretto.resume.manifests import manifests_in
from stretto.resume.snapshots import read_newest
from stretto.testing import replay_memberships

pytestmark = [
    pytest.mark.lab,
    pytest.mark.usefixtures("namespaces"),
    pytest.mark.timeout(300),
]


class Job:
    """Trains in a lab with faults, and reads what the members have recorded."""

    def __init__(self, lab, programs, folder):
        self.lab, self.programs, self.folder = lab, programs, folder

    def train(self, *faults, hosts=3, steps=60, env=()):
        """Train; return the memberships of a rank that has seen the end."""
        options = [word for fault in faults for word in ("--fault", fault)]
        done = self.lab.run(
            *["--hosts", hosts, "--timeout", 250, "--grace", 2, *options],
            *["--logs", self.folder / "logs", "--", "stretto", "run"],
            *["--elastic", f"1:{hosts}", "--nproc-per-node", 1],
            *[self.programs / "elastic.py", self.folder, steps],
            timeout=280,
            env={"TMPDIR": str(self.folder), **dict(env)},
        )
        logs = [p.read_text()[-2000:] for p in sorted(self.folder.glob("logs/*"))]
        assert done.returncode == 0, (done.stderr, logs)
        self.said = done.stderr + "".join(logs)
        rows = {
            int(path.stem): [json.loads(row) for row in path.read_text().splitlines()]
            for path in self.folder.glob("*.jsonl")
        }
        ends = {m: r.pop() for m, r in rows.items() if r and isinstance(r[-1], dict)}
        self.finished = sorted(ends)
        end = max(ends.values(), key=lambda one: len(one["history"]))
        self._check(rows, end)
        return [ids for _, ids in end["history"]]

    def _check(self, rows, end):
        """Each step has one result, and the losses are those of one process."""
        spec = importlib.util.spec_from_file_location(
            "elastic_job", self.programs / "elastic_job.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        wanted = replay_memberships(
            *module.net_and_optimizer(),
            module.data(),
            module.loss_of,
            history=[
                Membership(generation=0, first_step=first, ids=tuple(ids))
                for first, ids in end["history"]
            ],
            steps=end["steps"],
            batch=f"global:{module.BATCH}",
        )
        sums = {}
        for member in self.finished:
            for step, loss, total in rows[member]:
                assert loss == pytest.approx(wanted[step][member], abs=1e-6)
                assert sums.setdefault(step, total) == total
        assert sorted(sums) == list(range(end["steps"]))


@pytest.fixture
def job(lab, programs, tmp_path):
    return Job(lab, programs, tmp_path)


def test_the_host_of_rank_0_and_of_the_store_is_lost(job):
    found = job.train("kill host0 at step 10", steps=30)
    assert found == [[0, 1, 2], [1, 2]]
    assert job.finished == [1, 2]


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["disconnect", "drop-input", "drop-output"])
@pytest.mark.parametrize("host", [0, 2])
def test_a_host_that_was_cut_off_returns_with_its_process(job, fault, host):
    found = job.train(f"{fault} host{host} at step 10 for 7 s", steps=200)
    others = [m for m in (0, 1, 2) if m != host]
    assert found == [[0, 1, 2], others, [*others, host]]
    assert job.finished == [0, 1, 2]


@pytest.mark.faults
def test_a_lost_host_is_started_again(job):
    faults = ["kill host1 at step 10", "restart host1 at step 60"]
    found = job.train(*faults, steps=400)
    assert found == [[0, 1, 2], [0, 2], [0, 2, 30000]]


@pytest.mark.faults
@pytest.mark.parametrize(
    "fault",
    [
        "disconnect host1 at step 10 for 1 s",
        "lose host1 at step 10 for 5 s",
        "slow host1 at step 10 for 3 s",
        "stop member1 at step 10 for 1 s",
    ],
)
def test_no_rank_leaves_for_a_fault_that_passes(job, fault):
    assert job.train(fault, steps=150) == [[0, 1, 2]]


@pytest.mark.faults
@pytest.mark.parametrize("verb", ["kill", "stop"])
def test_a_rank_that_is_killed_or_stopped_is_replaced(job, verb):
    found = job.train(f"{verb} member0 at step 10", steps=400)
    assert found == [[0, 1, 2], [1, 2], [1, 2, 3]]


@pytest.mark.faults
def test_two_hosts_lost_at_once_leave_a_majority(job):
    faults = ["kill host0 at step 10", "kill host3 at step 10"]
    assert job.train(*faults, hosts=5)[-1] == [1, 2, 4]


@pytest.mark.faults
def test_of_two_halves_the_one_with_rank_0_continues(job):
    faults = ["disconnect host2 at step 10", "disconnect host3 at step 10"]
    assert job.train(*faults, hosts=4)[-1] == [0, 1]


@pytest.mark.faults
def test_the_example_survives_two_kills_and_a_lost_link(lab, tmp_path):
    found = lab.run(
        *["--hosts", 3, "--timeout", 250, "--logs", tmp_path / "logs"],
        *["--fault", "kill host1 at step 20", "--fault", "kill member0 at step 60"],
        *["--fault", "disconnect host2 at step 150 for 6 s"],
        *["--", "stretto", "run", "--elastic", "1:3", "--nproc-per-node", 1],
        Path(__file__).parents[2] / "examples" / "elastic.py",
        timeout=280,
        # A killed host's keeper leaves its folder.
        env={"TMPDIR": str(tmp_path)},
    )
    said = found.stderr + "".join(p.read_text() for p in tmp_path.glob("logs/*"))
    assert found.returncode == 0, said
    views = r"\(0, 1, 2\) from step 0, \(0, 2\) from step 2\d, \(2,\) from step 6\d"
    assert re.search(views, said), said
    worst = re.findall(r"losses of member \d+ differ by (\S+)", said)
    assert worst
    assert max(map(float, worst)) < 1e-6


@pytest.mark.faults
@pytest.mark.parametrize("how", ["loop", "hang"])
def test_a_rank_that_hangs_is_replaced(job, how):
    faults = ["hang member0 at step 20"] if how == "hang" else []
    env = {"STRETTO_HANG_S": "4", "HANGS_AT": "20" if how == "loop" else "-1"}
    found = job.train(*faults, steps=400, env=env)
    assert found[:2] == [[0, 1, 2], [1, 2]]
    assert "while others wait: it is killed" in job.said


@pytest.mark.faults
def test_a_host_that_is_to_be_taken_away_leaves_in_order(job):
    found = job.train("terminate host0 at step 10", steps=60)
    assert found == [[0, 1, 2], [1, 2]]
    assert "leaves after step" in job.said
    assert "no link" not in job.said


@pytest.mark.faults
def test_a_full_disk_leaves_the_snapshot_before(job, tmp_path):
    fault, folder = "fill-disk host0 at step 30", tmp_path / "snapshots"
    found = job.train(fault, steps=100, env={"SNAPSHOTS": str(folder)})
    assert found == [[0, 1, 2]]
    assert "File too large. Earlier ones remain" in job.said
    assert 20 <= manifests_in(folder)[0].step <= 40
    assert read_newest(folder) is not None


@pytest.mark.faults
def test_a_host_that_sends_changed_bytes_makes_ranks_differ(lab, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(LARGE)
    done = lab.run(
        *["--hosts", 3, "--timeout", 100, "--logs", tmp_path / "logs"],
        *["--fault", "change-bytes host1 at step 5"],
        *["--", "stretto", "run", "--elastic", "1:3", "--nproc-per-node", 1, program],
        timeout=140,
        env={"TMPDIR": str(tmp_path)},
    )
    said = done.stderr + "".join(p.read_text() for p in tmp_path.glob("logs/*"))
    assert done.returncode == 0, said
    assert re.search("parameters are not equal on all ranks after step", said), said


LARGE = """
import torch
import torch.distributed as dist
import stretto
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 5))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
model = stretto.DistributedDataParallel(net, plan="ddp")
run = stretto.Elastic(model, optimizer, batch="rank:2", repair=True)
data = [(torch.randn(512), i % 5) for i in range(240)]
for inputs, targets in run.batches(data):
    with run.step():
        torch.nn.functional.cross_entropy(run.model(inputs), targets).backward()
        optimizer.step()
"""
