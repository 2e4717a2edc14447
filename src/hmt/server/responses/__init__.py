"""OpenAI's Responses API: items in, items out, over what chats use."""
