"""Calls of tools in answers: how models write them, reading them, and grammars for them."""
