"""Where engines live."""
