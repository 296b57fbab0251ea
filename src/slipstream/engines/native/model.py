"""Load a Hugging Face causal LM, split it into backbone and head, pin its positions, and give it adapters."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.utils import logging as hf_logging

from slipstream.config.learner import LoraConfig
from slipstream.engines.native.adapters import linear_layers, load_adapter, merge
from slipstream.engines.native.config import context_length, depends_on_length
from slipstream.engines.native.files import check_numbers, missing
from slipstream.engines.native.over_devices import devices_from, spread
from slipstream.errors import ConfigError, ModelError, first_line
from slipstream.estimators.logprobs.tiles import Bend, Head
from slipstream.estimators.products import use_fast_layers
from slipstream.models.adapters import adapter_of
from slipstream.models.resolve import model_path

hf_logging.disable_progress_bar()  # Slipstream shows its own progress display while models are loaded and saved


@dataclass(frozen=True)
class LanguageModel:
    """A causal LM split so that `logits = head(backbone(ids).last_hidden_state)`, which `split` has checked."""

    name: str
    model: PreTrainedModel
    backbone: nn.Module
    head: Head
    max_length: int
    """Maximum sequence length of this model in the run, in tokens."""

    @property
    def vocab_size(self) -> int:
        return int(self.head.weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self.head.weight.device


def pick_device(device: str, where: str = "runtime.device") -> torch.device:
    """Return the torch device for `device` ("auto": GPU if present); `where` is the config key for error messages."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cpu:"):
        raise ConfigError(f'{where} = {device!r}: all CPUs are one device: write "cpu"')
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{where} = {device!r} cannot be used: {first_line(error)}") from None
    return torch.device(device)


def is_recurrent(config: Any) -> bool:
    """Return True if some layers have a recurrent state: linear attention, state spaces or convolutions."""
    return any(getattr(layer, "number_of_states", 0) for layer in DynamicCache(config=config).layers)


def has_windows(config: Any) -> bool:
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(text, "sliding_window", None) is not None


def attention_of(backbone: nn.Module) -> str | None:
    """Return the name of the attention in use; transformers only logs a warning if it cannot set another one."""
    return getattr(backbone.config, "_attn_implementation", None)


def load_model(
    name: str,
    *,
    dtype: str,
    device: str = "auto",
    devices: int = 1,
    max_length: int | None = None,
    base: bool = False,
) -> LanguageModel:
    """Load and check a causal LM; merge its adapter unless `base`. `max_length`: maximum sequence length of the run.

    The layers are split over `devices` devices, of which `device` is the first.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            model_path(name),
            dtype=getattr(torch, dtype),
            attn_implementation=REFERENCE_ATTENTION,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{name}: cannot load a causal LM from it: {first_line(error)}") from None
    if absent := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise ModelError(missing(name, absent))
    if not base and (adapter := adapter_of(name)):
        merge(model, adapter)
    check_numbers(name, model.named_parameters())
    first = pick_device(device)
    use_fast_layers(model)
    if devices > 1:
        spread(name, model, devices_from(first, devices))
    else:
        model.to(first)
    return split(name, model.eval(), max_length=max_length)


REFERENCE_ATTENTION = "eager"
"""Attention implementation that every model supports completely. All other implementations are compared with it."""


def split(name: str, model: PreTrainedModel, *, max_length: int | None = None) -> LanguageModel:
    """Split a model into backbone and head, check that they give its logits, and fix rope factors for `max_length`."""
    max_length = min(max_length or 1 << 30, context_length(model.config))
    pin(model, max_length)
    if model.dtype == torch.float64:  # the fast kernels for experts do not support float64
        model.set_experts_implementation("eager")
    backbone = backbone_of(name, model)
    with widened(model):
        head = find_head(name, model, backbone)
    return LanguageModel(name, model, backbone, head, max_length)


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Convert half-precision weights to float32 in this context, if memory suffices: rounding could hide errors."""
    halves = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() and t.itemsize < 4]
    originals = [(tensor, tensor.dtype) for tensor in halves] if _fits_in_memory(halves) else []
    for tensor, _ in originals:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in originals:
            tensor.data = tensor.data.to(dtype)


def _fits_in_memory(halves: Sequence[Tensor]) -> bool:
    if halves and halves[0].is_cuda:
        free = torch.cuda.mem_get_info(halves[0].device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sum(4 * tensor.numel() for tensor in halves) < free / 2


def backbone_of(name: str, model: PreTrainedModel) -> PreTrainedModel:
    if model.base_model is not model:
        return model.base_model
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise ModelError(f"{name}: {type(model).__name__} is not made of one backbone and a head, which is required")
    return parts[0]


# --- head -------------------------------------------------------------------------------------------------------------
#
# Some models scale or soft-cap their logits (Cohere, Granite, Gemma), or scale the hidden state (MiniCPM). These
# factors are measured: known numbers replace the output of the linear layer, and the logits show how the model changes
# them. A model that changes its logits in any other way is refused.


TEST_OUTPUTS = (0.0, 2**-10, 2**-5, 0.5, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, 2.0**15)
"""Numbers that replace the output of the linear layer, from far below to far above any cap; used with both signs."""


@torch.no_grad()
def find_head(name: str, model: PreTrainedModel, backbone: nn.Module) -> Head:
    layer, kind = model.get_output_embeddings(), type(model).__name__
    if not isinstance(layer, nn.Linear):
        raise ModelError(f"{name}: {kind} has no linear head, which is required")
    ids = torch.arange(1, 5, device=model.device)[None] % layer.out_features
    inputs = list[Tensor]()
    try:
        hidden = getattr(backbone(ids), "last_hidden_state", None)
        with layer.register_forward_pre_hook(lambda module, given: inputs.append(given[0])):
            expected = model(ids).logits
    except Exception as error:  # any exception of the model's code means that it cannot be used
        raise ModelError(f"{name}: {kind} cannot run a forward pass in {model.dtype}: {first_line(error)}") from None
    if hidden is None:
        raise ModelError(f"{name}: the backbone of {kind} returns no hidden states")
    if not expected.isfinite().all():
        raise ModelError(f"{name}: its logits are not finite: the weights are damaged")
    before, bend = _scale_of(inputs[0], hidden, layer.weight.dtype), _bend_after(model, layer, ids)
    if before is None:
        raise ModelError(f"{name}: {kind} changes the hidden state before its head")
    if bend is None:
        raise ModelError(f"{name}: {kind} does more to its logits than scale and cap them")
    if layer.bias is not None and before != 1.0:
        raise ModelError(f"{name}: {kind} scales the hidden state before a head with a bias: that is not supported")
    head = Head(layer, before * bend.scale, bend.cap)
    difference = (head(hidden).double() - expected.double()).abs().max() / expected.double().abs().max()
    if not difference <= tolerance(layer.weight.dtype):
        raise ModelError(f"{name}: {kind} does more to its logits than scale and cap them")
    return head


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative difference that rounding can cause between two ways to compute the same values."""
    return 1e-4 if dtype.itemsize >= 4 else 0.05


def _scale_of(inputs: Tensor, hidden: Tensor, dtype: torch.dtype) -> float | None:
    """Return the factor by which the model scales the hidden state before its head; None if it does anything else."""
    inputs, states = inputs.double(), hidden.to(inputs.dtype).double()
    if torch.equal(inputs, states):
        return 1.0
    if inputs.shape != states.shape:
        return None
    scale = float((inputs * states).sum() / states.square().sum())
    explained = (inputs - scale * states).norm() <= tolerance(dtype) * inputs.norm()
    return scale if scale > 0 and explained else None


def _bend_after(model: PreTrainedModel, layer: nn.Linear, ids: Tensor) -> Bend | None:
    """Return scale and soft cap that the model applies to the linear layer's output; None if it does anything else."""
    ladder = torch.tensor([*TEST_OUTPUTS, *(-x for x in TEST_OUTPUTS)], device=model.device)
    x_V = ladder.repeat(-(-layer.out_features // len(ladder)))[: layer.out_features]
    rungs = min(len(TEST_OUTPUTS), layer.out_features)

    def planted(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return x_V.expand(output.shape).clone()

    with layer.register_forward_hook(planted):
        logits_V = model(ids).logits[0, -1].double()
    scale, most = float(logits_V[1] / x_V[1]), float(logits_V[rungs - 1])
    cap = None if most >= 0.5 * scale * float(x_V[rungs - 1]) else most
    if not (scale > 0 and (cap is None or cap > 0)):
        return None
    expected = Bend(1.0, scale, cap).logits(x_V.double())
    # a model may round its logits to half precision even if it receives float32
    if not torch.allclose(logits_V, expected, rtol=1e-5 if layer.weight.dtype.itemsize >= 4 else 0.01, atol=1e-6):
        return None
    return Bend(scale=_plain(scale), cap=cap if cap is None else _plain(cap))


def _plain(x: float) -> float:
    """Round to six digits, which removes float32 rounding errors."""
    return float(f"{x:.6g}")


# --- positions --------------------------------------------------------------------------------------------------------
#
# Two rope types select their factors by the largest position of the whole pass: longrope (Phi-3, Phi-3.5, Phi-4-mini)
# and dynamic NTK. Results of a short sequence would depend on its neighbours, and cached keys would not match later
# queries. Here every pass uses the factors for the longest sequence of the run: its last position is appended to the
# positions.


def pin(model: nn.Module, max_length: int) -> None:
    """Make the model always use the rope factors for sequences of `max_length` tokens."""
    for module in model.modules():
        if depends_on_length(getattr(module, "rope_type", None)):
            module.forward = partial(_pinned, module, max_length - 1)


def _pinned(module: nn.Module, furthest: int, x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
    """Run a rotary embedding with the position `furthest` after the others."""
    most = position_ids.new_full((*position_ids.shape[:-1], 1), furthest)
    found = type(module).forward(module, x, torch.cat([position_ids, most], -1), *args, **options)
    return tuple(part[..., :-1, :] for part in found) if isinstance(found, tuple) else found[..., :-1, :]


def with_adapters(lm: LanguageModel, config: LoraConfig, *, seed: int) -> LanguageModel:
    """Add an adapter to each target layer and freeze the base; if `lm.name` is an adapter, start from its weights."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError:
        raise ConfigError("learner.lora needs peft: pip install 'slipstream[lora]'") from None
    layers = called_layers(lm)
    if not layers:
        kind = type(lm.model).__name__
        raise ConfigError(f"learner.lora: {lm.name}: {kind} has no linear layers beside its head: drop [learner.lora]")
    # peft reinterprets names by model type; a holder module without a config avoids these rules
    holder = nn.Module()
    holder.add_module("adapted", lm.model)
    targets = [f"adapted.{name}" for name in config.among(layers)]
    settings = PeftConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, holder)
    if begun := adapter_of(lm.name):
        load_adapter(lm.model, begun)
    return split(lm.name, lm.model, max_length=lm.max_length)


@torch.no_grad()
def called_layers(lm: LanguageModel) -> list[str]:
    """Return the linear layers that a pass calls, except the head; Mamba uses some weights without calling a layer."""
    layers = linear_layers(lm.model)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=lm.device)
    called = called_by(lambda: lm.backbone(ids), layers.values())
    return [name for name, module in layers.items() if module in called and module is not lm.head.linear]


def called_by(run: Callable[[], object], modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return those of the modules that `run` calls."""
    called = set[nn.Module]()
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(lambda module, *_: called.add(module)))
        run()
    return called
