"""A policy that babbles in tokens of a real tokenizer, and a client that speaks to a gateway in plain Python."""

import asyncio
import http.client
import json
import random
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from slipstream.environments.chat.renderer import Renderer
from slipstream.environments.episodes import Limits
from slipstream.environments.gateway.server import Server
from slipstream.environments.gateway.sessions import Session
from slipstream.protocols import Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Group, Handle, Ints, Prompt, derive_seed, header_of, one_turn
from support.templates import TEMPLATES, backend, tokenizer_with

INNER = backend()
STOPS = [INNER.token_to_id(text) for text in ("<|im_end|>", "<|end|>", "<|eom|>")]
VOCABULARY = INNER.get_vocab_size()
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
LOOK = {"type": "function", "function": FUNCTION}
SAID = (
    '<tool_call>\n{"name": "look", "arguments": {"what": "there", "count": 3}}\n</tool_call>',
    '<tool_call>{"name":"look","arguments":{}}</tool_call><tool_call>{"name":"look","arguments":{"a":[1,"ä"]}}</tool_call>',
    '<tool_call>\n{"name": "look", "argum',
    "<think>\nperhaps\n</think>\n\nIt is forty two.",
    "<think>\nnever ends",
    "  the weather\n\n",
    "",
)


def renderer(template: str = "qwen", **options: Any) -> Renderer:
    return Renderer(tokenizer_with(TEMPLATES[template], INNER), stop_ids=STOPS, **options)


def said_ids(rng: random.Random, text: str) -> list[int]:
    """In pieces, which are not the tokens that a tokenizer would give, and the control tokens that they are."""
    pieces, at = [], 0
    while at < len(text):
        mark = next((m for m in ("<tool_call>", "</tool_call>", "<think>", "</think>") if text.startswith(m, at)), "")
        pieces.append(mark or text[at : at + rng.randint(1, 3)].partition("<")[0] or text[at])
        at += len(pieces[-1])
    return [index for piece in pieces for index in INNER.encode(piece, add_special_tokens=False).ids]


class Babble:
    """Says what follows from seed, index and offset: text, calls, thinking, or noise. Every token has a log-prob that
    no other has."""

    def __init__(self, *, gap: float = 0.0) -> None:
        self.gap, self.version = gap, 0
        self.says = list[str]()
        """Texts of the next answers; answers are drawn when it is empty."""
        self.hold: asyncio.Event | None = None
        """Event that is awaited before anything is said."""
        self.calls: list[tuple[Ints, Ints]] = []
        """Requests to each, and its answers."""
        self.asked: list[tuple[Prompt, Sampling]] = []
        self.drawn = 0
        self.cancelled = 0
        self.closed = False

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        self.asked.append((prompt, sampling))
        rng = random.Random(derive_seed(prompt.seed, prompt.first, prompt.offset))
        try:
            await (asyncio.sleep(self.gap * rng.random()) if self.hold is None else self.hold.wait())
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        text = self.says.pop(0) if self.says else rng.choice([*SAID, None])
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))] if text is None else said_ids(rng, text)
        ids = [index for index in ids if index not in STOPS] + [rng.choice(STOPS)]
        cut = len(ids) > sampling.max_tokens
        actions = np.array(ids[: sampling.max_tokens], np.int32)
        self.calls.append((prompt.tokens, actions))
        logp = -1e-6 * (1 + self.drawn + np.arange(len(actions)))
        self.drawn += len(actions)
        rollout = one_turn(
            prompt,
            prompt.first,
            actions=actions[:, None],
            action_logp=logp[:, None],
            versions=np.full(len(actions), self.version, np.int32),
            finish="length" if cut else "eos",
        )
        return [Handle(header_of(rollout), rollout)]

    async def release(self, numbers: Collection[int] = ()) -> None:
        pass

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        self.version = weights.version
        return Loaded("")

    def close(self) -> None:
        self.closed = True


def post(url: str, body: Any, *, timeout: float = 20.0, method: str = "POST", headers: Any = None) -> tuple[int, Any]:
    """The status and the JSON of an answer, or its text."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=timeout)
    try:
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, f"/{path}", sent, {"content-type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        said = answer.read()
    finally:
        connection.close()
    kind = answer.headers.get("content-type", "")
    return answer.status, json.loads(said) if kind == "application/json" else said.decode()


# --- a served session ---

ASKED = {"messages": [{"role": "user", "content": "And?"}]}
LIMITS = Limits(turns=1000, calls=1000, turn_tokens=None, seconds=60.0, step_seconds=10.0)
RENDERER = renderer("qwen")
PROMPT = Prompt(id="p", number=5, tokens=RENDERER.open(ASKED["messages"]), seed=3)


@asynccontextmanager
async def serving(policy: Any = None, *, limits: Limits = LIMITS) -> AsyncIterator[tuple[Server, Session, str]]:
    said: list[str] = []
    made = Server("student", say=said.append)
    await made.start()
    session = Session(policy or Babble(), RENDERER, PROMPT, Sampling(max_tokens=4000), 0, limits, VOCABULARY)
    try:
        yield made, session, made.base_url(made.open(session)).removesuffix("/v1")
    finally:
        made.close()
        await asyncio.sleep(0)


async def sent(url: str, body: Any, **given: Any) -> tuple[int, Any]:
    return await asyncio.to_thread(lambda: post(url, body, **given))
