"""What an update minimises, and what is decided before its first gradient."""
