"""The main job end to end on one machine: emulated cluster, real training."""
