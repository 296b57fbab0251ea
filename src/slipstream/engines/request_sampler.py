"""Base of samplers that send a request for each response: groups in flight, and the end of their requests."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

from slipstream.errors import EngineError, ModelError
from slipstream.protocols import Sampling
from slipstream.records import Finish, Group, Handle, Prompt, Rollout, continued, handed_over, header_of

FINISHES: dict[str, Finish] = {"stop": "eos", "length": "length", "abort": "released"}
"""Reason why a response ended, by the reason that an engine gives for the end of a request."""


@dataclass(eq=False)
class OpenGroup:
    """Running group of responses to one prompt."""

    prompt: Prompt
    sampling: Sampling
    parts: dict[int, Rollout] = field(default_factory=dict)
    """Tokens of each member so far, by index."""
    released: bool = False
    restarts: int = 0
    """Number of publishes that made the group start again."""

    @property
    def indices(self) -> range:
        return range(self.prompt.first, self.prompt.first + self.sampling.group)

    @property
    def left(self) -> list[int]:
        return [index for index in self.indices if not self.complete(index)]

    @property
    def tokens(self) -> int:
        return sum(len(part.tokens) for part in self.parts.values())

    def complete(self, index: int) -> bool:
        return index in self.parts and self.parts[index].finish != "released"

    def add(self, index: int, rest: Rollout) -> None:
        """Add the tokens of a request to a member."""
        self.parts[index] = continued(self.parts[index], rest) if index in self.parts else rest

    def restart(self) -> int:
        """Drop all tokens, so that the group starts again, and return their number."""
        thrown = self.tokens
        self.parts.clear()
        self.restarts += 1
        return thrown

    def handles(self) -> list[Handle]:
        """Return all members; if some are incomplete, only those that have tokens, marked as released."""
        rollouts = [self.parts[index] for index in self.indices if index in self.parts]
        return handed_over(rollouts) if self.left else [Handle(header_of(rollout), rollout) for rollout in rollouts]


class RequestSampler:
    abort_interval: ClassVar[float]
    """Seconds after which an abort is repeated, because a request may not have reached the engine before."""

    def __init__(self, stop_ids: Collection[int]) -> None:
        self.stop_ids, self.numbers = sorted(stop_ids), count()
        self.open: set[OpenGroup] = set()
        self.running: dict[str, tuple[OpenGroup, asyncio.Task[Any]]] = {}
        """Open requests by name, with their group."""
        self.failure: EngineError | None = None
        """Error of a publish that failed; no tokens are sampled afterwards. None if no publish failed."""

    async def _group(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        group = OpenGroup(prompt, sampling, {handle.body.index: handle.body for handle in begun})
        self.open.add(group)
        try:
            while group.left and not group.released:
                await self._before_round(group)
                if group.released:
                    break
                async with asyncio.TaskGroup() as members:  # one failure or cancellation ends all
                    for index in group.left:
                        members.create_task(self._start(group, index))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.open.discard(group)
        return group.handles()

    async def _start(self, group: OpenGroup, index: int) -> None:
        if not group.released:  # the group may have been released after this task was made, which nothing would end
            await self._member(group, index)

    async def _before_round(self, group: OpenGroup) -> None:
        """Wait until requests of a group may start."""

    async def _member(self, group: OpenGroup, index: int) -> None:
        """Generate the rest of a response; earlier tokens of the response are part of the request's prompt."""
        raise NotImplementedError

    async def _release(self, numbers: Collection[int]) -> None:
        for group in self.open:
            group.released |= not numbers or group.prompt.number in numbers
        await self._end(lambda group: group.released)

    async def _end(self, which: Callable[[OpenGroup], bool]) -> None:
        """End the requests of these groups, and wait until their tokens are in the groups."""
        while left := {name: task for name, (group, task) in self.running.items() if which(group) and not task.done()}:
            await self._abort(list(left))
            await asyncio.wait(left.values(), timeout=self.abort_interval)

    async def _abort(self, names: Collection[str]) -> None:
        """End these requests, which then answer with the tokens drawn so far; ignore unknown names."""


def check_length(prompt: Prompt, sampling: Sampling, max_length: int) -> None:
    if len(prompt.tokens) + sampling.max_tokens > max_length:
        raise ModelError(
            f"prompt {prompt.id} has {len(prompt.tokens)} tokens: with max_tokens = {sampling.max_tokens} it "
            f"exceeds the context of {max_length}"
        )


async def finished(task: asyncio.Future[Any]) -> Any:
    """Return a task's result; if the caller is cancelled, raise the cancellation only after the task has ended."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
