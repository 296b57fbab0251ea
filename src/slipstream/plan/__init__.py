"""What is decided, and refused, before anything starts."""
