"""The versions of the package (also read by the build) and of the torch it needs."""

__version__ = "0.3.0.dev0"

FIRST_TORCH, LAST_TORCH = (2, 11), (2, 14)
"""First and last minor version of torch that stretto was written for."""

TORCH_VERSIONS = "{}.{} to {}.{}".format(*FIRST_TORCH, *LAST_TORCH)
"""The same in words, for messages."""

TORCH_REQUIREMENT = "torch>={}.{},<{}.{}".format(
    *FIRST_TORCH, LAST_TORCH[0], LAST_TORCH[1] + 1
)
"""The same as `pyproject.toml` states it."""
