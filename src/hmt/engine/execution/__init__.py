"""A step through the model's layers: prefetch, CUDA graphs, warm-up."""
