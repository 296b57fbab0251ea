"""Checks of a teacher's scores; every engine runs them once, when it puts the scores into a record.

A log-prob is checked in float32, the lowest precision of a learner. Invalid log-probs are NaN, infinite, above 0, or
placeholders that servers write for unknown tokens. A response with an invalid log-prob becomes a failed member of its
group, whose header names the cause. A valid log-prob below FLOOR is raised to FLOOR and counted. −∞, for tokens that
the student does not have, stays.

If a response was scored before, the header of the new record holds the difference of the two scores.

Shapes: N trained tokens, X log-probs per trained token.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.records import (
    OPEN,
    TOO_LONG,
    UNPAIRED,
    UNWRITTEN,
    Attempts,
    Floats,
    Group,
    Handle,
    Ints,
    Rollout,
    Scored,
    TextScores,
    graded,
    header_of,
)

FLOOR = -100.0
"""Lowest log-prob of a record. Lower values are mostly rounding error, and would dominate the gradient."""
PLACEHOLDER = -999.0
"""Highest placeholder that servers write for unknown tokens (−999, −9999 or −1e30); no softmax gets so low."""
TOLERANCE = 1e-3
"""Amount by which a log-prob may exceed 0, because servers round; such log-probs become 0."""
MASS = 1 + 10 * TOLERANCE
"""Largest sum allowed for the probabilities of different tokens at one position."""
MIN_PROBABILITY = 1e-12
"""Lower bound for the probability of a token, or of all other tokens together, because answers are rounded."""
Found = Mapping[str, NDArray[Any]]
"""Arrays that a teacher returns, by field name of `Scored`."""


def scored(
    handle: Handle,
    *,
    teacher: str,
    version: int = 0,
    seen: Ints | None = None,
    checked: bool = False,
    **found: NDArray[Any],
) -> Handle:
    """Return a record of the response and its teacher's scores, or a failed member if the scores are invalid.

    `seen` holds the tokens that the teacher saw before the response; None means the student's prompt. `checked`: the
    scores are sums of others that were checked.
    """
    rollout = graded(handle)
    context = None if seen is None or np.array_equal(seen, rollout.prompt.tokens) else seen
    if not checked and (problem := next(problems(rollout, found), "")):
        return failed(handle, f"teacher {teacher} gives {problem}", teacher=teacher)
    logps = {name: found[name] for name in IDS if name in found}
    low = {name: (logp < FLOOR) & (logp > -np.inf) for name, logp in logps.items()}
    floored = int(np.any([columns(each).any(1) for each in low.values()], axis=0).sum())
    bounded: dict[str, Any] = {name: np.where(low[name], FLOOR, np.minimum(logp, 0.0)) for name, logp in logps.items()}
    body = Scored(
        rollout=rollout,
        teacher=teacher,
        teacher_version=version,
        context_id=context_name(context),
        context=context,
        **{**found, **bounded},
    )
    drawn_N, spans_N = rollout.logp[rollout.loss_mask].astype(np.float64), body.byte_spans
    gap_N = drawn_N - bounded["teacher_logp"]
    if spans_N is not None:
        gap_N = gap_N[(spans_N >= 0) | (spans_N == UNPAIRED)]
    changes: dict[str, Any] = {
        "teacher_version": version,
        "attempts": handle.header.attempts,
        "gap": 0.0 if rollout.prompt.source else float(gap_N.sum()),
        "floored": floored,
        "nbytes": body.nbytes,
        "differs": rms_difference(handle.body, body) if isinstance(handle.body, Scored) else 0.0,
    }
    if spans_N is not None:
        spans = spans_N.tolist()
        unpaired = spans.count(UNPAIRED) if body.later_logp is None else 0  # else later tokens of scored spans
        changes["left_out"] = (*map(spans.count, (OPEN, UNWRITTEN, TOO_LONG)), unpaired)
        changes["byte_spans"] = len({span for span in spans if span >= 0})
    if (kl_N := body.supervision_kl) is not None:
        known_N = kl_N[~np.isnan(kl_N)]
        changes["moved"] = float(known_N.mean()) if len(known_N) else 0.0
        changes["aligned"] = len(known_N) / max(len(kl_N), 1)
    return Handle(header_of(rollout, teacher=teacher, known=handle.header, **changes), body)


class Probed:
    async def score(self, group: Group) -> list[Handle]:
        raise NotImplementedError

    async def probe(self, texts: Sequence[Rollout], attempts: Attempts | None = None) -> list[TextScores]:
        group = [Handle(replace(header_of(text), attempts=attempts), text) for text in texts]
        return [said_of(handle) for handle in await self.score(group)]


def said_of(handle: Handle) -> TextScores:
    """Return all log-probs of a text; of byte spans none of the most likely tokens, some of which the student lacks."""
    body = handle.body
    if not isinstance(body, Scored):
        return TextScores(np.zeros((0, 0)), handle.header.cause)
    logps = [getattr(body, name) for name in IDS if body.byte_spans is None or name not in DIFFERENT]
    return TextScores(np.concatenate([columns(logp) for logp in logps if logp is not None], 1))


def failed(handle: Handle, cause: str, *, teacher: str) -> Handle:
    rollout = graded(handle)
    return Handle(replace(header_of(rollout, teacher=teacher), finish="error", cause=cause), rollout)


def context_name(context: Ints | None) -> str:
    """Return an id of the teacher's context: a digest of its tokens, or "prefix" for the student's prompt (None)."""
    if context is None:
        return "prefix"
    return f"context-{hashlib.blake2b(context.astype(np.int32).tobytes(), digest_size=8).hexdigest()}"


IDS: dict[str, Callable[[Rollout, Found], Any]] = {
    "teacher_logp": lambda rollout, found: rollout.tokens[rollout.loss_mask][:, None],
    "teacher_action_logp": lambda rollout, found: rollout.actions,
    "teacher_best_logp": lambda rollout, found: rollout.best_ids,
    "teacher_topk_logp": lambda rollout, found: found["teacher_ids"],
}
"""For each field of log-probs, a function that returns the token ids to which these log-probs belong."""
DIFFERENT = ("teacher_best_logp", "teacher_topk_logp")
"""Fields that hold different tokens of one distribution, so their probabilities add up to at most 1."""


def problems(rollout: Rollout, found: Found) -> Iterator[str]:
    """Yield descriptions of invalid scores, worded to follow "teacher NAME gives"."""
    place_N = np.flatnonzero(rollout.loss_mask)
    for name in IDS:
        if name not in found or not len(place_N):
            continue
        with np.errstate(over="ignore"):  # numbers too large for float32 become infinite, and are reported
            logp_NX = columns(found[name]).astype(np.float32)
        if (at := first_invalid(logp_NX)) is not None:
            token, place, logp = IDS[name](rollout, found)[at], place_N[at[0]], columns(found[name])[at]
            yield f"token {token} at position {place} of the response {fault_of(float(logp))}"
        if name in DIFFERENT and (mass_N := np.exp(logp_NX).sum(1)).max() > MASS:
            n = int(mass_N.argmax())
            yield f"probabilities at position {place_N[n]} that add up to {mass_N[n]:.3f}, more than 1"
    if "teacher_hidden" in found and not finite(found["teacher_hidden"]):
        yield "hidden states that are not finite"


def columns(logp: NDArray[Any]) -> NDArray[Any]:
    return logp if logp.ndim == 2 else logp[:, None]


def first_invalid(logp_NX: NDArray[np.float32]) -> tuple[int, int] | None:
    wrong_NX = ~((logp_NX <= TOLERANCE) & (logp_NX > PLACEHOLDER))  # NaN fails both comparisons
    return tuple(np.argwhere(wrong_NX)[0].tolist()) if wrong_NX.any() else None


def fault_of(logp: float) -> str:
    if logp > TOLERANCE:
        return f"a log-prob of {logp:g}, which is above 0"
    if np.isfinite(logp) and logp > -1e9:
        return f"a log-prob of {logp:g}, which is a placeholder for an unknown log-prob"
    return f"a log-prob of {logp:g}, which is not a usable number"


def finite(array: NDArray[Any]) -> bool:
    """Return true if all numbers are finite; uint16 holds the bits of bf16, where exponent 0xFF is infinite or NaN."""
    if array.dtype == np.uint16:
        return not bool(((array & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(array).all())


def probability(logp: Floats) -> Floats:
    p: Floats = np.exp(logp.astype(np.float64).clip(FLOOR, 0))
    return p


def kl_of_known(p_NB: Floats, q_NB: Floats) -> Floats:
    """Return a lower bound of KL(p ‖ q) from the probabilities of some outcomes; all others count as one."""
    p_NB, q_NB = (np.concatenate([x, 1 - x.sum(1, keepdims=True)], 1).clip(MIN_PROBABILITY) for x in (p_NB, q_NB))
    kl_N: Floats = (p_NB * np.log(p_NB / q_NB)).sum(1)
    return kl_N.clip(0).astype(np.float32)


def rms_difference(one: Scored, other: Scored) -> float:
    """Return the root mean square difference between the log-probs of one response that was scored twice.

    Most likely tokens are compared by rank, because tokens of similar probability may swap ranks. Ranks of tokens that
    the student does not have are left out.
    """
    pairs = [(getattr(one, name), getattr(other, name)) for name in IDS]
    known = [np.stack([a, b]).astype(np.float64) for a, b in pairs if a is not None and b is not None]
    gap = np.concatenate([np.diff(both[:, (both > -np.inf).all(0)], axis=0).reshape(-1) for both in known])
    return float(np.sqrt(np.mean(gap**2))) if len(gap) else 0.0
