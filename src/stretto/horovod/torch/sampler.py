"""`ElasticSampler`: divide an epoch again whenever ranks join or leave."""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from stretto.horovod.torch.world import rank, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class ElasticSampler(Sampler[int]):
    """Divides the unseen part of an epoch among the current ranks.

    As with `torch.utils.data.DistributedSampler`, every rank gets the same number of
    samples, some of them twice if they do not divide evenly. Add it to the
    `TorchState`, call `record_batch` after each batch and `set_epoch` at an epoch's
    end.

    Args:
        dataset: Any object with a length.
        shuffle: Whether the order is random, different in each epoch.
        seed: Random seed of the order, the same on all ranks.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:  # noqa: FBT001, FBT002
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch with no samples seen."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of ``batch_size``."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its samples seen, over all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Load a `state_dict` and divide the remaining samples."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        again = itertools.cycle(self.remaining_indices)
        return itertools.islice(again, self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
