"""A rank of a job that loses hosts; it appends what it has trained to a file.

A line has the step, the loss and a sum over the parameters; the last line has the
memberships.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from elastic_job import BATCH, data, loss_of, net_and_optimizer

import stretto

folder, steps = sys.argv[1], int(sys.argv[2])
hangs_at = int(os.environ.get("HANGS_AT", "-1"))
dist.init_process_group("gloo")
net, optimizer = net_and_optimizer()
model = stretto.DistributedDataParallel(net, plan="ddp")
snapshots = os.environ.get("SNAPSHOTS")
run = stretto.Elastic(
    model, optimizer, batch=f"global:{BATCH}", checkpoint=snapshots, every="20 steps"
)
member = int(os.environ["STRETTO_MEMBER"])
dataset = data()
with Path(folder, f"{member}.jsonl").open("a", buffering=1) as file:
    while run.steps < steps:
        for batch in run.batches(dataset):
            before = run.steps
            time.sleep(0.05)
            if member == 0 and before == hangs_at:
                while True:  # as a data set that waits for a lost server
                    time.sleep(1)
            with run.step() as step:
                loss = loss_of(run.model, batch)
                (loss * run.weight).backward()
                optimizer.step()
            if step.is_committed:
                total = sum(p.detach().sum().item() for p in net.parameters())
                print(json.dumps([before, loss.item(), total]), file=file)
    history = [[m.first_step, m.ids] for m in run.history]
    print(json.dumps({"history": history, "steps": run.steps}), file=file)
