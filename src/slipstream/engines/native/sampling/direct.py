"""Compute the layers of Llama-like models with fewer operations and less Python code than their modules need.

A decoding step has few tokens, so most of its time is Python code and the start of operations. Here queries and keys
pass norm and rotation together, and rotary factors come from a table. Each value is computed as in the modules: float32
results are equal bit for bit.

Shapes: T tokens of a step, H hidden, N query heads, J key/value heads, D head size, L positions.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm

from slipstream.engines.native.attention import Reach
from slipstream.engines.native.model import LanguageModel, has_windows
from slipstream.engines.native.sampling import kv
from slipstream.estimators.products import PLAIN

DIRECT_BACKBONES = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}
"""Backbones whose layers consist of exactly these operations."""


class Direct:
    def __init__(self, lm: LanguageModel) -> None:
        """Prepare a model that `is_direct` accepts; passes read the weights of its modules."""
        backbone: Any = lm.backbone
        attention = backbone.layers[0].self_attn
        self.backbone, self.act = backbone, backbone.layers[0].mlp.act_fn
        self.eps, self.scaling = float(backbone.norm.variance_epsilon), float(attention.scaling)
        self.head_dim = int(attention.head_dim)
        self.n, self.j = (part.out_features // self.head_dim for part in (attention.q_proj, attention.k_proj))
        self.which = torch.tensor([0] * self.n + [1] * self.j, device=lm.device)
        self.rotary_L2D = torch.empty(0, 2, self.head_dim, device=lm.device)

    def __call__(self, step: kv.Step, ids_T: Tensor, at_T: Tensor) -> Tensor:
        """Return the last hidden states [T, H] of the step's tokens; store their keys and values."""
        x_TH = embedding(ids_T, self.backbone.embed_tokens.weight)
        cos_T1D, sin_T1D = self._rotary(x_TH, at_T, step.length)
        for index, layer in enumerate(self.backbone.layers):
            attention, mlp = layer.self_attn, layer.mlp
            h_TH = self._norm(x_TH, layer.input_layernorm.weight)
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            query, key, value = (part.forward(h_TH).view(len(h_TH), -1, self.head_dim) for part in parts)
            qk = torch.cat([query, key], 1)
            if hasattr(attention, "q_norm"):
                weights = torch.stack([attention.q_norm.weight, attention.k_norm.weight])
                qk = self._norm(qk) * weights.index_select(0, self.which)
            qk = qk * cos_T1D + qk.roll(self.head_dim // 2, -1) * sin_T1D
            query_TND, key_TJD = torch.split(qk, [self.n, self.j], 1)
            keys, values = step.update(key_TJD.transpose(0, 1)[None], value.transpose(0, 1)[None], index)
            out_TND = kv.attend_blocks(step, Reach(), query_TND, keys, values, scaling=self.scaling)
            x_TH = x_TH + attention.o_proj.forward(out_TND.flatten(1))
            h_TH = self._norm(x_TH, layer.post_attention_layernorm.weight)
            x_TH = x_TH + mlp.down_proj.forward(self.act(mlp.gate_proj.forward(h_TH)) * mlp.up_proj.forward(h_TH))
        return self._norm(x_TH, self.backbone.norm.weight)

    def _norm(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        if x.dtype == torch.float32:
            return rms_norm(x, x.shape[-1:], weight, self.eps)
        # the modules compute norms in float32, whatever the dtype, and round them before they multiply by the weight
        if x.is_cuda:
            x = rms_norm(x, x.shape[-1:], None, self.eps)
        else:
            wide = x.float()
            x = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return x if weight is None else weight * x

    def _rotary(self, x: Tensor, at_T: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [T, 1, D]; the sines of the first half are negative, as `rotate_half` makes them."""
        if len(self.rotary_L2D) < length:
            positions = torch.arange(-(-length // kv.BUFFER_STEP) * kv.BUFFER_STEP, device=x.device)
            cos, sin = (part[0] for part in self.backbone.rotary_emb(x, positions[None]))
            sin[:, : self.head_dim // 2] *= -1
            self.rotary_L2D = torch.stack([cos, sin], 1)
        cos_TD, sin_TD = self.rotary_L2D[at_T].unbind(1)
        return cos_TD[:, None], sin_TD[:, None]


def is_direct(lm: LanguageModel) -> bool:
    """Return True if `Direct` computes this model: a known family with full attention and plain layers."""
    if type(lm.backbone).__name__ not in DIRECT_BACKBONES or has_windows(lm.model.config):
        return False
    linears = [module for name, module in lm.backbone.named_modules() if name.endswith("_proj")]
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in lm.backbone.modules())
    return not hooked and all(type(module) in PLAIN for module in linears)
