"""Decisions that steer a run: health, guards, autopilot, scaling, buffer refresh, canaries."""
