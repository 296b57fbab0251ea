"""Tiny models with a mixture of experts, routers that choose other experts than their scores say, and a written-out
mixture that computes every expert for every token."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from slipstream.models.resolve import model_path
from slipstream.records import Rollout
from support.tiny_models import SHAPE

EXPERTS, CHOSEN = 6, 2
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MIXTURES: dict[str, Any] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "mixtral": lambda: MixtralConfig(
        **SHAPE | {"intermediate_size": 16}, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, sliding_window=None
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **SHAPE | LATENT | {"num_key_value_heads": 4, "num_hidden_layers": 3},
        n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=16,
        n_shared_experts=1,
        n_group=3,
        topk_group=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
    ),
}


def make_mixture(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Return a model whose routers decide clearly: no rounding changes their choices."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(MIXTURES[name](), dtype=dtype, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")  # the fast kernels have no float64
    with torch.no_grad():
        for router in routers_in(model):
            router.weight.normal_(0.0, 0.5)
    return model


def routers_in(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


class Noise(TorchFunctionMode):
    """Add noise to the scores by which experts are chosen, but not to the scores of the chosen ones."""

    def __init__(self, noise_E: Tensor) -> None:
        super().__init__()
        self.noise_E = noise_E

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.topk or args[0].shape[-1] != len(self.noise_E):
            return function(*args, **(kwargs or {}))
        ids = function(args[0] + self.noise_E, *args[1:], **(kwargs or {})).indices
        return torch.return_types.topk((args[0].gather(-1, ids), ids))


def with_noise(model: PreTrainedModel, scale: float, *, seed: int = 7) -> PreTrainedModel:
    """Let all routers of a model choose by scores with noise that is constant over tokens."""
    generator = torch.Generator().manual_seed(seed)
    for router in routers_in(model):
        noise_E = scale * torch.randn(EXPERTS, generator=generator, dtype=router.weight.dtype)
        router.forward = _noisy(router.forward, noise_E)
    return model


def _noisy(forward: Any, noise_E: Tensor) -> Any:
    def noisy(*args: Any) -> Any:
        with Noise(noise_E):
            return forward(*args)

    return noisy


def choices_in(model: PreTrainedModel, ids: Any) -> Tensor:
    """Return the experts [T, R, X] that the routers of a model choose in a plain pass over a sequence."""
    found: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda m, args, out: found.append(out[2])) for router in routers_in(model)]
    with torch.no_grad():
        model(torch.as_tensor(ids).long()[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


def dense(model: PreTrainedModel, chosen_TRX: Tensor) -> PreTrainedModel:
    """Replace every mixture by its formula, Σ over all experts of gate · MLP, for one sequence with these experts."""
    blocks = [module for module in model.modules() if hasattr(module, "gate") and hasattr(module, "experts")]
    for number, block in enumerate(blocks):
        block.forward = _formula(block, chosen_TRX[:, number])
    return model


def _formula(block: Any, chosen_TX: Tensor) -> Any:
    gate, experts, latent = block.gate, block.experts, hasattr(block, "shared_experts")

    def forward(hidden_1TH: Tensor) -> Tensor:
        x_TH = hidden_1TH[0]
        # routers compute in float32, also in a model of float64
        if latent:
            score_TE = (x_TH.float() @ gate.weight.T.float()).sigmoid()
        else:
            score_TE = (x_TH @ gate.weight.T).float().softmax(-1)
        chosen_TE = torch.zeros_like(score_TE).scatter(1, chosen_TX, 1.0)
        gate_TE = chosen_TE * score_TE / (chosen_TE * score_TE).sum(1, keepdim=True)
        both = torch.einsum("th,ekh->tek", x_TH, experts.gate_up_proj)
        gated, up = both.chunk(2, -1)
        out_TEH = torch.einsum("tek,ehk->teh", torch.nn.functional.silu(gated) * up, experts.down_proj)
        out_TH = (gate_TE[..., None] * out_TEH).sum(1)
        if latent:
            out_TH = gate.routed_scaling_factor * out_TH + block.shared_experts(x_TH)
        return out_TH[None]

    return forward


def any_experts(rollout: Rollout, routers: int) -> Rollout:
    """The same response with other experts in its record: any two different ones."""
    rng = np.random.default_rng(rollout.index + 10 * rollout.prompt.number)
    rows = len(rollout.prompt.tokens) - 1 + len(rollout.tokens)
    found = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (rows, routers, 1)), axis=-1)[..., :CHOSEN]
    first = len(rollout.prompt.tokens) - 1
    return replace(rollout, router=found[first:], prompt_router=found[:first])


def flipped(one_TRX: Tensor, other_TRX: Tensor) -> float:
    """Return the share of pairs of a token and a router whose sets of experts differ."""
    pairs = zip(one_TRX.flatten(0, 1).tolist(), other_TRX.flatten(0, 1).tolist(), strict=True)
    differ: Sequence[bool] = [set(one) != set(other) for one, other in pairs]
    return sum(differ) / len(differ)


def save_mixture(path: Path, *, like: str, family: str = "qwen3_moe", **changes: Any) -> None:
    """Write a student with experts and the tokenizer of another model into a directory."""
    tokenizer = AutoTokenizer.from_pretrained(model_path(like))
    tokenizer.save_pretrained(path)
    config = MIXTURES[family]()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config.update({"vocab_size": len(tokenizer), "max_position_embeddings": 256} | ends | changes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
