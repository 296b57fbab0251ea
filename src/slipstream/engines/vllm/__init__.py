"""Rollouts and teacher scores by vLLM, in a process of its own that this one starts.

`core` starts the engine and keeps it on an event loop of its own, `sampler` and `scorer` speak the pipeline's
protocols, `report` keeps what its processes say, `worker` and `layers` are what runs inside vLLM's worker: the files
that reach into it, written against VERSION.
"""

VERSION = "0.32"
"""What they were written against. Under another version there is one draw at every position."""
