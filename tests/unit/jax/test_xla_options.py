"""Options for programs whose communication XLA owns."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from stretto.errors import PlanMismatch, SpecError
from stretto.schema import Bucket, Plan, TensorSpec, Workload

jax = pytest.importorskip("jax")

import stretto.jax as sj  # noqa: E402
from stretto.jax import xla_options  # noqa: E402

THRESHOLD = "xla_gpu_all_reduce_combine_threshold_bytes"

TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, stretto.jax as sj
from jax.sharding import Mesh, PartitionSpec as P

def grads(params, x):
    def loss(params):
        hidden = x
        for w in params:
            hidden = jnp.tanh(hidden @ w)
        return hidden.sum()
    return [jax.lax.pmean(g, "data") for g in jax.grad(loss)(params)]

mesh = Mesh(np.array(jax.devices()), ("data",))
program = jax.shard_map(
    grads, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
)
for options in (None, sj.compile_options()):
    step = jax.jit(program, compiler_options=options)
    text = step.lower([jnp.eye(8)] * 4, jnp.ones((4, 8))).compile().as_text()
    print(text.count("all-reduce("), options)
"""


def workload():
    tensors = [
        TensorSpec(name=name, bytes=size, dtype="float32", ready_s=0.0, needed_s=0.0)
        for name, size in (("c", 4000), ("b", 8000), ("a", 400))
    ]
    return Workload(
        name="three",
        framework="jax",
        device="cuda",
        batch_per_rank=1,
        forward_s=0.0,
        backward_s=0.0,
        tensors=tuple(tensors),
    )


def plan(*buckets):
    return Plan(
        planner="test",
        workload_digest=workload().digest,
        ranks=2,
        overlap="backward",
        lanes=1,
        buckets=tuple(Bucket(tensors=b, wire_dtype="float32") for b in buckets),
    )


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def test_gradients_of_a_cpu_program_are_no_longer_joined():
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\d+", done.stdout, re.MULTILINE) == ["1", "4"]


@pytest.mark.parametrize("quote", ["", '"', "'"])
def test_passes_that_the_environment_disables_stay_disabled(monkeypatch, quote):
    sj.compile_options()  # XLA has read the variable by now
    flags = f"--xla_dump_to=x --xla_disable_hlo_passes={quote}dce,cse{quote}"
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert sj.compile_options() == {
        "xla_disable_hlo_passes": "dce,cse,cpu-all-reduce-combiner"
    }


def test_this_jax_accepts_every_option_for_gpus(on_gpu):
    found = sj.compile_options(bucket_bytes=2**22)
    assert found == {THRESHOLD: "4194304"} | xla_options._GPU_SCHEDULER


def test_other_devices_have_no_options(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert sj.compile_options(bucket_bytes=2**22) == {}


def test_options_that_xla_lacks_are_left_out_with_one_line(on_gpu, monkeypatch, caplog):
    renamed = {"xla_gpu_renamed": "True", "xla_gpu_removed": "True"}
    monkeypatch.setattr(xla_options, "_GPU_SCHEDULER", renamed)
    assert sj.compile_options(bucket_bytes=8) == {THRESHOLD: "8"}
    (line,) = caplog.messages
    assert "xla_gpu_renamed=True, xla_gpu_removed=True: left out" in line


def test_a_plans_largest_bucket_is_the_bucket_size(on_gpu):
    made = plan(("c", "a"), ("b",))
    found = sj.compile_options(plan=made, workload=workload())
    assert found[THRESHOLD] == "8000"


def test_without_a_size_xla_keeps_its_own(on_gpu):
    assert THRESHOLD not in sj.compile_options()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes must be >= 1, got 0"),
        ({"plan": plan(("c",))}, "belong together"),
        ({"workload": workload()}, "belong together"),
        (
            {"bucket_bytes": 8, "plan": plan(("c",)), "workload": workload()},
            "not both",
        ),
    ],
)
def test_sizes_that_say_nothing_are_refused(given, says):
    with pytest.raises(SpecError, match=says):
        sj.compile_options(**given)


def test_a_plan_for_another_workload_is_refused():
    with pytest.raises(PlanMismatch, match="no bucket holds"):
        sj.compile_options(plan=plan(("c",)), workload=workload())
