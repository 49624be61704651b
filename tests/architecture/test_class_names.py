"""A class is found by its name alone."""

from __future__ import annotations

import ast

from support.source_trees import trees

SHARED = {
    # Horovod's name, in each of its interfaces.
    "Compression": {
        "stretto.horovod.tensorflow.compression",
        "stretto.horovod.torch.compression",
    },
    # PyTorch's name: the class of users, and the one it extends, which only runs plans.
    "DistributedDataParallel": {"stretto._api.ddp", "stretto.runtime.ddp"},
}
"""Names of more than one class, by the modules that define one."""


def test_no_two_classes_have_one_name():
    """Except those of a single module, which begin with ``_``."""
    found = {}
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    twice = {name: modules for name, modules in found.items() if len(modules) > 1}
    assert {name: set(modules) for name, modules in twice.items()} == SHARED
    assert {len(modules) for modules in twice.values()} == {2}
