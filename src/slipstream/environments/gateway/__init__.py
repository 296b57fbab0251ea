"""Gateway for agents that use a chat API: each call of an agent is one turn of the student; a session is an episode."""
