"""The registry of metrics: one row for every number in metrics.jsonl.

A run writes no other names. Displays, reports and studies take titles, units and number formats from these rows, and
docs/metrics.md is generated from them (`python tools/pages.py`). A word in capitals is a placeholder, explained in
PLACEHOLDERS. A healthy range is a rule of thumb for people; no code decides by it.
"""

import re
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Literal

PLACEHOLDERS = {
    "N": (r"\d+", "a number"),
    "LAGS": (r"\d+(?:-\d+)?", "a range of lags: 0, 1, 2-3, 4-7 …"),
    "STAGE": (r"rollout|score|learn", "a stage: rollout, score, learn"),
    "WORKER": (r"(?:sampler|scorer|learner)(?:-\w+)*", "a worker, with the name that trace.json uses"),
    "TEACHER": (r"\w+", "a teacher's name in the config"),
    "ENVIRONMENT": (r"\w+", "an environment's name in the config, [environments.NAME]"),
    "REWARD": (
        r"\w+(?:/\w[\w.-]*)?",
        "a reward of task.reward; NAME/PART is a component of that reward; greedy_… is the reward of the greedy answer",
    ),
    "CAUSE": (
        r"timeout|crash|error|nan|type|length|refused|endpoint",
        "the reason for a missing answer or reward: timeout, crash, error, nan, type, length, refused, endpoint",
    ),
    "GUARD": (r"length_surge|ess|entropy|gac", "a guard of the learning rate: length_surge, ess, entropy, gac"),
    "ORIGIN": (r"data|teacher|file", "the origin of a response: data, teacher, file"),
    "NAME": (r"[\w/]+", "a name that the environment defines"),
    "MODE": (r"(?:token|seq_sum|seq_mean|seq_max)_(?:k[123]|kl)|negative_seq", "a rejection mode of correction.rs"),
    "REASON": (r"[a-z_ ]+", "the reason why a group was dropped, as in ledger.jsonl"),
}
NATS, SHARE = "nats per token", "share"
SHARE_REWARDS = ("exact", "math")
"""Rewards that are always 0 or 1. User-defined rewards may have any value."""


@dataclass(frozen=True, slots=True)
class Band:
    """The healthy range of a metric: at least `low`, or at most `high`. One of the two limits is None."""

    low: float | None
    high: float | None
    but: str = ""
    """Text that follows the limit, such as an exception or a second threshold."""

    def __str__(self) -> str:
        return (f"above {self.low:g}" if self.high is None else f"below {self.high:g}") + self.but

    def __contains__(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


def above(low: float, but: str = "") -> Band:
    return Band(low, None, but)


def below(high: float, but: str = "") -> Band:
    return Band(None, high, but)


@dataclass(frozen=True, slots=True)
class Metric:
    names: str
    """One name, or several names with the same meaning, separated by spaces."""
    meaning: str
    healthy: str | Band
    """Healthy range, or a text that says which direction is better."""
    source: str
    """File that computes the metric, relative to src/slipstream."""
    section: str = ""
    """Section of a report that has a figure of the first name; empty for none."""
    title: str = ""
    """Title of the figure; {} stands for the text in place of the placeholder."""
    unit: str = ""
    _: KW_ONLY
    label: str = ""
    """Name in the terminal display; empty for a metric that is not displayed."""
    format: str = ".3g"
    """Number format in the terminal display; a share is shown in percent."""
    exact: bool = False
    """True for a metric that is set and not measured: it has no noise, so it is drawn without a moving mean."""
    idle: float | None = None
    """Value while nothing happens; a metric that always has this value gets no figure. None: it always gets one."""

    @property
    def is_share(self) -> bool:
        return self.unit == SHARE

    @property
    def is_total(self) -> bool:
        """True for a number that counts from the beginning of the run, as the meanings of these metrics say."""
        return " so far" in self.meaning or self.meaning.endswith(" since the run began")

    @property
    def band(self) -> Band | None:
        return self.healthy if isinstance(self.healthy, Band) else None

    def text(self, value: float) -> str:
        is_share = self.is_share and (self.names != "accuracy" or 0 <= value <= 1)  # of a reward that may be any number
        return f"{value:.1%}" if is_share else format(value, self.format)


class By:
    """Files that compute metrics."""

    HEADERS, LEDGER, EVALUATE = "metrics.py", "pipeline/ledger.py", "pipeline/evaluate.py"
    STAGES, PUBLISH, STEERING = "pipeline/stages.py", "pipeline/publish.py", "pipeline/steering.py"
    GUARDS, FRESHNESS = "pipeline/control/guards.py", "pipeline/control/buffer_refresh.py"
    CANARY, SCORE_CHECKS = "pipeline/canary_rounds.py", "engines/score_checks.py"
    LEARNER, PASSES = "engines/native/learning/learner.py", "engines/native/learning/passes.py"
    FIRST_PASSES, STUDENT = "engines/native/learning/first_passes.py", "engines/native/learning/student.py"
    MEASUREMENTS, STEP = "engines/native/learning/measurements.py", "engines/native/learning/step.py"
    LOSS, CONSTANTS, DISTILLATION = "objective/loss.py", "objective/constants.py", "objective/distillation.py"
    SURROGATE, DIVERGENCE, DRIFT = "estimators/surrogate.py", "estimators/divergence.py", "estimators/drift.py"
    CORRECTION, AUXILIARY = "estimators/correction.py", "estimators/auxiliary.py"
    POLICY, BATCH = "estimators/policy/__init__.py", "estimators/policy/batch.py"
    VALUES, COLUMNS = "estimators/values.py", "objective/columns.py"


def gap(name: str, meaning: str, healthy: str | Band = "–", *figure: str) -> Metric:
    return Metric(f"drift/{name} mismatch/{name}", meaning, healthy, By.DRIFT, *figure)


VOCABULARY: dict[str, tuple[Metric, ...]] = {
    "The loss": (
        Metric("teacher/kl",
               "reverse KL from the policy that sampled the tokens to the teacher, estimated on the sampled tokens",
               "falls; never below 0 by more than its error", By.HEADERS,
               "learning", "KL to the teacher", NATS, label="KL to teacher", format=".3f"),
        Metric("teacher/kl_error teacher/TEACHER/kl_error", "standard error of teacher/kl", "–", By.HEADERS),
        Metric("teacher/forward_kl",
               "forward KL from teacher to student, estimated on responses that the teacher drew, before the update",
               "falls, also where the reverse KL rises; below 0 by noise only", By.LOSS,
               "learning", "Forward KL on the teacher's answers", NATS),
        Metric("loss", "total loss: the weighted sum of all parts", "falls; stays level with RL", By.LOSS,
               "learning", "Loss", NATS, label="loss", format=".4f"),
        Metric("grad_norm", "gradient norm before clipping", "mostly below learner.clip_norm", By.LEARNER,
               "learning", "Gradient norm", "before clipping", label="gradient norm"),
        Metric("step_rms",
               "root mean square of AdamW's step divided by `lr`, without weight decay: near 1 if gradients keep "
               "their direction, less if they are noisy or shrink", "level after the first updates",
               By.STEP),
        Metric("gradient/signal",
               "‖ḡ‖²: ḡ is the gradient of a vector added to every last hidden state, averaged over a step's N groups",
               "–", By.MEASUREMENTS),
        Metric("gradient/power", "E‖g‖² of the same gradients, group by group: signal plus noise", "–",
               By.MEASUREMENTS),
        Metric("gradient/noise", "(power − signal)/(N − 1): the variance of ḡ",
               "below the signal, else use larger batches; does not rise with corrections on", By.MEASUREMENTS),
        Metric("gradient/cosine",
               "cosine of the gradients of the fresher and the staler half of the first step's samples, with "
               "[guards.gac]", "as in a run with a small tau", By.MEASUREMENTS,
               "noise", "Cosine of fresh and stale gradients", "cosine"),
        Metric("loss_scale", 'factor of the loss in the backward pass, with learner.compute_dtype = "float16"',
               "level, or rising", By.LEARNER),
        Metric("steps_skipped",
               "share of the update's optimizer steps that were skipped, because gradients overflowed in float16",
               "0, except in a few updates", By.LEARNER),
        Metric("perturbation/std", "mean standard deviation of the noise on the layers, with [learner.perturbation]",
               "–", By.STEP),
        Metric("gradient/cosine_previous",
               "cosine of the gradients of this update and the previous one before a projection, with guards.gac.limit",
               "near 0", By.STEP),
        Metric("student/entropy", "entropy of the student, at the temperature of the loss", "does not collapse to 0",
               By.LOSS, "learning", "Entropy of the student", NATS, label="entropy", format=".3f"),
        Metric("student/repeated",
               "share of the 4-grams of a response of the student that occur earlier in it, mean over responses",
               "near that of the teacher's text; a rise while the loss falls means that the text degenerates",
               By.HEADERS, "learning", "Repeated 4-grams in responses", SHARE, label="repeated"),
        Metric("student/distinct",
               "number of different tokens of a response of the student, divided by its length, mean over responses",
               "near that of the teacher's text", By.HEADERS,
               "learning", "Different tokens in responses", SHARE),
        Metric("lr", "learning rate of the update, after the guards' factors", "–", By.LEARNER,
               "learning", "Learning rate", "per step", exact=True),
        Metric("reference/kl", "KL to the student as it was at the start of the run", "depends on the task",
               By.AUXILIARY,
               "learning", "KL to the initial student", NATS, label="KL to reference", format=".3f"),
        Metric("reference/beta", "coefficient of reference/kl, where it is adapted", "settles", By.CONSTANTS),
        Metric("distill/loss", "distillation loss per trained token, before loss.weight", "falls", By.LOSS),
        Metric("distill/loss_abs", "mean absolute distillation loss per trained token", "falls", By.LOSS),
        Metric("distill/loss_min distill/loss_max", "smallest and largest loss of a token", "no jumps", By.LOSS),
        Metric("distill/ratio",
               "mean importance ratio p_current / p_behaviour of the draws (extra tokens sampled at the same position)",
               "near 1", By.SURROGATE),
        Metric("distill/ratio_p99", "99th percentile of these ratios, within 0.5 %", below(2), By.SURROGATE),
        Metric("distill/ratio_max", "largest importance ratio of a draw", below(10), By.SURROGATE),
        Metric("distill/advantage", "mean of log q − log p over the draws", "rises towards 0", By.SURROGATE),
        Metric("distill/clip_fraction", "share of draws that loss.clip or loss.ratio_cap changes", below(0.2),
               By.SURROGATE, "learning", "Clipped draws", SHARE, idle=0.0),
        Metric("distill/weight", "decoupled_ppo: mean of p_proximal / p_behaviour over the draws", "near 1",
               By.SURROGATE),
        Metric("distill/second_moment distill/second_moment_before",
               "mean (log ratio)² of the draws after and before m2po", "–", By.SURROGATE),
        Metric("distill/masked_fraction", "share of draws that m2po masked", below(0.1), By.SURROGATE,
               "learning", "Draws masked by m2po", SHARE, idle=0.0),
        Metric("distill/dropped_fraction", "decoupled_ppo: share of draws above loss.weight_cap", below(0.1),
               By.SURROGATE, "learning", "Draws above loss.weight_cap", SHARE, idle=0.0),
        Metric("distill/budget_missed", "1 where m2po could not meet its budget, else 0", "0", By.SURROGATE),
        Metric("distill/student_mass distill/student_mass_min distill/student_mass_max",
               "the student's probability mass on the compared token ids: mean, smallest, largest",
               "mean above 0.9, else increase loss.k", By.DIVERGENCE,
               "learning", "Student's probability mass on the compared ids", SHARE),
        Metric("distill/teacher_mass distill/teacher_mass_min distill/teacher_mass_max",
               "the teacher's probability mass on the compared token ids: mean, smallest, largest",
               "mean above 0.9, else increase loss.k", By.DIVERGENCE,
               "learning", "Teacher's probability mass on the compared ids", SHARE),
        Metric("distill/overlap_ratio", "share of the teacher's top-k in the student's", "rises towards 1",
               By.DISTILLATION, "learning", "Teacher's top-k in the student's", SHARE),
        Metric("distill/overlap_token_advantage",
               "mean of −q (log q − log p) over shared top-k ids, over tokens that share any", "rises towards 0",
               By.DISTILLATION),
        Metric("distill/overlap_any", "share of tokens whose top-k sets share an id", "1", By.DISTILLATION),
        Metric("distill/unsure", "eopd: share of tokens at which the teacher is unsure", "0.05 to 0.3",
               By.DISTILLATION),
        Metric("teacher/TEACHER/kl", "teacher/kl on the tokens that one of several teachers scored",
               "falls; never below 0 by more than its error", By.HEADERS,
               "teachers", "KL to teacher {}", NATS, label="KL to teacher {}", format=".3f"),
        Metric("teacher/TEACHER/loss", "distillation loss on the tokens that this teacher scored", "falls", By.LOSS,
               "teachers", "Loss on teacher {}'s tokens", NATS),
        Metric("teacher/TEACHER/share", "this teacher's share of the trained tokens", "the share of its prompts",
               By.LOSS, "teachers", "Teacher {}'s share of tokens", SHARE),
        Metric("teacher/TEACHER/calls", "tool calls per episode on this teacher's prompts", "–", By.HEADERS,
               "teachers", "Tool calls on teacher {}'s prompts", "per episode"),
        Metric("teacher/TEACHER/version",
               "for a teacher that follows the student: the update whose weights its scorers were made from", "rises",
               By.LEDGER, "teachers", "Version of teacher {}", "update", exact=True),
        Metric("teacher/TEACHER/seconds/publish", "seconds to publish new weights to its scorers", "–", By.LEDGER),
        Metric("teacher/relabelled", "responses that were scored a second time before the update", "–", By.HEADERS),
        Metric("teacher/moved",
               "mean KL from the teachers' new scores of relabelled responses to the old; for an endpoint, a lower "
               "bound", below(0.1), By.HEADERS,
               "teachers", "KL between new and old teacher scores", NATS),
        Metric("teacher/aligned", "share of the relabelled tokens for which teacher/moved is known", "1", By.HEADERS),
        Metric("teacher/TEACHER/tokens", "response tokens that this teacher scored", "–", By.HEADERS),
        Metric("teacher/TEACHER/samples", "responses that one of several teachers scored", "–", By.HEADERS),
    ),
    "Task rewards": (
        Metric("reward/REWARD", "mean reward over responses, in environments that have it", "rises", By.HEADERS,
               "rewards", "Reward {}", "mean over responses", label="{}"),
        Metric("policy/loss", "policy loss, before policy.weight", "–", By.POLICY),
        Metric("policy/reward", "mean of the reward from which the advantages are computed", "rises", By.CONSTANTS),
        Metric("policy/reward/REWARD", "mean of each reward, where task.reward names several", "rises", By.CONSTANTS),
        Metric("policy/rows_moved", "share of responses whose advantage is not 0", above(0.2), By.CONSTANTS,
               "rewards", "Responses with an advantage", SHARE),
        Metric("policy/explained_variance",
               "share of the variance of rewards that lies between prompts, not between the answers to one", below(0.9),
               By.CONSTANTS, "rewards", "Variance of rewards that the prompt explains", SHARE),
        Metric("critic/loss", "value loss: ½ (V − return)² per token, with [critic]", "falls", By.VALUES,
               "rewards", "Value loss", "½ (V − return)²", format=".3g"),
        Metric("critic/explained_variance",
               "1 − Var(G − V) / Var(G) of tokens: values V, discounted rewards to come G (critic.bootstrap: and "
               "V at a cut)", "above 0, rising",
               By.COLUMNS, "rewards", "Variance of rewards that the values explain", SHARE),
        Metric("critic/clip_fraction", "share of tokens whose value moved beyond critic.clip", "few", By.VALUES),
        Metric("policy/centred", "part of the loss that score centering removes, per token", "near 0", By.POLICY),
        Metric("policy/clip_fraction", "share of tokens that the trust region clips", below(0.2, ", not rising"),
               By.POLICY, "rewards", "Clipped tokens", SHARE, idle=0.0),
        Metric("policy/kl", "mean of log p_old − log p over tokens", "near 0", By.POLICY),
        Metric("policy/ratio", "mean of p / p_old over tokens", "near 1", By.POLICY),
        Metric("policy/ratio_p99", "99th percentile of p / p_old over tokens, within 0.5 %", below(2), By.LOSS),
        Metric("policy/ratio_variance", "mean of (p / p_old − 1)² over tokens", "small", By.POLICY),
        Metric("policy/variance_coef", "coefficient of r2vpo's penalty, with policy.variance_target", "settles",
               By.CONSTANTS),
        Metric("policy/ratio_max", "largest p / p_old of a token", below(10), By.POLICY,
               "rewards", "Largest ratio p/p_old", "ratio"),
        Metric("policy/cov_candidates", "tokens from which clip_cov selects", "–", By.BATCH),
        Metric("policy/second_moment policy/second_moment_before", "mean (log ratio)² after and before m2po", "–",
               By.BATCH),
        Metric("policy/masked_fraction", "share of tokens that m2po masked", below(0.1), By.BATCH),
        Metric("policy/budget_missed", "1 where m2po could not meet its budget, else 0", "0", By.BATCH),
    ),
    "Drift: distance of the learner (drift), or of the learner at a token's version (mismatch), from the sampler": (
        gap("kl", "mean of log p_behaviour − log p: a noisy KL estimate", below(0.02, "; investigate from 0.05 on")),
        Metric("drift/k3_kl", "k3 estimate of the same KL: never negative", below(0.02, "; 1e-3 at lag 0 in float32"),
               By.DRIFT, "drift", "KL to the sampling policy (k3)", NATS),
        gap("chi2_token", "variance of token-level importance weights", below(0.3, "; above 1 reject outliers first"),
            "drift", "χ² of token-level weights", "variance"),
        Metric("drift/kl/lag_LAGS", "drift/kl over the tokens of these lags", "near 0 at lag 0, grows with lag",
               By.DRIFT),
        Metric("drift/chi2_token/lag_LAGS", "drift/chi2_token over the tokens of these lags", "as chi2_token",
               By.DRIFT),
        gap("chi2_row_p95", "95th percentile over responses of the response's own chi2_token", below(1),
            "drift", "χ² of a response, 95th percentile", "variance"),
        gap("ess", "effective sample size of token-level weights, as a share", above(0.5),
            "drift", "Effective sample size, tokens", SHARE),
        gap("chi2_seq", "variance of sequence-level importance weights", "bounded",
            "drift", "χ² of sequence-level weights", "variance"),
        gap("ess_seq", "effective sample size of sequence-level weights, as a share", "near 1 at lag 0",
            "drift", "Effective sample size, responses", SHARE),
        gap("ess_row", "effective sample size over the tokens of a response, averaged over responses", above(0.5)),
        gap("ess_row_min", "smallest effective sample size of a response", "no jumps",
            "drift", "Smallest effective sample size of a response", SHARE),
        gap("tv_p95", "95th percentile of |1 − ρ| / 2 over tokens"),
        gap("ratio_p99", "99th percentile of the importance ratio ρ over tokens", below(2)),
        gap("tv", "estimated total variation distance; bounds the bias of token-level losses", "–",
            "drift", "Total variation to the sampling policy", "probability"),
        Metric("drift/probs_pearson", "correlation of the token probabilities",
               above(0.99, "; below 0.95 engines differ"), By.DRIFT,
               "drift", "Correlation with the sampling policy", "Pearson's r"),
        gap("probs_diff_mean", "mean absolute difference of the token probabilities"),
        gap("probs_diff_max", "largest absolute difference of the token probabilities", "no jumps"),
        gap("training_ppl", "perplexity of responses under the learner"),
        gap("training_log_ppl", "logarithm of training_ppl"),
        gap("rollout_ppl", "perplexity of responses under the policy that sampled them"),
        gap("rollout_log_ppl", "logarithm of rollout_ppl"),
        gap("ppl_ratio", "training_ppl / rollout_ppl of a response, averaged", "near 1"),
        gap("log_ppl_diff", "rollout mean log-prob minus learner mean log-prob of a response, averaged", "near 0"),
        gap("log_ppl_abs_diff", "mean absolute value of log_ppl_diff", "near 0"),
        gap("log_ppl_diff_min", "smallest log_ppl_diff of a response", "no jumps"),
        gap("log_ppl_diff_max", "largest log_ppl_diff of a response", "no jumps"),
        Metric("drift/kl_first drift/kl_last", "drift/kl at an update's first and last step", "close together",
               By.HEADERS),
        Metric("drift/k3_kl_first drift/k3_kl_last", "drift/k3_kl at the same steps", "close together", By.HEADERS),
        Metric("drift/rollout_kl",
               "exact KL over the vocabulary from the learner to the weights that sampled a token, where these are "
               "stored", below(0.02), By.FIRST_PASSES,
               "drift", "Exact KL to the sampling policy", NATS),
        Metric("drift/rollout_kl_coverage", "share of trained tokens whose sampling weights are still stored",
               "1, else raise learner.snapshots", By.FIRST_PASSES),
        Metric("mismatch/k3_kl", "drift/k3_kl at a token's version", below(0.02, "; 1e-3 at lag 0 in float32"),
               By.DRIFT, "drift", "KL between engines at the same version (k3)", NATS),
        Metric("mismatch/probs_pearson", "drift/probs_pearson at a token's version",
               above(0.99, "; below 0.95 engines differ"), By.DRIFT,
               "drift", "Correlation of engines at the same version", "Pearson's r"),
        Metric("router/flips",
               "share of trained tokens and layers whose experts differ between sampler and learner, where recorded",
               below(0.1), By.STUDENT),
        Metric("router/balance", "auxiliary loss of the routers before its coefficient", "near experts per token",
               By.LEARNER),
        Metric("kept/size", "mean size of the sampling support after truncation, with sampler.keep_mask", "–", By.LOSS),
        Metric("old_logp_missing",
               "share of tokens whose sampling weights are no longer stored; the sampler's log-prob is used instead",
               "0", By.CONSTANTS),
        Metric("kl_missing", "share of tokens for which seq_max_kl has no exact KL", "0", By.CONSTANTS),
    ),
    "Corrections": (
        Metric("correction/ess",
               "effective sample size of the importance weights, or of the importance ratios where no weights are used",
               above(0.5), By.CORRECTION,
               "corrections", "Effective sample size of importance weights", SHARE),
        Metric("correction/rollout_is_mean", "mean importance weight, after truncation", "near 1", By.CORRECTION,
               "corrections", "Mean importance weight", "weight"),
        Metric("correction/rollout_is_std", "standard deviation of the importance weights", below(1), By.CORRECTION,
               "corrections", "Spread of importance weights", "standard deviation"),
        Metric("correction/rollout_is_min correction/rollout_is_p99 correction/rollout_is_max",
               "smallest weight, 99th percentile of the tokens, and largest weight", "–", By.CORRECTION),
        Metric("correction/rollout_is_ratio_fraction_high", "share of ratios above the threshold", below(0.05),
               By.CORRECTION, "corrections", "Importance ratios above the threshold", SHARE),
        Metric("correction/rollout_is_ratio_fraction_low", "share of ratios below 1/threshold", below(0.05),
               By.CORRECTION),
        Metric("correction/rollout_is_batch_norm_factor", "number by which is_normalize divided the weights", "near 1",
               By.CORRECTION),
        Metric("correction/rollout_rs_masked_fraction", "share of tokens rejected",
               below(0.1, "; from 0.25 on fix the cause"), By.CORRECTION,
               "corrections", "Rejected tokens", SHARE),
        Metric("correction/rollout_rs_seq_masked_fraction", "share of responses with rejections", below(0.1),
               By.CORRECTION, "corrections", "Responses with a rejected token", SHARE),
        Metric("correction/rollout_rs_MODE_masked_fraction", "share of tokens this mode rejects", below(0.1),
               By.CORRECTION),
        Metric("correction/rollout_rs_MODE_seq_masked_fraction",
               "share of responses in which this mode rejects a token", "–", By.CORRECTION),
    ),
    "Staleness": (
        Metric("lag/mean", "updates between sampling a token and training on it", "about tau or less", By.HEADERS,
               "staleness", "Mean lag", "updates", label="lag", format=".1f"),
        Metric("tau", "current schedule.tau, where it can change", "settles", By.STEERING,
               "staleness", "tau", "updates in flight", exact=True),
        Metric("publish_every", "current schedule.publish_every, where it can change", "settles", By.STEERING),
        Metric("lag/max", "largest lag of a trained token", "within the schedule's bound", By.HEADERS),
        Metric("lag/tokens_N", "trained tokens of this lag", "–", By.HEADERS),
        Metric("version", "version of the weights after the update", "–", By.LEDGER),
    ),
    "Freshness: weights of stale samples, and refreshes of the buffer": (
        Metric("freshness/f", "mean freshness of samples", "well above freshness.threshold", By.FRESHNESS,
               "freshness", "Freshness of trained samples", "f, from 0 to 1", label="freshness", format=".3f"),
        Metric("freshness/weight", "mean weight of a sample, before freshness.normalise", "–", By.FRESHNESS,
               "freshness", "Freshness weight of a sample", "mean weight"),
        Metric("freshness/ess", "effective sample size of the weights, as a share of the samples", "near 1",
               By.FRESHNESS),
        Metric("freshness/gated", "share of samples with weight 0", below(0.25), By.FRESHNESS,
               "freshness", "Samples with weight 0", SHARE),
        Metric("freshness/roll", "mean KL from the learner to the weights that sampled a sample", below(0.02),
               By.FRESHNESS, "freshness", "KL to the sampling policy, by sample", NATS),
        Metric("freshness/sup", "mean KL from the teachers' new scores to the old; for an endpoint, a lower bound",
               "0 if teachers are fixed", By.FRESHNESS,
               "freshness", "KL to the teachers' earlier scores", NATS),
        Metric("freshness/invalid", "share of samples with unknown drift, and so freshness 0", "0", By.FRESHNESS),
        Metric("freshness/roll_coverage", "share of tokens with known drift", "1, or raise learner.snapshots",
               By.FRESHNESS),
        Metric("freshness/sup_coverage", "share of tokens with comparable old and new scores", "1", By.FRESHNESS),
        Metric("freshness/anchor", "KL to the sampling policy, as a loss term", "small compared with the loss",
               By.LOSS),
        Metric("freshness/drift/lag_N", "rolling mean of freshness/roll at this lag", "grows with the lag",
               By.FRESHNESS),
        Metric("freshness/buffer_f", "mean freshness of the buffer (samples that are scored and not yet trained on)",
               "above freshness.kappa_f", By.FRESHNESS,
               "freshness", "Freshness of the buffer", "f, from 0 to 1"),
        Metric("freshness/buffer_roll_coverage", "roll_coverage of the buffer", "above freshness.kappa_roll",
               By.FRESHNESS),
        Metric("freshness/buffer_sup_coverage", "sup_coverage of the buffer", "above freshness.kappa_sup",
               By.FRESHNESS),
        Metric("freshness/model_error",
               "buffer_f estimated from lags, minus buffer_f measured by a pass over the buffer", "near 0",
               By.FRESHNESS),
        Metric("freshness/refreshes", "refreshes so far (all stale groups are rolled out again)", "few", By.FRESHNESS,
               "freshness", "Refreshes so far", "count", exact=True, idle=0.0),
        Metric("freshness/refreshed", "update after which the last refresh was done; 0 if none", "–", By.FRESHNESS),
        Metric("freshness/refreshed_tokens", "tokens so far that refreshes threw away", "few", By.FRESHNESS),
    ),
    "Samples": (
        Metric("samples", "responses of the update", "learner.batch_size", By.HEADERS),
        Metric("tokens", "response tokens of the update", "–", By.HEADERS),
        Metric("length/mean length/max", "tokens of a response", "mean is steady; + 20 % in 100 updates is a warning",
               By.HEADERS, "lengths", "Length of a response", "tokens", label="length", format=",.1f"),
        Metric("length/trend",
               "mean length of the last 10 updates / mean length of the 10 updates 100 before them (in a shorter run: "
               "of the first 10 after the pipeline has filled)", below(1.2), By.HEADERS,
               "lengths", "Growth of the mean length", "ratio"),
        Metric("sft", "with [sft]: 1 in a supervised update, which precedes all rollouts, else 0", "–", By.LEDGER,
               "learning", "Supervised updates", "1 if supervised", exact=True),
        Metric("off_policy/ORIGIN",
               "share of trained tokens that the student did not draw; rewards, lag and drift leave them out",
               "near mix.share; 1 in supervised updates", By.HEADERS,
               "learning", "Trained tokens from {}", SHARE),
        Metric("mix/prefix",
               "with mix.prefix: share of the tokens of all responses that were given to the student as prefixes",
               "below mix.share times mix.prefix / 2", By.HEADERS),
        Metric("sampler/replaced",
               "with sampler.teacher_replaces: share of trained tokens that the teacher replaced while the student "
               "drew",
               "falls as the student learns", By.HEADERS),
        Metric("truncated", "share of responses that reached sampler.max_tokens", below(0.1), By.HEADERS,
               "lengths", "Responses cut off", SHARE, label="cut off"),
        Metric("accuracy", "mean reward on held-out prompts", "rises", By.EVALUATE,
               "", "Held-out accuracy", SHARE, label="held-out accuracy"),
        Metric("accuracy_error", "standard error of accuracy over the prompts", "–", By.EVALUATE),
        Metric("kl", "without task.reward: reverse KL to the teacher on answers to held-out prompts", "falls",
               By.EVALUATE, label="held-out KL", format=".3f"),
        Metric("kl_error", "standard error of this KL", "–", By.EVALUATE),
    ),
    "Episodes": (
        Metric("episode/turns", "turns of the student, mean over episodes", "–", By.HEADERS,
               "episodes", "Turns of an episode", "turns", label="turns", format=".1f"),
        Metric("episode/calls", "tool calls per episode, including malformed ones", "–", By.HEADERS,
               "episodes", "Tool calls", "per episode"),
        Metric("episode/invalid", "share of episodes with an invalid tool call", "falls", By.HEADERS,
               "episodes", "Episodes with an invalid call", SHARE, label="invalid"),
        Metric("episode/failed", "tool calls per episode that raised an exception", "few", By.HEADERS),
        Metric("episode/looped", "share of episodes with the same call and answer three times in a row", "0",
               By.HEADERS, "episodes", "Episodes that repeat a call", SHARE, idle=0.0),
        Metric("episode/premature", "share of episodes that the student ended by a reply without text or calls", "0",
               By.HEADERS),
        Metric("episode/observed", "share of tokens that the student did not sample (observations)", "–", By.HEADERS),
        Metric("episode/branches",
               "token sequences of an episode: several if an agent has subagents or edits its history", "–",
               By.HEADERS),
        Metric("episode/failures", "restarts of failed environments, per episode", "0", By.HEADERS),
        Metric("episode/crashed", "share of agents that failed after a turn and were judged all the same", "0",
               By.HEADERS),
        Metric("episode/out_of_turns", "share of episodes that reached environment.turns or calls", below(0.1),
               By.HEADERS, "episodes", "Episodes out of turns", SHARE, idle=0.0),
        Metric("episode/out_of_time", "share of episodes that reached environment.seconds", "0", By.HEADERS,
               "episodes", "Episodes out of time", SHARE, idle=0.0),
        Metric("episode/seconds", "seconds that an episode waited for its environment", "below the time of its turns",
               By.HEADERS,
               "episodes", "Waiting for the environment", "seconds per episode", label="tool s", format=".2f"),
        Metric("environments/ENVIRONMENT/reward/REWARD",
               "with [environments]: mean of this reward over the episodes of one environment", "rises", By.HEADERS,
               "episodes", "Reward {1} in {0}", "mean reward"),
        Metric("environments/ENVIRONMENT/turns", "turns of the student in this environment, mean over episodes", "–",
               By.HEADERS, "episodes", "Turns in {}", "turns"),
        Metric("environments/ENVIRONMENT/episodes", "episodes of this environment that an update trained on", "–",
               By.HEADERS),
        Metric("environments/ENVIRONMENT/failed",
               "share of the episodes of this environment since the last update that failed or have no reward", "0",
               By.LEDGER, "episodes", "Failed episodes in {}", SHARE, idle=0.0),
        Metric("environment/NAME", "number that the environment reports in its attribute `metrics`, mean over episodes",
               "–", "environments/forms.py",
               "episodes", "Environment: {}", "mean over episodes"),
    ),
    "Speed": (
        Metric("tokens_per_s", "tokens of the responses trained on, observations included, per second", "steady",
               By.LEDGER, "throughput", "Throughput", "tokens per second", label="tok/s"),
        Metric("samples_per_s", "responses trained on, per second", "steady", By.LEDGER, label="samples/s"),
        Metric("tokens_per_s/device",
               "the same divided by the number of devices of all workers at the start; inline engines share one",
               "steady", By.LEDGER),
        Metric("tokens_per_s/STAGE", "tokens that the stage finished, per second", "alike for all stages", By.LEDGER),
        Metric("overlap/stages", "busy time of the three stages / wall-clock time", "above 1 if stages overlap",
               By.HEADERS, "throughput", "Overlap of the three stages", "busy seconds per second"),
        Metric("overlap/busy", "the same with all other work of workers", "above 1 if stages overlap", By.HEADERS),
        Metric("stage/STAGE", "share of time in which the stage did its own work", "–", By.HEADERS),
        Metric("busy/STAGE", "share of time in which the stage did any work", "near 1 for the slowest stage",
               By.HEADERS),
        Metric("idle/WORKER", "share of time in which the worker was idle", "near 0 in the slowest stage", By.HEADERS),
        Metric("rows/filled", "share of the learner's computed tokens that are not padding", above(0.9), By.PASSES,
               "throughput", "Learner tokens that are not padding", SHARE),
        Metric("saved/prompt", "share of tokens that shared prompts saved", "–", By.PASSES),
        Metric("time", "seconds since the run began", "–", By.LEDGER, "", "Time", "seconds"),
    ),
    "Waits, in seconds": (
        Metric("seconds/update", "wall-clock time since the previous update", "steady", By.LEDGER,
               "throughput", "Time of an update", "seconds"),
        Metric("seconds/data", "learner's wait for scored groups", "near 0, else add samplers", By.STAGES),
        Metric("seconds/turn", "learner's wait for the schedule's order or age bound", "near 0, else widen it",
               By.STAGES),
        Metric("seconds/relabel", "learner's wait for teachers that score again", "below seconds/learn", By.STAGES),
        Metric("seconds/learn", "training time of the learner", "most of seconds/update", By.STAGES),
        Metric("seconds/weights", "learner's wait for a publish and for the evaluation of its weights", "near 0",
               By.STAGES),
        Metric("seconds/eval", "time of the evaluation before this update", "–", By.LEDGER),
        Metric("seconds/publish", "time of a publish to all samplers in parallel", "below seconds/update", By.STAGES,
               "throughput", "Time of a publish", "seconds"),
        Metric("publish/wait", "time until running requests paused", "one token; with drain one response", By.PUBLISH),
        Metric("publish/bytes", "bytes of weights that all samplers loaded in the publish", "–", By.PUBLISH),
        Metric("publish/load", "time to copy the weights and compute their fingerprint", "–", By.PUBLISH),
        Metric("sampler/drafted", "with sampler.speculation: tokens that were proposed since the last publish", "–",
               By.PUBLISH),
        Metric("sampler/accepted", "share of these tokens that the student drew", "above sampler.speculation.least",
               By.PUBLISH),
        Metric("publish/rebuild", "time to recompute running prefixes with the new weights", "–", By.PUBLISH),
    ),
    "Bytes between processes, since the previous update": (
        Metric("bytes/rollouts", "records that samplers gave to scorers", "–", By.LEDGER),
        Metric("bytes/scores", "records with scores that scorers gave to the learner", "–", By.LEDGER),
        Metric("bytes/weights", "weights that the learner exported, and after a resume records", "–", By.LEDGER),
        Metric("bytes/coordinator", "messages of the coordinator, without Ray's", "far below the others", By.LEDGER),
    ),
    "Guards": (
        Metric("guard/GUARD", "factor by which the guard multiplied the learning rate of the update", "1", By.GUARDS,
               "guards", "Guard {}", "factor on the learning rate", exact=True, idle=1.0),
        Metric("guard/kl", "amount by which the guard lowered tau", "0", By.GUARDS,
               "guards", "Guard kl", "updates below tau", exact=True, idle=0.0),
    ),
    "Groups in each stage, and losses": (
        Metric("groups/rolling", "groups that are being rolled out", "most groups", By.LEDGER),
        Metric("groups/waiting groups/scoring", "groups that wait for a scorer; groups that a scorer has",
               "few, else add scorers", By.LEDGER),
        Metric("groups/ready", "scored groups, not yet trained on", "few, else the learner is slowest", By.LEDGER),
        Metric("credits", "credits in use; each group in flight needs one", "all, until the end", By.LEDGER),
        Metric("reuse/share", "share of an update's samples that an earlier update learned from", "1 − 1 / reuse.times",
               By.LEDGER),
        Metric("reuse/new_tokens", "tokens of an update that no update learned from before", "–", By.LEDGER),
        Metric("reuse/stored", "groups in the store, from which later updates learn again", "constant", By.LEDGER),
        Metric("reuse/bytes", "bytes of the records in the store", "below the machine's memory", By.LEDGER),
        Metric("prompts/tried", 'different prompts answered so far, with data.order = "adaptive"', "grows to all",
               By.LEDGER),
        Metric("prompts/effective", "(Σ w)² / Σ w² of the weights of prompts: how many share the draws", "many",
               By.LEDGER),
        Metric("dropped", "groups so far that ended without being trained on", "0", By.LEDGER),
        Metric("dropped/REASON", "groups dropped for this reason so far", "0", By.LEDGER),
        Metric("restarted", "groups so far that became too old and were rolled out again", "few", By.LEDGER),
        Metric("thrown_tokens", "tokens so far of responses that were not trained on", "few", By.LEDGER),
        Metric("refilled_tokens", "thrown_tokens of groups that policy.refill replaced so far", "–", By.LEDGER),
        Metric("greedy_tokens", "tokens so far of greedy answers, used only for their reward (remax)", "–", By.LEDGER),
        Metric("teacher/TEACHER/invalid", "teacher/invalid of one of several teachers", "0", By.LEDGER),
        Metric("teacher/invalid", "responses since the previous update with unusable scores", "0", By.LEDGER,
               "teachers", "Responses with unusable scores", "count", idle=0.0),
        Metric("teacher/floored", "trained tokens whose teacher log-prob was raised to −100", "few", By.SCORE_CHECKS,
               "teachers", "Tokens at the lowest log-prob (−100)", "count", idle=0.0),
        Metric("spelling/open", "share of trained tokens in the last span of a response that was cut, left out because "
               "more text would change its spelling (teachers with spelling = \"own\")", "near 0", By.SCORE_CHECKS,
               "teachers", "Tokens in open spans", SHARE),
        Metric("spelling/unwritten", "share of trained tokens from the first text or special token on that such a "
               "teacher cannot write", "0", By.SCORE_CHECKS),
        Metric("spelling/too_long", "share of trained tokens beyond the teacher's longest sequence, in its own tokens",
               "0", By.SCORE_CHECKS),
        Metric("spelling/unpaired", "share of trained tokens in spans of several tokens, left out by losses that "
               "compare distributions and merge no spans", "near 0", By.SCORE_CHECKS),
        Metric("spelling/span_tokens", "tokens of the student for each span of bytes that such a teacher scores",
               "near 1", By.SCORE_CHECKS),
        Metric("teacher/rechecked", "groups since the previous update that were scored twice", "–", By.LEDGER),
        Metric("teacher/differed", "rechecked groups whose second scores differ from the first", "0", By.LEDGER),
        Metric("teacher/recheck_max",
               "largest difference between first and second scores (root mean square over a response)", "near 0",
               By.LEDGER),
        Metric("canary/teacher", "largest error of a teacher's log-probs on fixed texts", "near 0", By.CANARY),
        Metric("canary/sampler", "largest k3 KL from a sampler to the learner with equal weights", "near 0", By.CANARY),
        Metric("canary/retired", "replicas so far that were stopped because their answers were wrong", "0", By.CANARY),
        Metric("canary/redone", "groups so far that were answered again because of a wrong replica", "0", By.CANARY),
        Metric("canary/trained", "groups so far that were trained on before the wrong replica was found", "0",
               By.CANARY),
        Metric("restarts/WORKER", "restarts of this worker so far, after it died or hung", "0", By.LEDGER),
        Metric("ungraded/CAUSE", "responses so far without a reward; they are not trained on", "0", By.LEDGER),
        Metric("failed_samples", "responses so far that an engine could not produce", "0", By.LEDGER),
        Metric("failed/CAUSE", "responses so far whose environment failed: timeout, crash or error", "0", By.LEDGER),
    ),
}  # fmt: skip


def rows() -> list[Metric]:
    return [row for section in VOCABULARY.values() for row in section]


def names() -> list[str]:
    return [name for row in rows() for name in row.names.split()]


@cache
def patterns() -> list[tuple[re.Pattern[str], Metric]]:
    """Return the pattern and the row of every name; only the first name of a row has its figure."""

    def pattern(name: str) -> re.Pattern[str]:
        return re.compile(re.sub("[A-Z]+", lambda word: f"({PLACEHOLDERS[word[0]][0]})", re.escape(name)))

    def row_of(row: Metric, number: int, name: str) -> Metric:
        return replace(row, names=name, section="", title="", unit="") if number else replace(row, names=name)

    return [(pattern(name), row_of(row, n, name)) for row in rows() for n, name in enumerate(row.names.split())]


def find(name: str) -> list[Metric]:
    """Return a list with the row that describes a metric; the list is empty for an unknown name."""
    return [row for pattern, row in patterns() if pattern.fullmatch(name)]


@cache
def describe(name: str) -> Metric | None:
    """Return the row of one metric with its title, label and unit filled in; None for an unknown name."""
    for pattern, row in patterns():
        if match := pattern.fullmatch(name):
            title, label = (text.format(*match.groups()) for text in (row.title, row.label))
            is_share = row.names == "reward/REWARD" and match[1] in SHARE_REWARDS
            return replace(row, names=name, title=title, label=label, unit=SHARE if is_share else row.unit)
    return None


def extreme(name: str) -> Literal["max", "min", ""]:
    """Return "max" or "min" if the metric name ends with that word, and "" for sums and means."""
    ending = name.rpartition("_")[2]
    return "max" if ending == "max" else "min" if ending == "min" else ""
