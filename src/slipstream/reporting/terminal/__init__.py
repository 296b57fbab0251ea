"""Live and finished runs as terminal panels."""
