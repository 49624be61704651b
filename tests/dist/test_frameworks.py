"""Accelerate, Lightning and Transformers' Trainer over our class, unchanged.

Each trains a tiny model on two ranks, once with DDP and twice with ours in DDP's place,
as ``stretto run`` puts it there: as by default, and with ``overlap="auto"`` through all
phases of tuning, with what is pending poisoned. The weights must be equal bit for bit.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stretto import variable_names
from stretto.tune.forced import FORCED_FORWARD
from support.nets import mlp

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]


def needs(package: str) -> Any:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed"
    )


ROWS = 96
"""Enough steps for a plan that overlaps with forward, in each framework."""

CHOSEN = {
    variable_names.OVERLAP: "auto",
    variable_names.TUNE_SCHEDULE: FORCED_FORWARD,
    variable_names.POISON: "1",
}

net = partial(mlp, 6, 9, 2, between=nn.Tanh, seed=5)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=generator)
    return TensorDataset(x, x[:, :2].sum(1, keepdim=True).expand(-1, 2).contiguous())


def with_accelerate(_rank: int) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model, accelerator.unwrap_model(model)


def with_lightning(_rank: int) -> Any:
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            x, y = batch
            return (self.net(x) - y).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Environment(LightningEnvironment):
        @property
        def creates_processes_externally(self) -> bool:
            return True

        def global_rank(self) -> int:
            return int(os.environ["RANK"])

        def local_rank(self) -> int:
            return int(os.environ["RANK"])

        def world_size(self) -> int:
            return int(os.environ["WORLD_SIZE"])

        def teardown(self) -> None:
            """Leaves WORLD_SIZE, which the next training reads again."""

    class Keep(lightning.Callback):
        wrapped: Any = None

        def on_train_start(self, trainer: Any, _module: Any) -> None:
            self.wrapped = trainer.strategy.model

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            plugins=[Environment()],
            callbacks=[keep := Keep()],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        module = Module()
        trainer.fit(module, DataLoader(samples(), batch_size=4))
        return keep.wrapped, module.net


def with_transformers(_rank: int) -> Any:
    import transformers

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            out = self.net(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            x, y = samples()[index]
            return {"x": x, "labels": y}

    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=Model(),
            args=transformers.TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                per_device_train_batch_size=4,
                max_steps=12,
                learning_rate=0.1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Rows(),
        )
        trainer.train()
        return trainer.model_wrapped, trainer.model.net


def rank_trains(rank: int, _size: int, name: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    # What launchers of several processes on one host set.
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from stretto import DistributedDataParallel
    from stretto.script import replace_ddp

    # As `stretto run` does: before the framework is imported.
    stock_class = torch.nn.parallel.DistributedDataParallel
    replace_ddp()
    train = globals()[name]
    ours, got = train(rank)
    os.environ.update(CHOSEN)
    chosen, got_chosen = train(rank)
    for name in CHOSEN:
        del os.environ[name]
    for module in list(sys.modules.values()):
        if module is None or module.__name__.startswith("stretto"):
            continue
        if vars(module).get("DistributedDataParallel") is DistributedDataParallel:
            module.DistributedDataParallel = stock_class
    stock, expected = train(rank)
    return {
        "stock": type(stock) is stock_class,
        "ours": isinstance(ours, DistributedDataParallel)
        and isinstance(chosen, DistributedDataParallel),
        "forward": chosen.plan.overlap == "forward",
        "same": all(
            torch.equal(a, c) and torch.equal(b, c)
            for a, b, c in zip(
                got.parameters(),
                got_chosen.parameters(),
                expected.parameters(),
                strict=True,
            )
        ),
        "moved": not torch.equal(next(got.parameters()), next(net().parameters())),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("with_accelerate", marks=needs("accelerate")),
        pytest.param("with_lightning", marks=needs("lightning")),
        pytest.param("with_transformers", marks=needs("transformers")),
    ],
)
def test_frameworks_train_over_ours_as_over_ddp(ranks: Any, name: str) -> None:
    for found in ranks(rank_trains, 2, name, timeout_s=230):
        assert found["stock"]
        assert found["ours"]
        assert found["forward"]
        assert found["same"]
        assert found["moved"]
