"""Host memory: pools, arenas, the buddy system, compaction."""
