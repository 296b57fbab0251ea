"""What agents of others need to work for the gateway: their commands in the sandbox, and what verifies their work."""
