"""The page at /: a chat, and a picture of the machine while it answers."""
