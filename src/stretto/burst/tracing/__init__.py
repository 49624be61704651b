"""From a module to operations, and from operations to layers."""
