"""Rules that find what is wrong with a run and propose the smallest change: pure code over its config and metrics."""
