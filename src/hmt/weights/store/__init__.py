"""The block store: leases, slots, reads, the device's copies."""
