"""Runtimes start engines in threads, processes or Ray actors, and connect the coordinator to the engines."""
