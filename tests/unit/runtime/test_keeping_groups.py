"""A process group's Python object outlives the Reducer and Logger that use it."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from stretto.runtime.torch_compat import keep_group


class Owner:
    pass


class OwnGroup(dist.ProcessGroup):
    """A class of the program's own, which may refer to the model."""


def model_with(group: Any) -> Any:
    model = SimpleNamespace(process_group=group, reducer=Owner(), logger=Owner())
    keep_group(model)
    return model


def test_a_group_is_dropped_after_the_last_object_that_uses_it() -> None:
    model = model_with(dist.ProcessGroup(dist.HashStore(), 0, 1))
    group = weakref.ref(model.process_group)
    del model.process_group
    gc.collect()
    assert group() is not None
    del model.reducer
    assert group() is not None
    del model.logger
    assert group() is None


def test_a_group_of_a_class_of_its_own_is_not_kept() -> None:
    model = model_with(OwnGroup(0, 1))
    group = weakref.ref(model.process_group)
    del model.process_group
    gc.collect()
    assert group() is None
