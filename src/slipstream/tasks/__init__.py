"""Prompts, how they are rendered, and how answers are graded."""
