"""LLM judge behind an OpenAI-compatible endpoint: one chat request grades one response.

A failure of the endpoint, or an answer without a score, leaves the response ungraded; it is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engines.http.client import Client, Endpoint
from slipstream.errors import EndpointError
from slipstream.grades import ENDPOINT_DOWN, Grades, Ungraded
from slipstream.rewards.functions import Answer, Unusable, number

REFUSED_TEXT = 400, 413, 422
"""Statuses of answers that refuse what one request contains, such as a text that is too long."""
MAX_QUOTED_SCORE = 80
"""Maximum characters of a judge's answer in a message."""


CUT_OFF_ADVICE = {"length": "; raise task.judge.max_tokens", "content_filter": ""}
"""Advice by the finish_reason of an answer that ended before the judge had finished."""


class JudgeEndpoint(Endpoint):
    @property
    def where(self) -> str:
        return f"the judge at {self.url}"


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Grader that asks an endpoint."""

    endpoint: JudgeEndpoint
    prompt: str
    """Template with the fields {prompt}, {response} and {ground_truth}."""
    pattern: str | None
    """Regular expression whose first group is the score; its last match counts. None reads `key`."""
    key: str | None
    """Key of the score in the JSON object that the judge answers with."""
    max_tokens: int
    name: str = "judge"

    def open(self) -> OpenJudge:
        return OpenJudge(self)


class OpenJudge:
    def __init__(self, settings: Judge) -> None:
        self.settings, self.client = settings, Client(settings.endpoint)

    async def grades(self, asked: Sequence[tuple[Any, Answer]]) -> list[Grades]:
        return list(await asyncio.gather(*(self._grade(question, answer) for question, answer in asked)))

    async def _grade(self, question: Any, answer: Answer) -> Grades:
        settings = self.settings
        text = settings.prompt.format(prompt=as_text(question), response=answer.text, ground_truth=answer.ground_truth)
        messages = [{"role": "user", "content": text}]
        body = {"model": settings.endpoint.model, "messages": messages, "max_tokens": settings.max_tokens}
        try:
            message = message_of(await self.client.ask("POST", "/chat/completions", body | {"temperature": 0.0}))
            return {"judge": score_in(message, settings)}
        except EndpointError as error:
            return Ungraded("refused" if error.status in REFUSED_TEXT else ENDPOINT_DOWN, str(error))
        except Unusable as error:
            return Ungraded(error.cause, f"the judge {error}")

    def close(self) -> None:
        """Do nothing: connections are closed with their event loop."""


def as_text(question: Any) -> str:
    """Return the text of a prompt; of several messages, the role before each."""
    if isinstance(question, str):
        return question
    if len(question) == 1:
        return str(question[0].get("content"))
    return "\n\n".join(f"{message['role']}: {message.get('content')}" for message in question)


def message_of(answer: Any) -> str:
    try:
        choice = answer["choices"][0]
        text, finish = choice["message"]["content"], str(choice.get("finish_reason"))
    except (LookupError, TypeError, AttributeError):
        text, finish = None, ""
    if finish in CUT_OFF_ADVICE:  # the score may come later in the answer
        begun = repr(text[-MAX_QUOTED_SCORE:]) if isinstance(text, str) else "it says nothing"
        raise Unusable("type", f"was cut off (finish_reason {finish!r}){CUT_OFF_ADVICE[finish]}: {begun}")
    if not isinstance(text, str):
        raise Unusable("type", "gives an answer without a message")
    return text


def score_in(message: str, settings: Judge) -> float:
    """Read the score from the judge's answer; raise Unusable if there is none."""
    excerpt = repr(message[-MAX_QUOTED_SCORE:])
    if settings.pattern is not None:
        matches = list(re.finditer(settings.pattern, message, re.DOTALL))
        if not matches:
            raise Unusable("type", f"says nothing that task.judge.pattern matches: {excerpt}")
        score: Any = matches[-1][1]
    else:
        try:
            score = json.loads(message[message.index("{") : message.rindex("}") + 1])[settings.key]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise Unusable("type", f"says no JSON object with the key {settings.key!r}: {excerpt}") from None
    try:
        if isinstance(score, bool | None):
            raise ValueError
        return number(float(score))
    except (ValueError, TypeError, OverflowError):
        raise Unusable("type", f"gives the score {str(score)[:MAX_QUOTED_SCORE]!r}, which is not a number") from None
