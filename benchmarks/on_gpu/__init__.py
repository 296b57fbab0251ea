"""The stages of `benchmarks/gpu.py`, one module each with a function `stage(setting, report)`."""
