"""Session of one agent: its requests for completions are turns of an episode, recorded as lineages.

A lineage is a token sequence to which turns are only appended; a branch is a lineage of a running session. A request
that continues an answered conversation is the next turn of its branch. Any other request opens a new branch, such as a
subagent, an edited history, or other tools. All tokens before the first sampled token of a branch are its prompt, so
every sampled token is trained once. Messages are compared with those that the agent received. Agents never receive
thinking, so thinking tokens stay in the branch. Random numbers of a branch depend only on the episode's seed, the
branch's prompt and the position. A branch that starts with the episode's prompt samples as without a gateway.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar

import numpy as np

from slipstream.environments import Call, Message, Reply
from slipstream.environments.chat.renderer import Renderer
from slipstream.environments.episodes import Limits
from slipstream.environments.gateway.branches import Branch, History, Place, Tools, digest_of_ids, history_of, join
from slipstream.errors import DataError
from slipstream.protocols import Sampler, Sampling
from slipstream.records import Finish, Floats, Handle, Ints, Prompt, Rollout, derive_seed, lineage, part_of, unfinished

MAX_INLINE_BYTES = 16 << 10
"""Maximum bytes that are parsed or tokenized on the event loop; PARSER_THREAD handles longer requests."""
PARSER_THREAD = ThreadPoolExecutor(1, "gateway")
"""Thread that parses and tokenizes long requests, one after the other to limit the memory."""
T = TypeVar("T")


class Refused(Exception):
    """Error of a request that gets no completion; `code` is the API's error code."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class Failed(Exception):
    """Error of the sampler, which does not count against the agent."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    number: int
    """Number of the call in its session."""
    read: int
    """Number of tokens of the call's prompt."""
    ids: Ints
    logp: Floats
    text: str
    calls: tuple[Call, ...]
    finish: Literal["stop", "length", "tool_calls"]
    stop: str = ""
    """Stop sequence at which the answer ends; empty if the student ended it, or a limit."""


class Session:
    def __init__(
        self,
        policy: Sampler,
        renderer: Renderer,
        prompt: Prompt,
        sampling: Sampling,
        index: int,
        limits: Limits,
        vocabulary: int,
    ) -> None:
        """Open a session without calls. The model has embeddings for token ids below `vocabulary`."""
        self.policy, self.renderer, self.prompt, self.index = policy, renderer, prompt, index
        self.sampling, self.limits, self.vocabulary = sampling, limits, vocabulary
        self.branches: list[Branch] = []
        self.places: dict[bytes, Place] = {}
        """States of answered conversations, by the digest of their tools and messages."""
        self.known: Sequence[tuple[Any, Message]] = ()
        """Messages of the latest request, as sent and as parsed: the next request usually begins with them."""
        self.history = History()
        self.opened = Counter[bytes]()
        self.begun = 0
        """Number of calls, including running ones."""
        self.counts = Counter[str]()
        self.stopped: Finish | None = None
        """Limit at which the latest call ended or was refused; None if it met no limit."""
        self.closed = False
        self.answers: dict[bytes, list[asyncio.Task[Answer]]] = {}
        """Tasks that compute answers, by digest of the request. Equal requests share a task only if one is a retry."""
        self.lost = set[asyncio.Task[Answer]]()
        """Tasks whose client disconnected before the answer was ready."""
        self.running = 0
        self.since = self.began = asyncio.get_running_loop().time()
        self.busy = 0.0
        """Seconds in which a call was running."""
        self.going = asyncio.Event()
        """Cleared while the episode is released, so that no tokens are sampled."""
        self.going.set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that receives the error if the sampler fails."""

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a conversation: tokens of the row's prompt, plus tokens that an episode may add."""
        return len(self.prompt.tokens) + self.sampling.max_tokens

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of text of a conversation: `max_tokens` times the bytes of the longest token."""
        return self.max_tokens * self.renderer.longest

    async def answer_once(self, digest: bytes, again: bool, call: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return the answer to a request; a retry gets the answer of the request that it repeats.

        A request is a retry if its client marks it (`again`), or if the client of an equal request disconnected before
        the answer. Other equal requests get separate answers. Cancelling this wait does not cancel the call.
        """
        if self.closed:
            raise Refused(410, "this session is closed", code="session_closed")
        known = self.answers.setdefault(digest, [])
        task = next((each for each in known if each in self.lost), known[-1] if again and known else None)
        if task is None:
            task = asyncio.get_running_loop().create_task(call())
            task.add_done_callback(lambda done: self._forget_failed(digest, done))
            known.append(task)
        self.lost.discard(task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Refused(410, "this session was closed before the answer", code="session_closed") from None
            self.lost.add(task)
            raise

    def _forget_failed(self, digest: bytes, task: asyncio.Task[Answer]) -> None:
        """Keep nothing of a request without an answer; its error, which a waiting client gets, refers to its body."""
        if error_of(task) is not None:
            self.lost.discard(task)
            self.answers[digest].remove(task)
            if not self.answers[digest]:
                del self.answers[digest]

    async def chat(
        self, messages: Sequence[Message], tools: Tools = (), most: int | None = None, stops: Sequence[str] = ()
    ) -> Answer:
        """Answer a chat request. Messages have text as role and content; tool_calls have objects as arguments.

        The student's turn is cut after the token that completes a sequence of `stops`. The agent gets the text before
        it, which is not what the branch holds: its next request opens a new branch.
        """
        history = self.history = history_of(messages, tools, self.history)
        if (size := history.sizes[-1]) > self.max_bytes:
            most_bytes = f"{self.max_tokens} tokens can hold: {self.max_bytes}"
            raise limit_refusal(self, f"this conversation has {size} bytes, more than {most_bytes}")
        place = self._place(history)
        more: Sequence[Message] | None = None
        rebuilt = {"rebuilt": messages, "tools": tools}
        try:
            if place is None:
                branch, seen = self._branch(await in_parser_thread(size, self.renderer.open, messages, tools), rebuilt)
            else:
                more, size = messages[place.messages :], size - history.sizes[place.messages]
                seen, branch = await in_parser_thread(size, self.renderer.extend, place.turn, more), place.branch
                if branch.busy or place.length < len(branch.ids):
                    branch, seen = self._open(join(branch.ids[: place.length], seen), rebuilt)
        except DataError as error:
            raise Refused(400, str(error), param="messages") from None
        number, turn = await self._draw_turn(branch, seen, most, stops, more)
        answer = self._read(number, branch, turn, tools, stops)
        if answer.stop:
            return answer
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls]
        message: Message = {"role": "assistant", "content": answer.text, "tool_calls": calls}
        place = Place(branch, len(branch.ids), len(messages) + 1, turn.tokens)
        self.places.setdefault(history.digest_with(message), place)
        return answer

    async def generate(self, ids: Ints, most: int | None = None) -> Answer:
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= self.vocabulary:
            why = f"token_ids: write at least one id, each from 0 to {self.vocabulary - 1}"
            raise Refused(400, why, param="token_ids")
        branch, seen = self._branch(ids)
        number, turn = await self._draw_turn(branch, seen, most)
        return self._read(number, branch, turn)

    def _place(self, history: History) -> Place | None:
        """Return the latest answered state that these messages continue, or None. No assistant message follows it."""
        for n in range(len(history.messages), 0, -1):
            if n < len(history.messages) and (place := self.places.get(history.digests[n])) is not None:
                return place
            if history.messages[n - 1]["role"] == "assistant":
                return None
        return None

    def _branch(self, ids: Ints, first: Any = None) -> tuple[Branch, Ints]:
        """Return the longest branch with which these ids begin, or a new branch, and the ids after the branch.

        `first` holds the messages that the ids encode, as the first entry of `Rollout.conversation`; None: unknown.
        """
        for branch in sorted(self.branches, key=lambda branch: -len(branch.ids)):
            known = len(branch.ids)
            if not branch.busy and branch.parts and np.array_equal(ids[:known], branch.ids):
                return branch, ids[known:]
        return self._open(ids, first)

    def _open(self, ids: Ints, first: Any) -> tuple[Branch, Ints]:
        ids = np.asarray(ids, self.prompt.tokens.dtype)
        name, seed = digest_of_ids(ids), self.prompt.seed
        earlier, same = self.opened[name], np.array_equal(ids, self.prompt.tokens)
        if earlier or not same:
            seed = derive_seed(self.prompt.seed, "branch", name.hex(), earlier)
        return Branch(ids, seed, [{"added": []} if same else first]), ids[:0]

    async def _draw_turn(
        self, branch: Branch, seen: Ints, most: int | None, stops: Sequence[str] = (), messages: Any = None
    ) -> tuple[int, Rollout]:
        """Sample one more turn of a branch, after `messages`; return its number and its rollout."""
        tokens = len(branch.ids) + len(seen)
        room = self.max_tokens - tokens
        if self.begun >= self.limits.turns:
            raise limit_refusal(
                self, f"this session has used all of its {self.limits.turns} calls (environment.turns)", "turns"
            )
        if room <= 0:
            raise limit_refusal(
                self, f"this conversation has {tokens} tokens; at most {self.max_tokens - 1} are allowed"
            )
        if not branch.parts:
            self.opened[digest_of_ids(branch.ids)] += 1
            self.branches.append(branch)
        number = self.begun
        self.begun += 1
        branch.busy = True
        self._runs(1)
        try:
            turn = await self._turn(branch, seen, min(filter(None, (room, self.limits.turn_tokens, most))))
        finally:
            self._runs(-1)
            branch.busy = False
        if stops:
            turn = part_of(turn, 0, self._end_of(turn.tokens, stops))
        branch.add(seen, turn, number, messages)
        self.stopped = "length" if turn.finish == "length" and len(branch.ids) >= self.max_tokens else None
        return number, turn

    async def _turn(self, branch: Branch, seen: Ints, most: int) -> Rollout:
        prompt = replace(
            self.prompt,
            tokens=join(branch.ids, seen),
            seed=branch.seed,
            offset=self.prompt.offset + branch.sampled,
            first=self.index,
        )
        sampling, found = replace(self.sampling, group=1, max_tokens=most, park=True), list[Handle]()
        try:
            while unfinished(found):
                await self.going.wait()
                found = await self.policy.generate(prompt, sampling, found)
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise Failed from None
        turn: Rollout = found[0].body
        return turn

    def _end_of(self, ids: Ints, stops: Sequence[str]) -> int:
        """Return the number of tokens up to the one that completes a stop sequence in the visible text."""

        def is_complete(n: int) -> bool:
            text = self.renderer.visible(ids[:n])
            return any(stop in text for stop in stops)

        return bisect_left(range(len(ids)), True, key=is_complete) if is_complete(len(ids)) else len(ids)

    def _read(self, number: int, branch: Branch, turn: Rollout, tools: Tools = (), stops: Sequence[str] = ()) -> Answer:
        ids = turn.tokens
        visible = self.renderer.visible(ids)
        stop = min((stop for stop in stops if stop in visible), key=visible.index, default="")
        cut = not stop and int(ids[-1]) not in self.renderer.stop_ids
        reply = self.renderer.parse(ids, cut=cut, tools=tools) if tools else Reply("")
        text = reply.text if reply.calls else visible
        self.counts["turns"] += 1
        self.counts["calls"] += len(reply.calls) + len(reply.faults)
        self.counts["invalid"] += len(reply.faults)
        return Answer(
            number=number,
            read=len(branch.ids) - len(ids),
            ids=ids,
            logp=turn.logp,
            text=(text.partition(stop)[0] if stop else text).strip(),
            calls=reply.calls,
            finish="length" if cut else "tool_calls" if reply.calls else "stop",
            stop=stop,
        )

    def _runs(self, more: int) -> None:
        now = asyncio.get_running_loop().time()
        if self.running:
            self.busy += now - self.since
        self.since = now
        self.running += more

    def close(self) -> None:
        self.closed = True
        for task in chain.from_iterable(self.answers.values()):
            task.cancel()
        if self.failure.done():
            self.failure.exception()  # marks the error as retrieved

    def rollouts(self, finish: Finish, stride: int, rewards: Mapping[str, float]) -> list[Rollout]:
        """Return the lineages, ordered by their latest turn; their indices in the group are `stride` apart."""
        counted = {name: float(self.counts[name]) for name in ("turns", "calls", "invalid")}
        spent = asyncio.get_running_loop().time() - self.began - self.busy
        sampled = sorted((branch for branch in self.branches if branch.parts), key=lambda branch: branch.latest)
        outcome = {**rewards, **counted, "branches": float(len(sampled)), "seconds": max(spent, 0.0)}
        rows = [
            lineage(
                replace(self.prompt, tokens=branch.prompt),
                self.index + stride * number,
                branch.parts,
                finish=finish,
                branch=number,
                outcome=outcome,
                conversation=branch.conversation,
            )
            for number, branch in enumerate(sampled)
        ]
        return [replace(row, episode=self.index) for row in rows]


def error_of(task: asyncio.Future[Any]) -> BaseException | None:
    """Return the error of a finished task, and mark it as retrieved, so that asyncio does not report it."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def limit_refusal(session: Session, why: str, limit: Finish = "length", status: int = 400) -> Refused:
    """Return the refusal of a request that exceeds a limit, worded so that agents recognize it and do not retry."""
    session.stopped = limit
    message = f"this model's maximum context length is reached: {why}"
    return Refused(status, message, code="context_length_exceeded", param="messages")


async def in_parser_thread(size: int, work: Callable[..., T], *given: Any) -> T:
    """Run small work at once, and large work in the gateway's thread so that it does not block the event loop."""
    if size <= MAX_INLINE_BYTES:
        return work(*given)
    return await asyncio.get_running_loop().run_in_executor(PARSER_THREAD, partial(work, *given))
