"""Sampler of a run with several environments: each group goes to the episodes of its prompt's environment."""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Protocol

from slipstream.environments.episodes import Policy
from slipstream.protocols import Sampler, Sampling
from slipstream.records import Group, Handle, Prompt


class Episodic(Sampler, Protocol):
    """Sampler whose responses are the episodes of one environment."""

    def close_environments(self) -> None:
        """End the processes of the environment; the policy is not closed."""
        ...


class SeveralEnvironments:
    def __init__(self, policy: Policy, by_name: Mapping[str, Episodic]) -> None:
        """Route prompts by the name of their environment; all of `by_name` draw from `policy`."""
        self.policy, self.by_name = policy, by_name
        self.publish = policy.publish

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        return await self.by_name[prompt.environment].generate(prompt, sampling, begun)

    async def release(self, numbers: Collection[int] = ()) -> None:
        await asyncio.gather(*(each.release(numbers) for each in self.by_name.values()))

    def close(self) -> None:
        with ExitStack() as stack:  # each is closed, also if another one raises an exception
            stack.callback(self.policy.close)
            for each in self.by_name.values():
                stack.callback(each.close_environments)
