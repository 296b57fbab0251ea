"""Gateway for agents that use a chat API: a call is a turn of the student, and a session is an episode."""
