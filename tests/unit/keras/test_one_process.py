"""Keras and TensorFlow in a process without other ranks, and what is refused there."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from stretto.errors import SpecError

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("needs tensorflow", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def hvd(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    import stretto.horovod.tensorflow as hvd

    hvd.init()
    yield hvd
    hvd.shutdown()


def test_one_rank_has_tensorflows_own_gradients(hvd):
    import tensorflow as tf

    v = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v * v)
    assert hvd.DistributedGradientTape(tape).gradient(loss, [v])[
        0
    ].numpy().tolist() == [
        2.0,
        4.0,
    ]
    assert hvd.allreduce(v, op=hvd.Sum).numpy().tolist() == [1.0, 2.0]


def test_operations_in_a_function_that_xla_compiles_are_refused(hvd):
    import tensorflow as tf

    for operation in (
        hvd.allreduce,
        hvd.allgather,
        hvd.alltoall,
        hvd.reducescatter,
        lambda value: hvd.broadcast(value, 0),
        lambda value: value * tf.cast(hvd.rank_op(), value.dtype),
    ):
        compiled = tf.function(operation, jit_compile=True)
        with pytest.raises(Exception, match="jit_compile=False"):
            compiled(tf.ones([2]))


def test_a_call_before_init_says_what_to_call():
    import tensorflow as tf

    import stretto.horovod.tensorflow as hvd

    with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
        hvd.allreduce(tf.ones([2]))


def test_several_devices_are_refused(monkeypatch):
    import tensorflow as tf

    from stretto.horovod.tensorflow import host_calls

    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind] * 2)
    with pytest.raises(SpecError, match="start one process per device"):
        host_calls.require_one_device()


def test_groups_join_small_gradients_only():
    import numpy as np

    from stretto.horovod.tensorflow import gradients
    from stretto.runtime.exchange import ArrayRow
    from stretto.runtime.negotiated import Op
    from stretto.runtime.reduction_rounds import RoundRows

    sizes = [10, 300_000, 100, 100, 200_000, 5]
    rows = tuple(
        ArrayRow(name=str(i), shape=(size,), dtype=np.dtype("f4"))
        for i, size in enumerate(sizes)
    )
    found = gradients._groups(RoundRows(rows, Op.SUM))
    assert found == [[5, 4, 3, 2], [1], [0]]


def test_a_momentum_of_keras_is_not_corrected_silently(hvd, caplog):
    import keras
    import numpy as np

    import stretto.horovod.tensorflow.keras as hvd_keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    warm = hvd_keras.callbacks.LearningRateWarmupCallback(0.1)
    with caplog.at_level("WARNING", logger="stretto"):
        model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[warm])
    assert "momentum_correction has no effect" in caplog.text


def test_a_process_ends_by_itself_without_shutdown():
    code = (
        "import stretto.keras as sk, keras, numpy as np\n"
        "sk.init()\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "model.compile(sk.DistributedOptimizer('sgd'), 'mse')\n"
        "model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)\n"
        "print(sk.size())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
