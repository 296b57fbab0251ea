"""Experiments: what a study asks, its runs, and what came of them."""
