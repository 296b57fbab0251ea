"""Forward passes of the student over packed rows: log-probs and KLs, for any stored version of its weights."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.engines.native.learning.student import Student, deterministic
from slipstream.engines.native.learning.weights import Snapshots, Version
from slipstream.engines.native.packing import Item, MicroBatch, pack
from slipstream.engines.native.ranks import Ranks
from slipstream.engines.native.rows import Rows, by_sample, over_tokens, placeholder
from slipstream.engines.settings import LearnerSettings
from slipstream.estimators.divergence import dense
from slipstream.estimators.logprobs import held, logprobs_and_entropy_at
from slipstream.estimators.logprobs.sampling_support import kept_logprobs_at, only
from slipstream.estimators.logprobs.tiles import Head, wide
from slipstream.estimators.numerics import joined
from slipstream.objective.columns import OLD, present, support_of
from slipstream.objective.sample_weights import Key
from slipstream.protocols import Metrics
from slipstream.records import Ints, Rollout, Scored

T = TypeVar("T")
Kind = Literal["forward", "reverse"]
"""Direction of a KL between policies: "forward" is KL(old ‖ current), "reverse" is KL(current ‖ old)."""


class Passes:
    def __init__(self, student: Student, snapshots: Snapshots, plan: LearnerSettings, ranks: Ranks) -> None:
        self.student, self.lm, self.routing, self.snapshots = student, student.lm, student.routing, snapshots
        self.config, self.temperature, self.ranks = plan.settings, plan.method.temperature, ranks
        self.tokens = Counter[str]()
        """Token counts (see `tokens_of`) of all passes since the last call of `packing_metrics`."""
        self.rounds = plan.settings.compute_dtype not in (None, plan.settings.dtype)
        """True: matrix products have fewer bits than the weights."""
        self.read = self.trained = 0
        """Tokens of all sequences that passed without and with a gradient, since the start."""

    def begin(self) -> None:
        """Begin an update: forget the experts of the old policy, and tokens of checks since the last step."""
        self.tokens = Counter()
        if self.routing is not None:
            self.routing.old.clear()

    def micro_batches(self, samples: Sequence[Scored], *, own: bool = True) -> Iterator[tuple[Rows, list[int]]]:
        """Yield rows and the indices of their samples; dummy rows (no indices) give all ranks equally many passes.

        `own`: the pass is one of the student, whose routers use the experts that `learner.router` says.
        """
        config, rollouts = self.config, [sample.rollout for sample in samples]
        batches = pack(
            rollouts,
            budget=config.token_budget,
            hidden=self.student.width,
            packing=config.packing,
        )
        missing = max(self.ranks.gathered(len(batches))) - len(batches)
        self.tokens += tokens_of(batches)
        length = sum(len(rollout.prompt.tokens) + len(rollout.tokens) for rollout in rollouts)
        if torch.is_grad_enabled():
            self.trained += length
        else:
            self.read += length
        for batch in batches:
            rows = Rows(rollouts, batch, self.lm.device)
            if self.routing is not None:
                rows.choices = self.routing.choices(rows, [samples[i] for i in batch.members], replays=own)
            yield rows, batch.members
        for _ in range(missing):
            yield dummy_rows(config.packing, self.lm.device), []

    def packing_metrics(self) -> Metrics:
        """Return metrics since the last call: shares of real tokens in rows and of tokens saved by shared prompts."""
        tokens = sum(self.ranks.gathered(self.tokens), Counter[str]())
        self.tokens = Counter()
        metrics = {"rows/filled": tokens["real"] / max(tokens["computed"], 1)}
        if self.config.packing:
            metrics["saved/prompt"] = 1 - tokens["real"] / max(tokens["apart"], 1)
        return metrics

    def precision(self) -> AbstractContextManager[Any]:
        if not self.rounds:
            return nullcontext()
        # sharded weights are freed after use; autocast's cached copies of them would stay
        cached, dtype = self.ranks.size == 1, getattr(torch, str(self.config.compute_dtype))
        return torch.autocast(self.lm.device.type, dtype=dtype, cache_enabled=cached)

    @contextmanager
    def unrounded(self) -> Iterator[None]:
        """Compute in the precision of the weights in this context."""
        self.rounds, before = False, self.rounds
        try:
            yield
        finally:
            self.rounds = before

    def log_probs(
        self, samples: Sequence[Scored], version: Version | None = None, *, temperature: float | None = None
    ) -> list[Tensor]:
        """Return log-probs [T] of emitted tokens, normalized over the recorded sampling support; 0 if masked."""
        logp = self._of_tokens(samples, [temperature or self.temperature], version)
        return [logp_T1[:, 0] for logp_T1 in logp]

    def log_probs_and_squares(self, samples: Sequence[Scored]) -> tuple[list[Tensor], list[Tensor]]:
        """Return log-probs [T] of emitted tokens and Σ_v π_v² [T] over the vocabulary, 0 at masked tokens; one pass.

        At half the temperature T a logit is 2x/T, so log Σπ² = lse(2x/T) − 2·lse(x/T) = 2·log π_T(y) − log π_{T/2}(y).
        """
        logp = self._of_tokens(samples, [self.temperature, self.temperature / 2])
        masks = [torch.from_numpy(sample.rollout.loss_mask) for sample in samples]
        squares = [
            (2 * logp_T2[:, 0] - logp_T2[:, 1]).exp().masked_fill(~mask_T, 0.0)
            for logp_T2, mask_T in zip(logp, masks, strict=True)
        ]
        return [logp_T2[:, 0] for logp_T2 in logp], squares

    def relative_entropies(self, samples: Sequence[Scored]) -> list[Tensor]:
        """Return the entropy [T] of the distribution over the vocabulary, divided by log V; 0 at masked tokens."""
        entropies = self.per_sample(samples, partial(relative_entropy, temperature=self.temperature))
        return over_tokens(torch.cat(entropies), [sample.rollout for sample in samples]) if entropies else []

    def _of_tokens(
        self, samples: Sequence[Scored], temperatures: Sequence[float], version: Version | None = None
    ) -> list[Tensor]:
        """Return for each sample the log-probs [T, temperatures] of its emitted tokens; 0 at masked tokens."""
        logp = self.per_sample(samples, partial(at_tokens, temperatures=temperatures), version)
        return over_tokens(torch.cat(logp), [sample.rollout for sample in samples]) if logp else []

    def log_probs_of_draws(
        self, samples: Sequence[Scored], version: Version | None = None, *, temperature: float
    ) -> list[Tensor]:
        """Return per sample log-probs [N, M] of all draws (ids sampled at one position); None: current weights."""
        return self.per_sample(samples, partial(at_draws, temperature=temperature), version)

    def beside(self, samples: Sequence[Scored], kind: str) -> list[Tensor]:
        """Return log-probs at the sampling temperature: [N, M] of the "draws", or [N, K] of the most likely tokens."""
        compute = at_draws if kind == "draws" else at_best
        return self.per_sample(samples, partial(compute, temperature=self.temperature))

    def per_sample(
        self,
        samples: Sequence[Scored],
        compute: Callable[[Tensor, Head, Sequence[Rollout]], Tensor],
        version: Version | None = None,
    ) -> list[Tensor]:
        """Return `compute`'s results at the trained tokens of each sample, in float64."""
        results: dict[int, Tensor] = {}
        for _, members, chosen, found_N in self._run(samples, compute, version):
            results |= zip(members, by_sample(found_N.cpu().double(), chosen), strict=True)
        return [results[i] for i in range(len(samples))]

    @torch.no_grad()
    def _run(
        self,
        samples: Sequence[Scored],
        compute: Callable[[Tensor, Head, Sequence[Rollout]], T],
        version: Version | None = None,
    ) -> Iterator[tuple[Rows, list[int], list[Rollout], T]]:
        """Make passes without gradient and dropout, with the weights of this version (None: the current weights).

        Yield, per micro-batch, its rows, the indices of its samples, their rollouts and the result of `compute`.
        """
        own = version is None or version == OLD or isinstance(version, int)
        weights = nullcontext() if version is None else self.snapshots.under(version)
        with weights, deterministic(self.lm.model), self.precision():
            for rows, members in self.micro_batches(samples, own=own):
                if not members:
                    self.student(rows, zero_loss)
                    continue
                chosen = [samples[i].rollout for i in members]
                result = self.student(rows, lambda h, head, chosen=chosen: compute(h, head, chosen))
                yield rows, members, chosen, result

    def gradient_norms(self, episodes: Sequence[Sequence[Scored]]) -> list[float]:
        """Return ‖∂ log π(y)/∂θ‖² of each episode y, over the trained weights θ. Gradients stay as they are."""
        parameters = [each for each in self.lm.model.parameters() if each.requires_grad]
        before, norms = [each.grad for each in parameters], list[float]()
        for samples in episodes:
            for each in parameters:
                each.grad = None
            with deterministic(self.lm.model), self.precision():
                for rows, members in self.micro_batches(samples):
                    if not len(rows.predict_N):
                        continue
                    chosen = [samples[i].rollout for i in members]
                    logp_N1 = self.student(rows, partial(at_tokens, rollouts=chosen, temperatures=[self.temperature]))
                    logp_N1.sum().backward()
            grads = [each.grad for each in parameters if each.grad is not None]
            squares = [grad.norm(dtype=torch.float64).square() for grad in grads]
            norms.append(float(torch.stack(squares).sum()) if squares else 0.0)
        for each, grad in zip(parameters, before, strict=True):
            each.grad = grad
        return norms

    def experts_of(self, samples: Mapping[Key, Scored], *, old: bool, snapshot: bool) -> list[Ints] | None:
        """Return the experts that samples use in an update, if they are needed; with `old` also fix them.

        `snapshot`: they are those that the old policy chooses.
        """
        if self.routing is None or not (old or self.routing.balance):
            return None
        experts = self.experts(list(samples.values()), OLD if snapshot else None)
        if old:
            self.routing.old |= zip(samples, experts, strict=True)
        return experts

    def experts(self, samples: Sequence[Scored], version: Version | None = None) -> list[Ints]:
        """Return for each sample the experts that its pass uses, for each token before its last, [T, R, X]."""
        experts: dict[int, Ints] = {}
        assert self.routing is not None
        for rows, members, _, _ in self._run(samples, lambda hidden_NH, head, chosen: hidden_NH.sum(), version):
            experts |= zip(members, self.routing.used(rows), strict=True)
        return [experts[i] for i in range(len(samples))]

    def rollout_kl(self, samples: Sequence[Scored], version: int, *, kinds: Sequence[Kind]) -> list[Tensor]:
        """Return for each sample exact KLs [T, kinds] between the current policy and a snapshot; 0 at masked tokens."""
        heads: list[tuple[Tensor, Tensor | None]] = []

        def keep(hidden_NH: Tensor, head: Head, chosen: Sequence[Rollout]) -> Tensor:
            if not heads:
                heads.append((head.weight.clone(), None if head.bias is None else head.bias.clone()))
            return hidden_NH

        def kl_to(before_NH: Tensor, head: Head, chosen: Sequence[Rollout]) -> Tensor:
            hidden_NH, (weight, bias) = current.pop(0).to(before_NH.device), heads[0]
            support = support_of(chosen, hidden_NH.device)
            parts = [hidden_NH.new_empty(0, len(kinds))]
            size = max(1, held(hidden_NH) // len(weight))
            for start in range(0, len(hidden_NH), size):
                rows = slice(start, min(start + size, len(hidden_NH)))
                both = [head(hidden_NH[rows], weight, bias), head(before_NH[rows])]
                if support is not None:
                    support_CK = support[rows]
                    both = [only(x_CV, support_CK) for x_CV in both]
                logp_CV, old_CV = ((x_CV.to(wide(x_CV)) / self.temperature).log_softmax(-1) for x_CV in both)
                parts.append(torch.stack([dense(logp_CV, old_CV, kind=kind) for kind in kinds], 1))
            return torch.cat(parts)

        kl: dict[int, Tensor] = {}
        # in host memory, since they are those of the whole update and not of a pass
        current = [hidden_NH.cpu() for _, _, _, hidden_NH in self._run(samples, keep)]
        for _, members, chosen, kl_N in self._run(samples, kl_to, version):
            kl |= zip(members, over_tokens(kl_N.cpu(), chosen), strict=True)
        return [kl[i] for i in range(len(samples))]


def at_tokens(hidden_NH: Tensor, head: Head, rollouts: Sequence[Rollout], *, temperatures: Sequence[float]) -> Tensor:
    """Return log-probs [N, temperatures] of the emitted tokens."""
    ids_N = joined([rollout.tokens[rollout.loss_mask] for rollout in rollouts], hidden_NH.device, torch.int64)
    return torch.cat([_at_ids(hidden_NH, head, rollouts, ids_N[:, None], each) for each in temperatures], 1)


def at_draws(hidden_NH: Tensor, head: Head, rollouts: Sequence[Rollout], *, temperature: float) -> Tensor:
    """Return log-probs [N, M] of all draws at trained tokens."""
    ids_NM = joined([rollout.actions for rollout in rollouts], hidden_NH.device, torch.int64)
    return _at_ids(hidden_NH, head, rollouts, ids_NM, temperature)


def at_best(hidden_NH: Tensor, head: Head, rollouts: Sequence[Rollout], *, temperature: float) -> Tensor:
    """Return log-probs [N, K] of the sampler's most likely tokens at trained tokens."""
    ids_NK = joined([present(rollout.best_ids) for rollout in rollouts], hidden_NH.device, torch.int64)
    return _at_ids(hidden_NH, head, rollouts, ids_NK, temperature)


def relative_entropy(hidden_NH: Tensor, head: Head, rollouts: Sequence[Rollout], *, temperature: float) -> Tensor:
    """Return the entropy [N] of the distribution over the vocabulary, divided by its maximum, log V."""
    ids_N = joined([rollout.tokens[rollout.loss_mask] for rollout in rollouts], hidden_NH.device, torch.int64)
    hidden_NH, weight, bias = head.inputs(hidden_NH)
    options: dict[str, Any] = {"temperature": temperature, "bias": bias, **head.bend}
    _, entropy_N = logprobs_and_entropy_at(hidden_NH, weight, ids_N[:, None], **options)
    return entropy_N / math.log(len(weight))


def _at_ids(hidden_NH: Tensor, head: Head, rollouts: Sequence[Rollout], ids_NM: Tensor, temperature: float) -> Tensor:
    """Return log-probs [N, M] of these ids, normalized over the sampling support if it is recorded."""
    hidden_NH, weight, bias = head.inputs(hidden_NH)
    support = support_of(rollouts, hidden_NH.device)
    return kept_logprobs_at(hidden_NH, weight, ids_NM, support, temperature=temperature, bias=bias, **head.bend)


def tokens_of(batches: Sequence[MicroBatch]) -> Counter[str]:
    """Count tokens: computed (with padding), real, and apart (if each sample had its own copy of the prompt)."""
    items = [item for batch in batches for row in batch.rows for item in row]
    return Counter(
        computed=sum(batch.computed for batch in batches),
        real=sum(batch.real for batch in batches),
        apart=sum(item.apart for item in items),
    )


def dummy_rows(packed: bool, device: torch.device) -> Rows:
    """Return rows of two tokens, for a rank that has no samples left: all ranks must make equally many passes."""
    token = np.zeros(1, np.int64)
    item = Item(prompt=1, responses=(1,), members=(0,))
    return Rows([placeholder(token, token)], MicroBatch(((item,),), packed), device)


def zero_loss(hidden_NH: Tensor, head: Head) -> Tensor:
    """Return a loss that gives every weight a gradient of exactly zero."""
    loss: Tensor = 0.0 * head(hidden_NH).sum()
    return loss
