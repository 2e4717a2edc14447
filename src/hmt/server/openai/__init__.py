"""OpenAI's API: what is asked in its words, and answered in them."""
