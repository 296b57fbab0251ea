"""Tokenization in which template text may contain control tokens, but quoted text (tool results) may not.

Every added token of a tokenizer counts as a control token: `<|im_end|>`, and also `<tool_call>`, which tokenizers do
not mark as special. If quoted text contains the name of a control token, the name is encoded as ordinary text.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.data.tokenizers import Tokenizer
from slipstream.errors import DataError, ModelError, first_line


@dataclass(frozen=True, slots=True)
class Part:
    text: str
    quoted: bool


class Quoting:
    """Copy of a tokenizer in which control tokens have random names, so that quoted text cannot contain these names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer.name_or_path
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            why = "no tokenizer.json there, which tool results need: convert the tokenizer"
            raise ModelError(f"{self.tokenizer}: {why}")
        state = json.loads(backend.to_str())
        # tokens of blanks only, for indented text, are no control tokens
        control = [each for each in state["added_tokens"] if each["special"] or each["content"].strip(" \t\r\n▁")]
        self.control = {each["content"]: each["id"] for each in control}
        """Ids of control tokens, by the text of the token."""
        self.anchor = next((each["content"] for each in control if not each["rstrip"]), "")
        """Control token that `encode` puts before every text and then removes. Blanks after it must be kept."""
        secret = secrets.token_hex(8)
        self.names = {text: f"[{secret}.{index}]" for text, index in self.control.items()}
        real = {self.names.get(each["content"], each["content"]): each["id"] for each in state["added_tokens"]}
        self.renamed = type(backend).from_str(json.dumps(_renamed(state, self.names)))
        self.ids = {self.renamed.token_to_id(name): index for name, index in real.items()}
        texts = sorted(self.control, key=len, reverse=True)  # prefer the longest match, as tokenizers do
        self.pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        model = state["model"]
        self._prove(unknown=model["unk_id"] if "unk_id" in model else backend.token_to_id(model.get("unk_token") or ""))

    def encode(self, parts: Sequence[Part]) -> list[int]:
        """Encode parts as the continuation of a text, without the leading blank that some tokenizers add to a text."""
        named = (p.text if p.quoted else self.pattern.sub(lambda found: self.names[found[0]], p.text) for p in parts)
        text = "".join(named).encode("utf-8", "replace").decode()  # an unpaired surrogate becomes "?"
        try:
            ids = self.renamed.encode(self.names.get(self.anchor, "") + text, add_special_tokens=False).ids
        except Exception as error:  # the library raises plain Exception
            quoted = "".join(part.text for part in parts if part.quoted)
            raise DataError(f"{self.tokenizer} cannot encode {quoted[:60]!r}: {first_line(error)}") from None
        return [self.ids.get(index, index) for index in ids[bool(self.anchor) :]]

    def _prove(self, unknown: int | None) -> None:
        forbidden = set(self.control.values()) - {unknown}
        for text in self.control:
            try:
                ids = self.encode([Part(text, quoted=True)])
            except DataError:  # this tokenizer cannot encode the text at all
                continue
            if not ids or not forbidden.isdisjoint(ids):
                raise ModelError(f"{self.tokenizer}: the text {text!r} of a control token cannot be written without it")


def _renamed(state: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Rename tokens in a tokenizer's state, also in the vocabulary of its model, which may contain control tokens."""
    added = [each | {"content": names.get(each["content"], each["content"])} for each in state["added_tokens"]]
    model = dict(state["model"])
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(word, word), score] for word, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(word, word): index for word, index in model["vocab"].items()}
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [(a, b) for a, b in model["merges"] if names.keys().isdisjoint((a, b, a + b))]
    nothing = dict.fromkeys(("truncation", "padding", "post_processor"))
    return state | nothing | {"added_tokens": added, "model": model}
