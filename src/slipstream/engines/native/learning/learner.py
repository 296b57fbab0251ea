"""The learner, which trains the student: passes over packed rows, fused head and losses, backward, clipping, AdamW.

Losses are sums divided by the counts given to `accumulate` or `step`: micro-batches, rows and ranks change nothing.
`prepare` stores a batch and computes everything that must be fixed before its first gradient, such as advantages.
`accumulate` adds gradients for groups of this batch. The batch is dropped when the next update begins.

The parts: `weights` has the student's weights and those of other versions, `passes` computes with them, `steps` changes
them, and `measurements` collects the metrics of a step.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from slipstream.config.learner import LearnerConfig
from slipstream.engines.native.learning.critic import Critic
from slipstream.engines.native.learning.first_passes import FirstPasses
from slipstream.engines.native.learning.measurements import (
    Measurements,
    Seen,
    against_teachers,
    averaged,
    cosine,
    drift_metrics,
    halves,
    sharpness,
)
from slipstream.engines.native.learning.passes import Passes, at_draws, zero_loss
from slipstream.engines.native.learning.step import Steps, learning_rate
from slipstream.engines.native.learning.storage import State, not_saved, restore, save
from slipstream.engines.native.learning.student import Perturbation, Student
from slipstream.engines.native.learning.weights import LearnerWeights, snapshot_of
from slipstream.engines.native.model import LanguageModel, called_layers
from slipstream.engines.native.ranks import Ranks
from slipstream.engines.native.resources import Offloading, compute_thread
from slipstream.engines.native.rows import by_sample, over_tokens
from slipstream.engines.native.scorer import with_prompt
from slipstream.engines.quantisation import unrounded
from slipstream.engines.record_files import as_numbers, quote
from slipstream.engines.settings import LearnerSettings
from slipstream.errors import NonFiniteError
from slipstream.estimators.logprobs import merge_metrics
from slipstream.estimators.logprobs.tiles import Head
from slipstream.objective.coefficients import MEASURED, Coefficients
from slipstream.objective.columns import OLD, measure, present
from slipstream.objective.constants import UpdateConstants, compute_constants, unrejected
from slipstream.objective.distillation import TeacherHead, TeacherHeads
from slipstream.objective.loss import Objective
from slipstream.objective.method import Method
from slipstream.objective.sample_weights import Drifted, FreshnessWeights, Key, SampleWeight, drifted, episode_of
from slipstream.objective.sample_weights import key_of as key_of_sample
from slipstream.protocols import Fingerprint, Metrics, Quote, SampleFreshness, WeightsRef
from slipstream.records import ONE_COUNT, Batch, Counts, Group, Handle, Header, Scored, counts_of, derive_seed, graded

T = TypeVar("T")


class Phase(NamedTuple):
    """The objective of a range of updates, and all that computes it."""

    method: Method
    objective: Objective
    judge: FreshnessWeights | None
    critic: Critic | None


def phase_of(method: Method, heads: TeacherHeads, critic: Critic | None) -> Phase:
    judge = FreshnessWeights(method.freshness) if method.freshness is not None else None
    return Phase(method, Objective(method, heads), judge, None if method.critic is None else critic)


@dataclass
class Update:
    """State of the update in progress."""

    number: int = 0
    coefficients: Coefficients = field(default_factory=Coefficients)
    """Coefficients of the loss."""
    samples: dict[Key, Scored] = field(default_factory=dict)
    constants: dict[Key, UpdateConstants] = field(default_factory=dict)
    size: int = 0
    """Number of samples over all ranks; stays 0 if the method fixes nothing before the gradient."""
    passes: int = 0
    """Number of passes with gradient."""
    measured: list[Metrics] = field(default_factory=list)
    """Metrics that the coefficients follow, for each step."""
    weighed: list[Key] = field(default_factory=list)
    """Keys of the samples since the last step."""
    slopes: dict[Key, Tensor] = field(default_factory=dict)
    """Gradients of the policy loss with respect to log-probs, for the samples that `_ahead` has computed."""

    def next_coefficients(self, method: Method) -> Coefficients:
        means = averaged([(1, step) for step in self.measured])
        return method.coefficients_after(self.coefficients, measured=means, samples=self.size)

    def slopes_of(self, samples: Sequence[Scored]) -> Tensor | None:
        """Return the slopes of all tokens of these samples, NaN where none were computed; None if there are none."""
        if not self.slopes:
            return None
        device = next(iter(self.slopes.values())).device
        nan = [torch.full((each.rollout.trained_tokens,), torch.nan, device=device) for each in samples]
        return torch.cat([self.slopes.get(key_of_sample(s), n) for s, n in zip(samples, nan, strict=True)])


OVERFLOW = "; learner.compute_dtype = 'float16' overflows above 65504: write 'bfloat16'"
"""Text after the error of an infinite loss, if losses are scaled for float16."""


class NativeLearner(Offloading):
    def __init__(
        self,
        lm: LanguageModel,
        plan: LearnerSettings,
        ranks: Ranks | None = None,
        *,
        tokenizer: Any = None,
        heads: Mapping[str, TeacherHead] | None = None,
        critic: LanguageModel | None = None,
    ) -> None:
        """Prepare the student, and a critic's own model. `heads` are those of constant teachers with hidden states."""
        self.lm, self.plan, self.ranks, self.tokenizer = lm, plan, ranks or Ranks(), tokenizer
        self.config: LearnerConfig = plan.settings
        self.thread = compute_thread("learner", plan.threads)
        quantised = called_layers(lm) if plan.quantisation else ()
        student = Student(lm, self.config, self.ranks)
        perturbation = None
        if (noise := self.config.perturbation) is not None:
            perturbation = Perturbation(lm, noise, packed=self.config.packing, seed=plan.method.seed)
        self.weights = LearnerWeights(lm, plan, self.ranks, quantised=quantised)
        self.passes = Passes(student, self.weights.snapshots, plan, self.ranks)
        values = plan.method.critic
        self.critic = None if values is None else Critic(values, self.passes, plan, critic)
        trained = [parameter for parameter in lm.model.parameters() if parameter.requires_grad]
        self.steps = Steps(trained, self.config, self.ranks, perturbation)
        self.measurements = Measurements(self.ranks)
        self.heads = {(name, 0): each for name, each in (heads or {}).items()}
        """Heads of teachers that send hidden states: the constant ones, and those that this update reads."""
        methods = (plan.method, plan.supervised and plan.supervised.method)
        self.phases = [phase_of(each, self.heads, self.critic) for each in methods if each]
        """Phase after the supervised updates, then that of the supervised updates, if any."""
        self.phase = self.phases[0]
        self.stage = plan.supervised.updates if plan.supervised else 0
        """Number of supervised updates of the run, as the newest batch states it."""
        self.now, self.made = Update(coefficients=plan.method.coefficients), 0
        """`made`: the last update whose first optimizer step is done."""

    # --- the protocol ----------------------------------------------------------------------------------------

    async def prepare(self, batch: Batch) -> list[Counts]:
        return await self._run(self._prepare, batch)

    async def accumulate(self, batch: Batch, counts: Counts) -> list[SampleFreshness]:
        return await self._run(self._accumulate, [key_of(header) for header in batch.headers], counts)

    async def step(self, counts: Counts = ONE_COUNT, lr: float = 1.0) -> Metrics:
        return await self._run(self._step, counts, lr)

    async def quote(self, batch: Batch) -> list[Quote]:
        decode = as_numbers if self.tokenizer is None else self.tokenizer.decode
        return await self._run(
            lambda: [quote(each, self.now.samples[key_of(each)], self.now.number, decode) for each in batch.headers]
        )

    async def weigh(self, batch: Batch) -> list[SampleFreshness]:
        return await self._run(self._weigh, [scored(handle) for handle in batch.handles])

    async def compare(self, batch: Batch, teacher: str = "") -> Metrics:
        samples, temperature = [scored(handle) for handle in batch.handles], self.plan.method.loss.temperature
        return await self._run(lambda: compared(self.passes, samples, teacher, temperature=temperature))

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        return await self._run(lambda: self.weights.export(teacher, self.made))

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        await self._run(self._save, path, groups, optimizer)

    async def restore(self, path: Path) -> Sequence[Group]:
        return await self._run(self._restore, path)

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        async with self.turn():
            return await asyncio.get_running_loop().run_in_executor(self.thread, work, *args)

    def on_device(self) -> Iterable[Tensor]:
        """Return weights, gradients, moments, snapshots and the teachers' heads, if they are on the device."""
        heads = chain.from_iterable(each.head.linear.parameters() for each in self.heads.values())
        snapshots = chain(*self.weights.snapshots.weights.values())
        values = () if self.critic is None else self.critic.tensors()
        every = chain(self.lm.model.parameters(), self.steps.tensors(), snapshots, heads, values)
        return [tensor for tensor in every if tensor.device == self.lm.device]

    def close(self) -> None:
        self.thread.shutdown()

    # --- before the first gradient ---------------------------------------------------------------------------

    @property
    def supervising(self) -> bool:
        return self.plan.supervised is not None and self.now.number <= self.stage

    @property
    def warming(self) -> bool:
        """Return whether this update trains the critic alone."""
        return self.phase.critic is not None and self.now.number - self.stage <= self.phase.critic.config.warmup

    def _prepare(self, batch: Batch) -> list[Counts]:
        if batch.update != self.now.number:
            self.stage = self.stage if batch.supervised is None else batch.supervised
            self._begin(batch.update)
        samples = {key_of(handle.header): scored(handle) for handle in batch.handles}
        self.now.samples |= samples
        if self.plan.follow:
            heads = self.weights.heads(samples.values(), self.heads)
            self.heads |= {key: TeacherHead(head) for key, head in heads.items()}
        own, method, judge = list(samples.values()), self.phase.method, self.phase.judge
        old = self.config.router == "replay_old" and not self.supervising
        experts = self.passes.experts_of(samples, old=old, snapshot=old and self.plan.method.keeps_old)
        exact = self.config.exact_drift and not self.supervising
        first = FirstPasses(method, self.passes, self.now.number - 1, own, self.critic, drift=exact or method.replays)
        if exact:
            size = sum(self.ranks.gathered(len(samples)))
            self.measurements.notes.append((size, first.rollout_drift(own)))
        self._decide(samples, first)
        masks = {key: self.now.constants[key].mask_T.cpu().numpy() for key in samples}
        if experts is not None and present(self.passes.routing).balance:
            present(self.passes.routing).count(zip(experts, masks.values(), strict=True), self.ranks)
        if judge is not None:
            ahead = method.by_episode or not method.weighs_all
            noisy = self.config.dropout or self.steps.perturbation is not None
            moving = self.config.minibatches > 1  # later ones are trained with other weights than the first
            early = method.replays or noisy or ahead or moving  # otherwise the training pass computes it
            known = self._drifted(own, first if method.replays else None) if early else None
            judge.take(own, [self.now.constants[key] for key in samples], known)
        left = {key: int(mask_T.sum()) for key, mask_T in masks.items()}
        return [counts_of(group, [left[key_of(handle.header)] for handle in group]) for group in batch.groups]

    def _begin(self, update: int) -> None:
        self.now = Update(update, coefficients=self.now.next_coefficients(self.plan.method))
        self.measurements.notes = []
        for key in [(teacher, version) for teacher, version in self.heads if teacher in self.plan.follow]:
            del self.heads[key]
        self.passes.begin()
        self.phase = self.phases[self.supervising]
        if self.phase.judge is not None:
            self.phase.judge.begin()
        if self.config.dropout:  # a resumed run uses the same dropout masks
            torch.manual_seed(derive_seed(self.plan.method.seed, "dropout", update, self.ranks.index))

    def _decide(self, samples: Mapping[Key, Scored], first: FirstPasses) -> None:
        """Compute the constants of these samples; all ranks compute those of the whole batch, in the same order."""
        now, method = self.now, self.phase.method
        if not method.columns:
            now.constants |= {key: unrejected(sample) for key, sample in samples.items()}
            return
        mine = list(zip(samples, measure(list(samples.values()), method, first), strict=True))
        everyone = sorted((pair for part in self.ranks.gathered(mine) for pair in part), key=lambda pair: pair[0])
        inputs = [each for _, each in everyone]
        decided, noted = compute_constants(inputs, method, update=now.number, coefficients=now.coefficients)
        now.size += len(everyone)
        now.constants |= {key: each for (key, _), each in zip(everyone, decided, strict=True) if key in samples}
        self.measurements.notes.append((len(everyone), noted))

    def _drifted(self, samples: Sequence[Scored], first: FirstPasses | None) -> list[Drifted]:
        """Return for each sample its drift: the distance between the current learner and the policy that drew it.

        With passes that replay the samples it is exact, and otherwise estimated from their draws.
        """
        if first is None:
            logp = self.passes.log_probs_of_draws(samples, temperature=self.plan.method.temperature)
            return [drifted(sample, logp_NM) for sample, logp_NM in zip(samples, logp, strict=True)]
        masks = [torch.from_numpy(sample.rollout.loss_mask) for sample in samples]
        rows = zip(first.distances.kl["reverse"], first.distances.known, masks, strict=True)
        return [Drifted(kl_T[mask_T], known_T[mask_T]) for kl_T, known_T, mask_T in rows]

    def _weigh(self, samples: Sequence[Scored]) -> list[SampleFreshness]:
        """Return the freshness weights that samples have under the current weights; every rank gets all samples."""
        method = self.phase.method
        first = FirstPasses(method, self.passes, self.made, samples, drift=True) if method.replays else None
        return present(self.phase.judge).weigh(samples, self._drifted(samples, first), version=self.made)

    # --- gradients -------------------------------------------------------------------------------------------

    def _accumulate(self, keys: Sequence[Key], counts: Counts) -> list[SampleFreshness]:
        now, objective, judge = self.now, self.phase.objective, self.phase.judge
        now.weighed += keys
        objective.scale = self.steps.scale.apply(summed=counts == ONE_COUNT)
        if judge is not None and not self.phase.method.weighs_all:
            self._judged([now.samples[key] for key in keys])
            objective.divisor = judge.divisor(self.ranks.gathered(judge.totals(keys)))
        ahead = self._ahead(keys, counts)
        every = self.plan.cosine_every
        due = every and now.number % every == 0 and self.made < now.number and not self.supervising
        if due and (cut := halves({key: now.samples[key] for key in keys}, self.ranks)):
            total = self._backward(cut[0], counts)
            fresh = [None if gradient is None else gradient.clone() for gradient in self.steps.gradients()]
            total += self._backward(cut[1], counts)
            self.measurements.cosines = cosine(fresh, self.steps.gradients(), self.ranks)
        else:
            total = self._backward(keys, counts)
        loss_of_all = sum(self.ranks.gathered(total.item() + ahead))
        if not math.isfinite(loss_of_all):
            self._drop()
            advice = OVERFLOW if self.steps.scale.on else ""
            raise NonFiniteError(f"the loss of update {now.number} is {loss_of_all}{advice}")
        return [judge.judged[key].weighed for key in keys] if judge is not None else []

    def _ahead(self, keys: Sequence[Key], counts: Counts) -> float:
        """Return the policy loss of episodes with several samples (branches), which is computed first; 0 if none."""
        now, now.slopes = self.now, {}
        count = Counter(episode_of(now.samples[key]) for key in keys if self.phase.method.by_episode)
        samples = [now.samples[key] for key in keys if count[episode_of(now.samples[key])] > 1]
        samples.sort(key=lambda each: (*episode_of(each), each.rollout.index))
        if not any(self.ranks.gathered(len(samples))):
            return 0.0
        logp = [each.to(self.lm.device) for each in self.passes.log_probs(samples)]
        if not samples:
            return 0.0
        judged = self._judged(samples) if self.phase.judge is not None else ()
        constants = [now.constants[key_of_sample(each)] for each in samples]
        loss, metrics, slopes = self.phase.objective.ahead(samples, constants, logp, counts, judged)
        now.slopes = dict(zip(map(key_of_sample, samples), slopes, strict=True))
        merge_metrics(self.measurements.sums, metrics)
        return loss.item()

    def _backward(self, keys: Sequence[Key], counts: Counts) -> Tensor:
        """Add the gradient of these samples to the weights' gradients; return this rank's part of the loss."""
        samples, constants = [self.now.samples[key] for key in keys], [self.now.constants[key] for key in keys]
        total, routing = torch.zeros((), dtype=torch.float64, device=self.lm.device), self.passes.routing
        for rows, members in self.passes.micro_batches(samples):
            if not len(rows.predict_N) or not members:
                with self.passes.precision():
                    empty = self.passes.student(rows, zero_loss)
                empty.backward()
                continue
            chosen, decided = [samples[i] for i in members], [constants[i] for i in members]
            self.now.passes += 1
            with self.steps.perturbed(self.now.number, self.now.passes):
                with self.passes.precision():
                    loss, metrics, logp_N = self.passes.student(
                        rows,
                        lambda h, head, chosen=chosen, decided=decided: self._loss(h, head, chosen, decided, counts),
                    )
                if routing is not None and routing.balance and not self.warming:
                    loss, metrics = routing.balanced((loss, metrics), rows, chosen, decided, counts.n_tokens)
                (loss * self.phase.objective.scale).backward()
            total += loss.detach()
            merge_metrics(self.measurements.sums, metrics)
            if routing is not None:
                merge_metrics(self.measurements.sums, routing.flips(rows, chosen))
            logp = over_tokens(logp_N, [sample.rollout for sample in chosen])
            self.measurements.seen += [Seen.of(*each) for each in zip(chosen, decided, logp, strict=True)]
        if (critic := self.phase.critic) is not None:
            loss, metrics = critic.accumulate(samples, constants, counts, scale=self.phase.objective.scale)
            merge_metrics(self.measurements.sums, metrics)
            total += loss
        return total

    def _loss(
        self,
        hidden_NH: Tensor,
        head: Head,
        samples: Sequence[Scored],
        constants: Sequence[UpdateConstants],
        counts: Counts,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return loss, metrics and log-probs of a micro-batch; freshness weights not known yet come from this pass."""
        self.measurements.noise.watch(hidden_NH, samples)

        def draws() -> Sequence[Tensor]:
            rollouts = [sample.rollout for sample in samples]
            with torch.no_grad():
                logp_NM = at_draws(hidden_NH.detach(), head, rollouts, temperature=self.plan.method.temperature)
            return by_sample(logp_NM.cpu().double(), rollouts)

        judged = () if self.phase.judge is None else self._judged(samples, draws)
        slope_N = self.now.slopes_of(samples)
        loss, metrics, logp_N = self.phase.objective(hidden_NH, head, samples, constants, counts, judged, slope_N)
        if (critic := self.phase.critic) is not None:
            given = hidden_NH, samples, constants, counts
            loss, metrics = critic.added_to((loss, metrics), *given, warming=self.warming)
        return loss, metrics, logp_N

    def _judged(self, samples: Sequence[Scored], draws: Callable[[], Sequence[Tensor]] = list) -> list[SampleWeight]:
        constants = [self.now.constants[key_of_sample(each)] for each in samples]
        return present(self.phase.judge).of(samples, constants, version=self.now.number - 1, draws=draws)

    # --- steps -----------------------------------------------------------------------------------------------

    def _step(self, counts: Counts, factor: float) -> Metrics:
        now, steps, (method, _, judge, critic) = self.now, self.steps, self.phase
        loss_scale = 1 / max(counts.n_sequences if method.over_sequences else counts.n_tokens, 1)
        if judge is not None and method.weighs_all:
            loss_scale /= judge.divisor(self.ranks.gathered(judge.totals(now.weighed)))
        gradient_scale = loss_scale / steps.scale.applied
        compares = self.plan.cosine_limit is not None and self.made < now.number and not self.supervising
        norm, cosines = steps.norm(gradient_scale, limit=self.plan.cosine_limit if compares else None)
        self.measurements.cosines |= cosines
        values_norm = 0.0 if critic is None else critic.norm(gradient_scale)
        finite, scale = math.isfinite(norm) and math.isfinite(values_norm), steps.scale
        scaled = {"loss_scale": scale.value, "steps_skipped": float(not finite)} if scale.on else Metrics()
        if not finite:
            if not steps.scale.overflowed():
                self._drop()
                raise NonFiniteError(f"the gradient norm of update {now.number} is {norm + values_norm}")
            self.measurements.noise.sums, self.measurements.cosines, norm = {}, {}, 0.0
        if self.plan.method.keeps_old and self.made < now.number:
            self.weights.snapshots.blend(OLD, self.plan.method.old_decay)
        if finite and critic is not None:
            critic.step(gradient_scale, values_norm)
        self.made, lr = now.number, factor * learning_rate(self.plan, now.number, self.stage)
        moved = steps.make(norm, lr, stores=compares)
        metrics = self.measurements.metrics(
            version=now.number - 1,
            loss_scale=loss_scale,
            token_scale=1 / max(counts.n_tokens, 1),
            gradient_scale=gradient_scale,
        )
        metrics |= self.passes.packing_metrics()
        self._drop()
        if norm > 0 and "drift/kl" in metrics:  # it is missing if the step had no token of the student
            now.measured.append({name: metrics[name] for name in MEASURED.values() if name in metrics})
        made = {"lr": lr} | ({"grad_norm": norm} if finite else {})
        return metrics | moved | scaled | made

    def _drop(self) -> None:
        """Drop gradients and measurements."""
        self.steps.drop_gradients()
        if self.critic is not None:
            self.critic.drop_gradients()
        self.measurements.drop()
        self.now.weighed = []

    # --- checkpoints -----------------------------------------------------------------------------------------

    def _save(self, path: Path, groups: Sequence[Group], optimizer: bool) -> None:
        drew = {version for group in groups for handle in group for version, _ in handle.header.versions}
        versions = set().union(*self.ranks.gathered(drew)) - {self.made} if optimizer else set[int]()
        by_teacher = {each.header.teacher_version for group in groups for each in group}
        following = self.now.next_coefficients(self.plan.method)
        state = State(
            update=self.made,
            critic={} if self.critic is None or not optimizer else self.critic.state(),
            coefficients={name: getattr(following, name) for name in self.plan.method.adaptive},
            groups=groups,
            **self.steps.state(),
            **self.weights.state(versions, set().union(*self.ranks.gathered(by_teacher))),
        )
        save(path, self.lm, self.tokenizer, self.ranks, state, self.steps.optimizer if optimizer else None)

    def _restore(self, path: Path) -> Sequence[Group]:
        state = restore(path, self.lm, self.ranks, lora=self.config.lora is not None)
        self.weights.restore(path, state)
        self.steps.restore(path, state)
        if self.critic is not None:
            self.critic.restore(path, state)
        coefficients = saved_coefficients(path, state, self.plan.method, self.now.coefficients)
        self.now, self.made = Update(coefficients=coefficients), state.update
        return state.groups


def compared(passes: Passes, samples: Sequence[Scored], teacher: str, *, temperature: float) -> Metrics:
    """Return metrics that compare recorded log-probs with the learner's, or with a following teacher's snapshot.

    `exact/…` are those without the rounding of the learner's own products, if these have fewer bits than its weights.
    """
    if teacher:
        seen = [replace(sample, rollout=with_prompt(sample.rollout, sample.seen)) for sample in samples]
        with unrounded(passes.lm.model):  # teachers are not quantised
            logp = passes.log_probs(seen, snapshot_of(teacher), temperature=temperature)
        return against_teachers(samples, logp)
    logp, exact = passes.log_probs(samples), Metrics()
    if passes.rounds:
        with passes.unrounded():
            drift = own_drift(samples, passes.log_probs(samples))
        exact = {f"exact/{name}": drift[f"drift/{name}"] for name in ("k3_kl", "ppl_ratio")}
    return own_drift(samples, logp) | against_teachers(samples, logp) | exact


def own_drift(samples: Sequence[Scored], logp: Sequence[Tensor]) -> Metrics:
    """Return metrics that compare the log-probs of the policies that drew with those of the learner."""
    own = [Seen.of(sample, unrejected(sample), logp_T) for sample, logp_T in zip(samples, logp, strict=True)]
    version = max(int(v) for sample in samples for v in sample.rollout.versions[sample.rollout.loss_mask])
    return drift_metrics(own, version=version) | sharpness(own)


def saved_coefficients(path: Path, state: State, method: Method, first: Coefficients) -> Coefficients:
    """Return the coefficients of a checkpoint; those that the method does not change are the first ones."""
    for name, setting in method.adaptive.items():
        if name not in state.coefficients:
            raise not_saved(path, f"the coefficient that {setting} changes", setting)
    return first._replace(**{name: state.coefficients[name] for name in method.adaptive})


def key_of(header: Header) -> Key:
    return header.number, header.index


def scored(handle: Handle) -> Scored:
    """Return the sample of a handle with its weight, and without a drift of its teacher that is of an earlier use.

    A rollout without teacher scores becomes a Scored without.
    """
    body, header = handle.body, handle.header
    sample = body if isinstance(body, Scored) else Scored(rollout=graded(handle))
    if sample.supervision_kl is not None and (header.moved is None or (not header.moved and header.aligned == 1)):
        sample = replace(sample, supervision_kl=None)
    return sample if sample.weight == header.weight else replace(sample, weight=header.weight)
