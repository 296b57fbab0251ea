"""Evaluation of the current student on held-out prompts, by the samplers, graders and teachers that training uses.

With rewards it measures accuracy, without rewards the reverse KL to the teachers.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import hypot, inf
from statistics import fmean
from typing import Any

from slipstream.config.running import EvalConfig
from slipstream.errors import RecordsLost
from slipstream.metrics import Metrics, avg_at_n, kl_and_error, sample_metrics
from slipstream.pipeline.failures import GivenUp
from slipstream.pipeline.groups import Groups
from slipstream.pipeline.pool import Worker
from slipstream.pipeline.publish import Samplers
from slipstream.pipeline.stages import Scoring, answered_members
from slipstream.protocols import Sampler, Sampling
from slipstream.records import Group, Handle, Header, Prompt, unfinished
from slipstream.run_dir.writing import RunLog
from slipstream.statistics import standard_error

Line = Mapping[str, Any]
"""An evaluation's metrics, with its update and its held-out set."""
Generate = Callable[[Prompt, Sampling], Awaitable[list[Handle]]]
MIN_FALL_ERRORS, MIN_FALL_SHARE = 4.0, 0.2
"""Smallest fall of the accuracy that is reported: in standard errors, and as a share of the best one before."""


@dataclass
class Evaluation:
    settings: EvalConfig
    sampling: Callable[[str], Sampling]
    """Return the sampling options of a held-out set."""
    held_out: Mapping[str, Sequence[Prompt]]
    """Held-out prompts by set."""
    reward: str
    """Reward whose mean is the accuracy; empty in a run without rewards."""
    samplers: Samplers
    scoring: Scoring
    groups: Groups
    log: RunLog
    best: dict[str, Line] = field(default_factory=dict)
    """Best evaluation of each set so far."""
    fallen: set[str] = field(default_factory=set)
    """Sets whose accuracy is far below their best one, which was reported."""

    def __post_init__(self) -> None:
        for line in self.log.lines("eval"):
            self._compare(line)

    def _compare(self, line: Line) -> str:
        """Compare an evaluation with the best one of its set, and return what to report."""
        name = line.get("set", "")
        best = self.best.get(name, line)
        if (fall := fall_of(best, line)) and name not in self.fallen:
            self.fallen.add(name)
            return f"{name or 'held-out'} {fall}: `slipstream advise` names a likely cause"
        if not fall:
            self.fallen.discard(name)
            self.best[name] = max(best, line, key=lambda each: each.get("accuracy", -inf))
        return ""

    async def evaluate(self) -> None:
        """Evaluate the sets that are due at the current version, unless this version was evaluated before."""
        admission, progress = self.groups.admission, self.groups.progress
        update = admission.version
        if not self.settings.every or update == self.log.evaluated:
            return
        final = update == admission.updates  # the final student is always evaluated
        due = [name for name in self.held_out if final or update % self.settings.of(name, "every") == 0]
        if not due:
            return
        began, missing = progress.trace.now(), list[str]()
        answer = partial(self._answer, missing)
        groups = {name: await answers(answer, self.held_out[name], self.sampling(name)) for name in due}
        asked = sum(len(self.held_out[name]) * self.sampling(name).group for name in due)
        ungraded = [
            reason for found in groups.values() for group in found for reason in by_episode(group, reason_ungraded)
        ]
        for reasons, what in ((missing, "are missing and left out"), (ungraded, "have no reward and count as wrong")):
            if reasons:
                self.samplers.say(
                    f"evaluation at update {update}: {len(reasons)} of {asked} answers {what}, one of them because "
                    f"{reasons[0]}"
                )
        for name in due:  # no await here: a stopped run records all sets or none
            if answered := [group for group in groups[name] if group]:
                numbers = summary(answered, self.reward)
                self.log.metrics("eval", numbers, update=update, of=name)
                if fall := self._compare({**numbers, "update": update, "set": name}):
                    self.samplers.say(f"evaluation at update {update}: {fall}")
        self.groups.ledger.add_evaluation(progress.trace.now() - began)

    async def _answer(self, missing: list[str], prompt: Prompt, sampling: Sampling) -> list[Handle]:
        """Return the answers to a prompt that count, and add to `missing` why others do not.

        Only headers are kept: each record in shared memory would hold a file open until all prompts are answered.
        """
        try:
            group = await self._answer_or_give_up(prompt, sampling)
        except GivenUp as failure:
            group = []
            missing += [str(failure)] * sampling.group
        missing += by_episode(group, lambda header: header.missing_reason)
        self.groups.progress.note_change()
        return [replace(handle, body=None) for handle in group if not handle.header.missing_reason]

    async def _answer_or_give_up(self, prompt: Prompt, sampling: Sampling) -> list[Handle]:
        async def generate(worker: Worker[Sampler]) -> Group:
            drawn = await worker.engine.generate(prompt, sampling, group)
            if not unfinished(drawn):
                answered_members(drawn)  # without any answer the call has failed, and several such calls end the run
            return drawn

        group: Group = ()
        while unfinished(group):
            group = await self.samplers.call(f"held-out prompt {prompt.number}", generate)
        answered = [handle for handle in group if not handle.header.missing_reason]
        if answered and not self.reward:
            try:
                answered = list(await self.scoring.score_other(answered, f"answers to held-out prompt {prompt.number}"))
            except RecordsLost:  # a worker died with the answers, so they are drawn again
                return await self._answer_or_give_up(prompt, sampling)
        return [*answered, *(handle for handle in group if handle.header.missing_reason)]


async def answers(generate: Generate, prompts: Iterable[Prompt], sampling: Sampling) -> list[list[Handle]]:
    async def one(prompt: Prompt) -> list[Handle]:
        return await generate(prompt, sampling)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(prompt)) for prompt in prompts]
    return [task.result() for task in running]


def fall_of(best: Line, line: Line) -> str:
    """Describe the fall of the accuracy since the best evaluation; empty if chance explains it, or it is small."""
    if not all("accuracy_error" in each for each in (best, line)):
        return ""
    # equal answers have an error of 0, also if there are few of them
    errors = hypot(*(max(each["accuracy_error"], 1 / each["samples"]) for each in (best, line)))
    if best["accuracy"] - line["accuracy"] <= max(MIN_FALL_ERRORS * errors, MIN_FALL_SHARE * abs(best["accuracy"])):
        return ""
    before, now = (f"{each['accuracy']:.3g} ± {each['accuracy_error']:.2g}" for each in (best, line))
    return f"accuracy fell from {before} after update {best['update']} to {now}"


def reason_ungraded(header: Header) -> str:
    return header.ungraded.text if header.ungraded is not None else ""


def by_episode(group: Iterable[Handle], reason: Callable[[Header], str]) -> list[str]:
    """Return the reason of each episode that has one; an episode may have several rows."""
    found = {handle.header.episode: reason(handle.header) for handle in group}
    return list(filter(None, found.values()))


def correctness(groups: Iterable[list[Handle]], reward: str) -> list[list[float]]:
    """Return the reward of each episode of each group.

    An answer that cannot be graded counts as 0, or as the lowest reward if that is below 0.
    """
    groups = list(groups)
    known = [h.header.rewards[reward] for group in groups for h in group if reward in h.header.rewards]
    worst = min([0.0, *known])
    return [list({h.header.episode: h.header.rewards.get(reward, worst) for h in group}.values()) for group in groups]


def summary(groups: list[list[Handle]], reward: str) -> Metrics:
    """Return the metrics of an evaluation by this reward; if it is empty, by the teachers' scores."""
    headers = [handle.header for group in groups for handle in group]
    if not reward:
        kl, error = kl_and_error([header for header in headers if header.trained_tokens])
        return {"kl": kl, "kl_error": error, **sample_metrics(headers)}
    causes = (by_episode(group, lambda header: header.ungraded.cause if header.ungraded else "") for group in groups)
    ungraded = Counter(f"ungraded/{cause}" for found in causes for cause in found)
    rewards = correctness(groups, reward)
    of_mean = standard_error([fmean(each) for each in rewards])
    accuracy = {"accuracy": avg_at_n(rewards), **({} if of_mean is None else {"accuracy_error": of_mean})}
    return {**accuracy, **sample_metrics(headers), **ungraded}
