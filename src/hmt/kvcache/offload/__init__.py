"""KV pages on device, host and disk: migration, write-back, fetch, host attention."""
