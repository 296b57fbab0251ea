"""The pipeline's four records, Prompt → Rollout → Scored → Batch, and the handles that refer to them.

The module uses numpy only. Arrays of all tokens have T rows; arrays of trained tokens have N rows, in token order.
Draws are tokens sampled at one position; the first draw is the emitted token. A row describes the prediction *of* its
token, so no array is ever shifted. A record with wrong shapes or shifted rows raises ValueError.

Shapes: T tokens after the prompt, N trained tokens, M cached actions, K teacher's top-k, D teacher's hidden size; of
the experts, L routers and X experts that each chooses for a token.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count, pairwise, zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.grades import ENDPOINT_DOWN, Ungraded

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]
Finish = Literal["eos", "length", "turns", "time", "error", "released"]
"""Reason why a response ended. `released`: sampling was interrupted at a token, and can be continued."""


NOT_DRAWN = -1
"""Version of tokens that no weights of the student drew: observed tokens, and all tokens of an off-policy response."""
OPEN, UNWRITTEN, TOO_LONG, UNPAIRED = -1, -2, -3, -4
"""Numbers in place of a span, for tokens about which a teacher with another tokenizer says nothing: at the end of a
response that was cut, from the first text that the teacher cannot write on, and beyond its context. UNPAIRED: in a span
of several tokens, for a loss that compares distributions; if it merges spans, only tokens after the first of a span."""
ABSENT = -1
"""Token id in place of a token of the teacher that the student does not have."""
REPEATED_N = 4
"""Number of tokens of the n-grams whose repetition is measured."""
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
AGELESS = 2**53
"""Version in place of the oldest one, for samples without a token of the student: they never get old."""


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed for these parts; every machine and process derives the same one."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def is_json(value: Any) -> bool:
    """Return whether a value survives a round trip through JSON; dates, bytes and tuples do not."""
    match value:
        case dict():
            return all(isinstance(key, str) and is_json(below) for key, below in value.items())
        case list():
            return all(map(is_json, value))
        case _:
            return value is None or isinstance(value, bool | int | float | str)


def _rows_of(array: NDArray[Any], n: int) -> bool:
    return array.ndim == 2 and array.shape[0] == n and array.shape[1] > 0


def _same(a: Floats, b: Floats) -> bool:
    """Compare two arrays; NaN equals NaN."""
    return np.array_equal(a, b) or np.array_equal(a, b, equal_nan=True)


def _topk_fault(
    record: Any, ids_name: str, logp_name: str, emitted: Ints, emitted_logp_name: str, emitted_logp: Floats
) -> str | None:
    """Check a table of most likely ids and their log-probs against the emitted tokens and their log-probs."""
    ids, logp = getattr(record, ids_name), getattr(record, logp_name)
    if ids is None and logp is None:
        return None
    if ids is None or logp is None:
        return f"{ids_name} and {logp_name} need each other"
    if not _rows_of(ids, len(emitted)):
        return f"{ids_name} has shape {ids.shape}, must be [{len(emitted)}, K]"
    if logp.shape != ids.shape:
        return f"{logp_name} and {ids_name} differ in shape"
    if not np.where(ids == emitted[:, None], logp == emitted_logp[:, None], True).all():
        return f"{logp_name} is not {emitted_logp_name} on the emitted token (a shifted row?)"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """A response that the student does not draw."""

    tokens: Ints
    logp: Floats
    """Log-prob of each token under the policy that drew it; NaN if unknown."""
    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One prompt for the student. `number` is the position in the order of submission; `seed` is derived from it."""

    id: str
    number: int
    tokens: Ints
    data_source: str = "default"
    ground_truth: Any = None
    teacher: str = ""
    """Name of the teacher that will score the responses; empty for a run without teachers."""
    environment: str = ""
    """Name of the environment of the responses; empty if the run has one or none."""
    seed: int = 0
    offset: int = 0
    """Number of response tokens that earlier calls sampled and that `tokens` now includes; sampling continues there."""
    first: int = 0
    """Index in the group of the first response to sample; a continued response keeps its index."""
    meta: dict[str, Any] = field(default_factory=dict)
    """All other columns of the data row, without values that JSON cannot represent."""
    hidden: list[str] = field(default_factory=list)
    """Paths in `meta` of the answer, which agents must not see."""
    asked: Any = None
    """Prompt as text or messages, for agents; None if the run has no agent."""
    place: str = ""
    """File and line of the data row; empty if unknown."""
    source: str = ""
    """Origin of the responses: data, teacher or file; empty if the student draws them."""
    supervised: bool = False
    """True if the responses are for the supervised updates."""
    prefix: Ints | None = None
    """Tokens with which every response begins; the student draws what follows. None: the student draws all tokens."""
    respelled: Ints | None = None
    """The prompt in the tokens of its teacher, in the teacher's own chat template. None: the teacher has the student's
    tokenizer, or `tokens` are the teacher's."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or len(self.tokens) == 0:
            raise ValueError(f"prompt {self.id}: needs at least one token")


@dataclass(frozen=True, slots=True, eq=False)
class SamplingSupport:
    """For each trained token, the ids that top-p, top-k and min-p left to sample from."""

    ids: Ints
    """Ids of all trained tokens, concatenated."""
    sizes: Ints
    """Number of ids of each trained token, [N]."""

    def rows(self) -> list[Ints]:
        return np.split(self.ids, np.cumsum(self.sizes)[:-1])


def support_from_ids(rows: Sequence[Ints]) -> SamplingSupport:
    return SamplingSupport(np.concatenate(rows).astype(np.int32), np.array([len(row) for row in rows], np.int32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """A lineage: all tokens after one prompt, sampled or observed, with the origin of every sampled token.

    `loss_mask` is true where a token was sampled and is trained. If several lineages of an episode share a token, only
    the first trains it. For trained tokens, `versions` is the version of the sampling weights, and `turn` the number of
    the sampling call. Their `logp` is the behaviour log-prob: the engine's, under the processed distribution (after
    temperature, top-p and so on). `actions` and `action_logp` have one row per trained token: M i.i.d. draws from that
    distribution, the emitted token first. They are the cache that the teacher scores. `kept` is the sampling support;
    None means the whole vocabulary, or unknown.

    For other tokens `versions` is −1 and `logp` is 0, and `turn` is −1 outside of every turn. Do not use these values.

    If the prompt has a `source`, the student drew no token. Then `versions` is −1 everywhere, because no version of the
    weights is concerned. `logp` belongs to the policy that drew the tokens, and is NaN if that is unknown, so that a
    loss that uses it cannot be finite.

    `index` identifies a row of a group. `episode` and `branch` identify the rows of one episode.
    """

    prompt: Prompt
    index: int
    episode: int
    branch: int = 0
    tokens: Ints
    versions: Ints
    logp: Floats
    turn: Ints
    loss_mask: NDArray[np.bool_]
    actions: Ints
    action_logp: Floats
    best_ids: Ints | None = None
    """Most likely ids under the sampling policy at each trained position, [N, K], and log-probs; None: unrecorded."""
    best_logp: Floats | None = None
    replaced: NDArray[np.bool_] | None = None
    """True at trained tokens that the teacher put in place of the student's draw (`sampler.teacher_replaces`), [N].
    `logp` is the log-prob of the mixture of both, which drew all trained tokens. None: the student drew alone."""
    router: Ints | None = None
    """Experts that each router chose in the pass that predicted the token, [T, L, X]; the largest number of the type
    where that is unknown. None: unrecorded."""
    prompt_router: Ints | None = None
    """The same for the prompt's tokens from the second on, [tokens − 1, L, X]. Together with `router` these are all
    passes that a trained token depends on."""
    finish: Finish
    kept: SamplingSupport | None = None
    conversation: list[Any] | None = None
    """Messages in the tokens outside of the turns, as JSON, for a teacher that writes them in its own chat template.
    Entry 0 is of the prompt: {"added": messages} after the row's prompt, or {"rebuilt": messages, "tools": tools} in
    its place. Entry n holds the messages before turn n. None as an entry: unknown. None: the response is one text."""
    rewards: dict[str, float] = field(default_factory=dict)
    outcome: dict[str, float] = field(default_factory=dict)
    """Rewards and counts that an episode's environment reports (`reward`, `reward/NAME`); empty without environment."""
    turn_rewards: Floats | None = None
    """Rewards of the first turns, in their order; a turn behind them has none. None: no turn has a reward."""

    def __post_init__(self) -> None:
        if fault := self._fault() or (self.kept and self._fault_of_kept(self.kept)):
            raise ValueError(f"rollout {self.prompt.id}/{self.index}: {fault}")

    def _fault(self) -> str | None:
        t, trained = self.tokens.size, self.loss_mask
        if self.tokens.ndim != 1 or t == 0:
            return f"tokens has shape {self.tokens.shape}, needs at least one"
        for name in ("versions", "logp", "turn", "loss_mask"):
            if (shape := getattr(self, name).shape) != (t,):
                return f"{name} has shape {shape}, tokens ({t},)"
        if trained.dtype != np.bool_:
            return f"loss_mask is {trained.dtype}, must be bool"
        n = self.trained_tokens
        if not _rows_of(self.actions, n):
            return f"actions has shape {self.actions.shape}, must be [{n}, M], a row for each trained token"
        if self.action_logp.shape != self.actions.shape:
            return "action_logp and actions differ in shape"
        if not np.array_equal(self.actions[:, 0], self.tokens[trained]):
            return "actions[:, 0] is not the emitted token (a shifted row?)"
        if not _same(self.action_logp[:, 0], self.logp[trained]):
            return "action_logp[:, 0] is not logp (a shifted row?)"
        if self.replaced is not None and self.replaced.shape != (n,):
            return f"replaced has shape {self.replaced.shape}, must be ({n},), an entry for each trained token"
        if (self.router is None) != (self.prompt_router is None):
            return "router and prompt_router need each other"
        if self.router is not None and self.prompt_router is not None:
            if self.router.ndim != 3 or len(self.router) != t:
                return f"router has shape {self.router.shape}, must be [{t}, L, X]"
            if (rows := len(self.prompt.tokens) - 1) > len(self.prompt_router):
                return f"prompt_router has {len(self.prompt_router)} rows, must have {rows}"
        for name, ids in (("tokens", self.tokens), ("actions", self.actions)):
            if ids.dtype.kind not in "iu":
                return f"{name} is {ids.dtype}, must be integers"
            if ids.size and ids.min() < 0:
                return f"{name} holds a negative id, which no sampler draws"
        impossible = self.actions[self.action_logp == -np.inf]
        if impossible.size:
            return f"actions holds {impossible[:1]}, whose log-prob is -inf: no sampler draws it"
        if fault := _topk_fault(self, "best_ids", "best_logp", self.tokens[trained], "logp", self.logp[trained]):
            return fault
        turns = self.turn[trained]
        if n and turns.min() < 0:
            return "turn is -1 at a trained token, which means that the token was not sampled"
        if (turns[1:] < turns[:-1]).any():
            return "turn decreases: calls must be numbered in their order"
        if self.turn_rewards is not None and not np.isfinite(self.turn_rewards).all():
            return f"turn_rewards is {self.turn_rewards}: a reward must be a finite number"
        for name, reward in self.rewards.items():
            if not math.isfinite(reward):
                return f"reward {name!r} is {reward}: a reward must be a finite number"
        return None

    def _fault_of_kept(self, kept: SamplingSupport) -> str | None:
        n = self.trained_tokens
        if kept.sizes.shape != (n,):
            return f"kept.sizes has shape {kept.sizes.shape}, must be ({n},), an entry for each trained token"
        if kept.ids.shape != (kept.sizes.sum(),):
            return f"kept.ids has shape {kept.ids.shape}, must be ({kept.sizes.sum()},), the sum of kept.sizes"
        row = np.arange(n) << 32
        if not np.isin(row[:, None] + self.actions, np.repeat(row, kept.sizes) + kept.ids).all():
            return "actions holds ids that are not in kept, so that no sampler could draw them"
        return None

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())


TOKENS = ("tokens", "versions", "logp", "turn", "loss_mask", "router")
"""Arrays of a rollout with one row per token."""
TRAINED = ("actions", "action_logp", "best_ids", "best_logp", "replaced")
"""Arrays of a rollout with one row per trained token."""


def continued(begun: Rollout, rest: Rollout) -> Rollout:
    """Join the two parts of an interrupted response into one rollout; no record of the interruption remains."""
    return replace(begun, finish=rest.finish, **_ends(TOKENS + TRAINED, (begun, rest)), kept=_all_kept((begun, rest)))


def lineage(
    prompt: Prompt, index: int, parts: Sequence[Rollout | Ints], *, conversation: Sequence[Any] = (), **rest: Any
) -> Rollout:
    """Build an episode from responses, each sampled in one call, and the observed tokens between them.

    `conversation` is recorded in `Rollout.conversation` if a teacher reads it.
    """
    if conversation and prompt.respelled is not None:
        rest["conversation"] = json.loads(json.dumps(conversation, default=str))
    said = [part for part in parts if isinstance(part, Rollout)]
    calls = count()
    turn = [np.full(len(part.tokens), next(calls)) if isinstance(part, Rollout) else -_ones(part) for part in parts]
    along: dict[str, list[Any]] = {
        "tokens": [part.tokens if isinstance(part, Rollout) else part.astype(said[0].tokens.dtype) for part in parts],
        "versions": [part.versions if isinstance(part, Rollout) else -_ones(part) for part in parts],
        "logp": [part.logp if isinstance(part, Rollout) else 0 * _ones(part) for part in parts],
        "loss_mask": [part.loss_mask if isinstance(part, Rollout) else _ones(part) < 0 for part in parts],
    }
    found: dict[str, Any] = _ends(TRAINED, said)
    found |= {name: np.concatenate(arrays).astype(getattr(said[0], name).dtype) for name, arrays in along.items()}
    found["turn"] = np.concatenate(turn).astype(np.int32)
    if all(part.router is not None for part in said):
        found |= _all_routers(len(prompt.tokens), parts, said[0])
    return Rollout(prompt=prompt, index=index, episode=index, **found, kept=_all_kept(said), **rest)


def _ones(ids: Ints) -> Ints:
    return np.ones(len(ids), np.int32)


def _ends(names: Iterable[str], parts: Sequence[Rollout]) -> dict[str, Any]:
    """Concatenate the named arrays of all parts; leave out arrays that are None."""
    return {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in names
        if getattr(parts[0], name) is not None
    }


def _all_routers(start: int, parts: Sequence[Rollout | Ints], first: Rollout) -> dict[str, Ints]:
    """Join the routers' choices; the call after an observation read its tokens, and recorded their choices."""
    rows, prompt = list[Ints](), start - 1
    assert first.router is not None and first.prompt_router is not None
    for part, following in zip_longest(parts, parts[1:]):
        if isinstance(part, Rollout):
            assert part.router is not None
            rows.append(part.router)
        else:
            unknown = np.full(
                (len(part), *first.router.shape[1:]), np.iinfo(first.router.dtype).max, first.router.dtype
            )
            read = following.prompt_router if isinstance(following, Rollout) else None
            rows.append(unknown if read is None else read[start - 1 : start - 1 + len(part)])
        start += len(rows[-1])
    return {"router": np.concatenate(rows), "prompt_router": first.prompt_router[:prompt]}


def _all_kept(parts: Sequence[Rollout]) -> SamplingSupport | None:
    kept = [part.kept for part in parts if part.kept is not None]
    if len(kept) < len(parts):
        return None
    return SamplingSupport(np.concatenate([each.ids for each in kept]), np.concatenate([each.sizes for each in kept]))


def turns_of(rollout: Rollout) -> list[tuple[bool, Ints]]:
    """Split a rollout into sampled turns and the observations between them: pairs of (True if sampled, tokens)."""
    return [(bool(rollout.turn[start] >= 0), rollout.tokens[start:stop]) for start, stop in turn_places(rollout)]


def parts_of(rollout: Rollout) -> list[Rollout | Ints]:
    """Invert `lineage`: return every response as its call returned it, and the observed tokens between them."""
    return [
        part_of(rollout, start, stop) if rollout.turn[start] >= 0 else rollout.tokens[start:stop]
        for start, stop in turn_places(rollout)
    ]


def turn_places(rollout: Rollout) -> Iterator[tuple[int, int]]:
    """Yield start and stop of every sampled turn and of the observations between them."""
    return pairwise([0, *(np.flatnonzero(np.diff(rollout.turn)) + 1), len(rollout.tokens)])


def part_of(rollout: Rollout, start: int, stop: int) -> Rollout:
    """Return the tokens from `start` to `stop`, which one call sampled, as that call would return them."""
    first, last = (int(rollout.loss_mask[:at].sum()) for at in (start, stop))
    found: dict[str, Any] = {name: of[start:stop] for name in TOKENS if (of := getattr(rollout, name)) is not None}
    found |= {name: of[first:last] for name in TRAINED if (of := getattr(rollout, name)) is not None}
    if rollout.router is not None and rollout.prompt_router is not None:
        found["prompt_router"] = np.concatenate([rollout.prompt_router, rollout.router[:start]])
    kept = None if rollout.kept is None else support_from_ids(rollout.kept.rows()[first:last])
    return replace(rollout, **found | {"turn": np.zeros(stop - start, np.int32)}, kept=kept)


def one_turn(
    prompt: Prompt,
    index: int,
    *,
    actions: Ints,
    action_logp: Floats,
    versions: Ints,
    finish: Finish,
    best_ids: Ints | None = None,
    best_logp: Floats | None = None,
    replaced: NDArray[np.bool_] | None = None,
    kept: SamplingSupport | None = None,
) -> Rollout:
    """Build an episode of one response, sampled in one call."""
    return Rollout(
        prompt=prompt,
        index=index,
        episode=index,
        tokens=actions[:, 0],
        versions=versions,
        logp=action_logp[:, 0],
        turn=np.zeros(len(actions), np.int32),
        loss_mask=np.ones(len(actions), np.bool_),
        actions=actions,
        action_logp=action_logp,
        best_ids=best_ids,
        best_logp=best_logp,
        replaced=replaced,
        finish=finish,
        kept=kept,
    )


def given_group(prompt: Prompt, responses: Sequence[Given]) -> list[Handle]:
    """Return the group of an off-policy prompt from responses that exist already."""
    group = []
    for index, given in enumerate(responses):
        versions = np.full(len(given.tokens), NOT_DRAWN, np.int32)
        rollout = one_turn(
            prompt,
            index,
            actions=given.tokens[:, None],
            action_logp=given.logp[:, None],
            versions=versions,
            finish=given.finish,
        )
        group.append(Handle(header_of(rollout), rollout))
    return group


def after_prefix(prompt: Prompt) -> Prompt:
    """Return the prompt that a sampler continues, which includes the prefix of the response."""
    assert prompt.prefix is not None
    tokens = np.concatenate([prompt.tokens, prompt.prefix.astype(prompt.tokens.dtype)])
    return replace(prompt, tokens=tokens, offset=prompt.offset + len(prompt.prefix), prefix=None)


def with_prefix(prompt: Prompt, handle: Handle) -> Handle:
    """Return a response to `after_prefix(prompt)` as a response to `prompt`, whose prefix is observed."""
    assert prompt.prefix is not None
    part: Rollout = handle.body
    found = lineage(prompt, part.index, [prompt.prefix, part], finish=part.finish)
    return Handle(replace(header_of(found), finish=handle.header.finish), found)


def without_prefix(handle: Handle) -> Handle:
    """Undo `with_prefix` for a response that a sampler will continue."""
    rollout: Rollout = handle.body
    _, part = parts_of(rollout)
    assert isinstance(part, Rollout)
    return Handle(handle.header, replace(part, prompt=after_prefix(rollout.prompt)))


def off_policy(handle: Handle) -> Handle:
    """Return a response that another model drew without versions of the student's weights."""
    rollout: Rollout = handle.body
    found = replace(rollout, versions=np.full_like(rollout.versions, NOT_DRAWN))
    return Handle(replace(handle.header, versions=header_of(found).versions), found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """A rollout and the teacher's scores, in at most one kind of cache: sampled, student_topk, teacher_topk or hidden.

    Every teacher field has one row per trained token. Without a teacher all teacher fields are None.
    """

    rollout: Rollout
    teacher: str = ""
    teacher_version: int = 0
    """Number of the update that made the scoring weights; 0 for a fixed teacher."""
    context_id: str = "prefix"
    """Name of the context that the teacher read before the response; `prefix` means the student's prompt."""
    context: Ints | None = None
    """Tokens of the teacher's context; None if the teacher read the student's prompt."""
    supervision_kl: Floats | None = None
    """KL(teacher now ‖ teacher at the scoring before) at every trained position, [N]; NaN if those scores are lost.
    None: neither the teacher's weights nor its context changed."""
    teacher_logp: Floats | None = None
    teacher_action_logp: Floats | None = None
    teacher_best_logp: Floats | None = None
    """Teacher log-probs of the rollout's `best_ids`, [N, K]."""
    teacher_ids: Ints | None = None
    """The teacher's most likely tokens, [N, K], as ids of the student; ABSENT: it has no such token."""
    teacher_topk_logp: Floats | None = None
    """Teacher log-probs of `teacher_ids`, [N, K]; −∞ for ABSENT."""
    teacher_hidden: Floats | Ints | None = None
    byte_spans: Ints | None = None
    """Number of the byte span of each trained token, [N], for a teacher with another tokenizer: a span is scored as a
    whole, and `teacher_logp` is an equal share of its log-prob. A negative number is the reason why the token is left
    out (OPEN and others); its `teacher_logp` is 0, except for UNPAIRED. None: the teacher scored single tokens."""
    later_logp: Floats | None = None
    """At the first token of each byte span, log-prob of its later tokens, [N, 2]: under the policy that drew them, and
    under the teacher in its own tokens. 0 at other tokens. None: the loss compares no spans of several tokens."""
    weight: float = 1.0
    """Importance weight of a sample that was drawn from the store: `Header.weight`."""

    @property
    def nbytes(self) -> int:
        """Return the size of all arrays of this record in bytes."""
        return _nbytes(self) + _nbytes(self.rollout)

    @property
    def scored_tokens(self) -> NDArray[np.bool_]:
        """Return for each trained token whether the teacher scored it, [N]."""
        every = np.ones(self.rollout.trained_tokens, np.bool_)
        return every if self.byte_spans is None else every & (self.byte_spans >= 0)

    @property
    def compared_logp(self) -> Floats | None:
        """Return the log-probs to compare with those of the student's draws, [N, M]; None if no draws were scored.

        With byte spans the difference from a token's log-prob must be the log-ratio of its whole span. So this is the
        span's log-prob under the teacher, less the log-probs of the span's other tokens under the policy that drew
        them. A token that is left out has its own log-prob, so that the difference is 0. If spans are merged, so
        has each token after the first of its span.
        """
        if self.byte_spans is None or self.teacher_logp is None:
            return self.teacher_action_logp
        drawn_N, spans_N, scored_N = self.rollout.logp[self.rollout.loss_mask], self.byte_spans, self.scored_tokens
        if self.later_logp is not None:  # later tokens of a span follow its first one
            spans_N = spans_N[np.maximum.accumulate(np.where(spans_N == UNPAIRED, 0, np.arange(len(spans_N))))]
        inside_N = spans_N >= 0
        ratios = np.bincount(spans_N[inside_N], (self.teacher_logp - drawn_N)[inside_N].astype(np.float64))
        compared_N = drawn_N.astype(np.float64)
        compared_N[scored_N] += ratios[spans_N[scored_N]]
        return compared_N[:, None].astype(np.float32)

    @property
    def seen(self) -> Ints:
        """Tokens that the teacher read before the response."""
        return self.rollout.prompt.tokens if self.context is None else self.context

    def __post_init__(self) -> None:
        if fault := self._fault():
            raise ValueError(f"scored {self.rollout.prompt.id}/{self.rollout.index}: {fault}")

    def _fault(self) -> str | None:
        rollout, n = self.rollout, self.rollout.trained_tokens
        caches = [self.teacher_action_logp, self.teacher_best_logp, self.teacher_topk_logp, self.teacher_hidden]
        held = sum(cache is not None for cache in caches)
        if held > 1:
            return "holds more than one teacher cache"
        if self.teacher_logp is None:
            if self.teacher:
                return f"teacher_logp is missing, and teacher {self.teacher} has scored"
            return "teacher_logp is missing, and a teacher cache is set" if held else None
        for name in ("teacher_logp", "supervision_kl", "byte_spans"):
            if (rows := getattr(self, name)) is not None and rows.shape != (n,):
                return f"{name} has shape {rows.shape}, not ({n},)"
        if self.teacher_action_logp is not None:
            if self.teacher_action_logp.shape != rollout.actions.shape:
                return "teacher_action_logp and actions differ in shape"
            if not _same(self.teacher_action_logp[:, 0], self.teacher_logp):
                return "teacher_action_logp[:, 0] is not teacher_logp (a shifted row?)"
        if self.teacher_best_logp is not None:
            if rollout.best_ids is None:
                return "teacher_best_logp needs best_ids, which are missing"
            if self.teacher_best_logp.shape != rollout.best_ids.shape:
                return "teacher_best_logp and best_ids differ in shape"
        emitted = rollout.tokens[rollout.loss_mask]
        if fault := _topk_fault(self, "teacher_ids", "teacher_topk_logp", emitted, "teacher_logp", self.teacher_logp):
            return fault
        if self.teacher_hidden is not None and not _rows_of(self.teacher_hidden, n):
            return f"teacher_hidden must be [{n}, D]"
        if self.later_logp is not None and self.later_logp.shape != (n, 2):
            return f"later_logp has shape {self.later_logp.shape}, not ({n}, 2)"
        return None


def _nbytes(record: Any) -> int:
    return sum(getattr(getattr(record, each.name), "nbytes", 0) for each in fields(record) if each.name != "rollout")


@dataclass(frozen=True, slots=True, eq=False)
class TextScores:
    """A teacher's scores of one text, in the form that the coordinator reads."""

    logps: Floats
    """All log-probs of the teacher's cache, [N, X]; the emitted token is in column 0."""
    cause: str = ""
    """Reason why scoring failed; empty if it succeeded."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """Earlier responses to a prompt (text and reward) that its teacher's context may include."""

    best: str = ""
    best_reward: float | None = None
    last: str = ""
    last_reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Summary of one sample, from which the coordinator admits, orders, routes and counts the sample."""

    prompt: str
    number: int
    index: int
    episode: int
    data_source: str
    prompt_tokens: int
    tokens: int
    versions: tuple[tuple[int, int], ...]
    """Pairs (version, number of trained tokens), run-length encoded in the order of the response."""
    finish: Finish
    rewards: dict[str, float] = field(default_factory=dict)
    outcome: dict[str, float] = field(default_factory=dict)
    ungraded: Ungraded | None = None
    """Reason why grading failed; such a sample is not trained. None: graded, or no rewards are configured."""
    source: str = ""
    """Origin of the response: data, teacher or file; empty if the student drew it."""
    prefix: int = 0
    """Number of tokens at the start of the response that were given to the student ([mix] with `prefix`)."""
    teacher: str = ""
    """Name of the teacher that scores or has scored the sample; empty without teacher."""
    teacher_version: int = 0
    """Version of the teacher's weights that scored the sample; 0 for a fixed teacher."""
    environment: str = ""
    """Name of the environment of the sample; empty if the run has one or none."""
    text: str = ""
    """Text of a new response, for runs that remember attempts; otherwise empty."""
    attempts: Attempts | None = None
    """Earlier attempts that the teacher's context includes; None if it includes none."""
    moved: float | None = None
    """Mean of `supervision_kl` after scoring again for the next update that learns from the sample; 0 if the teacher is
    unchanged, None if not scored again. In both cases a `supervision_kl` of the record is of an earlier use."""
    aligned: float = 1.0
    """Share of trained positions for which `supervision_kl` is known."""
    replaced: int | None = None
    """Number of trained tokens that the teacher replaced; None: the student drew alone."""
    spans: tuple[tuple[str, float, float], ...] = ()
    """Turns and steps of a new episode: (name, seconds from its start to the end of the group's rollout, duration)."""
    greedy_tokens: int = 0
    """Number of tokens of the group's additional greedy response; set on one member of the group, else 0."""
    cause: str = ""
    """Reason why this member failed, or was drawn again although it was stored; empty if there is none."""
    gap: float = 0.0
    """Behaviour log-prob minus teacher log-prob, summed over trained tokens; the expected value is at least 0.
    0 if the student did not draw the tokens."""
    floored: int = 0
    """Number of trained tokens whose teacher log-prob was raised to the floor."""
    left_out: tuple[int, ...] | None = None
    """Number of trained tokens without a score of a teacher with another tokenizer, by reason: OPEN, UNWRITTEN,
    TOO_LONG, UNPAIRED. No token is UNPAIRED here if the loss merges spans. None: the teacher has the student's
    tokenizer."""
    byte_spans: int = 0
    """Number of byte spans that such a teacher scored."""
    repeated: float = 0.0
    """Share of the trained n-grams of REPEATED_N tokens that occur earlier in the same response."""
    distinct: float = 1.0
    """Number of different trained tokens, divided by the number of trained tokens."""
    differs: float = 0.0
    """Root mean square difference between the last two scores of this response; 0 if it was scored only once."""
    weight: float = 1.0
    """Importance weight of a sample that was drawn from the store ([reuse]), which multiplies its losses."""
    nbytes: int = field(default=0, compare=False)
    """Size of the arrays of the sample's record in bytes."""

    @property
    def oldest(self) -> int:
        """Return the oldest version that drew a token; AGELESS if the student drew none."""
        return AGELESS if self.source else min(self.versions)[0]

    @property
    def missing_reason(self) -> str:
        """Reason why an evaluation leaves the sample out, which is no fault of the student; empty if it counts."""
        if self.finish == "error":
            return self.cause or "the engine could not answer it"
        return self.ungraded.text if self.ungraded is not None and self.ungraded.cause == ENDPOINT_DOWN else ""

    @property
    def compared_tokens(self) -> int:
        """Return the number of trained tokens with a log-prob of the teacher, alone or with their span."""
        return self.trained_tokens - sum((self.left_out or ())[:-1])

    @property
    def trained_tokens(self) -> int:
        runs = self.versions
        return runs[0][1] if len(runs) == 1 else sum([count for _, count in runs])  # read five times for each sample


@dataclass(frozen=True, slots=True)
class Handle:
    """A header and a record: `body` is the record, or a reference to the record if engines run in other processes."""

    header: Header
    body: Any

    def with_header(self, **changes: Any) -> Handle:
        return Handle(replace(self.header, **changes), self.body)


Group = Sequence[Handle]


def handed_over(rollouts: Iterable[Rollout]) -> list[Handle]:
    """Return handles for a group that will be continued; even complete responses get `finish="released"`."""
    return [Handle(replace(header_of(rollout), finish="released"), rollout) for rollout in rollouts]


def unfinished(group: Group) -> bool:
    """Return True if sampling of this group must start or continue; an empty group has no sampled token yet."""
    return not group or any(handle.header.finish == "released" for handle in group)


def graded(handle: Handle) -> Rollout:
    """Return the rollout of a handle with the rewards of its header; graders may write only to the header."""
    rollout: Rollout = handle.body.rollout if isinstance(handle.body, Scored) else handle.body
    same = rollout.rewards == handle.header.rewards  # a copy is checked again, which takes longer than all else here
    return rollout if same else replace(rollout, rewards=handle.header.rewards)


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one update, in the order in which they are consumed. The learner packs them into rows."""

    groups: tuple[Group, ...]
    update: int
    supervised: int | None = None
    """Number of supervised updates of the run, as far as known now; None: as configured."""

    @property
    def handles(self) -> list[Handle]:
        return [handle for group in self.groups for handle in group]

    @property
    def headers(self) -> list[Header]:
        return [handle.header for handle in self.handles]

    def parts(self, number: int) -> list[Batch]:
        """Split into at most `number` batches of nearly equal size, none of them empty."""
        size, more = divmod(len(self.groups), number)
        edges = [i * size + min(i, more) for i in range(number + 1)]
        cuts = [self.groups[a:b] for a, b in pairwise(edges)]
        return [replace(self, groups=groups) for groups in cuts if groups]


@dataclass(frozen=True, slots=True)
class Counts:
    """Denominators of the losses of an optimizer step: token and episode counts over all groups of the step."""

    n_tokens: int = 0
    n_sequences: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.n_tokens + other.n_tokens, self.n_sequences + other.n_sequences)


ONE_COUNT = Counts(1, 1)
"""Denominators of 1: losses remain sums."""


def total(counts: Iterable[Counts]) -> Counts:
    return sum(counts, Counts())


def counts_of(group: Group, left: Sequence[int] | None = None) -> Counts:
    """Count trained tokens and the episodes that have any; `left` is the token count of each member, if given."""
    tokens = [handle.header.trained_tokens for handle in group] if left is None else left
    episodes = {handle.header.episode for handle, count in zip(group, tokens, strict=True) if count}
    return Counts(n_tokens=sum(tokens), n_sequences=len(episodes))


def version_runs(versions: Ints, mask: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Run-length encode the versions of the trained tokens; if there are none, return a pair with count 0."""
    kept = versions[mask]
    if len(kept) == 0:
        return ((int(versions[0]), 0),)
    edges = np.flatnonzero(np.diff(kept)) + 1
    return tuple((int(part[0]), len(part)) for part in np.split(kept, edges))


def repetition(tokens: Ints, n: int) -> float:
    """Return the share of n-grams that occur earlier in the same tokens; 0 if there are fewer than n tokens."""
    count = len(tokens) - n + 1
    if count < 1:
        return 0.0
    keys = np.zeros(count, np.uint64)
    for i in range(n):  # equal keys of different n-grams would need a collision of 64-bit hashes
        keys = keys * HASH_FACTOR + tokens[i : i + count].astype(np.uint64)
    return 1 - len(np.unique(keys)) / count


def header_of(rollout: Rollout, *, teacher: str = "", known: Header | None = None, **more: Any) -> Header:
    """Return the header of a rollout; `known` is an earlier one of the same tokens, `more` holds further fields."""
    trained = rollout.tokens[rollout.loss_mask]
    return Header(
        repeated=repetition(trained, REPEATED_N) if known is None else known.repeated,
        distinct=len(np.unique(trained)) / max(len(trained), 1) if known is None else known.distinct,
        prompt=rollout.prompt.id,
        number=rollout.prompt.number,
        index=rollout.index,
        episode=rollout.episode,
        data_source=rollout.prompt.data_source,
        prompt_tokens=len(rollout.prompt.tokens),
        tokens=len(rollout.tokens),
        versions=version_runs(rollout.versions, rollout.loss_mask) if known is None else known.versions,
        finish=rollout.finish,
        replaced=None if rollout.replaced is None else int(rollout.replaced.sum()),
        rewards=dict(rollout.rewards),
        outcome=dict(rollout.outcome),
        source=rollout.prompt.source,
        prefix=0 if rollout.prompt.prefix is None else len(rollout.prompt.prefix),
        teacher=teacher or rollout.prompt.teacher,
        environment=rollout.prompt.environment,
        **{"nbytes": _nbytes(rollout), **more},
    )
