"""Chat templates: conversations with tool calls as tokens."""
