"""Anthropic's Messages API: a thin face over what OpenAI's clients use."""
