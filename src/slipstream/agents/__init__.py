"""Tools for external agents behind the gateway: a sandbox for their commands, and a judge of their work."""
