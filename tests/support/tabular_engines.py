"""Engines for a tabular model whose distributions are all known: the next token depends only on the last token.

Tests of the pipeline and studies of estimators use these engines, which share the records, protocols and estimators of
the real engines. A row of the table holds the logits after one token. Durations pass on the event loop's clock.

Shapes: V vocabulary, N trained tokens, M draws (tokens sampled at the same position, the emitted token first).
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.config.freshness import FreshnessConfig
from slipstream.engines.checksums import checksum
from slipstream.engines.draws import draw, kept_ids, process, uniforms
from slipstream.engines.record_files import as_numbers, quote, read_groups, write_groups
from slipstream.engines.score_checks import Probed, scored
from slipstream.engines.weights import combined, view_of
from slipstream.errors import NonFiniteError
from slipstream.estimators.drift import rollout_kl_from_cache
from slipstream.estimators.logprobs.sampling_support import conditioned
from slipstream.estimators.surrogate import mc_reverse_kl
from slipstream.objective.columns import present, support_of
from slipstream.objective.constants import unrejected
from slipstream.objective.sample_weights import FreshnessWeights, SampleWeight, drifted
from slipstream.protocols import (
    Fingerprint,
    Follower,
    Loaded,
    Metrics,
    Mode,
    Quote,
    SampleFreshness,
    Sampling,
    TensorSpec,
    WeightsRef,
)
from slipstream.records import (
    ONE_COUNT,
    Batch,
    Counts,
    Finish,
    Group,
    Handle,
    Ints,
    Prompt,
    Rollout,
    Scored,
    counts_of,
    derive_seed,
    graded,
    handed_over,
    header_of,
    one_turn,
    support_from_ids,
)
from slipstream.simulation.timed_engines import Cost

EOS = 0


def random_table(vocab: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab, vocab, generator=generator, dtype=torch.float64) * scale


def fingerprint(table_VV: Tensor) -> Fingerprint:
    return combined([checksum(table_VV.detach())])


def table_of(weights: WeightsRef) -> Tensor:
    return view_of(weights.manifest[0], torch.from_numpy(weights.body.copy()))


def previous(rollout: Rollout) -> Tensor:
    """Return the token before each trained token."""
    before = np.concatenate([rollout.prompt.tokens[-1:], rollout.tokens[:-1]])
    return torch.from_numpy(before[rollout.loss_mask].astype(np.int64))


@dataclass
class Response:
    place: int
    last: int
    actions: list[NDArray[np.int32]] = field(default_factory=list)
    logps: list[NDArray[np.float64]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[Ints] = field(default_factory=list)
    """Sampling support of each token; empty unless `Sampling.keep_mask` is set."""
    uniform_TM: Tensor | None = None
    """Uniform numbers of all draws that the response can have; computed with its first token."""


def continued_response(place: int, begun: Rollout) -> Response:
    kept = begun.kept.rows() if begun.kept is not None else []
    rows = list(begun.actions), list(begun.action_logp), begun.versions.tolist()
    return Response(place, int(begun.tokens[-1]), *rows, kept)


@dataclass(eq=False)
class OpenGroup:
    prompt: Prompt
    rows: list[Response]
    released: bool = False


class ToySampler:
    """Sampler that yields to the event loop after each token, so a publish takes effect at any token boundary."""

    def __init__(self, table_VV: Tensor, *, seconds: float = 0.0) -> None:
        """Create a sampler whose responses each get one token every `seconds`."""
        self.table, self.seconds, self.version = table_VV.clone(), seconds, 0
        self.waiting: set[OpenGroup] = set()
        self.running: set[OpenGroup] = set()
        self.draining = 0
        self.changed = asyncio.Condition()

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        known = {handle.body.index - prompt.first: handle.body for handle in begun}
        rows = [
            continued_response(place, known[place]) if place in known else Response(place, int(prompt.tokens[-1]))
            for place in range(sampling.group)
        ]
        group = OpenGroup(prompt, rows)
        self.waiting.add(group)
        try:
            async with self.changed:
                await self.changed.wait_for(lambda: group.released or not self.draining)
            self.waiting.discard(group)
            self.running.add(group)
            while not (group.released or all(ended(row, sampling) for row in group.rows)):
                await asyncio.sleep(self.seconds)
                for row in group.rows:
                    if not ended(row, sampling):
                        self._write(row, prompt, sampling)
        finally:
            self.waiting.discard(group)
            self.running.discard(group)
            async with self.changed:
                self.changed.notify_all()
        rollouts = [self._read(row, prompt, sampling) for row in group.rows if row.actions]
        if not all(ended(row, sampling) for row in group.rows):
            return handed_over(rollouts)
        return [Handle(header_of(rollout), rollout) for rollout in rollouts]

    async def release(self, numbers: Collection[int] = ()) -> None:
        leaving = {g for g in self.waiting | self.running if not numbers or g.prompt.number in numbers}
        for group in leaving:
            group.released = True
        async with self.changed:
            self.changed.notify_all()
            await self.changed.wait_for(lambda: not leaving & (self.waiting | self.running))

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        clock, thrown = asyncio.get_running_loop().time, 0
        began = clock()
        if mode == "drain":
            self.draining += 1
            async with self.changed:
                await self.changed.wait_for(lambda: not self.running)
                self.draining -= 1
                self.changed.notify_all()
        elif mode == "restart":
            for group in self.waiting | self.running:
                thrown += sum(len(row.versions) for row in group.rows)
                group.rows = [Response(row.place, int(group.prompt.tokens[-1])) for row in group.rows]
        self.table, self.version = table_of(weights), weights.version
        return Loaded(fingerprint(self.table), wait=clock() - began, thrown=thrown)

    def _write(self, row: Response, prompt: Prompt, sampling: Sampling) -> None:
        if row.uniform_TM is None:
            seed = derive_seed(prompt.seed, prompt.first + row.place)
            position_T = prompt.offset + torch.arange(sampling.max_tokens)
            row.uniform_TM = uniforms(torch.full_like(position_T, seed), position_T, sampling.draws)
        logp_NV = process(self.table[row.last][None], sampling)
        ids_NM, logp_NM = draw(logp_NV, row.uniform_TM[len(row.actions), None])
        if sampling.keep_mask:
            row.kept += kept_ids(logp_NV)
        row.actions.append(ids_NM[0].numpy().astype(np.int32))
        row.logps.append(logp_NM[0].numpy())
        row.versions.append(self.version)
        row.last = int(ids_NM[0, 0])

    def _read(self, row: Response, prompt: Prompt, sampling: Sampling) -> Rollout:
        finish: Finish = "eos" if row.last == EOS else "length"
        return one_turn(
            prompt,
            prompt.first + row.place,
            actions=np.stack(row.actions),
            action_logp=np.stack(row.logps),
            versions=np.array(row.versions, np.int32),
            finish=finish if ended(row, sampling) else "released",
            kept=support_from_ids(row.kept) if row.kept else None,
        )


def ended(row: Response, sampling: Sampling) -> bool:
    return len(row.actions) == sampling.max_tokens or (row.last == EOS and len(row.actions) > 0)


class ToyScorer(Probed):
    def __init__(self, table_VV: Tensor, *, cost: Cost = lambda _: 0.0) -> None:
        self.table, self.cost, self.version = table_VV.clone(), cost, 0
        self.kept = {0: self.table}

    async def score(self, group: Group) -> list[Handle]:
        await asyncio.sleep(self.cost(sum(handle.header.tokens for handle in group)))
        return [self._mark(handle) for handle in group]

    async def publish(self, weights: WeightsRef) -> Loaded:
        self.table, self.version = table_of(weights), weights.version
        self.kept[self.version] = self.table
        return Loaded(fingerprint(self.table))

    async def relabel(self, group: Group) -> list[Handle]:
        await asyncio.sleep(self.cost(sum(handle.header.tokens for handle in group)))
        return [self._mark(handle, supervision_kl=self._moved(handle.body)) for handle in group]

    def _moved(self, old: Scored) -> NDArray[np.float64]:
        state_N, then = previous(old.rollout), self.kept.get(old.teacher_version)
        if then is None:
            return np.full(len(state_N), np.nan)
        now_NV, then_NV = (table.log_softmax(-1)[state_N] for table in (self.table, then))
        return (now_NV.exp() * (now_NV - then_NV)).sum(-1).numpy()

    def _mark(self, handle: Handle, **more: Any) -> Handle:
        rollout = graded(handle)
        actions_NM = torch.from_numpy(rollout.actions.astype(np.int64))
        logq_NM = self.table.log_softmax(-1)[previous(rollout)].gather(1, actions_NM).numpy()
        return scored(
            handle, teacher="toy", version=self.version, teacher_logp=logq_NM[:, 0], teacher_action_logp=logq_NM, **more
        )


class ToyLearner:
    """Learner with plain gradient descent on Monte-Carlo reverse KL."""

    def __init__(
        self,
        table_VV: Tensor,
        *,
        lr: float = 1.0,
        cost: Cost = lambda _: 0.0,
        follow: Mapping[str, Follower] | None = None,
        freshness: FreshnessConfig | None = None,
    ) -> None:
        self.table, self.lr, self.cost = table_VV.clone().requires_grad_(), lr, cost
        self.judge = FreshnessWeights(freshness) if freshness is not None else None
        self.loss = 0.0
        """Sum of the losses since the last step."""
        self.update = self.made = 0
        """The current update, and the last update that completed its step."""
        self.samples: dict[tuple[int, int], Scored] = {}
        """Samples of the current update, by group number and index."""
        self.weighed: list[tuple[int, int]] = []
        """Keys in `samples` of the samples that were accumulated with freshness weights since the last step."""
        self.follow = follow or {}
        self.teachers = {name: (0, table_VV.clone()) for name in self.follow}
        """Teachers that follow the student: the update of their last move, and their table."""
        self.earlier: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in self.follow}
        """Earlier versions of these teachers, oldest first; at most `Follower.keep`."""
        self.unsent: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in self.follow}
        """Earlier versions that `restore` has read and `export` has not returned yet."""

    async def prepare(self, batch: Batch) -> list[Counts]:
        if batch.update != self.update:
            self.update, self.samples = batch.update, {}
            if self.judge is not None:
                self.judge.begin()
        self.samples |= {(handle.header.number, handle.header.index): handle.body for handle in batch.handles}
        if self.judge is not None:
            samples = [handle.body for handle in batch.handles]
            self.judge.take(samples, [unrejected(sample) for sample in samples])
        return [counts_of(group) for group in batch.groups]

    async def accumulate(self, batch: Batch, counts: Counts) -> list[SampleFreshness]:
        await asyncio.sleep(self.cost(sum(header.tokens for header in batch.headers)))
        samples = [self.samples[header.number, header.index] for header in batch.headers]
        behavior_NM, logq_NM = (
            torch.from_numpy(np.concatenate(arrays))
            for arrays in zip(*((s.rollout.action_logp, s.teacher_action_logp) for s in samples), strict=True)
        )
        logp_NM = self._logp(samples)
        loss_N, _ = mc_reverse_kl(logp_NM, behavior_NM, logq_NM)
        judged = list[SampleWeight]()
        if self.judge is None:
            loss = loss_N.sum() / max(counts.n_tokens, 1)
        else:
            judged = self._judged(self.judge, samples, logp_NM)
            weight_N, anchor_N = (torch.cat(x) for x in zip(*((j.distill_N, j.anchor_N) for j in judged), strict=True))
            weighted_N = loss_N * weight_N + rollout_kl_from_cache(logp_NM, behavior_NM) * anchor_N
            loss = weighted_N.sum() / max(self._units(counts), 1)
            self.weighed += [(header.number, header.index) for header in batch.headers]
        if not loss.isfinite():
            raise NonFiniteError(f"the loss is {loss.item()}")
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss += loss.item()
        return [each.weighed for each in judged]

    def _logp(self, samples: Sequence[Scored]) -> Tensor:
        """Return the student's log-probs of all draws, [N, M]."""
        logp_NV = self.table.log_softmax(-1)[torch.cat([previous(sample.rollout) for sample in samples])]
        actions_NM = torch.from_numpy(np.concatenate([sample.rollout.actions for sample in samples]).astype(np.int64))
        logp_NM = logp_NV.gather(1, actions_NM)
        if (support := support_of([sample.rollout for sample in samples], logp_NV.device)) is not None:
            support_NK = support[0 : len(logp_NV)]
            logp_NM = conditioned(logp_NM, logp_NV.gather(1, support_NK.clamp(min=0)), support_NK)
        return logp_NM

    def _judged(self, judge: FreshnessWeights, samples: Sequence[Scored], logp_NM: Tensor) -> list[SampleWeight]:
        frozen = [unrejected(sample) for sample in samples]
        parts = torch.split(logp_NM.detach(), [sample.rollout.trained_tokens for sample in samples])
        return judge.of(samples, frozen, version=self.update - 1, draws=lambda: parts)

    def _units(self, counts: Counts) -> int:
        over_samples = self.judge is not None and self.judge.freshness.normalise_by == "samples"
        return counts.n_sequences if over_samples else counts.n_tokens

    async def step(self, counts: Counts = ONE_COUNT, lr: float = 1.0) -> Metrics:
        assert self.table.grad is not None
        scale, loss, self.loss = 1 / max(self._units(counts), 1), self.loss, 0.0
        if self.judge is not None:
            scale /= self.judge.divisor([self.judge.totals(self.weighed)])
            self.weighed = []
        self.made = self.update
        with torch.no_grad():
            self.table -= lr * self.lr * scale * self.table.grad
        norm = self.table.grad.norm().item() * scale
        self.table.grad = None
        return {"loss": loss * scale, "grad_norm": norm, "lr": lr * self.lr}

    async def quote(self, batch: Batch) -> list[Quote]:
        return [quote(h, self.samples[h.number, h.index], self.update, as_numbers) for h in batch.headers]

    async def weigh(self, batch: Batch) -> list[SampleFreshness]:
        samples = [handle.body for handle in batch.handles]
        parts = torch.split(self._logp(samples).detach(), [sample.rollout.trained_tokens for sample in samples])
        drift = [drifted(sample, logp_NM) for sample, logp_NM in zip(samples, parts, strict=True)]
        return present(self.judge).weigh(samples, drift, version=self.made)

    async def compare(self, batch: Batch, teacher: str = "") -> Metrics:
        rollouts = [graded(handle) for handle in batch.handles]
        logp_VV = (self.teachers[teacher][1] if teacher else self.table.detach()).log_softmax(-1)
        gaps = [
            logp_VV[previous(r)].gather(1, torch.from_numpy(r.actions[:, :1]).long())[:, 0]
            - torch.from_numpy(handle.body.teacher_logp if teacher else r.action_logp[:, 0])
            for r, handle in zip(rollouts, batch.handles, strict=True)
        ]
        gap_N = torch.cat(gaps)
        if teacher:
            return {f"teacher/{teacher}/difference_max": gap_N.abs().max().item()}
        k3, ratio = (torch.expm1(gap_N) - gap_N).mean().item(), (-gap_N.mean()).exp().item()
        return {"drift/kl": -gap_N.mean().item(), "drift/k3_kl": k3, "drift/ppl_ratio": ratio}

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        version, table = self._moved(teacher) if teacher else (self.made, self.table.detach())
        body = table.numpy().copy().view(np.uint8).reshape(-1)
        spec = TensorSpec("table", "float64", tuple(table.shape), 0, body.nbytes)
        return WeightsRef((spec,), body, version), fingerprint(table)

    def _moved(self, teacher: str) -> tuple[int, Tensor]:
        (version, table), how = self.teachers[teacher], self.follow[teacher]
        if self.made > version and self.made % how.every == 0:
            self.earlier[teacher] = [*self.earlier[teacher], (version, table)][-how.keep :] if how.keep else []
            self.teachers[teacher] = self.made, table.lerp(self.table.detach(), 1 - how.decay)
        return self.unsent[teacher].pop(0) if self.unsent[teacher] else self.teachers[teacher]

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        np.save(path / "table.npy", self.table.detach().numpy())
        (path / "update").write_text(str(self.made))
        for name, newest in self.teachers.items():
            numbers, tables = zip(*self.earlier[name], newest, strict=True)
            np.savez(path / f"teacher-{name}.npz", versions=numbers, tables=torch.stack(tables).numpy())
        write_groups(path, groups)

    async def restore(self, path: Path) -> Sequence[Group]:
        self.table = torch.from_numpy(np.load(path / "table.npy")).requires_grad_()
        self.made = int((path / "update").read_text())
        for name in self.teachers:
            saved = np.load(path / f"teacher-{name}.npz")
            versions = list(zip(saved["versions"].tolist(), torch.from_numpy(saved["tables"]), strict=True))
            self.earlier[name], self.teachers[name] = versions[:-1], versions[-1]
            self.unsent[name] = list(self.earlier[name])
        return read_groups(path)


class ToyGrader:
    async def grade(self, group: Group) -> list[Handle]:
        return [Handle(replace(h.header, rewards={"ended": float(h.header.finish == "eos")}), h.body) for h in group]
