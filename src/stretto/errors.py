"""Every error that the library raises on purpose.

StrettoError
├── SpecError (ValueError)      a value or a file breaks a rule
├── PlanMismatch                a plan and a model do not match
├── Infeasible                  no plan meets the limits
├── NoisyProfile                a measurement is too noisy to be used
├── RankDisagreement (RuntimeError)  ranks' plans, models or versions differ
├── NumericsError               a gradient is NaN or infinite
├── MissingPackage (ImportError) a package of an extra is not installed
├── CommTimeout (RuntimeError)       a collective or a peer did not answer in time
├── BackgroundError (RuntimeError)   a device's board or its background cannot be used
├── ClusterError (RuntimeError)      a cluster's coordinator or host cannot be used
│   └── StoreUnavailable             the cluster's store cannot be written for now
└── LabError                    an emulated cluster or its command does not start
    └── CommandNotFound         the command for its ranks is missing
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BackgroundError",
    "ClusterError",
    "CommTimeout",
    "CommandNotFound",
    "Infeasible",
    "LabError",
    "MissingPackage",
    "NoisyProfile",
    "NumericsError",
    "PlanMismatch",
    "RankDisagreement",
    "SpecError",
    "StoreUnavailable",
    "StrettoError",
]


class StrettoError(Exception):
    """Root of the errors that are raised on purpose."""

    exit_code: ClassVar[int] = 1
    """Exit status of a command that ends with this error."""


class SpecError(StrettoError, ValueError):
    """A value breaks a rule.

    ``place`` is the JSON path below the object that raised, for instance
    ``.tensors[3].bytes``; the codec prepends the file and the path above.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, place: str = "") -> None:
        super().__init__(message)
        self.place = place


class PlanMismatch(StrettoError):
    """A plan and a model do not match."""

    exit_code: ClassVar[int] = 2


class Infeasible(StrettoError):
    """No plan meets the limits; a planner raises this rather than relax a limit."""

    exit_code: ClassVar[int] = 3


class NoisyProfile(StrettoError):
    """A measurement is too noisy to plan with."""


class RankDisagreement(StrettoError, RuntimeError):
    """Ranks have different plans, models or versions.

    A `RuntimeError`, like the one that DDP raises for it. ``key`` is the name of the
    value that differs, if it is one that all ranks compare.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class NumericsError(StrettoError):
    """A gradient is NaN or infinite, and the user requested an error."""


class CommTimeout(StrettoError, RuntimeError):
    """A collective or a peer did not answer in time.

    A `RuntimeError`, like those of PyTorch's collectives.
    """


class MissingPackage(StrettoError, ImportError):
    """A feature needs a package of an extra that is not installed.

    An `ImportError`, like the one that importing the package raises.
    """


class BackgroundError(StrettoError, RuntimeError):
    """A device's board cannot be used, or the device has its background already."""


class ClusterError(StrettoError, RuntimeError):
    """A cluster's coordinator, store or host cannot be used."""


class StoreUnavailable(ClusterError):
    """A cluster's store cannot be written for now: full, locked or damaged."""


class LabError(StrettoError):
    """An emulated cluster cannot be built, or its command cannot be started."""


class CommandNotFound(LabError):
    """The command that the ranks should run is missing."""
