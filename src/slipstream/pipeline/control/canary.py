"""Canaries: fixed texts that teachers score at the start and every few updates, and the comparison of the answers.

Pure code: no tasks, no clock, no engine. `canary_rounds` sends the requests and acts on the results.

A reference holds a teacher's answers at the start: for each log-prob the median of all answers of all replicas. The
noise is the distance of a replica's answers from their own median; a replica with more noise than its number format
explains is inconsistent. A replica has changed if its later answer is further from the reference than `limit_of`
allows. If a teacher runs here in 16 bits and its answer is little further, the median of several answers decides. A
distance is the largest root mean square over the log-probs of a text, or the largest difference of one log-prob divided
by PEAK_FACTOR if that is more; both are weighted by `weights`.

Shapes: N tokens of a text, M draws (tokens sampled at the same position), X log-probs per token (emitted one first).
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from math import inf, sqrt

import numpy as np

from slipstream.config.base import Rounding
from slipstream.data.prompts import Prompts
from slipstream.protocols import Metrics, Sampling
from slipstream.records import Floats, Group, Ints, Prompt, Rollout, TextScores, one_turn

CANARY_TEXTS, CANARY_TOKENS, END_INTERVAL = 4, 24, 4
"""Number of short texts per teacher, tokens of each after its prompt, and interval of end tokens among them."""
FIRST_REQUESTS, NOISE_FACTOR = 4, 3.0
"""Times that each replica scores the texts at the start, and limit as a multiple of the noise in these answers."""
PEAK_FACTOR = 5.0
"""Largest difference of one log-prob as a multiple of the limit of the root mean square."""
FULL_WEIGHT_PROBABILITY = 0.01
"""Probability from which on a token counts fully in a distance; rarer tokens count in proportion to theirs."""
EXACT_LIMIT, ROUNDED_LIMIT = 0.01, 0.1
"""Smallest limit for float32 on this machine, and for bfloat16 and endpoints, whose rounding depends on load."""
COMPARED = "k3_kl", "ppl_ratio"
"""Numbers by which a sampler is judged."""
DRAWN, DRAWN_TOKENS = 4, 8
"""Number of short answers that every sampler generates, and their length in tokens."""
KL: dict[Rounding, float] = {"exact": 1e-3, "half": 5e-2, "int8": 2e-2, "fp8": 5e-2}
PERPLEXITY: dict[Rounding, float] = {"exact": 0.01, "half": 0.05, "int8": 0.05, "fp8": 0.1}
"""Limits of KL and |perplexity ratio − 1| between sampler and learner. `doctor` uses the same limits."""
HALF_KL, HALF_PERPLEXITY = 0.3, 0.15
"""In 16 bits, largest limit of the KL, for a student sensitive to rounding, and limit of the ratio at KL["half"]."""
KL_MARGIN = 8.0
"""Limit of the KL in 16 bits, as a multiple of that at the start: single tokens decide the KL of a few answers."""
ROUNDS: dict[Rounding, int] = {"exact": 1, "half": 4, "int8": 1, "fp8": 1}
"""Times that a sampler answers at the first check, whose worst answer sets the limit, and at one that fails."""
ASKED_AGAIN = 3.0
"""Distance up to which a teacher in 16 bits is asked again, as a multiple of the limit; rounding explains no more."""
FOLLOWING_LIMIT = {True: 0.02, False: 0.5}
"""Limit of the largest log-prob difference of learner and a teacher that follows the student; True: float32."""
MAX_DISTANCE = 1e3
"""Largest difference that is recorded, because metrics must be finite."""
Reference = list[Floats | None]
"""Log-probs [N, X] of each text; None for a text that the teacher cannot score."""


def prompts_of(prompts: Prompts, teacher: str | None, count: int) -> list[Prompt]:
    """Return the first `count` prompts of this teacher (None: of any), with the unused numbers -1, -2 and so on."""
    every = (prompts.at(number) for number in range(len(prompts.rows)))
    its = (prompt for prompt in every if teacher is None or prompt.teacher == teacher)
    return [replace(prompt, number=-1 - i) for i, prompt in enumerate(islice(its, count))]


def texts_of(prompts: Sequence[Prompt], sampling: Sampling, ends: Sequence[int]) -> list[Rollout]:
    """Return a text for each prompt: the tokens of all the prompts as its response, with end tokens among them.

    If responses can be longer, add a text of `max_tokens` tokens: the prompts as they are, and an end token.
    """
    words = np.concatenate([prompt.tokens for prompt in prompts]).astype(np.int32)
    n = min(CANARY_TOKENS, sampling.max_tokens)
    found = list[Rollout]()
    for i, prompt in enumerate(prompts):
        tokens_N = np.resize(np.roll(words, -i), n)
        if ends:
            tokens_N[END_INTERVAL - 1 :: END_INTERVAL] = np.resize(np.array(ends, np.int32), n // END_INTERVAL)
        found.append(text_of(prompt, 0, tokens_N, sampling))
    if prompts and sampling.max_tokens > n:
        tokens_N = np.resize(words, sampling.max_tokens)
        tokens_N[-1:] = ends[:1] or tokens_N[-1:]
        found.append(text_of(replace(prompts[0], number=-1 - len(prompts)), 0, tokens_N, sampling))
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
    whole = replace(sampling, top_p=1.0, top_k=0, min_p=0.0, keep_mask=False, greedy=False, alone=True)
    return replace(whole, teacher_replaces=0, fusion=0.0, group=1, max_tokens=min(DRAWN_TOKENS, sampling.max_tokens))


@dataclass(frozen=True)
class Difference:
    """The distance of an answer from the reference, and a description of the worst token."""

    apart: float
    said: str = ""


def weights(one: Floats, other: Floats) -> Floats:
    """Return the weight of each log-prob by the larger of its two probabilities: 1 if it is likely, else less.

    Rounding errors grow with the distance from the most likely token, and rare tokens decide nothing in training.
    """
    found: Floats = np.minimum(np.exp(np.maximum(one, other)) / FULL_WEIGHT_PROBABILITY, 1.0)
    return found


def distance(one: Floats, other: Floats) -> float:
    weight = weights(one, other)
    squares = weight * (one - other) ** 2
    return float(np.sqrt(max(squares.sum() / max(float(weight.sum()), 1.0), squares.max() / PEAK_FACTOR**2)))


def difference(texts: Sequence[Rollout], reference: Reference, answer: Sequence[TextScores]) -> Difference:
    """Return the largest distance of a text, and its token with the largest weighted difference."""
    worst = Difference(0.0)
    for i, (text, was_NX, said) in enumerate(zip(texts, reference, answer, strict=True)):
        if was_NX is None:
            continue
        if said.cause:
            return Difference(inf, f"text {i}: {said.cause}")
        now_NX = said.logps.astype(np.float64)
        n = int((np.abs(now_NX - was_NX) * np.sqrt(weights(was_NX, now_NX)))[:, 0].argmax())
        where = f"token {text.tokens[n]} at position {n} of text {i}"
        here = f"{where} had log-prob {was_NX[n, 0]:.2f}, now {now_NX[n, 0]:.2f}"
        worst = max(worst, Difference(distance(was_NX, now_NX), here), key=lambda each: each.apart)
    return worst


def farthest(texts: Sequence[Rollout], reference: Reference, answers: Sequence[Sequence[TextScores]]) -> Difference:
    return max((difference(texts, reference, answer) for answer in answers), key=lambda each: each.apart)


def reference_of(answers: Sequence[Sequence[TextScores]]) -> Reference:
    """Return the median log-probs of each text over all answers; None for a text that failed in any answer."""
    return [
        None if any(said.cause for said in of_text) else np.median([said.logps for said in of_text], 0)
        for of_text in zip(*answers, strict=True)
    ]


def noise_of(texts: Sequence[Rollout], answers: Sequence[Sequence[TextScores]]) -> Difference:
    """Return the largest distance of a replica's answers from their own median."""
    return farthest(texts, reference_of(answers), answers)


def limit_of(noise: float, *, exact: bool) -> float:
    """Return the largest allowed distance from the reference, for a teacher with this noise at the start."""
    return max(EXACT_LIMIT if exact else ROUNDED_LIMIT, NOISE_FACTOR * noise)


def usual_of(answers: Sequence[Sequence[TextScores]]) -> list[TextScores]:
    """Return the median log-probs of each text over all answers, or the cause of a failure."""
    causes = [next((said.cause for said in of_text if said.cause), "") for of_text in zip(*answers, strict=True)]
    medians = zip(causes, reference_of(answers), strict=True)
    return [TextScores(np.zeros((0, 0)) if logps is None else logps, cause) for cause, logps in medians]


def worst_gap(numbers: Metrics, scored: Group) -> float:
    """Return the largest log-prob difference in the result of `Learner.compare`; infinity if scoring failed."""
    if any(handle.header.finish == "error" for handle in scored):
        return inf
    return max(value for name, value in numbers.items() if name.endswith("/difference_max"))


def version_fault(versions: Set[int], oldest: int, newest: int) -> str:
    """Return a message if recorded token versions are not all from `oldest` to `newest`, else an empty string."""
    if all(oldest <= version <= newest for version in versions):
        return ""
    possible = f"only version {newest} is" if oldest == newest else f"versions {oldest} to {newest} are"
    return f"its tokens name version {', '.join(map(str, sorted(versions)))}, but {possible} possible"


def sampler_limits(rounding: Rounding, start: Metrics | None, k3: float) -> tuple[float, float]:
    """Return the limits of KL and |perplexity ratio − 1|, where the KL is `k3`. `start`: numbers at the start, if any.

    In 16 bits the error depends on the student, so the limit of the KL follows from the start. The mean of 32
    differences with this KL varies by √(2 · KL / 32), 0.06 at 0.05, so a smaller limit of the ratio would see chance.
    Log-probs that are all shifted by the same amount, which rounding cannot do, exceed it from 0.17 nats on.
    """
    if rounding != "half":
        return KL[rounding], PERPLEXITY[rounding]
    largest = inf if start is None else KL_MARGIN * start["drift/k3_kl"]
    around = HALF_PERPLEXITY * sqrt(max(1.0, k3 / KL[rounding]))
    return min(max(KL[rounding], largest), HALF_KL), around


def without_own_rounding(numbers: Metrics) -> Metrics:
    """Return a comparison without the rounding of the learner's products, for which a sampler is not to blame.

    It depends on the weights: with a student without half of its layers one small step made a KL of 0.007 one of 0.07.
    """
    return numbers | {f"drift/{name}": numbers.get(f"exact/{name}", numbers[f"drift/{name}"]) for name in COMPARED}


def median(numbers: Sequence[Metrics]) -> Metrics:
    """Return the median of each number; NaN if one of them is NaN."""
    names = [f"drift/{name}" for name in COMPARED]
    return {name: float(np.median([each[name] for each in numbers])) for name in names}


def worst(numbers: Sequence[Metrics]) -> Metrics:
    """Return the largest KL and the perplexity ratio furthest from 1 of these comparisons."""
    ratio = max((each["drift/ppl_ratio"] for each in numbers), key=lambda each: abs(each - 1))
    return {"drift/k3_kl": max(each["drift/k3_kl"] for each in numbers), "drift/ppl_ratio": ratio}


def sampler_fault(
    numbers: Metrics, versions: Set[int], *, version: int, rounding: Rounding, start: Metrics | None = None
) -> str:
    """Return a message if a sampler's answers do not fit the learner's weights, else an empty string."""
    k3, ratio = numbers["drift/k3_kl"], numbers["drift/ppl_ratio"]
    limit, around = sampler_limits(rounding, start, k3)
    wrong = version_fault(versions, version, version)
    if wrong or (k3 <= limit and abs(ratio - 1) <= around):  # false for NaN, which is reported
        return wrong
    coarse = rounding in ("int8", "fp8")
    also = f", or {rounding} changes this student too much (learner.quantised = true rounds both)" if coarse else ""
    also += ", or 16 bits are too few for this student (float32 shows it)" if rounding == "half" else ""
    return (
        f"with the weights of version {version} its log-probs are not the learner's: KL {k3:.2g} (limit "
        f"{limit:.2g}), perplexity ratio {ratio:.3f} (limit 1 ± {around:.2g}): it has stale weights, or log-probs of "
        f"another distribution{also}"
    )
