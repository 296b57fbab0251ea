"""The learner, which trains the student: passes over packed rows, fused head and losses, backward, clipping, AdamW.

Losses are sums divided by the counts given to `accumulate` or `step`: micro-batches, rows and ranks change nothing.
`prepare` stores a batch and computes everything that must be fixed before its first gradient, such as advantages.
`accumulate` adds gradients for groups of this batch. The batch is dropped when the next update begins.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.config.schema import LearnerConfig
from slipstream.engines.native.learning.evidence import Distances, FirstPasses
from slipstream.engines.native.learning.gradient_cosine import Key, cosine, halves, project, store_gradient
from slipstream.engines.native.learning.gradient_noise import Noise
from slipstream.engines.native.learning.loss_scale import LossScale
from slipstream.engines.native.learning.optimizer import make_optimizer, park, squared_step, step_from_host
from slipstream.engines.native.learning.passes import Passes, at_draws, zero_loss
from slipstream.engines.native.learning.perturbation import Perturbation
from slipstream.engines.native.learning.routing import PAIRS
from slipstream.engines.native.learning.snapshots import OLD, REFERENCE
from slipstream.engines.native.learning.storage import State, restore, save
from slipstream.engines.native.lora import called_layers
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.ranks import Ranks
from slipstream.engines.native.rows import Rows, by_sample, over_tokens
from slipstream.engines.native.scorer import with_prompt
from slipstream.engines.native.threads import compute_thread
from slipstream.engines.quantisation import quantised, unrounded
from slipstream.engines.sample_lines import as_numbers, quote
from slipstream.engines.weights import export_weights, fingerprint, fingerprint_of_parts, local
from slipstream.errors import NonFiniteError, RunDirError
from slipstream.estimators.balance import balance_loss
from slipstream.estimators.logprobs import merge_metrics
from slipstream.estimators.logprobs.head import Head
from slipstream.metric_names import extreme
from slipstream.objective.distillation import TeacherHead
from slipstream.objective.drift import Seen, against_teachers, drift_metrics, sharpness
from slipstream.objective.frozen import Frozen, freeze, present, unrejected
from slipstream.objective.loss import MIXED, TAUGHT, Objective
from slipstream.objective.method import MEASURED, Coefficients, Method, Supervised
from slipstream.objective.sample_weights import Drifted, FreshnessWeights, SampleWeight, drifted, episode_of
from slipstream.objective.sample_weights import key_of as key_of_sample
from slipstream.protocols import Fingerprint, Follower, Metrics, Quote, SampleFreshness, WeightsRef
from slipstream.records import ONE, Batch, Counts, Group, Handle, Header, Ints, Scored, counts_of, derive_seed, graded

T = TypeVar("T")
PER_STEP = ("policy/loss", "loss", "freshness/anchor")
"""Metrics that are divided like the loss; all other sums are divided by the number of tokens."""
OF_OWN = ("policy/", "reference/kl")
"""Prefixes of metrics that are means over the tokens that the student drew."""


@dataclass(frozen=True)
class Phase:
    """The objective of a range of updates, and all that computes it."""

    method: Method
    objective: Objective
    judge: FreshnessWeights | None
    first_passes: FirstPasses


class NativeLearner:
    def __init__(
        self,
        lm: LanguageModel,
        *,
        method: Method,
        config: LearnerConfig,
        updates: int,
        supervised: Supervised | None = None,
        export_dtype: str | None = None,
        quantisation: str | None = None,
        tokenizer: Any = None,
        teacher_heads: Mapping[str, TeacherHead] | None = None,
        snapshots: int = 0,
        follow: Mapping[str, Follower] | None = None,
        cosine_every: int = 0,
        cosine_limit: float | None = None,
        threads: int = 1,
        ranks: Ranks | None = None,
    ) -> None:
        """Prepare the model for training; `follow` lists the teachers whose weights come from this learner.

        The first updates have the method of `supervised`, if any. `teacher_heads` are those of constant teachers that
        send hidden states. The gradients of fresh and stale samples are compared every `cosine_every` updates (0:
        never). The cosine of the gradients of consecutive updates is at most `cosine_limit`, if given.
        """
        self.lm, self.method, self.config, self.updates = lm, method, config, updates
        self.cosine_every, self.cosine_limit = cosine_every, cosine_limit
        self.tokenizer, self.export_dtype = tokenizer, export_dtype or config.dtype
        self.quantisation = quantisation
        self.quantised = {f"{name}.weight" for name in called_layers(lm)} if quantisation else set[str]()
        """Names of the weights that samplers quantise."""
        self.decode = as_numbers if tokenizer is None else tokenizer.decode
        self.thread = compute_thread("learner", threads)
        self.ranks = ranks or Ranks()
        self.passes = Passes(lm, config, self.ranks, temperature=method.temperature, snapshots=snapshots)
        self.snapshots = self.passes.snapshots
        self.balance = config.router_aux or 0.0
        """Coefficient of the auxiliary loss of the routers; 0 is off."""
        if self.balance == "model":
            self.balance = float(lm.model.config.get_text_config().router_aux_loss_coef)
        self.share_E = torch.zeros(0)
        """Share of each expert in the choices of this update."""
        self.heads = {(name, 0): each for name, each in (teacher_heads or {}).items()}
        """Heads of teachers that send hidden states: the constant ones, and those that this update reads."""
        self.supervised, methods = supervised, (method, supervised and supervised.method)
        self.phases = [self._phase(each) for each in methods if each]
        """Phase after the supervised updates, then that of the supervised updates, if any."""
        self._enter(self.phases[0])
        self.optimizer = make_optimizer([p for p in lm.model.parameters() if p.requires_grad], config)
        self.perturbation: Perturbation | None = None
        if config.perturbation is not None:
            self.perturbation = Perturbation(lm, config.perturbation, packed=config.packing, seed=method.seed)
        self.passes_made = 0
        """Number of passes with gradient in the update in progress."""
        self.noise = Noise(self.ranks)
        self.scale = LossScale(on=config.compute_dtype == "float16")
        if method.keeps_reference:  # must precede `restore`: the reference is the initial student
            self.snapshots.take(REFERENCE, host=method.hosts_reference)
        if method.keeps_old:
            self.snapshots.take(OLD, host=False)
        self.follow = dict(follow or {})
        self.followed = dict.fromkeys(self.follow, 0)
        """For each following teacher, the update after which its weights last changed; 0: not yet."""
        self.earlier: dict[str, list[int]] = {teacher: [] for teacher in self.follow}
        """For each following teacher, its earlier versions that are stored, oldest first."""
        self.unsent: dict[str, list[int]] = {teacher: [] for teacher in self.follow}
        """For each following teacher, the versions that `restore` loaded and `export` has not returned yet."""
        for teacher in self.follow:
            self.snapshots.take(snapshot_of(teacher))
        self.stage = supervised.updates if supervised else 0
        """Number of supervised updates of the run, as the newest batch states it."""
        self.update = self.made = 0
        """`update`: the update in progress. `made`: the last update whose first optimizer step is done."""
        self.coefficients = method.coefficients
        """Coefficients of the loss in this update."""
        self.measured: list[Metrics] = []
        """Metrics that these coefficients follow, for each step of this update."""
        self.size = 0
        """Number of samples in this update over all ranks; stays 0 if the method fixes nothing before the gradient."""
        self.samples: dict[Key, Scored] = {}
        self.frozen: dict[Key, Frozen] = {}
        self.seen: list[Seen] = []
        self.sums: dict[str, Tensor] = {}
        """Sums of metrics since the last step."""
        self.weighed: list[Key] = []
        """Keys of the samples since the last step."""
        self.slopes: dict[Key, Tensor] = {}
        """Gradients of the policy loss with respect to log-probs, for the samples that `_ahead` has computed."""
        self.age_metrics: Metrics = {}
        """Cosines of gradients, since the last step."""
        self.notes: list[tuple[int, Metrics]] = []
        """Metrics from `prepare`: pairs of a number of samples and the metrics over these samples."""
        self.checksums: dict[str, dict[str, int]] = {}
        """Checksums of frozen weights, by precision and name."""

    # --- the protocol ----------------------------------------------------------------------------------------

    async def prepare(self, batch: Batch) -> list[Counts]:
        return await self._run(self._prepare, batch)

    async def accumulate(self, batch: Batch, counts: Counts) -> list[SampleFreshness]:
        return await self._run(self._accumulate, [key_of(header) for header in batch.headers], counts)

    async def step(self, counts: Counts = ONE, lr: float = 1.0) -> Metrics:
        return await self._run(self._step, counts, lr)

    async def quote(self, batch: Batch) -> list[Quote]:
        return await self._run(
            lambda: [quote(each, self.samples[key_of(each)], self.update, self.decode) for each in batch.headers]
        )

    async def weigh(self, batch: Batch) -> list[SampleFreshness]:
        return await self._run(self._weigh, [scored(handle) for handle in batch.handles])

    async def compare(self, batch: Batch, teacher: str = "") -> Metrics:
        return await self._run(self._compare, [scored(handle) for handle in batch.handles], teacher)

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        return await self._run(self._export, teacher)

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        await self._run(self._save, path, groups, optimizer)

    async def restore(self, path: Path) -> Sequence[Group]:
        return await self._run(self._restore, path)

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work, *args)

    def close(self) -> None:
        self.thread.shutdown()

    # --- phases ----------------------------------------------------------------------------------------------

    def _phase(self, method: Method) -> Phase:
        judge = FreshnessWeights(method.freshness) if method.freshness is not None else None
        return Phase(method, Objective(method, self.heads), judge, FirstPasses(method, self.passes))

    def _enter(self, phase: Phase) -> None:
        self.current = phase.method
        """Method of the update in progress; `method` is that after the supervised updates."""
        self.objective, self.judge, self.first_passes = phase.objective, phase.judge, phase.first_passes

    @property
    def supervising(self) -> bool:
        return self.supervised is not None and self.update <= self.stage

    # --- before the first gradient ---------------------------------------------------------------------------

    def _prepare(self, batch: Batch) -> list[Counts]:
        if batch.update != self.update:
            self.stage = self.stage if batch.supervised is None else batch.supervised
            self._begin(batch.update)
        samples = {key_of(handle.header): scored(handle) for handle in batch.handles}
        self.samples |= samples
        if self.follow:
            self._read_heads(samples.values())
        version, own, experts = self.update - 1, list(samples.values()), self._experts(samples)
        exact = self.config.exact_drift and not self.supervising
        distances = self.first_passes.distances(own, version, drift=exact or self.current.replays)
        if exact:
            size = sum(self.ranks.gathered(len(samples)))
            self.notes.append((size, self.first_passes.rollout_drift(own, distances)))
        self._freeze(samples, version, distances)
        if self.balance and experts is not None:
            self._count_experts(samples, experts)
        if self.judge is not None:
            known = None
            ahead = self.current.by_episode or not self.current.weighs_all
            noisy = self.config.dropout or self.perturbation is not None
            if self.current.replays or noisy or ahead:  # otherwise the training pass computes it
                known = self._drifted(own, version, distances)
            self.judge.take(own, [self.frozen[key] for key in samples], known)
        left = {key: int(self.frozen[key].mask_T.sum()) for key in samples}
        return [counts_of(group, [left[key_of(handle.header)] for handle in group]) for group in batch.groups]

    def _read_heads(self, samples: Collection[Scored]) -> None:
        """Add the heads of all versions of following teachers whose hidden states the samples of all ranks hold."""
        hidden = [each for each in samples if each.teacher in self.follow and each.teacher_hidden is not None]
        mine = {(each.teacher, each.teacher_version) for each in hidden}
        for teacher, version in sorted(set().union(*self.ranks.gathered(mine)) - self.heads.keys()):
            snapshot = snapshot_of(teacher, None if version == self.followed[teacher] else version)
            linear, dtype = self.snapshots.copy_layer(snapshot, self.lm.head.linear), self.follow[teacher].dtype
            self.heads[teacher, version] = TeacherHead(replace(self.lm.head, linear=linear.to(getattr(torch, dtype))))

    def _freeze(self, samples: dict[Key, Scored], version: int, distances: Distances) -> None:
        if not self.current.looks_first:
            self.frozen |= {key: unrejected(sample) for key, sample in samples.items()}
            return
        own = list(samples.values())
        keys, evidence = list(samples), self.first_passes.evidence(own, version, distances)
        # all ranks get the whole batch in the same order
        everyone = [pair for part in self.ranks.gathered(list(zip(keys, evidence, strict=True))) for pair in part]
        everyone.sort(key=lambda pair: pair[0])
        samples_of_all = [sample for _, sample in everyone]
        frozen, noted = freeze(samples_of_all, self.current, update=self.update, coefficients=self.coefficients)
        self.size += len(everyone)
        decided = {key: each for (key, _), each in zip(everyone, frozen, strict=True)}
        self.frozen |= {key: decided[key] for key in keys}
        self.notes.append((len(everyone), noted))

    def _experts(self, samples: Mapping[Key, Scored]) -> list[Ints] | None:
        """Return the experts that these samples use in this update, if needed; with "replay_old" also fix them."""
        old = self.config.router == "replay_old" and not self.supervising
        if (routing := self.passes.routing) is None or not (old or self.balance):
            return None
        found = self.passes.experts(list(samples.values()), OLD if old and self.method.keeps_old else None)
        if old:
            routing.old |= zip(samples, found, strict=True)
        return found

    def _count_experts(self, samples: Mapping[Key, Scored], experts: Sequence[Ints]) -> None:
        """Set the share of each expert in the choices for all tokens of the update that its loss counts."""
        routers = present(self.passes.routing).routers
        counts = torch.zeros(routers.experts, dtype=torch.float64)
        for key, found in zip(samples, experts, strict=True):
            mask = self.frozen[key].mask_T.cpu().numpy()
            chosen = torch.from_numpy(found[-len(mask) :][mask]).flatten().long()
            counts += torch.bincount(chosen, minlength=routers.experts)
        counts = sum(self.ranks.gathered(counts), torch.zeros_like(counts))
        self.share_E = routers.chosen * counts / counts.sum().clamp(min=1)

    def _balance(self, rows: Rows, frozen: Sequence[Frozen], samples: Sequence[Scored], counts: Counts) -> Tensor:
        masks = zip(frozen, samples, strict=True)
        kept_N = torch.cat([each.mask_T[torch.from_numpy(sample.rollout.loss_mask)] for each, sample in masks])
        at_N = rows.predict_N[kept_N.to(rows.predict_N.device)]
        logits = [logits_TE[at_N.to(logits_TE.device)] for logits_TE in present(rows.choices).logits]
        return balance_loss(logits, self.share_E, n_tokens=max(counts.n_tokens, 1))

    def _drifted(self, samples: Sequence[Scored], version: int, distances: Distances | None = None) -> list[Drifted]:
        """Return for each sample its drift: the distance between the current learner and the policy that drew it."""
        if not self.method.replays:
            logp = self.passes.log_probs_of_draws(samples, temperature=self.method.temperature)
            return [drifted(sample, logp_NM) for sample, logp_NM in zip(samples, logp, strict=True)]
        distances = distances or self.first_passes.distances(samples, version, drift=True)
        masks = [torch.from_numpy(sample.rollout.loss_mask) for sample in samples]
        found = zip(distances.kl["reverse"], distances.known, masks, strict=True)
        return [Drifted(kl_T[mask_T], known_T[mask_T]) for kl_T, known_T, mask_T in found]

    def _weigh(self, samples: Sequence[Scored]) -> list[SampleFreshness]:
        """Return the freshness weights that samples have under the current weights; every rank gets all samples."""
        drift = self._drifted(samples, self.made)
        return present(self.judge).weigh(samples, drift, version=self.made)

    def _begin(self, update: int) -> None:
        self.coefficients, self.measured, self.size = self._next_coefficients(), [], 0
        self.samples, self.frozen, self.notes, self.update, self.passes_made = {}, {}, [], update, 0
        for key in [(teacher, version) for teacher, version in self.heads if teacher in self.follow]:
            del self.heads[key]
        if self.passes.routing is not None:
            self.passes.routing.old.clear()
        self._enter(self.phases[self.supervising])
        if self.judge is not None:
            self.judge.begin()
        if self.config.dropout:  # a resumed run uses the same dropout masks
            torch.manual_seed(derive_seed(self.method.seed, "dropout", update, self.ranks.index))

    def _next_coefficients(self) -> Coefficients:
        means = averaged([(1, step) for step in self.measured])
        return self.method.coefficients_after(self.coefficients, measured=means, samples=self.size)

    def _compare(self, samples: Sequence[Scored], teacher: str) -> Metrics:
        """Return metrics that compare recorded log-probs with the learner's, or with a following teacher's snapshot."""
        if teacher:
            seen = [replace(sample, rollout=with_prompt(sample.rollout, sample.seen)) for sample in samples]
            with unrounded(self.lm.model):  # teachers are not quantised
                logp = self.passes.log_probs(seen, snapshot_of(teacher), temperature=self.method.loss.temperature)
            return against_teachers(samples, logp)
        logp = self.passes.log_probs(samples)
        own = [Seen.of(sample, unrejected(sample), logp_T) for sample, logp_T in zip(samples, logp, strict=True)]
        version = max(int(v) for sample in samples for v in sample.rollout.versions[sample.rollout.loss_mask])
        return drift_metrics(own, version=version) | sharpness(own) | against_teachers(samples, logp)

    # --- gradients and steps ---------------------------------------------------------------------------------

    def _accumulate(self, keys: Sequence[Key], counts: Counts) -> list[SampleFreshness]:
        self.weighed += keys
        self.objective.scale = self.scale.apply(summed=counts == ONE)
        if self.judge is not None and not self.current.weighs_all:
            self._judged([self.samples[key] for key in keys])
            self.objective.divisor = self.judge.divisor(self.ranks.gathered(self.judge.totals(keys)))
        ahead = self._ahead(keys, counts)
        due = self.cosine_every and self.update % self.cosine_every == 0 and self.made < self.update
        due = due and not self.supervising
        if due and (cut := halves({key: self.samples[key] for key in keys}, self.ranks)):
            total = self._backward(cut[0], counts)
            fresh = [None if gradient is None else gradient.clone() for gradient in self._gradients()]
            total += self._backward(cut[1], counts)
            self.age_metrics = cosine(fresh, self._gradients(), self.ranks)
        else:
            total = self._backward(keys, counts)
        loss_of_all = sum(self.ranks.gathered(total.item() + ahead))
        if not math.isfinite(loss_of_all):
            self._drop()
            half = (
                "; learner.compute_dtype = 'float16' overflows above 65504: write 'bfloat16'" if self.scale.on else ""
            )
            raise NonFiniteError(f"the loss of update {self.update} is {loss_of_all}{half}")
        return [self.judge.judged[key].weighed for key in keys] if self.judge is not None else []

    def _ahead(self, keys: Sequence[Key], counts: Counts) -> float:
        """Return the policy loss of episodes with several samples (branches), which is computed first; 0 if none."""
        self.slopes = {}
        count = Counter(episode_of(self.samples[key]) for key in keys if self.current.by_episode)
        samples = [self.samples[key] for key in keys if count[episode_of(self.samples[key])] > 1]
        samples.sort(key=lambda each: (*episode_of(each), each.rollout.index))
        if not any(self.ranks.gathered(len(samples))):
            return 0.0
        logp, keys = self.passes.log_probs(samples), [key_of_sample(each) for each in samples]
        if not samples:
            return 0.0
        judged = self._judged(samples) if self.judge is not None else ()
        loss, metrics, slopes = self.objective.ahead(samples, [self.frozen[k] for k in keys], logp, counts, judged)
        self.slopes = dict(zip(keys, slopes, strict=True))
        merge_metrics(self.sums, metrics)
        return loss.item()

    def _gradients(self) -> list[Tensor | None]:
        """Return this rank's shard of each gradient; None for a weight that has no gradient."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        return [None if p.grad is None else local(p.grad) for p in parameters]

    def _backward(self, keys: Sequence[Key], counts: Counts) -> Tensor:
        """Add the gradient of these samples to the weights' gradients; return this rank's part of the loss."""
        samples, frozen = [self.samples[key] for key in keys], [self.frozen[key] for key in keys]
        total = torch.zeros((), dtype=torch.float64, device=self.lm.device)
        for rows, members in self.passes.micro_batches(samples):
            if not len(rows.predict_N) or not members:
                with self.passes.precision():
                    empty = self.passes.student(rows, zero_loss)
                empty.backward()
                continue
            chosen, decisions = [samples[i] for i in members], [frozen[i] for i in members]
            with self._perturbed():
                with self.passes.precision():
                    loss, metrics, logp_N = self.passes.student(
                        rows, lambda h, head, c=chosen, f=decisions: self._objective(h, head, c, f, counts)
                    )
                if self.balance:
                    part = self._balance(rows, decisions, chosen, counts)
                    loss = loss + self.balance * part
                    metrics |= {"router/balance": part.detach(), "loss": metrics["loss"] + self.balance * part.detach()}
                (loss * self.objective.scale).backward()
            total += loss.detach()
            merge_metrics(self.sums, metrics)
            if self.passes.routing is not None:
                merge_metrics(self.sums, self.passes.routing.flips(rows, chosen))
            logp = over_tokens(logp_N, [sample.rollout for sample in chosen])
            self.seen += [Seen.of(*each) for each in zip(chosen, decisions, logp, strict=True)]
        return total

    def _perturbed(self) -> AbstractContextManager[None]:
        self.passes_made += 1
        return nullcontext() if self.perturbation is None else self.perturbation.during(self.update, self.passes_made)

    def _objective(
        self, hidden_NH: Tensor, head: Head, samples: Sequence[Scored], frozen: Sequence[Frozen], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return loss, metrics and log-probs of a micro-batch; freshness weights not known yet come from this pass."""
        self.noise.watch(hidden_NH, samples)
        slope_N = None
        if self.slopes:
            nan = [torch.full((each.rollout.trained_tokens,), torch.nan) for each in samples]
            slope_N = torch.cat([self.slopes.get(key_of_sample(s), n) for s, n in zip(samples, nan, strict=True)])
        if self.judge is None:
            return self.objective(hidden_NH, head, samples, frozen, counts, slope_N=slope_N)

        def draws() -> Sequence[Tensor]:
            rollouts = [sample.rollout for sample in samples]
            with torch.no_grad():
                logp_NM = at_draws(hidden_NH.detach(), head, rollouts, temperature=self.method.temperature)
            return by_sample(logp_NM.cpu().double(), rollouts)

        return self.objective(hidden_NH, head, samples, frozen, counts, self._judged(samples, draws), slope_N)

    def _judged(self, samples: Sequence[Scored], draws: Callable[[], Sequence[Tensor]] = list) -> list[SampleWeight]:
        frozen = [self.frozen[key_of_sample(each)] for each in samples]
        return present(self.judge).of(samples, frozen, version=self.update - 1, draws=draws)

    def _step(self, counts: Counts, factor: float) -> Metrics:
        groups = self.optimizer.param_groups
        grads = [gradient for gradient in self._gradients() if gradient is not None]
        if self.perturbation is not None:
            grads += self.perturbation.gradients
        loss_scale = 1 / max(counts.n_sequences if self.current.over_sequences else counts.n_tokens, 1)
        if self.judge is not None and self.current.weighs_all:
            loss_scale /= self.judge.divisor(self.ranks.gathered(self.judge.totals(self.weighed)))
        factor_of_gradients = loss_scale / self.scale.applied
        if factor_of_gradients != 1.0:
            torch._foreach_mul_(grads, factor_of_gradients)
        projects = self.cosine_limit is not None and self.made < self.update and not self.supervising
        if projects:
            self.age_metrics |= project(self.optimizer, self.ranks, limit=present(self.cosine_limit))
        norm = math.hypot(*self.ranks.gathered(torch.nn.utils.get_total_norm(grads).item()))
        scaled: Metrics = {}
        if self.scale.on:
            scaled = {"loss_scale": self.scale.value, "steps_skipped": float(not math.isfinite(norm))}
        if not math.isfinite(norm):
            if not self.scale.overflowed():
                self._drop()
                raise NonFiniteError(f"the gradient norm of update {self.update} is {norm}")
            self.noise.sums, self.age_metrics, norm = {}, {}, 0.0
        if (shrink := self.config.clip_norm / (norm + 1e-6)) < 1:  # same formula as torch's clip_grad_norm_
            torch._foreach_mul_(grads, shrink)
        lr = factor * self._learning_rate()
        for group in groups:
            group["lr"] = lr
        if self.method.keeps_old and self.made < self.update:
            self.snapshots.blend(OLD, self.method.old_decay)
        self.made = self.update
        moved = dict[str, float]()
        if norm > 0:  # without any gradient, weight decay and momentum must not change the weights either
            if "optimizer" in self.config.offload:
                step_from_host(self.optimizer)
            else:
                self.optimizer.step()
            self.scale.succeeded()
            if self.perturbation is not None:
                self.perturbation.optimizer.step()
            if projects:
                store_gradient(self.optimizer)
            squares, weights = zip(*self.ranks.gathered(squared_step(self.optimizer)), strict=True)
            moved = {"step_rms": math.sqrt(sum(squares) / sum(weights))}
        if self.perturbation is not None:
            moved["perturbation/std"] = self.perturbation.std
        found = self._metrics(loss_scale, 1 / max(counts.n_tokens, 1), factor_of_gradients)
        if norm > 0 and "drift/kl" in found:  # it is missing if the step had no token of the student
            self.measured.append({name: found[name] for name in MEASURED.values() if name in found})
        if not scaled.get("steps_skipped"):
            found["grad_norm"] = norm
        return found | moved | scaled | {"lr": lr}

    def _learning_rate(self) -> float:
        """Return the learning rate of this update; warm-up and decay begin again after the supervised updates."""
        if (sft := self.supervised) is None:
            return learning_rate(self.config, self.update - 1, self.updates)
        if self.supervising:
            return sft.lr * min(1.0, self.update / max(sft.warmup, 1))
        return learning_rate(self.config, self.update - 1 - self.stage, self.updates - self.stage)

    def _metrics(self, loss_scale: float, token_scale: float, gradient_scale: float) -> Metrics:
        """Return the metrics since the last step over all ranks, and drop gradients and sums."""
        sums: dict[str, Tensor] = {}
        for part in self.ranks.gathered({name: value.cpu() for name, value in self.sums.items()}):
            merge_metrics(sums, part)
        found = {name: value.item() for name, value in sums.items()}
        for name in found:
            if not extreme(name):
                found[name] *= loss_scale if name in PER_STEP else token_scale
        own = 1 - found.pop(MIXED, 0.0) or 1.0
        for name in [name for name in found if name.startswith(OF_OWN) and not (name in PER_STEP or extreme(name))]:
            found[name] /= own
        seen = [each for part in self.ranks.gathered([each.on_cpu() for each in self.seen]) for each in part]
        for name in [name for name in found if name.startswith("teacher/") and name.endswith("/loss")]:
            found[name] /= found[name.removesuffix("loss") + "share"] or 1.0  # mean over this teacher's tokens
        if taught := found.pop(TAUGHT, 0.0):
            found["teacher/forward_kl"] /= taught
        if "distill/overlap_any" in found:
            found["distill/overlap_token_advantage"] /= found["distill/overlap_any"] or 1.0  # mean where any overlap
        found |= self.passes.packing_metrics() | self.noise.metrics(gradient_scale) | self.age_metrics
        if pairs := found.pop(PAIRS, 0.0):
            found["router/flips"] /= pairs
        self._drop()
        return found | averaged(self.notes) | drift_metrics(seen, version=self.update - 1)

    def _drop(self) -> None:
        self.optimizer.zero_grad()
        if self.perturbation is not None:
            self.perturbation.drop_gradients()
        self.sums, self.seen, self.noise.sums, self.age_metrics, self.weighed = {}, [], {}, {}, []

    # --- weights ---------------------------------------------------------------------------------------------

    def _save(self, path: Path, groups: Sequence[Group], optimizer: bool) -> None:
        drew = {version for group in groups for handle in group for version, _ in handle.header.versions}
        versions = sorted(set().union(*self.ranks.gathered(drew)) - {self.made}) if optimizer else []
        scored = set().union(*self.ranks.gathered({each.header.teacher_version for group in groups for each in group}))
        state = State(
            update=self.made,
            previous=self.snapshots.state(OLD) if self.method.keeps_old else {},
            coefficients={name: getattr(self._next_coefficients(), name) for name in self.method.adaptive},
            perturbation=self.perturbation.state() if self.perturbation is not None else {},
            loss_scale=(self.scale.value, self.scale.steps) if self.scale.on else None,
            versions={version: self.snapshots.state(version) for version in versions if version in self.snapshots},
            teachers={name: (self.followed[name], self.snapshots.state(snapshot_of(name))) for name in self.follow},
            earlier={
                name: {v: self.snapshots.state(snapshot_of(name, v)) for v in self.earlier[name] if v in scored}
                for name in self.follow
            },
            groups=groups,
        )
        save(path, self.lm, self.tokenizer, self.ranks, state, self.optimizer if optimizer else None)

    def _restore(self, path: Path) -> Sequence[Group]:
        found = restore(path, self.lm, self.optimizer, self.ranks, lora=self.config.lora is not None)
        if "optimizer" in self.config.offload:
            park(self.optimizer)
        if self.method.keeps_old:
            if not found.previous:
                old = f'the weights that policy.old = "{present(self.method.policy).old}" compares with'
                raise not_saved(path, old, "policy.old")
            self.snapshots.put(OLD, found.previous)
        for name, setting in self.method.adaptive.items():
            if name not in found.coefficients:
                raise not_saved(path, f"the coefficient that {setting} changes", setting)
            self.coefficients = self.coefficients._replace(**{name: found.coefficients[name]})
        self.measured = []
        if self.perturbation is not None:
            if not found.perturbation:
                raise not_saved(path, "the learned noise on the layers", "learner.perturbation")
            self.perturbation.load(found.perturbation)
        if self.scale.on:
            self.scale.value, self.scale.steps = found.loss_scale or (self.scale.value, 0)
        for name in self.follow:
            if name not in found.teachers:
                raise not_saved(path, f"the weights of teachers.{name}, which follows the student", "follow")
            self.followed[name], state = found.teachers[name]
            self.snapshots.put(snapshot_of(name), state, host=True)
            self.earlier[name] = sorted(found.earlier[name]) if self.follow[name].keep else []
            for version in self.earlier[name]:
                self.snapshots.put(snapshot_of(name, version), found.earlier[name][version], host=True)
            self.unsent[name] = [*self.earlier[name], self.followed[name]]
        self.update, self.made = 0, found.update
        if self.snapshots.keep:
            for version, state in found.versions.items():
                self.snapshots.put(version, state, host=True)
        return found.groups

    def _store_earlier(self, teacher: str) -> None:
        """Store the weights of a teacher that is about to move, and delete the oldest if there are too many."""
        earlier, keep = self.earlier[teacher], self.follow[teacher].keep
        if keep:
            earlier.append(self.followed[teacher])
            self.snapshots.copy(snapshot_of(teacher), snapshot_of(teacher, earlier[-1]))
        while len(earlier) > keep:
            del self.snapshots.held[snapshot_of(teacher, earlier.pop(0))]

    def _export(self, teacher: str) -> tuple[WeightsRef, Fingerprint]:
        if teacher:
            follower, name = self.follow[teacher], snapshot_of(teacher)
            if self.made > self.followed[teacher] and self.made % follower.every == 0:
                self._store_earlier(teacher)
                self.snapshots.blend(name, follower.decay)
                self.followed[teacher] = self.made
            dtype, version, unsent = follower.dtype, self.followed[teacher], self.unsent[teacher]
            if unsent and (oldest := unsent.pop(0)) in self.earlier[teacher]:
                version, name = oldest, snapshot_of(teacher, oldest)
            others = self.snapshots.shards(name)
        else:
            if self.snapshots.keep:
                self.snapshots.take(self.made)
            dtype, version, others = self.export_dtype, self.made, {}
        model, keep = self.lm.model, self.ranks.index == 0
        weights = export_weights(model, dtype, version=version, keep=keep, others=others)
        found = fingerprint(model, dtype, exported=weights, still=self.checksums.setdefault(dtype, {}))
        if self.quantisation is not None and keep and not teacher:
            return weights, fingerprint_of_parts(weights, self._parts)
        return weights, found

    def _parts(self, name: str, weight: Tensor) -> Sequence[Tensor]:
        """Return an exported weight, with the codes and scales that samplers make of it."""
        return (weight, *quantised(weight, present(self.quantisation))) if name in self.quantised else (weight,)


def snapshot_of(teacher: str, version: int | None = None) -> str:
    """Return the name of the snapshot of a teacher, or of an earlier version of the teacher."""
    return f"teacher {teacher}" if version is None else f"teacher {teacher} after {version}"


def not_saved(path: Path, content: str, key: str) -> RunDirError:
    return RunDirError(f"{path} does not hold {content}: write the {key} it was saved under, or begin a new run")


def key_of(header: Header) -> Key:
    return header.number, header.index


def scored(handle: Handle) -> Scored:
    """Return the sample of a handle; a rollout without teacher scores becomes a Scored without scores."""
    body = handle.body
    return body if isinstance(body, Scored) else Scored(rollout=graded(handle))


def averaged(noted: Sequence[tuple[int, Metrics]]) -> Metrics:
    """Return the mean of each metric over all pairs that have it, weighted by the numbers of samples."""
    found: Metrics = {}
    for name in dict.fromkeys(name for _, part in noted for name in part):
        having = [(size, part[name]) for size, part in noted if name in part]
        found[name] = sum(size * value for size, value in having) / sum(size for size, _ in having)
    return found


def learning_rate(config: LearnerConfig, update: int, updates: int) -> float:
    """Return the learning rate of an update (from 0): linear warm-up, then constant or a cosine decay to zero."""
    if update < config.warmup:
        return config.lr * (update + 1) / config.warmup
    if config.decay == "constant":
        return config.lr
    done = (update - config.warmup) / max(1, updates - config.warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
