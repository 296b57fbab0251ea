"""Build small real transformers as policies over a few tokens, for the studies of `frontier.py` and `router.py`.

Weights are random, as wide as keeps hidden states near 1. A response has no prompt: it begins after one extra token.

Shapes: B responses, T tokens of each, V tokens of the policy.
"""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from transformers.cache_utils import DynamicCache

from slipstream.engines.native.model import LanguageModel, split

HIDDEN, LAYERS, HEADS, CHOSEN = 32, 2, 2, 2


def small_policy(seed: int, tokens: int, longest: int, *, experts: int = 0, dtype: str = "float32") -> LanguageModel:
    """Return a Qwen3 model, or with experts a Qwen3-MoE model that uses two of them for a token."""
    shape = {
        "vocab_size": tokens + 1,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": longest + 32,
        "initializer_range": HIDDEN**-0.5,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": tokens,
        "eos_token_id": None,
    }
    mixture = {"num_experts": experts, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": HIDDEN}
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**shape, **mixture, norm_topk_prob=True) if experts else Qwen3Config(**shape)
    attention = "eager" if experts else "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
    if experts:
        model.set_experts_implementation("eager")  # the fast kernels have no float64
    return split("small policy", model.eval())


def inputs_of(lm: LanguageModel, ids_BT: Tensor) -> Tensor:
    """Return the tokens before those of the responses."""
    return torch.cat([torch.full_like(ids_BT[:, :1], lm.vocab_size - 1), ids_BT[:, :-1]], 1)


def logp_of(lm: LanguageModel, ids_BT: Tensor, offset_V: Tensor | None = None) -> Tensor:
    """Return the log-probs [B, T] of responses; `offset_V` is added to all logits."""
    logits_BTV = lm.model(inputs_of(lm, ids_BT), use_cache=False).logits[..., :-1]
    if offset_V is not None:
        logits_BTV = logits_BTV + offset_V
    found_BT: Tensor = logits_BTV.log_softmax(-1).gather(-1, ids_BT[..., None])[..., 0]
    return found_BT


@torch.no_grad()
def drawn_by(lm: LanguageModel, count: int, length: int, offset_V: Tensor) -> Tensor:
    """Return responses [B, T], drawn token by token."""
    cache, found = DynamicCache(config=lm.model.config), list[Tensor]()
    last_B1 = torch.full((count, 1), lm.vocab_size - 1)
    for _ in range(length):
        logits_BV = lm.model(last_B1, past_key_values=cache, use_cache=True).logits[:, -1, :-1] + offset_V
        last_B1 = torch.multinomial(logits_BV.softmax(-1), 1)
        found.append(last_B1)
    return torch.cat(found, 1)


def gradient_of(lm: LanguageModel, loss: Tensor, *, again: bool = False) -> Tensor:
    """Return the gradient of a loss by all weights, as one vector; `again` keeps the graph for another gradient."""
    weights = list(lm.model.parameters())
    found = torch.autograd.grad(loss, weights, retain_graph=again, allow_unused=True)
    parts = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]
    return torch.cat([part.flatten() for part in parts])
