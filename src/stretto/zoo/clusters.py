"""The papers' testbeds as clusters; their provenance lists the assumptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from stretto.errors import SpecError
from stretto.schema import (
    AllReduceFit,
    Cluster,
    ComputeContention,
    Concurrency,
    Contention,
    Link,
    RateCurve,
)

GBIT_BYTES = 1e9 / 8
"""Bytes in a gigabit."""

ASC_STARTUP_S = 1.4e-3
ASC_S_PER_BYTE = 1.7e-9
ASC_GAMMA = (1.0, 1.5)
ASC_LINK_BYTES_PER_S = 9.43 * GBIT_BYTES
"""ASC-WFBP's published figures: section III, Eq. 3 and 7-11, Eq. 43."""

ASC_INTRA_HOST_BYTES_PER_S = 4.5e9
"""Ring bytes over the time beyond that of one GPU, on one host of 4 GPUs on PCIe:
BERT-Large at batch 8, 53.04 samples/s on 4 GPUs and 49 on one, gives 4.58 GB/s."""

LIBRA_RESOURCES = (128, 256, 512, 1024, 2048, 4096)
LIBRA_ALPHA2 = 1.3445e-4
"""From LIBRA Fig. 1a: computation takes 38 % longer beside 2048 threads."""

AIACC_LINK_BYTES_PER_S = 30 * GBIT_BYTES
AIACC_STREAM_SHARE = 0.30
AIACC_LINK_SHARE = 0.95
"""AIACC-Training section III: shares of a TCP link that one and many streams reach."""

DEEPPOOL_BYTES_PER_S = 2.66e11
DEEPPOOL_DELAY_S = 40e-6
"""Costs of one transfer in the DeepPool authors' planner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """One cluster that can be built for several numbers of hosts."""

    about: str

    hosts: int

    build: Callable[[str, int], Cluster]

    fixed: bool = False
    """Whether its figures hold for its own number of hosts only."""


def _asc(name: str, hosts: int, *, capped: bool) -> Cluster:
    ranks = 4 * hosts
    fitted = 32
    alone = 2 * (fitted - 1) / fitted / ASC_S_PER_BYTE
    link = ASC_LINK_BYTES_PER_S
    if not capped:
        link = max(link, 2 * alone / ASC_GAMMA[1])
    provenance: dict[str, Any] = {
        "source": "Shi et al., INFOCOM 2021: Eq. 3, gamma of section III, Eq. 43",
        "devices": f"{ranks} x RTX 2080 Ti, 4 a host",
        "intra_host": "4.5 GB/s between the devices of a host: implied by BERT-Large "
        "(4.6) and BERT-Base (4.1) on one host of 4 GPUs without overlap (BSP-A2A) in "
        "the same laboratory's table, github.com/HKBU-HPML/ddl-benchmarks, results of "
        "2020-05-29",
        "assumed": ["10 us latency within a host"],
    }
    if not capped:
        provenance["note"] = (
            "link set to what gamma = 1.5 needs: more than 10GbE carries"
        )
    return Cluster(
        name=name,
        hosts=hosts,
        ranks_per_host=4,
        inter_host=Link(
            latency_s=ASC_STARTUP_S / (2 * (fitted - 1)), bandwidth_bytes_per_s=link
        ),
        intra_host=Link(
            latency_s=10e-6, bandwidth_bytes_per_s=ASC_INTRA_HOST_BYTES_PER_S
        ),
        allreduce=AllReduceFit(
            startup_s=ASC_STARTUP_S, s_per_byte=ASC_S_PER_BYTE, ranks=fitted
        ),
        concurrency=Concurrency(gamma=ASC_GAMMA),
        provenance=provenance,
    )


def libra(name: str = "libra", hosts: int = 8, *, latency_s: float = 10e-6) -> Cluster:
    """Return LIBRA's testbed; its unpublished rate curves and latency are assumed."""
    link = 50 * GBIT_BYTES

    def curve(scale: float) -> RateCurve:
        rate = scale * link
        return RateCurve(gamma1=rate, gamma2=rate, gamma3=0.02, gamma4=0.6)

    return Cluster(
        name=name,
        hosts=hosts,
        ranks_per_host=1,
        inter_host=Link(latency_s=latency_s, bandwidth_bytes_per_s=link),
        intra_host=Link(latency_s=5e-6, bandwidth_bytes_per_s=150e9),
        contention=Contention(
            compute=ComputeContention(alpha1=1.0, alpha2=LIBRA_ALPHA2),
            overlapped=curve(1.0),
            exclusive=curve(1.1),
            resources=LIBRA_RESOURCES,
        ),
        provenance={
            "source": "LIBRA: 50 Gb/s RDMA, one V100 a host; alpha2 from Fig. 1a",
            "assumed": [
                "alpha1 = 1",
                "gamma1 = gamma2 = the link, gamma3 = .02 (gamma4 = .6 is published)",
                "10 % faster where no computation runs, up to the link",
                f"{latency_s * 1e6:g} us latency",
            ],
        },
    )


def aiacc(name: str = "aiacc", hosts: int = 4) -> Cluster:
    """Return AIACC-Training's cloud hosts: 30 Gb/s TCP, of which a stream gets 30 %."""
    return Cluster(
        name=name,
        hosts=hosts,
        ranks_per_host=8,
        inter_host=Link(
            latency_s=10e-6,
            bandwidth_bytes_per_s=AIACC_LINK_SHARE * AIACC_LINK_BYTES_PER_S,
            stream_bytes_per_s=AIACC_STREAM_SHARE * AIACC_LINK_BYTES_PER_S,
        ),
        intra_host=Link(latency_s=5e-6, bandwidth_bytes_per_s=130e9),
        provenance={
            "source": "AIACC-Training section III: at most 30 % of a TCP link a stream",
            "devices": f"{8 * hosts} x V100 with NVLink, 8 a host",
            "assumed": [
                "many streams reach 95 % of 30 Gb/s",
                "10 us latency",
                "130 GB/s within a host",
            ],
        },
    )


def _deeppool(name: str, hosts: int) -> Cluster:
    link = Link(latency_s=DEEPPOOL_DELAY_S, bandwidth_bytes_per_s=DEEPPOOL_BYTES_PER_S)
    return Cluster(
        name=name,
        hosts=hosts,
        ranks_per_host=8,
        inter_host=link,
        intra_host=link,
        allreduce=AllReduceFit(startup_s=79e-6, s_per_byte=1 / 130e9, ranks=8),
        provenance={
            "source": "DeepPool: 266 GB/s and 40 us a transfer, of its planner",
            "devices": "8 x A100 with NVSwitch",
            "assumed": ["all-reduce: 79 us + 130 GB/s, fitted to A100s over NVLink"],
        },
    )


def _mg_wfbp(
    name: str,
    hosts: int,
    *,
    startup_s: float,
    s_per_byte: float,
    nominal_gbit: float,
) -> Cluster:
    needed = 2 * (hosts - 1) / hosts / s_per_byte
    nominal = nominal_gbit * GBIT_BYTES
    provenance: dict[str, Any] = {
        "source": "MG-WFBP's published all-reduce constants",
        "assumed": ["one rank a host"],
    }
    if needed > nominal:
        provenance["note"] = (
            f"the published s_per_byte needs {needed / nominal:.2f} times the nominal "
            f"link of {nominal_gbit:g} Gb/s; the link is set to that"
        )
    link = Link(
        latency_s=startup_s / (2 * (hosts - 1)),
        bandwidth_bytes_per_s=max(nominal, needed),
    )
    return Cluster(
        name=name,
        hosts=hosts,
        ranks_per_host=1,
        inter_host=link,
        intra_host=link,
        allreduce=AllReduceFit(startup_s=startup_s, s_per_byte=s_per_byte, ranks=hosts),
        provenance=provenance,
    )


_TESTBEDS = {
    "asc": Testbed(
        about="ASC-WFBP: 8 x 4 RTX 2080 Ti, 10GbE; the link limits gamma",
        hosts=8,
        build=partial(_asc, capped=True),
    ),
    "asc-uncapped": Testbed(
        about="ASC-WFBP with its gamma as printed, beyond what 10GbE carries",
        hosts=8,
        build=partial(_asc, capped=False),
    ),
    "libra": Testbed(
        about="LIBRA: 8 x 1 V100, 50 Gb/s RDMA; rate curves assumed",
        hosts=8,
        build=libra,
    ),
    "aiacc": Testbed(
        about="AIACC-Training: n x 8 V100, 30 Gb/s TCP, streams of 30 %",
        hosts=4,
        build=aiacc,
    ),
    "deeppool": Testbed(
        about="DeepPool: 8 A100, NVSwitch", hosts=1, build=_deeppool, fixed=True
    ),
} | {
    f"mg-wfbp-{kind}-{ranks}": Testbed(
        about=f"MG-WFBP's constants: {ranks} ranks, {gbit} Gb/s {kind}",
        hosts=ranks,
        build=partial(
            _mg_wfbp, startup_s=startup_s, s_per_byte=s_per_byte, nominal_gbit=gbit
        ),
        fixed=True,
    )
    for kind, gbit, ranks, startup_s, s_per_byte in (
        ("ib", 56, 2, 2.55e-6, 9.84e-11),
        ("ib", 56, 4, 4.20e-5, 2.06e-10),
        ("ib", 56, 8, 9.75e-5, 3.06e-10),
        ("ib", 56, 16, 2.36e-4, 4.06e-10),
        ("10gbe", 10, 8, 5.23e-4, 8.57e-10),
        ("10gbe", 10, 16, 9.08e-4, 7.40e-10),
    )
}

CLUSTERS = {name: testbed.about for name, testbed in _TESTBEDS.items()}
"""Names and descriptions of all clusters."""


def cluster(name: str, hosts: int | None = None) -> Cluster:
    """Return a paper's testbed, with its own number of hosts or another.

    Raises:
        SpecError: the name is unknown, or its figures do not hold for this number of
            hosts.
    """
    if name not in _TESTBEDS:
        raise SpecError(f"cluster must be one of {', '.join(_TESTBEDS)}, got {name!r}")
    testbed = _TESTBEDS[name]
    if hosts is not None and hosts != testbed.hosts and testbed.fixed:
        raise SpecError(
            f"cluster {name} is known at {testbed.hosts} host(s) only, got {hosts}: "
            "omit the number"
        )
    return testbed.build(name, testbed.hosts if hosts is None else hosts)
