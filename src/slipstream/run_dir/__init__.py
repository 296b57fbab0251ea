"""The run directory: everything that a run writes and its readers read."""
