"""What an update minimises, checked: every part of it does something, and no ratio counts twice (invariant 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.config.objective import LossConfig, PolicyConfig, ReferenceConfig
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.estimators.advantage import ADVANTAGES
from slipstream.estimators.correction import (
    PRESETS,
    RATIO_TO_BEHAVIOR,
    RATIO_TO_OLD,
    CorrectionPreset,
    check_combination,
)
from slipstream.estimators.methods import Scope
from slipstream.estimators.numerics import unknown
from slipstream.estimators.policy import LOSSES, scope_of

OURS = ("generator", "positive", "proximal_logp")
"""Options of policy losses that are tensors, and not for a config to give."""


@dataclass(frozen=True, kw_only=True)
class Method:
    loss: LossConfig
    policy: PolicyConfig | None = None
    correction: CorrectionPreset = PRESETS["disabled"]
    reference: ReferenceConfig | None = None
    teachers: Mapping[str, float] = field(default_factory=dict)
    """Weights of teachers by name; 1 where it is not here."""
    reward: str = ""
    """The reward that the policy loss is about."""
    temperature: float = 1.0
    """Of sampling: that of policy losses, corrections and drift."""
    max_tokens: int = 1
    """Longest response: the scale of seq-mean-token-sum-norm."""
    seed: int = 0

    @property
    def decoupled(self) -> bool:
        """The old policy is the learner at the version that drew a token, not what the sampler said of it."""
        return self.correction.mode == "decoupled"

    @property
    def previous(self) -> bool:
        """The old policy is the learner before its last update."""
        return self.policy is not None and self.policy.old == "previous"

    def rejects(self, mode: str) -> bool:
        return mode in (self.correction.rs or {})

    @property
    def reads_snapshots(self) -> bool:
        """Something is asked of the weights that drew a token."""
        return self.decoupled or self.rejects("seq_max_kl")

    @property
    def by_row(self) -> bool:
        """The policy loss must see whole rows."""
        if (policy := self.policy) is None:
            return False
        over_rows = (policy.aggregation or LOSSES[policy.loss].agg) == "seq-mean-token-mean"
        return over_rows or scope_of(policy.loss, policy.aggregation) == "row"

    @property
    def looks_first(self) -> bool:
        """Something must be known of a batch before its first gradient."""
        return self.policy is not None or self.correction.corrects or self.reference is not None

    @property
    def chooses(self) -> bool:
        """A batch-scope policy loss picks its tokens first."""
        return self.policy is not None and LOSSES[self.policy.loss].choose is not None

    @property
    def current_first(self) -> bool:
        """What the learner thinks of the tokens when they arrive must be known before its first step."""
        in_bypass = self.correction.corrects and not self.decoupled
        return self.chooses or self.proximal or in_bypass or self.rejects("negative_seq")

    @property
    def proximal(self) -> bool:
        return self.policy is not None and "proximal_logp" in LOSSES[self.policy.loss].options

    @property
    def scopes(self) -> dict[str, Scope]:
        """What each part must have in sight, by its name in the config."""
        found: dict[str, Scope] = {"correction": self.correction.scope}
        if self.policy is not None:
            found[f"policy.loss = {self.policy.loss}"] = scope_of(self.policy.loss, self.policy.aggregation)
            batch = ADVANTAGES[self.policy.advantage].scope == "batch"
            found[f"policy.advantage = {self.policy.advantage}"] = "batch" if batch else "row"
        return found

    @property
    def over_sequences(self) -> bool:
        """The policy loss is divided by sequences, and not by tokens."""
        policy = self.policy
        return policy is not None and (policy.aggregation or LOSSES[policy.loss].agg).startswith("seq")

    def __str__(self) -> str:
        parts = [f"{self.loss.weight:g} · {self.loss.kind}"] if self.loss.weight else []
        if self.policy is not None:
            parts.append(f"{self.policy.weight:g} · {self.policy.loss} on {self.policy.advantage} of {self.reward}")
        if self.reference is not None:
            parts.append(f"{self.reference.weight:g} · KL to the reference in the {self.reference.into}")
        preset = next((name for name, preset in PRESETS.items() if preset == self.correction), "of your own")
        return f"loss: {' + '.join(parts)}; correction: {preset}"


def method_of(config: Config) -> Method:
    policy, preset = config.policy, _correction(config)
    _check_correction(config, preset)
    method = Method(
        loss=config.loss,
        policy=policy,
        correction=preset,
        reference=config.reference,
        teachers={name: teacher.weight for name, teacher in config.teachers.items()},
        reward=config.task.reward or "",
        temperature=config.sampler.temperature,
        max_tokens=config.sampler.max_tokens,
        seed=config.seed,
    )
    if policy is not None:
        _check_policy(config, policy, method)
    _check_cut(config, method)
    if config.schedule.kind == "periodic":
        _check_parts(method)
    if config.learner.snapshots and not (config.learner.exact_drift or method.reads_snapshots):
        raise ConfigError(
            "learner.snapshots does nothing: neither a decoupled correction, seq_max_kl nor exact_drift reads them"
        )
    return method


def _correction(config: Config) -> CorrectionPreset:
    given = config.correction
    preset = PRESETS[given.preset]
    changes: dict[str, Any] = {"is_threshold": given.is_threshold, "rs": given.rs}
    if given.is_threshold is not None and preset.is_level is None:
        raise ConfigError(f"correction.is_threshold does nothing: preset {given.preset} has no importance weights")
    try:
        kept = {name: value for name, value in changes.items() if value is not None}
        return replace(preset, is_normalize=given.is_normalize, **kept)
    except ValueError as error:
        raise ConfigError(f"correction: {error}") from None


def _check_correction(config: Config, preset: CorrectionPreset) -> None:
    if config.policy is None and preset.is_level is not None:
        raise ConfigError(
            f"correction.preset = {config.correction.preset!r} weighs a policy loss, and there is none: choose one "
            "that only rejects (…_rs), or add [policy]"
        )
    if config.policy is None and "negative_seq" in (preset.rs or {}):
        raise ConfigError(
            "correction.rs.negative_seq rejects answers whose advantage is negative, and without [policy] there is "
            "none: drop it, or add [policy]"
        )
    if config.learner.snapshots == 0 and "seq_max_kl" in (preset.rs or {}):
        raise ConfigError(
            "correction.rs.seq_max_kl compares with the weights that drew a token, and learner.snapshots = 0 keeps "
            "none: leave it out, and as many are kept as the schedule needs"
        )
    try:
        if config.policy is not None:
            check_combination(config.policy.loss, preset, policy=True)
        elif preset.mode is not None:
            check_combination(config.loss.kind, preset)
    except ValueError as error:
        raise ConfigError(f"correction.preset = {config.correction.preset!r}: {error}") from None


def _check_policy(config: Config, policy: PolicyConfig, method: Method) -> None:
    known = [name for name in LOSSES[policy.loss].options if name not in OURS]
    for where, given, options in (
        (f"policy.options of {policy.loss}", policy.options, known),
        (
            f"policy.advantage_options of {policy.advantage}",
            policy.advantage_options,
            list(ADVANTAGES[policy.advantage].options),
        ),
    ):
        for name in given:
            if name not in options:
                raise ConfigError(str(unknown(where, name, options)) if options else f"{where}: it has none")
    if policy.old == "previous":
        if method.correction.mode is not None:
            raise ConfigError('policy.old = "previous" and correction.preset name two old policies: drop one')
        if policy.loss not in RATIO_TO_OLD | {"m2po", "dro"}:
            raise ConfigError(f'policy.old = "previous" does nothing: {policy.loss} has no ratio to an old policy')
    compares = ADVANTAGES[policy.advantage].scope == "group" or policy.advantage == "reinforce_plus_plus_baseline"
    if config.sampler.group == 1 and compares:
        raise ConfigError(
            f"policy.advantage = {policy.advantage!r} compares the answers to one prompt, and sampler.group = 1: "
            'write group = 8, say, or advantage = "reinforce_plus_plus"'
        )


def _check_cut(config: Config, method: Method) -> None:
    """What draws leave out makes the rest likelier than the whole distribution has it: no ratio between them is 1."""
    sampler = config.sampler
    whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    cut = [name for name, value in whole.items() if getattr(sampler, name) != value]
    if sampler.keep_mask and not cut:
        raise ConfigError("sampler.keep_mask does nothing: top_p, top_k and min_p leave out no token; drop it")
    if not cut or sampler.keep_mask or (who := _looks_at_behavior(config, method)) is None:
        return
    holder, instead = who
    named = " and ".join(f"sampler.{name} = {getattr(sampler, name)}" for name in cut)
    leaves = "leaves" if len(cut) == 1 else "leave"
    raise ConfigError(
        f"{named} {leaves} out tokens of the distribution that draws, and {holder} the ratio of a whole one to it, "
        "which is below 1 before anything is learned: write keep_mask = true, which sends along what is left, "
        f"or {', '.join(f'{name} = {whole[name]:g}' for name in cut)}, or {instead}"
    )


def _looks_at_behavior(config: Config, method: Method) -> tuple[str, str] | None:
    """The first part that compares with what drew the tokens, and what to write for one that does not."""
    loss, policy, reference = config.loss, method.policy, method.reference
    if loss.weight and loss.kind == "reverse_kl_mc" and loss.importance:
        return 'loss.kind = "reverse_kl_mc" weighs draws by', "loss.importance = false, or another loss.kind"
    if method.correction.is_level is not None or set(method.correction.rs or ()) - {"seq_max_kl"}:
        return f'correction.preset = "{config.correction.preset}" looks at', 'correction.preset = "disabled"'
    old_is_behavior = not (method.decoupled or method.previous)
    if policy is not None and old_is_behavior and policy.loss in RATIO_TO_OLD | RATIO_TO_BEHAVIOR | {"dro"}:
        return f'policy.loss = "{policy.loss}" holds', 'policy.loss = "reinforce"'
    if reference is not None and reference.into == "loss":
        return 'reference.into = "loss" weighs its KL by', "drop [reference]"
    if reference is not None and old_is_behavior:
        return 'reference.into = "reward" charges for', "drop [reference]"
    return None


def _check_parts(method: Method) -> None:
    """A periodic schedule learns from groups as they come: nothing may need the whole batch (invariant 5)."""
    for part, scope in method.scopes.items():
        if scope == "batch":
            raise ConfigError(
                f"{part} looks at the whole batch, and schedule.kind = 'periodic' learns from groups as they come: "
                "choose another, or schedule.kind = 'sync'"
            )
    if method.policy is not None and method.policy.aggregation == "token-sum":
        raise ConfigError(
            'policy.aggregation = "token-sum" is divided by nothing, and schedule.kind = "periodic" divides once, at '
            'the end: write "token-mean", or schedule.kind = "sync"'
        )
    by_tokens = method.loss.weight > 0 or (method.reference is not None and method.reference.into == "loss")
    if method.over_sequences and by_tokens:
        raise ConfigError(
            "the policy loss is divided by sequences and the rest by tokens, and schedule.kind = 'periodic' divides "
            'once, at the end: write policy.aggregation = "token-mean", or schedule.kind = "sync"'
        )
