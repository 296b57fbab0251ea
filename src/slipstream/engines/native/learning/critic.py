"""Critic: a value head on the student's last hidden state, or on that of a model of its own.

The head is a linear function with an optimizer of its own. It is no part of the student: it is never published, and
every rank has the whole of it. A model of its own is sharded over the ranks as the student is, and makes its own
passes, so that no gradient of the values reaches the student.

Shapes: N trained tokens, H hidden size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config.objective import CriticConfig
from slipstream.engines.native.learning.passes import Passes
from slipstream.engines.native.learning.step import Steps
from slipstream.engines.native.learning.storage import State, moments_of, not_saved
from slipstream.engines.native.learning.student import Student
from slipstream.engines.native.learning.weights import Snapshots
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.ranks import Ranks, slice_of
from slipstream.engines.native.rows import over_tokens
from slipstream.engines.settings import LearnerSettings
from slipstream.estimators.logprobs import merge_metrics
from slipstream.estimators.numerics import joined
from slipstream.estimators.values import value_loss
from slipstream.objective.constants import UpdateConstants
from slipstream.records import Counts, Scored, one_turn

CLIP_NORM = 1.0
"""Largest norm of the head's gradient."""
CUT = ("length", "turns", "time")
"""Reasons for an end that a limit has caused, so that rewards might have come later."""
WEIGHTS, MOMENTS = "model/", "moments/"
"""Beginnings of the names of tensors of the critic's own model in a checkpoint."""


class ValueHead:
    def __init__(self, config: CriticConfig, width: int, like: Tensor, ranks: Ranks) -> None:
        """Begin with the value 0 for every state, on the device of `like` and in at least float32."""
        self.config, self.ranks = config, ranks
        wide = torch.promote_types(like.dtype, torch.float32)
        self.weight = torch.nn.Parameter(torch.zeros(width + 1, dtype=wide, device=like.device))
        """Weights [H] and bias."""
        self.optimizer = torch.optim.AdamW([self.weight], lr=config.lr, weight_decay=0.0)

    def __call__(self, hidden_NH: Tensor) -> Tensor:
        """Return the value [N] of each state, in at least float32 under every autocast."""
        wide_NH = hidden_NH.to(torch.promote_types(hidden_NH.dtype, torch.float32))
        weight = self.weight.to(wide_NH.dtype)
        return (wide_NH * weight[:-1]).sum(-1) + weight[-1]

    def loss(
        self, hidden_NH: Tensor, samples: Sequence[Scored], constants: Sequence[UpdateConstants], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the value loss of a micro-batch, and metrics."""
        values_N = self(hidden_NH)
        drawn = [
            each.mask_T & (not sample.rollout.prompt.source) for each, sample in zip(constants, samples, strict=True)
        ]
        masks = [sample.rollout.loss_mask for sample in samples]

        def of(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
            arrays = [each.cpu().numpy()[mask_T] for each, mask_T in zip(tensors, masks, strict=True)]
            return joined(arrays, values_N.device, dtype)

        old_N, returns_N = (
            of([each.columns[name] for each in constants], values_N.dtype) for name in ("values", "returns")
        )
        weights = [
            torch.full(each.mask_T.shape, sample.weight) for each, sample in zip(constants, samples, strict=True)
        ]
        loss, metrics = value_loss(
            values_N,
            old_N,
            returns_N,
            of(drawn, torch.bool),
            clip=self.config.clip,
            n_tokens=counts.n_tokens,
            weight_N=of(weights, values_N.dtype),
        )
        return loss, {f"critic/{name}": x for name, x in metrics.items()}

    def step(self, factor: float) -> None:
        """Multiply the sum of all ranks' gradients by a factor, clip it, and make a step, unless all are 0."""
        own = torch.zeros_like(self.weight) if self.weight.grad is None else self.weight.grad
        total = sum((each.to(own) for each in self.ranks.gathered(own)), torch.zeros_like(own)) * factor
        if total.any():
            self.weight.grad = total * min(1.0, CLIP_NORM / (float(total.norm()) + 1e-6))
            self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        return {"weight": self.weight.detach(), **self.optimizer.state.get(self.weight, {})}

    def load(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.weight.copy_(state["weight"])
        moments: dict[str, Any] = {name: value for name, value in state.items() if name != "weight"}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": {0: moments} if moments else {}})


class Critic:
    """Value head, and the passes whose hidden states it reads: the student's, or those of a model of its own."""

    def __init__(self, config: CriticConfig, student: Passes, plan: LearnerSettings, lm: LanguageModel | None) -> None:
        self.config, self.passes = config, student
        self.steps: Steps | None = None
        """Optimizer of the critic's own model; None: the value head is on the student."""
        if lm is not None:
            settings = config.settings_of_model(plan.settings)
            freeze_head(lm)
            model = Student(lm, settings, student.ranks)
            self.passes = Passes(model, Snapshots(lm.model), replace(plan, settings=settings), student.ranks)
            self.steps = Steps(list(self._trained.values()), settings, student.ranks, None)
        like = torch.empty(0, dtype=self.passes.lm.head.weight.dtype, device=student.lm.device)
        self.head = ValueHead(config, self.passes.student.width, like, student.ranks)

    @property
    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained weights of the critic's own model."""
        return {name: each for name, each in self.passes.lm.model.named_parameters() if each.requires_grad}

    def values(self, samples: Sequence[Scored]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values of each sample's tokens, [T], and the value after its last token.

        The value after a sample is 0, unless a limit has cut the sample and `critic.bootstrap` is true.
        """
        values = self._of_tokens(samples)
        at = [i for i, sample in enumerate(samples) if sample.rollout.finish in CUT] if self.config.bootstrap else []
        last = [torch.zeros((), dtype=torch.float64)] * len(samples)
        for i, end_T in zip(at, self._of_tokens([with_end(samples[i]) for i in at]), strict=True):
            last[i] = end_T[-1]
        return over_tokens(torch.cat(values), [sample.rollout for sample in samples]) if values else [], last

    def _of_tokens(self, samples: Sequence[Scored]) -> list[Tensor]:
        return self.passes.per_sample(samples, lambda hidden_NH, head, chosen: self.head(hidden_NH))

    def added_to(
        self,
        found: tuple[Tensor, dict[str, Tensor]],
        hidden_NH: Tensor,
        samples: Sequence[Scored],
        constants: Sequence[UpdateConstants],
        counts: Counts,
        *,
        warming: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the value loss to the student's loss of a micro-batch; while the critic warms up, it is the only one."""
        loss, metrics = found[0] * (not warming), found[1]
        if self.steps is not None:
            return loss, metrics
        alone = warming or not self.config.weight
        part, measured = self.head.loss(hidden_NH.detach() if alone else hidden_NH, samples, constants, counts)
        return loss + part * (1.0 if alone else self.config.weight), metrics | measured

    def accumulate(
        self, samples: Sequence[Scored], constants: Sequence[UpdateConstants], counts: Counts, *, scale: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add `scale` times the gradient of the value loss to the critic's own model; return the loss, and metrics."""
        total, metrics = torch.zeros((), dtype=torch.float64, device=self.passes.lm.device), dict[str, Tensor]()
        for rows, members in self.passes.micro_batches(samples) if self.steps is not None else ():
            chosen, decided = [samples[i] for i in members], [constants[i] for i in members]
            with self.passes.precision():
                if members and len(rows.predict_N):
                    loss, measured = self.passes.student(
                        rows,
                        lambda h, head, chosen=chosen, decided=decided: self.head.loss(h, chosen, decided, counts),
                    )
                else:
                    loss, measured = self.passes.student(rows, lambda h, head: 0.0 * h.sum()), {}
            (loss * scale).backward()
            total += loss.detach()
            merge_metrics(metrics, measured)
        return total, metrics

    def norm(self, factor: float) -> float:
        """Multiply the gradients of the critic's own model by a factor; return their norm."""
        return 0.0 if self.steps is None else self.steps.norm(factor, limit=None)[0]

    def step(self, factor: float, norm: float) -> None:
        """Make a step of the head, whose gradient is multiplied by the factor, and of the model with this norm."""
        self.head.step(factor)
        if self.steps is not None:
            self.steps.make(norm, self.config.backbone_lr, stores=False)

    def drop_gradients(self) -> None:
        self.head.optimizer.zero_grad()
        if self.steps is not None:
            self.steps.drop_gradients()

    def tensors(self) -> Iterable[Tensor]:
        """Return the weights, gradients and moments of the critic's own model."""
        return () if self.steps is None else [*self.passes.lm.model.parameters(), *self.steps.tensors()]

    def state(self) -> dict[str, Tensor]:
        """Return the head, and the trained weights and moments of its own model; all ranks must call this."""
        if self.steps is None:
            return self.head.state()
        weights = self.passes.ranks.on_first(self._trained)
        own = {WEIGHTS: weights, MOMENTS: moments_of(self.steps.optimizer)}
        return self.head.state() | {f"{part}{name}": x for part, named in own.items() for name, x in named.items()}

    def restore(self, path: Path, found: State) -> None:
        """Continue with the state of the checkpoint at `path`, whose run may have had another critic."""
        parts: dict[str, dict[str, Tensor]] = {"": {}, WEIGHTS: {}, MOMENTS: {}}
        for name, value in found.critic.items():
            part = next(part for part in (WEIGHTS, MOMENTS, "") if name.startswith(part))
            parts[part][name.removeprefix(part)] = value
        if not parts[""]:
            raise not_saved(path, "the values of a critic", "[critic]")
        if bool(parts[WEIGHTS]) != (self.steps is not None):
            raise not_saved(path, "the values of this critic", "critic.model")
        self.head.load(parts[""])
        if self.steps is not None:
            with torch.no_grad():
                for name, own in self._trained.items():
                    own.copy_(slice_of(parts[WEIGHTS][name], own))
            self.steps.restore(path, found._replace(moments=parts[MOMENTS]))


def freeze_head(lm: LanguageModel) -> None:
    """Exclude an output head from training, unless the backbone has the same weight as embedding: values skip it."""
    shared = {id(each) for each in lm.backbone.parameters()}
    for each in lm.head.linear.parameters():
        each.requires_grad_(id(each) in shared and each.requires_grad)


def with_end(sample: Scored) -> Scored:
    """Return a sample whose last trained token follows the whole response: its state is the end of the response.

    No sample of the update has its index.
    """
    rollout = sample.rollout
    tokens = np.append(rollout.tokens, rollout.tokens[-1:])
    drawn: dict[str, Any] = {"actions": tokens[:, None], "action_logp": np.zeros((len(tokens), 1))}
    drawn["versions"] = np.zeros(len(tokens), np.int32)
    return Scored(rollout=one_turn(rollout.prompt, -1 - rollout.index, finish=rollout.finish, **drawn))
