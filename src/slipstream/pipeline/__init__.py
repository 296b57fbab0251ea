"""Time and order: what may start when, and who waits for whom. Of the engines it sees the protocols only."""
