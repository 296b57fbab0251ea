"""Health checks of a run: pure functions from metrics lines to problems that make further training useless.

| finding                     | found when                                                              | stops |
|-----------------------------|-------------------------------------------------------------------------|-------|
| teacher scores do not match | mean reverse KL is significantly below 0, impossible for true log-probs | yes   |
| failing teacher             | many of its scores are unusable                                         | yes   |
| changing teacher            | many of its scores differ when groups are scored twice                  | yes   |
| exploding step              | the gradient norm is far above its usual value, several times in a row  | yes   |
| dead student                | entropy or length fell to nearly 0, without a better KL or reward;      | yes   |
|                             | or KL is far above its start, without a better reward                   |       |
| repeating student           | most 4-grams of its responses are repeated, and at the start few were;  | yes   |
|                             | without a better reward                                                 |       |
| nothing to learn            | all gradients have been 0 for many updates                              | yes   |
| still reward                | a reward has been exactly the same for many updates                     | no    |

The thresholds are settings of [health]. `Health` reports a finding, or stops the run.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import hypot
from statistics import fmean, median

from slipstream.config.running import HealthConfig
from slipstream.pipeline.control.actions import Action, Controller, Line, Say, Stop

MIN_ERRORS_TO_WARN = 3.0
"""Number of standard errors from which a value counts as significant; noise exceeds 3 once in 700 cases."""


@dataclass(frozen=True)
class Trouble:
    name: str
    message: str
    """Description of the problem and of its remedy."""
    harmful: bool = False
    """True if the problem may have damaged the weights."""
    stops: bool = True


@dataclass(frozen=True)
class History:
    """The metrics lines that the rules examine, including lines from before a resume."""

    first: Sequence[Line] = ()
    """The first updates of the run, as the reference."""
    recent: Sequence[Line] = ()
    """The latest updates, oldest first; as many as the longest rule needs."""


class Health(Controller):
    def __init__(self, health: HealthConfig) -> None:
        self.health = health
        self.first = list[Line]()
        self.recent = deque[Line](maxlen=max(health.window, health.idle, health.reward) + health.updates)
        self.reported = set[str]()
        """Names of the findings after the previous update."""

    def recall(self, lines: Iterable[Line]) -> None:
        """Add the metrics lines from before a resume.

        If they contain a finding that stops the run, recent lines are forgotten, because the cause may be fixed now.
        """
        for line in lines:
            self._add(line)
        if any(trouble.stops for trouble in self._troubles()):
            self.recent.clear()

    def _add(self, line: Line) -> None:
        """Add a line; the usual values after supervised updates are those of later updates alone."""
        if self.recent and self.recent[-1].get("sft") != line.get("sft"):
            self.recent.clear()
        if len(self.first) < self.health.updates and not line.get("sft"):
            self.first.append(line)
        self.recent.append(line)

    def _troubles(self) -> list[Trouble]:
        return list(find_troubles(History(self.first, list(self.recent)), self.health))

    def on_update(self, line: Line) -> list[Action]:
        self._add(line)
        troubles, actions = self._troubles(), list[Action]()
        for trouble in troubles:
            if trouble.stops and self.health.stop:
                message = f"{trouble.message} (health.stop = false goes on regardless)"
                return [*actions, Stop(message, trouble.harmful)]
            if trouble.name not in self.reported:
                actions.append(Say(f"health: {trouble.message}"))
        self.reported = {trouble.name for trouble in troubles}
        return actions


def find_troubles(history: History, health: HealthConfig) -> Iterator[Trouble]:
    for rule in (negative_kl, unusable_scores, exploding, dead, repeating, idle, still_reward):
        if (trouble := rule(history, health)) is not None:
            yield trouble


def negative_kl(history: History, health: HealthConfig) -> Trouble | None:
    """Return a finding if reverse KL is negative: KL(sampler ‖ teacher) ≥ 0 for all distributions, also truncated."""
    for name in kl_names(history.recent):
        last = [line for line in history.recent if name in line][-health.updates :]
        if len(last) < health.updates:
            continue
        mean = fmean(line[name] for line in last)
        error = hypot(*(line[f"{name}_error"] for line in last)) / len(last)
        if mean + MIN_ERRORS_TO_WARN * error < -health.kl:
            who = name.removesuffix("/kl")
            return Trouble(
                "teacher scores do not match",
                f"{who}: mean reverse KL is {mean:.2f} ± {error:.2f} over the last {len(last)} updates, but a KL "
                "cannot be below 0: its log-probs are not of these tokens (a server that makes them up, another "
                "prompt, shifted rows); run `slipstream doctor`",
                harmful=True,
            )
    return None


def kl_names(lines: Sequence[Line]) -> list[str]:
    return names_of(lines, "kl")


def names_of(lines: Sequence[Line], last: str) -> list[str]:
    names = {name for line in lines for name in line if name.startswith("teacher/") and name.endswith(f"/{last}")}
    return sorted(names)


def unusable_scores(history: History, health: HealthConfig) -> Trouble | None:
    last = history.recent[-health.window :]
    for name in sorted(names_of(last, "invalid"), key="teacher/invalid".__eq__):  # of each teacher, then of all
        who = name.removesuffix("/invalid")
        failed, sound = sum_of(last, name), sum_of(last, "samples" if who == "teacher" else f"{who}/samples")
        if failed >= health.updates and failed / (failed + sound) > health.invalid:
            whose = "the teacher's" if who == "teacher" else f"{who}: its"
            return Trouble(
                "failing teacher",
                f"{whose} scores could not be used for {failed:.0f} of the last {failed + sound:.0f} responses: the "
                "ledger has the causes",
            )
    differed, asked = sum_of(last, "teacher/differed"), sum_of(last, "teacher/rechecked")
    if differed >= health.updates and differed / asked > health.invalid:
        return Trouble(
            "changing teacher",
            f"{differed:.0f} of the last {asked:.0f} groups that were scored twice came back with other log-probs: "
            "replicas of different models, or a server that mixes up its requests",
            harmful=True,
        )
    return None


def exploding(history: History, health: HealthConfig) -> Trouble | None:
    """Return trouble if the last norms are far above the usual one, and above any that the run has had as often.

    Gradients of a student that agrees with its teacher are nearly 0; one wrong answer is then far above their median.
    """
    last, before = history.recent[-health.updates :], history.recent[-health.window - health.updates : -health.updates]
    earlier = [line for line in history.first if all(line is not each for each in before)]
    usual, at_start = (
        [line["grad_norm"] for line in lines if line.get("grad_norm", 0) > 0] for lines in (before, earlier)
    )
    if len(usual) < 2 * health.updates or len(last) < health.updates:
        return None
    limit = max(health.grad_norm * median(usual), nlargest(health.updates, usual + at_start)[-1])
    if all(line.get("grad_norm", 0.0) > limit for line in last):
        return Trouble(
            "exploding step",
            f"the gradient norm of the last {len(last)} updates was {last[-1]['grad_norm']:.2g}, the usual one is "
            f"{median(usual):.2g}: lower learner.lr or learner.clip_norm, and go on from an earlier checkpoint",
            harmful=True,
        )
    return None


def dead(history: History, health: HealthConfig) -> Trouble | None:
    first, last = history.first, history.recent[-health.updates :]
    if len(history.recent) < 2 * health.updates or reward_improved(first, last):
        return None
    halved = list[bool]()
    for name in kl_names(first):  # of each teacher alone: an update may have responses to only some of them
        start, now = fmean(values_of(first, name)), values_of(history.recent, name)[-health.updates :]
        if len(now) == health.updates and all(kl > start + health.rise for kl in now):
            return dead_student(f"mean reverse KL rose from {start:.2g} to {now[-1]:.2g}")
        halved.append(len(now) == health.updates and all(kl < start / 2 for kl in now))
    if halved and all(halved):
        return None  # the student is much closer to its teachers, so low entropy or length can be right
    for name, what in (("student/entropy", "entropy"), ("length/mean", "length of responses")):
        was, values = mean_of(first, name), values_of(last, name)
        if was and len(values) == len(last) and all(value < health.collapse * was for value in values):
            return dead_student(
                f"the {what} fell from {was:.3g} to {values[-1]:.2g}, and neither KL nor reward improved"
            )
    return None


def repeating(history: History, health: HealthConfig) -> Trouble | None:
    """Return a finding if responses became repetitions; their reverse KL may fall, because repetitions are easy."""
    first, last = history.first, history.recent[-health.updates :]
    was, values = mean_of(first, "student/repeated"), [line.get("student/repeated", 0.0) for line in last]
    if was is None or len(history.recent) < 2 * health.updates or reward_improved(first, last):
        return None
    if was > health.repeated / 2 or not all(value > health.repeated for value in values):
        return None
    start, now = mean_kl(first), mean_kl(last)
    kl = "" if start is None or now is None else f", while mean reverse KL went from {start:.2g} to {now:.2g}"
    return Trouble(
        "repeating student",
        f"the student repeats itself: {values[-1]:.0%} of the 4-grams of its responses are repeated, {was:.0%} at the "
        f"start{kl}. It was too far from its teacher, or learner.lr is too high. Start supervised ([sft] with "
        'source = "teacher"), or add answers of the teacher ([mix])',
        harmful=True,
    )


def dead_student(how: str) -> Trouble:
    message = f"the student has collapsed: {how}; lower learner.lr, and go on from an earlier checkpoint"
    return Trouble("dead student", message, harmful=True)


def mean_kl(lines: Sequence[Line]) -> float | None:
    values = [line[name] for line in lines for name in kl_names([line])]
    return fmean(values) if values else None


def reward_improved(first: Sequence[Line], last: Sequence[Line]) -> bool:
    """Return whether the mean of some reward in `last` is above all values of that reward in `first`."""
    rewards = set.intersection(*({name for name in line if name.startswith("reward/")} for line in (*first, *last)))
    return any((mean_of(last, name) or 0.0) > max(line[name] for line in first) for name in rewards)


def idle(history: History, health: HealthConfig) -> Trouble | None:
    last = history.recent[-health.idle :]
    if len(last) < health.idle or any(line.get("grad_norm", 1.0) > 0 for line in last):
        return None
    causes = {
        "correction/rollout_rs_masked_fraction": (1.0, "the correction rejects every token: widen correction.rs"),
        "policy/rows_moved": (0.0, "rewards within each group are equal, so all advantages are 0: other prompts?"),
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
        no_penalty = name == "reward/overlong" and not last[-1][name]  # its best value
        if len({line.get(name) for line in last}) == 1 and not no_penalty:
            message = (
                f"{name} has been {last[-1][name]:g} for {len(last)} updates: are all answers equally good, or only "
                "graded alike?"
            )
            return Trouble("still reward", message, stops=False)
    return None


def sum_of(lines: Sequence[Line], name: str) -> float:
    return sum(line.get(name, 0.0) for line in lines)


def values_of(lines: Sequence[Line], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


def mean_of(lines: Sequence[Line], name: str) -> float | None:
    values = values_of(lines, name)
    return fmean(values) if values else None
