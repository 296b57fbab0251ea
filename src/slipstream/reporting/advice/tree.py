"""The decision tree: all advice rules, causes before symptoms. docs/advice.md shows them (`python tools/pages.py`).

An answer hides later answers that are its consequences, and lists their names; only an error hides errors. Answers are
sorted by severity, and answers of the same severity are in the order of the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.reporting.advice import drift, learning, running, teachers
from slipstream.reporting.advice.measurements import CHANCE, WINDOW, Case
from slipstream.reporting.advice.rules import WEIGHTS, Answer, Rule, answered, without_contradictions, without_symptoms

# rules whose findings can be symptoms of staleness, of drift, of wrong importance weights, and of high variance
STALE = ("staleness", "variance blow-up", "moderate drift", "ratio tails", "clip saturation", "gated samples")
DRIFTING = ("wrong importance weights", *STALE)
NOISY = ("ratio tails", "clip saturation", "widened clip", "moderate drift", "spikes")
# rules whose findings can be symptoms of wrong or noisy training data
LEARNING = ("step too large", "spikes", "no progress")
LENGTHS = ("length surge", "short answers")
MISMATCHED = ("wrong template", *DRIFTING, *LEARNING, "sequence weights", "too much rejected", "widened clip")

RULES: tuple[Rule, ...] = (
    Rule(
        name="teacher scores do not match",
        reads="teacher/kl teacher/kl_error",
        when=f"significantly below {teachers.BELOW_ZERO:g}",
        cause="A KL cannot be negative, so these log-probs do not belong to these tokens (shifted rows, another "
        "prompt, or a server that invents them).",
        change="none: repair the teacher's server",
        watch="teacher/kl at or above 0",
        find=teachers.negative_kl,
        hides=("wrong teacher", "wrong template", "step too large", "teacher lowers rewards", "spikes"),
    ),
    Rule(
        name="failing teacher",
        reads="teacher/invalid teacher/differed",
        when=f"more than {teachers.UNUSABLE:.0%} of its answers",
        cause="The teacher's scores cannot be used. ledger.jsonl has the cause of each failure.",
        change="none: repair the teacher's server",
        watch="teacher/invalid and teacher/differed at 0",
        find=teachers.fails,
        hides=("slow teacher", "dropped groups"),
    ),
    Rule(
        name="router flips",
        reads="router/flips mismatch/kl drift/kl/lag_0",
        when=f"above {drift.FLIPPED:g} without replay, and log-probs differ as in the next rule",
        cause="Sampler and learner send tokens to different experts with the same weights, so their log-probs differ.",
        change='`learner.router = "replay_rollout"`, which replays the experts that the sampler chose; else '
        '`correction.preset = "decoupled_token_icepop"`',
        watch="drift/kl/lag_0 near 0",
        find=drift.routers_flip,
        hides=("engine mismatch", *MISMATCHED),
    ),
    Rule(
        name="engine mismatch",
        reads="mismatch/kl mismatch/probs_pearson mismatch/ppl_ratio mismatch/probs_diff_max drift/kl/lag_0",
        when=f"For the same version of the weights: KL > {drift.KL_LIMIT:g} ({drift.KL_FLOAT32:g} in float32), "
        f"Pearson correlation < {drift.CORRELATION:g}, perplexities {drift.PERPLEXITY_GAP:.0%} apart, or a probability "
        f"off by {drift.PROBABILITY_GAP:g} in most updates. KL > {drift.KL_WARNING:g} is only a warning.",
        cause="Sampler and learner compute different log-probs with the same weights: precision, temperature, kernels, "
        "parallelism, expert routing, or weights that did not arrive. Corrections would hide the difference.",
        change='One after the other: no `sampler.quantisation`; `sampler.on_publish = "rebuild"`; `sampler.dtype` as '
        "the learner computes; float16 instead of bfloat16 in both; float32 in both. For a mixture of experts with "
        '`router/flips`: `correction.preset = "decoupled_token_icepop"`. Otherwise no correction until `slipstream '
        "doctor` finds the cause",
        watch="drift/kl/lag_0 near 0, mismatch/probs_pearson above 0.99",
        find=drift.engines_differ,
        hides=MISMATCHED,
    ),
    Rule(
        name="agreement unknown",
        reads="drift/k3_kl",
        when=f"above {drift.KL_LIMIT:g}, and no tokens on which to compare the engines at the same version",
        cause="The drift may be only a difference between the engines: no tokens were trained on at the version that "
        "sampled them.",
        change="none: `slipstream doctor` compares the engines",
        watch="drift/kl/lag_0, as soon as it is recorded",
        find=drift.agreement_unknown,
        weight="watch",
    ),
    Rule(
        name="wrong teacher",
        reads="samples.jsonl: logp, teacher_logp",
        when=f"correlation of token probabilities over at least {teachers.ENOUGH} tokens below {CHANCE:g}/√(n − 1)",
        cause="The teacher's probabilities are unrelated to the student's: another model, another tokenizer, or rows "
        "of another request.",
        change="none: another `teachers.NAME.model`, or repair the teacher's server",
        watch="samples.jsonl: whole responses, and the tokens where the teacher disagrees",
        find=teachers.another_teacher,
        hides=("wrong template", "teacher lowers rewards", *DRIFTING, *LEARNING, "length surge"),
    ),
    Rule(
        name="student too far",
        reads="student/repeated teacher/kl; samples.jsonl: logp, teacher_logp",
        when=f"Above {teachers.REPETITIVE:g} and higher than at the start, after a KL, or a log-prob gap behind the "
        f"first tokens, of more than {teachers.FAR:g} nats in the first updates",
        cause="The student was so far from its teacher that its own rollouts taught it little. It repeats itself, and "
        "reverse KL falls, because repetitions are easy to predict.",
        change="a supervised start, answers of the teacher in every update, or forward KL (docs/warm_start.md)",
        watch="student/repeated near that of the teacher's text, truncated",
        find=teachers.far_student,
        hides=(
            "wrong template",
            "teacher lowers rewards",
            *DRIFTING,
            *LEARNING,
            *LENGTHS,
            "entropy collapse",
            "truncated answers",
        ),
    ),
    Rule(
        name="wrong template",
        reads="samples.jsonl: logp, teacher_logp; teacher/kl",
        when=f"In the first {WINDOW} updates, the first {teachers.HEAD} tokens of responses are {teachers.LOST:g} nats "
        "less likely to the teacher than to the student, a gap at least twice that of later tokens. Without samples: "
        f"KL > {teachers.FOREIGN:g} from the first update on.",
        cause="The teacher fails at the start of responses and recovers later, so it does not see the prompt that it "
        "was trained on (another chat template, a wrong context, a missing special token).",
        change="no `teachers.NAME.context`, or one that is the teacher's own template",
        watch="teacher/kl far lower at the first update",
        find=teachers.another_prompt,
        hides=("teacher lowers rewards", *DRIFTING, *LEARNING, *LENGTHS),
    ),
    Rule(
        name="other end token",
        reads="samples.jsonl: finish, logp, teacher_logp",
        when=f"In the first {WINDOW} updates, the end token of responses is {teachers.UNLIKELY:g} nats less likely to "
        "the teacher than to the student. The gap exceeds that of other tokens by as much.",
        cause="The teacher ends its responses with another token, so the student stops using its own end token.",
        change="none in a run: start one with `sampler.stop` or `teachers.NAME.ends` (docs/teachers.md)",
        watch="truncated",
        find=teachers.other_end,
        hides=("teacher lowers rewards", "step too large", *DRIFTING, "truncated answers", "length surge", "spikes"),
    ),
    Rule(
        name="teacher lowers rewards",
        reads="teacher/kl reward/REWARD accuracy",
        when="the KL falls significantly, to its best, while a reward is 10% below its best",
        cause="The student comes closer to the teacher, but its rewards fall. The teacher is wrong, uses another "
        "answer format, or sees another prompt.",
        change="none: read samples; grade the teacher (`slipstream eval TEACHER`)",
        watch="accuracy",
        find=teachers.lowers_rewards,
        hides=("step too large",),
    ),
    Rule(
        name="wrong direction",
        reads="teacher/kl distill/loss",
        when="In updates 7 to 9, KL and loss are significantly above updates 1 to 3, by 20% for the KL, at a learning "
        f"rate of at most {drift.SMALL_LR:g}, and the student never gained",
        cause="Small steps move the student away from its teacher from the first update on: the gradient has the wrong "
        "sign (an own loss, reward or advantage), belongs to other tokens, or the steps are still too large.",
        change="`learner.lr` × 0.1; if the KL then rises more slowly, but still rises, the sign is wrong",
        watch="teacher/kl falls in the first updates",
        find=drift.wrong_direction,
        hides=("wrong importance weights", "poor samples", *LEARNING, *STALE, *LENGTHS, "entropy collapse"),
    ),
    Rule(
        name="wrong importance weights",
        reads="lag/mean distill/clip_fraction teacher/kl",
        when="Stale draws (extra tokens sampled at the same position) have no importance weights, or weights that are "
        f"clipped or capped for over {drift.CUT:.1%} of the draws. And the student gets worse.",
        cause="Draws from an older student are not weighted correctly, so the gradient is not that of the reverse KL.",
        change="`loss.importance = true`; no `loss.ratio_cap`, no `loss.clip`",
        watch="teacher/kl falls",
        find=drift.wrong_weights,
        hides=(*STALE, *LEARNING, *LENGTHS, "entropy collapse"),
    ),
    Rule(
        name="poor samples",
        reads="samples sampler.temperature",
        when=f"fewer than {learning.ANSWERS} responses per update, or a temperature below {learning.COLD:g}, and no "
        f"improvement in at least {2 * WINDOW} updates",
        cause="With so few responses the gradient is mostly noise. At so low a temperature, the student samples only "
        "tokens of which it is already sure.",
        change="`learner.batch_size` of about 32; `sampler.temperature = 1.0`",
        watch="teacher/kl, gradient/noise",
        find=learning.poor_samples,
        hides=(*STALE, *LEARNING),
    ),
    Rule(
        name="step too large",
        reads="drift/kl/lag_1 drift/k3_kl_first drift/k3_kl_last teacher/kl reward/REWARD accuracy",
        when=f"One update moves the student by a KL > {drift.KL_LIMIT:g} (only a warning unless the student gets "
        "worse). Or, without drift, the KL to the teachers is 10% above its best or twice that of the first update. Or "
        "a reward is 10% below its best.",
        cause="Single updates undo what earlier updates learned.",
        change="`learner.lr` × 0.1, or × √(0.02 / KL) where the KL of one update was measured; one epoch",
        watch="teacher/kl falls, drift/kl/lag_1 below 0.02",
        find=learning.too_large,
        hides=(*STALE, *LENGTHS, "spikes", "entropy collapse", "truncated answers", "sequence weights"),
    ),
    Rule(
        name="staleness",
        reads="drift/k3_kl lag/mean drift/ess",
        when=f"KL > {drift.KL_LIMIT:g} on stale tokens while the engines agree. Only a warning unless the student gets "
        "worse, or has a low effective sample size and does not improve.",
        cause="The learner's weights changed too much while the sampled tokens waited.",
        change="half of `schedule.tau`, `schedule.k` or `schedule.publish_every`. In a new run with a native teacher: "
        '`loss.kind = "reverse_kl"`, which stale tokens harm least (docs/freshness.md). With a policy loss that has no '
        'correction: `correction.preset = "decoupled_token_is"`; if the mean lag is at least '
        f'{drift.OLD_LAG:g}, or a response has over {drift.LONG} tokens, `"decoupled_geo_rs_seq_tis"`',
        watch="drift/k3_kl below 0.02, drift/ess above 0.5",
        find=drift.stale,
        hides=(*STALE[1:], "spikes", "sequence weights"),
    ),
    Rule(
        name="variance blow-up",
        reads="correction/ess drift/ess drift/chi2_token gradient/noise",
        when=f"effective sample size < {drift.LOW_ESS:g}, chi2_token > {drift.BLOWN_UP:g}, or twice the initial "
        "gradient noise with importance weights (only a warning while the student improves)",
        cause="A few tokens have much larger importance weights than all others. Reject outliers before weighting.",
        change=f"Less staleness if chi2_token > {drift.HOPELESS:g}, over {drift.TOO_MANY:.0%} is rejected, or ess < "
        f'{drift.LOWEST_ESS:g} in spite of rejection. Else without a policy loss `loss.kind = "m2po"`. Else rejection; '
        f"with token weights if chi2_token >= {drift.WEIGHED:g} or over {drift.MASKED:.0%} is rejected.",
        watch="correction/ess above 0.5, correction/rollout_rs_masked_fraction below 0.1, gradient/noise",
        find=drift.blown_up,
        hides=NOISY,
    ),
    Rule(
        name="sequence weights",
        reads="correction/ess correction/rollout_rs_seq_masked_fraction length/max",
        when=f"Sequence-level importance weights have an effective sample size < {drift.LOW_ESS:g}. Or a seq_sum "
        f"rejection drops more than {drift.MASKED:.0%} of the responses, and the longest has over {drift.LONG} tokens.",
        cause="Products over a sequence grow exponentially with its length, so long responses have weight 0 or "
        "dominate.",
        change='`correction.is_level = "token"`; `correction.rs = {seq_mean_k1 = [0.99, 1.01]}`',
        watch="correction/ess above 0.5",
        find=drift.by_sequence,
    ),
    Rule(
        name="too much rejected",
        reads="correction/rollout_rs_masked_fraction",
        when=f"above {drift.TOO_MANY:.0%}",
        cause="The correction is at its limit. Reduce the drift that it corrects, or widen bounds that are narrower "
        "than the noise.",
        change="geometric bounds [0.99, 1.01] instead of the preset's; then less staleness",
        watch="correction/rollout_rs_masked_fraction below 0.1",
        find=drift.rejects_too_much,
    ),
    Rule(
        name="moderate drift",
        reads="drift/chi2_token",
        when=f"above {drift.MODERATE:g}, and rejection is off",
        cause="Some importance ratios are outliers.",
        change='`loss.kind = "m2po"`, or with a policy loss `correction.preset = "decoupled_geo_rs"`; less staleness',
        watch="drift/chi2_token below 0.3",
        find=drift.moderate,
        weight="watch",
        hides=("ratio tails",),
    ),
    Rule(
        name="ratio tails",
        reads="distill/ratio_max",
        when=f"above {drift.TAIL:g}, and the student has not improved",
        cause="A few draws have extreme importance ratios.",
        change='`loss.advantage = "current"` without `loss.clip`; `loss.kind = "m2po"`',
        watch="distill/ratio_max below 10",
        find=drift.tails,
        weight="watch",
        hides=("no progress",),
    ),
    Rule(
        name="widened clip",
        reads="policy/clip_fraction",
        when=f"above {drift.CLIPPED:g} with a clip range that is wider than the default",
        cause="A wider clip range hides how far the policy has moved. Reduce drift and step size first.",
        change="no clip range of your own in `policy.options`",
        watch="policy/clip_fraction below 0.2 with the default clip range",
        find=drift.widened,
    ),
    Rule(
        name="clip saturation",
        reads="policy/clip_fraction distill/clip_fraction",
        when=f"above {drift.CLIPPED:g} and rising (only a warning if not rising)",
        cause="The trust region is used up: by stale samples, by several epochs, or by large steps. Do not widen the "
        "clip range first.",
        change=f"`learner.epochs = 1`. Above {drift.SATURATED:g} with a policy loss: "
        '`policy.loss = "gspo"` (or `"gmpo"`); if the run has one of these, `"reinforce"` with `correction.preset = '
        '"bypass_pg_geo_rs_token_tis"`. Otherwise `learner.lr` × 0.5',
        watch="the clip fraction below 0.2",
        find=drift.clipped,
    ),
    Rule(
        name="spikes",
        reads="grad_norm",
        when=f"above {learning.SPIKE:g} times its median in three of the last {WINDOW} updates",
        cause="Single updates dominate training, which often comes before a collapse.",
        change="`learner.lr` × 0.5",
        watch="grad_norm without jumps",
        find=learning.spikes,
    ),
    Rule(
        name="length surge",
        reads="length/mean teacher/kl truncated",
        when=f"{learning.SURGE:g} times its value 100 updates before (only a warning while a teacher's KL falls and "
        "responses are not cut off)",
        cause="The optimizer amplifies a bias towards long responses, tens of updates before a collapse. If lengths "
        "grow in spite of the guard, the reward is the cause: audit the reward.",
        change="`learner.lr` × 0.5 and `[guards.length_surge]`. If a run with a policy loss has this guard: "
        '`policy.loss = "reinforce"` with `correction.preset = "bypass_pg_geo_rs"`',
        watch="length/trend below 1.2",
        find=learning.surges,
        hides=("truncated answers",),
    ),
    Rule(
        name="entropy collapse",
        reads="student/entropy",
        when=f"Below {learning.SURE:g} nats and {learning.COLLAPSED:.0%} of its initial value, while the KL to the "
        "teacher does not fall. Without a policy loss, only if the student gets worse.",
        cause="The policy is almost deterministic and explores nothing. Rewards rise a little more and then stop.",
        change='`policy.loss = "clip_cov"`, `[guards.entropy]`, `[reference]`',
        watch="student/entropy",
        find=learning.collapses,
        hides=("short answers", "equal rewards"),
    ),
    Rule(
        name="short answers",
        reads="length/mean",
        when=f"below {learning.SHRUNK:.0%} of its value 100 updates before",
        cause="Responses shrink to almost nothing: the reward favours them, or the end token has become too likely.",
        change="`learner.lr` × 0.5; audit the reward",
        watch="length/mean",
        find=learning.shrinks,
    ),
    Rule(
        name="small support",
        reads="distill/student_mass distill/teacher_mass",
        when=f"below {learning.COVERED:g}",
        cause="The compared token ids cover too little of the probability mass.",
        change="twice `loss.k`",
        watch="the mass above 0.9",
        find=learning.uncovered,
    ),
    Rule(
        name="gated samples",
        reads="freshness/gated",
        when=f"above {learning.GATED:.0%}",
        cause="Many samples are too stale, and their freshness weight is 0.",
        change="half of `schedule.tau`; half of `freshness.threshold`",
        watch="freshness/gated below 0.1",
        find=learning.gated,
    ),
    Rule(
        name="freshness coefficients",
        reads="ledger.jsonl: roll, sup, lag; distill/loss freshness/roll",
        when=f"a setting differs from the suggestion by more than {learning.NEAR:.0%}, after {learning.MANY} updates",
        cause="This run measured how far student and teacher drift at each lag up to tau. With the suggested alpha and "
        f"beta, drift lowers the weight of the median sample at most to {learning.HALF}, at every lag and time. The "
        f"suggested anchor is {learning.ANCHORED:.0%} of the distillation loss, and the cooldown two fillings of the "
        "buffer.",
        change="`freshness.alpha`, `beta`, `anchor`, `cooldown`",
        watch="freshness/ess, freshness/f",
        find=learning.freshness_coefficients,
        weight="tune",
    ),
    Rule(
        name="freshness thresholds",
        reads="ledger.jsonl: f, lag; freshness/buffer_f freshness/buffer_roll_coverage freshness/buffer_sup_coverage",
        when=f"the 10% quantile differs from the setting by more than {learning.NEAR:.0%}, over {learning.MANY} "
        "samples or more",
        cause="This run suggests a threshold that gives weight 0 to a tenth of the samples of lag tau, and kappas that "
        "refresh the stalest tenth of the buffers.",
        change="`freshness.threshold`, `kappa_f`, `kappa_roll`, `kappa_sup`",
        watch="freshness/gated near 0.1, freshness/refreshes",
        find=learning.freshness_thresholds,
        weight="tune",
    ),
    Rule(
        name="truncated answers",
        reads="truncated",
        when=f"above {learning.CUT_OFF:.0%} (only a warning up to 50%)",
        cause="Responses are cut off before they end, and are graded and scored in that form.",
        change="twice `sampler.max_tokens`",
        watch="truncated below 0.1",
        find=learning.cut_off,
    ),
    Rule(
        name="no reward",
        reads="reward/REWARD",
        when=f"0 in at least {2 * WINDOW} updates, and never above (only a warning without a policy loss)",
        cause="No response is ever correct: responses are cut off, have another format than the reward expects, or the "
        "task is too hard.",
        change="none: read samples",
        watch="reward/REWARD above 0",
        find=learning.unrewarded,
        hides=("equal rewards",),
    ),
    Rule(
        name="equal rewards",
        reads="policy/rows_moved",
        when=f"below {learning.AGREED:g} (only a warning while rewards rise)",
        cause="All responses of a group have the same reward, so there is nothing to compare.",
        change="twice `sampler.group`; `policy.refill`; other prompts; a reward with partial credit",
        watch="policy/rows_moved above 0.2",
        find=learning.equal_rewards,
    ),
    Rule(
        name="dropped groups",
        reads="dropped dropped/REASON",
        when=f"more than {running.LOST:.0%} of the groups",
        cause="A stage fails for some groups, or groups become too old. ledger.jsonl has the cause of each.",
        change="another `schedule.on_old`, if groups become too old",
        watch="dropped does not grow",
        find=running.dropped_groups,
    ),
    Rule(
        name="failing samples",
        reads="failed_samples ungraded/CAUSE",
        when=f"more than {running.LOST:.0%} of the responses",
        cause="Engines, environments or rewards fail for some responses. ledger.jsonl has the cause of each.",
        change="twice `task.timeout`, if grading takes too long",
        watch="failed_samples and ungraded/CAUSE do not grow",
        find=running.failed_responses,
    ),
    Rule(
        name="dying workers",
        reads="restarts/WORKER",
        when="two restarts or more",
        cause="An engine's process dies or hangs. The log of the run has its last messages.",
        change="none",
        watch="restarts/WORKER",
        find=running.restarted_workers,
        weight="watch",
    ),
    Rule(
        name="slow teacher",
        reads="seconds/data seconds/update groups/waiting groups/scoring groups/rolling",
        when=f"the learner waits more than {running.WAITED:.0%} of the time, and most groups wait for scores",
        cause="Scoring is the slowest stage.",
        change="twice `teachers.NAME.replicas`, or its `concurrency` at an endpoint",
        watch="seconds/data, groups/waiting",
        find=running.slow_teacher,
        weight="speed",
    ),
    Rule(
        name="slow sampler",
        reads="seconds/data seconds/update groups/rolling",
        when=f"the learner waits more than {running.WAITED:.0%} of the time, and most groups are being rolled out",
        cause="Rollout is the slowest stage.",
        change="twice `sampler.replicas`",
        watch="seconds/data, idle/sampler",
        find=running.slow_sampler,
        weight="speed",
    ),
    Rule(
        name="slow learner",
        reads="seconds/data seconds/turn seconds/weights seconds/update groups/ready",
        when=f"the learner waits at most {running.RESTS:.0%} of the time, also for publishes, and on average a full "
        "batch is ready",
        cause="Training is the slowest stage, and groups become stale while they wait for the learner.",
        change="`learner.shared_prompt`, twice `learner.ranks`",
        watch="groups/ready",
        find=running.slow_learner,
        weight="speed",
    ),
    Rule(
        name="slow publish",
        reads="seconds/weights seconds/update",
        when=f"the learner waits more than {running.WAITED:.0%} of the time for a publish",
        cause="New weights take long to reach the samplers, or wait for running responses.",
        change='`schedule.on_publish = "keep"`; twice `schedule.publish_every`, or "auto" if `schedule.tau` is "auto"; '
        '`schedule.kind = "async"`',
        watch="seconds/publish, seconds/weights",
        find=running.slow_publish,
        weight="speed",
    ),
    Rule(
        name="waiting for the schedule",
        reads="seconds/turn seconds/update",
        when=f"the learner waits more than {running.WAITED:.0%} of the time",
        cause="The learner has scored groups, but the schedule's order or age bound does not allow it to use them yet.",
        change='`schedule.order = "mixture"`; twice `schedule.max_lag`',
        watch="seconds/turn",
        find=running.schedule_wait,
        weight="speed",
    ),
    Rule(
        name="discarded work",
        reads="thrown_tokens tokens",
        when=f"more than {running.DISCARDED:.0%} of the tokens",
        cause="Many tokens are rolled out and never trained on.",
        change='`schedule.on_publish = "keep"`, `schedule.on_old = "wait"`, or twice `freshness.cooldown`',
        watch="thrown_tokens",
        find=running.discarded_tokens,
        weight="speed",
    ),
    Rule(
        name="nothing to teach",
        reads="teacher/kl",
        when=f"below {teachers.ALIKE:g} over {teachers.PATIENCE} updates or more",
        cause="Student and teacher are almost the same.",
        change="another teacher, or `[policy]`",
        watch="teacher/kl",
        find=teachers.nothing_to_teach,
        weight="watch",
    ),
    Rule(
        name="no progress",
        reads="teacher/kl reward/REWARD",
        when=f"at least {teachers.PATIENCE} updates without a significant change of either",
        cause="The step is too small, or the gradient is mostly noise.",
        change="twice `learner.lr`; more draws (`loss.m`), a larger `learner.batch_size`",
        watch="teacher/kl falls",
        find=learning.no_progress,
        weight="watch",
    ),
)
BY_NAME = {rule.name: rule for rule in RULES}


@dataclass(frozen=True)
class Advice:
    answers: Sequence[Answer]
    updates: int
    needs: int = 2 * WINDOW
    """Minimum number of updates for a comparison of the last updates with the first."""

    @property
    def enough(self) -> bool:
        return self.updates >= self.needs

    @property
    def wrong(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.weight == "wrong"]


def advise(case: Case) -> Advice:
    if not case.lines:
        return Advice((), 0)
    found = {rule.name: each for rule in RULES if (each := rule.find(case)) is not None}
    answers = without_symptoms([answered(BY_NAME[name], each, case.config) for name, each in found.items()], BY_NAME)
    answers.sort(key=lambda answer: WEIGHTS.index(answer.weight))
    return Advice(
        tuple(without_contradictions(answers, found, case.config)),
        len(case.lines),
        case.filled + 2 * WINDOW,
    )
