"""Configuration of a run: one schema, one set of defaults."""
