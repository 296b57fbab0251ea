"""State of an agent's conversations: branches (token sequences to which turns are appended), and message digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.environments import Message
from slipstream.records import Ints, Rollout

Tools = Sequence[dict[str, Any]]


@dataclass(eq=False)
class Branch:
    prompt: Ints
    seed: int
    ids: Ints = field(init=False)
    """Prompt and all later tokens."""
    parts: list[Rollout | Ints] = field(default_factory=list)
    sampled: int = 0
    busy: bool = False
    latest: int = 0

    def __post_init__(self) -> None:
        self.ids = self.prompt

    def add(self, seen: Ints, turn: Rollout, number: int) -> None:
        self.parts += [seen, turn] if self.parts else [turn]
        self.ids = joined(self.ids, seen, turn.tokens)
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


def joined(*parts: Ints) -> Ints:
    found: Ints = np.concatenate(parts).astype(parts[0].dtype)
    return found


def named(ids: Ints) -> bytes:
    """Return a digest of token ids that does not depend on their integer type."""
    return hashlib.blake2b(ids.astype(np.int64).tobytes(), digest_size=16).digest()


def canonical(message: Message) -> str:
    """Return, as JSON, the parts of a message that distinguish it from other messages."""
    calls = [[each["function"]["name"], each["function"]["arguments"]] for each in message.get("tool_calls") or ()]
    return json.dumps([message["role"], message["content"], message.get("name"), calls], sort_keys=True)


def chained(messages: Sequence[Message], tools: Tools) -> list[bytes]:
    """Return a digest of the tools and the first n messages, for every n from 0 to the number of messages."""
    found = [digest(b"", json.dumps(list(tools), sort_keys=True))]
    for message in messages:
        found.append(digest(found[-1], canonical(message)))
    return found


def digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
