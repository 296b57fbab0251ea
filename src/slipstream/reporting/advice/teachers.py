"""Rules about teachers: impossible or unrelated scores, another prompt or end token, and lower rewards."""

from math import exp, hypot, sqrt
from statistics import correlation, fmean

from slipstream.reporting.advice.measurements import (
    SURE_ERRORS,
    Case,
    Change,
    Evidence,
    Level,
    Line,
    kl_names,
    level,
    teacher_kl,
    values_of,
)

BELOW_ZERO = -0.05
"""Lowest mean reverse KL in nats that rounding can explain."""
UNUSABLE_SHARE = 0.1
"""Largest share of responses that a teacher may fail to score."""
ENOUGH_TOKENS = 256
"""Smallest number of tokens from which a teacher is judged."""
CERTAIN = 0.1
"""Smallest −log-prob of a student's least likely token, in nats; below it, a teacher cannot be compared."""
FIRST_TOKENS, FIRST_GAP = 4, 3.0
"""Number of first tokens of a response, and the limit of their mean log-prob gap in nats (a ratio of 20)."""
HEAD_FACTOR = 2.0
"""Smallest ratio of the gaps of first and later tokens: a teacher that sees another prompt recovers later."""
END_GAP = 4.6
"""Limit in nats for the log-prob gap of the end token between student and teacher (a ratio of 100)."""
FOREIGN_KL = 2.3
"""Limit in nats for the KL at the first updates: a ratio of 10 for every token."""
REPETITIVE = 0.3
"""Share of repeated 4-grams above which a student's text degenerates, if the share was lower at the start."""
FAR_GAP = 1.5
"""Mean log-prob gap in nats of all but the first tokens of a response, from which a student is far from its teacher."""
ENDLESS = 0.5
"""Share of responses without an end, from which a far student writes no answers yet."""
ALIKE_KL = 0.02
"""KL between student and teacher below which there is nothing to learn."""
LONG_RUN = 50
"""Updates after which a metric should have changed."""


def negative_kl(case: Case) -> Evidence | None:
    for name in sorted({name for line in case.late for name in kl_names(line)}):
        lines = [line for line in case.late if name in line]
        mean, error = fmean(values_of(lines, name)), hypot(*values_of(lines, f"{name}_error")) / len(lines)
        if len(lines) >= 3 and Level(mean, error).under(BELOW_ZERO):
            return Evidence(name, mean, BELOW_ZERO, run=case.doctor)
    return None


def fails(case: Case) -> Evidence | None:
    def total(name: str) -> float:
        return sum(values_of(case.late, name))

    names = {name for line in case.late for name in line if name.startswith("teacher/") and name.endswith("/invalid")}
    for name in sorted(names, key="teacher/invalid".__eq__):  # of each teacher, then of all
        of_teacher = name.removesuffix("/invalid")
        invalid, sound = total(name), total("samples" if of_teacher == "teacher" else f"{of_teacher}/samples")
        if invalid >= 3 and invalid / (invalid + sound) > UNUSABLE_SHARE:
            return Evidence(name, invalid / (invalid + sound), UNUSABLE_SHARE, run=case.doctor)
    differed, rechecked = total("teacher/differed"), total("teacher/rechecked")
    if differed >= 3 and differed / rechecked > UNUSABLE_SHARE:
        return Evidence("teacher/differed", differed / rechecked, UNUSABLE_SHARE, run=case.doctor, other_cause=True)
    return None


def another_teacher(case: Case) -> Evidence | None:
    """Find a teacher whose probabilities are not correlated with the student's.

    Unrelated probabilities have a correlation of mean 0 and standard deviation 1/√(n − 1). The limit is 3 of these.
    """
    if case.diverged_early:
        return None
    pairs = [pair for sample in case.samples for pair in pairs_of(sample)][: 4 * ENOUGH_TOKENS]
    if len(pairs) < ENOUGH_TOKENS or min(ours for ours, _ in pairs) > -CERTAIN:  # too few, or the student is certain
        return None
    ours_N, theirs_N = ([exp(logp) for logp in side] for side in zip(*pairs, strict=True))
    found = correlation(ours_N, theirs_N) if len(set(theirs_N)) > 1 else 0.0
    chance = SURE_ERRORS / sqrt(len(pairs) - 1)
    if found >= chance:
        return None
    return Evidence("samples.jsonl: correlation", found, chance, run=case.doctor)


def pairs_of(sample: Line) -> list[tuple[float, float]]:
    """Return the log-probs of a sample's trained tokens by the student that sampled them and by the teacher."""
    if sample.get("teacher_logp") is None:
        return []
    pairs = zip(sample["logp"], sample["teacher_logp"], strict=True)
    return [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]


def gaps_of(sample: Line) -> list[float]:
    """Return how much less likely each trained token of a sample is to the teacher than to the student, in nats."""
    return [ours - theirs for ours, theirs in pairs_of(sample)]


def far_student(case: Case) -> Evidence | None:
    """Find a student so far from its teacher that its rollouts teach it little: KL was large at the start.

    Either its text degenerates: reverse KL falls while a student repeats itself, because repetitions are easy to
    predict. Or it is still far, and most of its responses do not end.
    """
    repeated, before = case.now("student/repeated"), case.then("student/repeated")
    tails = [gaps[FIRST_TOKENS:] for gaps in map(gaps_of, case.first_samples)]
    gap = level([fmean(gaps) for gaps in tails if gaps])
    degenerates = repeated.over(REPETITIVE) and repeated.above(before)
    remains = case.kl_now.over(FAR_GAP) and case.now("truncated").over(ENDLESS)
    was_far = max(teacher_kl(case.lines[:3]).mean, gap.mean) > FAR_GAP
    if case.diverged_early or not was_far or not (degenerates or remains):
        return None
    source = "data" if any(teacher.base_url for teacher in case.config.teachers.values()) else "teacher"
    start = {"sft.updates": max(case.config.updates // 3, 1), "sft.source": source}
    changes: list[Change] = [start] if case.config.sft is None else []
    changes += [{"mix.source": source, "mix.share": 0.5}, {"loss.kind": "forward_kl"}]
    if not case.config.sampler.asks_teacher:
        changes += [{"sampler.teacher_replaces": 25}]
        changes += [{"sampler.fusion.alpha": 0.5, "sampler.fusion.updates": case.config.updates}]
    if degenerates:
        return Evidence("student/repeated", repeated.mean, REPETITIVE, changes)
    return Evidence("teacher/kl", case.kl_now.mean, FAR_GAP, changes)


def another_prompt(case: Case) -> Evidence | None:
    if case.diverged_early:
        return None
    degenerate = {line["update"] for line in case.lines if line.get("student/repeated", 0.0) > REPETITIVE}
    first = [gaps_of(sample) for sample in case.first_samples if sample["update"] not in degenerate]
    head = level([fmean(gaps[:FIRST_TOKENS]) for gaps in first if gaps])
    tails = [fmean(tail) for gaps in first if (tail := gaps[2 * FIRST_TOKENS :])]
    if head.over(FIRST_GAP) and (not tails or head.mean > HEAD_FACTOR * fmean(tails)):
        changes = [{f"teachers.{name}.context": None} for name, t in case.config.teachers.items() if t.context]
        return Evidence("samples.jsonl: gap of the first tokens", head.mean, FIRST_GAP, changes, run=case.doctor)
    start = teacher_kl(case.lines[:3])
    if not case.samples and start.over(FOREIGN_KL) and case.kl_now.mean > start.mean / 2:
        return Evidence("teacher/kl", start.mean, FOREIGN_KL, run=case.doctor)
    return None


def other_end(case: Case) -> Evidence | None:
    ended = [sample for sample in case.first_samples if sample.get("finish") == "eos"]
    gaps = [gaps_of(sample) for sample in ended]
    ends, rest = level([each[-1] for each in gaps if each]), [gap for each in gaps for gap in each[:-1]]
    if not ends.over(END_GAP) or (rest and ends.mean < fmean(rest) + END_GAP):
        return None
    check = f"slipstream config {case.at}/config.toml --check"
    return Evidence("samples.jsonl: gap of the last token", ends.mean, END_GAP, run=check)


def lowers_rewards(case: Case) -> Evidence | None:
    if case.fall is None or not case.kl_then.above(case.kl_now) or case.kl_now.above(case.kl_best):
        return None
    return Evidence(*case.fall, run=case.show_samples)


def nothing_to_teach(case: Case) -> Evidence | None:
    kl = teacher_kl(case.lines)
    if case.moving_teacher or case.config.policy is not None or len(case.lines) < LONG_RUN or not kl.under(ALIKE_KL):
        return None
    return Evidence("teacher/kl", kl.mean, ALIKE_KL)
