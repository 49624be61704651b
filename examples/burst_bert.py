"""Train a BERT from Hugging Face, each layer on as many hosts as it can use.

pip install "transformers>=4.48"
stretto lab run --hosts 4 --link 1gbit -- python examples/burst_bert.py

It prints the plan, the time of a step, and the largest difference between its losses
and those of one process with the whole batch.
"""

import argparse
import collections
import copy
import time

import torch
import torch.distributed as dist
import transformers

import stretto

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--share", type=int, default=8, help="samples of each rank")
parser.add_argument("--words", type=int, default=30_522, help="in the vocabulary")
options = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = transformers.BertForSequenceClassification(
    transformers.BertConfig(
        vocab_size=options.words,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        hidden_dropout_prob=0.0,  # one process would draw different masks
        attention_probs_dropout_prob=0.0,
    )
).double()  # so that rounding hides no difference


def sentences(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a step's batch: 64 words per row, and whether the first is frequent."""
    draw = torch.Generator().manual_seed(step)
    words = torch.randint(options.words, (options.share * ranks, 64), generator=draw)
    return words, (words[:, 0] < options.words // 2).long()


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the training, or of one layer in the profile."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def loss_of(model: torch.nn.Module, words: torch.Tensor, labels: torch.Tensor):  # noqa: ANN201
    """Return the mean loss over the given samples."""
    logits = model(input_ids=words).logits
    return torch.nn.functional.cross_entropy(logits, labels)


alone = copy.deepcopy(model) if rank == 0 else None
example = {"input_ids": sentences(0)[0][:2]}
size = {"batch": options.share * ranks, "gpus": ranks}
cluster = stretto.probe(budget_s=10.0)
layers = stretto.profile_layers(
    model, (), kwargs=example, optimizer=adam, max_spread_ratio=2.0, **size
)
plan = stretto.plan_layers(layers, cluster=cluster, cores=2.0, **size)
model = stretto.BurstParallel(model, plan, example_kwargs=example, verify=True)

optimizer = adam(list(model.parameters()))
mine = slice(rank * options.share, (rank + 1) * options.share)
losses, times = [], []
for step in range(options.steps):
    words, labels = sentences(step)
    begin_s = time.perf_counter()
    optimizer.zero_grad()
    loss = loss_of(model, words[mine], labels[mine])
    loss.backward()
    optimizer.step()
    times.append(time.perf_counter() - begin_s)
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    losses.append(mean.item())

if alone is not None:
    counts = collections.Counter(entry.gpus for entry in plan.layers)
    for gpus, number in sorted(counts.items()):
        print(f"{number} layers on {gpus} of {ranks} hosts")  # noqa: T201
    step_s, said = sorted(times)[len(times) // 2], plan.predicted
    print(  # noqa: T201
        f"a step took {step_s * 1e3:.0f} ms; predicted were "
        f"{said.iteration_s * 1e3:.0f} ms, and {said.data_parallel_s * 1e3:.0f} ms "
        "with all layers on all hosts"
    )
    optimizer = adam(list(alone.parameters()))
    differences = []
    for step, found in enumerate(losses):
        optimizer.zero_grad()
        loss = loss_of(alone, *sentences(step))
        loss.backward()
        optimizer.step()
        differences.append(abs(found - loss.item()))
    print(f"loss {losses[0]:.6f} at first, {losses[-1]:.6f} at the end")  # noqa: T201
    print(f"largest difference from one process: {max(differences):.1e}")  # noqa: T201
