"""Rollouts from any Hugging Face causal LM."""
