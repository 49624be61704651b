"""Scripts converted from their text."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.convert import Choices, Conversion, Kind, convert_source
from stretto.errors import SpecError

STEP = """\
        loss = model(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""
"""One step of a loop over a loader, in a loop over epochs."""

TRAINING = (
    """\
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
for epoch in range(2):
    for (x,) in loader:
"""
    + STEP
)
"""The smallest script that trains, without its imports."""


def convert(source: str, **choices: Any) -> Conversion:
    return convert_source(source, name="train.py", choices=Choices(**choices))


def refused(source: str, **choices: Any) -> str:
    """The sentence with which a script is refused."""
    with pytest.raises(SpecError) as raised:
        convert(source, **choices)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def open_notes(conversion: Conversion) -> list[str]:
    """What a person has to decide."""
    return [str(n) for n in conversion.notes if n.kind is Kind.OPEN]
