"""Burst parallelism for real models: their layers, measured times, and training."""
