"""Settings of built-in rewards: a section for each reward that has settings, `[task.NAME]`."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from slipstream.config.base import Section


class FormatConfig(Section):
    tags: tuple[str, ...] = ("think", "answer")
    """Tags of which the whole response must consist, in this order, each once: <think>…</think><answer>…</answer>.
    Other text is allowed inside of tags only."""
    pattern: str | None = None
    """Regular expression that the whole response must match, instead of `tags`; a dot matches line ends too. None uses
    the tags."""

    @field_validator("tags")
    @classmethod
    def _check_tags(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        wrong = next((tag for tag in tags if not re.fullmatch(r"[\w-]+", tag) or tags.count(tag) > 1), None)
        if wrong is not None or not tags:
            raise ValueError('write the names of different tags without brackets, such as ["think", "answer"]')
        return tags

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        return None if pattern is None else check_pattern(pattern)

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
        if self.pattern is not None and self.changed("tags"):
            raise ValueError("pattern and tags both describe the response: keep one of them")
        return self


class OverlongConfig(Section):
    buffer: int = Field(ge=1)
    """Number of tokens below sampler.max_tokens in which the penalty grows from 0 to its full size, linearly."""
    penalty: float = Field(1.0, gt=0)
    """Penalty of a response with sampler.max_tokens tokens; its reward is the negative of this number."""


def check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern
