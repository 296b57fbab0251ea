"""Objective of an update, and everything that is decided before its first gradient."""
