"""Server on this machine with which users try a config whose teacher or sampler is behind an endpoint."""
