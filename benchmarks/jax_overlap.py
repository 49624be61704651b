"""Compare `stretto.jax` with XLA's own communication on emulated networks.

Four lab hosts on 1 Gbit/s links, with 300 Mbit/s per connection and without a limit.
Twelve dense layers of 1024 x 1024 float32 values, 50 MB of gradients. In each process,
in blocks by turns:

- ``stretto``: `stretto.jax.value_and_grad` in a plain `jax.jit`;
- ``native``: ``jax.shard_map`` over a mesh of all processes, with ``pmean`` of the
  gradients, by ``jax.distributed`` and JAX's Gloo collectives;
- ``native, options``: the same with `stretto.jax.compile_options`;
- ``local``: a rank's step without communication.

A step is the slowest rank's, from a barrier until the updated weights are there. All
methods but ``local`` train the same weights on the same samples; ``away`` is how far
they end from those of ``native``, and ``moved`` from the first, both relative to the
largest weight. ``cpu_s`` is processor time of all ranks. Needs the extra ``jax``: run
it with the interpreter that ``make test-frameworks`` installs.

``--rounds 1 --steps 2`` is the short form.
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

TARGETS = {"capped": 0.40, "uncapped": 0.85}


def bench(options: argparse.Namespace) -> None:
    """Run one rank."""
    import jax

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"]) + 1
    jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{port}", size, rank)

    import jax.numpy as jnp
    import numpy as np
    import torch
    import torch.distributed as dist
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import stretto.jax as sj

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = Mesh(np.array(jax.devices()), ("data",))
    chance = np.random.default_rng(0)
    first = [
        (chance.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype("f4")
        for _ in range(LAYERS)
    ]
    batch = chance.normal(size=(size, options.batch, WIDTH)).astype("f4")[rank]

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).sum(1).mean()

    def updated(params: Any, grads: Any) -> Any:
        return [w - 0.01 * g for w, g in zip(params, grads, strict=True)]

    def stretto_step(params: Any, x: Any) -> Any:
        return updated(params, sj.value_and_grad(loss)(params, x)[1])

    def local_step(params: Any, x: Any) -> Any:
        return updated(params, jax.value_and_grad(loss)(params, x)[1])

    def native_step(params: Any, x: Any) -> Any:
        _, grads = jax.value_and_grad(loss)(params, x)
        return updated(params, [jax.lax.pmean(g, "data") for g in grads])

    everywhere = NamedSharding(mesh, P())
    shards = NamedSharding(mesh, P("data"))
    sharded = jax.shard_map(
        native_step,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    compiled = sj.compile_options()
    steps = {
        "stretto": jax.jit(stretto_step, donate_argnums=0),
        "native": jax.jit(sharded, donate_argnums=0),
        "native, options": jax.jit(
            sharded, donate_argnums=0, compiler_options=compiled
        ),
        "local": jax.jit(local_step, donate_argnums=0),
    }
    put = jax.make_array_from_process_local_data
    params: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    for name in steps:
        if name.startswith("native"):
            params[name] = [put(everywhere, w.copy()) for w in first]
            inputs[name] = put(shards, batch)
        else:
            params[name] = [jnp.array(w) for w in first]
            inputs[name] = jnp.asarray(batch)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}

    def step(name: str) -> tuple[float, float]:
        dist.barrier()
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        params[name] = steps[name](params[name], inputs[name])
        jax.block_until_ready(params[name])
        slowest = torch.tensor([time.perf_counter() - begin_s])
        total = torch.tensor([time.process_time() - cpu_s])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        return float(slowest), float(total)

    for number in range(options.rounds):
        for name in list(steps) if number % 2 else list(steps)[::-1]:
            if name == "stretto":
                sj.init()  # its threads are idle in no other method's block
            for _ in range(WARMUP):
                step(name)
            for _ in range(options.steps):
                took_s, cpu_s = step(name)
                seconds[name].append(took_s)
                cpu[name].append(cpu_s)
            if name == "stretto":
                sj.shutdown()
    weights = {
        name: np.concatenate([np.asarray(w.addressable_data(0)).ravel() for w in rows])
        for name, rows in params.items()
    }

    def apart(one: Any, other: Any) -> float:
        return float(np.abs(one - other).max() / np.abs(other).max())

    if rank == 0:
        del weights["local"]
        start = np.concatenate([w.ravel() for w in first])
        found = {
            "seconds": seconds,
            "cpu": cpu,
            "moved": apart(weights["native"], start),
            "away": {n: apart(w, weights["native"]) for n, w in weights.items()},
            "compile_options": compiled,
        }
        Path(options.out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    jax.distributed.shutdown()


if __name__ == "__main__":
    run(
        bench,
        doc=__doc__,
        file=__file__,
        rounds=6,
        rival="native",
        targets=TARGETS,
        packages={"jax": "jax"},
    )
