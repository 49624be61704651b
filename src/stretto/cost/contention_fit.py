"""Fit contention by resource to a probe's readings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stretto.cost.libra import (
    RateSample,
    SlowdownSample,
    fit_contention,
    fit_slowdown,
)
from stretto.errors import SpecError

if TYPE_CHECKING:
    from stretto.cost.regression import Fitted
    from stretto.schema import Cluster, ComputeContention, Contention
    from stretto.schema.samples import ContentionReadings


def fit_compute(readings: ContentionReadings) -> Fitted[ComputeContention]:
    """Fit LIBRA's alpha to readings (Eq. 5).

    Raises:
        SpecError, Infeasible: As `fit_slowdown`.
    """
    return fit_slowdown(_slowdowns(readings))


def with_contention(cluster: Cluster, readings: ContentionReadings) -> Cluster:
    """Add measured contention by resource to a cluster; return the fit's quality too.

    Raises:
        SpecError: nothing was sent, so rates are unknown.
        Infeasible: the readings contradict the model or the cluster's link.
    """
    if not readings.rates:
        raise SpecError(
            "these readings come from a device without peers: they show how "
            "computation slows, but no rates. Measure with ranks (`stretto probe "
            "--resources`)"
        )
    overlapped, exclusive = (
        [
            RateSample(
                resource=reading.resource,
                wire_bytes=reading.wire_bytes,
                transmission_s=getattr(reading, name),
            )
            for reading in readings.rates
        ]
        for name in ("overlapped_s", "exclusive_s")
    )
    # A rate above the link's fitted rate means that the fitted lanes did not saturate
    # the link, and that these connections did.
    fastest = max(sample.bytes_per_s for sample in (*overlapped, *exclusive))
    link = max(cluster.bottleneck.bandwidth_bytes_per_s, fastest)
    fit = fit_contention(
        _slowdowns(readings), overlapped, exclusive, link_bytes_per_s=link
    )
    return replace(
        cluster,
        contention=fit.value,
        provenance={
            **cluster.provenance,
            "contention": {
                **readings.provenance,
                "link_bytes_per_s": link,
                "slowdown": _report(fit.slowdown),
                "overlapped": _report(fit.overlapped),
                "exclusive": _report(fit.exclusive),
            },
        },
    )


def _slowdowns(readings: ContentionReadings) -> list[SlowdownSample]:
    return [
        SlowdownSample(
            resource=reading.resource,
            compute_alone_s=reading.compute_alone_s,
            compute_overlapped_s=reading.compute_overlapped_s,
        )
        for reading in readings.slowdowns
    ]


def _report(fitted: Fitted[Contention] | Fitted[Any]) -> dict[str, Any]:
    return {
        "std_errors": {
            name: error if error < float("inf") else None
            for name, error in fitted.std_errors.items()
        },
        "residual_ratios": list(fitted.residual_ratios),
    }
