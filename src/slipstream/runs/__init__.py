"""Life of a run: open engines, train, stop, resume, restart after a crash, and display progress."""
