"""A run from its start to its end: opening engines, training, stopping, resuming, and its display."""
