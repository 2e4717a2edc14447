"""Ollama's API: chats, texts and models, over what the other APIs use."""
