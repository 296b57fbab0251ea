"""A tiny random model of every causal LM family that transformers has, and of the variants that matter to attention.

Sizes are shrunk by the names that configs use for them, so a family of a later transformers is in the zoo by itself;
what needs more to be small, or to be built at all, stands in `OWN`.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB, EOS, LAYERS, WINDOW, CONTEXT = 31, 1, 4, 6, 128

SMALL: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input", "n_vocab"], VOCAB),
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "block_dim"], 32),
    **dict.fromkeys(["embedding_size", "embed_dim", "input_embedding_size", "output_embedding_size", "lru_width"], 32),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"], CONTEXT),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "n_inner", "d_ff"], 48),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"], 16),
    **dict.fromkeys(["expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "intermediate_size_mlp"], 16),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"], LAYERS),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "swa_num_key_value_heads", "num_key_value_groups"], 2),
    **dict.fromkeys(["swa_num_attention_heads", "num_global_key_value_heads"], 4),
    **dict.fromkeys(["head_dim", "swa_head_dim", "global_head_dim", "v_head_dim", "swa_v_head_dim"], 8),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "attention_head_dim", "kv_channels"], 8),
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "o_lora_rank", "index_topk"], 16),
    **dict.fromkeys(["index_head_dim", "index_n_heads", "hidden_size_per_layer_input", "d_rel"], 8),
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"], 2),
    **dict.fromkeys(["n_shared_experts", "moe_num_shared_experts", "num_shared_experts", "n_group"], 1),
    **dict.fromkeys(["topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"], 1),
    **dict.fromkeys(["moe_layer_start_index", "zero_expert_num"], 1),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "mamba_n_heads"], 4),
    **dict.fromkeys(
        ["linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "rel_extent", "linear_head_dim"], 16
    ),
    **dict.fromkeys(["mamba_d_state", "ssm_state_size", "state_size"], 8),
    **dict.fromkeys(["mamba_n_groups", "n_groups", "num_mem_blocks", "n_mamba_heads", "expert_layer_offset"], 1),
    **dict.fromkeys(["mamba_chunk_size", "chunk_size", "block_size"], 8),
    **dict.fromkeys(["mamba_expand", "expand"], 2),
    **dict.fromkeys(["mamba_dt_rank", "time_step_rank"], 4),
    **dict.fromkeys(["sliding_window", "attention_window_size", "sliding_window_size", "window_size"], WINDOW),
    **dict.fromkeys(["attention_chunk_size"], 8),
    **dict.fromkeys(["attn_layer_period", "expert_layer_period", "attn_layer_indices"], 2),
    "mamba_num_heads": 4,
    "mamba_d_head": 16,
    "attn_layer_offset": 1,
    "expert_layer_offset": 0,
    "num_kv_shared_layers": 2,
    "rotary_dim": 4,
    "is_decoder": True,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "eos_token_id": EOS,
}
"""By the name of the setting; nothing that a family does not have is set."""

KINDS = "layer_types", "layers_block_type", "mlp_layer_types", "attention_layers", "block_types"
"""Lists with an entry for every layer."""

OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": 16},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"topk_method": "greedy"},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3n_text": {
        "intermediate_size": [48] * LAYERS,
        "activation_sparsity_pattern": [0.0] * LAYERS,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"initializer_range": 0.1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "xlm": {"emb_dim": 32, "n_words": VOCAB},
    "zaya": {"num_experts_per_tok": 1},
    "jetmoe": {"num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 32, "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2, "qk_rope_head_dim": 8, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "nanochat": {},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 4,
        "make_ngram_vocab_size_divisible_by": 8,
        "ple_embed_dim": 32,
        "hc_lowrank": 8,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds": False},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, own key heads": ("llama", {"num_key_value_heads": 4}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, llama3 positions": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama, linear positions": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, yarn positions": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama, dynamic positions": (
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "phi3, longrope positions": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "mistral, window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2, some windows": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3, tied head": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2, small caps": ("gemma2", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    "vaultgemma, small caps": ("vaultgemma", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    "gemma3n, small cap": ("gemma3n_text", {"final_logit_softcapping": 2.0}),
    "phi, quarter rotary": ("phi", {"partial_rotary_factor": 0.25}),
    "gpt_neox, parallel": ("gpt_neox", {"use_parallel_residual": True, "rotary_pct": 0.25}),
    "opt, norm after": ("opt", {"do_layer_norm_before": False}),
    "cohere, norms": ("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "mixtral, window": ("mixtral", {"sliding_window": WINDOW}),
}
"""Under a name of their own: the family, and what differs."""


def names() -> list[str]:
    """Those that read text, and nothing else."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not others_than_text(name)] + [*VARIANTS]


def others_than_text(name: str) -> bool:
    """Images, sounds, or an encoder of its own, and no text part that is a family by itself."""
    more = any(
        word in part for part in CONFIG_MAPPING[name].sub_configs for word in ("vision", "audio", "vq", "encoder")
    )
    return more and not text_of(name)


def text_of(name: str) -> str | None:
    """The family of the text part, where it has one of its own."""
    part = f"{name}_text"
    return part if "text_config" in CONFIG_MAPPING[name].sub_configs and part in CONFIG_MAPPING else None


def config_of(name: str) -> Any:
    family, changes = VARIANTS.get(name, (name, {}))
    kind = CONFIG_MAPPING[family]
    if (text := text_of(family)) is not None:
        usual = kind()
        others = {
            part: _small(type(getattr(usual, part)) if of is AutoConfig else of)
            for part, of in kind.sub_configs.items()
            if part != "text_config"
        }
        return kind(text_config=config_of(text).to_dict(), **others)
    usual, settings = kind(), _small(kind)
    if "kv_lora_rank" in settings:  # latent attention: every head has its key
        settings["num_key_value_heads"] = 4
    for key in KINDS:
        if key in _fields(usual) and isinstance(found := getattr(usual, key, None), list | tuple):
            settings[key] = list(_each_kind(found))
    return kind(**settings | OWN.get(family, {}) | changes)


def _small(kind: Any) -> dict[str, Any]:
    """The settings of SMALL that this config has."""
    usual, settings = kind(), {}
    for key, value in SMALL.items():
        held = inspect.getattr_static(usual, key, None)
        if key in _fields(usual) and not isinstance(inspect.getattr_static(kind, key, None), property):
            # a window or an expert that a family can do without, and does by default, it stays without
            if held is None and key in ("sliding_window", "attention_chunk_size", "num_kv_shared_layers"):
                continue
            settings[key] = value
    return settings


def _fields(config: Any) -> set[str]:
    """Return the settings that the config takes itself, without those that it passes on."""
    return {*config.to_dict(), *inspect.signature(type(config).__init__).parameters}


def _each_kind(kinds: list[str]) -> Iterator[str]:
    """Return one kind for each layer, each kind among them, the more frequent ones first."""
    distinct = list(dict.fromkeys(kinds))
    for i in range(LAYERS):
        yield distinct[i % len(distinct)]


def make(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype, attn_implementation="eager").eval()
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    return model
