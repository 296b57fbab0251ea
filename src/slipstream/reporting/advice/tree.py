"""The tree: every answer there is, upstream first. docs/advice.md is made from it.

An answer hides those that follow from it, and names them. What is wrong comes first, then what takes time, then what is
worth an eye.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.reporting.advice import drift, learning, running, teachers
from slipstream.reporting.advice import freshness_thresholds as freshness
from slipstream.reporting.advice.answer import WEIGHTS, Answer, Rule, answered, without
from slipstream.reporting.advice.readings import CHANCE, WINDOW, Case

OF_AGE = ("staleness", "variance blow-up", "moderate drift", "ratio tails", "clip saturation", "gated samples")
OF_DRIFT = ("biased draws", *OF_AGE)
OF_WEIGHTS = (*OF_AGE, "step too large", "spikes", "length surge", "short answers", "entropy collapse", "nothing moves")
SYMPTOMS = ("ratio tails", "clip saturation", "widened clip", "moderate drift", "spikes")

RULES: tuple[Rule, ...] = (
    Rule(
        name="lying teacher",
        reads="teacher/kl teacher/kl_error",
        when=f"below {teachers.BELOW_ZERO:g} beyond chance",
        cause="No distribution is at a KL below 0: these log-probs are not of these tokens (shifted rows, "
        "another prompt, a server that makes them up).",
        change="none: mend what serves the teacher",
        watch="teacher/kl at or above 0",
        find=teachers.lies,
        hides=("wrong teacher", "wrong template", "step too large", "wrong lessons", "spikes"),
    ),
    Rule(
        name="failing teacher",
        reads="teacher/invalid teacher/differed",
        when=f"more than {teachers.UNUSABLE:.0%} of its answers",
        cause="Its answers cannot be used: ledger.jsonl has the cause of each.",
        change="none: mend what serves the teacher",
        watch="teacher/invalid and teacher/differed at 0",
        find=teachers.fails,
        hides=("slow teacher", "dropped groups"),
    ),
    Rule(
        name="engine mismatch",
        reads="mismatch/kl mismatch/probs_pearson mismatch/ppl_ratio mismatch/probs_diff_max drift/kl/lag_0",
        when=f"on tokens of one version: KL > {drift.DRIFTED:g} ({drift.ROUNDED:g} in float32), Pearson < "
        f"{drift.APART:g}, perplexities {drift.PERPLEXED:.0%} apart, or a probability off by {drift.LEAP:g} in most "
        f"updates; KL > {drift.WATCHED:g}: an eye",
        cause="Sampler and learner give one version of the weights different log-probs (A): precision, "
        "temperature, kernels, parallelism, an expert's routing, or weights that did not arrive. Corrections would "
        "hide it.",
        change='`sampler.on_publish = "rebuild"`, `sampler.dtype` as the learner computes, float32 on both '
        "sides, no correction while looking; `slipstream doctor`",
        watch="drift/kl/lag_0 near 0, mismatch/probs_pearson above 0.99",
        find=drift.engines_differ,
        hides=(
            "wrong template",
            *OF_DRIFT,
            "step too large",
            "sequence weights",
            "too much rejected",
            "widened clip",
            "spikes",
            "nothing moves",
        ),
    ),
    Rule(
        name="agreement unknown",
        reads="drift/k3_kl",
        when=f"above {drift.DRIFTED:g}, and no token of one version to compare",
        cause="All drift that is seen may be a difference between the engines, as nothing was learned from at "
        "its own version.",
        change="none: `slipstream doctor` compares them",
        watch="drift/kl/lag_0, once there is any",
        find=drift.nobody_knows,
        weight="watch",
    ),
    Rule(
        name="wrong teacher",
        reads="samples.jsonl: logp, teacher_logp",
        when=f"correlation of probabilities over {teachers.ENOUGH} tokens or more below {CHANCE:g}/√(n − 1)",
        cause="What the teacher finds likely has nothing to do with what the student does: another model, "
        "another tokenizer, or rows of another request.",
        change="none: another `teachers.NAME.model`, or mend what serves it",
        watch="samples.jsonl: whole answers, and where the teacher disagrees",
        find=teachers.another_teacher,
        hides=(
            "wrong template",
            "wrong lessons",
            "step too large",
            *OF_DRIFT,
            "nothing moves",
            "spikes",
            "length surge",
        ),
    ),
    Rule(
        name="wrong template",
        reads="samples.jsonl: logp, teacher_logp; teacher/kl",
        when=f"the first {teachers.HEAD} tokens of answers, in the first {WINDOW} updates, {teachers.LOST:g} "
        "nats less likely to the teacher, and more so than what follows; without samples, KL > "
        f"{teachers.FOREIGN:g} from the first update on",
        cause="The teacher is lost where answers begin and finds its way later on: it does not see the prompt "
        "that it was made for (another chat template, a context, a missing special token).",
        change="no `teachers.NAME.context`, or one that is the teacher's own template",
        watch="teacher/kl at the first update, far lower",
        find=teachers.another_prompt,
        hides=(
            "wrong lessons",
            "step too large",
            *OF_DRIFT,
            "nothing moves",
            "spikes",
            "length surge",
            "short answers",
        ),
    ),
    Rule(
        name="other end token",
        reads="samples.jsonl: finish, logp, teacher_logp",
        when=f"the end token of answers, in the first {WINDOW} updates, {teachers.UNLIKELY:g} nats less likely to the "
        "teacher, and by so much more than the other tokens",
        cause="The teacher ends answers with another token, so that the student unlearns to end them.",
        change="none: a student and a teacher with one end token (docs/teachers.md)",
        watch="truncated",
        find=teachers.other_end,
        hides=("wrong lessons", "step too large", *OF_DRIFT, "truncated answers", "length surge", "spikes"),
    ),
    Rule(
        name="wrong lessons",
        reads="teacher/kl reward/REWARD accuracy",
        when="the KL falls beyond chance, and to its best, while a reward falls by a tenth of its best",
        cause="The student comes nearer to the teacher and is graded worse for it: the teacher is not right, "
        "answers in another form, or sees another prompt.",
        change="none: read samples; grade the teacher (`slipstream eval TEACHER`)",
        watch="accuracy",
        find=teachers.wrong_lessons,
        hides=("step too large",),
    ),
    Rule(
        name="biased draws",
        reads="lag/mean distill/clip_fraction teacher/kl",
        when="stale draws that are not weighed, or whose weights are clipped or capped at more than "
        f"{drift.CUT:.1%} of them, and the student is worse",
        cause="Draws of an older student count as if today's had drawn them, or for less than they are: what is "
        "followed is no longer the gradient of the reverse KL.",
        change="`loss.importance = true`; no `loss.ratio_cap`, no `loss.clip`",
        watch="teacher/kl falls",
        find=drift.biased,
        hides=OF_WEIGHTS,
    ),
    Rule(
        name="poor samples",
        reads="samples sampler.temperature",
        when=f"fewer than {learning.ANSWERS} answers an update, or a temperature below {learning.COLD:g}, and nothing "
        f"learned in {2 * WINDOW} updates or more",
        cause="So few answers make a gradient of noise; so cold ones show little but what the student is sure of.",
        change="`learner.batch_size` of 32 or a little more; `sampler.temperature = 1.0`",
        watch="teacher/kl, gradient/noise",
        find=learning.poor_samples,
        hides=("step too large", *OF_AGE, "nothing moves", "spikes"),
    ),
    Rule(
        name="step too large",
        reads="drift/kl/lag_1 drift/k3_kl_first drift/k3_kl_last teacher/kl reward/REWARD accuracy",
        when=f"one update moves the student by a KL > {drift.DRIFTED:g} (an eye, while it learns); or without "
        "drift the KL to teachers is a tenth above its best or twice that of the first update, or a reward a tenth "
        "below its best, beyond chance",
        cause="Single updates undo what the ones before have learned.",
        change="`learner.lr` × 0.1, or by √(0.02 / KL) where the KL of one update was measured; one epoch",
        watch="teacher/kl falls, drift/kl/lag_1 below 0.02",
        find=learning.too_large,
        hides=(
            *OF_AGE,
            "spikes",
            "length surge",
            "short answers",
            "entropy collapse",
            "truncated answers",
            "sequence weights",
        ),
    ),
    Rule(
        name="staleness",
        reads="drift/k3_kl lag/mean drift/ess",
        when=f"KL > {drift.DRIFTED:g} on stale tokens, engines agreeing, and the student no better for its "
        "updates (else an eye)",
        cause="The learner has moved away from what drew its tokens while they waited (B).",
        change="half of `schedule.tau`, `schedule.k` or `schedule.publish_every`",
        watch="drift/k3_kl below 0.02, drift/ess above 0.5",
        find=drift.stale,
        hides=(
            "variance blow-up",
            "moderate drift",
            "ratio tails",
            "clip saturation",
            "gated samples",
            "spikes",
            "sequence weights",
        ),
    ),
    Rule(
        name="variance blow-up",
        reads="correction/ess drift/ess drift/chi2_token gradient/noise",
        when=f"effective sample size < {drift.HALF:g}, chi2_token > {drift.BLOWN_UP:g}, or twice the gradient "
        "noise since weights (an eye, while it learns)",
        cause="A few tokens outweigh all others (D): filter before weighing.",
        change='without a policy loss `loss.kind = "m2po"`, then less staleness; with one, rejection alone below a '
        f"chi2_token of {drift.WEIGHED:g}; with token weights up to {drift.HOPELESS:g}, or where more than "
        f"{drift.MASKED:.0%} is rejected; beyond that, above {drift.TOO_MANY:.0%}, or with an ess below "
        f"{drift.THIRD:g} after it: less staleness",
        watch="correction/ess above 0.5, correction/rollout_rs_masked_fraction below 0.1, gradient/noise",
        find=drift.blown_up,
        hides=SYMPTOMS,
    ),
    Rule(
        name="sequence weights",
        reads="correction/ess correction/rollout_rs_seq_masked_fraction length/max",
        when=f"weights of whole sequences with an ess < {drift.HALF:g}; or sums over sequences of {drift.LONG} "
        f"tokens and more that reject more than {drift.MASKED:.0%} of them",
        cause="Products over a sequence grow exponentially with its length: long answers count nothing, or everything.",
        change='`correction.is_level = "token"`; `correction.rs = {seq_mean_k1 = [0.99, 1.01]}`',
        watch="correction/ess above 0.5",
        find=drift.by_sequence,
    ),
    Rule(
        name="too much rejected",
        reads="correction/rollout_rs_masked_fraction",
        when=f"above {drift.TOO_MANY:.0%}",
        cause="The correction has come to its limit: what it corrects is to be mended, or its bounds are "
        "narrower than the noise.",
        change="geometric bounds [0.99, 1.01] where they are the preset's; then less staleness",
        watch="correction/rollout_rs_masked_fraction below 0.1",
        find=drift.masks_too_much,
    ),
    Rule(
        name="moderate drift",
        reads="drift/chi2_token",
        when=f"above {drift.MODERATE:g}, and nothing rejects",
        cause="Outliers among the ratios (C).",
        change='`loss.kind = "m2po"`, beside a policy loss `correction.preset = "decoupled_geo_rs"`; less staleness',
        watch="drift/chi2_token below 0.3",
        find=drift.moderate,
        weight="watch",
        hides=("ratio tails",),
    ),
    Rule(
        name="ratio tails",
        reads="distill/ratio_max",
        when=f"above {drift.TAIL:g}, and the student has not learned",
        cause="A few draws have extreme ratios.",
        change='`loss.advantage = "current"` without `loss.clip`; `loss.kind = "m2po"`',
        watch="distill/ratio_max below 10",
        find=drift.tails,
        weight="watch",
        hides=("nothing moves",),
    ),
    Rule(
        name="widened clip",
        reads="policy/clip_fraction",
        when=f"above {drift.CLIPPED:g} with a clip that is wider than usual",
        cause="A wider clip hides how far the policy has moved: drift and steps come first.",
        change="no clip of your own in `policy.options`",
        watch="policy/clip_fraction below 0.2 for other reasons",
        find=drift.widened,
    ),
    Rule(
        name="clip saturation",
        reads="policy/clip_fraction distill/clip_fraction",
        when=f"above {drift.CLIPPED:g} and rising (an eye, while it does not)",
        cause="The trust region is used up (E): by age, by several epochs, or by the step. Never widen it first.",
        change="`learner.epochs = 1`; `learner.lr` × 0.5",
        watch="the clip fraction below 0.2",
        find=drift.clipped,
    ),
    Rule(
        name="spikes",
        reads="grad_norm",
        when=f"{learning.SPIKE:g} times its median, three times in {WINDOW} updates",
        cause="Single updates dominate: a collapse is often near.",
        change="`learner.lr` × 0.5",
        watch="grad_norm without jumps",
        find=learning.spikes,
    ),
    Rule(
        name="length surge",
        reads="length/mean teacher/kl truncated",
        when=f"{learning.SURGE:g} times that of 100 updates before, beyond chance (an eye, where a teacher's KL "
        "falls and answers end)",
        cause="The optimizer amplifies a bias towards long answers (F), tens of updates before a collapse. If "
        "it goes on with the guard, it is the reward: audit that.",
        change="`learner.lr` × 0.5 and `[guards.length_surge]`",
        watch="length/trend below 1.2",
        find=learning.surges,
        hides=("truncated answers",),
    ),
    Rule(
        name="entropy collapse",
        reads="student/entropy",
        when=f"below {learning.SURE:g} nats and {learning.COLLAPSED:.0%} of what it was, and no teacher is "
        "nearer for it; without a policy loss, and the student is worse",
        cause="The policy is sure of everything and explores nothing; rewards gain a little more and then stop.",
        change='`policy.loss = "clip_cov"`, `[guards.entropy]`, `[reference]`',
        watch="student/entropy",
        find=learning.collapses,
        hides=("short answers", "groups agree"),
    ),
    Rule(
        name="short answers",
        reads="length/mean",
        when=f"below {learning.SHRUNK:.0%} of that of 100 updates before",
        cause="Answers shrink to nothing: it pays to say nothing, or the end token has run away.",
        change="`learner.lr` × 0.5; audit the reward",
        watch="length/mean",
        find=learning.shrinks,
    ),
    Rule(
        name="small support",
        reads="distill/student_mass distill/teacher_mass",
        when=f"below {learning.COVERED:g}",
        cause="The ids that are compared miss much of what is likely.",
        change="twice `loss.k`",
        watch="the mass above 0.9",
        find=learning.uncovered,
    ),
    Rule(
        name="gated samples",
        reads="freshness/gated",
        when=f"above {learning.GATED:.0%}",
        cause="Samples come too late to count.",
        change="half of `schedule.tau`; half of `freshness.threshold`",
        watch="freshness/gated below 0.1",
        find=learning.worth_nothing,
    ),
    Rule(
        name="freshness thresholds",
        reads="ledger.jsonl: f, lag; freshness/buffer_f freshness/buffer_roll_coverage freshness/buffer_sup_coverage",
        when=f"a tenth quantile that is {freshness.NEAR:.0%} off the setting, over {freshness.MANY} samples or more",
        cause="As in a pilot run: ξ at which a tenth of the samples of lag tau count nothing, κ at which the "
        "stalest tenth of the buffers begins anew.",
        change="`freshness.threshold`, `kappa_f`, `kappa_roll`, `kappa_sup`",
        watch="freshness/gated near 0.1, freshness/refreshes",
        find=freshness.thresholds,
        weight="tune",
    ),
    Rule(
        name="truncated answers",
        reads="truncated",
        when=f"above {learning.CUT_OFF:.0%} (wrong above 50 %)",
        cause="Answers are cut off before they end, and are graded and scored so.",
        change="twice `sampler.max_tokens`",
        watch="truncated below 0.1",
        find=learning.cut_off,
    ),
    Rule(
        name="no reward",
        reads="reward/REWARD",
        when=f"0 in all of {2 * WINDOW} updates or more (an eye, without a policy loss)",
        cause="No answer is ever right: cut off, in another form than the reward expects, or too hard.",
        change="none: read samples",
        watch="reward/REWARD above 0",
        find=learning.unrewarded,
        hides=("groups agree",),
    ),
    Rule(
        name="groups agree",
        reads="policy/rows_moved",
        when=f"below {learning.AGREED:g} (an eye, while rewards rise)",
        cause="All answers of a group are right, or all are wrong: there is nothing to compare.",
        change="twice `sampler.group`; other prompts; a reward with degrees",
        watch="policy/rows_moved above 0.2",
        find=learning.agreed,
    ),
    Rule(
        name="dropped groups",
        reads="dropped dropped/REASON",
        when=f"more than {running.LOST:.0%} of the groups",
        cause="A stage fails for some groups, or they become too old: ledger.jsonl has the cause of each.",
        change="another `schedule.on_old`, where they become too old",
        watch="dropped stands still",
        find=running.drops,
    ),
    Rule(
        name="failing samples",
        reads="failed_samples ungraded/CAUSE",
        when=f"more than {running.LOST:.0%} of them",
        cause="Engines, environments or rewards fail for some answers: ledger.jsonl has the cause of each.",
        change="twice `task.timeout`, where grading takes too long",
        watch="failed_samples and ungraded/CAUSE stand still",
        find=running.breaks,
    ),
    Rule(
        name="dying workers",
        reads="restarts/WORKER",
        when="started again twice or more",
        cause="An engine's process dies or hangs: what it said last stands above in the log.",
        change="none",
        watch="restarts/WORKER",
        find=running.dies,
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
        reads="seconds/data seconds/turn seconds/update groups/ready",
        when=f"it waits {running.RESTS:.0%} of the time or less, and a batch is ready on average",
        cause="Learning is the slowest stage: what waits for it grows stale.",
        change="`learner.shared_prompt`, twice `learner.ranks`",
        watch="groups/ready",
        find=running.slow_learner,
        weight="speed",
    ),
    Rule(
        name="slow publish",
        reads="seconds/weights seconds/update",
        when=f"the learner waits more than {running.WAITED:.0%} of the time for it",
        cause="New weights take long to arrive, or wait for running answers.",
        change='`schedule.on_publish = "keep"`; twice `schedule.publish_every`, or "auto" beside such a tau',
        watch="seconds/publish, seconds/weights",
        find=running.slow_publish,
        weight="speed",
    ),
    Rule(
        name="waits its turn",
        reads="seconds/turn seconds/update",
        when=f"more than {running.WAITED:.0%} of the time",
        cause="The learner has scored groups and waits for order, or for age.",
        change='`schedule.order = "mixture"`; twice `schedule.max_lag`',
        watch="seconds/turn",
        find=running.waits_its_turn,
        weight="speed",
    ),
    Rule(
        name="thrown work",
        reads="thrown_tokens tokens",
        when=f"more than {running.THROWN:.0%} of the tokens",
        cause="Much is rolled out and not learned from.",
        change='`schedule.on_publish = "keep"`, `schedule.on_old = "wait"`, or twice `freshness.cooldown`',
        watch="thrown_tokens",
        find=running.throws,
        weight="speed",
    ),
    Rule(
        name="nothing to teach",
        reads="teacher/kl",
        when=f"below {teachers.ALIKE:g} over {teachers.PATIENCE} updates or more",
        cause="Student and teacher are nearly the same.",
        change="another teacher, or `[policy]`",
        watch="teacher/kl",
        find=teachers.nothing_to_teach,
        weight="watch",
    ),
    Rule(
        name="nothing moves",
        reads="teacher/kl reward/REWARD",
        when=f"{teachers.PATIENCE} updates or more, and neither has moved beyond chance",
        cause="The step is too small, or the gradient mostly noise.",
        change="twice `learner.lr`; more draws (`loss.m`), a larger `learner.batch_size`",
        watch="teacher/kl falls",
        find=learning.nothing_moves,
        weight="watch",
    ),
)
BY_NAME = {rule.name: rule for rule in RULES}


@dataclass(frozen=True)
class Advice:
    answers: Sequence[Answer]
    """The worst first, and of these what is furthest upstream."""
    updates: int
    needs: int = 2 * WINDOW
    """Updates by which now can be compared with then."""

    @property
    def enough(self) -> bool:
        return self.updates >= self.needs

    @property
    def wrong(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.weight == "wrong"]


def advise(case: Case) -> Advice:
    if not case.lines:
        return Advice((), 0)
    found = [(rule, rule.find(case)) for rule in RULES]
    answers = without([answered(rule, each, case.config) for rule, each in found if each is not None], BY_NAME)
    return Advice(
        tuple(sorted(answers, key=lambda answer: WEIGHTS.index(answer.weight))),
        len(case.lines),
        case.filled + 2 * WINDOW,
    )
