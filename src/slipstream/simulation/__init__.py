"""Engines that only take time, and a virtual clock."""
