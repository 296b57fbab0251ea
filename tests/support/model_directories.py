"""Tiny models and a tokenizer with a chat template, written to directories: nothing is downloaded."""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast
CONTEXT = 64
TEMPLATE = """{{ bos_token }}{% for message in messages %}\
{% if message.role not in ("system", "user", "assistant") %}{{ raise_exception("no role " + message.role) }}{% endif %}\
{{ "<" + message.role + ">" + message.content + eos_token }}{% endfor %}\
{% if add_generation_prompt %}{{ "<assistant>" }}{% if quiet %}{{ "!" }}{% endif %}{% endif %}"""


def build_tokenizer(*, alphabet: str = string.printable, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per character. Like Llama's, it puts a beginning-of-sequence token before plain text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    roles = ["<system>", "<user>", "<assistant>"]
    vocabulary = {token: index for index, token in enumerate([*special, *roles, *alphabet])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=roles,
        chat_template=template,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def save_model(
    path: Path, tokenizer: PreTrainedTokenizerFast, *, layers: int, seed: int, like: Path | None = None
) -> Path:
    """`like` another with fewer layers, which are its first: they find much the same likely."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    if like is not None:
        model.load_state_dict(Qwen3ForCausalLM.from_pretrained(like).state_dict(), strict=False)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
