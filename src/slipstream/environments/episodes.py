"""Sampler whose responses are episodes: turns of the student and answers of an environment, in one token sequence.

Each turn is one call to the wrapped sampler. The prompt of this call contains the ids of all earlier tokens, so sampled
tokens are never converted to text and back. `Prompt.offset` is the number of sampled tokens, so random numbers do not
depend on the number of calls. A publish in mode `restart` repeats only the current turn.

There are three kinds of failure. Errors of the student are answered by the environment, counted, and trained on. Limits
end an episode; `finish` records the limit, and the episode is graded. If the environment hangs, crashes or raises, the
episode is retried. After the last try it is dropped without a reward; the rest of its group continues. A try is not
counted if the failed process also held other environments. A later try then runs in a separate process.

After a release or a failure, an episode continues with a new environment, to which all earlier turns are sent again. If
an answer differs from the recorded one, the rest of the episode is sampled anew.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from slipstream.environments import Message, Reply, Step
from slipstream.errors import DataError, EnvironmentFailed, Suspected
from slipstream.protocols import Sampler, Sampling
from slipstream.records import (
    Finish,
    Group,
    Handle,
    Header,
    Ints,
    Prompt,
    Rollout,
    derive_seed,
    handed_over,
    header_of,
    lineage,
    parts_of,
)
from slipstream.rewards.functions import TOTAL_REWARD

T = TypeVar("T")
EPISODE_TRIES = 3
"""Maximum number of tries of an episode whose environment fails."""
TURN_SPAN = "turn"
"""Name of time spans in which the student generates; other spans are calls of the environment."""
LOOP_LENGTH = 3
"""Number of consecutive equal tool calls with equal answers that count as a loop."""


class Environment(Protocol):
    async def ready(self) -> None:
        """Wait until the environment's process is ready. This time does not count for the limit `seconds`."""
        ...

    async def start(self, given: dict[str, Any]) -> Sequence[Message]:
        """Start the environment and return its first observation, which may be empty."""
        ...

    async def step(self, reply: Reply) -> Step: ...

    async def close(self) -> dict[str, float]:
        """Close the environment and return its rewards by name. A step that still runs is cancelled or awaited."""
        ...

    def drop(self) -> None:
        """Discard the environment without its rewards."""
        ...


class Policy(Sampler, Protocol):
    def close(self) -> None: ...


class Environments(Protocol):
    def place(self, *, alone: bool = False) -> Environment:
        """Return an environment that is not started yet. `alone`: it gets a separate process."""
        ...

    def close(self) -> None: ...


class TurnRenderer(Protocol):
    """Converter from sampled tokens to replies, and from messages of an environment to tokens."""

    stop_ids: frozenset[int]

    def parse(self, ids: Ints, *, cut: bool = False) -> Reply:
        """Parse the tokens of one turn. `cut`: the turn does not end with a stop token."""
        ...

    def extend(self, ids: Ints, messages: Sequence[Message]) -> Ints: ...

    def insert(self, prompt: Ints, messages: Sequence[Message]) -> Ints:
        """Return the tokens of a prompt with further messages before the header of the first turn."""
        ...

    def text(self, ids: Ints) -> str:
        """Decode tokens to text, special tokens included."""
        ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    turns: int
    calls: int
    turn_tokens: int | None
    """Maximum tokens of a turn. None: a turn may use all remaining tokens of the episode."""
    seconds: float
    """Maximum seconds of an episode."""
    step_seconds: float
    """Maximum seconds of one call of the environment: start, step or close."""


class Released(Exception):
    """Stop signal: the episode must be returned unfinished, in its current state."""


@dataclass
class Call:
    """Running call of `generate` for one group of episodes."""

    prompt: Prompt
    sampling: Sampling
    released: asyncio.Future[None]
    """Future that is done as soon as the group must be released."""
    ended: asyncio.Future[None]


class Calls:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.open: list[Call] = []

    async def run(
        self, prompt: Prompt, sampling: Sampling, member: Callable[[Call, int], Coroutine[Any, Any, T]]
    ) -> list[T]:
        """Run `member` for each place in a group; return all results. If one member fails, all are cancelled."""
        loop = asyncio.get_running_loop()
        call = Call(prompt, sampling, loop.create_future(), loop.create_future())
        self.open.append(call)
        try:
            async with asyncio.TaskGroup() as tasks:
                members = [tasks.create_task(member(call, place)) for place in range(sampling.group)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.open.remove(call)
            call.ended.set_result(None)
        return [task.result() for task in members]

    async def release(self, numbers: Collection[int] = ()) -> None:
        calls = [call for call in self.open if not numbers or call.prompt.number in numbers]
        for call in calls:
            if not call.released.done():
                call.released.set_result(None)
        await self.policy.release(numbers)
        if calls:
            await asyncio.wait([call.ended for call in calls])


@dataclass
class Episode:
    call: Call
    index: int
    failures: int
    prompt: Prompt
    """Prompt with the first observation, whose tokens count as tokens of the episode."""
    deadline: float = 0.0
    parts: list[Rollout | Ints] = field(default_factory=list)
    """Responses of the student's turns, and the observed tokens between turns, in order."""
    conversation: list[Any] = field(default_factory=lambda: [{"added": []}])
    """Messages of the first observation, and those before each later turn."""
    tokens: int = 0
    sampled: int = 0
    turns: int = 0
    """Number of complete turns; a released turn is not counted."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: list[float | None] = field(default_factory=list)
    """Reward of each complete turn; None if the environment gave none."""
    latest: list[Any] = field(default_factory=list)
    """Latest pairs of tool calls and answers, to detect loops; empty after a reply without tool calls."""
    looped: bool = False
    silent: bool = False
    """True if the latest reply has neither text nor calls."""
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, start time and duration in seconds of each turn and step."""

    @property
    def room(self) -> int:
        return self.call.sampling.max_tokens - self.tokens

    def add(self, part: Rollout | Ints) -> None:
        self.parts.append(part)
        if isinstance(part, Rollout):
            self.sampled += len(part.tokens)
            self.turns += part.finish != "released"
        self.tokens += len(part.tokens) if isinstance(part, Rollout) else len(part)

    def next_prompt(self) -> Prompt:
        prompt = self.prompt
        tokens = [part.tokens if isinstance(part, Rollout) else part for part in self.parts]
        return replace(
            prompt,
            tokens=np.concatenate([prompt.tokens, *tokens]).astype(prompt.tokens.dtype),
            offset=prompt.offset + self.sampled,
            first=self.index,
        )

    def record(self, reply: Reply, step: Step) -> None:
        self.metrics, self.silent = step.metrics, not (reply.text.strip() or reply.calls)
        self.turn_rewards.append(step.reward)
        self.latest = [*self.latest[1 - LOOP_LENGTH :], (reply.calls, step.messages)] if reply.calls else []
        self.looped |= len(self.latest) == LOOP_LENGTH and all(each == self.latest[0] for each in self.latest)

    def rollout(self, finish: Finish, rewards: Mapping[str, float]) -> Rollout:
        """Return the episode as it is now. Without a reward in `rewards` it has the sum of those of its turns."""
        of_turns = None
        if any(reward is not None for reward in self.turn_rewards):
            of_turns = np.array([reward or 0.0 for reward in self.turn_rewards])
            rewards = {TOTAL_REWARD: float(of_turns.sum()), **rewards}
        outcome = {
            **rewards,
            **self.metrics,
            "turns": float(self.turns),
            "looped": float(self.looped),
            "premature": float(finish == "eos" and self.silent),
            "seconds": sum(seconds for name, _, seconds in self.spans if name != TURN_SPAN),
            "failures": float(self.failures),
            "branches": 1.0,
        }
        rest: Any = {"finish": finish, "outcome": outcome, "turn_rewards": of_turns, "conversation": self.conversation}
        return lineage(self.prompt, self.index, self.parts, **rest)


class Episodes:
    def __init__(self, policy: Policy, renderer: TurnRenderer, environments: Environments, limits: Limits) -> None:
        self.policy, self.renderer, self.environments, self.limits = policy, renderer, environments, limits
        self.publish = policy.publish
        self.calls = Calls(policy)
        self.release = self.calls.release

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        known = {handle.body.index - prompt.first: handle.body for handle in begun}
        members = await self.calls.run(prompt, sampling, lambda call, n: self._member(call, n, known.get(n)))
        handles = [handle for handle in members if handle is not None]
        if len(handles) < len(members) or any(handle.header.finish == "released" for handle in handles):
            return handed_over(handle.body for handle in handles if handle.body is not None)
        now = self._now()
        spans = [[(name, now - began, seconds) for name, began, seconds in h.header.spans] for h in handles]
        return [Handle(replace(h.header, spans=tuple(each)), h.body) for h, each in zip(handles, spans, strict=True)]

    async def _member(self, call: Call, place: int, begun: Rollout | None) -> Handle | None:
        """Run one episode; return None if the episode is released before it has any token."""
        if begun is not None and begun.finish != "released":
            return Handle(header_of(begun), begun)
        failures, suspected, alone = 0, 0, False
        while True:
            episode, rollout = Episode(call, call.prompt.first + place, failures, call.prompt), None
            try:
                rollout = await self._play(episode, self.environments.place(alone=alone), begun)
            except Released:  # while its environment started or closed
                rollout = episode.rollout("released", {}) if episode.parts else begun
                if rollout is None:
                    return None
            except Suspected as suspicion:
                suspected += 1
                alone = alone or suspicion.acting or suspected > 1
            except EnvironmentFailed as failure:
                failures += 1
                if failures == EPISODE_TRIES:
                    return Handle(failed(call.prompt, episode.index, failure), None)
                alone = alone or failure.cause == "crash"
            if rollout is not None:
                if rollout.finish == "released" and begun is not None and len(begun.tokens) > len(rollout.tokens):
                    rollout = begun
                return Handle(replace(header_of(rollout), spans=tuple(episode.spans)), rollout)
            if episode.parts:
                begun = episode.rollout("released", {})

    async def _play(self, episode: Episode, environment: Environment, begun: Rollout | None) -> Rollout:
        try:
            await self._unless_released(episode.call, environment.ready())
            episode.deadline = self._now() + self.limits.seconds
            prompt = episode.call.prompt
            row = row_of(prompt, self.renderer.text(prompt.tokens), derive_seed(prompt.seed, "environment"))
            self._see(episode, await self._in_time(episode, "start", environment.start(row)))
            finish = await self._turns(episode, environment, begun)
            rewards: dict[str, float] = {}
            if finish == "released":
                environment.drop()
            else:
                rewards = await self._in_time(episode, "close", environment.close(), late=finish == "time")
        except BaseException:
            environment.drop()
            raise
        return episode.rollout(finish, rewards)

    def _see(self, episode: Episode, first: Sequence[Message]) -> None:
        """Add the first observation of an environment to the episode's prompt."""
        if not first:
            return
        try:
            tokens = self.renderer.insert(episode.prompt.tokens, first)
        except DataError as error:
            raise EnvironmentFailed("error", f"start: {error}") from None
        episode.tokens = len(tokens) - len(episode.prompt.tokens)
        if episode.room <= 0:
            most = f"sampler.max_tokens = {episode.call.sampling.max_tokens}"
            raise EnvironmentFailed("error", f"start returned {episode.tokens} tokens, and the episode has {most}")
        episode.prompt = replace(episode.prompt, tokens=tokens)
        episode.conversation = [{"added": first}]

    def _cut(self, turn: Rollout) -> bool:
        """Return whether a turn reached its length limit."""
        return int(turn.tokens[-1]) not in self.renderer.stop_ids

    async def _turns(self, episode: Episode, environment: Environment, begun: Rollout | None) -> Finish:
        known = list[Rollout | Ints]()
        if begun is not None and np.array_equal(begun.prompt.tokens, episode.prompt.tokens):
            known = parts_of(begun)
        complete = int(begun.outcome["turns"]) if begun is not None else 0
        while True:
            recorded = known.pop(0) if known else None
            assert not isinstance(recorded, np.ndarray)
            if recorded is not None and episode.turns < complete:
                turn = replace(recorded, finish="length" if self._cut(recorded) else "eos")
            else:
                try:
                    turn = await self._turn(episode, recorded)
                except Released:
                    if not episode.parts:
                        raise
                    return "released"
            episode.add(turn)
            if turn.finish == "released":
                return "released"
            if turn.finish == "length" and episode.room <= 0:
                return "length"
            reply = self.renderer.parse(turn.tokens, cut=self._cut(turn))
            if episode.metrics.get("calls", 0) + len(reply.calls) + len(reply.faults) > self.limits.calls:
                return "turns"
            try:
                step = await self._in_time(episode, "step", environment.step(reply))
            except Released:
                return "released"
            except TimeoutError:
                return "time"
            episode.record(reply, step)
            if step.done:
                return "length" if turn.finish == "length" and not reply.calls else "eos"
            if episode.turns >= self.limits.turns:
                return "turns"
            if self._now() >= episode.deadline:
                return "time"
            try:
                tail = self.renderer.extend(turn.tokens, step.messages)
            except DataError as error:
                raise EnvironmentFailed("error", str(error)) from None
            if len(tail) >= episode.room:
                return "length"
            if known:
                observed = known.pop(0)
                assert isinstance(observed, np.ndarray)
                if not np.array_equal(observed, tail):  # the new environment answers differently from the earlier one
                    known.clear()
            episode.add(tail)
            episode.conversation.append(step.messages)

    async def _turn(self, episode: Episode, begun: Rollout | None) -> Rollout:
        if episode.call.released.done():
            raise Released
        prompt, limit = episode.next_prompt(), self.limits.turn_tokens
        room = episode.room if limit is None else min(limit, episode.room)
        sampling = replace(episode.call.sampling, group=1, max_tokens=room, park=True)
        group = [] if begun is None else handed_over([replace(begun, finish="released", prompt=prompt)])
        began = self._now()
        found = await self.policy.generate(prompt, sampling, group)
        episode.spans.append((TURN_SPAN, began, self._now() - began))
        if not found:
            raise Released
        rollout: Rollout = found[0].body
        return rollout

    async def _in_time(self, episode: Episode, name: str, work: Coroutine[Any, Any, T], *, late: bool = False) -> T:
        """Wait for a call of the environment within its time limit.

        Raise EnvironmentFailed after the call's limit, TimeoutError after the episode's time, Released on a release.
        `late` doubles the limit, because a step may still be running.
        """
        began, limit = self._now(), self.limits.step_seconds * (2 if late else 1)
        left = max(episode.deadline - began, 0.0) if name == "step" else limit
        try:
            return await self._unless_released(episode.call, work, min(limit, left))
        except TimeoutError:
            if left < limit:
                raise
            why = f" after the {self.limits.seconds:g} s of its episode (environment.seconds)" if late else ""
            raise EnvironmentFailed("timeout", f"the environment took more than {limit:g} s to {name}{why}") from None
        finally:
            episode.spans.append((name, began, self._now() - began))

    async def _unless_released(self, call: Call, work: Coroutine[Any, Any, T], limit: float | None = None) -> T:
        """Return the result of `work`; raise Released if the group is released, TimeoutError after `limit` seconds."""
        task = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, call.released]
        try:
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if task.done():
            return task.result()
        raise Released if call.released.done() else TimeoutError

    def close(self) -> None:
        self.close_environments()
        self.policy.close()

    def close_environments(self) -> None:
        self.environments.close()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def row_of(prompt: Prompt, text: Any, seed: int) -> dict[str, Any]:
    """Return the fields of a prompt that an environment or an agent gets."""
    return {
        "id": prompt.id,
        "prompt": text,
        "ground_truth": prompt.ground_truth,
        "meta": prompt.meta,
        "data_source": prompt.data_source,
        "seed": seed,
    }


def failed(prompt: Prompt, index: int, error: EnvironmentFailed) -> Header:
    return Header(
        prompt=prompt.id,
        number=prompt.number,
        index=index,
        episode=index,
        data_source=prompt.data_source,
        prompt_tokens=len(prompt.tokens),
        tokens=0,
        versions=((0, 0),),
        finish="error",
        cause=str(error),
        outcome={f"failed/{error.cause}": 1.0, "failures": float(EPISODE_TRIES)},
        teacher=prompt.teacher,
        environment=prompt.environment,
    )
