"""The functions that a converted script is given, as text.

They are part of the script, not of a library, so that it can be read, changed and run
without this package. Only those that are called are inserted. Values travel in double
precision on the CPU, so that a displayed loss causes no synchronization of a device.
"""

from __future__ import annotations

import re

MARK = "# Distributed by stretto convert"

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

RANKS = """
RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
"""

_JOIN = '''
def join_ranks():
    """Join the other ranks; a process started without a launcher is the only rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(LOCAL_RANK)
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    if WORLD_SIZE > 1:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
'''

_JOIN_HOROVOD = '''
def join_ranks():
    """Join the other ranks; a process started without a launcher is the only rank."""
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(LOCAL_RANK)
'''

_COMMON = {
    "unwrap": '''
def unwrap(model):
    """Return the module inside, with its own attributes and parameter names."""
    return model.module if isinstance(model, DistributedDataParallel) else model
''',
    "per_rank": '''
def per_rank(batch_size):
    """Return this rank's part of a batch: all ranks together take the whole batch."""
    if batch_size % WORLD_SIZE:
        raise ValueError(
            f"a batch of {batch_size} is not divisible by {WORLD_SIZE} ranks: "
            "choose a multiple"
        )
    return batch_size // WORLD_SIZE
''',
    "divided": '''
def divided(loader):
    """Return the same loader for this rank's samples, or several in a container."""
    if isinstance(loader, dict):
        return {key: divided(part) for key, part in loader.items()}
    if type(loader) in (list, tuple):
        return type(loader)(divided(part) for part in loader)
    own = getattr(loader, "sampler", None)
    shuffle = type(own) is RandomSampler
    if not shuffle and type(own) is not SequentialSampler:
        raise TypeError(
            f"cannot divide {type(loader).__name__} among ranks: its sampler is a "
            f"{type(own).__name__}. Give a DataLoader shuffle=True or False, and take "
            "a part of the data with torch.utils.data.Subset"
        )
    if getattr(own, "replacement", False) or len(own) != len(loader.dataset):
        raise ValueError(
            "cannot divide a loader among ranks whose sampler does not take each "
            "sample once. Give a DataLoader shuffle=True or False, and take a part of "
            "the data with torch.utils.data.Subset"
        )
    sampler = DistributedSampler(
        loader.dataset,
        num_replicas=WORLD_SIZE,
        rank=RANK,
        shuffle=shuffle,
        drop_last=loader.drop_last,
    )
    return DataLoader(
        loader.dataset,
        batch_size=BATCH_OF_LOADER,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
    )
''',
    "undivided": '''
def undivided(loader, passes=itertools.count()):
    """Return a loader of all samples, in one order on all ranks."""
    if not isinstance(getattr(loader, "sampler", None), DistributedSampler):
        return loader
    sampler = DistributedSampler(
        loader.dataset, num_replicas=1, rank=0, shuffle=loader.sampler.shuffle
    )
    sampler.set_epoch(next(passes))
    return DataLoader(
        loader.dataset,
        batch_size=BATCH_OF_ALL,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor,
    )
''',
    "whole_batch_size": '''
def whole_batch_size(loader):
    """Return the batch size of all ranks together."""
    divided = isinstance(getattr(loader, "sampler", None), DistributedSampler)
    return loader.batch_size * WORLD_SIZE if divided else loader.batch_size
''',
    "with_epoch": '''
def with_epoch(loader, epoch=None, passes=itertools.count()):
    """Set the epoch on the sampler of a loader that serves one pass; return it."""
    loader.sampler.set_epoch(next(passes) if epoch is None else epoch)
    return loader
''',
    "print0": '''
def print0(*values, **options):
    """Print on rank 0; every rank has computed the values."""
    if RANK == 0:
        print(*values, **options)
''',
    "rank0_file": '''
def rank0_file(path):
    """Return a file's path on rank 0, and that of a file without content elsewhere."""
    return path if RANK == 0 else os.devnull
''',
    "OnRank0": '''
class OnRank0:
    """Replaces a writer on the other ranks: accepts every call, does nothing."""

    def __getattr__(self, name):
        return self

    def __call__(self, *values, **options):
        return self

    def __getitem__(self, key):
        return self

    def __setitem__(self, key, value):
        pass

    def __iter__(self):
        return iter(())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def __format__(self, spec):
        return ""
''',
    "_reduced": """
def _reduced(values, divisor):
    shaped = [value if hasattr(value, "shape") else float(value) for value in values]
    parts = [torch.as_tensor(value).detach().cpu().double() for value in shaped]
    total = torch.cat([part.flatten() for part in parts])
    ALL_REDUCE
    out = []
    sizes = [part.numel() for part in parts]
    for value, part, new in zip(values, parts, (total / divisor).split(sizes)):
        if isinstance(value, torch.Tensor):
            out.append(new.view(part.shape).to(value))
        elif part.dim() > 0:
            out.append(new.view(part.shape).numpy().astype(value.dtype))
        else:
            number = new.item()
            whole = isinstance(value, int) and number.is_integer()
            out.append(int(number) if whole else number)
    return out[0] if len(out) == 1 else out
""",
    "mean_over_ranks": '''
def mean_over_ranks(*values):
    """Return the mean over ranks; every rank must call it."""
    return _reduced(values, WORLD_SIZE)
''',
    "sum_over_ranks": '''
def sum_over_ranks(*values):
    """Return the sum over ranks; every rank must call it."""
    return _reduced(values, 1)
''',
    "_other_batches": '''
class _other_batches:
    """A loader in all but the batches that it gives."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def __len__(self):
        return len(self.loader)
''',
    "share_of": '''
class share_of(_other_batches):
    """Gives this rank's batches of a loader whose results are summed over ranks."""

    def __iter__(self):
        ordered = (SequentialSampler, DistributedSampler)
        if isinstance(getattr(self.loader, "sampler", None), ordered):
            return itertools.islice(self.loader, RANK, None, WORLD_SIZE)
        # Ranks may see it in different orders, so one rank takes it whole.
        return iter(self.loader if RANK == 0 else ())
''',
    "batches_of_pass": '''
def batches_of_pass(loader, trains):
    """Return a loader to train on, or one of all samples, as rank 0 sees them."""
    return loader if trains else as_on_rank0(undivided(loader))
''',
    "whole_on_rank0": '''
class whole_on_rank0(_other_batches):
    """Gives rank 0 a whole loader whose results are summed over ranks."""

    def __iter__(self):
        return iter(self.loader if RANK == 0 else ())
''',
    "_random_states": '''
def _random_states(new=()):
    """Return the states of torch's, Python's and NumPy's random numbers; set new."""
    import random, sys  # here, as a script may have its own names

    kinds = [(torch.get_rng_state, torch.set_rng_state)]
    if torch.cuda.is_available():
        kinds.append((torch.cuda.get_rng_state, torch.cuda.set_rng_state))
    of_torch = len(kinds)
    kinds.append((random.getstate, random.setstate))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        kinds.append((numpy.get_state, numpy.set_state))
    states = [get() for get, _ in kinds]
    for (_, change), state in zip(kinds, new):
        change(state)
    return states, states[:of_torch]
''',
    "_as_rank0": '''
def _as_rank0():
    """Set rank 0's random numbers; return this rank's own, which are torch's only."""
    states, own = _random_states()
    _random_states(of_rank0(lambda: states))
    return own
''',
    "as_on_rank0": '''
class as_on_rank0(_other_batches):
    """Gives all ranks a loader's batches as on rank 0, with its random numbers."""

    kept = []

    def __iter__(self):
        own = _as_rank0()
        # Within another such loop they are rank 0's already, until that one ends.
        self.kept.append(self.kept[0] if self.kept else own)
        try:
            yield from self.loader
        finally:
            own = self.kept.pop()
            if RANK > 0 and not self.kept:
                _random_states(own)
''',
    "_send_buffers": '''
def _send_buffers(model):
    """Give all ranks rank 0's buffers of a model, or of the models that it holds."""
    of_module = isinstance(model, torch.nn.Module)
    held = [model] if of_module else list(getattr(model, "__dict__", {}).values())
    for part in held:
        if isinstance(part, torch.nn.Module):
            for buffer in part.buffers():
                if buffer.is_contiguous():
                    SEND_BUFFER
''',
    "buffers_of_rank0": '''
def buffers_of_rank0(model):
    """Return a model with rank 0's buffers (of batch norm); every rank must call it."""
    if IS_TRAINED and WORLD_SIZE > 1:
        _send_buffers(model)
    return model
''',
    "rank0_first": '''
@contextlib.contextmanager
def rank0_first():
    """Let the first rank of each host, which downloads, run before the others."""
    if LOCAL_RANK != 0:
        BARRIER
    yield
    if LOCAL_RANK == 0:
        BARRIER
''',
    "of_rank0": '''
def of_rank0(make):
    """Return what rank 0 makes, on all ranks; every rank must call it."""
    held = [make() if RANK == 0 else None]
    SEND_OBJECTS
    return held[0]
''',
    "folder_of_rank0": '''
@contextlib.contextmanager
def folder_of_rank0(make):
    """Yield a temporary folder of rank 0, until all ranks have left it."""
    with make() if RANK == 0 else contextlib.nullcontext() as folder:
        yield of_rank0(lambda: folder)
        BARRIER
''',
    "seed_equally": '''
def seed_equally():
    """Set one seed on all ranks, so that random splits are equal."""
    seed = torch.tensor(torch.initial_seed() % 2**31)
    BROADCAST
    SEEDS
''',
}

NEEDS = {
    "join_ranks": {"torch", "dist"},
    "unwrap": {"DistributedDataParallel"},
    "divided": {
        "DataLoader",
        "DistributedSampler",
        "RandomSampler",
        "SequentialSampler",
    },
    "undivided": {"DataLoader", "DistributedSampler", "itertools"},
    "whole_batch_size": {"DistributedSampler"},
    "_reduced": {"torch", "dist"},
    "mean_over_ranks": {"_reduced"},
    "sum_over_ranks": {"_reduced"},
    "with_epoch": {"itertools"},
    "share_of": {
        "_other_batches",
        "DistributedSampler",
        "SequentialSampler",
        "itertools",
    },
    "batches_of_pass": {"as_on_rank0", "undivided"},
    "whole_on_rank0": {"_other_batches"},
    "as_on_rank0": {"_other_batches", "_as_rank0", "_random_states"},
    "_as_rank0": {"of_rank0", "_random_states"},
    "_random_states": {"torch"},
    "_send_buffers": {"torch", "dist"},
    "buffers_of_rank0": {"_send_buffers", "DistributedDataParallel"},
    "rank0_first": {"contextlib", "dist"},
    "of_rank0": {"dist"},
    "folder_of_rank0": {"of_rank0", "contextlib", "dist"},
    "seed_equally": {"torch", "dist"},
}
"""The functions that a function calls, and the imports that it needs."""


def order() -> list[str]:
    """Return the functions in the order in which they are inserted into a script."""
    return ["join_ranks", *_COMMON]


def text_of(
    name: str, *, horovod: bool, per_rank_batch: bool, seeds: tuple[str, ...]
) -> str:
    """Return the source of one function.

    Args:
        name: One of `order`.
        horovod: Whether ranks communicate through Horovod's interface.
        per_rank_batch: Whether a batch size is each rank's already.
        seeds: Statements of ``seed_equally`` after the seed was agreed on.
    """
    if name == "join_ranks":
        return _JOIN_HOROVOD if horovod else _JOIN
    text = _COMMON[name]
    if horovod:
        words = {
            "ALL_REDUCE": "total = hvd.allreduce(total, op=hvd.Sum)",
            "BROADCAST": "seed = hvd.broadcast(seed, root_rank=0)",
            "BARRIER": "hvd.barrier()",
            "IS_TRAINED": "hvd.is_initialized()",
            "SEND_BUFFER": "hvd.broadcast_(buffer.detach(), root_rank=0)",
            "SEND_OBJECTS": "held = hvd.broadcast_object(held, root_rank=0)",
        }
    else:
        words = {
            "ALL_REDUCE": "dist.all_reduce(total)",
            "BROADCAST": "dist.broadcast(seed, 0)",
            "BARRIER": "dist.barrier()",
            "IS_TRAINED": "isinstance(model, DistributedDataParallel)",
            "SEND_BUFFER": "dist.broadcast(buffer.detach(), 0)",
            "SEND_OBJECTS": "dist.broadcast_object_list(held, src=0)",
        }
    words["BATCH_OF_LOADER"] = (
        "loader.batch_size" if per_rank_batch else "per_rank(loader.batch_size)"
    )
    words["BATCH_OF_ALL"] = (
        "loader.batch_size" if per_rank_batch else "loader.batch_size * WORLD_SIZE"
    )
    words["SEEDS"] = "\n    ".join(seeds)
    return re.sub("|".join(words), lambda match: words[match.group()], text)
