"""From a folder to a plan, and from a plan to memory."""
