"""What a teacher sees before a response where that is more than the student saw: a template, filled in.

The template is the whole prefix, special tokens and all: {prompt} is the text of the student's prompt as its chat
template made it. It goes through the tokenizer once; the tokens of the response stay what they are, behind it.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

import numpy as np

from slipstream.errors import DataError
from slipstream.records import Ints, Prompt, Rollout
from slipstream.tasks.chat import Tokenizer


class TemplateContext:
    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self.template = template
        self.tokenizer = copy.deepcopy(tokenizer)  # which is not for several threads at a time
        self.id = f"context-{hashlib.blake2b(template.encode(), digest_size=8).hexdigest()}"

    def __call__(self, rollout: Rollout) -> Ints:
        return self.before(rollout.prompt, rollout.tokens)

    def before(self, prompt: Prompt, response: Ints | None = None) -> Ints:
        """The teacher's prompt."""
        answer = "" if response is None else str(self.tokenizer.decode(response, skip_special_tokens=True))
        text = self.template.format(
            prompt=self.tokenizer.decode(prompt.tokens, skip_special_tokens=False),
            ground_truth=self._text(prompt),
            response=answer,
        )
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not tokens:
            raise DataError(f"{prompt.id}: the teacher's context {self.template!r} is empty for it")
        return np.array(tokens, np.int32)

    def _text(self, prompt: Prompt) -> str:
        truth: Any = prompt.ground_truth
        if truth is None and "{ground_truth}" in self.template:
            raise DataError(
                f"{prompt.id}: the teacher's context needs {{ground_truth}}, and the row has no answer: "
                "data.answer names a column"
            )
        return truth if isinstance(truth, str) else json.dumps(truth)
