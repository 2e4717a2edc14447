"""Where every block and KV page lives: solver, footprints, slots, tiers."""
