"""Rollouts from any Hugging Face causal LM, with continuous batching over slots (rows of the KV cache).

A request is a group of responses. It waits until `group` slots are free, and ends when its last response ends. Requests
admitted together with the same prompt share one prefill. Running rows use slots 0..n−1; when rows end, other rows move
into the free slots. A sequence that may continue is kept in a later slot until that slot is needed or weights change.

One thread owns all state. The event loop only appends to `waiting` and `publishing`, sets flags and cancels futures;
the thread reads these between two tokens. So weights change and requests end exactly at a token boundary. Guarantor of
invariant 3: every token has the version of the weights that drew it.

Shapes: N rows of a step, M draws, V vocabulary; tape.py lists the shapes of the tape (the record of all slots).
"""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.engines.draws import kept_ids
from slipstream.engines.native.config import ADMISSION_SHARE
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.resources import Offloading, compute_thread
from slipstream.engines.native.routers import experts_of_record, routers_of, with_experts
from slipstream.engines.native.sampling.admission import Move, PrefixCache, admit, prefix_reads
from slipstream.engines.native.sampling.decoding import PASS_TOKENS, Decoder, Read, compacted, prove
from slipstream.engines.native.sampling.kv import Slots
from slipstream.engines.native.sampling.requests import (
    Draft,
    Drafting,
    FutureResult,
    Lineage,
    Publish,
    Request,
    Row,
    emitted_draws,
    new_row,
)
from slipstream.engines.native.sampling.tape import Tape
from slipstream.engines.request_sampler import check_length
from slipstream.engines.settings import SamplerSettings
from slipstream.engines.weights import fingerprint_of_loaded, load_weights
from slipstream.estimators.products import forget_packed, pack_layers
from slipstream.protocols import Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Finish, Group, Handle, Ints, Prompt, Rollout


class NativeSampler(Offloading):
    def __init__(
        self, lm: LanguageModel, plan: SamplerSettings, *, stop_ids: set[int], teacher: LanguageModel | None = None
    ) -> None:
        """Prepare a model; `teacher`, with its own cache, takes part in draws if `Sampling` says so."""
        self.routers = routers_of(lm, field="learner.router") if plan.router else None
        for each in (lm,) if teacher is None else (lm, teacher):
            pack_layers(each.model)
            prove(each)
        self.teacher = None if teacher is None else Decoder(teacher, plan.slots)
        self.drafting = None if plan.speculation is None else Drafting(plan.speculation)
        self.rebuilds = plan.on_publish == "rebuild"
        self.lm, self.count, self.version = lm, plan.slots, 0
        self.stop_ids = stop_ids
        dtype = torch.promote_types(lm.head.weight.dtype, torch.float32)
        self.decoder, self.prefixes = Decoder(lm, self.count, self.routers), PrefixCache(self.count)
        self.tape = Tape(self.count, lm.device, dtype)
        self.rows: list[Row] = []
        self.waiting: deque[Request] = deque()
        self.publishing: deque[Publish] = deque()
        self.releasing = False
        self.open: set[Request | Publish] = set()
        self.thread = compute_thread("sampler", plan.threads)
        self.driver: asyncio.Task[None] | None = None

    # --- on the event loop -----------------------------------------------------------------------------------

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if sampling.group > self.count:
            raise ValueError(f"a group of {sampling.group} does not fit into {self.count} slots")
        check_length(prompt, sampling, self.lm.max_length)
        if (sampling.teacher_replaces or sampling.fusion) and self.teacher is None:
            raise ValueError("Sampling.teacher_replaces and fusion need a sampler with a teacher")
        parts = {handle.body.index: handle.body for handle in begun}
        request = Request(prompt, sampling, parts, answer=asyncio.get_running_loop().create_future())
        if not request.left:
            return request.handles()
        async with self.turn():
            self.waiting.append(request)
            await self._answered(request)
        return request.answer.result()

    async def release(self, numbers: Collection[int] = ()) -> None:
        requests = [item for item in self.open if isinstance(item, Request)]
        leaving = [request for request in requests if not numbers or request.prompt.number in numbers]
        for request in leaving:
            request.released = True
        self.releasing = True
        if leaving:
            await asyncio.wait([request.answer for request in leaving])

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        answer: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        async with self.turn():
            publish = Publish(weights, mode, answer, time.perf_counter())
            self.publishing.append(publish)
            await self._answered(publish)
        return answer.result()

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
        while self.busy:
            try:
                await asyncio.get_running_loop().run_in_executor(self.thread, self._work)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        for item in self.open:
            if not item.answer.done():
                item.answer.set_exception(error)
        self.rows, self.waiting, self.publishing = [], deque(), deque()
        self.prefixes.clear()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows or self.publishing)

    @property
    def decoders(self) -> list[Decoder]:
        return [self.decoder] if self.teacher is None else [self.decoder, self.teacher]

    def close(self) -> None:
        self.thread.shutdown()

    async def offload(self) -> None:
        while self.driver is not None and not self.driver.done():  # a cancelled request still ends
            await asyncio.wait([self.driver])
        await super().offload()

    # --- on the engine's thread ------------------------------------------------------------------------------

    def on_device(self) -> Iterable[Tensor]:
        self.prefixes.clear()
        self.tape = Tape(self.count, self.lm.device, self.tape.dtype)
        for decoder in self.decoders:
            decoder.slots = Slots(self.count, decoder.lm.model.config)
            forget_packed(decoder.lm.model)
        return chain.from_iterable(decoder.lm.model.parameters() for decoder in self.decoders)

    def _work(self) -> None:
        while self.busy:
            for answer, result in self._step():
                with suppress(RuntimeError):  # the caller's event loop is closed
                    answer.get_loop().call_soon_threadsafe(settle, answer, result)

    @torch.inference_mode()
    def _step(self) -> list[FutureResult]:
        self._vacate([slot for slot, row in enumerate(self.rows) if row.request.aborted])
        return self._release() or self._publish() or self._draw()

    def _release(self) -> list[FutureResult]:
        """Remove released requests, running or waiting; return their groups with the tokens drawn so far."""
        if not self.releasing:
            return []
        self.releasing = False
        self.prefixes.clear()  # released groups continue in another sampler or under other weights
        running = {row.request: None for row in self.rows}
        leaving = [request for request in [*running, *list(self.waiting)] if request.released]
        slots = [slot for slot, row in enumerate(self.rows) if row.request.released]
        for row, rollout in self._read(dict.fromkeys(slots, "released")):
            row.request.parts[row.index] = rollout
        self._vacate(slots)
        for request in leaving:
            if request not in running:
                self.waiting.remove(request)
        return [(request.answer, request.handles()) for request in leaving]

    def _publish(self) -> list[FutureResult]:
        """Load all published weights in order; stop at one with mode "drain" while rows are running."""
        results: list[FutureResult] = []
        while self.publishing and not (self.publishing[0].mode == "drain" and self.rows):
            publish = self.publishing.popleft()
            if not publish.answer.cancelled():
                results.append((publish.answer, self._load(publish)))
        return results

    def _load(self, publish: Publish) -> Loaded:
        start = time.perf_counter()
        thrown = self._restart() if publish.mode == "restart" else 0
        if self.rebuilds or publish.mode != "keep":
            self.prefixes.clear()
        load_weights(self.lm.model, publish.weights)
        self.version = publish.weights.version
        checksum = fingerprint_of_loaded(self.lm.model, publish.weights)
        loaded = time.perf_counter()
        if self.rows and self.rebuilds:
            self._read_again(range(len(self.rows)), self.decoder)
        rebuilt = time.perf_counter()
        drafted, accepted = (0, 0) if self.drafting is None else self.drafting.acceptance.take()
        return Loaded(
            checksum,
            wait=start - publish.called,
            load=loaded - start,
            rebuild=rebuilt - loaded,
            thrown=thrown,
            drafted=drafted,
            accepted=accepted,
        )

    def _restart(self) -> int:
        """Move running requests to the head of the queue; drop all drawn tokens and return their number."""
        thrown = sum(row.tokens for row in self.rows)
        self.waiting.extendleft(reversed(dict.fromkeys(row.request for row in self.rows)))
        self.rows.clear()
        return thrown + sum(request.restart() for request in list(self.waiting))

    def _read_again(self, slots: Sequence[int], decoder: Decoder) -> None:
        """Recompute a decoder's cache of the rows in these slots with its current weights."""
        reads = prefix_reads({slot: self.rows[slot] for slot in slots}, recurrent=decoder.slots.recurrent)
        if not reads:
            return
        decoder.fill(self.tape.ids_SL, reads)
        if self.lm.device.type == "cuda":
            torch.cuda.synchronize(self.lm.device)  # else `_load` would measure only part of the rebuild

    def _admit(self) -> list[Read]:
        """Give slots to waiting groups if enough slots are free; return the reads (prompt prefills) of the new rows."""
        free = self.count - len(self.rows)
        if not self.waiting or free < self.count // ADMISSION_SHARE:
            return []
        admitted = admit(self.waiting, self.publishing, self.prefixes, free=free, room=PASS_TOKENS)
        stop = len(self.rows) + admitted.rows
        self._copy(self.prefixes.make_room(stop, admitted.places(stop)))
        resumed = [slot for request in admitted.requests for slot in self._resume(request)]
        for decoder in self.decoders:
            self._read_again(resumed, decoder)
        reads = list[Read]()
        for same in admitted.fresh:
            slots = [slot for request, members in same for slot in self._seat(request, members)]
            reads.append(Read(slots, 0, len(same[0][0].prompt.tokens)))
        for request, known in admitted.resumed:
            reads.append(Read(self._seat(request, request.left), known, len(request.prompt.tokens)))
        return reads

    def _seat(self, request: Request, members: Sequence[int]) -> Sequence[int]:
        """Add rows for members (responses) of a request in the first free slots; return these slots."""
        start = len(self.rows)
        self.tape.seat(start, request, members)
        lookup = None if self.drafting is None else self.drafting.lookup
        self.rows += [new_row(request, index, lookup) for index in members]
        return range(start, len(self.rows))

    def _resume(self, request: Request) -> Sequence[int]:
        """Add rows for responses that an earlier call began, with their tokens; return the slots of these rows."""
        begun = {index: request.parts.pop(index) for index in request.left if index in request.parts}
        slots = self._seat(request, list(begun)) if begun else ()
        for slot, rollout in zip(slots, begun.values(), strict=True):
            self.tape.write(slot, rollout)
            self.rows[slot].length += len(rollout.tokens)
            if (lookup := self.rows[slot].lookup) is not None:
                lookup.extend(rollout.tokens.tolist())
            self.rows[slot].kept = list(rollout.kept.rows()) if rollout.kept is not None else []
            if self.routers is not None and (known_TRX := experts_of_record(rollout)) is not None:
                at = torch.arange(len(known_TRX), device=self.lm.device)  # its cache is recomputed without recording
                chosen_TRX = torch.from_numpy(known_TRX).to(at.device)
                self.decoder.slots.record(torch.full_like(at, slot), at, chosen_TRX, len(at))
        return slots

    def _draw(self) -> list[FutureResult]:
        """Admit requests, then draw one token for each running and new row; return the callers' results."""
        reads = self._admit()
        if not self.rows:
            return []
        at = [row.length - 1 for row in self.rows[: len(self.rows) - sum(len(read.slots) for read in reads)]]
        drafts = [] if self.drafting is None else self.drafting.propose(self.rows[: len(at)])
        if drafts:
            slot_D, at_D = self._places(drafts)
            proposed = [token for draft in drafts for token in draft.tokens]
            self.tape.ids_SL[slot_D, at_D] = torch.tensor(proposed, device=self.lm.device)
        reads += [Read((draft.slot,), draft.first, draft.first + len(draft.tokens), every=True) for draft in drafts]
        logits_TV = self._logits(self.decoder, at, reads)
        teacher_TV = None
        # rows that no teacher watches, such as those of an evaluation, need no place in its cache
        watched = any(row.request.sampling.teacher_replaces or row.request.sampling.fusion for row in self.rows)
        if self.teacher is not None and (watched or self.teacher.slots.recurrent):
            teacher_TV = self._logits(self.teacher, at, reads)[:, : logits_TV.shape[-1]]  # only ids of the student
        return self._emit(logits_TV, teacher_TV, drafts)

    def _places(self, drafts: Sequence[Draft]) -> Tensor:
        """Return slots and positions of all proposed tokens."""
        places = [(draft.slot, draft.first + i) for draft in drafts for i in range(len(draft.tokens))]
        return torch.tensor(places, device=self.lm.device).T

    def _logits(self, decoder: Decoder, at: Sequence[int], reads: Sequence[Read]) -> Tensor:
        """Return a model's logits after the newest token of every row, and then those after every proposed token."""
        logits_TV = decoder.lm.head(decoder.step(self.tape.ids_SL, at, reads))
        if any(len(read.slots) > 1 for read in reads):  # members of a group share the logits of their first token
            counts = [1] * len(at)
            for read in reads:
                counts += [1] * read.count if read.every else [len(read.slots)]
            logits_TV = logits_TV.repeat_interleave(torch.tensor(counts, device=logits_TV.device), 0)
        return logits_TV

    def _emit(
        self, logits_TV: Tensor, teacher_TV: Tensor | None = None, drafts: Sequence[Draft] = ()
    ) -> list[FutureResult]:
        """Draw tokens from their logits and record those that are emitted; return the results of complete groups."""
        tape, rows, n = self.tape, self.rows, len(self.rows)
        row_T, next_T = torch.arange(n, device=self.lm.device), tape.last_S[:n] + 1
        drawing = rows
        if drafts:
            slot_D, at_D = self._places(drafts)
            row_T, next_T = torch.cat([row_T, slot_D]), torch.cat([next_T, at_D + 1])
            drawing = [*rows, *[rows[draft.slot] for draft in drafts for _ in draft.tokens]]
        t_T = next_T - tape.prompt_S[row_T]
        token_T = torch.empty_like(t_T)
        support = dict[int, Ints]()
        options = [row.request.draws for row in drawing]
        distinct = set(options) if options.count(options[0]) < len(options) else options[:1]
        for sampling in distinct:
            chosen: Sequence[int] = range(len(options))
            pick: slice | Tensor = slice(None)
            if len(distinct) > 1:
                chosen = [i for i, other in enumerate(options) if other == sampling]
                pick = torch.tensor(chosen)
            teacher_NV = None if teacher_TV is None else teacher_TV[pick]
            token_T[pick], logp_NV = tape.draw(sampling, row_T[pick], t_T[pick], logits_TV[pick], teacher_NV)
            if sampling.keep_mask:
                support |= zip(chosen, kept_ids(logp_NV), strict=True)
        tape.columns["versions"][row_T, t_T] = self.version
        tape.ids_SL[row_T, next_T] = token_T
        tokens = token_T.tolist()
        emitted = emitted_draws(tokens, n, drafts, self.stop_ids)
        for row, draws in zip(rows, emitted, strict=True):
            row.length += len(draws)
            row.kept += [support[i] for i in draws if i in support]
            if row.lookup is not None:
                row.lookup.extend(tokens[i] for i in draws)
        if self.drafting is not None:
            self.drafting.acceptance.add(len(tokens) - n, sum(map(len, emitted)) - n)
        last = [draws[-1] for draws in emitted]
        tape.last_S[:n] = next_T[torch.tensor(last, device=self.lm.device)] if drafts else next_T
        stopped = [tokens[i] in self.stop_ids for i in last]
        full = [row.tokens >= row.request.sampling.max_tokens for row in rows]
        ended = [slot for slot in range(n) if stopped[slot] or full[slot]]
        return self._end(ended, stopped) if ended else []

    def _end(self, ended: list[int], stopped: list[bool]) -> list[FutureResult]:
        """Remove ended rows, keep the sequences that may continue, and return the results of complete groups."""
        results, leaving = list[FutureResult](), dict[int, tuple[Lineage, Ints]]()
        finished = self._read({slot: "eos" if stopped[slot] else "length" for slot in ended})
        for slot, (row, rollout) in zip(ended, finished, strict=True):
            row.request.parts[row.index] = rollout
            if row.request.sampling.park and not self.decoder.slots.recurrent:
                leaving[slot] = row.lineage, np.concatenate([rollout.prompt.tokens, rollout.tokens[:-1]])
            if not row.request.left:
                results.append((row.request.answer, row.request.handles()))
        self._vacate(ended, leaving)
        return results

    def _read(self, finishes: Mapping[int, Finish]) -> list[tuple[Row, Rollout]]:
        rows = [self.rows[slot] for slot in finishes]
        rollouts = self.tape.read(finishes, rows)
        if self.routers is not None and (recorded := self.decoder.slots.router_SLRX) is not None:
            for i, (slot, row) in enumerate(zip(finishes, rows, strict=True)):
                if row.request.sampling.router:
                    rollouts[i] = with_experts(rollouts[i], recorded[slot, : row.length - 1], self.routers.experts)
        return list(zip(rows, rollouts, strict=True))

    def _vacate(self, ended: list[int], leaving: Mapping[int, tuple[Lineage, Ints]] | None = None) -> None:
        """Remove the rows in slots `ended`, move other rows into the free slots, and keep the sequences `leaving`."""
        if not ended:
            return
        order = compacted(ended, [row.length for row in self.rows])
        moves = [Move(slot, at, self.rows[slot].length) for at, slot in enumerate(order) if slot != at]
        if moves:
            self.tape.move(*self._pairs(moves))
        self._copy([*moves, *self.prefixes.store(leaving or {}, len(order))])
        self.rows = [self.rows[slot] for slot in order]

    def _copy(self, moves: Sequence[Move]) -> None:
        """Copy cached sequences between slots; all sources are read before any slot is written."""
        for decoder in self.decoders if moves else ():
            decoder.slots.copy(*self._pairs(moves), length=max(move.length for move in moves))

    def _pairs(self, moves: Sequence[Move]) -> Tensor:
        return torch.tensor([(move.source, move.target) for move in moves], device=self.lm.device).T


def settle(answer: asyncio.Future[Any], result: Any) -> None:
    if not answer.done():
        answer.set_result(result)
