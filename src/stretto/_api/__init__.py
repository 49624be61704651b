"""Functions and classes that a program calls: a few lines of wiring each."""

from stretto._api.planning import (
    compare,
    contributions,
    plan,
    predicted,
    resized,
    simulate,
)

__all__ = ["compare", "contributions", "plan", "predicted", "resized", "simulate"]
