"""A Horovod script that loses hosts and links, against one process."""

from __future__ import annotations

import pytest

from support.horovod_elastic import SCRIPT, Job, require_replay

pytestmark = [
    pytest.mark.lab,
    pytest.mark.faults,
    pytest.mark.usefixtures("namespaces"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def train(lab, tmp_path):
    def run(fault, steps):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT)
        done = lab.run(
            *["--hosts", 3, "--timeout", 250, "--grace", 2, "--fault", fault],
            *["--logs", tmp_path / "logs", "--", "stretto", "run", "--elastic", "1:3"],
            *["--nproc-per-node", 1, script, tmp_path, 0, steps],
            timeout=280,
            env={"TMPDIR": str(tmp_path)},
        )
        logs = [p.read_text()[-2000:] for p in sorted(tmp_path.glob("logs/*"))]
        assert done.returncode == 0, (done.stderr, logs)
        job = Job(tmp_path)
        require_replay(job)
        return job

    return run


def test_the_host_of_rank_0_and_of_the_store_is_lost(train):
    job = train("kill host0 at step 20", 60)
    assert sorted(job.ends) == [1, 2]
    assert [size for _, size in job.ends[1]["sizes"]] == [3, 2]


@pytest.mark.parametrize("host", [0, 2])
def test_a_host_that_was_cut_off_returns_with_its_process(train, host):
    job = train(f"disconnect host{host} at step 20 for 7 s", 1000)
    assert sorted(job.ends) == [0, 1, 2]
    assert [size for _, size in job.ends[1]["sizes"]] == [3, 2, 3]
    assert len({row["process"] for row in job.rows[host]}) == 1


def test_a_rank_that_is_stopped_is_replaced(train):
    job = train("stop member0 at step 20", 1000)
    assert sorted(job.ends) == [1, 2, 3]
