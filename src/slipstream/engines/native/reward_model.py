"""Reward model (AutoModelForSequenceClassification with one label) in a process of its own, which scores batches.

A response that is too long for the model is ungraded; it is never cut and never a reward of 0.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from slipstream.children import first_message
from slipstream.data.tokenizers import Tokenizer, load_tokenizer
from slipstream.engines.native.reward_process import RewardModel
from slipstream.errors import EngineError, first_line
from slipstream.grades import Ungraded


def serve(parent: Connection) -> None:
    settings: RewardModel = first_message(parent)
    try:
        scorer = Scorer(settings)
    except Exception as error:  # the library raises plain Exception
        parent.send(EngineError(f"the reward model {settings.path} cannot be loaded: {first_line(error)}"))
        return
    parent.send("ready")
    while True:
        parent.send(scorer.scores(parent.recv()))


class Scorer:
    def __init__(self, settings: RewardModel) -> None:
        from transformers import AutoModelForSequenceClassification

        from slipstream.engines.native.model import pick_device

        self.settings, self.tokenizer = settings, load_tokenizer(settings.path)
        self.device = pick_device(settings.device)
        dtype = getattr(torch, settings.dtype)
        model = AutoModelForSequenceClassification.from_pretrained(settings.path, dtype=dtype, trust_remote_code=False)
        self.model = model.to(self.device).eval()

    def scores(self, pairs: Sequence[tuple[Any, str]]) -> list[float | Ungraded]:
        """Return the score of each response. Responses of similar length are computed together."""
        scores, encoded = dict[int, float | Ungraded](), dict[int, list[int]]()
        for index, (question, text) in enumerate(pairs):
            try:
                ids = encode(self.tokenizer, question, text)
            except Exception as error:  # a template is a program, and may raise anything
                scores[index] = Ungraded("error", f"the reward model's chat template raised {first_line(error)}")
                continue
            if len(ids) > self.settings.max_length:
                limit = f"{len(ids)} tokens, more than task.model.max_length = {self.settings.max_length}"
                scores[index] = Ungraded("length", f"the reward model would read {limit}")
            else:
                encoded[index] = ids
        left = sorted(encoded, key=lambda index: len(encoded[index]))
        size = 1 if self.model.config.pad_token_id is None else self.settings.batch
        for start in range(0, len(left), size):
            part = left[start : start + size]
            scores |= zip(part, self._batch([encoded[index] for index in part]), strict=True)
        return [scores[index] for index in range(len(pairs))]

    @torch.inference_mode()
    def _batch(self, rows: Sequence[list[int]]) -> list[float]:
        width = max(map(len, rows))
        pad = self.model.config.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self.device)
        scores: list[float] = self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()
        return scores


def encode(tokenizer: Tokenizer, question: Any, text: str) -> list[int]:
    """Return the tokens of a conversation by the chat template; without a template, those of a pair of texts."""
    if tokenizer.chat_template is None:
        if not isinstance(question, str):
            question = "\n\n".join(str(message.get("content")) for message in question)
        pair: list[int] = tokenizer(question, text)["input_ids"]
        return pair
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    messages.append({"role": "assistant", "content": text})
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):
        serve(Connection(int(sys.argv[1])))
