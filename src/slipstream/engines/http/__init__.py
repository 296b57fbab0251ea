"""Teachers behind OpenAI-compatible HTTP endpoints, and checks of their answers."""
