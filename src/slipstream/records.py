"""The four records that travel, Prompt → Rollout → Scored → Batch, and the handles that carry them.

Numpy only. What every token has, has T rows; what only trained tokens have (draws, what a teacher says), has N, as
many as there are, in their order. A row describes the prediction *of* its token: nothing is ever shifted again. A
record that breaks this cannot be built.

Shapes: T tokens after the prompt, N trained ones, M cached actions, K teacher's top-k, D teacher's hidden size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]
Finish = Literal["eos", "length", "turns", "time", "error", "released"]
"""How a response ended: by itself, or by a limit; `released` has not, and can be gone on with where it stands."""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from what identifies a draw: the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def is_json(value: Any) -> bool:
    """Whether JSON gives back what it was given: no dates, no bytes, no tuples."""
    match value:
        case dict():
            return all(isinstance(key, str) and is_json(below) for key, below in value.items())
        case list():
            return all(map(is_json, value))
        case _:
            return value is None or isinstance(value, bool | int | float | str)


def _rows_of(array: NDArray[Any], n: int) -> bool:
    """[n, at least one]"""
    return array.ndim == 2 and array.shape[0] == n and array.shape[1] > 0


def _same(a: Floats, b: Floats) -> bool:
    """NaN is NaN."""
    return np.array_equal(a, b) or np.array_equal(a, b, equal_nan=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """What the student is asked. `number` is its place in the order of submission, `seed` follows from it."""

    id: str
    number: int
    tokens: Ints
    data_source: str = "default"
    ground_truth: Any = None
    teacher: str = ""
    """Name of the teacher that will score the answers; none without teachers."""
    seed: int = 0
    offset: int = 0
    """Tokens of the response that earlier calls drew, and that are among `tokens` now: draws go on from there."""
    first: int = 0
    """Index of the first response in its group; one that is continued keeps its own."""
    meta: dict[str, Any] = field(default_factory=dict)
    """The other columns of its row, but for what JSON does not hold."""
    asked: Any = None
    """What it was before it was tokens, text or messages, where agents are told."""
    place: str = ""
    """File and line of its row, where they are known."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or len(self.tokens) == 0:
            raise ValueError(f"prompt {self.id}: needs at least one token")


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The ids that top-p, top-k and min-p left of the vocabulary, of each trained token: what could have been drawn."""

    ids: Ints
    """Of all of them, one behind the other."""
    sizes: Ints
    """How many ids each has, [N]."""

    def rows(self) -> list[Ints]:
        return np.split(self.ids, np.cumsum(self.sizes)[:-1])


def kept_of(rows: Sequence[Ints]) -> Kept:
    return Kept(np.concatenate(rows).astype(np.int32), np.array([len(row) for row in rows], np.int32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """A lineage: everything after one prompt, sampled or observed, with where every sampled token came from.

    `loss_mask` is true where a token was sampled and is trained, once: the first lineage of an episode that holds a
    token trains it. There `versions` is what drew it, `logp` its behaviour log-prob, under the processed distribution
    that drew it, as the engine computed it then, and `turn` the number of its call. `actions` and `action_logp` have a
    row for each of these tokens and for no other: M i.i.d. draws of that same distribution, the emitted token first,
    which are the cache that the teacher scores; `kept` says what else could have been drawn, where it was asked for
    (None: everything, or nobody knows). Elsewhere `versions` and, off every turn, `turn` are written as −1 and
    `logp` as 0, and whatever stands there is nobody's; tokens are ids everywhere.

    `index` tells the rows of a group apart, `episode` and `branch` which of them are of one episode.
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
    """The ids that the policy which drew found likeliest at each trained position, and their log-probs."""
    best_logp: Floats | None = None
    finish: Finish
    kept: Kept | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    outcome: dict[str, float] = field(default_factory=dict)
    """Of an episode in an environment: what that says of it (`reward`, `reward/NAME`), and what was counted."""

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
        for name, ids in (("tokens", self.tokens), ("actions", self.actions)):
            if ids.dtype.kind not in "iu":
                return f"{name} is {ids.dtype}, must be integers"
            if ids.size and ids.min() < 0:
                return f"{name} holds a negative id, which no sampler draws"
        impossible = self.actions[self.action_logp == -np.inf]
        if impossible.size:
            return f"actions holds {impossible[:1]}, whose log-prob is -inf: no sampler draws it"
        if (self.best_ids is None) != (self.best_logp is None):
            return "best_ids and best_logp need each other"
        if self.best_ids is not None and self.best_logp is not None:
            if not _rows_of(self.best_ids, n):
                return f"best_ids has shape {self.best_ids.shape}, must be [{n}, K]"
            if self.best_logp.shape != self.best_ids.shape:
                return "best_logp and best_ids differ in shape"
            hit = self.best_ids == self.tokens[trained][:, None]
            if not np.where(hit, self.best_logp == self.logp[trained][:, None], True).all():
                return "best_logp is not logp on the emitted token (a shifted row?)"
        turns = self.turn[trained]
        if n and turns.min() < 0:
            return "a trained token is of no turn: turn is -1 where nothing was sampled"
        if (turns[1:] < turns[:-1]).any():
            return "turn falls: calls are numbered in their order"
        for name, reward in self.rewards.items():
            if not math.isfinite(reward):
                return f"reward {name!r} is {reward}: a reward must be a finite number"
        return None

    def _fault_of_kept(self, kept: Kept) -> str | None:
        n = self.trained_tokens
        if kept.sizes.shape != (n,):
            return f"kept.sizes has shape {kept.sizes.shape}, {n} tokens are trained"
        if kept.ids.shape != (kept.sizes.sum(),):
            return "kept.ids are not as many as kept.sizes say"
        row = np.arange(n) << 32
        if not np.isin(row[:, None] + self.actions, np.repeat(row, kept.sizes) + kept.ids).all():
            return "actions holds ids that are not in kept: they could not be drawn"
        return None

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())


TOKENS = ("tokens", "versions", "logp", "turn", "loss_mask")
"""Arrays of a rollout with a row for every token."""
TRAINED = ("actions", "action_logp", "best_ids", "best_logp")
"""Those with a row for every trained one."""


def continued(begun: Rollout, rest: Rollout) -> Rollout:
    """One call's response that was made in two parts, without a word of the cut."""
    return replace(begun, finish=rest.finish, **_ends(TOKENS + TRAINED, (begun, rest)), kept=_all_kept((begun, rest)))


def lineage(prompt: Prompt, index: int, parts: Sequence[Rollout | Ints], **rest: Any) -> Rollout:
    """An episode: responses, each sampled in one call, and the tokens that were seen between them."""
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
    return Rollout(prompt=prompt, index=index, episode=index, **found, kept=_all_kept(said), **rest)


def _ones(ids: Ints) -> Ints:
    return np.ones(len(ids), np.int32)


def _ends(names: Iterable[str], parts: Sequence[Rollout]) -> dict[str, Any]:
    """These arrays of them, end to end, but for those that they do not have."""
    return {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in names
        if getattr(parts[0], name) is not None
    }


def _all_kept(parts: Sequence[Rollout]) -> Kept | None:
    kept = [part.kept for part in parts if part.kept is not None]
    if len(kept) < len(parts):
        return None
    return Kept(np.concatenate([each.ids for each in kept]), np.concatenate([each.sizes for each in kept]))


def said_and_seen(rollout: Rollout) -> list[tuple[bool, Ints]]:
    """What was said, turn by turn, and what was seen between: whether it was said, and its tokens."""
    edges = np.flatnonzero(np.diff(rollout.turn)) + 1
    return [
        (bool(turn[0] >= 0), tokens)
        for turn, tokens in zip(np.split(rollout.turn, edges), np.split(rollout.tokens, edges), strict=True)
    ]


def parts_of(rollout: Rollout) -> list[Rollout | Ints]:
    """What `lineage` was given: every response, as its call returned it, and the tokens that were seen between."""
    edges = [0, *(np.flatnonzero(np.diff(rollout.turn)) + 1), len(rollout.tokens)]
    return [
        _part(rollout, start, stop) if rollout.turn[start] >= 0 else rollout.tokens[start:stop]
        for start, stop in pairwise(edges)
    ]


def _part(rollout: Rollout, start: int, stop: int) -> Rollout:
    first, last = (int(rollout.loss_mask[:at].sum()) for at in (start, stop))
    found: dict[str, Any] = {name: getattr(rollout, name)[start:stop] for name in TOKENS}
    found |= {name: of[first:last] for name in TRAINED if (of := getattr(rollout, name)) is not None}
    kept = None if rollout.kept is None else kept_of(rollout.kept.rows()[first:last])
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
    kept: Kept | None = None,
) -> Rollout:
    """A response that was sampled in one call, all of it: an episode of its own."""
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
        finish=finish,
        kept=kept,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """A rollout with its teacher's answer in one cache at most: sampled, student_topk, teacher_topk or hidden.

    Every field of the teacher has a row for each trained token, and for no other. Where there is no teacher, a rollout
    with nothing to it.
    """

    rollout: Rollout
    teacher: str = ""
    teacher_version: int = 0
    """The update after which the weights that scored were made; 0 of a teacher that does not move."""
    context_id: str = "prefix"
    """Names what the teacher saw before the response."""
    context: Ints | None = None
    """The tokens of that, where it is not the student's prompt."""
    supervision_kl: Floats | None = None
    """KL(what the teacher says now ‖ what it said when the response was scored first) at every trained position, NaN
    where the latter cannot be had any more; None where neither weights nor context have moved."""
    teacher_logp: Floats | None = None
    teacher_action_logp: Floats | None = None
    teacher_best_logp: Floats | None = None
    """Of the rollout's `best_ids`."""
    teacher_ids: Ints | None = None
    teacher_topk_logp: Floats | None = None
    teacher_hidden: Floats | Ints | None = None

    @property
    def seen(self) -> Ints:
        """What the teacher saw before the response."""
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
                return f"teacher {self.teacher} left no log-prob of the emitted token"
            return "holds a teacher cache and no teacher_logp" if held else None
        for name in ("teacher_logp", "supervision_kl"):
            if (rows := getattr(self, name)) is not None and rows.shape != (n,):
                return f"{name} has shape {rows.shape}, not ({n},)"
        if self.teacher_action_logp is not None:
            if self.teacher_action_logp.shape != rollout.actions.shape:
                return "teacher_action_logp and actions differ in shape"
            if not _same(self.teacher_action_logp[:, 0], self.teacher_logp):
                return "teacher_action_logp[:, 0] is not teacher_logp (a shifted row?)"
        if self.teacher_best_logp is not None:
            if rollout.best_ids is None:
                return "teacher_best_logp is of best_ids, and there are none"
            if self.teacher_best_logp.shape != rollout.best_ids.shape:
                return "teacher_best_logp and best_ids differ in shape"
        if (self.teacher_ids is None) != (self.teacher_topk_logp is None):
            return "teacher_ids and teacher_topk_logp need each other"
        if self.teacher_ids is not None and self.teacher_topk_logp is not None:
            if not _rows_of(self.teacher_ids, n):
                return f"teacher_ids must be [{n}, K]"
            if self.teacher_topk_logp.shape != self.teacher_ids.shape:
                return "teacher_topk_logp and teacher_ids differ in shape"
            hit = self.teacher_ids == rollout.tokens[rollout.loss_mask][:, None]
            if not np.where(hit, self.teacher_topk_logp == self.teacher_logp[:, None], True).all():
                return "teacher_topk_logp is not teacher_logp on the emitted token (a shifted row?)"
        if self.teacher_hidden is not None and not _rows_of(self.teacher_hidden, n):
            return f"teacher_hidden must be [{n}, D]"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """What a teacher says of a text, as numbers that the coordinator can read."""

    logps: Floats
    """All log-probs that its cache holds, [N, X]; those of the emitted tokens come first."""
    cause: str = ""
    """Why there are none."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """What was tried at a prompt so far, as much of it as its teacher is shown: texts, and their rewards."""

    best: str = ""
    best_reward: float | None = None
    last: str = ""
    last_reward: float | None = None


@dataclass(frozen=True, slots=True)
class Ungraded:
    """Why an answer has no reward: a cause to count by, and a line for a person."""

    cause: str
    """timeout, crash, error, nan or type."""
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the coordinator sees of one sample: small, and enough to admit, order, route and account for it."""

    prompt: str
    number: int
    index: int
    episode: int
    data_source: str
    prompt_tokens: int
    tokens: int
    versions: tuple[tuple[int, int], ...]
    """Runs of (version, trained tokens), in the order of the response."""
    finish: Finish
    rewards: dict[str, float] = field(default_factory=dict)
    outcome: dict[str, float] = field(default_factory=dict)
    ungraded: Ungraded | None = None
    """Why it has no rewards, where it was to have some: nothing can be learned from it."""
    teacher: str = ""
    """Who will score it, or has."""
    teacher_version: int = 0
    """Of the weights that scored it."""
    said: str = ""
    """Of a response that was just rolled out, where attempts are remembered: its text."""
    attempts: Attempts | None = None
    """What its teacher is shown, or was."""
    moved: float | None = None
    """Of one that was relabelled: how far its supervision has moved, the mean of `supervision_kl`, 0 if it has not."""
    aligned: float = 1.0
    """The share of its trained positions of which that is known."""
    spans: tuple[tuple[str, float, float], ...] = ()
    """Of an episode in a group that was just rolled out: its turns and steps, each with the seconds before the end of
    the group at which it began, and how many it took."""
    greedy_tokens: int = 0
    """On one member of a group that was just rolled out: tokens of the greedy answer that was drawn beside it."""
    cause: str = ""
    """Why a member failed, where its engine says."""
    gap: float = 0.0
    """Log-prob by what drew it less log-prob by its teacher, summed over trained tokens: on average not below 0."""
    floored: int = 0
    """Trained tokens of which the teacher's log-prob was raised to the floor of `engines/score_checks`."""
    differs: float = 0.0
    """Of a response that was scored before: how far the two answers are apart, as root mean square."""

    @property
    def oldest(self) -> int:
        return min(version for version, _ in self.versions)

    @property
    def trained_tokens(self) -> int:
        return sum(count for _, count in self.versions)


@dataclass(frozen=True, slots=True)
class Handle:
    """`body` is the record itself, or a reference to it where engines live in other processes."""

    header: Header
    body: Any


Group = Sequence[Handle]


def handed_over(rollouts: Iterable[Rollout]) -> list[Handle]:
    """What there is of a group that is to be gone on with: every header says so, whatever of it is complete."""
    return [Handle(replace(header_of(rollout), finish="released"), rollout) for rollout in rollouts]


def unfinished(group: Group) -> bool:
    """Whether it was handed over; one of which nothing was drawn yet has no members."""
    return not group or any(handle.header.finish == "released" for handle in group)


def graded(handle: Handle) -> Rollout:
    """The rollout, scored or not, with its rewards: those are found out where there may be no more than its header."""
    rollout: Rollout = handle.body.rollout if isinstance(handle.body, Scored) else handle.body
    return replace(rollout, rewards=handle.header.rewards)


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one update, in the order in which they are consumed. Packing is the learner's own business."""

    groups: tuple[Group, ...]
    update: int

    @property
    def handles(self) -> list[Handle]:
        return [handle for group in self.groups for handle in group]

    @property
    def headers(self) -> list[Header]:
        return [handle.header for handle in self.handles]

    def parts(self, number: int) -> list[Batch]:
        """Cut into so many of nearly equal size, none of them empty."""
        size, more = divmod(len(self.groups), number)
        edges = [i * size + min(i, more) for i in range(number + 1)]
        cuts = [self.groups[a:b] for a, b in pairwise(edges)]
        return [Batch(groups, self.update) for groups in cuts if groups]


@dataclass(frozen=True, slots=True)
class Counts:
    """The denominators of a step, over all its groups; losses are sums divided by these. A sequence is an episode."""

    n_tokens: int = 0
    n_sequences: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.n_tokens + other.n_tokens, self.n_sequences + other.n_sequences)


ONE = Counts(1, 1)
"""Divides nothing."""


def total(counts: Iterable[Counts]) -> Counts:
    return sum(counts, Counts())


def counts_of(group: Group, left: Sequence[int] | None = None) -> Counts:
    """Of its trained tokens, or of so many as are left of each member, and of the episodes that have any."""
    tokens = [handle.header.trained_tokens for handle in group] if left is None else left
    episodes = {handle.header.episode for handle, count in zip(group, tokens, strict=True) if count}
    return Counts(n_tokens=sum(tokens), n_sequences=len(episodes))


def version_runs(versions: Ints, mask: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Run-length code of the versions of the trained tokens; the first version, zero times, where none is trained."""
    kept = versions[mask]
    if len(kept) == 0:
        return ((int(versions[0]), 0),)
    edges = np.flatnonzero(np.diff(kept)) + 1
    return tuple((int(part[0]), len(part)) for part in np.split(kept, edges))


def header_of(rollout: Rollout, *, teacher: str = "") -> Header:
    return Header(
        prompt=rollout.prompt.id,
        number=rollout.prompt.number,
        index=rollout.index,
        episode=rollout.episode,
        data_source=rollout.prompt.data_source,
        prompt_tokens=len(rollout.prompt.tokens),
        tokens=len(rollout.tokens),
        versions=version_runs(rollout.versions, rollout.loss_mask),
        finish=rollout.finish,
        rewards=dict(rollout.rewards),
        outcome=dict(rollout.outcome),
        teacher=teacher or rollout.prompt.teacher,
    )
