"""`stretto.jax` in one process, and what it refuses there."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from stretto import variable_names
from stretto.errors import SpecError

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import stretto.jax as sj  # noqa: E402
from stretto.jax import callbacks, tags  # noqa: E402


@pytest.fixture
def one_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    sj.init()
    yield
    sj.shutdown()


def square(w):
    return (w * w).sum()


def test_one_rank_has_jaxs_own_gradients(one_rank):
    w = jnp.arange(3.0)
    assert sj.size() == 1
    assert (jax.jit(sj.grad(square))(w) == jax.grad(square)(w)).all()
    assert sj.broadcast_object("this", root=0) == "this"
    assert list(sj.shard(3)) == [0, 1, 2]


def test_a_call_before_init_says_what_to_call():
    with pytest.raises(SpecError, match=r"stretto\.jax\.init\(\)"):
        sj.grad(square)(jnp.ones(3))


def test_several_devices_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    with pytest.raises(SpecError, match="one device per process"):
        sj.init()


def test_devices_other_than_cpus_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(SpecError, match="JAX_PLATFORMS=cpu"):
        sj.init()


def test_an_unknown_kind_of_callback_is_refused(monkeypatch):
    monkeypatch.setenv(variable_names.JAX_CALLBACKS, "fast")
    with pytest.raises(SpecError, match="buffer or io"):
        callbacks.call(print, [])


def test_an_unknown_reduction_is_refused():
    with pytest.raises(SpecError, match="AVERAGE"):
        sj.value_and_grad(square, op="mean")


def test_a_reduction_that_one_rank_may_skip_is_refused(one_rank):
    w = jnp.ones(3)
    around = optax.apply_if_finite(sj.distributed(optax.sgd(0.1)), 5)
    with pytest.raises(SpecError, match="Put it outside"):
        around.update(w, around.init(w), w)
    within = sj.distributed(optax.apply_if_finite(optax.sgd(0.5), 5))
    assert within.update(w, within.init(w), w)[0].tolist() == [-0.5] * 3
    for skip in (optax.skip_not_finite, lambda *_: (jnp.zeros((), bool), ())):
        steps = optax.MultiSteps(
            sj.distributed(optax.sgd(0.1)), 2, should_skip_update_fn=skip
        )
        with pytest.raises(SpecError, match="Put it outside"):
            steps.update(w, steps.init(w), w)
    steps = optax.MultiSteps(sj.distributed(optax.sgd(0.1)), 2)
    steps.update(w, steps.init(w), w)


def test_scanned_parameters_need_a_linear_reduction():
    with pytest.raises(SpecError, match="op=Average"):
        sj.grad(square, op=sj.Max, scanned=lambda w: w)


def test_in_backward_returns_other_trees_as_they_are():
    tree = {"w": np.ones(3)}
    assert sj.in_backward(tree) is tree


def test_in_backward_outside_of_a_scan_is_refused():
    stack = tags.ScannedParameters.of(jnp.ones((2, 3)), jnp.float32(1), [0])
    with pytest.raises(SpecError, match="body of a scan"):
        sj.in_backward(stack)


def test_stacks_of_unequal_depth_are_refused():
    with pytest.raises(SpecError, match="equally many layers, got stacks of 2, 3"):
        tags.ScannedParameters.of(
            [jnp.ones((2, 3)), jnp.ones((3, 3))], jnp.float32(1), [0, 3]
        )


def test_a_process_ends_by_itself_without_shutdown():
    code = (
        "import jax.numpy as jnp, stretto.jax as sj\n"
        "sj.init()\n"
        "print(sj.grad(lambda w: (w * w).sum())(jnp.ones(2)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2. 2.]\n"
