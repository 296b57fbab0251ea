"""What an engine is: three protocols, and nothing that needs torch.

The pipeline sees engines through this file only. Whole groups go in and come out; `Handle.body` is the record itself in
this process, or a reference to it elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from slipstream.metrics import Metrics as Metrics
from slipstream.records import ONE, Attempts, Batch, Counts, Group, Handle, Header, Ints, Prompt, Rollout, unfinished
from slipstream.records import Said as Said

T = TypeVar("T")
Mode = Literal["keep", "drain", "restart"]
"""What a publish does to running requests: go on under the new weights, finish first, or begin again."""
Fingerprint = str
Quote = dict[str, Any]
"""A line of samples.jsonl."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw: temperature, min_p, top_k, top_p, each on what the one before left. Temperature 0 is greedy."""

    max_tokens: int
    group: int = 1
    draws: int = 1
    """At every position, the emitted token among them."""
    best: int = 0
    """How many of the likeliest ids are recorded at every position, beside the draws."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    keep_mask: bool = False
    """Tell with every token what else these three left."""
    greedy: bool = False
    """Beside the group, an answer drawn greedily and graded, of which only the rewards stay (see `Graded`)."""
    alone: bool = False
    """One answer of the student to each prompt, and no agent: by these engines are compared."""
    park: bool = False
    """These sequences will probably be gone on with: what is known of them may be kept while the weights stay."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """All weights as one flat array of bytes (or a reference to it), the manifest that says what lies where, and the
    version that whoever runs them writes on every token."""

    manifest: tuple[TensorSpec, ...]
    body: Any
    version: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a publish did. The three times are the parts of the pause in which no token is drawn."""

    fingerprint: Fingerprint
    """Of the weights that this engine will really run."""
    wait: float = 0.0
    """Seconds until running requests stood still: a token boundary, or in drain mode their end."""
    load: float = 0.0
    """Seconds in which weights were copied and their fingerprint taken."""
    rebuild: float = 0.0
    """Seconds in which the prefixes of running requests went through the new weights."""
    thrown: int = 0
    """Tokens of running requests that begin again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """How fresh a sample is, and what it counts for that."""

    lag: int
    """Updates since its oldest trained token."""
    roll: float
    """Mean KL, over its trained tokens, from the student as it is to what drew them; infinite where none is known."""
    sup: float
    """The same from what its teacher says of it to what it said."""
    roll_coverage: float
    """Share of its trained tokens of which that is known."""
    sup_coverage: float
    f: float
    w: float


class Sampler(Protocol):
    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        """The whole group: `sampling.group` responses, in the order of their index.

        `begun` is what some sampler has handed over of it: what is complete there is returned as it is, and the rest
        goes on at its next token. Cancelling the call aborts the request and frees its room.
        """
        ...

    async def release(self, numbers: Collection[int] = ()) -> None:
        """Hand over the groups of these prompts; all, if none are named.

        Their calls answer at the next token boundary with what they have (`records.handed_over`), without members of
        which nothing is drawn yet, and their room is free.
        """
        ...

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        """Load weights at a token boundary; requests that came before run, or have run, under the old ones."""
        ...


class Scorer(Protocol):
    async def score(self, group: Group) -> list[Handle]: ...

    async def probe(self, texts: Sequence[Rollout], attempts: Attempts | None = None) -> list[Said]:
        """Score texts that the coordinator made, and return the numbers themselves."""
        ...


class MovingScorer(Scorer, Protocol):
    """One whose weights come from the learner."""

    async def publish(self, weights: WeightsRef) -> Loaded:
        """Load weights between two passes; every group is scored by one version, which its records name."""
        ...


class Relabeller(Scorer, Protocol):
    """One that knows what it said under the contexts and the weights of before."""

    async def relabel(self, group: Group) -> list[Handle]:
        """Answers as of now to responses that were scored before, with how far they are from those; what has not moved
        is as it was."""
        ...


@dataclass(frozen=True, slots=True)
class Follower:
    """How the weights of a teacher follow the student's: θ_T ← decay · θ_T + (1 − decay) · θ."""

    decay: float
    every: int
    """Updates."""
    dtype: str
    """In which its scorers run them."""


class Context(Protocol):
    """What a teacher sees before a response, in place of the student's prompt."""

    def __call__(self, rollout: Rollout, attempts: Attempts | None) -> Ints:
        """Raises NoContext where it cannot be had."""
        ...

    def close(self) -> None: ...


class SamePrompt:
    """The teacher sees what the student saw."""

    def __call__(self, rollout: Rollout, attempts: Attempts | None) -> Ints:
        return rollout.prompt.tokens

    def close(self) -> None:
        """There is nothing to end."""


class Learner(Protocol):
    async def prepare(self, batch: Batch) -> list[Counts]:
        """Take in a batch, or a part of one, and freeze what is decided before its first gradient.

        Old log-probs, what is rejected, advantages, weights. Returns the counts of what is left of every group.
        """
        ...

    async def accumulate(self, batch: Batch, counts: Counts) -> list[Weighed]:
        """Add the gradient of groups that were prepared (their bodies may be gone): sums divided by the counts.

        Returns what each sample counted, where freshness weighs them.
        """
        ...

    async def step(self, counts: Counts = ONE, lr: float = 1.0) -> Metrics:
        """Divide what was accumulated as plain sums, clip, optimise; returns the metrics of all since the last step.

        `lr` is what the learning rate that is due is multiplied by.
        Raises NonFiniteError before a bad gradient touches the weights.
        """
        ...

    async def quote(self, batch: Batch) -> list[Quote]:
        """What was said in these samples of the update in hand, whose bodies may be gone."""
        ...

    async def weigh(self, batch: Batch) -> list[Weighed]:
        """What any samples would count now; changes nothing."""
        ...

    async def compare(self, batch: Batch, teacher: str = "") -> Metrics:
        """Return how far the learner's log-probs are from those of the sampler and the teacher; change no weights.

        With `teacher`, the name of a teacher that follows the student, use that teacher's weights in place of the
        learner's: they must give the log-probs that the teacher returned."""
        ...

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        """The weights as they are, whose version is the number of the last update that was made; or those of a teacher
        that follows them, moved first if this update is one after which it does, under the version of its last move."""
        ...

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        """A HF directory; with `optimizer`, also what `restore` needs to go on, and groups on their way here."""
        ...

    async def restore(self, path: Path) -> Sequence[Group]:
        """Go on from there; returns the groups that were saved."""
        ...


class Unscored:
    """In place of a scorer where there is no teacher: groups go on as they are."""

    async def score(self, group: Group) -> list[Handle]:
        return list(group)

    async def probe(self, texts: Sequence[Rollout], attempts: Attempts | None = None) -> list[Said]:
        return []


class Grader(Protocol):
    async def grade(self, group: Group) -> list[Handle]: ...


def greedy(reward: str) -> str:
    """The name under which the greedy answer's reward stands beside a response's own."""
    return f"greedy_{reward}"


class Graded:
    """A sampler whose responses come with their rewards; one that failed has none, which is not a reward of 0.

    With `sampling.greedy` they also come with the rewards of the greedy answer to their prompt. That answer itself ends
    here: nobody scores it or learns from it, and `Header.greedy_tokens` of the first response says what it cost.

    A group that is handed over is not graded yet, and its greedy answer is asked for again where it goes on.
    """

    def __init__(self, sampler: Sampler, grader: Grader) -> None:
        self.sampler, self.grader, self.publish = sampler, grader, sampler.publish

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if not sampling.greedy:
            return await self._graded(prompt, sampling, begun)
        drawn, greedily = replace(sampling, greedy=False), Sampling(max_tokens=sampling.max_tokens, temperature=0)
        try:
            async with asyncio.TaskGroup() as calls:  # whoever cancels, or fails, ends both
                members = calls.create_task(self._graded(prompt, drawn, begun))
                best = calls.create_task(self._graded(prompt, greedily))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if unfinished(members.result()) or unfinished(best.result()):
            return [
                Handle(replace(h.header, finish="released", rewards={}, ungraded=None), h.body)
                for h in members.result()
            ]
        return beside(best.result()[0].header, members.result())

    async def release(self, numbers: Collection[int] = ()) -> None:
        await asyncio.sleep(0)  # what was called before this has asked the sampler by then
        await self.sampler.release(numbers)

    async def _graded(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        group = await self.sampler.generate(prompt, sampling, begun)
        if unfinished(group):
            return group
        # an episode is graded once, by its last branch
        answered = list({handle.header.episode: handle for handle in group if handle.header.finish != "error"}.values())
        graded = {h.header.episode: h.header for h in (await self.grader.grade(answered) if answered else ())}
        return [with_grade(handle, graded.get(handle.header.episode)) for handle in group]


def with_grade(handle: Handle, graded: Header | None) -> Handle:
    """As its episode was graded, if it was."""
    if graded is None:
        return handle
    header = replace(handle.header, rewards=graded.rewards, ungraded=graded.ungraded, said=graded.said)
    return Handle(header, handle.body)


def beside(best: Header, group: Group) -> list[Handle]:
    """The group with the rewards of the greedy answer to its prompt. If there is none, there is nothing to learn."""
    if best.finish == "error":
        return [Handle(replace(handle.header, finish="error"), handle.body) for handle in group]
    if best.ungraded is not None:
        return [Handle(replace(handle.header, ungraded=best.ungraded), handle.body) for handle in group]
    rewards = {greedy(name): reward for name, reward in best.rewards.items()}
    costs = [best.tokens, *[0] * (len(group) - 1)]
    return [
        Handle(replace(h.header, rewards=h.header.rewards | rewards, greedy_tokens=cost), h.body)
        for h, cost in zip(group, costs, strict=True)
    ]


def of_teacher(found: Mapping[str, T], teacher: str) -> T:
    """What belongs to a teacher. Where there is one only, it scores all."""
    return found[teacher] if len(found) > 1 else next(iter(found.values()))


@dataclass(frozen=True, slots=True)
class Engines:
    """What a runtime hands to the pipeline. `close` ends whatever it started."""

    samplers: tuple[Sampler, ...]
    scorers: Mapping[str, tuple[Scorer, ...]]
    """Of each teacher, by its name; `Unscored` under no name where there is none."""
    learner: Learner
    close: Callable[[], None]
    replace: Callable[[Any], Awaitable[Any]] | None = None
    """Another sampler or scorer in place of one that died: it ends that one and all calls that are with it, and returns
    the new one, loaded. None where engines share this process, and die with it."""
    hire: Callable[[str, str], Any] | None = None
    """Room for one more of a kind (`sampler`, `teacher.NAME`), by a name of its own: what `replace` makes an engine of,
    as of one that died. None as for `replace`."""
    dismiss: Callable[[Any], Awaitable[None]] | None = None
    """End one, and its process, when it has answered all that it was asked; or give up its room."""
    takes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What one of a kind takes of what is free, for each kind of which more could be hired."""
    free: Callable[[], Mapping[str, float]] = dict
    """GPUs and CPUs that nobody has, nor is about to get."""
