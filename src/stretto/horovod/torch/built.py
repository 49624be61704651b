"""What is available beneath: the answers scripts choose their settings by."""

from __future__ import annotations

import torch
import torch.distributed as dist


def mpi_threads_supported() -> bool:
    """Whether MPI may be used from several threads.

    Raises:
        ValueError: always, as Horovod without MPI does.
    """
    raise ValueError("there is no MPI here: stretto uses Gloo and NCCL")


def mpi_enabled() -> bool:
    """False: there is no MPI."""
    return False


def mpi_built() -> bool:
    """False: there is no MPI."""
    return False


def gloo_enabled() -> bool:
    """Whether Gloo is used: it is what ranks negotiate over."""
    return dist.is_gloo_available()


def gloo_built() -> bool:
    """Whether PyTorch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """NCCL's version as one number, 22703 for 2.27.3; 0 where PyTorch has none."""
    if not dist.is_nccl_available():
        return 0
    # Not yet run on a GPU.
    version: tuple[int, ...] = torch.cuda.nccl.version()
    major, minor, patch = version[:3]
    return major * (10000 if (major, minor) > (2, 8) else 1000) + minor * 100 + patch


def ddl_built() -> bool:
    """False: there is no DDL."""
    return False


def ccl_built() -> bool:
    """False: there is no oneCCL."""
    return False


def cuda_built() -> bool:
    """Whether PyTorch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether PyTorch has ROCm."""
    return torch.version.hip is not None
