"""Rollouts and teacher scores by vLLM, which runs in a child process.

`core` starts the engine on a separate event loop. `sampler` and `scorer` implement the pipeline's protocols. `loading`
brings weights to vLLM, and `report` keeps the output of its processes. `worker`, `layers` and `adapters` run inside
vLLM's worker and use internals of VERSION.
"""

VERSION = "0.32"
"""vLLM version whose internals `worker` and `layers` use. Other versions sample only one draw per position."""
TORCH = "2.13"
"""torch version that this vLLM needs; `constraints-vllm.txt` has the whole tested set."""
ADAPTER_ID = 1
"""Id of the only adapter in vLLM; a publish replaces its weights."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters for which vLLM can reserve room."""
