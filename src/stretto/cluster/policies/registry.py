"""Policies by name: stretto's own, and those that installed packages bring.

A package adds a policy by an entry point of the group `ENTRY_POINTS`, whose name is
the policy's and whose value is its class.
"""

from __future__ import annotations

import inspect
from typing import Any

from stretto.cluster.policies.base import AbstractPolicy
from stretto.cluster.policies.deeppool import DeepPoolPolicy
from stretto.cluster.policies.fifo import FifoPolicy
from stretto.cluster.policies.partition import PartitionPolicy
from stretto.cluster.policies.sized import (
    BatchOptimalPolicy,
    StrongPolicy,
    WeakPolicy,
)
from stretto.errors import SpecError
from stretto.plugins import ClassRegistry

ENTRY_POINTS = "stretto.policies"
"""Group of entry points in which packages name their policies."""

_POLICIES = ClassRegistry(
    ENTRY_POINTS,
    AbstractPolicy,  # type: ignore[type-abstract]
    (
        FifoPolicy,
        PartitionPolicy,
        StrongPolicy,
        WeakPolicy,
        BatchOptimalPolicy,
        DeepPoolPolicy,
    ),
)

NAMES = tuple(_POLICIES.own)
"""stretto's policies, simplest first; `get` accepts others too."""


def get(policy: str | AbstractPolicy, **options: Any) -> AbstractPolicy:
    """Return the policy of a name with its options; a policy is returned unchanged.

    Raises:
        SpecError: the policy or an option is unknown, or a policy that is made already
            is given options.
    """
    if isinstance(policy, AbstractPolicy):
        if options:
            raise SpecError(
                f"policy {policy.name} is an object, which has its options already, "
                f"got {', '.join(options)}: pass them to its constructor"
            )
        return policy
    found = _POLICIES.find(policy)
    if found is None:
        names = ", ".join(_POLICIES.names())
        raise SpecError(
            f"policy must be one of {names}, got {policy!r}", place=".policy"
        )
    known = options_of(found)
    for option in options:
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise SpecError(f"policy {policy} has no option {option!r}; {has}")
    return found(**options)


def options_of(policy: type[AbstractPolicy]) -> tuple[str, ...]:
    """Return the names of a policy's options."""
    parameters = inspect.signature(policy).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
