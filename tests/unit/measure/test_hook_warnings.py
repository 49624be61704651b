import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from stretto.measure import StepObserver


def warned(model: Callable[..., object]) -> bool:
    """Whether a call of the compiled model warns of hooks on all modules."""
    with warnings.catch_warnings(record=True) as found:
        model(torch.ones(2, 3))
    return any("global hooks" in str(warning.message) for warning in found)


def test_a_compiled_model_does_not_warn_of_the_observers_hooks() -> None:
    model = nn.Linear(3, 2)
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with StepObserver(nn.Linear(3, 2), aside=True):
            with StepObserver(model, aside=True):
                assert not warned(compiled)
            assert not warned(compiled)
        assert list(warnings.filters) == before


def test_a_compiled_model_still_warns_of_the_programs_own_hooks() -> None:
    model = nn.Linear(3, 2)
    compiled = torch.compile(model, backend="eager")
    own = register_module_forward_hook(lambda *_: None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            with StepObserver(model, aside=True):
                assert warned(compiled)
    finally:
        own.remove()
