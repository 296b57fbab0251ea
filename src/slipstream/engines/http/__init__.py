"""Teachers behind OpenAI-compatible endpoints: HTTP, and what came back, checked."""
