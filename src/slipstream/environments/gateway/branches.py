"""State of an agent's conversations: branches (token sequences to which turns are appended), and message digests."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from slipstream.environments import Message
from slipstream.records import Ints, Rollout

Tools = Sequence[dict[str, Any]]
SORTED_JSON = json.JSONEncoder(sort_keys=True).encode


@dataclass(eq=False)
class Branch:
    prompt: Ints
    seed: int
    ids: Ints = field(init=False)
    """Prompt and all later tokens."""
    conversation: list[Any] = field(default_factory=list)
    """Messages of the prompt, and those before each later turn: `Rollout.conversation`."""
    parts: list[Rollout | Ints] = field(default_factory=list)
    sampled: int = 0
    busy: bool = False
    latest: int = 0

    def __post_init__(self) -> None:
        self.ids = self.prompt

    def add(self, seen: Ints, turn: Rollout, number: int, messages: Sequence[Message] | None) -> None:
        """Add a turn and what it sees: tokens and their messages, None if these are unknown."""
        self.conversation += [messages] if self.parts else []
        self.parts += [seen, turn] if self.parts else [turn]
        self.ids = join(self.ids, seen, turn.tokens)
        self.sampled += len(turn.tokens)
        self.latest = number


@dataclass(frozen=True)
class Place:
    """State of a conversation when a call was answered."""

    branch: Branch
    length: int
    """Number of tokens of the branch up to the end of this answer."""
    messages: int
    turn: Ints
    """Tokens of this answer."""


@dataclass(frozen=True)
class History:
    """Conversation of a request; the two lists have an entry for every number of messages, from 0 on."""

    messages: Sequence[Message] = ()
    digests: Sequence[bytes] = ()
    """Digests of the tools and the first n messages."""
    sizes: Sequence[int] = ()
    """Bytes of text in the tools and the first n messages."""

    def digest_with(self, message: Message) -> bytes:
        return digest(self.digests[-1], canonical(message))


def history_of(messages: Sequence[Message], tools: Tools, before: History) -> History:
    """Return the history of a request; messages at the start that are objects of the history `before` cost nothing."""
    text, same = SORTED_JSON(list(tools)), 0
    start = digest(b"", text)
    if before.digests and before.digests[0] == start:
        same = 1 + sum(
            1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(messages, before.messages, strict=False))
        )
    digests, sizes = list(before.digests[:same]) or [start], list(before.sizes[:same]) or [len(text)]
    for message in messages[len(digests) - 1 :]:
        digests.append(digest(digests[-1], canonical(message)))
        sizes.append(sizes[-1] + size_of(message))
    return History(messages, digests, sizes)


def size_of(message: Message) -> int:
    calls = json.dumps(message["tool_calls"], ensure_ascii=False) if "tool_calls" in message else ""
    return sum(len(text.encode("utf-8", "replace")) for text in (message["content"], message.get("name", ""), calls))


def join(*parts: Ints) -> Ints:
    found: Ints = np.concatenate(parts).astype(parts[0].dtype)
    return found


def digest_of_ids(ids: Ints) -> bytes:
    """Return a digest of token ids that does not depend on their integer type."""
    return hashlib.blake2b(ids.astype(np.int64).tobytes(), digest_size=16).digest()


def canonical(message: Message) -> str:
    """Return, as JSON, the parts of a message that distinguish it from other messages.

    Whole numbers are integers, because JavaScript's agents give back 1.0 as 1.
    """
    functions = [each["function"] for each in message.get("tool_calls") or ()]
    calls = [[each["name"], as_integers(each["arguments"])] for each in functions]
    return SORTED_JSON([message["role"], message["content"], message.get("name"), calls])


def as_integers(value: Any) -> Any:
    match value:
        case float():
            return int(value) if value.is_integer() else value
        case dict():
            return {name: as_integers(each) for name, each in value.items()}
        case list():
            return [as_integers(each) for each in value]
    return value


def digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
