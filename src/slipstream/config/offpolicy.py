"""Sections `[sft]` and `[mix]`: responses that the student did not draw, before its own rollouts and beside them."""

from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from slipstream.config.base import Section
from slipstream.config.losses import DISTILLATION_LOSSES, CrossEntropy, SupervisedLoss

OFFERED = tuple(kind for row in get_args(get_args(SupervisedLoss)[0]) for kind in row.kinds())


def _check_path(source: str, path: str | None) -> None:
    if (source == "file") != (path is not None):
        raise ValueError('path names the file of source = "file": write both, or neither')


class SupervisedConfig(Section):
    updates: int = Field(50, ge=1)
    """Number of supervised updates at the start of the run. They count among the run's `updates`."""
    until: float | None = Field(None, gt=0, lt=1)
    """Bound of the student's probability mass on the teacher's top-k tokens (metric distill/student_mass), 0 … 1. The
    stage ends after the first supervised update whose mass is at least the bound; `updates` is then the upper limit.
    None makes all supervised updates."""
    source: Literal["data", "teacher", "file"] = "data"
    """Responses to learn from. data: the answers of the data, one for each prompt. teacher: sampler.group rollouts of
    the prompt's teacher for each prompt, by a native sampler that has the teacher's weights. file: up to sampler.group
    responses for each prompt, from `path`."""
    path: str | None = None
    """JSONL file for source = "file": one response per line, with the id of its prompt and its tokens; log-probs of the
    tokens may be left out (docs/warm_start.md)."""
    cache: str | None = None
    """Directory for the teacher's rollouts of source = "teacher". A resumed run, or another run with the same teacher,
    prompts, seed and sampling options, reads them instead of drawing them again. None stores none."""
    loss: SupervisedLoss = CrossEntropy()
    """Loss of the supervised updates: cross_entropy, or a distillation loss that needs no draws of the student."""
    lr: float | None = Field(None, gt=0, le=1)
    """Peak learning rate of the supervised updates, constant after their warm-up. None uses learner.lr."""
    warmup: int = Field(0, ge=0)
    """Number of supervised updates over which the learning rate rises linearly. learner.warmup and learner.decay begin
    after the supervised updates."""

    @field_validator("loss", mode="before")
    @classmethod
    def _check_draws(cls, loss: Any) -> Any:
        kind = loss.get("kind", "cross_entropy") if isinstance(loss, dict) else None
        if isinstance(kind, str) and kind in DISTILLATION_LOSSES and kind not in OFFERED:
            raise ValueError(
                f'kind = "{kind}" needs draws of the student, and there are none before its first rollout: write '
                f"{', '.join(OFFERED)}"
            )
        return loss if kind is None else {"kind": kind, **loss}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup > self.updates:
            raise ValueError(f"warmup = {self.warmup} is more than updates = {self.updates}: lower it")
        if self.until is not None and self.loss.spec.cache != "teacher_topk":
            now = f'loss.kind = "{self.loss.kind}"'
            now += f', loss.cache = "{cache}"' if (cache := getattr(self.loss, "cache", None)) else ""
            raise ValueError(
                f"until = {self.until:g} is a bound of the mass on the teacher's top-k tokens, and {now} does not "
                'compare these: write loss.cache = "teacher_topk" and loss.kind = "forward_kl", "jsd" or "common_topk"'
            )
        _check_path(self.source, self.path)
        if self.cache is not None and self.source != "teacher":
            raise ValueError('cache does nothing: it stores the rollouts of source = "teacher"; write that, or drop it')
        return self


class MixConfig(Section):
    source: Literal["data", "teacher", "file"] = "data"
    """Origin of the mixed-in responses. data: the answers of the data. teacher: rollouts of the prompt's teacher. file:
    trajectories with log-probs, from `path`."""
    share: float = Field(0.5, ge=0, le=1)
    """Share of the groups of an update that the student does not draw. GKD's λ is 1 − share."""
    final: float | None = Field(None, ge=0, le=1)
    """Share after `over` updates; it changes linearly from `share`. None keeps `share`."""
    over: int | None = Field(None, ge=1)
    """Number of updates over which the share changes from `share` to `final`. None uses all updates after [sft]."""
    path: str | None = None
    """JSONL file for source = "file": one trajectory per line, with the id of its prompt, its tokens and the log-prob
    of each token under the policy that drew it (docs/warm_start.md)."""
    prefix: float | None = Field(None, gt=0, lt=1)
    """Largest share of a known response with which a mixed-in group begins; the share is uniform from 0 to it. The
    student draws the rest, and learns only from what it draws. None mixes in whole responses."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.final is None and self.over is not None:
            raise ValueError("over does nothing without final, the share at its end: set that, or drop over")
        if self.final == self.share:
            raise ValueError(f"final = {self.final:g} is the share at the start: drop final")
        if self.share == 0 and self.final is None:
            raise ValueError("share = 0 mixes nothing in: raise it, or drop [mix]")
        _check_path(self.source, self.path)
        if self.prefix is not None and self.source == "teacher":
            raise ValueError(
                'prefix cuts responses that are known before the run, and source = "teacher" draws them in it: write '
                'source = "data" or "file"'
            )
        return self

    def share_at(self, update: int, updates: int) -> float:
        """Return the share in an update, counted from 0 after [sft]; `updates` is the number of these updates."""
        if self.final is None:
            return self.share
        done = min(1.0, update / (self.over or max(1, updates - 1)))
        return self.share + (self.final - self.share) * done
