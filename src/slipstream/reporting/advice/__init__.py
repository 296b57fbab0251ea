"""What is wrong with a run, why, and the smallest change that mends it: pure code over its config and its metrics."""
