"""Scorer and sampler for a teacher with another tokenizer, around a scorer of any engine and a native sampler.

The scorer spells responses in the teacher's tokens, the sampler spells the teacher's answers in the student's. The
teacher reads its own prompt and its canonical spelling of the response's bytes. The log-probs of its tokens are summed
over the spans between the byte boundaries that both spellings have. This is the log-prob of one spelling, and not of
all spellings of the same bytes.

In an episode each turn of the student is spelled by itself. All that it sees between its turns, such as results of
tools, is written by the teacher's own chat template. Turns that follow something unknown are left out. Texts whose
prompts are not respelled are in the teacher's tokens already. The checks before a run score such texts.

Shapes: T tokens of the student, N trained tokens, Q tokens of the teacher, S spans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.config.losses import LossSpec
from slipstream.data.spelling import Respelled, Spelling, respell, shared_layout
from slipstream.data.teacher_context import TemplateContext
from slipstream.engines.score_checks import Probed, failed, kl_of_known, probability, scored
from slipstream.environments.chat.renderer import Renderer
from slipstream.errors import DataError
from slipstream.protocols import Draw, Respelling, Sampling
from slipstream.records import (
    ABSENT,
    NOT_DRAWN,
    OPEN,
    TOO_LONG,
    UNPAIRED,
    UNWRITTEN,
    Attempts,
    Floats,
    Given,
    Group,
    Handle,
    Ints,
    Prompt,
    Rollout,
    Scored,
    given_group,
    graded,
    header_of,
    one_turn,
    turn_places,
    unfinished,
)


class RespellingSampler:
    """Sampler whose model draws in its own tokens, and whose answers are spelled in the student's tokens."""

    def __init__(self, draw: Draw, name: str, student: Spelling, teacher: Spelling, respelling: Respelling) -> None:
        """Wrap the method that draws."""
        self.draw, self.name, self.student, self.teacher = draw, name, student, teacher
        self.roles = {theirs: ours for ours, theirs in reversed([*respelling.roles.items()])}
        """The student's token for each special token of the teacher; of several, the first one in `roles`."""
        self.end = respelling.end

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        """Return answers in the student's tokens; an incomplete group stays in the teacher's until it is continued."""
        assert prompt.respelled is not None
        asked = replace(prompt, tokens=prompt.respelled, respelled=None)
        drawn = await self.draw(asked, sampling, begun)
        if unfinished(drawn):
            return drawn
        return [self._spelled(prompt, handle, sampling.max_tokens) for handle in drawn]

    def _spelled(self, prompt: Prompt, handle: Handle, longest: int) -> Handle:
        """Return an answer in the student's tokens, cut to the longest answer; it fails if it has none."""
        drawn = graded(handle)
        ids = drawn.tokens.tolist()
        if drawn.finish == "eos":  # any end of the teacher is the student's
            ids[-1] = self.end
        found = respell(ids, self.teacher, self.student, self.roles)
        if not len(found.tokens):
            return failed(handle, f"the student has no tokens for the answer of {self.name}", teacher=self.name)
        whole = drawn.finish == "eos" and len(found.tokens) <= longest and found.student_spans[-1] >= 0
        tokens = found.tokens[:longest]
        known = Given(tokens, np.full(len(tokens), np.nan, np.float32), "eos" if whole else "length")
        (given,) = given_group(prompt, [known])
        rollout = replace(given.body, index=drawn.index, episode=drawn.episode)
        return Handle(header_of(rollout, cause=handle.header.cause), rollout)


class Spelled(NamedTuple):
    """A prompt and a response in the teacher's tokens."""

    prompt: Ints
    response: Respelled

    @property
    def is_scored(self) -> bool:
        return bool((self.response.teacher_spans >= 0).any())


class RespellingScorer(Probed):
    def __init__(
        self,
        engine: Any,
        name: str,
        student: Spelling,
        teacher: Spelling,
        respelling: Respelling,
        *,
        loss: LossSpec,
        supervised: LossSpec | None = None,
        context: TemplateContext | None = None,
        renderers: Mapping[str, Renderer] = MappingProxyType({}),
    ) -> None:
        """Wrap the `engine`, with a copy of its `context`. `renderers` write the messages of each environment.

        `supervised` is the loss of supervised updates; None if it needs no scores.
        """
        self.engine, self.name, self.respelling, self.renderers = engine, name, respelling, renderers
        self.student, self.teacher = student, teacher
        self.context, self.losses = context, {False: loss}
        """Losses that need the scores, by whether a response is for a supervised update."""
        if supervised is not None:
            self.losses[True] = supervised
        self.shared_W: Ints = np.zeros(0, np.int32)
        """The student's token for each token of the teacher, or ABSENT; empty if no loss needs the teacher's top-k."""
        if any(each.cache == "teacher_topk" for each in self.losses.values()):
            self.shared_W = students_tokens(student, teacher, respelling)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def score(self, group: Group) -> list[Handle]:
        return await self._score(group)

    async def relabel(self, group: Group) -> list[Handle]:
        return await self._score(group, again=True)

    async def _score(self, group: Group, *, again: bool = False) -> list[Handle]:
        """Score responses; if `again`, record how far the scores moved from those of the handles."""
        rollouts = [graded(handle) for handle in group]
        if all(rollout.prompt.respelled is None for rollout in rollouts):
            own: list[Handle] = await self.engine.score(group)
            return own
        spelled, loss = [self._spell(handle) for handle in group], self.losses[rollouts[0].prompt.supervised]
        asked = {
            i: with_tokens(group[i], rollouts[i], each)
            for i, each in enumerate(spelled)
            if not isinstance(each, Handle) and (loss.cache == "hidden" or each.is_scored)
        }
        answers = dict(zip(asked, await self.engine.score([*asked.values()]) if asked else (), strict=True))
        return [
            each
            if isinstance(each, Handle)
            else self._scored(group[i], rollouts[i], each, answers.get(i), loss, again=again)
            for i, each in enumerate(spelled)
        ]

    def _spell(self, handle: Handle) -> Spelled | Handle:
        """Return the prompt and the response in the teacher's tokens; a failed member if its template refuses them."""
        rollout = graded(handle)
        own, conversation = rollout.prompt.respelled, rollout.conversation
        assert own is not None
        try:
            seen = own if conversation is None else self._prompt(rollout.prompt, conversation[0])
            if seen is None:
                return Spelled(own, nothing_of(rollout))
            room = self._room(rollout.prompt, seen, handle.header.attempts)
            return Spelled(seen, self._response(rollout, conversation, room))
        except DataError as error:
            return failed(handle, f"teacher {self.name} cannot read it: {error}", teacher=self.name)

    def _prompt(self, prompt: Prompt, first: Any) -> Ints | None:
        """Return what stands before an episode's first turn, in the teacher's chat template; None: it is unknown."""
        if first is None:
            return None
        if first.get("added") == []:
            return prompt.respelled
        renderer = self.renderers[prompt.environment]
        if "rebuilt" in first:
            return renderer.open(first["rebuilt"], first["tools"])
        assert prompt.respelled is not None
        return renderer.insert(prompt.respelled, first["added"])

    def _response(self, rollout: Rollout, conversation: Sequence[Any] | None, room: int) -> Respelled:
        """Spell a text as a whole, or each turn of an episode by itself behind the messages before it."""
        if conversation is None:
            return self._respell(rollout.tokens, room)
        found = nothing_of(rollout)
        for start, stop in turn_places(rollout):
            turn, seen_Q = int(rollout.turn[start]), found.tokens[:0]
            if turn < 0:
                continue
            if turn and conversation[turn] is None:
                break
            if turn:
                seen_Q = self.renderers[rollout.prompt.environment].extend(found.tokens, conversation[turn])
            said = self._respell(rollout.tokens[start:stop], max(0, room - len(found.tokens) - len(seen_Q)))
            found = with_turn(found, start, seen_Q, said)
            if found.student_spans[stop - 1] in (UNWRITTEN, TOO_LONG):
                found.student_spans[stop:] = found.student_spans[stop - 1]
                break
        return replace(found, tokens=found.tokens[:room], teacher_spans=found.teacher_spans[:room])

    def _respell(self, tokens_T: Ints, room: int) -> Respelled:
        ids: Sequence[int] = tokens_T.tolist()
        return respell(ids, self.student, self.teacher, self.respelling.roles, limit=room)

    def _room(self, prompt: Prompt, seen: Ints, attempts: Attempts | None) -> int:
        """Return the largest number of the teacher's tokens of a response, beside the prompt that the teacher sees."""
        times = 1
        if self.context is not None:
            seen = self.context.before(replace(prompt, tokens=seen, respelled=None), attempts=attempts)
            times += self.context.template.count("{response}")
        return max(0, self.respelling.limit - len(seen)) // times

    def _scored(
        self, handle: Handle, rollout: Rollout, spelled: Spelled, answer: Handle | None, loss: LossSpec, *, again: bool
    ) -> Handle:
        """Return the student's response with its part of the teacher's answer; None: the teacher was not asked."""
        found = spelled.response
        if answer is not None and answer.header.finish == "error":
            return failed(handle, answer.header.cause, teacher=self.name)
        body = None if answer is None else answer.body
        logq_Q: Floats = np.zeros(len(found.teacher_spans))  # no scores of what stands for a response
        if spelled.is_scored:
            assert isinstance(body, Scored) and body.teacher_logp is not None
            logq_Q = body.teacher_logp
        spans_N = trained_spans(found.student_spans, rollout)
        logq_N = shared_logps(logq_Q, found.teacher_spans, spans_N)
        scores: dict[str, Any] = {"teacher_action_logp": logq_N[:, None]}
        moved: dict[str, Any] = {"supervision_kl": kl_of_spans(logq_N, spans_N, handle.body)} if again else {}
        if loss.cache == "hidden":
            assert isinstance(body, Scored) and body.teacher_hidden is not None
            whole_N, scores = spans_N, {}
            spans_N = first_of_spans(whole_N) if loss.merges else paired_spans(whole_N, found.teacher_spans)
            if loss.merges:
                drawn_N = rollout.logp[rollout.loss_mask]
                scores["later_logp"] = later_logps((drawn_N, whole_N), (logq_Q, found.teacher_spans), spans_N)
            scores["teacher_hidden"] = rows_of_spans(body.teacher_hidden, found.teacher_spans, spans_N)
        if loss.cache == "teacher_topk":
            spans_N = paired_spans(spans_N, found.teacher_spans)
            ids_NK, topk_NK = self._best(rollout, found, body, spans_N, loss.k)
            scores = {"teacher_ids": ids_NK, "teacher_topk_logp": topk_NK}
        scores |= moved | {"teacher_logp": logq_N, "byte_spans": spans_N}
        return scored(handle, teacher=self.name, checked=True, **scores)

    def _best(
        self, rollout: Rollout, found: Respelled, body: Scored | None, spans_N: Ints, k: int
    ) -> tuple[Ints, Floats]:
        """Return the student's ids of the teacher's k most likely tokens at spans of one token, and their log-probs."""
        ids_NK, logp_NK = np.full((len(spans_N), k), ABSENT, np.int32), np.full((len(spans_N), k), -np.inf, np.float32)
        if body is None or not len(found.tokens):
            return ids_NK, logp_NK
        assert body.teacher_ids is not None and body.teacher_topk_logp is not None
        theirs_NK, known_NK, written_N1 = (
            rows_of_spans(rows_QX, found.teacher_spans, spans_N)
            for rows_QX in (body.teacher_ids, body.teacher_topk_logp, found.tokens[:, None])
        )
        last = len(self.shared_W) - 1
        ours_NK = np.where(theirs_NK > last, ABSENT, self.shared_W[np.minimum(theirs_NK, last)])
        # a token with the emitted bytes that the teacher did not write has another log-prob than the emitted one
        other_NK = (ours_NK == rollout.tokens[rollout.loss_mask][:, None]) & (theirs_NK != written_N1)
        has_NK = (spans_N >= 0)[:, None] & (ours_NK != ABSENT) & ~other_NK
        ids_NK[has_NK], logp_NK[has_NK] = ours_NK[has_NK], known_NK[has_NK]
        return ids_NK, logp_NK


def students_tokens(student: Spelling, teacher: Spelling, respelling: Respelling) -> Ints:
    """Return the student's token for each token of the teacher, ABSENT for none."""
    size = 1 + max([*student.bytes_of, *respelling.roles])
    layout_V = shared_layout(student, teacher, respelling.roles, sizes=(size, respelling.vocabulary))[:size]
    ours_W = np.full(respelling.vocabulary, ABSENT, np.int32)
    ours_W[layout_V[layout_V >= 0]] = np.flatnonzero(layout_V >= 0)
    return ours_W


def nothing_of(rollout: Rollout) -> Respelled:
    """Return a spelling without tokens, in which all of the response is left out."""
    none = np.zeros(0, np.int32)
    return Respelled(none, none, np.full(len(rollout.tokens), UNWRITTEN, np.int32))


def with_turn(before: Respelled, start: int, seen_Q: Ints, said: Respelled) -> Respelled:
    """Add a turn, which begins at the student's token `start`, and the tokens that the teacher reads before it."""
    first = 1 + int(before.teacher_spans.max(initial=-1))
    theirs, ours = (np.where(of >= 0, of + first, of) for of in (said.teacher_spans, said.student_spans))
    student_T = before.student_spans.copy()
    student_T[start : start + len(ours)] = ours
    tokens = np.concatenate([before.tokens, seen_Q, said.tokens]).astype(np.int32)
    return Respelled(tokens, np.concatenate([before.teacher_spans, np.full(len(seen_Q), OPEN), theirs]), student_T)


def with_tokens(handle: Handle, rollout: Rollout, spelled: Spelled) -> Handle:
    """Return the response in the teacher's tokens after its prompt; one token stands for a response without any."""
    seen, tokens = spelled.prompt, spelled.response.tokens
    if not spelled.is_scored:
        seen, tokens = seen[:1], np.zeros(1, np.int32)
    prompt = replace(rollout.prompt, tokens=seen, respelled=None, prefix=None)
    respelled = one_turn(
        prompt,
        rollout.index,
        actions=tokens[:, None],
        action_logp=np.zeros((len(tokens), 1), np.float32),
        versions=np.full(len(tokens), NOT_DRAWN, np.int32),
        finish=rollout.finish,
    )
    return Handle(handle.header, respelled)


def trained_spans(spans_T: Ints, rollout: Rollout) -> Ints:
    """Return the spans of the trained tokens; a span with other tokens is left out, because only a part is trained."""
    if rollout.loss_mask.all():
        return spans_T.astype(np.int32)
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
    places_Q, places_N = np.maximum(spans_Q, OPEN) + 1, np.maximum(spans_N, OPEN) + 1  # 0: outside of all spans
    counts_S = np.bincount(places_N)
    sums_S = np.bincount(places_Q, logq_Q, minlength=len(counts_S))
    sums_S[:1] = 0
    shares_N: Floats = (sums_S[places_N] / counts_S[places_N]).astype(np.float32)
    return shares_N


def first_of_spans(spans_N: Ints) -> Ints:
    """Return the spans of the first token of each span; later tokens are UNPAIRED."""
    is_first = np.isin(np.arange(len(spans_N)), np.unique(spans_N, return_index=True)[1])
    return np.where(is_first | (spans_N < 0), spans_N, UNPAIRED)


def later_logps(drawn: tuple[Floats, Ints], scored: tuple[Floats, Ints], first_N: Ints) -> Floats:
    """Return at the first token of each span the log-probs of its later tokens, [N, 2], of student and teacher.

    `drawn` and `scored` are the log-probs and spans of their tokens, `first_N` is of `first_of_spans`.
    """
    later_N2 = np.zeros((len(first_N), 2), np.float32)
    inside_N = first_N >= 0
    for side, (logp, spans) in enumerate((drawn, scored)):
        after = (first_of_spans(spans) == UNPAIRED) & (spans >= 0)
        size = 1 + int(max(first_N.max(initial=-1), spans.max(initial=-1)))
        later_N2[inside_N, side] = np.bincount(spans[after], logp[after], minlength=size)[first_N[inside_N]]
    return later_N2


def kl_of_spans(logq_N: Floats, spans_N: Ints, before: Scored) -> Floats:
    """Return each token's equal share of a lower bound of KL(new ‖ old) of its span; NaN for tokens without scores.

    It is the KL of two outcomes: the bytes that were written, and all others.
    """
    assert before.teacher_logp is not None and before.byte_spans is not None
    inside_N = (spans_N >= 0) & ((before.byte_spans >= 0) | (before.byte_spans == UNPAIRED))
    spans, places, counts = np.unique(spans_N[inside_N], return_inverse=True, return_counts=True)
    p_S1, q_S1 = (
        probability(np.bincount(places, logq[inside_N], minlength=len(spans)).astype(np.float64))[:, None]
        for logq in (logq_N, before.teacher_logp)
    )
    kl_N = np.full(len(spans_N), np.nan, np.float32)
    kl_N[inside_N] = (kl_of_known(p_S1, q_S1) / counts)[places]
    return kl_N


def rows_of_spans(rows_QX: NDArray[Any], spans_Q: Ints, spans_N: Ints) -> NDArray[Any]:
    """Return the teacher's row at the first of its tokens in the span of each token; zeros at tokens left out."""
    rows_NX = np.zeros((len(spans_N), rows_QX.shape[1]), rows_QX.dtype)
    spans, firsts = np.unique(spans_Q, return_index=True)
    rows_NX[spans_N >= 0] = rows_QX[firsts[np.searchsorted(spans, spans_N[spans_N >= 0])]]
    return rows_NX
