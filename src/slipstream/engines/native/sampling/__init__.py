"""Rollouts from any HF causal LM."""
