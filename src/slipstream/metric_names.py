"""Every name in metrics.jsonl, once: what it means, what is healthy, and who computes it. No other name is written.

docs/metrics.md is made from it (`python tools/pages.py`), and the display of a run takes its labels from it.

A word in capitals stands for whatever its line in WORDS says. A band is a rule of thumb: a person looks again
outside of it, and nothing is decided by it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

WORDS = {
    "N": (r"\d+", "a number"),
    "LAGS": (r"\d+(-\d+)?", "the lags 0, 1, 2-3, 4-7 …"),
    "STAGE": (r"rollout|score|learn", "rollout, score, learn"),
    "WORKER": (r"(sampler|scorer|learner)(-\w+)*", "a worker, as trace.json calls it"),
    "TEACHER": (r"\w+", "a teacher's name in the config"),
    "REWARD": (
        r"\w+(/\w+)?",
        "a reward of task.reward, and NAME/PART what it is made of; greedy_… is the greedy answer's",
    ),
    "CAUSE": (
        r"timeout|crash|error|nan|type",
        "why there is no answer, or no reward of it: timeout, crash, error, nan, type",
    ),
    "NAME": (r"[\w/]+", "as an environment calls it"),
    "MODE": (r"(token|seq_sum|seq_mean|seq_max)_(k[123]|kl)|negative_seq", "a rejection mode of correction.rs"),
    "REASON": (r"[a-z_ ]+", "why a group was dropped, as the ledger has it"),
}


@dataclass(frozen=True, slots=True)
class Band:
    """Where a metric is healthy: from `low`, up to `high`, of which one is there."""

    low: float | None
    high: float | None
    but: str = ""
    """What else there is to say of it."""

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
    """One or several that mean the same, each of its own pair or at its own moment; between them a space."""
    meaning: str
    healthy: str | Band
    source: str
    """Where it is computed, below src/slipstream."""
    label: str = ""
    """What a person sees it called while a run goes on, if it is shown."""


LEARNER, LOSS, FROZEN = "engines/native/learning/learner.py", "objective/loss.py", "objective/frozen.py"
NOISE = "engines/native/learning/noise.py"
PASSES, METRICS, ACCOUNT = "engines/native/learning/passes.py", "metrics.py", "pipeline/ledger.py"
SURROGATE, POLICY, BATCH = "estimators/surrogate.py", "estimators/policy/__init__.py", "estimators/policy/batch.py"
DRIFT, RATIO, CORRECTION = "estimators/drift.py", "estimators/ratio.py", "estimators/correction.py"
FRESHNESS = "pipeline/control/buffer_refresh.py"
TRUST, STAGES, PUBLISH = "engines/score_checks.py", "pipeline/stages.py", "pipeline/publish.py"
CANARY = "pipeline/canary_rounds.py"


def gap(name: str, meaning: str, healthy: str | Band = "–") -> Term:
    return Term(f"drift/{name} mismatch/{name}", meaning, healthy, DRIFT)


GUARDS = "pipeline/control/guards.py"


VOCABULARY: dict[str, tuple[Term, ...]] = {
    "The loss": (
        Term("loss", "what was minimised, all parts with their weights", "falls, or stays with RL", LOSS, "loss"),
        Term(
            "grad_norm",
            "of the gradient, before it is clipped",
            "mostly below learner.clip_norm, no jumps",
            LEARNER,
            "gradient norm",
        ),
        Term(
            "gradient/signal",
            "‖ḡ‖² of the gradient of a vector added to every last hidden state: ḡ is the mean of what each of the N "
            "groups of a step would make of it",
            "–",
            NOISE,
        ),
        Term("gradient/power", "E‖g‖² of the same, by group: signal and noise", "–", NOISE),
        Term(
            "gradient/noise",
            "(power − signal)/(N − 1), the variance of ḡ",
            "below the signal, or larger batches; does not rise with corrections on",
            NOISE,
        ),
        Term(
            "gradient/cosine",
            "of the gradients of the fresher and the staler half of the first step's samples, with [guards.gac]",
            "as with a small tau",
            "engines/native/learning/ages.py",
        ),
        Term("lr", "learning rate of the update, guards included", "–", LEARNER),
        Term("distill/loss", "distillation loss per trained token, without its weight", "falls", LOSS),
        Term("distill/loss_abs", "its size, whatever the sign", "–", LOSS),
        Term("distill/loss_min distill/loss_max", "its extremes over tokens", "no jumps", LOSS),
        Term("distill/ratio", "mean p_current / p_behaviour of the draws", "near 1", SURROGATE),
        Term("distill/ratio_max", "the largest of them", below(10), SURROGATE),
        Term("distill/advantage", "mean log q − log p of the draws", "rises towards 0", SURROGATE),
        Term("distill/clip_fraction", "draws at which loss.clip or loss.ratio_cap acts", below(0.2), SURROGATE),
        Term("distill/weight", "decoupled_ppo: mean p_proximal / p_behaviour of the draws", "near 1", SURROGATE),
        Term("distill/dropped_fraction", "decoupled_ppo: draws above loss.weight_cap", below(0.1), SURROGATE),
        Term(
            "distill/second_moment distill/second_moment_before",
            "mean (log ratio)² of the draws, after m2po and before",
            "–",
            SURROGATE,
        ),
        Term("distill/masked_fraction", "draws that m2po took out", below(0.1), SURROGATE),
        Term("distill/budget_missed", "1 where m2po could not meet its budget", "0", SURROGATE),
        Term(
            "distill/student_mass distill/student_mass_min distill/student_mass_max",
            "the student's mass on the ids that are compared: mean, least, most",
            "mean above 0.9, or loss.k is too small",
            "estimators/divergence.py",
        ),
        Term(
            "distill/teacher_mass distill/teacher_mass_min distill/teacher_mass_max",
            "the teacher's mass on the same",
            "mean above 0.9, or loss.k is too small",
            "estimators/divergence.py",
        ),
        Term(
            "distill/overlap_ratio",
            "how much of the teacher's top-k is in the student's",
            "rises towards 1",
            "objective/distillation.py",
        ),
        Term(
            "distill/overlap_token_advantage",
            "mean −q (log q − log p) of the ids in both, over tokens that share any",
            "rises towards 0",
            "objective/distillation.py",
        ),
        Term("distill/overlap_any", "tokens that share any", "1", "objective/distillation.py"),
        Term(
            "student/entropy",
            "entropy of the student, at the temperature of the loss",
            "no collapse to 0",
            LOSS,
            "entropy",
        ),
        Term(
            "teacher/kl teacher/TEACHER/kl",
            "reverse KL to a teacher of what drew, estimated by the emitted tokens",
            "falls, and is never below 0 by more than its error",
            METRICS,
            "KL to teacher",
        ),
        Term(
            "teacher/kl_error teacher/TEACHER/kl_error", "its standard error, responses being independent", "–", METRICS
        ),
        Term("teacher/floored", "trained tokens whose log-prob by the teacher was raised to −100", "few", TRUST),
        Term("teacher/TEACHER/loss", "distillation loss on the tokens that this teacher scored", "falls", LOSS),
        Term("teacher/TEACHER/share", "its share of the trained tokens", "that of its prompts", LOSS),
        Term(
            "teacher/TEACHER/version",
            "of one that follows the student: the update after which the weights in its scorers were made",
            "rises",
            ACCOUNT,
        ),
        Term("teacher/TEACHER/seconds/publish", "what their publish took, into all its scorers", "–", ACCOUNT),
        Term("teacher/relabelled", "responses that were scored once more before the update", "–", METRICS),
        Term(
            "teacher/moved",
            "of these, mean KL over the vocabulary of what teachers say now to what they said then",
            below(0.1),
            METRICS,
        ),
        Term("teacher/aligned", "share of their tokens of which that is known", "1", METRICS),
        Term("teacher/TEACHER/tokens", "response tokens that it scored", "–", METRICS),
        Term(
            "reference/kl",
            "KL to the student as it was at the start",
            "as far as the run may go",
            "estimators/kl.py",
            "KL to reference",
        ),
        Term("reference/beta", "what that counts, where it is steered", "settles", FROZEN),
    ),
    "Task rewards": (
        Term("reward/REWARD", "mean over responses", "rises", METRICS, "REWARD"),
        Term("policy/loss", "the policy loss, without its weight", "–", POLICY),
        Term("policy/reward", "mean reward that advantages were made of", "rises", FROZEN),
        Term("policy/reward/REWARD", "its parts, where task.reward names several", "rises", FROZEN),
        Term("policy/rows_moved", "responses whose advantage is not 0: elsewhere a group agrees", above(0.2), FROZEN),
        Term("policy/kl", "mean log p_old − log p of the tokens", "near 0", POLICY),
        Term("policy/ratio", "mean p / p_old", "near 1", POLICY),
        Term("policy/ratio_max", "the largest of them", below(10), POLICY),
        Term("policy/clip_fraction", "tokens at which the trust region acts", below(0.2, ", and not rising"), POLICY),
        Term("policy/cov_candidates", "tokens that clip_cov drew from", "–", BATCH),
        Term(
            "policy/second_moment policy/second_moment_before", "mean (log ratio)², after m2po and before", "–", BATCH
        ),
        Term("policy/masked_fraction", "tokens that m2po took out", below(0.1), BATCH),
        Term("policy/budget_missed", "1 where m2po could not meet its budget", "0", BATCH),
    ),
    "Drift: the learner against what drew (drift), the learner at a token's version against what drew (mismatch)": (
        gap("kl", "mean log p_behaviour − log p: estimates the KL, noisily", below(0.02, "; from 0.05 on look")),
        gap("k3_kl", "the same KL, never negative", below(0.02, "; 1e-3 at lag 0 in float32")),
        Term("drift/kl/lag_LAGS", "kl over the tokens of one lag", "grows with the lag, near 0 at lag 0", DRIFT),
        Term("drift/chi2_token/lag_LAGS", "chi2_token over the tokens of one lag", "as chi2_token", DRIFT),
        gap("chi2_token", "variance that token weights would have", below(0.3, "; above 1 filter before weighing")),
        gap("chi2_seq", "variance that sequence weights would have", "bounded"),
        gap("chi2_row_p95", "chi2_token of each response: what 95 % of them are below", below(1)),
        gap("ess", "effective sample size of token weights, as a share", above(0.5)),
        gap("ess_seq", "that of the weights of whole responses", "near 1 at lag 0"),
        gap("ess_row", "that of the tokens of each response, averaged", above(0.5)),
        gap("ess_row_min", "its least over responses", "no jumps"),
        gap("tv", "total variation, estimated: bounds the bias of token-wise losses"),
        gap(
            "probs_pearson",
            "correlation of the two policies' probabilities",
            above(0.99, "; below 0.95 engines differ"),
        ),
        gap("probs_diff_mean", "mean difference of the probabilities"),
        gap("probs_diff_max", "the largest of them", "no jumps"),
        gap("training_ppl", "perplexity of responses under the learner", "–"),
        gap("training_log_ppl", "its logarithm", "–"),
        gap("rollout_ppl", "perplexity of responses under what drew them", "–"),
        gap("rollout_log_ppl", "its logarithm", "–"),
        gap("ppl_ratio", "perplexity under the learner over that under what drew, by response", "near 1"),
        gap("log_ppl_diff", "mean log-prob of a response under what drew it, less the learner's", "near 0"),
        gap("log_ppl_abs_diff", "its size", "near 0"),
        gap("log_ppl_diff_min", "its least over responses", "no jumps"),
        gap("log_ppl_diff_max", "its largest over responses", "no jumps"),
        Term("drift/kl_first drift/kl_last", "kl at the first and last step of an update", "close together", METRICS),
        Term("drift/k3_kl_first drift/k3_kl_last", "k3_kl at the same", "close together", METRICS),
        Term(
            "drift/rollout_kl",
            "exact KL over the vocabulary to what drew, where that version is kept",
            below(0.02),
            "engines/native/learning/first_look.py",
        ),
        Term(
            "drift/rollout_kl_coverage",
            "tokens whose version is kept",
            "1, or more learner.snapshots",
            "engines/native/learning/first_look.py",
        ),
        Term("kept/size", "ids that truncation left per trained token, with sampler.keep_mask", "–", LOSS),
        Term("old_logp_missing", "tokens whose version is gone: what drew stands for it", "0", FROZEN),
        Term("kl_missing", "tokens of which seq_max_kl knows no exact KL", "0", FROZEN),
    ),
    "Corrections": (
        Term("correction/ess", "effective sample size of the weights, or of ratios without", above(0.5), CORRECTION),
        Term("correction/rollout_rs_masked_fraction", "tokens rejected", below(0.1, "; from 0.25 on mend"), CORRECTION),
        Term("correction/rollout_rs_seq_masked_fraction", "responses that lost any token", below(0.1), CORRECTION),
        Term("correction/rollout_rs_MODE_masked_fraction", "tokens that this mode rejects", below(0.1), CORRECTION),
        Term("correction/rollout_rs_MODE_seq_masked_fraction", "responses from which it rejects", "–", CORRECTION),
        Term("correction/rollout_is_mean", "mean weight, truncated", "near 1", RATIO),
        Term("correction/rollout_is_std", "its standard deviation over tokens", below(1), RATIO),
        Term("correction/rollout_is_min correction/rollout_is_max", "its extremes", "–", RATIO),
        Term("correction/rollout_is_ratio_fraction_high", "ratios above the threshold", below(0.05), RATIO),
        Term("correction/rollout_is_ratio_fraction_low", "ratios below its inverse", below(0.05), RATIO),
        Term("correction/rollout_is_batch_norm_factor", "what is_normalize divided by", "near 1", CORRECTION),
    ),
    "Age": (
        Term(
            "lag/mean", "updates between a token and the one that learns from it", "about tau or less", METRICS, "lag"
        ),
        Term("tau", "what it was, where it may change in a run", "steady after a while", "pipeline/run.py"),
        Term("publish_every", "the same of updates between two publishes", "steady after a while", "pipeline/run.py"),
        Term("lag/max", "the oldest", "within the schedule's bound", METRICS),
        Term("lag/tokens_N", "trained tokens of this lag", "–", METRICS),
        Term("version", "of the weights, after the update", "–", ACCOUNT),
    ),
    "Freshness: what samples are worth, and when all begins anew": (
        Term(
            "freshness/f",
            "mean freshness of the samples of the update",
            "well above freshness.threshold",
            FRESHNESS,
            "freshness",
        ),
        Term("freshness/weight", "their mean weight, by which weights are divided", "–", FRESHNESS),
        Term("freshness/roll", "mean KL, by sample, from the learner to what drew it", below(0.02), FRESHNESS),
        Term(
            "freshness/sup",
            "mean KL from what teachers say of them to what they said",
            "0 where teachers stand still",
            FRESHNESS,
        ),
        Term("freshness/gated", "samples that counted nothing", below(0.25), FRESHNESS),
        Term("freshness/invalid", "samples of which no drift could be known", "0", FRESHNESS),
        Term(
            "freshness/roll_coverage",
            "share of their tokens whose drift is known",
            "1, or more learner.snapshots",
            FRESHNESS,
        ),
        Term("freshness/sup_coverage", "share whose supervision can be compared with the one before", "1", FRESHNESS),
        Term("freshness/anchor", "the KL to what drew, as it is in the loss", "small beside the loss", LOSS),
        Term("freshness/drift/lag_N", "rolling mean of freshness/roll at this lag", "grows with the lag", FRESHNESS),
        Term(
            "freshness/buffer_f",
            "mean freshness of what is scored and not learned from yet",
            "above freshness.kappa_f",
            FRESHNESS,
        ),
        Term("freshness/buffer_roll_coverage", "roll_coverage there", "above freshness.kappa_roll", FRESHNESS),
        Term("freshness/buffer_sup_coverage", "sup_coverage there", "above freshness.kappa_sup", FRESHNESS),
        Term("freshness/model_error", "buffer_f by its lags, less what a pass over it found", "near 0", FRESHNESS),
        Term("freshness/refreshes", "how often all that had begun began anew, so far", "few", FRESHNESS),
        Term("freshness/refreshed", "the update after which it last did", "–", FRESHNESS),
        Term(
            "freshness/refreshed_tokens", "tokens that were thrown away for it, so far", "few beside tokens", FRESHNESS
        ),
    ),
    "Samples": (
        Term("samples", "responses of the update", "learner.batch_size", METRICS),
        Term("tokens", "their tokens", "–", METRICS),
        Term(
            "length/mean length/max",
            "tokens of a response",
            "mean steady: + 20 % in 100 updates is a sign",
            METRICS,
            "length",
        ),
        Term(
            "length/trend",
            "mean length of the last 10 updates over that of 10 that came 100 before, or at the start",
            below(1.2),
            METRICS,
        ),
        Term("truncated", "responses that ended at sampler.max_tokens", below(0.1), METRICS, "cut off"),
        Term(
            "accuracy", "of held-out prompts: mean reward (eval)", "rises", "pipeline/evaluate.py", "held-out accuracy"
        ),
    ),
    "Episodes": (
        Term("episode/turns", "turns of the student, mean over episodes in an environment", "–", METRICS, "turns"),
        Term("episode/calls", "calls of tools, malformed ones among them", "–", METRICS),
        Term(
            "episode/invalid",
            "episodes with a call that is malformed, unknown or has wrong arguments",
            "falls",
            METRICS,
            "invalid",
        ),
        Term("episode/failed", "calls at which the tool raised", "few", METRICS),
        Term("episode/looped", "episodes with the same call and the same answer three times running", "0", METRICS),
        Term("episode/premature", "episodes that the student ended without a word", "0", METRICS),
        Term("episode/observed", "share of tokens that were seen, and not said", "–", METRICS),
        Term(
            "episode/seconds",
            "in which an episode waited for its environment",
            "below the time of its turns",
            METRICS,
            "tool s",
        ),
        Term(
            "episode/branches",
            "lineages of an episode: more than one where an agent has subagents, or changes what was said",
            "as many as conversations",
            METRICS,
        ),
        Term("episode/failures", "environments that failed and were begun again, per episode", "0", METRICS),
        Term("episode/out_of_turns", "episodes that ended at environment.turns or calls", below(0.1), METRICS),
        Term("episode/out_of_time", "episodes that ended at environment.seconds", "0", METRICS),
        Term(
            "environment/NAME",
            "what an environment counts itself, in its attribute metrics: mean over episodes",
            "–",
            "environments/forms.py",
        ),
    ),
    "Speed": (
        Term("tokens_per_s", "response tokens learned from, per second", "steady", ACCOUNT, "tok/s"),
        Term("samples_per_s", "responses, per second", "steady", ACCOUNT, "samples/s"),
        Term("tokens_per_s/STAGE", "tokens that the stage finished, per second", "alike", ACCOUNT),
        Term("overlap/stages", "time of the three stages over wall clock", "above 1 where they overlap", METRICS),
        Term("overlap/busy", "the same of all that keeps workers busy", "above 1 where they overlap", METRICS),
        Term("stage/STAGE", "share of the time in which the stage did its own work", "–", METRICS),
        Term("busy/STAGE", "share in which it was at anything", "the dearest stage near 1", METRICS),
        Term("idle/WORKER", "share in which a worker had nothing to do", "near 0 for the dearest", METRICS),
        Term("rows/filled", "learner's rows that are not padding", above(0.9), PASSES),
        Term("saved/prompt", "tokens that learner.shared_prompt saved", "–", PASSES),
        Term("time", "seconds since the run began", "–", ACCOUNT),
    ),
    "Waits": (
        Term("seconds/update", "wall clock since the update before", "steady", ACCOUNT),
        Term("seconds/data", "the learner waited for scored groups", "near 0; else more samplers", STAGES),
        Term("seconds/turn", "it waited for order or age", "near 0; else a wider bound", STAGES),
        Term("seconds/relabel", "it waited for teachers that were asked once more", "below seconds/learn", STAGES),
        Term("seconds/learn", "it learned", "most of seconds/update", STAGES),
        Term("seconds/weights", "it waited for a publish, and the evaluation of what was published", "near 0", STAGES),
        Term("seconds/eval", "that evaluation took, of the update after it", "–", ACCOUNT),
        Term("seconds/publish", "a publish took, into all samplers at the same time", "below seconds/update", STAGES),
        Term("publish/wait", "until running requests stood still", "a token, or with drain a response", PUBLISH),
        Term("publish/load", "copying weights, and their fingerprint", "–", PUBLISH),
        Term("publish/rebuild", "running prefixes through the new weights", "–", PUBLISH),
    ),
    "Guards": (
        Term(
            "guard/length_surge guard/ess guard/entropy guard/gac",
            "what the guard multiplied the learning rate of the update by",
            "1",
            GUARDS,
        ),
        Term("guard/kl", "by how much tau was lowered", "0", GUARDS),
    ),
    "Where groups are, and what was lost": (
        Term("groups/rolling", "being rolled out", "most of them", ACCOUNT),
        Term("groups/waiting groups/scoring", "waiting for a scorer, and with one", "few; else more scorers", ACCOUNT),
        Term("groups/ready", "scored, and not yet learned from", "few; else the learner is the slowest", ACCOUNT),
        Term("credits", "in use", "all of them, until the end", ACCOUNT),
        Term("dropped", "groups so far that ended without being trained on", "0", ACCOUNT),
        Term("dropped/REASON", "of these, for this reason", "0", ACCOUNT),
        Term("restarted", "groups so far that became too old and began again", "few", ACCOUNT),
        Term("thrown_tokens", "tokens so far of responses that were not learned from", "few", ACCOUNT),
        Term("greedy_tokens", "tokens so far of greedy answers, drawn for their reward alone (remax)", "–", ACCOUNT),
        Term("teacher/invalid", "responses, since the update before, whose scores cannot be used", "0", ACCOUNT),
        Term("teacher/rechecked", "groups, since the update before, that were scored twice", "–", ACCOUNT),
        Term("teacher/differed", "of these, whose scores were others the second time", "0", ACCOUNT),
        Term("teacher/recheck_max", "by how much at most (root mean square over a response)", "near 0", ACCOUNT),
        Term("canary/teacher", "how far any teacher was from what it must say of fixed texts", "near 0", CANARY),
        Term(
            "canary/sampler", "KL (k3) to the learner of any sampler with the learner's own weights", "near 0", CANARY
        ),
        Term("canary/retired", "replicas so far that were stopped because their answers were wrong", "0", CANARY),
        Term("canary/redone", "groups so far that others answered again for that", "0", CANARY),
        Term("canary/trained", "groups so far that were learned from before such a replica was found", "0", CANARY),
        Term("restarts/WORKER", "how often so far it died, or hung, and was started again", "0", ACCOUNT),
        Term("ungraded/CAUSE", "members that have no reward, and are not learned from", "0", ACCOUNT),
        Term("failed_samples", "members so far that an engine could not answer", "0", ACCOUNT),
        Term("failed/CAUSE", "of these, whose environment failed: timeout, crash or error", "0", ACCOUNT),
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
    """What a name of metrics.jsonl means: one term, or none if it is not of the vocabulary."""
    return [term for pattern, term in patterns() if pattern.fullmatch(name)]


def extreme(name: str) -> Literal["max", "min", ""]:
    """Which extreme a metric is, by the end of its name; all others are sums, or means."""
    ending = name.rpartition("_")[2]
    return "max" if ending == "max" else "min" if ending == "min" else ""


def band(name: str) -> Band | None:
    """Where a metric is healthy, if that is said in numbers."""
    return next((term.healthy for term in find(name) if isinstance(term.healthy, Band)), None)


def label(name: str) -> str:
    """What a person sees it called."""
    (term,) = find(name)
    return name.rpartition("/")[2] if term.label.isupper() else term.label
