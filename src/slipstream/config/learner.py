"""Section `[learner]`: optimizer, batch, number formats, adapters and ranks."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from slipstream.config.base import THREADS, Beta, Dtype, Section
from slipstream.errors import ConfigError, did_you_mean


class LoraConfig(Section):
    rank: int = Field(16, ge=1)
    """Rank of the low-rank adapters."""
    alpha: float = Field(32.0, gt=0)
    """Numerator of the adapters' scale, which is alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers with an adapter, such as ["q_proj", "v_proj"]. "all-linear": all except the head."""

    def among(self, layers: Sequence[str], where: str = "learner.lora") -> list[str]:
        """Return the linear layers that get an adapter. Raise a ConfigError for an unknown target of `where`."""
        if self.targets == "all-linear":
            return list(layers)
        known = sorted({name.rpartition(".")[2] for name in layers})
        for target in self.targets:
            if target not in known:
                hint = did_you_mean(target, known)
                raise ConfigError(f"{where}.targets: {target!r} is no linear layer of this model; {hint}")
        return [name for name in layers if name.rpartition(".")[2] in self.targets]


class PerturbationConfig(Section):
    std: float = Field(1e-2, gt=0)
    """Initial standard deviation σ of the noise on the input of every layer."""
    lr: float = Field(5e-4, ge=0)
    """Learning rate of log σ, which each layer has for itself. 0 keeps σ."""


class LearnerConfig(Section):
    batch_size: int = Field(64, ge=1)
    """Number of samples in one update; a multiple of sampler.group."""
    lr: float = Field(1e-5, gt=0, le=1)
    """Peak learning rate of AdamW, after the warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW; 0 is off."""
    warmup: int = Field(0, ge=0)
    """Number of updates over which the learning rate rises linearly; 0 starts at lr."""
    decay: Literal["constant", "cosine"] = "constant"
    """Learning rate schedule after the warm-up: constant, or a cosine decay over the rest of the run."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest gradient norm. Larger gradients are scaled down (gradient clipping)."""
    minibatches: int = Field(1, ge=1)
    """Number of optimizer steps per pass over the samples of an update, each on an equal part of the groups."""
    epochs: int = Field(1, ge=1)
    """Number of passes over the samples of an update. With more than 1 the later passes are off-policy."""
    token_budget: int = Field(16384, ge=1)
    """Largest number of tokens, padding included, in one micro-batch. Lower it if memory runs out."""
    packing: bool = True
    """Put several sequences into one row; a sequence attends only to itself. The responses of a group share a row, in
    which their prompt is computed once. Write false for models without support."""
    dropout: bool = False
    """Train with the dropout rates of the model's config. false uses no dropout, so that learner and sampler compute
    the same policy."""
    checkpointing: bool = False
    """Recompute activations in the backward pass (gradient checkpointing): less memory, a third more time."""
    offload: tuple[Literal["optimizer", "activations"], ...] = ()
    """States that are in host memory while the GPU does not need them. optimizer: AdamW's moments, which come to the
    GPU for the step of their weight. activations: inputs of all layers between forward and backward pass; needs
    checkpointing. Empty keeps both on the GPU. Experimental: tried on CPUs only."""
    dtype: Dtype = "float32"
    """Number format of weights and gradients."""
    compute_dtype: Dtype | None = None
    """Number format of matrix products (autocast); weights keep dtype. Write "bfloat16" for speed. "float16" rounds
    eight times less than bfloat16 and uses a dynamic loss scale (docs/learner.md). None uses dtype."""
    quantised: bool = False
    """Compute with the weights as sampler.quantisation rounds them, so that learner and sampler are one policy (QaRL).
    AdamW changes the unrounded weights, with the gradient of the rounded ones (docs/learner.md)."""
    optimizer_dtype: Dtype | None = None
    """Number format of AdamW's moments. None uses dtype."""
    ranks: int = Field(1, ge=1)
    """Number of processes that share the learner; weights and optimizer states are sharded over them (FSDP)."""
    exact_drift: bool = False
    """Measure KL(current policy ‖ sampling policy) over the whole vocabulary: two more passes per weight version."""
    snapshots: int | None = Field(None, ge=0)
    """Number of old weight versions that stay in host memory, to recompute log-probs under the policy that sampled a
    token. None keeps as many as the method and the schedule need."""
    router: Literal["free", "measure", "replay_rollout", "replay_old"] = "free"
    """Experts that the learner's passes use, for a student with a mixture of experts. free: those that its routers
    choose. measure: the same, and the sampler records its choices, so that router/flips is known. replay_rollout (R3):
    those that the sampler recorded. replay_old (R2): those of the learner before the update's first step, or before its
    last update with policy.old = "previous"."""
    router_aux: Annotated[float, Field(gt=0)] | Literal["model"] | None = None
    """Coefficient of the auxiliary loss that spreads tokens over the experts. "model" takes router_aux_loss_coef of the
    student's config. None: no such loss."""
    lora: LoraConfig | None = None
    """Train low-rank adapters (LoRA) instead of all weights."""
    perturbation: PerturbationConfig | None = None
    """Learned noise on the input of every layer, in the training passes of a policy loss (ALP, docs/learner.md). Needs
    one rank, and loss.weight = 0 or loss.use = "advantage"."""
    threads: int | None = Field(None, ge=1, le=THREADS)
    """Number of CPU threads of the learner. None uses runtime.threads."""

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if len(set(self.offload)) < len(self.offload):
            raise ValueError(f"offload = {list(self.offload)} names a part twice: write each once")
        if "activations" in self.offload and not self.checkpointing:
            raise ValueError(
                'offload = ["activations"] moves the inputs of layers that the backward pass computes again: write '
                "checkpointing = true, too"
            )
        return self

    @property
    def records_router(self) -> bool:
        """Return whether samplers record the experts that their routers choose."""
        return self.router in ("measure", "replay_rollout")
