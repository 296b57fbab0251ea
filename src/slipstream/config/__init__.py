"""What is configured: one schema, one set of defaults."""
