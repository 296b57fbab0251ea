"""The memory of earlier attempts (responses and rewards) at each prompt, for teachers that get attempts as context.

`best` is the best attempt so far, including attempts of the group that is scored next. `last` is the newest
attempt by another group. Memory is bounded: the prompts tried least recently are forgotten first.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.records import Attempts, Group, Handle, Header

MAX_CHARACTERS = 1 << 27
"""Maximum number of characters that a `Memory` stores."""


@dataclass
class PromptAttempts:
    """The attempts at one prompt."""

    best: str = ""
    best_reward: float | None = None
    newest: list[tuple[int, str, float | None]] = field(default_factory=list)
    """Group number, last attempt and its reward, for each of the last two groups."""

    @property
    def size(self) -> int:
        return len(self.best) + sum(len(text) for _, text, _ in self.newest)


class Memory:
    def __init__(
        self, reward: str = "", *, before: Mapping[str, Any] | None = None, limit: int = MAX_CHARACTERS
    ) -> None:
        """Create a memory, empty or from the saved state `before`; `reward` names the reward that ranks attempts."""
        self.reward, self.limit = reward, limit
        self.prompts = OrderedDict((prompt, PromptAttempts(**tried)) for prompt, tried in (before or {}).items())
        self.size = sum(tried.size for tried in self.prompts.values())

    @property
    def state(self) -> dict[str, Any]:
        return {prompt: asdict(tried) for prompt, tried in self.prompts.items()}

    def note(self, group: Group) -> list[Handle]:
        """Remember the attempts of a rolled-out group, and return its handles without their texts.

        A response that began with a given part of the answer is no attempt.
        """
        headers, plain = [handle.header for handle in group], [handle.with_header(text="") for handle in group]
        if headers[0].prefix:
            return plain
        tried = self.prompts.pop(headers[0].prompt, None) or PromptAttempts()
        self.size -= tried.size
        for header in headers:
            reward = header.rewards.get(self.reward)
            if reward is not None and (tried.best_reward is None or reward > tried.best_reward):
                tried.best, tried.best_reward = header.text, reward
        last = headers[-1]
        others = [each for each in tried.newest if each[0] != last.number]
        tried.newest = [*others[-1:], (last.number, last.text, last.rewards.get(self.reward))]
        self.prompts[last.prompt] = tried
        self.size += tried.size
        while self.size > self.limit and len(self.prompts) > 1:
            _, forgotten = self.prompts.popitem(last=False)
            self.size -= forgotten.size
        return plain

    def attempts_for(self, header: Header, names: Collection[str]) -> Attempts:
        """Return the attempts for the teacher of this response; fields that are not in `names` stay empty."""
        tried = self.prompts.get(header.prompt, PromptAttempts())
        others = [(text, reward) for number, text, reward in tried.newest if number != header.number]
        last, last_reward = others[-1] if others else ("", None)
        known = Attempts(tried.best, tried.best_reward, last, last_reward)
        return Attempts(**{name: getattr(known, name) for name in names})
