"""Do the engines agree? A few prompts through the user's own engines, before a run that would take days to show it.

The numbers come from the engines, the judgement is here: pure functions from numbers to findings, each with its fix.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from math import exp
from typing import Any

import numpy as np

from slipstream.config.schema import HealthConfig
from slipstream.errors import ModelError
from slipstream.metrics import episode_metrics, trust_metrics
from slipstream.pipeline.pool import names, scorer_name
from slipstream.pipeline.publish import load, load_teacher
from slipstream.plan.ends import EndProbe, named, what_to_write
from slipstream.plan.engines import EnginesPlan
from slipstream.plan.plan import Plan
from slipstream.protocols import Engines, Metrics, of_teacher
from slipstream.records import Batch, Group, Header, Prompt

PROMPTS, TOKENS = 8, 32
"""How many prompts are tried, and how long the answers are."""
ENOUGH, ROUNDS = 256, 8
"""Tokens by which a teacher is judged; for so many, short answers are drawn to further prompts, so often."""
SHORT = 8
"""Tokens of the longest answer below which probabilities hardly vary, so that a low correlation proves nothing."""
FEW = 64
"""Tokens that are too few to find a teacher guilty."""
CHANCE = 3.0
"""Standard deviations that are no chance: once in 700."""
LIKELY, PREFERRED = 0.1, 100
"""Probability at which an end token is expected, and times that of the student's at which it alone is."""
SURE = 1e-3
"""Nats between a student's surest token and its least sure one that are nothing to compare by."""


@dataclass(frozen=True)
class Finding:
    name: str
    ok: bool
    said: str
    fix: str = ""
    fatal: bool = True
    """Whether a run must not begin with it."""


class CheckFailed(ModelError):
    """Something is wrong that training would not survive, or worse, would."""


@dataclass(frozen=True)
class Limits:
    """What two engines with the same weights may differ by."""

    pearson: float
    k3: float
    ppl: float
    teacher: float

    @classmethod
    def of(cls, plan: EnginesPlan) -> Limits:
        """Half precision rounds; float32 on both sides has no excuse."""
        half = "bfloat16" in plan.precisions
        return cls(0.99, 2e-2, 0.05, 0.5) if half else cls(0.999, 1e-3, 0.01, 2e-2)


async def quick(plan: Plan, engines: Engines, prompts: Sequence[Prompt], *, version: int) -> list[Finding]:
    """What `train` looks at before it begins: sampler against learner, and the teacher's rows."""
    await publish(engines)
    for teacher in plan.engines.learner.follow:
        await publish_to(engines, teacher)
    groups = await rolled(plan, engines, prompts)
    failed, groups = failing(groups), answered(groups)
    if any(each.fatal for each in failed):
        return failed
    returned = [rewarding(groups)] if plan.engines.grader.rewards and not has_agents(plan) else []
    groups = await scored(engines, groups)
    for teacher in plan.engines.scorers:
        groups += await until_enough(plan, engines, teacher, groups)
    headers = [handle.header for group in groups for handle in group]
    if furthest := long_prompt(plan, prompts):
        # with the others: what a long sequence does to a short one beside it is looked at too
        groups += answered(await rolled(plan, engines, [furthest]))
    numbers = await engines.learner.compare(Batch(tuple(groups), version + 1))
    ends = [await same_end(plan, engines, teacher) for teacher in plan.ends]
    return [
        *agreement(numbers, Limits.of(plan.engines), groups),
        *teachers(numbers, headers),
        *ends,
        *returned,
        *failed,
    ]


async def same_end(plan: Plan, engines: Engines, teacher: str) -> Finding:
    """Ask a teacher, after right answers of the data, how likely each end token is: its own, and the student's."""
    probe, scorer = plan.ends[teacher], of_teacher(engines.scorers, teacher)[0]
    chance = dict[int, float]()
    for end in (*probe.stops, *probe.others):
        scored = await scorer.score(probe.ended(end, plan.sampling, teacher=teacher))
        chance[end] = sum(exp(-h.header.gap) for h in scored if h.header.finish != "error") / len(scored)
    return judged_ends(teacher, probe, chance)


def judged_ends(teacher: str, probe: EndProbe, chance: Mapping[int, float]) -> Finding:
    """Judge by the mean probability of each end token."""
    stop, other = max(probe.stops, key=chance.__getitem__), max(probe.others, key=chance.__getitem__)
    its, own = named({other: probe.others[other]}), named({stop: probe.stops[stop]})
    said = f"after {len(probe.answers)} right answers it ends with {own} at probability {chance[stop]:.2g}"
    name = f"teacher {teacher} ends answers as the student does"
    if chance[other] < LIKELY or chance[other] < PREFERRED * chance[stop]:
        return Finding(name, True, said)
    said += f", with {its}, at which the student does not stop, at {chance[other]:.2g}"
    return Finding(name, False, said, what_to_write(its, own))


async def until_enough(plan: Plan, engines: Engines, teacher: str, groups: Sequence[Group]) -> list[Group]:
    """Answers to further prompts of a teacher, scored, if these have too few tokens to judge it by."""
    found, its = list[Group](), (p for p in map(plan.prompts.at, count(PROMPTS)) if p.teacher == teacher)
    for _ in range(ROUNDS):
        headers = [handle.header for group in (*groups, *found) for handle in group]
        if sum(header.trained_tokens for header in headers if header.teacher == teacher) >= ENOUGH:
            break
        found += await scored(engines, await rolled(plan, engines, list(islice(its, PROMPTS))))
    return found


def long_prompt(plan: Plan, prompts: Sequence[Prompt]) -> Prompt | None:
    """After which an answer reaches as far as the longest sequence of the run; none where that is hardly longer."""
    prompt = max(prompts, key=lambda each: len(each.tokens))
    wanted = (plan.engines.learner.student.longest or 0) - min(TOKENS, plan.sampling.max_tokens)
    return replace(prompt, tokens=np.resize(prompt.tokens, wanted)) if wanted > len(prompt.tokens) + TOKENS else None


async def publish(engines: Engines) -> str:
    """Returns the fingerprint of what all samplers then run."""
    weights, expected = await engines.learner.export()
    for name, sampler in zip(names("sampler", len(engines.samplers)), engines.samplers, strict=True):
        await load(sampler, name, weights, expected, mode="drain")
    return expected


async def publish_to(engines: Engines, teacher: str) -> None:
    """Of one that follows the student, every scorer runs what it should."""
    weights, expected = await engines.learner.export(teacher)
    scorers: Any = engines.scorers[teacher]
    for name, scorer in zip(names(scorer_name(teacher, engines.scorers), len(scorers)), scorers, strict=True):
        await load_teacher(scorer, name, weights, expected)


def has_agents(plan: Plan) -> bool:
    there = plan.engines.sampler.environment
    return there is not None and there.gateway is not None


async def rolled(
    plan: Plan, engines: Engines, prompts: Sequence[Prompt], *, group: int = 1, tokens: int = TOKENS
) -> list[Group]:
    """Samples from every sampler in turn, short ones, of the whole distribution; no agent is started for such."""
    usual, alone = plan.sampling, tokens == TOKENS and has_agents(plan)
    sampling = replace(
        usual, max_tokens=min(tokens, usual.max_tokens), group=group, top_p=1.0, top_k=0, min_p=0.0, alone=alone
    )
    samplers = engines.samplers
    calls = [samplers[i % len(samplers)].generate(prompt, sampling) for i, prompt in enumerate(prompts)]
    return list(await asyncio.gather(*calls))


async def compared(engines: Engines, groups: Sequence[Group], *, update: int) -> Metrics:
    """The learner's view of these samples, scored if there is a teacher."""
    return await engines.learner.compare(Batch(tuple(await scored(engines, groups)), update))


def answered(groups: Sequence[Group]) -> list[Group]:
    """Without the episodes that were left out."""
    there: list[Group] = [[handle for handle in group if handle.header.finish != "error"] for group in groups]
    return [group for group in there if group]


async def scored(engines: Engines, groups: Sequence[Group]) -> list[Group]:
    groups = answered(groups)
    scorers = [of_teacher(engines.scorers, group[0].header.teacher)[0] for group in groups]
    return list(await asyncio.gather(*[s.score(group) for s, group in zip(scorers, groups, strict=True)]))


def agreement(numbers: Metrics, limits: Limits, groups: Sequence[Group]) -> list[Finding]:
    longest = max(handle.header.prompt_tokens + handle.header.tokens for group in groups for handle in group)
    pearson, k3, ppl = (numbers[f"drift/{name}"] for name in ("probs_pearson", "k3_kl", "ppl_ratio"))
    said = (
        f"Pearson {pearson:.6f}, largest difference {numbers['drift/probs_diff_max']:.2g}, KL {k3:.2g}, "
        f"perplexity ratio {ppl:.4f}, sequences of up to {longest} tokens"
    )
    # where all tokens are nearly certain, a correlation is one of rounding errors
    alike = pearson >= limits.pearson or k3 <= limits.k3 / 100
    same = alike and k3 <= limits.k3 and abs(ppl - 1) <= limits.ppl
    return [Finding("sampler and learner, one checkpoint", same, said, "" if same else cause(numbers))]


def failing(groups: Sequence[Group]) -> list[Finding]:
    """Of environments: whatever a student says, they answer. A run may begin without some rows, but not with an
    environment that raises, or that fails for all of them."""
    headers = [handle.header for group in groups for handle in group]
    causes = Counter(header.cause for header in headers if header.finish == "error")
    if not causes:
        return []
    (cause, _), *_ = causes.most_common()
    said = f"{causes.total()} of {len(headers)} episodes failed, each time it was tried: {cause}"
    fatal = causes.total() == len(headers) or any("failed/error" in header.outcome for header in headers)
    return [Finding("environment", False, said, "such episodes are left out; see docs/environments.md", fatal=fatal)]


async def episodes(plan: Plan, engines: Engines, prompts: Sequence[Prompt]) -> list[Finding]:
    """Whole ones, with their rewards; nothing where there is no environment."""
    if plan.engines.sampler.environment is None:
        return []
    groups = await rolled(plan, engines, prompts, tokens=plan.sampling.max_tokens)
    failed, groups = failing(groups), answered(groups)
    if any(each.fatal for each in failed):
        return failed
    headers = [handle.header for group in groups for handle in group]
    seen, ends = episode_metrics(headers), Counter(header.finish for header in headers)
    said = (
        f"{len(headers)} whole episodes: {seen['episode/turns']:.1f} turns, {seen['episode/calls']:.1f} calls, "
        f"{seen['episode/invalid']:.0%} with an invalid one, {seen['episode/seconds']:.2g} s for tools; ended by "
        + ", ".join(f"{end} {count}" for end, count in ends.most_common())
    )
    rewards = [rewarding(groups)] if plan.engines.grader.rewards else []
    return [*failed, Finding("environment", True, said), *(replace(each, name="rewards of these") for each in rewards)]


def rewarding(groups: Sequence[Group]) -> Finding:
    """What rewards make of a few short answers. That they differ is not to be expected of those."""
    headers = [handle.header for group in groups for handle in group]
    names = dict.fromkeys(name for header in headers for name in header.rewards)
    said = [
        f"{name} " + " ".join(f"{header.rewards[name]:.3g}" for header in headers if name in header.rewards)
        for name in names
    ]
    why = Counter(header.ungraded.said for header in headers if header.ungraded is not None)
    said += [f"none for {count} of {len(headers)}: {each}" for each, count in why.items()]
    fix = "such answers are dropped; see docs/rewards.md" if why else ""
    return Finding("rewards of a few short answers", not why, "; ".join(said), fix, fatal=why.total() == len(headers))


def cause(numbers: Metrics) -> str:
    """What kind of disagreement it looks like."""
    if numbers["drift/probs_pearson"] < 0.8:
        return "these are different models: do weights arrive, and do sampler and learner load one student?"
    if abs(numbers["drift/sharpness"] - 1) > 0.05:
        return (
            "one is surer than the other of the same tokens: another temperature on one side? Log-probs must "
            "be of the distribution that drew, at sampler.temperature"
        )
    return "precision: give both sides one dtype (sampler.dtype, learner.compute_dtype), float32 to see if that is all"


def teachers(numbers: Metrics, headers: Sequence[Header]) -> list[Finding]:
    """What each of them says of the student's tokens can be used, is no lie that shows, and is of those tokens."""
    found = []
    for name in sorted({header.teacher for header in headers if header.teacher}):
        its = [header for header in headers if header.teacher == name]
        seen = {key.rpartition("/")[2]: value for key, value in numbers.items() if key.startswith(f"teacher/{name}/")}
        seen |= {"longest": max(header.tokens for header in its)} if seen else {}
        found.append(usable(name, its) or below_zero(name, its) or in_place(name, seen))
    return found


def usable(name: str, headers: Sequence[Header]) -> Finding | None:
    failed = [header for header in headers if header.finish == "error"]
    if not failed:
        return None
    said = f"{len(failed)} of {len(headers)} answers cannot be learned from, as {failed[0].cause}"
    return Finding(f"teacher {name}", False, said, "no model says that: what serves it, and in which precision?")


def below_zero(name: str, headers: Sequence[Header]) -> Finding | None:
    """A teacher cannot find likelier what the student says than the student itself does, on average."""
    numbers = trust_metrics(headers)
    kl, error = numbers.get("teacher/kl", 0.0), numbers.get("teacher/kl_error", 0.0)
    if kl + CHANCE * error >= -HealthConfig().kl:
        return None
    said = f"mean reverse KL to it {kl:.2f} ± {error:.2f}, and no distribution is below 0"
    return Finding(f"teacher {name}", False, said, "its log-probs are not of these tokens, or are no log-probs")


def in_place(name: str, seen: Metrics) -> Finding:
    """A teacher's row says how likely *this* token is: what the student finds hard it finds hard, in the same row.

    How large must the correlation be? Had the teacher's numbers nothing to do with these tokens, each might as well
    stand at any other: over all permutations of them the correlation has mean 0 and standard deviation 1/√(n − 1),
    exactly, whatever the numbers are and however few. So `CHANCE` of these is the bar, and it is lower the more tokens
    there are: 0.19 for the 256 that are drawn, if need be from many short answers. Below 64 (0.38) nobody is found
    guilty for less. A token after the same words counts once, and shifted by one, what has a neighbour.
    """
    name = f"teacher {name}"
    if not seen or not seen["student_spread"] > SURE:
        said = "the student is sure of every token that was tried"
        return Finding(name, False, said, "which leaves nothing to compare it by", fatal=False)
    n, aligned, shifted = seen["tokens"], seen["aligned"], seen["shifted"]
    chance, among_neighbours = (CHANCE / max(count - 1, 1) ** 0.5 for count in (n, seen["neighbours"]))
    said = f"over {n:.0f} tokens its correlation is {aligned:.2f}, shifted by one {shifted:.2f}, by chance {chance:.2f}"
    if seen["spread"] == 0 and n >= PROMPTS:
        fix = "it says the same of every token: is that a model at all?"
    elif shifted - aligned > among_neighbours and shifted > among_neighbours:
        fix = "the rows are shifted by one token: row t must be about token t, given all before it"
    elif aligned < -chance:
        fix = "it finds likely what the student finds unlikely: are these negative log-probs, with the sign lost?"
    elif aligned < chance and (n < FEW or seen.get("longest", SHORT) < SHORT):
        return Finding(name, False, said, "too few different tokens, or too short answers, to judge it by", fatal=False)
    elif aligned < chance:
        fix = "it has nothing to do with these tokens: another model, another tokenizer, rows of another request?"
    else:
        return Finding(name, True, said)
    return Finding(name, False, said, fix)


def itself(numbers: Metrics, limits: Limits) -> Finding:
    """The student as its own teacher, through the whole path: nothing to learn."""
    (gap,) = [value for name, value in numbers.items() if name.endswith("/difference_max")]
    return Finding(
        "a teacher equal to the student teaches nothing",
        gap <= limits.teacher,
        f"largest difference of a log-prob {gap:.2g}",
        "" if gap <= limits.teacher else "sampler, scorer and learner do not mean the same tokens or temperature",
    )


def raised(findings: Sequence[Finding]) -> None:
    for finding in findings:
        if not finding.ok and finding.fatal:
            raise CheckFailed(f"{finding.name}: {finding.said}; {finding.fix} (train --skip-checks goes on regardless)")
