"""Choose how many GPUs each layer gets (burst parallelism, DeepPool section 4)."""
