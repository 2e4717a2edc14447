"""Which experts are needed: prediction, prefetch, traces, hit rates."""
