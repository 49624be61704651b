"""Compare `stretto.keras` with one blocking all-reduce per gradient, on TensorFlow.

Four lab hosts on 1 Gbit/s links, with 300 Mbit/s per connection and without a limit.
Twelve dense layers of 1024 x 1024 float32 values, 50 MB of gradients, trained by
`model.train_on_batch`. In each process, in blocks by turns:

- ``stretto``: `stretto.keras.DistributedOptimizer`;
- ``blocking``: an optimizer whose `apply` runs Horovod's ``allreduce`` of each gradient
  in the order of the variables, each a call that waits for its result;
- ``local``: a rank's step without communication.

A step is the slowest rank's, from a barrier until the loss is there. The first two
train the same weights on the same samples: ``apart`` is how far they end from each
other, and ``moved`` from the first, both relative to the largest weight. ``cpu_s`` is
processor time of all ranks. Needs the extra ``tensorflow``: run it with the interpreter
that ``make test-frameworks`` installs.

``--rounds 1 --steps 2 --cases capped`` is the short form.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _overlap import LAYERS, WARMUP, WIDTH, run

if TYPE_CHECKING:
    import argparse

TARGETS = {"capped": 0.40, "uncapped": 1.0}


def bench(options: argparse.Namespace) -> None:
    """Run one rank."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import numpy as np

    import stretto.horovod.tensorflow as hvd
    import stretto.keras as sk

    sk.init()

    class Blocking(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            return super().apply([hvd.allreduce(g) for g in grads], trainable_variables)

    def model_with(optimizer: Any) -> Any:
        keras.utils.set_random_seed(1)
        dense = [
            keras.layers.Dense(WIDTH, activation="tanh", use_bias=False)
            for _ in range(LAYERS)
        ]
        model = keras.Sequential([keras.Input((WIDTH,)), *dense])
        model.compile(optimizer, loss="mse", jit_compile=False)
        return model

    sgd = keras.optimizers.SGD
    models = {
        "stretto": model_with(sk.DistributedOptimizer(sgd(1.0))),
        "blocking": model_with(Blocking(1.0)),
        "local": model_with(sgd(1.0)),
    }
    chance = np.random.default_rng(0)
    x = chance.normal(size=(sk.size(), options.batch, WIDTH)).astype("f4")[sk.rank()]
    y = np.zeros_like(x)
    first = flat(models["local"])
    seconds: dict[str, list[float]] = {name: [] for name in models}
    cpu: dict[str, list[float]] = {name: [] for name in models}

    def step(name: str) -> tuple[float, float]:
        sk.barrier()
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        models[name].train_on_batch(x, y)
        took = np.array([time.perf_counter() - begin_s])
        used = np.array([time.process_time() - cpu_s])
        slowest = sk.allreduce(took, op=sk.Max)
        return float(slowest[0]), float(sk.allreduce(used, op=sk.Sum)[0])

    for number in range(options.rounds):
        for name in list(models) if number % 2 else list(models)[::-1]:
            for _ in range(WARMUP):
                step(name)
            for _ in range(options.steps):
                took_s, cpu_s = step(name)
                seconds[name].append(took_s)
                cpu[name].append(cpu_s)
    if sk.rank() == 0:
        ours, theirs = flat(models["stretto"]), flat(models["blocking"])
        largest = abs(theirs).max()
        Path(options.out).write_text(
            json.dumps(
                {
                    "apart": float(abs(ours - theirs).max() / largest),
                    "moved": float(abs(ours - first).max() / largest),
                    "seconds": seconds,
                    "cpu": cpu,
                }
            )
        )
    sk.shutdown()


def flat(model: Any) -> Any:
    import numpy as np

    return np.concatenate([w.ravel() for w in model.get_weights()])


if __name__ == "__main__":
    run(
        bench,
        doc=__doc__,
        file=__file__,
        rounds=4,
        rival="blocking",
        targets=TARGETS,
        packages={"tensorflow": "tensorflow-cpu", "keras": "keras"},
    )
