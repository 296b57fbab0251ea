"""Section `[sampler]`: the engine that generates the rollouts, and how it samples."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from slipstream.config.base import Dtype, Quantisation, Replicas, Section, Temperature, Url, Variable, as_tuple
from slipstream.config.engines import EngineArgs


class ServerConfig(Section):
    url: Url
    """Root URL of the server, for example http://rollouts:8000, without /v1."""
    api: Literal["vllm", "sglang"] = "vllm"
    """HTTP interface of the server."""
    folder: str
    """Directory for published weights, which the server can read under the same path. It holds at most two versions."""
    api_key_env: Variable | None = None
    """Name of the environment variable that holds the server's key. None sends no key."""
    timeout: float = Field(600.0, gt=0)
    """Time limit in seconds of one request: a response, or the load of new weights."""

    @field_validator("url")
    @classmethod
    def _check_root(cls, url: str) -> str:
        if url.endswith("/v1"):
            raise ValueError("is the root of the server: write http://HOST:PORT, without /v1")
        return url

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, folder: str) -> str:
        if not folder.startswith("/"):
            raise ValueError(f"{folder!r}: the server starts in another directory: write an absolute path")
        return folder


class SpeculationConfig(Section):
    lookup: int = Field(3, ge=1, le=64)
    """Number of newest tokens that are looked up: the tokens after their latest earlier occurrence, in prompt or
    response, are proposed."""
    tokens: int = Field(4, ge=1, le=64)
    """Largest number of tokens that are proposed for a response, and verified in one pass."""
    least: float = Field(0.3, ge=0, lt=1)
    """Smallest share of the proposed tokens that must be accepted. Below it a sampler proposes tokens in few steps
    only, to notice when the share has risen. 0 always proposes them."""


class FusionConfig(Section):
    alpha: float = Field(0.5, ge=0.05, le=1)
    """Share of the teacher in the logits at the start: logits are alpha · teacher + (1 − alpha) · student."""
    updates: int | None = Field(None, ge=1)
    """Number of updates, after those of [sft], until the share is 0. It falls linearly; a rollout keeps the share with
    which it begins. None keeps it."""
    difficulty: bool = False
    """Multiply the share by the difficulty of the prompt: 1 minus the mean reward of its earlier answers. Needs
    data.order = "adaptive", which measures it."""

    def share(self, update: int, difficulty: float = 1.0) -> float:
        """Return the share in rollouts for an update, in steps of 0.05, so that many rows are drawn together."""
        left = 1.0 if self.updates is None else max(0.0, 1 - (update - 1) / self.updates)
        return round(self.alpha * left * difficulty * 20) / 20


class SamplerConfig(Section):
    engine: Literal["native", "vllm", "server"] = "native"
    """Inference engine that generates the rollouts. server: an HTTP server that runs elsewhere (docs/servers.md)."""
    server: ServerConfig | None = None
    """Rollout server, for engine = "server"."""
    engine_args: EngineArgs = Field({})
    """Arguments of vLLM's engine, for example gpu_memory_utilization = 0.8. With tensor_parallel_size = 2 each sampler
    runs on two GPUs. Only for engine = "vllm"."""
    max_tokens: int = Field(256, ge=1)
    """Largest number of tokens of a response with its end token, or of a whole episode with its observations."""
    group: int = Field(1, ge=1)
    """Number of responses to one prompt (G), rolled out and scored together. Most advantages of [policy] need more than
    1."""
    temperature: Temperature = 1.0
    """Sampling temperature of rollouts."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this probability mass; 1 keeps all. With truncation by top_p,
    top_k or min_p, importance weights need keep_mask = true."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens to sample from; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Minimum probability of a token, as a fraction of the most likely token's probability; 0 keeps all."""
    keep_mask: bool = False
    """Record the sampling support of each token: ids that top_p, top_k and min_p kept. Ratios and KLs are then
    exact."""
    teacher_replaces: int = Field(0, ge=0)
    """Number K for speculative knowledge distillation (SKD): a token that is not among the teacher's K most likely
    tokens at its position is replaced by a draw of the teacher among these K. The sampler holds a copy of the teacher.
    0: the student draws alone."""
    fusion: FusionConfig | None = None
    """Logit fusion: rollouts of a mixture of student and teacher, whose log-probs are recorded. The sampler holds a
    copy of the teacher. None: the student draws alone."""
    speculation: SpeculationConfig | None = None
    """Speculative sampling: propose tokens that occurred before, and verify several in one pass. It changes no token
    and no log-prob, and is faster where responses repeat themselves or their prompt. None proposes no tokens."""
    stop: Annotated[tuple[int | str, ...], BeforeValidator(as_tuple)] = ()
    """Further tokens at which a response stops, each as an id or as the text of one token, for example
    ["<|im_end|>"]. The trained student is saved with them. Empty: only the end tokens in the student's files."""
    max_length: int | None = Field(None, ge=2)
    """Largest number of tokens of a prompt with its response. None uses the longest sequence that the data allow. For
    models with several sets of position factors (longrope, dynamic) this length selects one set for the whole run."""
    replicas: Replicas = 1
    """Number of samplers. Each group goes to the least busy sampler. "auto" starts with one, adds samplers while the
    learner waits for groups and they help, and removes idle ones."""
    replicas_max: int = Field(8, ge=1)
    """Largest number of samplers that replicas = "auto" can choose."""
    slots: int = Field(64, ge=1)
    """Number of sequences that each sampler generates concurrently. Lower it if memory runs out."""
    dtype: Dtype = "float32"
    """Number format of weights and computations in the samplers."""
    quantisation: Quantisation | None = None
    """Eight-bit weights of the samplers' linear layers, made at every publish (docs/learner.md). The rollouts are of
    the quantised student, another policy than the learner's, and so are their log-probs. None: weights in dtype."""
    on_publish: Literal["rebuild", "reuse"] = "rebuild"
    """Treatment of the KV cache of running responses when new weights arrive. rebuild: compute the cache again with the
    new weights. reuse: keep the old cache, which costs nothing and is approximate. The recorded log-probs then are
    still those of the sampling policy, but no single set of weights reproduces them."""

    @property
    def asks_teacher(self) -> str:
        """Return the setting by which a teacher takes part in every draw; "" if none does."""
        return "teacher_replaces" if self.teacher_replaces else "fusion" if self.fusion is not None else ""

    @property
    def truncation(self) -> list[str]:
        """Return the names of the settings that leave tokens out of the sampling distribution."""
        return self.changed("top_p", "top_k", "min_p")
