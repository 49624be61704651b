"""Convert a module to operations, and operations to layers."""
