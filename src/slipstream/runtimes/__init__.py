"""Runtimes: where engines run, and how the coordinator reaches them."""
