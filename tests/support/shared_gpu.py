"""Several ranks of one host on one GPU, with real NCCL.

NCCL refuses two ranks of one host on one device. A host id of its own per rank makes
them hosts that reach each other by sockets.
"""

from __future__ import annotations


def nccl_environment(rank: int) -> dict[str, str]:
    """Return NCCL's variables of a rank that shares its device with other ranks."""
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_FAMILY": "AF_INET",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_CUMEM_ENABLE": "0",
    }
