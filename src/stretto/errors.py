"""Every error the library raises on purpose.

StrettoError
├── SpecError (ValueError)      a value or a file breaks a rule
├── PlanMismatch                a plan and a model do not belong together
├── Infeasible                  no plan meets the limits
├── NoisyProfile                a measurement is too unsteady to be used
├── RankDisagreement (RuntimeError)  ranks' plans, models or versions differ
├── NumericsError               a gradient is NaN or infinite
├── CommTimeout (RuntimeError)       a collective or a peer did not answer in time
└── LabError                    an emulated cluster or its command does not start
    └── CommandNotFound         the command for its ranks is not there
"""

from __future__ import annotations

from typing import ClassVar


class StrettoError(Exception):
    """Root of the errors raised on purpose."""

    exit_code: ClassVar[int] = 1
    """Status of a command that ends with this error."""


class SpecError(StrettoError, ValueError):
    """A value breaks a rule.

    ``place`` is the JSON path below the object that raised, for instance
    ``.tensors[3].bytes``; the codec puts the file and the path above before it.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, place: str = "") -> None:
        super().__init__(message)
        self.place = place


class PlanMismatch(StrettoError):
    """A plan and a model do not belong together."""

    exit_code: ClassVar[int] = 2


class Infeasible(StrettoError):
    """No plan meets the limits; a planner raises this rather than relax one."""

    exit_code: ClassVar[int] = 3


class NoisyProfile(StrettoError):
    """A measurement is too unsteady to plan with."""


class RankDisagreement(StrettoError, RuntimeError):
    """Ranks came with different plans, models or versions.

    A `RuntimeError`, as what DDP raises for it is.
    """


class NumericsError(StrettoError):
    """A gradient is NaN or infinite, and the user asked to be stopped."""


class CommTimeout(StrettoError, RuntimeError):
    """A collective or a peer did not answer in time.

    A `RuntimeError`, as what PyTorch's collectives raise is.
    """


class LabError(StrettoError):
    """An emulated cluster can not be built, or its command can not be started."""


class CommandNotFound(LabError):
    """The command that ranks should run is not there."""
