"""Rollouts and teacher scores by vLLM, which runs in a child process.

`core` starts the engine on a separate event loop. `sampler` and `scorer` implement the pipeline's protocols. `report`
keeps the output of vLLM's processes. `worker` and `layers` run inside vLLM's worker and use internals of VERSION.
"""

VERSION = "0.32"
"""vLLM version whose internals `worker` and `layers` use. Other versions sample only one draw per position."""
