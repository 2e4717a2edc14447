"""Ollama's API: chats, completions and models, over what the other APIs use."""
