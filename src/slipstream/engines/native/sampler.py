"""Rollouts from any HF causal LM: continuous batching over KV slots.

A request is a group: it waits until `group` slots are free, shares one prefill, and leaves when its last response ends.
Active rows always fill slots 0..n−1; when rows end, the last ones move into the holes. All state belongs to one thread:
the event loop only appends to `waiting` and `publishing`, and the thread looks at them between two tokens, so weights
change exactly at a token boundary.

Shapes: S slots, N rows of a step, Q prompt positions, L positions, T response positions, M draws, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.engines.base import Fingerprint, Mode, Sampling, WeightsRef
from slipstream.engines.draws import draw, process, uniforms
from slipstream.engines.native import kv
from slipstream.engines.native.model import LanguageModel, fingerprint, load_weights
from slipstream.errors import ModelError
from slipstream.records import Finish, Handle, Prompt, Rollout, derive_seed, header_of

PREFILL_TOKENS = 1 << 15
"""Most tokens, padding included, of one prefill pass."""


@dataclass(eq=False)
class Request:
    prompt: Prompt
    sampling: Sampling
    answer: asyncio.Future[list[Handle]]
    done: dict[int, Rollout] = field(default_factory=dict)


@dataclass(eq=False)
class Row:
    """One running response: its place in the group, and how many positions its sequence has."""

    request: Request
    index: int
    length: int


@dataclass(eq=False)
class Publish:
    weights: WeightsRef
    version: int
    mode: Mode
    answer: asyncio.Future[Fingerprint]


class Tape:
    """What has been written for every slot so far: tensors with S rows, widened when a request needs more room."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.seed_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self.prompt_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self.last_S = torch.zeros(slots, dtype=torch.int64, device=device)
        """Position of the newest token, which no forward pass has seen yet."""
        self.limit_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self.ids_SL = torch.zeros(slots, 0, dtype=torch.int64, device=device)
        self.version_ST = torch.zeros(slots, 0, dtype=torch.int64, device=device)
        self.action_STM = torch.zeros(slots, 0, 0, dtype=torch.int64, device=device)
        self.logp_STM = torch.zeros(slots, 0, 0, device=device)

    def widen(self, length: int, tokens: int, draws: int, dtype: torch.dtype) -> None:
        self.ids_SL = _grown(self.ids_SL, length)
        self.version_ST = _grown(self.version_ST, tokens)
        self.action_STM = _grown(self.action_STM, tokens, draws)
        self.logp_STM = _grown(self.logp_STM.to(dtype), tokens, draws)

    def move(self, source: Tensor, target: Tensor) -> None:
        for name, tensor in vars(self).items():
            assert isinstance(tensor, Tensor), name
            tensor[target] = tensor[source]


def _grown(tensor: Tensor, *sizes: int) -> Tensor:
    shape = [max(have, want) for have, want in zip(tensor.shape[1:], sizes, strict=True)]
    if list(tensor.shape[1:]) == shape:
        return tensor
    wider = tensor.new_zeros(len(tensor), *shape)
    wider[tuple(slice(size) for size in tensor.shape)] = tensor
    return wider


class NativeSampler:
    def __init__(self, lm: LanguageModel, *, slots: int, stop_ids: set[int], threads: int = 1) -> None:
        self.lm, self.count, self.version = lm, slots, 0
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=lm.device)
        self.slots, self.tape = kv.Slots(slots), Tape(slots, lm.device)
        self.rows: list[Row] = []
        self.waiting: deque[Request] = deque()
        self.publishing: deque[Publish] = deque()
        self.open: set[Request | Publish] = set()
        """All that somebody waits for, wherever the engine has put it."""
        self.thread = ThreadPoolExecutor(1, "sampler", initializer=torch.set_num_threads, initargs=(threads,))
        self.driver: asyncio.Task[None] | None = None
        lm.model.set_attn_implementation(kv.NAME)

    # --- on the event loop -----------------------------------------------------------------------------------

    async def generate(self, prompt: Prompt, sampling: Sampling) -> list[Handle]:
        if sampling.group > self.count:
            raise ValueError(f"a group of {sampling.group} does not fit into {self.count} slots")
        if len(prompt.tokens) + sampling.max_tokens > self.lm.context:
            raise ModelError(
                f"prompt {prompt.id} has {len(prompt.tokens)} tokens: with max_tokens = {sampling.max_tokens} it "
                f"exceeds the context of {self.lm.context}"
            )
        request = Request(prompt, sampling, asyncio.get_running_loop().create_future())
        self.waiting.append(request)
        await self._answered(request)
        return request.answer.result()

    async def publish(self, weights: WeightsRef, version: int, mode: Mode) -> Fingerprint:
        publish = Publish(weights, version, mode, asyncio.get_running_loop().create_future())
        self.publishing.append(publish)
        await self._answered(publish)
        return publish.answer.result()

    async def _answered(self, item: Request | Publish) -> None:
        self.open.add(item)
        self._wake()
        try:
            await item.answer
        finally:
            self.open.discard(item)

    def _wake(self) -> None:
        if self.driver is None or self.driver.done():
            self.driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        while self.waiting or self.rows or self.publishing:
            try:
                for answer, result in await loop.run_in_executor(self.thread, self._advance):
                    if not answer.done():
                        answer.set_result(result)
            except Exception as error:  # whoever waits gets the cause; nobody waits for ever
                for item in self.open:
                    if not item.answer.done():
                        item.answer.set_exception(error)
                self.rows, self.waiting, self.publishing = [], deque(), deque()

    def close(self) -> None:
        self.thread.shutdown()

    # --- on the engine's thread ------------------------------------------------------------------------------

    @torch.inference_mode()
    def _advance(self) -> list[tuple[asyncio.Future[Any], Any]]:
        """Work until there is something to tell."""
        told: list[tuple[asyncio.Future[Any], Any]] = []
        while not told and (self.publishing or self.waiting or self.rows):
            told += self._publish()
            told += self._emit(*self._admit())
            told += self._decode()
        return told

    def _publish(self) -> list[tuple[asyncio.Future[Any], Any]]:
        if not self.publishing or (self.publishing[0].mode == "drain" and self.rows):
            return []
        publish = self.publishing.popleft()
        if publish.mode == "restart":
            for request in reversed(list({row.request: None for row in self.rows})):
                request.done.clear()
                self.waiting.appendleft(request)
            self.rows.clear()
        load_weights(self.lm.model, publish.weights)
        self.version = publish.version
        if self.rows:
            self._rebuild()
        dtype = publish.weights.manifest[0].dtype
        return [(publish.answer, fingerprint(self.lm.model, dtype))]

    def _rebuild(self) -> None:
        """The prefixes of all running rows under the new weights. Their newest token has not been through the model."""
        longest = max(row.length for row in self.rows) - 1
        rows = max(1, PREFILL_TOKENS // longest)
        for start in range(0, len(self.rows), rows):
            self._prefill(start, self.tape.ids_SL[start : min(start + rows, len(self.rows)), :longest])

    def _admit(self) -> tuple[int, int, Tensor | None]:
        """Move waiting groups into free slots, prefill them; returns their rows and the logits of their first token."""
        admitted: list[Request] = []
        free = self.count - len(self.rows)
        longest = 0
        while self.waiting and not self.publishing:
            request = self.waiting[0]
            longest = max(longest, len(request.prompt.tokens))
            if request.sampling.group > free or (admitted and longest * (len(admitted) + 1) > PREFILL_TOKENS):
                break
            free -= request.sampling.group
            admitted.append(self.waiting.popleft())
        start = len(self.rows)
        if not admitted:
            return start, start, None
        for request in admitted:
            self._seat(request)
        counts = torch.tensor([request.sampling.group for request in admitted], device=self.lm.device)
        first = torch.cumsum(counts, 0) - counts + start
        width = max(len(request.prompt.tokens) for request in admitted)
        hidden_NQH = self._prefill(start, self.tape.ids_SL[first, :width])
        # one prefill per group lies in the first slots; spread each over its group
        source = torch.arange(len(admitted), device=self.lm.device).repeat_interleave(counts)
        if len(self.rows) - start > len(admitted):
            self.slots.copy(source + start, torch.arange(start, len(self.rows), device=self.lm.device), width)
        last_N = self.tape.prompt_S[first] - 1
        logits_NV = self.lm.head(hidden_NQH[torch.arange(len(admitted)), last_N])
        return start, len(self.rows), logits_NV[source]

    def _seat(self, request: Request) -> None:
        """Write a group's prompt, seeds and limits to the next free rows of the tape."""
        prompt, sampling, tape = request.prompt, request.sampling, self.tape
        q, start = len(prompt.tokens), len(self.rows)
        at = slice(start, start + sampling.group)
        dtype = torch.promote_types(self.lm.head.weight.dtype, torch.float32)
        tape.widen(q + sampling.max_tokens, sampling.max_tokens, sampling.draws, dtype)
        tape.ids_SL[at, :q] = torch.from_numpy(prompt.tokens.astype(np.int64)).to(self.lm.device)
        tape.prompt_S[at], tape.last_S[at], tape.limit_S[at] = q, q - 1, q - 1 + sampling.max_tokens
        seeds = [derive_seed(prompt.seed, index) for index in range(sampling.group)]
        tape.seed_S[at] = torch.tensor(seeds, device=self.lm.device)
        self.rows += [Row(request, index, q) for index in range(sampling.group)]

    def _prefill(self, start: int, ids_NQ: Tensor) -> Tensor:
        positions_NQ = torch.arange(ids_NQ.shape[1], device=ids_NQ.device).expand(ids_NQ.shape)
        return self._forward(start, ids_NQ, positions_NQ, ids_NQ.shape[1])

    def _decode(self) -> list[tuple[asyncio.Future[Any], Any]]:
        n = len(self.rows)
        if n == 0:
            return []
        last_N1 = self.tape.last_S[:n, None]
        ids_N1 = self.tape.ids_SL[:n].gather(1, last_N1)
        hidden_N1H = self._forward(0, ids_N1, last_N1, max(row.length for row in self.rows))
        return self._emit(0, n, self.lm.head(hidden_N1H[:, 0]))

    def _forward(self, start: int, ids_NQ: Tensor, positions_NQ: Tensor, length: int) -> Tensor:
        step = kv.Step(self.slots, start, positions_NQ, length)
        out = self.lm.backbone(input_ids=ids_NQ, position_ids=positions_NQ, use_cache=False, slots_step=step)
        hidden_NQH: Tensor = out.last_hidden_state
        return hidden_NQH

    def _emit(self, start: int, stop: int, logits_NV: Tensor | None) -> list[tuple[asyncio.Future[Any], Any]]:
        """Draw the next token of rows start…stop, write it to the tape, and collect what has ended."""
        if logits_NV is None:
            return []
        tape, rows = self.tape, self.rows[start:stop]
        next_N = tape.last_S[start:stop] + 1
        t_N = next_N - tape.prompt_S[start:stop]
        token_N = torch.empty_like(t_N)
        kinds = {row.request.sampling for row in rows}
        for sampling in kinds:
            pick: slice | Tensor = slice(None)
            if len(kinds) > 1:
                pick = torch.tensor([i for i, row in enumerate(rows) if row.request.sampling == sampling])
            at = torch.arange(start, stop, device=t_N.device)[pick]
            uniform_NM = uniforms(tape.seed_S[at], t_N[pick], sampling.draws)
            ids_NM, logp_NM = draw(process(logits_NV[pick], sampling), uniform_NM)
            tape.action_STM[at, t_N[pick], : sampling.draws] = ids_NM
            tape.logp_STM[at, t_N[pick], : sampling.draws] = logp_NM
            token_N[pick] = ids_NM[:, 0]
        at = torch.arange(start, stop, device=t_N.device)
        tape.version_ST[at, t_N] = self.version
        tape.ids_SL[at, next_N] = token_N
        tape.last_S[start:stop] = next_N
        for row in rows:
            row.length += 1
        stopped_N = torch.isin(token_N, self.stop_ids)
        ended = (stopped_N | (next_N >= tape.limit_S[start:stop])).nonzero()[:, 0].tolist()
        return self._end([start + i for i in ended], stopped_N.tolist() if ended else [], start)

    def _end(self, ended: list[int], stopped: list[bool], start: int) -> list[tuple[asyncio.Future[Any], Any]]:
        """Read finished rows off the tape, move the last rows into the holes, and tell of groups that are complete."""
        told: list[tuple[asyncio.Future[Any], Any]] = []
        for slot in ended:
            row = self.rows[slot]
            request = row.request
            request.done[row.index] = self._read(slot, row, "eos" if stopped[slot - start] else "length")
            if len(request.done) == request.sampling.group:
                rollouts = [request.done[index] for index in range(request.sampling.group)]
                told.append((request.answer, [Handle(header_of(rollout), rollout) for rollout in rollouts]))
        if ended:
            gone, left = set(ended), len(self.rows) - len(ended)
            holes = [slot for slot in ended if slot < left]
            tails = [slot for slot in range(left, len(self.rows)) if slot not in gone]
            if holes:
                source, target = (torch.tensor(slots, device=self.lm.device) for slots in (tails, holes))
                self.tape.move(source, target)
                self.slots.copy(source, target, max(self.rows[slot].length for slot in tails))
                for hole, tail in zip(holes, tails, strict=True):
                    self.rows[hole] = self.rows[tail]
            del self.rows[left:]
        return told

    def _read(self, slot: int, row: Row, finish: Finish) -> Rollout:
        q, m = len(row.request.prompt.tokens), row.request.sampling.draws
        n = row.length - q
        actions = self.tape.action_STM[slot, :n, :m].cpu().numpy().astype(np.int32)
        action_logp = self.tape.logp_STM[slot, :n, :m].cpu().numpy().copy()
        return Rollout(
            prompt=row.request.prompt,
            index=row.index,
            tokens=actions[:, 0],
            versions=self.tape.version_ST[slot, :n].cpu().numpy().astype(np.int32),
            logp=action_logp[:, 0],
            actions=actions,
            action_logp=action_logp,
            finish=finish,
            loss_mask=np.ones(n, np.bool_),
        )
