"""What a step is predicted to cost on a machine."""
