"""Recordings without the operations on constants, to compare calls that cache these.

The first call computes a table and later ones find it in a cache, so their operations
differ. Where each constant is named by its values, both calls must do the same.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from torch import Tensor

from stretto.burst.tracing.freezing import ContentFreezer
from stretto.burst.tracing.records import SOURCE, Fixed, Recording, Ref, renumbered

if TYPE_CHECKING:
    from stretto.burst.tracing.constant_values import ConstantValues


def without_constants(recording: Recording, values: ConstantValues) -> Recording:
    """Return a recording with values of constants in place of what computes them."""
    kept: dict[int, int] = {}
    """New numbers of the operations on anything else, by their numbers."""
    for number, record in enumerate(recording.records):
        if not record.tensors or not all(
            map(values.has_value, record.tensors.values())
        ):
            kept[number] = len(kept)

    def name_of(name: Ref | Fixed) -> Ref | Fixed:
        if name == SOURCE:
            return name
        if isinstance(name, Ref) and name.number in kept:
            return Ref(kept[name.number], name.path)
        if isinstance(name, Ref):
            tensor = recording.records[name.number].tensors[name.path]
            value = values.value_of(tensor, decides=False)
        elif name.name in recording.cached:
            value = values.value_of(recording.cached[name.name], decides=False)
        else:
            value = recording.constants.get(name.name)
        return _name_by(value) if isinstance(value, Tensor) else name

    return renumbered(recording, kept, name_of)


def _name_by(value: Tensor) -> Fixed:
    content = repr(ContentFreezer()(value)).encode()
    return Fixed(f"<values {hashlib.blake2b(content, digest_size=16).hexdigest()}>")
