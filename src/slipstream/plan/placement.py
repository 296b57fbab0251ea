"""Placement: device and memory of every process, computed from the plan without loading weights.

Weights, gradients, moments and caches are computed exactly. Estimates, such as activations, are marked by ~.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from slipstream.config.learner import LoraConfig
from slipstream.config.losses import without_hidden_states
from slipstream.config.running import RuntimeConfig
from slipstream.engines.http.client import Endpoint
from slipstream.engines.native.config import context_length, load_config
from slipstream.engines.server.api import Served, ServerSettings
from slipstream.engines.vllm.core import Settings
from slipstream.pipeline.pool import names
from slipstream.plan.engine_plans import EnginesPlan, LearnerPlan, ModelPlan, SamplerPlan, ScorerPlan

if TYPE_CHECKING:
    from torch import nn

GIB = 2**30
ONE_GPU = "the one GPU"
DRAW = 8
"""Bytes of one draw: a token sampled at a position, and its log-prob."""
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
PARKED = (
    *("weights", "moments", "reference", "versions before", "weights of the teacher beside it"),
    *("critic's weights", "critic's moments"),
)
"""Parts of an engine that are in host memory while others have their turn; it makes its other parts anew."""


@dataclass(frozen=True)
class Shape:
    parameters: int
    largest: int
    """Number of elements of the largest weight."""
    sizes: tuple[int, list[int]]
    """Bytes outside the decoder layers, and of each layer."""
    outside: int
    """Number of elements of all weights outside the decoder layers."""
    layer: int
    """Number of elements of the largest decoder layer."""
    head: int
    """Number of elements of the output head's weight, which may also be the embedding."""
    backbone: int
    """Number of elements of all weights except an output head that is no embedding."""
    width: int
    layers: int
    normed: int
    """Number of elements that the norms of a layer store of one token for the backward pass."""
    multiplied: int
    """Number of elements that attention and perceptron of a layer store of one token for the backward pass."""
    attended: int
    """Number of those that attention in 16 bits stores in float32 on a CPU, whose backward pass is faster so."""
    packed: int
    """Number of elements of the linear layers' weights that a sampler on a CPU packs."""
    cache: int
    """Number of elements that one token adds to the key and value caches of all layers."""
    context: int


@dataclass
class Need:
    """Memory that one process needs on its device."""

    name: str
    where: str
    parts: dict[str, float] = field(default_factory=dict)
    """Bytes on each device (the fullest, if they differ) by purpose (`weights`, …); names of estimates begin with ~."""
    devices: int = 1
    share: float = 1.0
    """Share of a device's memory that the process may use."""
    host: dict[str, float] = field(default_factory=dict)
    """Bytes in host memory besides, by purpose; empty if the device is the host."""
    vllm: bool = False
    """True if vLLM runs the model."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def parked(self) -> float:
        return sum(self.parts.get(name, 0.0) for name in PARKED)

    @property
    def kept(self) -> float:
        return sum(self.host.values())

    @property
    def advice(self) -> str:
        if self.vllm and self.name.startswith("sampler"):
            return LESS_MEMORY_OF["vllm"]
        return next(text for kind, text in LESS_MEMORY_OF.items() if self.name.startswith(kind))

    @property
    def counted(self) -> float:
        """Return the sum of the bytes that are computed exactly, without estimated parts."""
        return sum(value for name, value in self.parts.items() if not name.startswith("~"))

    def __str__(self) -> str:
        each = " on each" if self.devices > 1 else ""
        beside = f", and {listed(self.host)} of host memory" if self.kept else ""
        return f"{self.name}: {self.where}, {listed(self.parts, each)}{beside}"


def listed(parts: Mapping[str, float], each: str = "") -> str:
    named = ", ".join(f"{name} {size(value)}" for name, value in parts.items() if value)
    return f"{size(sum(parts.values()))}{each} ({named})"


def size(value: float) -> str:
    return f"{value / GIB:,.1f} GiB" if value >= GIB / 10 else f"{value / 2**20:,.1f} MiB"


@cache
def shape_of(model: str) -> Shape:
    from torch import nn

    from slipstream.engines.native.files import empty_model
    from slipstream.engines.native.model import backbone_of
    from slipstream.engines.native.over_devices import layers_of, sizes_of
    from slipstream.estimators.products import MIN_WEIGHT_SIZE

    config, empty = load_config(model), empty_model(model)
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 1  # a purely recurrent model has no heads
    per_head = getattr(text, "head_dim", None) or text.hidden_size // heads
    grouped = getattr(text, "num_key_value_heads", None) or heads
    kinds = getattr(text, "layer_types", None) or ["attention"] * text.num_hidden_layers
    # all layers except recurrent ones keep keys and values of every token
    cached = [kind for kind in kinds if kind.endswith("attention") and not kind.startswith("linear")]
    per_layer = 2 * grouped * per_head
    if getattr(text, "kv_lora_rank", None):  # one compressed vector gives keys and values of all heads (MLA)
        per_layer = text.kv_lora_rank + text.qk_rope_head_dim
    indexers = [kind for kind in getattr(text, "indexer_types", None) or ["full"] * len(cached) if kind == "full"]
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    queries, keys = heads * per_head, grouped * per_head
    norms = any(name.endswith("q_norm.weight") for name, _ in empty.named_parameters())  # of queries and keys
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(empty)]
    return Shape(
        parameters=parameters,
        largest=max(parameter.numel() for parameter in empty.parameters()),
        sizes=sizes_of(empty),
        outside=parameters - sum(layers),
        layer=max(layers),
        head=empty.get_output_embeddings().weight.numel(),
        backbone=sum(parameter.numel() for parameter in backbone_of(model, empty).parameters()),
        width=text.hidden_size,
        layers=text.num_hidden_layers,
        normed=4 * text.hidden_size + 2 * norms * (queries + keys),
        # queries, output of attention, its copy; keys, values, copies of both
        multiplied=3 * queries + 4 * keys + of_perceptron(text),
        attended=3 * queries + 4 * keys,
        packed=sum(
            part.weight.numel()
            for part in empty.modules()
            if isinstance(part, nn.Linear) and part.weight.numel() >= MIN_WEIGHT_SIZE
        ),
        cache=len(cached) * per_layer + len(indexers) * (getattr(text, "index_head_dim", None) or 0),
        context=context_length(config),
    )


def shape_line(model: str, text: Any) -> str:
    shape = shape_of(model)
    heads = getattr(text, "num_attention_heads", None)
    grouped = getattr(text, "num_key_value_heads", None) or heads
    attention = f", {heads} heads, {grouped} of keys and values" if heads else ""
    return (
        f"{model}: {shape.parameters:,} parameters, {shape.layers} layers of width {shape.width:,}{attention}, "
        f"vocabulary {text.vocab_size:,}, context {shape.context:,}"
    )


def of_perceptron(text: Any) -> int:
    """Return the number of elements that a layer's perceptron, or the experts of a token, store of one token."""
    chosen = text.num_experts_per_tok if getattr(text, "moe_intermediate_size", None) else 0
    # gate, its activation, the other half, their product; experts copy their input and output
    return int(max(chosen, 1) * 4 * inner_width(text) + 2 * chosen * text.hidden_size)


def inner_width(text: Any) -> int:
    """Return the number of hidden units of the perceptron of a layer, or of one expert."""
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    inner = max(inner) if isinstance(inner, list | tuple) else inner  # some models have a width for each layer
    return int(inner or 4 * text.hidden_size)


def stored_bytes(shape: Shape, width: int, computed: int, *, cpu: bool) -> int:
    """Return the bytes of activations that one layer stores of one token, for weights and products of these widths.

    Norms compute in at least float32: half of what they store is that wide, the other half as wide as the weights.
    Their outputs are stored once, or rounded by autocast for each of five products.
    """
    copies = 5 if computed < width else 2
    wider = max(4 - computed, 0) * shape.attended if cpu else 0
    return (max(width, 4) + width) // 2 * shape.normed + computed * (copies * shape.width + shape.multiplied) + wider


def needs(plan: EnginesPlan, *, gpu: bool | None = None) -> list[Need]:
    """Return the memory that every process needs; `gpu`: on GPUs, or on CPUs, or where this machine would run them."""
    runtime, gpu = plan.runtime, not on_cpu(plan.learner) if gpu is None else gpu
    own = ONE_GPU if runtime.kind == "inline" else "a GPU"
    where, of_learner = [own if gpu else cpu_threads(count) for count in (runtime.threads, plan.learner.threads)]
    learns, parked = learner(plan.learner), beside_learner(plan.learner)
    if not gpu:
        learns, parked = {name: learns.get(name, 0) + parked.get(name, 0) for name in learns | parked}, {}
    found = [Need(name, of_learner, learns, host=parked) for name in names("learner", plan.learner.settings.ranks)]

    def need(name: str, parts: dict[str, float], runs: ModelPlan | Settings, kept: float = 0) -> Need:
        devices = runs.devices if gpu else 1  # on a CPU all devices are the host
        parts = parts | {"weights": parts["weights"] * share_of(runs, devices)}
        args = runs.args if gpu and isinstance(runs, Settings) else {}
        place = f"{devices} GPUs" if devices > 1 else where
        host = {"~versions before": kept} if gpu else {}
        parts |= {} if gpu else {"~versions before": kept}
        share = args.get("gpu_memory_utilization", 1.0)
        return Need(name, place, parts, devices, share, host, vllm=isinstance(runs, Settings))

    rolls = plan.sampler
    if isinstance(rolls.runs, ServerSettings):  # its copy of the weights is in host memory
        copy = {} if gpu else sampler(rolls)
        found += [Need(name, f"at {rolls.runs.endpoint.url}", copy) for name in names("sampler", rolls.replicas)]
    else:
        parts = sampler(rolls) | ({} if gpu else packed(rolls))
        found += [need(name, parts, rolls.runs) for name in names("sampler", rolls.replicas)]
    for name, runs in plan.teacher_samplers.items():
        parts = sampler(runs) | ({} if gpu else packed(runs))
        found += [Need(each, where, parts) for each in names(f"sampler-{name}", runs.replicas)]
    for name, scorer in plan.scorers.items():
        if isinstance(scorer.runs, Endpoint):
            found.append(Need(f"teacher {name}", f"at {scorer.runs.url}"))
        else:
            parts, kept = teacher(scorer, scorer.runs), versions_before(scorer, scorer.runs)
            found += [need(each, parts, scorer.runs, kept) for each in names(f"teacher {name}", scorer.replicas)]
    return found


def cpu_threads(count: int) -> str:
    return f"{count} CPU thread{'s' * (count > 1)}"


def hidden_states(plan: EnginesPlan, tokens: int | None = None) -> float:
    """Return the bytes of teachers' hidden states of these tokens, in 16 bits; 0 for none. None: all in flight."""
    widths = [
        shape_of(scorer.here).width
        for scorer in plan.scorers.values()
        if any(spec is not None and spec.cache == "hidden" for spec in (scorer.spec, scorer.supervised))
    ]
    return 2.0 * (plan.tokens_in_flight if tokens is None else tokens) * max(widths, default=0)


def other_loss(plan: EnginesPlan) -> str:
    """Return what to write in place of a loss that caches hidden states."""
    loss, supervised = plan.learner.method.loss, plan.learner.supervised
    if supervised is None or loss.spec.cache == "hidden":
        return without_hidden_states(loss)
    return without_hidden_states(supervised.method.loss, "sft.loss")


def record_lines(plan: EnginesPlan) -> list[str]:
    """Return a line about the host memory of teachers' hidden states in samples; none if no loss caches them."""
    if not (most := hidden_states(plan)):
        return []
    return [
        f"samples in flight have up to {size(most)} of hidden states in host memory: for less, write "
        f"{other_loss(plan)}, or lower learner.batch_size, the schedule's lag or sampler.max_tokens"
    ]


def turn_lines(plan: EnginesPlan, *, gpu: bool | None = None) -> list[str]:
    """Return lines about the memory in each phase of a run in turns, or of one on one GPU; none for other runs."""
    if plan.runtime.time_share and plan.runtime.kind == "local":
        return party_lines(plan, gpu)
    runs = [plan.sampler.runs, *(scorer.runs for scorer in plan.scorers.values())]
    native = all(isinstance(each, ModelPlan) and each.devices == 1 for each in runs)
    needed, time_share = needs(plan, gpu=gpu), plan.runtime.time_share
    if plan.runtime.kind != "inline" or not (time_share or (native and needed[0].where == ONE_GPU)):
        return []
    kept, together = sum(need.kept for need in needed), sum(need.total for need in needed)
    parked = kept + sum(need.parked for need in needed)
    most, waiting = max(need.total for need in needed), max(parked - need.parked for need in needed)
    if not time_share:
        return [
            f"all engines together: {size(together)} on the device; with runtime.time_share = true at most "
            f"{size(most)}, and {size(waiting)} in host memory"
        ]
    phases = [
        f"turn of {need.name}: {size(need.total)} on the device, {size(parked - need.parked)} in host memory"
        for need in needed
    ]
    return [*phases, f"at most {size(most)} on the device, and without runtime.time_share {size(together)}"]


def party_lines(plan: EnginesPlan, gpu: bool | None) -> list[str]:
    """Return lines about the memory while the ranks of the learner, or all samplers, have the devices."""
    needed = needs(plan, gpu=gpu)
    ranks, count = plan.learner.settings.ranks, plan.sampler.replicas
    learners, samplers = needed[:ranks], needed[ranks : ranks + count]
    return [
        f"turn of the {name}: {size(max(need.total for need in own))} on a device, "
        f"{size(sum(need.parked for need in others))} in host memory"
        for name, own, others in (("learner", learners, samplers), ("samplers", samplers, learners))
    ]


LESS_MEMORY_OF = {
    "learner": "lower learner.token_budget, use learner.lora, learner.checkpointing or more learner.ranks",
    "sampler": "lower sampler.slots, sampler.max_tokens or the draws of the loss",
    "vllm": "split it over devices (sampler.engine_args.tensor_parallel_size), lower sampler.max_tokens, "
    "or use a smaller student",
    "teacher": "split it over devices (devices, or for vLLM engine_args.tensor_parallel_size), lower its token_budget, "
    "or use a smaller teacher",
}
"""Advice for an engine whose memory does not suffice, by kind of engine."""


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory(runtime: RuntimeConfig) -> tuple[float, float]:
    """Return the bytes of memory for one engine and for all engines: GPU memory if GPUs are used, else host memory."""
    import torch

    if runtime.device == "cpu" or not torch.cuda.is_available():
        return host_memory(), host_memory()
    gpus = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return (sum(gpus) if runtime.kind == "inline" else min(gpus)), sum(gpus)


def adapted(model_name: str, lora: LoraConfig, where: str = "learner.lora") -> dict[str, nn.Linear]:
    """Return the linear layers of a model that get an adapter, by layer name; `where` is the section of the adapter."""
    from torch import nn

    from slipstream.engines.native.files import empty_model

    model: Any = empty_model(model_name)
    head = model.get_output_embeddings()
    named = model.named_modules()
    linear = {name: part for name, part in named if type(part) is nn.Linear and part is not head}
    return {name: linear[name] for name in lora.among(list(linear), where)}


def critic_of(plan: LearnerPlan) -> LearnerPlan | None:
    """Return the plan of a learner whose student is the critic's own model; None: it has none."""
    if plan.critic is None or plan.method.critic is None:
        return None
    settings = plan.method.critic.settings_of_model(plan.settings)
    return replace(plan, student=plan.critic, critic=None, settings=settings, cosine_limit=None)


def trained_of(plan: LearnerPlan, *, head: bool = True) -> int:
    """Return the number of trained parameters; `head`: an output head that is no embedding is trained, too."""
    if (lora := plan.settings.lora) is None:
        shape = shape_of(plan.student.name)
        return shape.parameters if head else shape.backbone
    layers = adapted(plan.student.name, lora).values()  # an adapter has rank · (inputs + outputs) parameters
    return sum(lora.rank * (layer.in_features + layer.out_features) for layer in layers)


def quantised_of(model: str) -> int:
    """Return the number of weights that samplers quantise."""
    return sum(layer.weight.numel() for layer in adapted(model, LoraConfig()).values())


def learner(plan: LearnerPlan) -> dict[str, float]:
    """Return the bytes that one rank needs on its device, by purpose."""
    settings, method, trained = plan.settings, plan.method, trained_of(plan)
    kept = trained if method.keeps_reference and not method.hosts_reference else 0
    # the model's own weights wait in a copy while a pass has others; the old policy is another version
    swaps = method.keeps_reference or method.keeps_old or bool(plan.snapshots or plan.follow)
    others = swaps + method.keeps_old
    number = WIDTHS[settings.dtype] / settings.ranks
    found = of_model(plan, trained) | {
        "value head": 12.0 * (head_width(plan) + 1) if method.critic is not None else 0.0,  # float32, two moments
        "reference": kept * number,
        "versions before": others * trained * number,
        "teachers' heads": sum(shape_of(each.name).head * WIDTHS[each.dtype] for each in plan.teachers.values()),
        "logits": logits_bytes(plan),
    }
    if (critic := critic_of(plan)) is not None:
        parts = of_model(critic, trained_of(critic, head=False))
        found |= {f"critic's {name}": parts.pop(name) for name in ("weights", "gradients", "moments")}
        found |= {name: max(found[name], value) for name, value in parts.items()}  # they make passes in turn
    return found


def head_width(plan: LearnerPlan) -> int:
    """Return the number of weights of the value head, without its bias."""
    return shape_of((plan.critic or plan.student).name).width


def of_model(plan: LearnerPlan, trained: int) -> dict[str, float]:
    """Return the bytes that one rank needs to train the student of a plan, by purpose; `trained`: its parameters."""
    settings, shape = plan.settings, shape_of(plan.student.name)
    width, computed = WIDTHS[settings.dtype], WIDTHS[settings.compute_dtype or settings.dtype]
    rounded: float = quantised_of(plan.student.name) * computed if settings.quantised else 0
    per_token = stored_bytes(shape, width, computed, cpu=on_cpu(plan))
    activations = per_token * shape.layers
    if settings.checkpointing:  # keep the inputs of all layers, and the activations of one layer
        activations = per_token + inputs_of(plan) * ("activations" not in settings.offload)
        rounded /= shape.layers
    number = width / settings.ranks
    stepped = min(trained, shape.largest) if "optimizer" in settings.offload else trained
    activated = pass_tokens(plan) * activations
    gathered, whole = gathered_bytes(plan, activated)
    return {
        "weights": shape.parameters * number,
        "gathered weights": gathered,
        "whole gradients": whole,
        "gradients": trained * number * (1 if plan.cosine_limit is None else 2),
        "moments": stepped * moment_bytes(plan),
        "rounded weights": rounded,  # the backward pass needs them, whole on every rank
        "weights in 16 bits": rounded_by_autocast(plan),
        "~activations": activated - made_meanwhile(plan, activated),
    }


def made_meanwhile(plan: LearnerPlan, activated: float) -> float:
    """Return the bytes of gradients that take the place of activations which the backward pass has freed already.

    They are 0 unless the pass is the only one of its step.
    """
    settings, shape = plan.settings, shape_of(plan.student.name)
    if plan.step_tokens is None or plan.step_tokens > settings.token_budget:
        return 0  # gradients of an earlier pass are there when the next one has all its activations
    made = trained_of(plan) if settings.lora else shape.parameters - shape.outside
    return min(activated, made * WIDTHS[settings.dtype] / settings.ranks)


def logits_bytes(plan: LearnerPlan) -> float:
    """Return the bytes of the logits that a GPU has at a time; on CPUs they are few (estimators/logprobs)."""
    from slipstream.estimators.logprobs import HELD

    if on_cpu(plan):
        return 0
    # a loss over the vocabulary has about twelve float32 tensors of a quarter of this size
    width = 12 if plan.teachers else WIDTHS[plan.settings.compute_dtype or plan.settings.dtype]
    return HELD["cuda"] * width


def on_cpu(plan: LearnerPlan) -> bool:
    import torch

    device = plan.student.device
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def pass_tokens(plan: LearnerPlan) -> int:
    """Return the most tokens of a pass: `learner.token_budget`, or all tokens of a step if these are fewer."""
    return min(plan.settings.token_budget, plan.step_tokens or plan.settings.token_budget)


def gathered_bytes(plan: LearnerPlan, activated: float) -> tuple[float, float]:
    """Return the bytes of weights and of gradients that a rank holds whole, besides its shards, at its peak.

    Two layers are gathered at once, the second one ahead of its use, and all that is outside the layers for the whole
    pass. The backward pass adds the gradients of a layer, their copy that is sent, and the head's gradient in float32.
    Its end has the gradients outside the layers and their copy, but neither layers nor activations.
    """
    settings, shape = plan.settings, shape_of(plan.student.name)
    width, learns_all = WIDTHS[settings.dtype], settings.lora is None
    head = shape.head * max(width, 4) if learns_all else 0
    if settings.ranks == 1:
        return 0, head
    layer, outside = shape.layer * width, shape.outside * width
    sent = 2 * (layer if learns_all else trained_of(plan) / shape.layers * width)
    at_the_end = 2 * outside * learns_all - 2 * layer - activated
    return outside + 2 * layer, max(head + sent, at_the_end)


def rounded_by_autocast(plan: LearnerPlan) -> float:
    """Return the bytes of the layers' weights in `learner.compute_dtype`, which a pass makes and its backward needs."""
    settings, shape = plan.settings, shape_of(plan.student.name)
    if settings.compute_dtype in (None, settings.dtype) or settings.quantised:
        return 0
    whole = float(shape.parameters - shape.outside) * WIDTHS[settings.compute_dtype]
    # one rank keeps the copies of trained weights for a whole pass; others make them again in each layer
    once = settings.checkpointing and (settings.ranks > 1 or settings.lora is not None)
    return whole / shape.layers if once else whole


def inputs_of(plan: LearnerPlan) -> int:
    """Return the bytes per token of the inputs of all layers."""
    shape = shape_of(plan.student.name)
    return WIDTHS[plan.settings.dtype] * shape.width * shape.layers


def moment_bytes(plan: LearnerPlan) -> float:
    """Return the bytes that one rank needs for AdamW's two moments, for each trained parameter."""
    settings = plan.settings
    return 2 * WIDTHS[settings.optimizer_dtype or settings.dtype] / settings.ranks


def beside_learner(plan: LearnerPlan) -> dict[str, float]:
    """Return the bytes that one rank keeps in host memory, by purpose: copies of weights, and what is offloaded."""
    settings, method, trained, critic = plan.settings, plan.method, trained_of(plan), critic_of(plan)
    copies = plan.snapshots + sum(1 + each.keep for each in plan.follow.values()) + method.hosts_reference
    moments = trained * moment_bytes(plan)
    if critic is not None:
        moments += trained_of(critic, head=False) * moment_bytes(critic)
    inputs = max(inputs_of(each) for each in (plan, critic) if each is not None)
    activations = pass_tokens(plan) * inputs if "activations" in settings.offload else 0
    return {
        "moments": moments if "optimizer" in settings.offload else 0,
        "versions before": copies * trained * WIDTHS[settings.dtype] / settings.ranks,
        "~activations": activations,
    }


def share_of(runs: ModelPlan | Settings, devices: int) -> float:
    """Return the share of a model's weights on the fullest of its devices."""
    if devices == 1 or isinstance(runs, Settings):  # vLLM splits every matrix, or equal numbers of layers
        return 1 / devices
    from slipstream.engines.native.over_devices import fullest

    outside, layers = shape_of(runs.name).sizes
    return fullest(outside, layers, devices) / (outside + sum(layers))


def packed(plan: SamplerPlan) -> dict[str, float]:
    """Return the bytes of the second copies of large weights that a native sampler on this CPU multiplies by."""
    import torch

    from slipstream.estimators.products import packs

    found = [each for each in (plan.runs, plan.teacher) if isinstance(each, ModelPlan) and each.quantisation is None]
    copies = [shape_of(e.name).packed * WIDTHS[e.dtype] for e in found if packs(getattr(torch, e.dtype))]
    return {"packed weights": sum(copies)}


def sampler(plan: SamplerPlan) -> dict[str, float]:
    match plan.runs:
        case Settings():
            return in_vllm(plan.runs)
        case Served():
            return {}
        case ServerSettings(model=name, dtype=dtype):
            shape = shape_of(name)  # its first output head stays beside the copy
            return {"copy of the weights": (shape.parameters + shape.head) * WIDTHS[dtype]}
        case ModelPlan(name=name, dtype=dtype, max_length=max_length):
            from slipstream.engines.native.sampling.decoding import PASS_TOKENS

            shape = shape_of(name)
            positions = min(max_length or shape.context, shape.context)
            beside = {} if plan.teacher is None else sampler(replace(plan, runs=plan.teacher, teacher=None))
            saved = 0  # a code has one byte
            if plan.runs.quantisation is not None:
                saved = quantised_of(name) * (WIDTHS[dtype] - 1)
            return {
                "weights": shape.parameters * WIDTHS[dtype] - saved,
                "keys and values": plan.slots * positions * shape.cache * WIDTHS[dtype],
                "weights of the teacher beside it": beside.get("weights", 0.0),
                "its keys and values": beside.get("keys and values", 0.0),
                "draws": plan.slots * positions * (plan.draws + plan.best) * DRAW,
                "~activations of prompts": 8.0
                * max(positions, min(PASS_TOKENS, plan.slots * positions))
                * shape.width
                * WIDTHS[dtype],
            }


def in_vllm(runs: Settings) -> dict[str, float]:
    """Return the bytes without which vLLM does not start; its cache uses all memory that is left."""
    shape, width = shape_of(runs.model), WIDTHS[runs.dtype]
    positions = int(runs.args.get("max_model_len", shape.context))
    return {"weights": shape.parameters * width, "~keys and values of one sequence": positions * shape.cache * width}


def versions_before(plan: ScorerPlan, runs: ModelPlan | Settings) -> float:
    """Return the bytes of the earlier versions that a scorer keeps in host memory."""
    return 0 if isinstance(runs, Settings) else plan.keep * shape_of(plan.here).parameters * WIDTHS[runs.dtype]


def teacher(plan: ScorerPlan, runs: ModelPlan | Settings) -> dict[str, float]:
    """Return the bytes that one scorer needs on its device, by purpose."""
    shape = shape_of(plan.here)
    if isinstance(runs, Settings):
        return in_vllm(runs)
    return {
        "weights": shape.parameters * WIDTHS[runs.dtype],
        "~activations": 8.0 * plan.token_budget * shape.width * WIDTHS[runs.dtype],
    }
