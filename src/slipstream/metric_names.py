"""The registry of metric names: meaning, healthy range and source of every number in metrics.jsonl.

A run writes no other names. docs/metrics.md is generated from this file (`python tools/pages.py`), and the terminal
display takes its labels from it. A word in capitals is a placeholder, explained in WORDS. A healthy range is a rule of
thumb for people; no code decides by it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

WORDS = {
    "N": (r"\d+", "a number"),
    "LAGS": (r"\d+(-\d+)?", "a range of lags: 0, 1, 2-3, 4-7 …"),
    "STAGE": (r"rollout|score|learn", "a stage: rollout, score, learn"),
    "WORKER": (r"(sampler|scorer|learner)(-\w+)*", "a worker, with the name that trace.json uses"),
    "TEACHER": (r"\w+", "a teacher's name in the config"),
    "REWARD": (
        r"\w+(/\w+)?",
        "a reward of task.reward; NAME/PART is a component of that reward; greedy_… is the reward of the greedy answer",
    ),
    "CAUSE": (
        r"timeout|crash|error|nan|type",
        "the reason for a missing answer or reward: timeout, crash, error, nan, type",
    ),
    "ORIGIN": (r"data|teacher|file", "the origin of a response: data, teacher, file"),
    "NAME": (r"[\w/]+", "a name that the environment defines"),
    "MODE": (r"(token|seq_sum|seq_mean|seq_max)_(k[123]|kl)|negative_seq", "a rejection mode of correction.rs"),
    "REASON": (r"[a-z_ ]+", "the reason why a group was dropped, as in ledger.jsonl"),
}


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
class Term:
    names: str
    """One name, or several names with the same meaning, separated by spaces."""
    meaning: str
    healthy: str | Band
    source: str
    """File that computes the metric, relative to src/slipstream."""
    label: str = ""
    """Name in the terminal display; empty for a metric that is not displayed."""


LEARNER, LOSS, FROZEN = "engines/native/learning/learner.py", "objective/loss.py", "objective/frozen.py"
NOISE, FIRST_LOOK = "engines/native/learning/gradient_noise.py", "engines/native/learning/evidence.py"
PASSES, METRICS, ACCOUNT = "engines/native/learning/passes.py", "metrics.py", "pipeline/ledger.py"
SURROGATE, POLICY, BATCH = "estimators/surrogate.py", "estimators/policy/__init__.py", "estimators/policy/batch.py"
DIVERGENCE, DISTILLATION = "estimators/divergence.py", "objective/distillation.py"
DRIFT, RATIO, CORRECTION = "estimators/drift.py", "estimators/ratio.py", "estimators/correction.py"
FRESHNESS, TRUST = "pipeline/control/buffer_refresh.py", "engines/score_checks.py"
STAGES, PUBLISH = "pipeline/stages.py", "pipeline/publish.py"
CANARY, GUARDS = "pipeline/canary_rounds.py", "pipeline/control/guards.py"
ROUTING = "engines/native/learning/routing.py"


def gap(name: str, meaning: str, healthy: str | Band = "–") -> Term:
    return Term(f"drift/{name} mismatch/{name}", meaning, healthy, DRIFT)


VOCABULARY: dict[str, tuple[Term, ...]] = {
    "The loss": (
        Term("loss", "total loss: the weighted sum of all parts", "falls; stays level with RL", LOSS, "loss"),
        Term("grad_norm", "gradient norm before clipping", "mostly below learner.clip_norm", LEARNER, "gradient norm"),
        Term(
            "step_rms",
            "root mean square of AdamW's step divided by `lr`, without weight decay: near 1 if gradients keep their "
            "direction, less if they are noisy or shrink",
            "level after the first updates",
            "engines/native/learning/optimizer.py",
        ),
        Term(
            "gradient/signal",
            "‖ḡ‖²: ḡ is the gradient of a vector added to every last hidden state, averaged over a step's N groups",
            "–",
            NOISE,
        ),
        Term("gradient/power", "E‖g‖² of the same gradients, group by group: signal plus noise", "–", NOISE),
        Term(
            "gradient/noise",
            "(power − signal)/(N − 1): the variance of ḡ",
            "below the signal, else use larger batches; does not rise with corrections on",
            NOISE,
        ),
        Term(
            "gradient/cosine",
            "cosine of the gradients of the fresher and the staler half of the first step's samples, with [guards.gac]",
            "as in a run with a small tau",
            "engines/native/learning/gradient_cosine.py",
        ),
        Term(
            "loss_scale",
            'factor of the loss in the backward pass, with learner.compute_dtype = "float16"',
            "level, or rising",
            LEARNER,
        ),
        Term(
            "steps_skipped",
            "share of the update's optimizer steps that were skipped, because gradients overflowed in float16",
            "0, except in a few updates",
            LEARNER,
        ),
        Term(
            "perturbation/std",
            "mean standard deviation of the noise on the layers, with [learner.perturbation]",
            "–",
            "engines/native/learning/perturbation.py",
        ),
        Term(
            "gradient/cosine_previous",
            "cosine of the gradients of this update and the previous one before a projection, with guards.gac.limit",
            "near 0",
            "engines/native/learning/gradient_cosine.py",
        ),
        Term("lr", "learning rate of the update, after the guards' factors", "–", LEARNER),
        Term("distill/loss", "distillation loss per trained token, before loss.weight", "falls", LOSS),
        Term("distill/loss_abs", "mean absolute distillation loss per trained token", "falls", LOSS),
        Term("distill/loss_min distill/loss_max", "smallest and largest loss of a token", "no jumps", LOSS),
        Term(
            "distill/ratio",
            "mean importance ratio p_current / p_behaviour of the draws (extra tokens sampled at the same position)",
            "near 1",
            SURROGATE,
        ),
        Term("distill/ratio_max", "largest importance ratio of a draw", below(10), SURROGATE),
        Term("distill/advantage", "mean of log q − log p over the draws", "rises towards 0", SURROGATE),
        Term("distill/clip_fraction", "share of draws that loss.clip or loss.ratio_cap changes", below(0.2), SURROGATE),
        Term("distill/weight", "decoupled_ppo: mean of p_proximal / p_behaviour over the draws", "near 1", SURROGATE),
        Term("distill/dropped_fraction", "decoupled_ppo: share of draws above loss.weight_cap", below(0.1), SURROGATE),
        Term(
            "distill/second_moment distill/second_moment_before",
            "mean (log ratio)² of the draws after and before m2po",
            "–",
            SURROGATE,
        ),
        Term("distill/masked_fraction", "share of draws that m2po masked", below(0.1), SURROGATE),
        Term("distill/budget_missed", "1 where m2po could not meet its budget, else 0", "0", SURROGATE),
        Term(
            "distill/student_mass distill/student_mass_min distill/student_mass_max",
            "the student's probability mass on the compared token ids: mean, smallest, largest",
            "mean above 0.9, else increase loss.k",
            DIVERGENCE,
        ),
        Term(
            "distill/teacher_mass distill/teacher_mass_min distill/teacher_mass_max",
            "the teacher's probability mass on the compared token ids: mean, smallest, largest",
            "mean above 0.9, else increase loss.k",
            DIVERGENCE,
        ),
        Term("distill/overlap_ratio", "share of the teacher's top-k in the student's", "rises towards 1", DISTILLATION),
        Term(
            "distill/overlap_token_advantage",
            "mean of −q (log q − log p) over shared top-k ids, over tokens that share any",
            "rises towards 0",
            DISTILLATION,
        ),
        Term("distill/overlap_any", "share of tokens whose top-k sets share an id", "1", DISTILLATION),
        Term("distill/unsure", "eopd: share of tokens at which the teacher is unsure", "0.05 to 0.3", DISTILLATION),
        Term(
            "student/entropy",
            "entropy of the student, at the temperature of the loss",
            "does not collapse to 0",
            LOSS,
            "entropy",
        ),
        Term(
            "student/repeated",
            "share of the 4-grams of a response of the student that occur earlier in it, mean over responses",
            "near that of the teacher's text; a rise while the loss falls means that the text degenerates",
            METRICS,
            "repeated",
        ),
        Term(
            "student/distinct",
            "number of different tokens of a response of the student, divided by its length, mean over responses",
            "near that of the teacher's text",
            METRICS,
        ),
        Term(
            "teacher/kl teacher/TEACHER/kl",
            "reverse KL from the policy that sampled the tokens to the teacher, estimated on the sampled tokens",
            "falls; never below 0 by more than its error",
            METRICS,
            "KL to teacher",
        ),
        Term("teacher/kl_error teacher/TEACHER/kl_error", "standard error of teacher/kl", "–", METRICS),
        Term(
            "teacher/forward_kl",
            "forward KL from teacher to student, estimated on responses that the teacher drew, before the update",
            "falls, also where the reverse KL rises; below 0 by noise only",
            LOSS,
        ),
        Term("teacher/floored", "trained tokens whose teacher log-prob was raised to −100", "few", TRUST),
        Term("teacher/TEACHER/loss", "distillation loss on the tokens that this teacher scored", "falls", LOSS),
        Term("teacher/TEACHER/share", "this teacher's share of the trained tokens", "the share of its prompts", LOSS),
        Term(
            "teacher/TEACHER/version",
            "for a teacher that follows the student: the update whose weights its scorers were made from",
            "rises",
            ACCOUNT,
        ),
        Term("teacher/TEACHER/seconds/publish", "seconds to publish new weights to its scorers", "–", ACCOUNT),
        Term("teacher/relabelled", "responses that were scored a second time before the update", "–", METRICS),
        Term(
            "teacher/moved",
            "mean KL from the teachers' new scores of relabelled responses to the old; for an endpoint, a lower bound",
            below(0.1),
            METRICS,
        ),
        Term("teacher/aligned", "share of the relabelled tokens for which teacher/moved is known", "1", METRICS),
        Term("teacher/TEACHER/tokens", "response tokens that this teacher scored", "–", METRICS),
        Term(
            "reference/kl",
            "KL to the student as it was at the start of the run",
            "depends on the task",
            "estimators/kl.py",
            "KL to reference",
        ),
        Term("reference/beta", "coefficient of reference/kl, where it is adapted", "settles", FROZEN),
    ),
    "Task rewards": (
        Term("reward/REWARD", "mean reward over responses", "rises", METRICS, "REWARD"),
        Term("policy/loss", "policy loss, before policy.weight", "–", POLICY),
        Term("policy/reward", "mean of the reward from which the advantages are computed", "rises", FROZEN),
        Term("policy/reward/REWARD", "mean of each reward, where task.reward names several", "rises", FROZEN),
        Term("policy/rows_moved", "share of responses whose advantage is not 0", above(0.2), FROZEN),
        Term("policy/kl", "mean of log p_old − log p over tokens", "near 0", POLICY),
        Term("policy/ratio", "mean of p / p_old over tokens", "near 1", POLICY),
        Term("policy/ratio_variance", "mean of (p / p_old − 1)² over tokens", "small", POLICY),
        Term("policy/variance_coef", "coefficient of r2vpo's penalty, with policy.variance_target", "settles", FROZEN),
        Term("policy/ratio_max", "largest p / p_old of a token", below(10), POLICY),
        Term("policy/clip_fraction", "share of tokens that the trust region clips", below(0.2, ", not rising"), POLICY),
        Term("policy/cov_candidates", "tokens from which clip_cov selects", "–", BATCH),
        Term("policy/second_moment policy/second_moment_before", "mean (log ratio)² after and before m2po", "–", BATCH),
        Term("policy/masked_fraction", "share of tokens that m2po masked", below(0.1), BATCH),
        Term("policy/budget_missed", "1 where m2po could not meet its budget, else 0", "0", BATCH),
    ),
    "Drift: distance of the learner (drift), or of the learner at a token's version (mismatch), from the sampler": (
        gap("kl", "mean of log p_behaviour − log p: a noisy KL estimate", below(0.02, "; investigate from 0.05 on")),
        gap("k3_kl", "k3 estimate of the same KL: never negative", below(0.02, "; 1e-3 at lag 0 in float32")),
        Term("drift/kl/lag_LAGS", "drift/kl over the tokens of these lags", "near 0 at lag 0, grows with lag", DRIFT),
        Term("drift/chi2_token/lag_LAGS", "drift/chi2_token over the tokens of these lags", "as chi2_token", DRIFT),
        gap("chi2_token", "variance of token-level importance weights", below(0.3, "; above 1 reject outliers first")),
        gap("chi2_seq", "variance of sequence-level importance weights", "bounded"),
        gap("chi2_row_p95", "95th percentile over responses of the response's own chi2_token", below(1)),
        gap("ess", "effective sample size of token-level weights, as a share", above(0.5)),
        gap("ess_seq", "effective sample size of sequence-level weights, as a share", "near 1 at lag 0"),
        gap("ess_row", "effective sample size over the tokens of a response, averaged over responses", above(0.5)),
        gap("ess_row_min", "smallest effective sample size of a response", "no jumps"),
        gap("tv_p95", "95th percentile of |1 − ρ| / 2 over tokens"),
        gap("ratio_p99", "99th percentile of the importance ratio ρ over tokens", below(2)),
        gap("tv", "estimated total variation distance; bounds the bias of token-level losses"),
        gap("probs_pearson", "correlation of the token probabilities", above(0.99, "; below 0.95 engines differ")),
        gap("probs_diff_mean", "mean absolute difference of the token probabilities"),
        gap("probs_diff_max", "largest absolute difference of the token probabilities", "no jumps"),
        gap("training_ppl", "perplexity of responses under the learner", "–"),
        gap("training_log_ppl", "logarithm of training_ppl", "–"),
        gap("rollout_ppl", "perplexity of responses under the policy that sampled them", "–"),
        gap("rollout_log_ppl", "logarithm of rollout_ppl", "–"),
        gap("ppl_ratio", "training_ppl / rollout_ppl of a response, averaged", "near 1"),
        gap("log_ppl_diff", "rollout mean log-prob minus learner mean log-prob of a response, averaged", "near 0"),
        gap("log_ppl_abs_diff", "mean absolute value of log_ppl_diff", "near 0"),
        gap("log_ppl_diff_min", "smallest log_ppl_diff of a response", "no jumps"),
        gap("log_ppl_diff_max", "largest log_ppl_diff of a response", "no jumps"),
        Term("drift/kl_first drift/kl_last", "drift/kl at an update's first and last step", "close together", METRICS),
        Term("drift/k3_kl_first drift/k3_kl_last", "drift/k3_kl at the same steps", "close together", METRICS),
        Term(
            "drift/rollout_kl",
            "exact KL over the vocabulary from the learner to the weights that sampled a token, where these are stored",
            below(0.02),
            FIRST_LOOK,
        ),
        Term(
            "drift/rollout_kl_coverage",
            "share of trained tokens whose sampling weights are still stored",
            "1, else raise learner.snapshots",
            FIRST_LOOK,
        ),
        Term(
            "router/flips",
            "share of trained tokens and layers whose experts differ between sampler and learner, where recorded",
            below(0.1),
            ROUTING,
        ),
        Term(
            "router/balance", "auxiliary loss of the routers before its coefficient", "near experts per token", LEARNER
        ),
        Term("kept/size", "mean size of the sampling support after truncation, with sampler.keep_mask", "–", LOSS),
        Term(
            "old_logp_missing",
            "share of tokens whose sampling weights are no longer stored; the sampler's log-prob is used instead",
            "0",
            FROZEN,
        ),
        Term("kl_missing", "share of tokens for which seq_max_kl has no exact KL", "0", FROZEN),
    ),
    "Corrections": (
        Term(
            "correction/ess",
            "effective sample size of the importance weights, or of the importance ratios where no weights are used",
            above(0.5),
            CORRECTION,
        ),
        Term(
            "correction/rollout_rs_masked_fraction",
            "share of tokens rejected",
            below(0.1, "; from 0.25 on fix the cause"),
            CORRECTION,
        ),
        Term("correction/rollout_rs_seq_masked_fraction", "share of responses with rejections", below(0.1), CORRECTION),
        Term("correction/rollout_rs_MODE_masked_fraction", "share of tokens this mode rejects", below(0.1), CORRECTION),
        Term(
            "correction/rollout_rs_MODE_seq_masked_fraction",
            "share of responses in which this mode rejects a token",
            "–",
            CORRECTION,
        ),
        Term("correction/rollout_is_mean", "mean importance weight, after truncation", "near 1", RATIO),
        Term("correction/rollout_is_std", "standard deviation of the importance weights", below(1), RATIO),
        Term("correction/rollout_is_min correction/rollout_is_max", "smallest and largest weight", "–", RATIO),
        Term("correction/rollout_is_ratio_fraction_high", "share of ratios above the threshold", below(0.05), RATIO),
        Term("correction/rollout_is_ratio_fraction_low", "share of ratios below 1/threshold", below(0.05), RATIO),
        Term(
            "correction/rollout_is_batch_norm_factor",
            "number by which is_normalize divided the weights",
            "near 1",
            CORRECTION,
        ),
    ),
    "Staleness": (
        Term("lag/mean", "updates between sampling a token and training on it", "about tau or less", METRICS, "lag"),
        Term("tau", "current schedule.tau, where it can change", "settles", "pipeline/steering.py"),
        Term("publish_every", "current schedule.publish_every, where it can change", "settles", "pipeline/steering.py"),
        Term("lag/max", "largest lag of a trained token", "within the schedule's bound", METRICS),
        Term("lag/tokens_N", "trained tokens of this lag", "–", METRICS),
        Term("version", "version of the weights after the update", "–", ACCOUNT),
    ),
    "Freshness: weights of stale samples, and refreshes of the buffer": (
        Term("freshness/f", "mean freshness of samples", "well above freshness.threshold", FRESHNESS, "freshness"),
        Term("freshness/weight", "mean weight of a sample, before freshness.normalise", "–", FRESHNESS),
        Term("freshness/ess", "effective sample size of the weights, as a share of the samples", "near 1", FRESHNESS),
        Term("freshness/roll", "mean KL from the learner to the weights that sampled a sample", below(0.02), FRESHNESS),
        Term(
            "freshness/sup",
            "mean KL from the teachers' new scores to the old; for an endpoint, a lower bound",
            "0 if teachers are fixed",
            FRESHNESS,
        ),
        Term("freshness/gated", "share of samples with weight 0", below(0.25), FRESHNESS),
        Term("freshness/invalid", "share of samples with unknown drift, and so freshness 0", "0", FRESHNESS),
        Term("freshness/roll_coverage", "share of tokens with known drift", "1, or raise learner.snapshots", FRESHNESS),
        Term("freshness/sup_coverage", "share of tokens with comparable old and new scores", "1", FRESHNESS),
        Term("freshness/anchor", "KL to the sampling policy, as a loss term", "small compared with the loss", LOSS),
        Term("freshness/drift/lag_N", "rolling mean of freshness/roll at this lag", "grows with the lag", FRESHNESS),
        Term(
            "freshness/buffer_f",
            "mean freshness of the buffer (samples that are scored and not yet trained on)",
            "above freshness.kappa_f",
            FRESHNESS,
        ),
        Term("freshness/buffer_roll_coverage", "roll_coverage of the buffer", "above freshness.kappa_roll", FRESHNESS),
        Term("freshness/buffer_sup_coverage", "sup_coverage of the buffer", "above freshness.kappa_sup", FRESHNESS),
        Term(
            "freshness/model_error",
            "buffer_f estimated from lags, minus buffer_f measured by a pass over the buffer",
            "near 0",
            FRESHNESS,
        ),
        Term("freshness/refreshes", "refreshes so far (all stale groups are rolled out again)", "few", FRESHNESS),
        Term("freshness/refreshed", "update after which the last refresh was done; 0 if none", "–", FRESHNESS),
        Term("freshness/refreshed_tokens", "tokens so far that refreshes threw away", "few", FRESHNESS),
    ),
    "Samples": (
        Term("samples", "responses of the update", "learner.batch_size", METRICS),
        Term("tokens", "response tokens of the update", "–", METRICS),
        Term(
            "length/mean length/max",
            "tokens of a response",
            "mean is steady; + 20 % in 100 updates is a warning",
            METRICS,
            "length",
        ),
        Term(
            "length/trend",
            "mean length of the last 10 updates / mean length of the 10 updates 100 before them (of the first 10 in a "
            "shorter run)",
            below(1.2),
            METRICS,
        ),
        Term("sft", "with [sft]: 1 in a supervised update, which precedes all rollouts, else 0", "–", ACCOUNT),
        Term(
            "off_policy/ORIGIN",
            "share of trained tokens that the student did not draw; rewards, lag and drift leave them out",
            "near mix.share; 1 in supervised updates",
            METRICS,
        ),
        Term(
            "mix/prefix",
            "with mix.prefix: share of the tokens of all responses that were given to the student as prefixes",
            "below mix.share times mix.prefix / 2",
            METRICS,
        ),
        Term(
            "sampler/replaced",
            "with sampler.interleave: share of trained tokens that the teacher replaced while the student drew",
            "falls as the student learns",
            METRICS,
        ),
        Term("truncated", "share of responses that reached sampler.max_tokens", below(0.1), METRICS, "cut off"),
        Term("accuracy", "mean reward on held-out prompts", "rises", "pipeline/evaluate.py", "held-out accuracy"),
        Term(
            "kl",
            "without task.reward: reverse KL to the teacher on answers to held-out prompts",
            "falls",
            "pipeline/evaluate.py",
            "held-out KL",
        ),
        Term("kl_error", "standard error of this KL", "–", "pipeline/evaluate.py"),
    ),
    "Episodes": (
        Term("episode/turns", "turns of the student, mean over episodes", "–", METRICS, "turns"),
        Term("episode/calls", "tool calls per episode, including malformed ones", "–", METRICS),
        Term("episode/invalid", "share of episodes with an invalid tool call", "falls", METRICS, "invalid"),
        Term("episode/failed", "tool calls per episode that raised an exception", "few", METRICS),
        Term("episode/looped", "share of episodes with the same call and answer three times in a row", "0", METRICS),
        Term("episode/premature", "share of episodes that the student ended without any text", "0", METRICS),
        Term("episode/observed", "share of tokens that the student did not sample (observations)", "–", METRICS),
        Term(
            "episode/seconds",
            "seconds that an episode waited for its environment",
            "below the time of its turns",
            METRICS,
            "tool s",
        ),
        Term(
            "episode/branches",
            "token sequences of an episode: several if an agent has subagents or edits its history",
            "–",
            METRICS,
        ),
        Term("episode/failures", "restarts of failed environments, per episode", "0", METRICS),
        Term("episode/crashed", "share of agents that failed after a turn and were judged all the same", "0", METRICS),
        Term("episode/out_of_turns", "share of episodes that reached environment.turns or calls", below(0.1), METRICS),
        Term("episode/out_of_time", "share of episodes that reached environment.seconds", "0", METRICS),
        Term(
            "environment/NAME",
            "number that the environment reports in its attribute `metrics`, mean over episodes",
            "–",
            "environments/forms.py",
        ),
    ),
    "Speed": (
        Term("tokens_per_s", "response tokens trained on, per second", "steady", ACCOUNT, "tok/s"),
        Term("samples_per_s", "responses trained on, per second", "steady", ACCOUNT, "samples/s"),
        Term(
            "tokens_per_s/device",
            "the same divided by the number of devices of all workers at the start; inline engines share one",
            "steady",
            ACCOUNT,
        ),
        Term("tokens_per_s/STAGE", "tokens that the stage finished, per second", "alike for all stages", ACCOUNT),
        Term("overlap/stages", "busy time of the three stages / wall-clock time", "above 1 if stages overlap", METRICS),
        Term("overlap/busy", "the same with all other work of workers", "above 1 if stages overlap", METRICS),
        Term("stage/STAGE", "share of time in which the stage did its own work", "–", METRICS),
        Term("busy/STAGE", "share of time in which the stage did any work", "near 1 for the slowest stage", METRICS),
        Term("idle/WORKER", "share of time in which the worker was idle", "near 0 in the slowest stage", METRICS),
        Term("rows/filled", "share of the learner's computed tokens that are not padding", above(0.9), PASSES),
        Term("saved/prompt", "share of tokens that learner.shared_prompt saved", "–", PASSES),
        Term("time", "seconds since the run began", "–", ACCOUNT),
    ),
    "Waits, in seconds": (
        Term("seconds/update", "wall-clock time since the previous update", "steady", ACCOUNT),
        Term("seconds/data", "learner's wait for scored groups", "near 0, else add samplers", STAGES),
        Term("seconds/turn", "learner's wait for the schedule's order or age bound", "near 0, else widen it", STAGES),
        Term("seconds/relabel", "learner's wait for teachers that score again", "below seconds/learn", STAGES),
        Term("seconds/learn", "training time of the learner", "most of seconds/update", STAGES),
        Term("seconds/weights", "learner's wait for a publish and for the evaluation of its weights", "near 0", STAGES),
        Term("seconds/eval", "time of the evaluation before this update", "–", ACCOUNT),
        Term("seconds/publish", "time of a publish to all samplers in parallel", "below seconds/update", STAGES),
        Term("publish/wait", "time until running requests paused", "one token; with drain one response", PUBLISH),
        Term("publish/bytes", "bytes of weights that all samplers loaded in the publish", "–", PUBLISH),
        Term("publish/load", "time to copy the weights and compute their fingerprint", "–", PUBLISH),
        Term(
            "sampler/drafted",
            "with sampler.speculation: tokens that were proposed since the last publish",
            "–",
            PUBLISH,
        ),
        Term(
            "sampler/accepted",
            "share of these tokens that the student drew",
            "above sampler.speculation.least",
            PUBLISH,
        ),
        Term("publish/rebuild", "time to recompute running prefixes with the new weights", "–", PUBLISH),
    ),
    "Bytes between processes, since the previous update": (
        Term("bytes/rollouts", "records that samplers gave to scorers", "–", ACCOUNT),
        Term("bytes/scores", "records with scores that scorers gave to the learner", "–", ACCOUNT),
        Term("bytes/weights", "weights that the learner exported, and after a resume records", "–", ACCOUNT),
        Term("bytes/coordinator", "messages of the coordinator, without Ray's", "far below the others", ACCOUNT),
    ),
    "Guards": (
        Term(
            "guard/length_surge guard/ess guard/entropy guard/gac",
            "factor by which the guard multiplied the learning rate of the update",
            "1",
            GUARDS,
        ),
        Term("guard/kl", "amount by which the guard lowered tau", "0", GUARDS),
    ),
    "Groups in each stage, and losses": (
        Term("groups/rolling", "groups that are being rolled out", "most groups", ACCOUNT),
        Term(
            "groups/waiting groups/scoring",
            "groups that wait for a scorer; groups that a scorer has",
            "few, else add scorers",
            ACCOUNT,
        ),
        Term("groups/ready", "scored groups, not yet trained on", "few, else the learner is slowest", ACCOUNT),
        Term("credits", "credits in use; each group in flight needs one", "all, until the end", ACCOUNT),
        Term(
            "prompts/tried", 'different prompts answered so far, with data.order = "adaptive"', "grows to all", ACCOUNT
        ),
        Term("prompts/effective", "(Σ w)² / Σ w² of the weights of prompts: how many share the draws", "many", ACCOUNT),
        Term("dropped", "groups so far that ended without being trained on", "0", ACCOUNT),
        Term("dropped/REASON", "groups dropped for this reason so far", "0", ACCOUNT),
        Term("restarted", "groups so far that became too old and were rolled out again", "few", ACCOUNT),
        Term("thrown_tokens", "tokens so far of responses that were not trained on", "few", ACCOUNT),
        Term("greedy_tokens", "tokens so far of greedy answers, used only for their reward (remax)", "–", ACCOUNT),
        Term("teacher/invalid", "responses since the previous update with unusable scores", "0", ACCOUNT),
        Term("teacher/rechecked", "groups since the previous update that were scored twice", "–", ACCOUNT),
        Term("teacher/differed", "rechecked groups whose second scores differ from the first", "0", ACCOUNT),
        Term(
            "teacher/recheck_max",
            "largest difference between first and second scores (root mean square over a response)",
            "near 0",
            ACCOUNT,
        ),
        Term("canary/teacher", "largest error of a teacher's log-probs on fixed texts", "near 0", CANARY),
        Term("canary/sampler", "largest k3 KL from a sampler to the learner with equal weights", "near 0", CANARY),
        Term("canary/retired", "replicas so far that were stopped because their answers were wrong", "0", CANARY),
        Term("canary/redone", "groups so far that were answered again because of a wrong replica", "0", CANARY),
        Term("canary/trained", "groups so far that were trained on before the wrong replica was found", "0", CANARY),
        Term("restarts/WORKER", "restarts of this worker so far, after it died or hung", "0", ACCOUNT),
        Term("ungraded/CAUSE", "responses so far without a reward; they are not trained on", "0", ACCOUNT),
        Term("failed_samples", "responses so far that an engine could not produce", "0", ACCOUNT),
        Term("failed/CAUSE", "failed_samples whose environment failed: timeout, crash or error", "0", ACCOUNT),
    ),
}


def terms() -> list[Term]:
    return [term for section in VOCABULARY.values() for term in section]


@cache
def patterns() -> list[tuple[re.Pattern[str], Term]]:
    def pattern(name: str) -> re.Pattern[str]:
        parts = re.split(r"([A-Z]+)", name)
        return re.compile("".join(f"(?:{WORDS[part][0]})" if part.isupper() else re.escape(part) for part in parts))

    return [(pattern(name), term) for term in terms() for name in term.names.split()]


def find(name: str) -> list[Term]:
    """Return a list with the `Term` that describes a metric; the list is empty for an unknown name."""
    return [term for pattern, term in patterns() if pattern.fullmatch(name)]


def extreme(name: str) -> Literal["max", "min", ""]:
    """Return "max" or "min" if the metric name ends with that word, and "" for sums and means."""
    ending = name.rpartition("_")[2]
    return "max" if ending == "max" else "min" if ending == "min" else ""


def band(name: str) -> Band | None:
    """Return the healthy range of a metric, or None if it is described in text only."""
    return next((term.healthy for term in find(name) if isinstance(term.healthy, Band)), None)


def label(name: str) -> str:
    """Return the name of a metric in the terminal display; empty if the metric is not displayed."""
    (term,) = find(name)
    return name.rpartition("/")[2] if term.label.isupper() else term.label
