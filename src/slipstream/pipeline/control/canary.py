"""Canaries: fixed texts that teachers score at the start and every few updates, and the comparison of the answers.

Pure code: no tasks, no clock, no engine. `canary_rounds` sends the requests and acts on the results.

A reference holds a teacher's answers at the start: for each log-prob the median of all answers of all replicas. The
noise is the distance of a replica's answers from their own median. A replica has changed if its later answer is further
from the reference than `limit_of` allows. Distances are root mean squares over all log-probs of all texts.

Shapes: N tokens of a text, M draws (tokens sampled at the same position), X log-probs per token (emitted one first).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

import numpy as np

from slipstream.config.base import Rounding
from slipstream.data.prompts import Prompts
from slipstream.protocols import Metrics, Sampling
from slipstream.records import Floats, Group, Ints, Prompt, Rollout, TextScores, one_turn

TEXTS, TOKENS, END = 4, 24, 4
"""Number of texts per teacher, tokens of each text after its prompt, and interval of end tokens among them."""
ASKED, NOISE = 3, 4.0
"""Simultaneous requests to each replica at the start, and limit as a multiple of the noise in their answers."""
EXACT, ROUNDED = 0.01, 0.1
"""Smallest limit for float32 on this machine, and for bfloat16 and endpoints, whose rounding depends on load."""
DRAWN, DRAWN_TOKENS = 4, 8
"""Number of short answers that every sampler generates, and their length in tokens."""
KL: dict[Rounding, float] = {"exact": 1e-3, "half": 2e-2, "int8": 2e-2, "fp8": 5e-2}
PERPLEXITY: dict[Rounding, float] = {"exact": 0.01, "half": 0.05, "int8": 0.05, "fp8": 0.1}
"""Limits of KL and |perplexity ratio − 1| between sampler and learner. `doctor` uses the same limits."""
FOLLOWS = {True: 0.02, False: 0.5}
"""Limit of the largest log-prob difference of learner and a teacher that follows the student; True: float32."""
FAR = 1e3
"""Largest difference that is recorded, because metrics must be finite."""
Reference = list[Floats | None]
"""Log-probs [N, X] of each text; None for a text that the teacher cannot score."""


def prompts_of(prompts: Prompts, teacher: str | None, count: int) -> list[Prompt]:
    """Return the first `count` prompts of this teacher (None: of any), with the unused numbers -1, -2 and so on."""
    every = (prompts.at(number) for number in range(len(prompts.rows)))
    its = (prompt for prompt in every if teacher is None or prompt.teacher == teacher)
    return [replace(prompt, number=-1 - i) for i, prompt in enumerate(islice(its, count))]


def texts_of(prompts: Sequence[Prompt], sampling: Sampling, ends: Sequence[int]) -> list[Rollout]:
    """Return a text for each prompt: the tokens of all the prompts as its response, with end tokens among them."""
    words, n = np.concatenate([prompt.tokens for prompt in prompts]).astype(np.int32), min(TOKENS, sampling.max_tokens)
    found = list[Rollout]()
    for i, prompt in enumerate(prompts):
        tokens_N = np.resize(np.roll(words, -i), n)
        if ends:
            tokens_N[END - 1 :: END] = np.resize(np.array(ends, np.int32), n // END)
        found.append(text_of(prompt, 0, tokens_N, sampling))
    return found


def text_of(prompt: Prompt, index: int, tokens_N: Ints, sampling: Sampling) -> Rollout:
    """Return these tokens as a response with log-probs of 0; draws are its other tokens, best tokens the first ids."""
    n = len(tokens_N)
    ids_NK = np.tile(np.arange(sampling.best, dtype=np.int32), (n, 1)) if sampling.best else None
    return one_turn(
        prompt,
        index,
        actions=np.stack([np.roll(tokens_N, m) for m in range(sampling.draws)], 1),
        action_logp=np.zeros((n, sampling.draws), np.float32),
        versions=np.zeros(n, np.int32),
        finish="length",
        best_ids=ids_NK,
        best_logp=None if ids_NK is None else np.zeros(ids_NK.shape, np.float32),
    )


def drawn_by(sampling: Sampling) -> Sampling:
    """Return options for short untruncated answers of the student, without external agent, teacher or greedy answer."""
    whole = replace(sampling, top_p=1.0, top_k=0, min_p=0.0, keep_mask=False, interleave=0, greedy=False, alone=True)
    return replace(whole, group=1, max_tokens=min(DRAWN_TOKENS, sampling.max_tokens))


@dataclass(frozen=True)
class Difference:
    """The distance of an answer from the reference, and a description of the worst token."""

    apart: float
    said: str = ""


def difference(texts: Sequence[Rollout], reference: Reference, answer: Sequence[TextScores]) -> Difference:
    gaps, worst = list[Floats](), Difference(0.0)
    for i, (text, was_NX, said) in enumerate(zip(texts, reference, answer, strict=True)):
        if was_NX is None:
            continue
        if said.cause:
            return Difference(inf, f"text {i}: {said.cause}")
        gap_NX = said.logps.astype(np.float64) - was_NX
        n = int(np.abs(gap_NX[:, 0]).argmax())
        where = f"token {text.tokens[n]} at position {n} of text {i}"
        here = f"{where} had log-prob {was_NX[n, 0]:.2f}, now {said.logps[n, 0]:.2f}"
        worst = max(worst, Difference(abs(gap_NX[n, 0]), here), key=lambda each: each.apart)
        gaps.append(gap_NX.ravel())
    return Difference(float(np.sqrt(np.mean(np.concatenate(gaps) ** 2))) if gaps else 0.0, worst.said)


def reference_of(answers: Sequence[Sequence[TextScores]]) -> Reference:
    """Return the median log-probs of each text over all answers; None for a text that failed in any answer."""
    return [
        None if any(said.cause for said in of_text) else np.median([said.logps for said in of_text], 0)
        for of_text in zip(*answers, strict=True)
    ]


def limit_of(texts: Sequence[Rollout], by_replica: Sequence[Sequence[Sequence[TextScores]]], *, exact: bool) -> float:
    """Return the largest allowed distance from the reference, by the noise between the answers of each replica."""
    noise = [difference(texts, reference_of(its), answer).apart for its in by_replica for answer in its]
    return max(EXACT if exact else ROUNDED, NOISE * max(noise))


def worst_gap(numbers: Metrics, scored: Group) -> float:
    """Return the largest log-prob difference in the result of `Learner.compare`; infinity if scoring failed."""
    if any(handle.header.finish == "error" for handle in scored):
        return inf
    return max(value for name, value in numbers.items() if name.endswith("/difference_max"))


def misdated(versions: Set[int], oldest: int, newest: int) -> str:
    """Return a message if recorded token versions are not all from `oldest` to `newest`, else an empty string."""
    if all(oldest <= version <= newest for version in versions):
        return ""
    possible = f"only version {newest} is" if oldest == newest else f"versions {oldest} to {newest} are"
    return f"its tokens name version {', '.join(map(str, sorted(versions)))}, but {possible} possible"


def distrusted(numbers: Metrics, versions: Set[int], *, version: int, rounding: Rounding) -> str:
    """Return a message if a sampler's answers do not fit the learner's weights, else an empty string."""
    k3, ratio = numbers["drift/k3_kl"], numbers["drift/ppl_ratio"]
    wrong = misdated(versions, version, version)
    if wrong or (k3 <= KL[rounding] and abs(ratio - 1) <= PERPLEXITY[rounding]):  # false for NaN, which is reported
        return wrong
    coarse = rounding in ("int8", "fp8")
    also = f", or {rounding} changes this student too much (learner.quantised = true rounds both)" if coarse else ""
    return (
        f"with the weights of version {version} its log-probs are not the learner's: KL {k3:.2g} (limit "
        f"{KL[rounding]:g}), perplexity ratio {ratio:.3f}: it has stale weights, or log-probs of another "
        f"distribution{also}"
    )
