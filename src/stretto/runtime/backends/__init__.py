"""Communication backends of lanes."""
