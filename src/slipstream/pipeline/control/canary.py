"""Canaries: fixed texts that every teacher scores at the start and again every few updates, and how answers compare.

Pure: no task, no clock, no engine. `canary_rounds` asks the engines and acts on what is found here.

A reference is what a teacher said at the start: for each log-prob the median of all answers of all its replicas. The
noise is how far the answers of one replica are from their own median. A replica that is later further than `limit_of`
says from the reference has changed. Distances are root mean squares over all log-probs of all texts.

Shapes: N tokens of a text, M draws, X log-probs that a teacher gives for each token (the emitted one's first).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

import numpy as np

from slipstream.data.prompts import Prompts
from slipstream.protocols import Metrics, Sampling
from slipstream.records import Floats, Group, Prompt, Rollout, Said, one_turn

TEXTS, TOKENS, END = 4, 24, 4
"""The number of texts that a teacher scores, the tokens of each after its prompt, and the distance of end tokens."""
ASKED, NOISE = 3, 4.0
"""How often each replica is asked at the start, all at once; and the limit, as a multiple of the noise found there."""
EXACT, ROUNDED = 0.01, 0.1
"""The least limit: of float32 on this machine; of bfloat16 and of endpoints, which may round otherwise under load."""
DRAWN, DRAWN_TOKENS = 4, 8
"""How many short answers every sampler draws, and of how many tokens."""
KL, PERPLEXITY = {True: 1e-3, False: 2e-2}, {True: 0.01, False: 0.05}
"""From sampler to learner with the same weights, in float32 and otherwise: the limits of the check before a run."""
FOLLOWS = {True: 0.02, False: 0.5}
"""From what a teacher that follows the student says to what the learner says in its stead, at the worst token."""
FAR = 1e3
"""What a difference is recorded as that is infinite."""
Reference = list[Floats | None]
"""Of each text its log-probs [N, X]; None for a text that the teacher cannot score."""


def prompts_of(prompts: Prompts, teacher: str | None, count: int) -> list[Prompt]:
    """Return the first prompts of the run that this teacher scores (None: any), under numbers that no other has."""
    every = (prompts.at(number) for number in range(len(prompts.rows)))
    its = (prompt for prompt in every if teacher is None or prompt.teacher == teacher)
    return [replace(prompt, number=-1 - i) for i, prompt in enumerate(islice(its, count))]


def texts_of(prompts: Sequence[Prompt], sampling: Sampling, ends: Sequence[int]) -> list[Rollout]:
    """Return a text for each prompt: the tokens of all the prompts as its response, with end tokens among them."""
    words, n = np.concatenate([prompt.tokens for prompt in prompts]).astype(np.int32), min(TOKENS, sampling.max_tokens)
    ids_NK = np.tile(np.arange(sampling.best, dtype=np.int32), (n, 1)) if sampling.best else None
    found = list[Rollout]()
    for i, prompt in enumerate(prompts):
        tokens_N = np.resize(np.roll(words, -i), n)
        if ends:
            tokens_N[END - 1 :: END] = np.resize(np.array(ends, np.int32), n // END)
        found.append(
            one_turn(
                prompt,
                0,
                actions=np.stack([np.roll(tokens_N, m) for m in range(sampling.draws)], 1),
                action_logp=np.zeros((n, sampling.draws), np.float32),
                versions=np.zeros(n, np.int32),
                finish="length",
                best_ids=ids_NK,
                best_logp=None if ids_NK is None else np.zeros(ids_NK.shape, np.float32),
            )
        )
    return found


def drawn_by(sampling: Sampling) -> Sampling:
    """Return how samplers are asked: short answers of the whole distribution, without an agent or a greedy answer."""
    whole = replace(sampling, top_p=1.0, top_k=0, min_p=0.0, keep_mask=False, greedy=False, alone=True)
    return replace(whole, group=1, max_tokens=min(DRAWN_TOKENS, sampling.max_tokens))


@dataclass(frozen=True)
class Difference:
    """How far an answer is from the reference, and where most."""

    apart: float
    said: str = ""


def difference(texts: Sequence[Rollout], reference: Reference, answer: Sequence[Said]) -> Difference:
    """Compare an answer with the reference."""
    gaps, worst = list[Floats](), Difference(0.0)
    for i, (text, was_NX, said) in enumerate(zip(texts, reference, answer, strict=True)):
        if was_NX is None:
            continue
        if said.cause:
            return Difference(inf, f"text {i}: {said.cause}")
        gap_NX = said.logps.astype(np.float64) - was_NX
        n = int(np.abs(gap_NX[:, 0]).argmax())
        where = f"token {text.tokens[n]} at place {n} of text {i}"
        here = f"{where} had log-prob {was_NX[n, 0]:.2f}, now {said.logps[n, 0]:.2f}"
        worst = max(worst, Difference(abs(gap_NX[n, 0]), here), key=lambda each: each.apart)
        gaps.append(gap_NX.ravel())
    return Difference(float(np.sqrt(np.mean(np.concatenate(gaps) ** 2))) if gaps else 0.0, worst.said)


def reference_of(answers: Sequence[Sequence[Said]]) -> Reference:
    """Return the median of all answers. A text that some answer has no log-probs for is left out."""
    return [
        None if any(said.cause for said in of_text) else np.median([said.logps for said in of_text], 0)
        for of_text in zip(*answers, strict=True)
    ]


def limit_of(texts: Sequence[Rollout], by_replica: Sequence[Sequence[Sequence[Said]]], *, exact: bool) -> float:
    """Return how far an answer may be from the reference, by how far the answers of one replica are from each other."""
    noise = [difference(texts, reference_of(its), answer).apart for its in by_replica for answer in its]
    return max(EXACT if exact else ROUNDED, NOISE * max(noise))


def furthest(numbers: Metrics, scored: Group) -> float:
    """Return how far the worst log-prob is from the learner's, by `Learner.compare`."""
    if any(handle.header.finish == "error" for handle in scored):
        return inf
    return max(value for name, value in numbers.items() if name.endswith("/difference_max"))


def misdated(versions: Set[int], oldest: int, newest: int) -> str:
    """Return what is wrong with the versions that tokens name, or an empty string."""
    if all(oldest <= version <= newest for version in versions):
        return ""
    between = f"only {newest}" if oldest == newest else f"{oldest} to {newest}"
    return f"its tokens name version {', '.join(map(str, sorted(versions)))}, and it can have had {between}"


def distrusted(numbers: Metrics, versions: Set[int], *, version: int, exact: bool) -> str:
    """Return what is wrong with answers that a sampler drew under the learner's own weights, or an empty string."""
    k3, ratio = numbers["drift/k3_kl"], numbers["drift/ppl_ratio"]
    wrong = misdated(versions, version, version)
    if wrong or (k3 <= KL[exact] and abs(ratio - 1) <= PERPLEXITY[exact]):  # NaN is not below
        return wrong
    return (
        f"with the weights of version {version} its log-probs are not the learner's: KL {k3:.2g} (limit "
        f"{KL[exact]:g}), perplexity ratio {ratio:.3f}: stale weights, or log-probs of another distribution"
    )
