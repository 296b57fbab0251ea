"""Rules about teachers: impossible or unrelated scores, another prompt or end token, and lower rewards."""

from __future__ import annotations

from math import exp, hypot, sqrt
from statistics import correlation, fmean

from slipstream.reporting.advice.measurements import CHANCE, Case, Level, Line, distance, kls, level, values_of
from slipstream.reporting.advice.rules import Change, Found

BELOW_ZERO = -0.05
"""Lowest mean reverse KL in nats that rounding can explain."""
UNUSABLE = 0.1
"""Largest share of responses that a teacher may fail to score."""
ENOUGH = 256
"""Smallest number of tokens from which a teacher is judged."""
SURE = 0.1
"""Smallest −log-prob of a student's least likely token, in nats; below it, a teacher cannot be compared."""
HEAD, LOST = 4, 3.0
"""Number of first tokens of a response, and the limit of their mean log-prob gap in nats (a ratio of 20)."""
TWICE = 2.0
"""Smallest ratio of the gaps of first and later tokens: a teacher that sees another prompt recovers later."""
UNLIKELY = 4.6
"""Limit in nats for the log-prob gap of the end token between student and teacher (a ratio of 100)."""
FOREIGN = 2.3
"""Limit in nats for the KL at the first updates: a ratio of 10 for every token."""
REPETITIVE = 0.3
"""Share of repeated 4-grams above which a student's text degenerates, if the share was lower at the start."""
FAR = 1.5
"""Mean log-prob gap in nats of all but the first tokens of a response, from which a student is far from its teacher."""
ALIKE = 0.02
"""KL between student and teacher below which there is nothing to learn."""
PATIENCE = 50
"""Updates after which a metric should have changed."""


def negative_kl(case: Case) -> Found | None:
    for name in sorted({name for line in case.late for name in kls(line)}):
        lines = [line for line in case.late if name in line]
        mean, error = fmean(values_of(lines, name)), hypot(*values_of(lines, f"{name}_error")) / len(lines)
        if len(lines) >= 3 and Level(mean, error).under(BELOW_ZERO):
            return Found(name, mean, BELOW_ZERO, run=case.doctor)
    return None


def fails(case: Case) -> Found | None:
    invalid, samples, differed, rechecked = (
        sum(values_of(case.late, name))
        for name in ("teacher/invalid", "samples", "teacher/differed", "teacher/rechecked")
    )
    if invalid >= 3 and invalid / (invalid + samples) > UNUSABLE:
        return Found("teacher/invalid", invalid / (invalid + samples), UNUSABLE, run=case.doctor)
    if differed >= 3 and differed / rechecked > UNUSABLE:
        return Found("teacher/differed", differed / rechecked, UNUSABLE, run=case.doctor, cause=DIFFERED)
    return None


DIFFERED = (
    "Groups that were scored twice have different scores: replicas with different models, or a server that mixes up "
    "its requests."
)


def another_teacher(case: Case) -> Found | None:
    """Find a teacher whose probabilities are not correlated with the student's.

    Unrelated probabilities have a correlation of mean 0 and standard deviation 1/√(n − 1). The limit is 3 of these.
    """
    if case.diverged_early:
        return None
    pairs = [pair for sample in case.samples for pair in pairs_of(sample)][: 4 * ENOUGH]
    if len(pairs) < ENOUGH or min(ours for ours, _ in pairs) > -SURE:  # too few, or all certain to the student
        return None
    ours_N, theirs_N = ([exp(logp) for logp in side] for side in zip(*pairs, strict=True))
    found = correlation(ours_N, theirs_N) if len(set(theirs_N)) > 1 else 0.0
    chance = CHANCE / sqrt(len(pairs) - 1)
    if found >= chance:
        return None
    return Found("samples.jsonl: correlation", found, chance, run=case.doctor)


def pairs_of(sample: Line) -> list[tuple[float, float]]:
    """Return the log-probs of a sample's trained tokens by the student that sampled them and by the teacher."""
    if sample.get("teacher_logp") is None:
        return []
    pairs = zip(sample["logp"], sample["teacher_logp"], strict=True)
    return [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]


def far_student(case: Case) -> Found | None:
    """Find a student so far from its teacher that its rollouts teach it little: KL is large, and text degenerates.

    Reverse KL falls while such a student repeats itself, because repetitions are easy to predict.
    """
    repeated, before = case.now("student/repeated"), case.then("student/repeated")
    gaps = [
        fmean(ours - theirs for ours, theirs in pairs[HEAD:])
        for pairs in map(pairs_of, case.first_samples)
        if pairs[HEAD:]
    ]
    degenerates = repeated.over(REPETITIVE) and repeated.above(before)
    if case.diverged_early or not degenerates or not max(distance(case.lines[:3]).mean, level(gaps).mean) > FAR:
        return None
    source = "data" if any(teacher.base_url for teacher in case.config.teachers.values()) else "teacher"
    start = {"sft.updates": max(case.config.updates // 3, 1), "sft.source": source}
    changes: list[Change] = [start] if case.config.sft is None else []
    changes += [{"mix.source": source, "mix.share": 0.5}, {"loss.kind": "forward_kl"}]
    return Found("student/repeated", repeated.mean, REPETITIVE, changes)


def another_prompt(case: Case) -> Found | None:
    if case.diverged_early:
        return None
    first = [pairs_of(sample) for sample in case.first_samples]
    heads = [fmean(ours - theirs for ours, theirs in pairs[:HEAD]) for pairs in first if pairs]
    tails = [fmean(ours - theirs for ours, theirs in pairs[2 * HEAD :]) for pairs in first if len(pairs) > 2 * HEAD]
    head = level(heads)
    if head.over(LOST) and (not tails or head.mean > TWICE * fmean(tails)):
        changes = [{f"teachers.{name}.context": None} for name, t in case.config.teachers.items() if t.context]
        return Found("samples.jsonl: gap of the first tokens", head.mean, LOST, changes, run=case.doctor)
    start = distance(case.lines[:3])
    if not case.samples and start.over(FOREIGN) and case.kl_now.mean > start.mean / 2:
        return Found("teacher/kl", start.mean, FOREIGN, run=case.doctor)
    return None


def other_end(case: Case) -> Found | None:
    ended = [sample for sample in case.first_samples if sample.get("finish") == "eos"]
    gaps = [[ours - theirs for ours, theirs in pairs_of(sample)] for sample in ended]
    ends, rest = level([each[-1] for each in gaps if each]), [gap for each in gaps for gap in each[:-1]]
    if not ends.over(UNLIKELY) or (rest and ends.mean < fmean(rest) + UNLIKELY):
        return None
    check = f"slipstream config {case.at}/config.toml --check"
    return Found("samples.jsonl: gap of the last token", ends.mean, UNLIKELY, run=check)


def lowers_rewards(case: Case) -> Found | None:
    if case.fall is None or not case.kl_then.above(case.kl_now) or case.kl_now.above(case.kl_best):
        return None
    return Found(*case.fall, run=case.show_samples)


def nothing_to_teach(case: Case) -> Found | None:
    kl = distance(case.lines)
    if case.moving_teacher or case.config.policy is not None or len(case.lines) < PATIENCE or not kl.under(ALIKE):
        return None
    return Found("teacher/kl", kl.mean, ALIKE)
