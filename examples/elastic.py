"""Training that continues when ranks, a host and a link are lost.

On three emulated hosts, of which one is lost, one loses its process, and one its link:

    stretto lab run --hosts 3 --fault "kill host1 at step 20" \
        --fault "kill member0 at step 60" \
        --fault "disconnect host2 at step 150 for 6 s" \
        -- stretto run --elastic 1:3 --nproc-per-node 1 examples/elastic.py

At the end each rank compares its losses with those of one process that trains with the
same samples.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stretto
from stretto.testing import replay_memberships

BATCH, EPOCHS = "global:48", 29


def job() -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, int]]]:
    """Return a model, its optimizer, and samples."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    samples = [(x, int(x[:4].argmax())) for x in torch.randn(1000, 16)]
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3), samples


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    net, optimizer, samples = job()
    run = stretto.Elastic(net, optimizer, batch=BATCH)
    losses = {}
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(samples):
            with run.step() as step:
                loss = loss_of(run.model, batch)
                (loss * run.weight).backward()
                optimizer.step()
            if step.is_committed:
                losses[run.steps - 1] = loss.item()
            time.sleep(0.02)  # as a larger model
    history, me = run.history, run.history[-1].ids[run.rank]
    wanted = replay_memberships(
        *job(), loss_of, history=history, steps=run.steps, batch=BATCH
    )
    worst = max(abs(loss - wanted[step][me]) for step, loss in losses.items())
    members = ", ".join(f"{m.ids} from step {m.first_step}" for m in history)
    print(f"members {members}", flush=True)  # noqa: T201
    print(f"losses of member {me} differ by {worst:.1e}", flush=True)  # noqa: T201
    dist.destroy_process_group()
