"""Start checks: process a few prompts by all engines, to find engines that disagree before a long run.

Coroutines collect numbers from the engines; pure functions turn the numbers into findings with advice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import numpy as np

from slipstream.config.base import Rounding
from slipstream.config.running import HealthConfig
from slipstream.errors import ModelError
from slipstream.metrics import episode_metrics, trust_metrics
from slipstream.pipeline.control.canary import HALF_KL, HALF_PERPLEXITY, KL, PERPLEXITY
from slipstream.pipeline.pool import names, scorer_name
from slipstream.pipeline.publish import load, load_teacher
from slipstream.plan.ends import EndProbe, end_advice, names_of_ends
from slipstream.plan.known_texts import judged
from slipstream.plan.plan import Plan
from slipstream.plan.templates import FAR, TemplateProbe, mean_logps
from slipstream.protocols import Engines, Metrics, of_teacher
from slipstream.records import Batch, Group, Header, Prompt

PEARSON: dict[Rounding, float] = {"exact": 0.999, "half": 0.99, "int8": 0.99, "fp8": 0.97}
"""Smallest correlation of the probabilities of sampler and learner."""
COARSE_PEARSON, TREND = 0.97, 0.05
"""In 16 bits, smallest correlation if the differences are of either sign, and largest |slope − 1| of log-probs."""
COARSE = "16 bits round this student coarsely: use importance weights (docs/learner.md), or float32"
PROMPTS, TOKENS = 8, 32
"""Number of prompts per round of sampling, and maximum tokens of an answer."""
SEARCHED = 200
"""Number of prompts among which the first prompt of every environment is searched."""
FAR_AWAY = 2.0
"""Mean reverse KL per token, in nats, from which on the finding says that the student writes other text."""
CHANCE = 3.0
"""Number of standard deviations that chance alone exceeds, on one side, in one of about 700 cases."""
LIKELY, PREFERRED = 0.1, 100
"""A teacher prefers another end token if its probability is at least LIKELY and PREFERRED times the student token's."""


@dataclass(frozen=True)
class Finding:
    name: str
    ok: bool
    detail: str
    fix: str = ""
    fatal: bool = True
    """True: if `ok` is False, the run may not start."""


class CheckFailed(ModelError):
    """A start check failed: training would crash, or would use wrong numbers."""


def first_prompts(plan: Plan) -> list[Prompt]:
    """Return the first prompts of a run, and the first of every environment."""
    prompts = [plan.prompts.at(number) for number in range(PROMPTS)]
    missing = plan.engines.sampler.environments.keys() - {prompt.environment for prompt in prompts}
    for prompt in map(plan.prompts.at, range(PROMPTS, SEARCHED if missing else PROMPTS)):
        if prompt.environment in missing:
            prompts.append(prompt)
            missing.discard(prompt.environment)
    return prompts


def agents_of(plan: Plan) -> set[str]:
    """Return the names of the environments whose episodes are those of external agents."""
    return {name for name, each in plan.engines.sampler.environments.items() if each.gateway is not None}


async def start_checks(plan: Plan, engines: Engines, prompts: Sequence[Prompt], *, version: int) -> list[Finding]:
    """Run the start checks of `train`: sampler against learner, teachers, end tokens, and rewards."""
    await publish(engines)
    for teacher in plan.engines.learner.follow:
        weights, expected = await engines.learner.export(teacher)
        scorers: Any = engines.scorers[teacher]
        for name, scorer in zip(names(scorer_name(teacher, engines.scorers), len(scorers)), scorers, strict=True):
            await load_teacher(scorer, name, weights, expected)
    groups = await sample_groups(plan, engines, prompts)
    failed, groups = failure_findings(groups), without_failed(groups)
    if any(each.fatal for each in failed):
        return failed
    agents = agents_of(plan)
    rewarded = [group for group in groups if group[0].header.environment not in agents]
    returned = [reward_finding(rewarded)] if plan.engines.grader.rewards and rewarded else []
    groups = await scored(engines, groups)
    headers = [handle.header for group in groups for handle in group]
    if furthest := long_prompt(plan, prompts):
        # in one batch with the others, to find out if a long sequence changes the log-probs of a short one
        groups += without_failed(await sample_groups(plan, engines, [furthest]))
    numbers = await engines.learner.compare(Batch(tuple(groups), version + 1))
    ends = [await same_end(plan, engines, teacher) for teacher in plan.teachers.ends]
    ends += [await known_template(plan, engines, teacher) for teacher in plan.teachers.templates]
    same = agreement(numbers, plan.engines.rounding, groups)
    taught = [await known_scores(plan, engines, teacher, headers) for teacher in plan.engines.scorers]
    return [*same, *taught, *ends, *returned, *failed]


async def same_end(plan: Plan, engines: Engines, teacher: str) -> Finding:
    """Let a teacher score its own and the student's end tokens after right answers; return a finding."""
    probe, scorer = plan.teachers.ends[teacher], of_teacher(engines.scorers, teacher)[0]
    chance = dict[int, float]()
    for end in (*probe.stops, *probe.others):
        scored = await scorer.score(probe.ended(end, plan.sampling, teacher=teacher))
        chance[end] = sum(exp(-h.header.gap) for h in scored if h.header.finish != "error") / len(scored)
    return judged_ends(teacher, probe, chance)


def judged_ends(teacher: str, probe: EndProbe, chance: Mapping[int, float]) -> Finding:
    """Return the finding about a teacher's end tokens. `chance`: the teacher's mean probability of each token id."""
    stop, other = max(probe.stops, key=chance.__getitem__), max(probe.others, key=chance.__getitem__)
    other_end, student_end = names_of_ends({other: probe.others[other]}), names_of_ends({stop: probe.stops[stop]})
    detail = f"after {len(probe.answers)} right answers it ends with {student_end} at probability {chance[stop]:.2g}"
    name = f"teacher {teacher} ends answers as the student does"
    if chance[other] < LIKELY or chance[other] < PREFERRED * chance[stop]:
        return Finding(name, True, detail)
    detail += f", with {other_end}, at which the student does not stop, at {chance[other]:.2g}"
    return Finding(name, False, detail, end_advice(f"teachers.{teacher}", probe.others[other]))


async def known_template(plan: Plan, engines: Engines, teacher: str) -> Finding:
    """Let a teacher score prompts in the student's template and in its own form; return a finding, never fatal."""
    probe, scorer = plan.teachers.templates[teacher], of_teacher(engines.scorers, teacher)[0]
    logps = mean_logps(await scorer.probe(probe.texts(plan.sampling)))
    return judged_template(teacher, probe, *logps, vocabulary=plan.engines.scorers[teacher].vocabulary)


def judged_template(teacher: str, probe: TemplateProbe, seen: float, own: float, *, vocabulary: int) -> Finding:
    """Return the finding about a teacher's mean log-probs per token of prompts as it sees them, and in its own form.

    A teacher whose own form is less likely than random tokens never learned to predict prompts, and passes.
    """
    far = own - seen >= FAR and own > -log(vocabulary)
    detail = f"log-prob per token of {len(probe.prompts)} prompts {seen:.2f}, of the same in {probe.own} {own:.2f}"
    fix = f"write a teacher that was trained with this template, or its own prompt in teachers.{teacher}.context"
    return Finding(f"teacher {teacher} knows the student's template", not far, detail, fix if far else "", fatal=False)


def long_prompt(plan: Plan, prompts: Sequence[Prompt]) -> Prompt | None:
    """Return a prompt that with its answer is as long as the run's longest sequence; None if others nearly are."""
    prompt = max(prompts, key=lambda each: len(each.tokens))
    wanted = (plan.engines.learner.student.max_length or 0) - min(TOKENS, plan.sampling.max_tokens)
    return replace(prompt, tokens=np.resize(prompt.tokens, wanted)) if wanted > len(prompt.tokens) + TOKENS else None


async def publish(engines: Engines) -> str:
    """Load the learner's weights into all samplers; return the fingerprint of the weights."""
    weights, expected = await engines.learner.export()
    for name, sampler in zip(names("sampler", len(engines.samplers)), engines.samplers, strict=True):
        await load(sampler, name, weights, expected, mode="drain")
    return expected


async def sample_groups(
    plan: Plan, engines: Engines, prompts: Sequence[Prompt], *, group: int = 1, tokens: int = TOKENS
) -> list[Group]:
    """Sample answers of the student alone, without top_p, top_k and min_p, from all samplers in turn.

    Short answers use no agents.
    """
    agents, samplers = agents_of(plan) if tokens == TOKENS else set(), engines.samplers
    whole: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "keep_mask": False}
    whole |= {"teacher_replaces": 0, "fusion": 0.0}
    limit = min(tokens, plan.sampling.max_tokens)
    sampling = replace(plan.sampling, max_tokens=limit, group=group, **whole)
    calls = [
        samplers[i % len(samplers)].generate(prompt, replace(sampling, alone=prompt.environment in agents))
        for i, prompt in enumerate(prompts)
    ]
    return list(await asyncio.gather(*calls))


async def compared(engines: Engines, groups: Sequence[Group], *, update: int) -> Metrics:
    return await engines.learner.compare(Batch(tuple(await scored(engines, groups)), update))


def without_failed(groups: Sequence[Group]) -> list[Group]:
    complete: list[Group] = [[handle for handle in group if handle.header.finish != "error"] for group in groups]
    return [group for group in complete if group]


async def scored(engines: Engines, groups: Sequence[Group]) -> list[Group]:
    groups = without_failed(groups)
    scorers = [of_teacher(engines.scorers, group[0].header.teacher)[0] for group in groups]
    return list(await asyncio.gather(*[s.score(group) for s, group in zip(scorers, groups, strict=True)]))


def agreement(numbers: Metrics, rounding: Rounding, groups: Sequence[Group]) -> list[Finding]:
    longest = max(handle.header.prompt_tokens + handle.header.tokens for group in groups for handle in group)
    pearson, k3, ppl = (numbers[f"drift/{name}"] for name in ("probs_pearson", "k3_kl", "ppl_ratio"))
    detail = (
        f"Pearson {pearson:.6f}, largest difference {numbers['drift/probs_diff_max']:.2g}, KL {k3:.2g}, "
        f"perplexity ratio {ppl:.4f}, sequences of up to {longest} tokens"
    )
    # if all tokens are nearly certain, rounding errors dominate the correlation
    alike = pearson >= PEARSON[rounding] or k3 <= KL[rounding] / 100
    same = alike and k3 <= KL[rounding] and abs(ppl - 1) <= PERPLEXITY[rounding]
    if not same and rounding == "half" and rounds_coarsely(numbers):
        same, detail = True, f"{detail}; {COARSE}"
    fix = "" if same else mismatch_cause(numbers, rounding)
    return [Finding("sampler and learner, one checkpoint", same, detail, fix)]


def rounds_coarsely(numbers: Metrics) -> bool:
    """Return whether large differences in 16 bits look like rounding: of either sign, without a trend."""
    pearson, k3, ppl, slope = (
        numbers[f"drift/{name}"] for name in ("probs_pearson", "k3_kl", "ppl_ratio", "sharpness")
    )
    centred = abs(ppl - 1) <= HALF_PERPLEXITY and abs(slope - 1) <= TREND
    return pearson >= COARSE_PEARSON and k3 <= HALF_KL and centred


def failure_findings(groups: Sequence[Group]) -> list[Finding]:
    """Return a finding if episodes failed; fatal if all episodes failed, or if the environment raised an exception."""
    headers = [handle.header for group in groups for handle in group]
    causes = Counter(header.cause for header in headers if header.finish == "error")
    if not causes:
        return []
    (commonest, _), *_ = causes.most_common()
    detail = f"{causes.total()} of {len(headers)} episodes failed in every attempt: {commonest}"
    fatal = causes.total() == len(headers) or any("failed/error" in header.outcome for header in headers)
    return [Finding("environment", False, detail, "such episodes are left out; see docs/environments.md", fatal=fatal)]


async def episodes(plan: Plan, engines: Engines, prompts: Sequence[Prompt]) -> list[Finding]:
    """Run complete episodes; return findings on them and their rewards, or an empty list without environment."""
    if not plan.engines.sampler.environments:
        return []
    groups = await sample_groups(plan, engines, prompts, tokens=plan.sampling.max_tokens)
    failed, groups = failure_findings(groups), without_failed(groups)
    if any(each.fatal for each in failed):
        return failed
    found = episode_finding([handle.header for group in groups for handle in group])
    rewards = [replace(reward_finding(groups), name="rewards of these")] if plan.engines.grader.rewards else []
    return [*failed, found, *rewards]


def episode_finding(headers: Sequence[Header]) -> Finding:
    """Return a finding on whole episodes, which passes: an untrained student may play badly."""
    seen, ends = episode_metrics(headers), Counter(header.finish for header in headers)
    detail = (
        f"{len(headers)} whole episodes: {seen['episode/turns']:.1f} turns, {seen['episode/calls']:.1f} calls, "
        f"{seen['episode/invalid']:.0%} with an invalid one, {seen['episode/seconds']:.2g} s for tools; ended by "
        + ", ".join(f"{end} {count}" for end, count in ends.most_common())
    )
    calls, invalid = (sum(header.outcome.get(name, 0.0) for header in headers) for name in ("calls", "invalid"))
    if calls and invalid >= calls:
        detail += (
            f"; none of the {calls:.0f} calls is valid: if the student does not know their format, [sft] first helps"
        )
    if (crashed := seen["episode/crashed"]) > 0:
        detail += f"; {crashed:.0%} of the agents ended with an error, and their work is judged as it is"
    return Finding("environment", True, detail)


def reward_finding(groups: Sequence[Group]) -> Finding:
    """Return a finding on the rewards of a few short answers. Missing rewards are a failure; equal rewards are not."""
    headers = [handle.header for group in groups for handle in group]
    names = dict.fromkeys(name for header in headers for name in header.rewards)
    detail = [
        f"{name} " + " ".join(f"{header.rewards[name]:.3g}" for header in headers if name in header.rewards)
        for name in names
    ]
    why = Counter((header.environment, header.ungraded.text) for header in headers if header.ungraded is not None)
    for (environment, each), count in why.items():
        of = f" in environments.{environment}" if environment else ""
        detail.append(f"none for {count} of {len(headers)}{of}: {each}")
    graded = {header.environment for header in headers if header.ungraded is None}
    fatal = any(header.environment not in graded for header in headers)
    fix = "such answers are dropped; see docs/rewards.md" if why else ""
    return Finding("rewards of a few short answers", not why, "; ".join(detail), fix, fatal=fatal)


def mismatch_cause(numbers: Metrics, rounding: Rounding) -> str:
    if numbers["drift/probs_pearson"] < 0.8:
        return "these are different models: check that weights arrive, and that sampler and learner load one student"
    if abs(numbers["drift/sharpness"] - 1) > TREND:
        return (
            "one side is more certain than the other of the same tokens: check temperatures. Log-probs must be of the "
            "distribution that was sampled from, at sampler.temperature"
        )
    if rounding in ("int8", "fp8"):
        return (
            f'sampler.quantisation = "{rounding}" changes this student by more than KL {KL[rounding]:g}: '
            "write another one, or drop it"
        )
    return "precision: give both sides one dtype (sampler.dtype, learner.compute_dtype); try float32 to confirm"


async def known_scores(plan: Plan, engines: Engines, teacher: str, headers: Sequence[Header]) -> Finding:
    """Return the finding on a teacher's scores: of the student's answers, and of text that is known to be language."""
    theirs = [header for header in headers if header.teacher == teacher]
    if finding := impossible_finding(teacher, theirs):
        return finding
    verdict = await judged(plan.known[teacher], plan.config.teachers[teacher], of_teacher(engines.scorers, teacher)[0])
    detail, kl = verdict.detail, trust_metrics(theirs).get("teacher/kl", 0.0)
    if kl >= FAR_AWAY:
        detail += f"; the student's text is far from its own (reverse KL {kl:.1f} per token): [sft] first helps"
    return Finding(f"teacher {teacher}", not verdict.fault, detail, verdict.fault, fatal=verdict.sure)


def impossible_finding(name: str, headers: Sequence[Header]) -> Finding | None:
    """Return a finding if scores are unusable, or if chance cannot explain a mean KL below 0; a true KL never is."""
    if failed := [header for header in headers if header.finish == "error"]:
        detail = f"{len(failed)} of {len(headers)} answers cannot be learned from, as {failed[0].cause}"
        fix = "no model gives such scores: check its server and its precision"
        return Finding(f"teacher {name}", False, detail, fix)
    numbers = trust_metrics(headers)
    kl, error = numbers.get("teacher/kl", 0.0), numbers.get("teacher/kl_error", 0.0)
    if kl + CHANCE * error >= -HealthConfig().kl:
        return None
    detail = f"mean reverse KL to it {kl:.2f} ± {error:.2f}, and no distribution is below 0"
    return Finding(f"teacher {name}", False, detail, "its log-probs are not of these tokens, or are no log-probs")


def self_taught_finding(numbers: Metrics, rounding: Rounding) -> Finding:
    """Return a finding on the student as its own teacher: the scores must equal the learner's log-probs."""
    (gap,) = [value for name, value in numbers.items() if name.endswith("/difference_max")]
    name, detail = "a teacher equal to the student teaches nothing", f"largest difference of a log-prob {gap:.2g}"
    same = gap <= (0.02 if rounding == "exact" else 0.5)
    fix = "" if same else "sampler, scorer and learner differ in tokens or temperature"
    return Finding(name, same, detail, fix)


def raise_fatal(findings: Sequence[Finding]) -> None:
    for finding in findings:
        if not finding.ok and finding.fatal:
            raise CheckFailed(f"{finding.name}: {finding.detail}; {finding.fix} (train --skip-checks ignores this)")
