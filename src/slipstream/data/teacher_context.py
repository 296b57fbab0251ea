"""Teacher contexts: the text that a teacher reads before a response instead of the student's prompt.

A context is a filled template or the result of a user function. The context replaces the whole prompt, special tokens
included; {prompt} is the student's prompt as the chat template renders it. The teacher reads the tokens of the context
and then the unchanged tokens of the response.

A user function runs in a separate process, as rewards do. It gets the fields of `Seen` that its parameters name.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from typing import Any

import numpy as np

from slipstream.config.base import OWN
from slipstream.data.tokenizers import Tokenizer
from slipstream.errors import ConfigError, DataError, NoContext, first_line
from slipstream.grades import Ungraded
from slipstream.records import Attempts, Ints, Prompt, Rollout
from slipstream.rewards.functions import Seen
from slipstream.rewards.grading import GradingProcess


def context_of(
    spec: str | None, tokenizer: Tokenizer, *, max_length: int | None = None, timeout: float = 30.0
) -> TextContext | None:
    """Build the context from `teachers.NAME.context`; None (the default): the teacher sees the student's prompt."""
    if spec is None:
        return None
    if OWN.fullmatch(spec):
        return WrittenContext(spec, tokenizer, max_length, timeout)
    return TemplateContext(spec, tokenizer, max_length)


def check_function(teacher: str, spec: str, *, graded: bool) -> None:
    """Raise ConfigError if a context function cannot be loaded, or requires rewards that the run lacks (`graded`)."""
    process = GradingProcess([spec], timeout=0.0, setting="context")
    try:
        needs = process.needs
    except ConfigError as error:
        raise ConfigError(f"teachers.{teacher}.{error}") from None
    finally:
        process.close()
    rewarded = [name for name in needs[spec] if name in ("best", "best_reward", "last_reward")]
    if rewarded and not graded:
        raise ConfigError(
            f"teachers.{teacher}.context = {spec!r} asks for {rewarded[0]!r}, which needs rewards: set task.reward"
        )


class TextContext:
    """Base class of contexts. Subclasses write the text in `text`; this class turns the text into tokens."""

    def __init__(self, tokenizer: Tokenizer, max_length: int | None) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)  # tokenizers are not thread-safe
        self.max_length = max_length

    def __call__(self, rollout: Rollout, attempts: Attempts | None) -> Ints:
        tokens = self.before(rollout.prompt, rollout.tokens, attempts)
        length = len(tokens) + len(rollout.tokens)
        if self.max_length is not None and length > self.max_length:
            raise NoContext(
                f"context and response have {length} tokens, and the teacher takes at most {self.max_length}"
            )
        return tokens

    def close(self) -> None:
        """Release resources; a template holds none."""

    def before(self, prompt: Prompt, response: Ints | None = None, attempts: Attempts | None = None) -> Ints:
        seen = Seen(
            prompt=str(self.tokenizer.decode(prompt.tokens, skip_special_tokens=False)),
            response="" if response is None else str(self.tokenizer.decode(response, skip_special_tokens=True)),
            ground_truth=prompt.ground_truth,
            meta=prompt.meta,
            data_source=prompt.data_source,
            **asdict(attempts or Attempts()),
        )
        text = self.text(prompt, seen)
        try:
            tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # the library raises plain Exception
            named = f"{prompt.id}: {self.tokenizer.name_or_path} cannot encode the teacher's context {text[:60]!r}"
            raise DataError(f"{named}: {first_line(error)}") from None
        if not tokens:
            raise DataError(f"{prompt.id}: the teacher's context is empty for it")
        return np.array(tokens, np.int32)

    def text(self, prompt: Prompt, seen: Seen) -> str:
        raise NotImplementedError


class TemplateContext(TextContext):
    def __init__(self, template: str, tokenizer: Tokenizer, max_length: int | None = None) -> None:
        super().__init__(tokenizer, max_length)
        self.template = template

    def text(self, prompt: Prompt, seen: Seen) -> str:
        truth: Any = seen.ground_truth
        if truth is None and "{ground_truth}" in self.template:
            why = "the teacher's context needs {ground_truth}, and the row has no answer: data.answer names a column"
            raise DataError(f"{prompt.id}: {why}")
        rewards = {"best_reward": seen.best_reward, "last_reward": seen.last_reward}
        return self.template.format(
            prompt=seen.prompt,
            response=seen.response,
            ground_truth=truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False),
            best=seen.best,
            last=seen.last,
            **{name: "" if reward is None else f"{reward:g}" for name, reward in rewards.items()},
        )


class WrittenContext(TextContext):
    def __init__(self, spec: str, tokenizer: Tokenizer, max_length: int | None, timeout: float) -> None:
        super().__init__(tokenizer, max_length)
        self.spec, self.timeout = spec, timeout
        self.process = self._process()  # start now, while the model loads

    def _process(self) -> GradingProcess:
        return GradingProcess([self.spec], self.timeout, setting="context")

    def text(self, prompt: Prompt, seen: Seen) -> str:
        if self.process.ended:
            self.process.close()
            self.process = self._process()
        (result,) = self.process.grades([seen])
        if isinstance(result, Ungraded):
            raise NoContext(result.text)
        return str(result["context"])

    def close(self) -> None:
        self.process.close()
