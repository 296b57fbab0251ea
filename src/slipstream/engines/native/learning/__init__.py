"""The student under training."""
