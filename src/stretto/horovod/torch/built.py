"""Report the available features, by which scripts choose their settings."""

from __future__ import annotations

import torch
import torch.distributed as dist


def mpi_threads_supported() -> bool:
    """Report whether MPI may be used from several threads.

    Raises:
        ValueError: always, as in Horovod without MPI.
    """
    raise ValueError("MPI is not supported: stretto uses Gloo and NCCL")


def mpi_enabled() -> bool:
    """Return False: MPI is not supported."""
    return False


def mpi_built() -> bool:
    """Return False: MPI is not supported."""
    return False


def gloo_enabled() -> bool:
    """Return whether Gloo is used: ranks negotiate over it."""
    return dist.is_gloo_available()


def gloo_built() -> bool:
    """Return whether PyTorch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Return NCCL's version as one number, 22703 for 2.27.3; 0 without NCCL."""
    if not dist.is_nccl_available():
        return 0
    # Not yet run on a GPU.
    version: tuple[int, ...] = torch.cuda.nccl.version()
    major, minor, patch = version[:3]
    return major * (10000 if (major, minor) > (2, 8) else 1000) + minor * 100 + patch


def ddl_built() -> bool:
    """Return False: DDL is not supported."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL is not supported."""
    return False


def cuda_built() -> bool:
    """Return whether PyTorch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether PyTorch has ROCm."""
    return torch.version.hip is not None
