"""Tiny models and a tokenizer with a chat template, built here: nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(Path(__file__).parents[1] / ".pytest_cache" / "huggingface"),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import atexit
import gc
import signal
import string
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # whoever only shares the tests out among processes is spared the libraries of models
    from transformers import PreTrainedTokenizerFast

HAS_AGENTS = (Path(__file__).parents[1] / ".venv-agents" / "ready").exists()
collect_ignore = ([] if find_spec("vllm") else ["with_vllm"]) + ([] if HAS_AGENTS else ["with_agents"])
"""`make test-vllm` has an environment with vLLM, `make test-agents` makes one with agents."""
CONTEXT = 64
TEMPLATE = """{{ bos_token }}{% for message in messages %}\
{% if message.role not in ("system", "user", "assistant") %}{{ raise_exception("no role " + message.role) }}{% endif %}\
{{ "<" + message.role + ">" + message.content + eos_token }}{% endfor %}\
{% if add_generation_prompt %}{{ "<assistant>" }}{% if quiet %}{{ "!" }}{% endif %}{% endif %}"""

# a suite that was started by nohup, or in the background of a script, ignores these, and so would all that it starts
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)
gc.disable()  # a quarter of what it costs to load the libraries of models: all of it stays, see below
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


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


@pytest.fixture(scope="session", autouse=True)
def nobody_waits_for_the_disk() -> Iterator[None]:
    """Thousands of checkpoints of toys are told to be on disk, of which no test sees more than that they are told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """student and teacher, and a stranger whose tokenizer has two characters swapped."""
    path = tmp_path_factory.mktemp("models")
    save_model(path / "student", build_tokenizer(), layers=1, seed=1)
    save_model(path / "teacher", build_tokenizer(), layers=2, seed=2, like=path / "student")
    swapped = string.printable.translate(str.maketrans("ab", "ba"))
    save_model(path / "stranger", build_tokenizer(alphabet=swapped), layers=1, seed=3)
    return path


def pytest_collection_finish() -> None:
    """What was loaded up to here stays: no collection need look through it again."""
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries that count what they leave behind would complain


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What a machine cannot try is the last that is seen of a run."""
    skipped = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []) if report.longrepr]
    for reason in sorted({each.removeprefix("Skipped: ") for each in skipped if "NO SANDBOX IS TESTED HERE" in each}):
        terminalreporter.write_line(reason, red=True, bold=True)
