"""Engines that only take time or use tabular models, and a virtual clock."""
