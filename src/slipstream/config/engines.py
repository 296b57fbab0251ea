"""Table of inference engines: features of each engine, and error messages for settings that an engine refuses.

The schema, the plan and the simulation read this table; an engine that is not in the table raises an error.
Module `plan/engines` makes the plan of an engine, and `runtimes/build` makes its objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NATIVE_PASSES = 'is for engine = "native": drop one of them, as vLLM makes its own passes'
MAPPED_ENDS = (
    'ends = "map" needs the log-probs of all end tokens at every position, and {} returns only those of the emitted '
    "token and the best: {}, or write sampler.stop = [...] with the token at which the teacher ends"
)
USER_CONTEXT = 'a context that a function writes is for engine = "native": write a template'


@dataclass(frozen=True, kw_only=True)
class Engine:
    sampler_refuses: Mapping[str, str] = field(default_factory=dict)
    """Error message for each feature (of `Config.sampler_features`) that samplers of this engine do not support."""
    teacher_refuses: Mapping[str, str] = field(default_factory=dict)
    """Error message for each feature (of `TeacherConfig.features`) that teachers of this engine do not support."""
    loads_adapters: bool = True
    """True if the engine can load a model from the directory of a LoRA adapter."""
    same_code_as_learner: bool = False
    """True if samplers run the learner's model code, so that log-probs are equal if the precision is equal."""
    gathers_prompts: bool = False
    """True if samplers start new prompts only after several slots (places of running sequences) are free."""
    packs: bool = False
    """True if teachers pack several sequences (of up to `longest` tokens) into a pass of `token_budget` tokens."""
    keeps_modelled_time: bool = False
    """True if the engine can run on a modelled clock (`runtime.clock`)."""
    checks_weights: bool = False
    """True if the engine itself refuses weights that are not finite."""


ENGINES: dict[str, Engine] = {
    "native": Engine(
        sampler_refuses={"engine_args": 'sampler.engine_args are for sampler.engine = "vllm": drop one of them'},
        same_code_as_learner=True,
        gathers_prompts=True,
        packs=True,
        keeps_modelled_time=True,
        checks_weights=True,
    ),
    "vllm": Engine(
        sampler_refuses={
            "keep_mask": "sampler.keep_mask: vLLM does not return the sampling support: write "
            'sampler.engine = "native", or top_p = 1, top_k = 0 and min_p = 0 without keep_mask',
            "on_publish": 'sampler.on_publish = "reuse": vLLM recomputes running responses after a publish: write '
            '"rebuild", or sampler.engine = "native"',
            "lora": '[learner.lora] sends adapters, and sampler.engine = "vllm" takes whole weights: write '
            'sampler.engine = "native", or drop [learner.lora]',
        },
        teacher_refuses={
            "token_budget": f"token_budget {NATIVE_PASSES}",
            "packing": f"packing {NATIVE_PASSES}",
            "longest": f"longest {NATIVE_PASSES}",
            "user_context": USER_CONTEXT,
            "relabel": 'relabel is for engine = "native", or an endpoint: drop it',
            "follow": 'follow is for engine = "native": no weights are published to a teacher in vLLM',
            "ends": MAPPED_ENDS.format("vLLM", 'write engine = "native"'),
        },
        loads_adapters=False,
    ),
    "http": Engine(
        teacher_refuses={
            "user_context": USER_CONTEXT,
            "ends": MAPPED_ENDS.format("an endpoint", "run the teacher here (no base_url)"),
        },
        loads_adapters=False,
    ),
}
