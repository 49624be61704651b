"""The version of the package, also read by the build."""

__version__ = "0.2.0"
