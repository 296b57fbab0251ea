"""Slipstream: on-policy distillation with rollout, scoring and learning overlapped, and staleness under control."""

__version__ = "0.1.0"
