"""Table of inference engines: features of each engine, and error messages for settings that an engine refuses.

The schema, the plan and the simulation read this table; an engine that is not in the table raises an error.
Module `plan/engines` makes the plan of an engine, and `runtimes/build` makes its objects.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any

from pydantic import AfterValidator

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")
"""Arguments of vLLM whose product is the number of devices of one engine."""
SPECULATIVE = "speculative_config"
"""Argument for speculative decoding in vLLM. `tests/with_vllm` shows the wrong log-probs of version 0.32 on a CPU."""
RESERVED_OPTIONS = {
    "model": "{model}",
    "tokenizer": "{model}",
    "dtype": "{section}.dtype",
    "data_parallel_size": "{section}.replicas",
    "seed": "seed",
    "max_logprobs": "the loss",
    "generation_config": "the [sampler] section",
    "skip_tokenizer_init": "",
    "logprobs_mode": "",
    "worker_extension_cls": "",
    "weight_transfer_config": "",
    "kv_transfer_config": "",
    "enable_lora": "",
    SPECULATIVE: "",
}
"""Arguments that engine_args may not hold, with the key that sets them; "" if they cannot be changed."""
LORA = ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_dtype", "lora_target_modules")
"""Arguments of vLLM's engine that depend on the learner's adapters."""
RESERVED_FOR = {
    "sampler": RESERVED_OPTIONS
    | dict.fromkeys(LORA, "learner.lora")
    | {"max_num_seqs": "sampler.slots", "pipeline_parallel_size": ""},
    "teachers": RESERVED_OPTIONS | {"enable_prefix_caching": ""},
}


def check_engine_args(args: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for a wrong value of an argument that plans compute with."""
    for name in (*PARALLEL, "max_model_len", "max_num_seqs"):
        if name in args and (type(args[name]) is not int or args[name] < 1):
            raise ValueError(f"{name} = {args[name]!r} is no whole number of 1 or more")
    share = args.get("gpu_memory_utilization", 1.0)
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization = {share!r} is no share of a GPU's memory: write 0.9, for example")
    return args


EngineArgs = Annotated[dict[str, Any], AfterValidator(check_engine_args)]
"""Arguments of vLLM's engine."""


def reserved(section: str, model: str, args: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each of `engine_args` of a section (`sampler`, `teachers.NAME`) that other keys set."""
    keys = RESERVED_FOR[section.partition(".")[0]]
    if section == "sampler" and SPECULATIVE in args:
        yield (
            f"sampler.engine_args.{SPECULATIVE} cannot be set: on a CPU vLLM returns wrong log-probs with it, and on "
            'GPUs they are not proven; drop it, or write sampler.engine = "native" with [sampler.speculation]'
        )
    for name in sorted(args.keys() & keys):
        key = keys[name].format(section=section, model=model)
        why = f"{key} sets it" if key else "records would not match what vLLM did"
        yield f"{section}.engine_args.{name} cannot be set: {why}"


def devices_of(args: Mapping[str, Any]) -> int:
    """Return the number of devices of one vLLM engine with these arguments."""
    return prod(args.get(name, 1) for name in PARALLEL)


NATIVE_PASSES = 'is for engine = "native": drop one of them, as vLLM makes its own passes'
BESIDE_TEACHER = 'sampler.{}: {} does not step together with a teacher: write sampler.engine = "native", or drop it'
MAPPED_ENDS = (
    'ends = "map" needs the log-probs of all end tokens at every position, and {} returns only those of the emitted '
    "token and the best: {}, or write sampler.stop = [...] with the token at which the teacher ends"
)
ROUTER = (
    'learner.router needs the experts that the sampler chose, and {}: write sampler.engine = "native", or '
    'learner.router = "replay_old", which needs none'
)
VLLM_ARGS = 'sampler.engine_args are for sampler.engine = "vllm": drop one of them'
SERVER = '[sampler.server] is for sampler.engine = "server": drop it, or write that engine'
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
    """True if teachers pack several sequences (of up to `max_length` tokens) into a pass of `token_budget` tokens."""
    keeps_modelled_time: bool = False
    """True if the engine can run on a modelled clock (`runtime.clock`)."""
    checks_weights: bool = False
    """True if the engine itself refuses weights that are not finite."""


ENGINES: dict[str, Engine] = {
    "native": Engine(
        sampler_refuses={"engine_args": VLLM_ARGS, "server": SERVER},
        teacher_refuses={"engine_args": 'engine_args are for engine = "vllm": drop one of them'},
        same_code_as_learner=True,
        gathers_prompts=True,
        packs=True,
        keeps_modelled_time=True,
        checks_weights=True,
    ),
    "vllm": Engine(
        sampler_refuses={
            "keep_mask": "sampler.keep_mask: vLLM returns a sampling support of bounded size: write sampler.top_k, for "
            'example 128, or sampler.engine = "native"',
            "teacher_replaces": BESIDE_TEACHER.format("teacher_replaces", "vLLM"),
            "fusion": BESIDE_TEACHER.format("fusion", "vLLM"),
            "on_publish": 'sampler.on_publish = "reuse": vLLM recomputes running responses after a publish: write '
            '"rebuild", or sampler.engine = "native"',
            "quantisation": "sampler.quantisation: vLLM would quantise weights in its own way, and could not prove "
            'which it runs: write sampler.engine = "native", or drop it',
            "speculation": "sampler.speculation: vLLM speculates in its own way, and its log-probs are not proven: "
            'write sampler.engine = "native", or drop it',
            "router": ROUTER.format("vLLM returns them only from its V2 runner on GPUs, which is not used here"),
            "server": SERVER,
        },
        teacher_refuses={
            "token_budget": f"token_budget {NATIVE_PASSES}",
            "packing": f"packing {NATIVE_PASSES}",
            "devices": 'devices is for engine = "native": for vLLM write engine_args.tensor_parallel_size',
            "user_context": USER_CONTEXT,
            "relabel": 'relabel is for engine = "native", or an endpoint: drop it',
            "follow": 'follow is for engine = "native": no weights are published to a teacher in vLLM',
            "ends": MAPPED_ENDS.format("vLLM", 'write engine = "native"'),
        },
        loads_adapters=False,
    ),
    "server": Engine(
        sampler_refuses={
            "engine_args": VLLM_ARGS + ", and give them to the server when it starts",
            "keep_mask": "sampler.keep_mask: a rollout server does not return the sampling support: write "
            'sampler.engine = "native", or top_p = 1, top_k = 0 and min_p = 0 without keep_mask',
            "teacher_replaces": BESIDE_TEACHER.format("teacher_replaces", "a rollout server"),
            "fusion": BESIDE_TEACHER.format("fusion", "a rollout server"),
            "on_publish": 'sampler.on_publish = "reuse": a rollout server clears its cache when weights change: write '
            '"rebuild", or sampler.engine = "native"',
            "quantisation": "sampler.quantisation: a rollout server quantises weights by its own settings: write "
            'sampler.engine = "native", or drop it',
            "lora": '[learner.lora] sends adapters, and sampler.engine = "server" takes whole weights: write '
            'sampler.engine = "native", or drop [learner.lora]',
            "speculation": "sampler.speculation: a rollout server speculates by its own settings: write "
            'sampler.engine = "native", or drop it',
            "router": ROUTER.format("a rollout server does not return them"),
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
ENGINES["auto"] = Engine(  # a teacher that may run in either engine has only what both support
    teacher_refuses={**ENGINES["vllm"].teacher_refuses, **ENGINES["native"].teacher_refuses}
)
