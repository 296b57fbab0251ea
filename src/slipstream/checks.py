"""Do the engines agree? A few prompts through the user's own engines, before a run that would take days to show it.

The numbers come from the engines, the judgement is here: pure functions from numbers to findings, each with its fix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.config import Config
from slipstream.engines.base import Engines, Metrics, Sampling, of_teacher
from slipstream.errors import ModelError
from slipstream.pipeline.run import rollout_sampling
from slipstream.records import Batch, Group, Prompt

PROMPTS, TOKENS = 8, 32
"""How many prompts are tried, and how long the answers are."""


@dataclass(frozen=True)
class Finding:
    name: str
    ok: bool
    said: str
    fix: str = ""


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
    def of(cls, config: Config) -> Limits:
        """Half precision rounds; float32 on both sides has no excuse."""
        exact = (
            config.sampler.dtype != "bfloat16" and (config.learner.compute_dtype or config.learner.dtype) != "bfloat16"
        )
        return cls(0.999, 1e-3, 0.01, 2e-2) if exact else cls(0.99, 2e-2, 0.05, 0.5)


async def quick(config: Config, engines: Engines, prompts: Sequence[Prompt]) -> list[Finding]:
    """What `train` looks at before it begins: sampler against learner, and the teacher's rows."""
    await publish(engines, version=0)
    group = await rolled(config, engines, prompts)
    return agreement(await compared(config, engines, group), Limits.of(config))


async def publish(engines: Engines, *, version: int) -> None:
    weights, expected = await engines.learner.export()
    for sampler in engines.samplers:
        loaded = await sampler.publish(weights, version, "drain")
        if loaded.fingerprint != expected:
            raise CheckFailed(
                f"a sampler runs weights {loaded.fingerprint} after a publish, the learner exported {expected}: weights "
                "do not arrive. Is its dtype sampler.dtype, and the model the student?"
            )


async def rolled(config: Config, engines: Engines, prompts: Sequence[Prompt]) -> list[Group]:
    """Untruncated samples, from every sampler in turn."""
    usual = rollout_sampling(config)
    length = min(TOKENS, usual.max_tokens)
    sampling = Sampling(max_tokens=length, draws=usual.draws, temperature=usual.temperature)
    samplers = engines.samplers
    calls = [samplers[i % len(samplers)].generate(prompt, sampling) for i, prompt in enumerate(prompts[:PROMPTS])]
    return list(await asyncio.gather(*calls))


async def compared(config: Config, engines: Engines, groups: Sequence[Group], *, update: int = 1) -> Metrics:
    """The learner's view of these samples, scored if there is a teacher."""
    scorers = [of_teacher(engines.scorers, group[0].header.teacher)[0] for group in groups]
    scored = await asyncio.gather(*[scorer.score(group) for scorer, group in zip(scorers, groups, strict=True)])
    return await engines.learner.compare(Batch(tuple(scored), update))


def agreement(numbers: Metrics, limits: Limits) -> list[Finding]:
    pearson, k3, ppl = (numbers[f"drift/{name}"] for name in ("probs_pearson", "k3_kl", "ppl_ratio"))
    said = (
        f"Pearson {pearson:.6f}, largest difference {numbers['drift/probs_diff_max']:.2g}, KL {k3:.2g}, "
        f"perplexity ratio {ppl:.4f}"
    )
    same = pearson >= limits.pearson and k3 <= limits.k3 and abs(ppl - 1) <= limits.ppl
    found = [
        Finding(
            "sampler and learner, one checkpoint",
            same,
            said,
            "" if same else cause(numbers, limits),
        )
    ]
    if "teacher/aligned" in numbers:
        found.append(alignment(numbers))
    return found


def cause(numbers: Metrics, limits: Limits) -> str:
    """What kind of disagreement it looks like."""
    if abs(numbers["drift/ppl_ratio"] - 1) > limits.ppl and numbers["drift/probs_pearson"] > 0.8:
        return (
            "the engines agree on the order and not on the size: another temperature or truncation on one side? Log-probs "
            "must be of the processed distribution at sampler.temperature"
        )
    if numbers["drift/probs_pearson"] < 0.8:
        return "these are different models: do weights arrive, and are sampler and learner of one student?"
    return "precision: give both sides one dtype (sampler.dtype, learner.compute_dtype), float32 to see if that is all"


def alignment(numbers: Metrics) -> Finding:
    """A teacher's row says how likely *this* token is: next to the student's, it fits best unshifted."""
    aligned, shifted = numbers["teacher/aligned"], numbers["teacher/shifted"]
    return Finding(
        "the teacher's rows stand at their tokens",
        aligned > shifted,
        f"correlation with the student {aligned:.3f}; shifted by one, {shifted:.3f}",
        ""
        if aligned > shifted
        else "its rows are shifted by one token: row t must be about token t, given those before",
    )


def itself(numbers: Metrics, limits: Limits) -> Finding:
    """The student as its own teacher, through the whole path: nothing to learn."""
    gap = numbers["teacher/difference_max"]
    return Finding(
        "a teacher equal to the student teaches nothing",
        gap <= limits.teacher,
        f"largest difference of a log-prob {gap:.2g}",
        "" if gap <= limits.teacher else "sampler, scorer and learner do not mean the same tokens or temperature",
    )


def raised(findings: Sequence[Finding]) -> None:
    for finding in findings:
        if not finding.ok:
            raise CheckFailed(f"{finding.name}: {finding.said}; {finding.fix} (--skip-checks goes on regardless)")
