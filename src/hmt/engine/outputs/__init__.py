"""What becomes of logits: tokens, text, log-probabilities and embeddings of each request."""
