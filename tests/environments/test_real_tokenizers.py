"""Real tokenizers and chat templates of five model families, if `make tokenizers` has fetched them; else skipped."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.data.tokenizers import load_tokenizer, stop_ids
from slipstream.environments import Call
from slipstream.environments.chat.renderer import Renderer
from slipstream.environments.chat.tool_formats import call_message
from slipstream.errors import ModelError
from support.slow_cases import with_slow

FOLDER = Path(__file__).parents[2] / "build" / "tokenizers"
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at something.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}, "count": {"type": "integer"}}},
    },
}
QUESTION = [{"role": "user", "content": "What is there?"}]
RESULT: dict[str, Any] = {"role": "tool", "content": "a door"}
ENDS = {
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
}
FORMATS = {"qwen3": "auto", "llama3_1": "hermes", "gemma3": "hermes", "deepseek_v3": "hermes"}
"""Formats of tool calls. These templates of Llama and Gemma have none; DeepSeek's does not end a single call."""


@cache
def tokenizer_of(family: str) -> Any:
    if not (FOLDER / family).is_dir():
        pytest.skip(f"no {FOLDER / family}: make tokenizers fetches it")
    return load_tokenizer(str(FOLDER / family))


def stops_of(family: str) -> list[int]:
    return sorted(stop_ids(tokenizer_of(family), None))


def renderer_of(family: str) -> Renderer:
    return Renderer(tokenizer_of(family), stop_ids=stops_of(family), format=FORMATS[family], tools=[LOOK])


@pytest.mark.parametrize("family", ENDS)
def test_the_end_token_is_the_one_that_the_template_writes_after_an_answer(family: str) -> None:
    tokenizer = tokenizer_of(family)
    (end,) = stop_ids(tokenizer, None)
    assert tokenizer.convert_ids_to_tokens(end) == ENDS[family]
    answered = [*QUESTION, {"role": "assistant", "content": "A door."}]
    assert ENDS[family] in tokenizer.apply_chat_template(answered, tokenize=False).rpartition("A door.")[2]


HERMES = [family for family, format in FORMATS.items() if format == "hermes"]


@pytest.mark.parametrize("family", with_slow(HERMES, quick=["llama3_1"]))
def test_a_template_without_usable_calls_is_refused_with_what_to_write(family: str) -> None:
    with pytest.raises(ModelError, match='write environment.format = "hermes"'):
        Renderer(tokenizer_of(family), stop_ids=stops_of(family), format="auto", tools=[LOOK])


@pytest.mark.parametrize("family", with_slow(FORMATS, quick=["qwen3", "llama3_1"]))
def test_a_conversation_with_a_call_is_read_and_goes_on_as_the_template_writes_it(family: str) -> None:
    renderer, calls = renderer_of(family), (Call("look", {"what": "there", "count": 3}),)
    prompt, whole = (renderer.open(each, [LOOK]) for each in (QUESTION, [*QUESTION, call_message(calls), RESULT]))
    assert np.array_equal(whole[: len(prompt)], prompt), "the call continues the prompt"
    rest = whole[len(prompt) :]
    said = rest[: int(np.flatnonzero(np.isin(rest, stops_of(family)))[0]) + 1]
    assert renderer.parse(said).calls == calls
    assert np.array_equal(renderer.extend(said, [RESULT]), rest[len(said) :])
