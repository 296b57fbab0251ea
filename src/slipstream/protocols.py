"""Protocols of the engines: samplers, scorers, graders and the learner. Nothing here needs torch.

The pipeline knows engines only through this file. Engines receive and return whole groups: all responses to a prompt.
`Handle.body` is the record itself, or a reference to a record in another process.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from slipstream.metrics import Metrics as Metrics
from slipstream.records import (
    ONE_COUNT,
    Attempts,
    Batch,
    Counts,
    Group,
    Handle,
    Header,
    Ints,
    Prompt,
    Rollout,
    after_prefix,
    off_policy,
    unfinished,
    with_prefix,
    without_prefix,
)
from slipstream.records import TextScores as TextScores

T = TypeVar("T")
Mode = Literal["keep", "drain", "restart"]
"""Effect of new weights on running requests: continue with them, finish before they are loaded, or start again."""
Fingerprint = str
Quote = dict[str, Any]
"""One line of samples.jsonl as a dict."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options. Temperature, min_p, top_k and top_p apply in this order. Temperature 0 is greedy."""

    max_tokens: int
    group: int = 1
    draws: int = 1
    """Number of tokens sampled independently at every position; the first one is the emitted token."""
    best: int = 0
    """Number of most likely ids recorded at every position, in addition to the draws. 0 records none."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    keep_mask: bool = False
    """Record the sampling support of every token: the ids that remain after min_p, top_k and top_p."""
    teacher_replaces: int = 0
    """Number K of the teacher's most likely tokens at every position: a token outside of them is replaced by a draw of
    the teacher among them. 0 replaces none."""
    fusion: float = 0.0
    """Share of the teacher in the logits that tokens are drawn from. Recorded log-probs are those of the mixture."""
    router: bool = False
    """Record the experts that the student's routers choose, for every token."""
    greedy: bool = False
    """Also generate and grade one greedy answer per prompt, and keep only its rewards (see `GradingSampler`)."""
    alone: bool = False
    """Generate answers directly, without an external agent, even if the run has agents. Checks of engines use this."""
    park: bool = False
    """The responses will probably be continued, so the engine may keep their KV cache until the weights change."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """All weights as one flat byte array (or a reference to it), the position of each tensor, and the version."""

    manifest: tuple[TensorSpec, ...]
    body: Any
    version: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a publish. `wait`, `load` and `rebuild` add up to the pause in which no token is sampled."""

    fingerprint: Fingerprint
    """Fingerprint of the weights that the engine runs after the publish."""
    wait: float = 0.0
    """Seconds until running requests reached a token boundary, or in drain mode their end."""
    load: float = 0.0
    """Seconds in which weights were copied and their fingerprint computed."""
    rebuild: float = 0.0
    """Seconds in which the prefixes of running requests were recomputed with the new weights."""
    thrown: int = 0
    """Number of tokens discarded because running requests start again."""
    drafted: int = 0
    """Number of tokens that speculation proposed since the previous publish."""
    accepted: int = 0
    """Number of the proposed tokens that were drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFreshness:
    """Freshness score `f` and freshness weight `w` of a sample, and the values from which they are computed."""

    lag: int
    """Updates since the version of the oldest trained token."""
    roll: float
    """Mean of KL(current student ‖ sampling policy) over trained tokens; infinite if no token has a known KL."""
    sup: float
    """Mean of KL(teacher now ‖ teacher when it scored the sample) over trained tokens; infinite as for `roll`."""
    roll_coverage: float
    """Share of trained tokens whose KL is known for `roll`; `sup_coverage` is the same for `sup`."""
    sup_coverage: float
    f: float
    w: float


Draw = Callable[[Prompt, Sampling, Group], Awaitable[list[Handle]]]
"""Method `generate` of a sampler."""


class Sampler(Protocol):
    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        """Return the whole group: `sampling.group` responses, ordered by index.

        `begun` holds members that a sampler released earlier: complete members are returned unchanged, the others
        continue at their next token. Cancelling the call aborts the request and frees its slots.
        """
        ...

    async def release(self, numbers: Collection[int] = ()) -> None:
        """Stop the groups of these prompts (all groups if `numbers` is empty), so that any sampler can continue them.

        Their `generate` calls return at the next token boundary with the tokens sampled so far
        (`records.handed_over`), without members that have no token. Their slots are free afterwards.
        """
        ...

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        """Load weights at a token boundary; `mode` decides what happens to running requests."""
        ...


class Scorer(Protocol):
    async def score(self, group: Group) -> list[Handle]: ...

    async def probe(self, texts: Sequence[Rollout], attempts: Attempts | None = None) -> list[TextScores]:
        """Score texts that the coordinator made, and return their log-probs instead of records."""
        ...


class MovingScorer(Scorer, Protocol):
    """Scorer whose weights the learner publishes."""

    async def publish(self, weights: WeightsRef) -> Loaded:
        """Load weights between two passes. A group is scored by one version, which its records hold."""
        ...


class Relabeller(Scorer, Protocol):
    """Scorer that can score responses again after its weights or contexts changed, and compare both scores."""

    async def relabel(self, group: Group) -> list[Handle]:
        """Score responses again, and record KL(new ‖ old scores); keep responses whose scores cannot have changed."""
        ...


@dataclass(frozen=True, slots=True)
class Follower:
    """Rule by which a teacher's weights follow the student's: θ_T ← decay · θ_T + (1 − decay) · θ."""

    decay: float
    every: int
    """Number of updates between two moves of the teacher."""
    dtype: str
    """Data type in which scorers run the teacher's weights."""
    keep: int = 0
    """Number of earlier versions that the learner stores: those that scored groups in flight. 0 if nothing reads the
    drift of supervision, and the learner needs no head of them."""


class OneEnd(NamedTuple):
    """Mapping of all end tokens of student and teacher to one of them, for every distribution of the teacher."""

    token: int
    """Token with which the student ends."""
    ends: tuple[int, ...]
    """All end tokens, `token` included."""


@dataclass(frozen=True, slots=True)
class Respelling:
    """Spelling of responses for a teacher with another tokenizer."""

    tokenizer: str
    """Model whose tokenizer the teacher has."""
    vocabulary: int
    """Number of the teacher's token ids."""
    roles: Mapping[int, int]
    """The teacher's token for each special token of the student that has a counterpart. The first is the end token."""
    limit: int
    """Largest number of the teacher's tokens of a prompt with its response; tokens beyond are left out."""
    renderers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments of the `Renderer` that writes the messages of an environment in the teacher's chat template, by name of
    the environment; empty if responses are no episodes."""

    @property
    def end(self) -> int:
        """Return the token with which the teacher ends an answer."""
        return next(iter(self.roles.values()))


class Context(Protocol):
    """Function that returns the tokens a teacher sees before a response, in place of the student's prompt."""

    def __call__(self, rollout: Rollout, attempts: Attempts | None) -> Ints:
        """Return the tokens to put before this response, or raise NoContext if they cannot be built."""
        ...

    def close(self) -> None: ...


class SamePrompt:
    def __call__(self, rollout: Rollout, attempts: Attempts | None) -> Ints:
        return rollout.prompt.tokens

    def close(self) -> None:
        """Do nothing: this context holds no resources."""


class Learner(Protocol):
    async def prepare(self, batch: Batch) -> list[Counts]:
        """Store (a part of) a batch, compute the values that stay fixed in the update, and return counts of each group.

        Fixed values are old log-probs, rejected tokens, advantages and importance weights. Counts omit rejected tokens.
        """
        ...

    async def accumulate(self, batch: Batch, counts: Counts) -> list[SampleFreshness]:
        """Add the gradient of prepared groups, as sums divided by `counts`; handles may lack bodies.

        Return each sample's freshness weight, or an empty list if freshness weighting is off.
        """
        ...

    async def step(self, counts: Counts = ONE_COUNT, lr: float = 1.0) -> Metrics:
        """Divide the accumulated gradient by `counts`, clip it, make an optimizer step, and return its metrics.

        `lr` multiplies the scheduled learning rate. A gradient that is not finite raises NonFiniteError before it
        changes the weights.
        """
        ...

    async def quote(self, batch: Batch) -> list[Quote]:
        """Return the lines of samples.jsonl for samples of the current update; handles may lack bodies."""
        ...

    async def weigh(self, batch: Batch) -> list[SampleFreshness]:
        """Return the freshness weights that these samples would get now; change nothing."""
        ...

    async def compare(self, batch: Batch, teacher: str = "") -> Metrics:
        """Return how far the learner's log-probs are from those of the sampler and the teacher; change no weights.

        `teacher` names a teacher that follows the student. Its weights are then used in place of the learner's, and
        must give the log-probs that the teacher returned.
        """
        ...

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        """Return the current weights, whose version is the number of the last completed update.

        With `teacher`, return the weights of that following teacher; their version is the update of its last move. The
        teacher is moved first if it is due after this update. The first calls after `restore` return the earlier
        versions that scored groups in flight, one version for each call, oldest first.
        """
        ...

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        """Write a Hugging Face model directory; if `optimizer`, also the state and groups that `restore` reads."""
        ...

    async def restore(self, path: Path) -> Sequence[Group]:
        """Load the state that `save` wrote, and return the saved groups."""
        ...


class Proxy:
    """Base of classes that forward all methods of their protocols to `call`, apart from those that they define."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for protocol in cls.__mro__:
            for name, method in vars(protocol).items() if getattr(protocol, "_is_protocol", False) else ():
                if inspect.iscoroutinefunction(method) and getattr(cls, name) is method:
                    setattr(cls, name, _forwarding(name))

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


def _forwarding(name: str) -> Callable[..., Awaitable[Any]]:
    async def forward(self: Proxy, *args: Any, **options: Any) -> Any:
        return await self.call(name, *args, **options)

    return forward


class Unscored:
    """Stand-in for a scorer in a run without teachers: it returns groups unchanged."""

    async def score(self, group: Group) -> list[Handle]:
        return list(group)

    async def probe(self, texts: Sequence[Rollout], attempts: Attempts | None = None) -> list[TextScores]:
        return []


class Grader(Protocol):
    async def grade(self, group: Group) -> list[Handle]: ...


def greedy(reward: str) -> str:
    """Return the name under which a response's rewards hold this reward of the greedy answer."""
    return f"greedy_{reward}"


class TeacherSampler:
    """Sampler with a teacher's weights. No version of the student's weights draws its tokens."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.release = sampler, sampler.release

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        drawn = await self.sampler.generate(prompt, replace(sampling, teacher_replaces=0, fusion=0.0), begun)
        return [off_policy(handle) for handle in drawn]


class GradingSampler:
    """Sampler that also grades its responses. A failed response has no rewards, which differs from a reward of 0.

    If `sampling.greedy`, responses also hold the rewards of the greedy answer to their prompt. The greedy answer is not
    scored or trained; `Header.greedy_tokens` of the first response is its length in tokens.

    A released (stopped and incomplete) group is not graded; when it continues, its greedy answer is generated again.
    """

    def __init__(self, sampler: Sampler, grader: Grader) -> None:
        self.sampler, self.grader, self.publish = sampler, grader, sampler.publish

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if not sampling.greedy:
            return await self._graded(prompt, sampling, begun)
        drawn, greedily = replace(sampling, greedy=False), Sampling(max_tokens=sampling.max_tokens, temperature=0)
        try:
            async with asyncio.TaskGroup() as calls:  # a failure or cancellation of one call ends both
                members = calls.create_task(self._graded(prompt, drawn, begun))
                best = calls.create_task(self._graded(prompt, greedily))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if unfinished(members.result()) or unfinished(best.result()):
            return [handle.with_header(finish="released", rewards={}, ungraded=None) for handle in members.result()]
        return with_greedy_rewards(best.result()[0].header, members.result())

    async def release(self, numbers: Collection[int] = ()) -> None:
        await asyncio.sleep(0)  # lets `generate` calls that began earlier reach the sampler
        await self.sampler.release(numbers)

    async def _graded(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        group = await draw_after_prefix(self.sampler, prompt, sampling, begun)
        if unfinished(group):
            return group
        # an episode is graded once, by its last branch
        answered = list({handle.header.episode: handle for handle in group if handle.header.finish != "error"}.values())
        graded = {h.header.episode: h.header for h in (await self.grader.grade(answered) if answered else ())}
        return [with_grade(handle, graded.get(handle.header.episode)) for handle in group]


async def draw_after_prefix(sampler: Sampler, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
    """Return the sampler's group; if the prompt has a prefix of the response, the sampler continues that prefix."""
    if prompt.prefix is None:
        return await sampler.generate(prompt, sampling, begun)
    rest = replace(sampling, max_tokens=sampling.max_tokens - len(prompt.prefix))
    group = await sampler.generate(after_prefix(prompt), rest, [without_prefix(handle) for handle in begun])
    return [with_prefix(prompt, handle) for handle in group]


def with_grade(handle: Handle, graded: Header | None) -> Handle:
    if graded is None:
        return handle
    return handle.with_header(rewards=graded.rewards, ungraded=graded.ungraded, text=graded.text)


def with_greedy_rewards(best: Header, group: Group) -> list[Handle]:
    """Add the greedy answer's rewards to all members; if that answer failed or is ungraded, mark all members so."""
    if best.finish == "error":
        return [handle.with_header(finish="error") for handle in group]
    if best.ungraded is not None:
        return [handle.with_header(ungraded=best.ungraded) for handle in group]
    rewards = {greedy(name): reward for name, reward in best.rewards.items()}
    graded = [handle.with_header(rewards=handle.header.rewards | rewards) for handle in group]
    return [graded[0].with_header(greedy_tokens=best.tokens), *graded[1:]]


def of_teacher(found: Mapping[str, T], teacher: str) -> T:
    """Return the entry of this teacher; if `found` has only one entry, return that entry for any name."""
    return found[teacher] if len(found) > 1 else next(iter(found.values()))


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines that a runtime gives to the pipeline. `close` ends everything that the runtime started."""

    samplers: tuple[Sampler, ...]
    scorers: Mapping[str, tuple[Scorer, ...]]
    """Scorers by teacher name. A run without teachers has the single entry `""` with `Unscored`."""
    learner: Learner
    close: Callable[[], None]
    replace: Callable[[Any], Awaitable[Any]] | None = None
    """Replace a dead sampler or scorer: end its process and calls, and return a new engine whose weights are loaded.
    None if the engines share this process."""
    hire: Callable[[str, str], Any] | None = None
    """Reserve resources for one more engine, given its kind (`sampler`, `teacher.NAME`) and its unique name. `replace`
    makes an engine from the returned placeholder. None if the engines share this process."""
    dismiss: Callable[[Any], Awaitable[None]] | None = None
    """End an idle engine and its process, or cancel a reservation of `hire`. None if the engines share this process."""
    takes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Resources that one engine needs, by kind of engine; only for kinds of which more engines can be started."""
    free: Callable[[], Mapping[str, float]] = dict
    """Return the numbers of GPUs and CPUs that are neither used nor reserved."""
    traffic: Callable[[], Mapping[str, int]] = dict
    """Return the bytes that processes have given to others so far, by path; empty if the engines share this process."""
    teacher_samplers: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Samplers with a teacher's weights, by teacher; their weights never change. Empty unless teachers generate."""
