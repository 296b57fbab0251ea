"""Scorer for a teacher with another tokenizer: it spells responses in the teacher's tokens, for a scorer of any engine.

The teacher reads its own prompt and its canonical spelling of the response's bytes. The log-probs of its tokens are
summed over the spans between the byte boundaries that both spellings have. This is the log-prob of one spelling, and
not of all spellings of the same bytes.

Texts whose prompts are not respelled are in the teacher's tokens already. The checks before a run score such texts.

Shapes: T tokens of the student, N trained tokens, Q tokens of the teacher, S spans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.data.spelling import Respelled, Spelling, respell
from slipstream.data.teacher_context import TemplateContext
from slipstream.engines.score_checks import Probed, failed, scored
from slipstream.protocols import Respelling
from slipstream.records import (
    NOT_DRAWN,
    OPEN,
    UNPAIRED,
    Attempts,
    Floats,
    Group,
    Handle,
    Ints,
    Prompt,
    Rollout,
    Scored,
    graded,
    one_turn,
)


class RespellingScorer(Probed):
    def __init__(
        self,
        engine: Any,
        name: str,
        student: Spelling,
        teacher: Spelling,
        respelling: Respelling,
        *,
        dense: bool = False,
        context: TemplateContext | None = None,
    ) -> None:
        """Wrap the `engine` that scores the teacher's tokens, with a copy of its `context`."""
        self.engine, self.name, self.respelling = engine, name, respelling
        self.student, self.teacher = student, teacher
        self.context, self.dense = context, dense
        """True if the loss needs the teacher's hidden states."""
        self.thread = ThreadPoolExecutor(1, "respelling")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None:
        self.thread.shutdown()
        self.engine.close()

    async def score(self, group: Group) -> list[Handle]:
        rollouts = [graded(handle) for handle in group]
        if all(rollout.prompt.respelled is None for rollout in rollouts):
            own: list[Handle] = await self.engine.score(group)
            return own
        spell = asyncio.get_running_loop().run_in_executor
        spelled = await spell(self.thread, lambda: [self._spell(handle) for handle in group])
        needed = [self.dense or (found.teacher_spans >= 0).any() for found in spelled]
        asked = [
            with_tokens(handle, rollout, found.tokens)
            for handle, rollout, found, needs in zip(group, rollouts, spelled, needed, strict=True)
            if needs
        ]
        answers = iter(await self.engine.score(asked) if asked else ())
        return [
            self._scored(handle, rollout, found, next(answers) if needs else None)
            for handle, rollout, found, needs in zip(group, rollouts, spelled, needed, strict=True)
        ]

    def _spell(self, handle: Handle) -> Respelled:
        rollout = graded(handle)
        ids: Sequence[int] = rollout.tokens.tolist()
        room = self._room(rollout.prompt, handle.header.attempts)
        return respell(ids, self.student, self.teacher, self.respelling.roles, limit=room)

    def _room(self, prompt: Prompt, attempts: Attempts | None) -> int:
        """Return the largest number of the teacher's tokens of a response, beside the prompt that the teacher sees."""
        seen, times = prompt.respelled, 1
        assert seen is not None
        if self.context is not None:
            seen = self.context.before(replace(prompt, tokens=seen, respelled=None), attempts=attempts)
            times += self.context.template.count("{response}")
        return max(0, self.respelling.limit - len(seen)) // times

    def _scored(self, handle: Handle, rollout: Rollout, found: Respelled, answer: Handle | None) -> Handle:
        """Return the student's response with its part of the teacher's answer; None: the teacher was not asked."""
        if answer is not None and answer.header.finish == "error":
            return failed(handle, answer.header.cause, teacher=self.name)
        body = None if answer is None else answer.body
        logq_Q = body.teacher_logp if isinstance(body, Scored) and body.teacher_logp is not None else np.zeros(0)
        spans_N = trained_spans(found.student_spans, rollout)
        logq_N = shared_logps(logq_Q, found.teacher_spans, spans_N)
        scores: dict[str, Any] = {"teacher_action_logp": logq_N[:, None]}
        if self.dense:
            spans_N = paired_spans(spans_N, found.teacher_spans)
            assert isinstance(body, Scored) and body.teacher_hidden is not None
            scores = {"teacher_hidden": hidden_of_pairs(body.teacher_hidden, found.teacher_spans, spans_N)}
        return scored(handle, teacher=self.name, teacher_logp=logq_N, byte_spans=spans_N, **scores)


def with_tokens(handle: Handle, rollout: Rollout, tokens: Ints) -> Handle:
    """Return the response in the teacher's tokens after its prompt; one token stands for a response without any."""
    tokens = tokens if len(tokens) else np.zeros(1, np.int32)
    assert rollout.prompt.respelled is not None
    prompt = replace(rollout.prompt, tokens=rollout.prompt.respelled, respelled=None, prefix=None)
    respelled = one_turn(
        prompt,
        rollout.index,
        actions=tokens[:, None],
        action_logp=np.zeros((len(tokens), 1), np.float32),
        versions=np.full(len(tokens), NOT_DRAWN, np.int32),
        finish=rollout.finish,
    )
    return Handle(replace(handle.header, tokens=len(tokens), prompt_tokens=len(prompt.tokens)), respelled)


def trained_spans(spans_T: Ints, rollout: Rollout) -> Ints:
    """Return the spans of the trained tokens; a span with other tokens is left out, because only a part is trained."""
    mixed = np.isin(spans_T, spans_T[~rollout.loss_mask]) & (spans_T >= 0)
    return np.where(mixed, OPEN, spans_T)[rollout.loss_mask].astype(np.int32)


def paired_spans(spans_N: Ints, spans_Q: Ints) -> Ints:
    """Return the spans of one token of the student and one of the teacher; distributions are comparable only there."""
    counted = [np.unique(spans, return_counts=True) for spans in (spans_N, spans_Q)]
    single_N, single_Q = (spans[counts == 1] for spans, counts in counted)
    paired = np.intersect1d(single_N, single_Q)
    return np.where(np.isin(spans_N, paired) | (spans_N < 0), spans_N, UNPAIRED)


def shared_logps(logq_Q: Floats, spans_Q: Ints, spans_N: Ints) -> Floats:
    """Return each token's equal share of the log-prob of its span; 0 for tokens that are left out."""
    shares_N = np.zeros(len(spans_N), np.float32)
    inside_Q, inside_N = spans_Q >= 0, spans_N >= 0
    if inside_N.any():
        sums_S = np.bincount(spans_Q[inside_Q], logq_Q[inside_Q].astype(np.float64))
        counts_S = np.bincount(spans_N[inside_N], minlength=len(sums_S))
        spans = spans_N[inside_N]
        shares_N[inside_N] = sums_S[spans] / counts_S[spans]
    return shares_N


def hidden_of_pairs(hidden_QD: NDArray[Any], spans_Q: Ints, spans_N: Ints) -> NDArray[Any]:
    """Return the teacher's hidden states at the tokens of spans of one token each; 0 at other tokens."""
    hidden_ND = np.zeros((len(spans_N), hidden_QD.shape[1]), hidden_QD.dtype)
    hidden_ND[spans_N >= 0] = hidden_QD[np.flatnonzero(np.isin(spans_Q, spans_N[spans_N >= 0]))]
    return hidden_ND
