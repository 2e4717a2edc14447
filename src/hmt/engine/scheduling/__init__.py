"""Which tokens of which requests make up the next step, and what becomes of them."""
