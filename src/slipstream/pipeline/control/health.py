"""Is this still a run worth going on with? Pure functions from what a run has written of itself to what is wrong.

| finding            | is found when                                                                         | stops |
|--------------------|---------------------------------------------------------------------------------------|-------|
| a lying teacher    | mean reverse KL is below 0 by more than chance allows, which no distribution can be   | yes   |
| a failing teacher  | many of its scores cannot be used, or are others when asked again                     | yes   |
| an exploding step  | the gradient norm is far beyond what it usually is, several times in a row            | yes   |
| a dead student     | entropy or length fell to nearly nothing, and neither KL nor reward is better for it; | yes   |
|                    | or KL is far above what it was, and no reward is                                      |       |
| nothing to learn   | no update had any gradient for long                                                   | yes   |
| a still reward     | it is exactly what it was, for long                                                   | no    |

Thresholds are those of [health]. What a run does with a finding is `Health`'s business: it says it, or stops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import fmean, median

from slipstream.config.schema import HealthConfig
from slipstream.errors import Unhealthy

Line = Mapping[str, float]
"""The metrics of one update."""
CHANCE = 3.0
"""Standard errors that are no longer chance: once in 700."""


@dataclass(frozen=True)
class Trouble:
    name: str
    said: str
    """What, and what to do."""
    harmful: bool = False
    """The weights may be worse for it."""
    stops: bool = True


@dataclass(frozen=True)
class History:
    """What a run has written of itself so far, also before it was stopped and went on."""

    first: Sequence[Line] = ()
    """Its first updates: how everything was at the start."""
    recent: Sequence[Line] = ()
    """The last [health].window of them, in their order."""


class Health:
    """Looks at every update; says a finding when it begins, and stops the run if that is what is to be done."""

    def __init__(self, health: HealthConfig, say: Callable[[str], None]) -> None:
        self.health, self.say = health, say
        self.first = list[Line]()
        self.recent = deque[Line](maxlen=max(health.window, health.idle, health.reward) + health.updates)
        self.found = set[str]()
        """What was wrong after the update before."""

    def recall(self, lines: Iterable[Line]) -> None:
        """Take the updates that a run made before it went on: how it was at the start, and lately.

        What stopped it then is not found again in the same lines: whoever resumes may have mended the cause.
        """
        for line in lines:
            self._add(line)
        if any(trouble.stops for trouble in self._examined()):
            self.recent.clear()

    def _add(self, line: Line) -> None:
        if len(self.first) < self.health.updates:
            self.first.append(line)
        self.recent.append(line)

    def _examined(self) -> list[Trouble]:
        return list(examined(History(self.first, list(self.recent)), self.health))

    def look(self, line: Line) -> None:
        self._add(line)
        troubles = self._examined()
        for trouble in troubles:
            if trouble.stops and self.health.stop:
                raise Unhealthy(f"{trouble.said} (health.stop = false goes on regardless)", harmful=trouble.harmful)
            if trouble.name not in self.found:
                self.say(f"health: {trouble.said}")
        self.found = {trouble.name for trouble in troubles}


def examined(history: History, health: HealthConfig) -> Iterator[Trouble]:
    for rule in (negative_kl, unusable_scores, exploding, dead, idle, still_reward):
        if (trouble := rule(history, health)) is not None:
            yield trouble


# --- the rules --------------------------------------------------------------------------------------------------------


def negative_kl(history: History, health: HealthConfig) -> Trouble | None:
    """KL(what drew ‖ teacher) ≥ 0 for any two distributions, whatever the temperature or the truncation of either."""
    last = history.recent[-health.updates :]
    if len(last) < health.updates:
        return None
    for name in sorted(set.intersection(*(kls(line) for line in last))):
        mean = fmean(line[name] for line in last)
        error = hypot(*(line[f"{name}_error"] for line in last)) / len(last)
        if mean + CHANCE * error < -health.kl:
            who = name.removesuffix("/kl")
            return Trouble(
                "lying teacher",
                f"{who}: mean reverse KL is {mean:.2f} ± {error:.2f} over the last {len(last)} updates, and no "
                "distribution is below 0: its log-probs are not of these tokens (a server that makes them up, another "
                "prompt, shifted rows); run `slipstream doctor`",
                harmful=True,
            )
    return None


def kls(line: Line) -> set[str]:
    return {name for name in line if name.startswith("teacher/") and name.endswith("/kl")}


def unusable_scores(history: History, health: HealthConfig) -> Trouble | None:
    last = history.recent[-health.window :]
    failed, sound = summed(last, "teacher/invalid"), summed(last, "samples")
    if failed >= health.updates and failed / (failed + sound) > health.invalid:
        return Trouble(
            "failing teacher",
            f"of {failed:.0f} of the last {failed + sound:.0f} responses the teacher's scores could not be used: the "
            "ledger has the causes",
        )
    differed, asked = summed(last, "teacher/differed"), summed(last, "teacher/rechecked")
    if differed >= health.updates and differed / asked > health.invalid:
        return Trouble(
            "changing teacher",
            f"{differed:.0f} of the last {asked:.0f} groups that were scored twice came back with other log-probs: "
            "replicas of different models, or a server that mixes up its requests",
            harmful=True,
        )
    return None


def exploding(history: History, health: HealthConfig) -> Trouble | None:
    last, before = history.recent[-health.updates :], history.recent[-health.window - health.updates : -health.updates]
    usual = [line["grad_norm"] for line in before if line.get("grad_norm", 0) > 0]
    if len(usual) < 2 * health.updates or len(last) < health.updates:
        return None
    limit = health.grad_norm * median(usual)
    if all(line.get("grad_norm", 0.0) > limit for line in last):
        return Trouble(
            "exploding step",
            f"the gradient norm of the last {len(last)} updates was {last[-1]['grad_norm']:.2g}, usual is "
            f"{median(usual):.2g}: lower learner.lr or learner.clip_norm, and go on from an earlier checkpoint",
            harmful=True,
        )
    return None


def dead(history: History, health: HealthConfig) -> Trouble | None:
    first, last = history.first, history.recent[-health.updates :]
    if len(history.recent) < 2 * health.updates or rewarded(first, last):
        return None
    start, now = distance(first), [distance([line]) for line in last]
    if start is not None and all(kl is not None and kl > start + health.rise for kl in now):
        return gone(f"mean reverse KL rose from {start:.2g} to {now[-1]:.2g}")
    if start is not None and all(kl is not None and kl < start / 2 for kl in now):
        return None  # it has good reason to be surer
    for name, what in (("student/entropy", "entropy"), ("length/mean", "length of responses")):
        was, values = mean_of(first, name), [line[name] for line in last if name in line]
        if was and len(values) == len(last) and all(value < health.collapse * was for value in values):
            return gone(f"the {what} fell from {was:.3g} to {values[-1]:.2g}, and neither KL nor a reward gained")
    return None


def gone(how: str) -> Trouble:
    said = f"the student is no language model any more: {how}; lower learner.lr, and go on from an earlier checkpoint"
    return Trouble("dead student", said, harmful=True)


def distance(lines: Sequence[Line]) -> float | None:
    """Mean reverse KL to the teachers."""
    values = [line[name] for line in lines for name in kls(line)]
    return fmean(values) if values else None


def rewarded(first: Sequence[Line], last: Sequence[Line]) -> bool:
    """As never before."""
    rewards = set.intersection(*({name for name in line if name.startswith("reward/")} for line in (*first, *last)))
    return any((mean_of(last, name) or 0.0) > max(line[name] for line in first) for name in rewards)


def idle(history: History, health: HealthConfig) -> Trouble | None:
    last = history.recent[-health.idle :]
    if len(last) < health.idle or any(line.get("grad_norm", 1.0) > 0 for line in last):
        return None
    causes = {
        "correction/rollout_rs_masked_fraction": (1.0, "the correction rejects every token: widen correction.rs"),
        "policy/rows_moved": (0.0, "every group agrees in its reward, so all advantages are 0: other prompts?"),
    }
    known = (cause for name, (value, cause) in causes.items() if all(line.get(name) == value for line in last))
    return Trouble(
        "nothing to learn",
        f"the gradient of the last {len(last)} updates was 0: {next(known, 'nothing is left to learn from')}",
    )


def still_reward(history: History, health: HealthConfig) -> Trouble | None:
    last = history.recent[-health.reward :]
    if len(last) < health.reward:
        return None
    for name in sorted(name for name in last[-1] if name.startswith("reward/")):
        if len({line.get(name) for line in last}) == 1:
            said = f"{name} has been {last[-1][name]:g} for {len(last)} updates: is every answer graded alike?"
            return Trouble("still reward", said, stops=False)
    return None


def summed(lines: Sequence[Line], name: str) -> float:
    return sum(line.get(name, 0.0) for line in lines)


def mean_of(lines: Sequence[Line], name: str) -> float | None:
    values = [line[name] for line in lines if name in line]
    return fmean(values) if values else None
