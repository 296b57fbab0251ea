"""Agents that speak a chat API: their calls are turns of the student, and their sessions episodes."""
