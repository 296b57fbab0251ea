"""Rules between the losses, teachers, rewards, guards and other sections of the method."""

from slipstream.config.objective import PolicyConfig
from slipstream.config.sections import Clashes, Sections
from slipstream.config.teacher import TeacherConfig, problems
from slipstream.errors import did_you_mean


def objective(c: Sections) -> Clashes:
    if c.loss.weight and not c.teachers:
        yield "distillation needs a teacher: add [teachers.main], or write loss.weight = 0"
    if c.teachers and not any(teacher.weight for teacher in c.teachers.values()):
        names = " and ".join(f"teachers.{name}.weight" for name in c.teachers)
        yield (f"{names} = 0 leaves nothing to distil: raise one, or drop [teachers] and write loss.weight = 0")
    if not c.loss.weight and c.teachers and not c.sampler.fusion and not (c.all_supervised and c.sft_asks_teachers):
        yield "loss.weight = 0 leaves the teacher nothing to do: drop [teachers], or the weight"
    for where, loss in (("loss", c.loss), ("sft.loss", c.sft.loss if c.sft is not None else None)):
        if loss is None:
            continue
        given = f'{where}.tokens = "{loss.tokens}"'
        if loss.tokens in ("tcod_f2b", "tcod_b2f", "turn_opd") and not c.every_environment:
            yield f'{given} weighs turns, and there is only one: add [environment], or write "first"'
        if loss.tokens == "iw_opd" and where == "sft.loss":
            yield f'{given} compares the teacher with the student that drew an answer, and none did: write "first"'
        helped = "fusion" if c.sampler.fusion else "teacher_replaces" if c.sampler.teacher_replaces else ""
        if loss.tokens == "iw_opd" and where == "loss" and helped:
            yield (
                f"{given} measures how far the student alone has left its teacher, and with sampler.{helped} the "
                'teacher draws, too: write "first", or drop one of them'
            )
    yield from problems(c.teachers, c.loss if c.loss.weight else None)
    for name, teacher in c.teachers.items():
        yield from teacher_alone(c, f"teachers.{name}", teacher)
        if teacher.spelling == "own":
            yield from other_spelling(c, f'teachers.{name}.spelling = "own"', teacher)
    if not c.loss.weight and c.policy is None and not c.all_supervised:
        yield "loss.weight = 0 leaves nothing to learn from: add [policy] for a loss on task rewards"
    if not c.loss.weight and c.policy is not None and not c.policy.weight:
        yield "loss.weight = 0 and policy.weight = 0 leave nothing to learn from: raise one"
    if c.policy is not None and not c.task.reward:
        yield '[policy] learns from rewards: set task.reward, for example "exact"'
    if c.data.order == "adaptive" and c.data.adaptive.weight_by == "reward" and not c.task.reward:
        yield 'data.order = "adaptive" learns from rewards: set task.reward, or data.adaptive.weight_by = "kl"'
    if c.data.order == "adaptive" and c.data.adaptive.weight_by == "kl" and not c.teachers:
        yield (
            'data.adaptive.weight_by = "kl" compares with a teacher, and there is none: write '
            'data.adaptive.weight_by = "reward"'
        )
    yield from freshness(c)
    yield from reference(c)
    yield from centering(c)
    yield from critic(c)
    if c.policy is not None:
        yield from rewards(c, c.policy)


def teacher_alone(c: Sections, where: str, teacher: TeacherConfig) -> Clashes:
    by_rewards = [field for field in teacher.shows if field != "last"]
    if by_rewards and not teacher.own_context and not c.task.reward:
        yield (f'{where}.context shows {{{by_rewards[0]}}}, which rewards decide: set task.reward, for example "exact"')
    if teacher.follow is not None and teacher.context is None and c.policy is None:
        yield (
            f"{where} sees what the student sees and follows it: there is nothing to learn from; add a context, or "
            "[policy], whose loss this teacher then regularises"
        )
    if teacher.follow is not None and teacher.follow.ema is not None and c.learner.dtype == "bfloat16":
        yield (
            f"{where}.follow.ema is kept in learner.dtype, and bfloat16 rounds small changes to 0: write "
            'learner.compute_dtype = "bfloat16" instead'
        )


def other_spelling(c: Sections, own: str, teacher: TeacherConfig) -> Clashes:
    """Yield what needs a teacher that knows the student's tokens."""
    if c.sft is not None and c.sft.loss.kind != "cross_entropy" and not c.sft.loss.spec.own_vocabulary:
        native = teacher.base_url is None and teacher.engine == "native"
        kinds = '"gold" or "cross_entropy"' if native else '"cross_entropy"'
        yield f"{own} gives no probabilities of the student's tokens: write sft.loss.kind = {kinds}"
    known = c.mix is None or c.mix.source == "file" or c.mix.prefix is not None
    if not known and (c.loss.spec.cache == "sampled" or c.loss.spec.merges):
        yield (
            f'with {own} loss.kind = "{c.loss.kind}" needs the log-probs of all responses, and those of [mix] are '
            'unknown: write loss.kind = "common_topk", or mix.source = "file"'
        )
    if c.loss.spec.merges and c.sampler.temperature != 1:
        yield (
            f'sampler.temperature = {c.sampler.temperature:g}: loss.kind = "{c.loss.kind}" multiplies probabilities '
            f"of the sampler by others, and {own} has those of temperature 1: write sampler.temperature = 1, or "
            'loss.kind = "gold"'
        )


def reference(c: Sections) -> Clashes:
    reference, samples = c.reference, c.learner.batch_size
    if reference is None:
        return
    if reference.into == "reward" and c.policy is None:
        yield 'reference.into = "reward" needs [policy], whose rewards it changes: write "loss"'
    if reference.horizon is not None and reference.horizon <= samples / 5:
        yield (
            f"reference.horizon = {reference.horizon:g} is not above a fifth of learner.batch_size = {samples}, "
            f"and β could become 0 in one update: write the samples of several updates, for example {10 * samples}"
        )


def rewards(c: Sections, policy: PolicyConfig) -> Clashes:
    names, weights = c.task.names, policy.reward_weights
    if policy.advantage == "grpo_turn" and not c.every_environment:
        yield (
            'policy.advantage = "grpo_turn" compares turns of episodes, and a response without an environment is one '
            'turn: add [environment], or write "grpo"'
        )
    if policy.old == "average" and c.learner.dtype == "bfloat16":
        yield (
            'policy.old = "average" is kept in learner.dtype, and bfloat16 rounds small changes to 0: write '
            'learner.compute_dtype = "bfloat16" instead'
        )
    for name in policy.filters:
        if c.loss.weight:
            yield (
                f"policy.{name} drops groups whose rewards are alike, and distillation learns from these, too: "
                f"write loss.weight = 0, or drop policy.{name}"
            )
        if c.reference is not None and c.reference.into == "reward":
            yield (
                f'policy.{name} drops groups whose rewards are alike, and reference.into = "reward" makes them '
                f'differ: write reference.into = "loss", or drop policy.{name}'
            )
    if policy.refill is not None and not c.most_refilled:
        yield (
            f"policy.refill = {policy.refill:g} allows no further group beside the {c.new_groups} of "
            f"an update: write {1 + 1 / c.new_groups:.4g} or more, or drop it"
        )
    if policy.advantage == "gdpo" and len(names) == 1:
        yield (
            'policy.advantage = "gdpo" normalises each of several rewards by itself, and task.reward is '
            f'{names[0]!r} alone: name another, or write policy.advantage = "grpo"'
        )
    if policy.advantage == "gdpo" and c.reference is not None and c.reference.into == "reward":
        yield (
            'policy.advantage = "gdpo" uses task.reward\'s rewards alone, so reference.into = "reward" would '
            'have no effect: write reference.into = "loss"'
        )
    if weights and len(names) == 1:
        yield (
            "policy.reward_weights weighs several rewards against each other, and task.reward is "
            f"{names[0]!r} alone: drop it, or write policy.weight"
        )
    for name in weights:
        if name not in names:
            yield f"policy.reward_weights: there is no reward {name!r}; {did_you_mean(name, names)}"
    if weights and not any(weights.get(name, 1.0) for name in names):
        yield "policy.reward_weights gives every reward weight 0, and nothing is left to learn from"


def critic(c: Sections) -> Clashes:
    """Yield what clashes with a critic, which predicts the rewards to come of single answers."""
    uses = c.policy is not None and c.policy.advantage == "gae"
    if c.policy is not None and uses and c.critic is None:
        yield 'policy.advantage = "gae" needs values: add [critic], or write advantage = "reinforce_plus_plus"'
    if c.critic is None:
        return
    if c.policy is None or not uses:
        yield '[critic] does nothing without its advantage: write policy.advantage = "gae", or drop [critic]'
        return
    if c.has_agents:
        yield "[critic] reads an episode as one sequence, and agents branch: drop it, or [environment.gateway]"
    most = min(c.updates - (0 if c.sft is None else c.sft.updates), c.health.idle)
    if c.critic.warmup >= most:
        why = "lets health.idle stop the run" if most == c.health.idle else "leaves no update for the student"
        yield f"critic.warmup = {c.critic.warmup} {why}: write less than {most}"
    for name in ("gamma", "lam"):
        if (value := c.policy.advantage_options.get(name, 0.0)) > 1:
            yield f"policy.advantage_options of gae: {name} = {value:g} must be at most 1"
    if not c.every_environment and c.policy.advantage_options.get("by_turn"):
        yield "policy.advantage_options.by_turn needs several turns: add [environment], or drop by_turn"


def centering(c: Sections) -> Clashes:
    """Yield what clashes with score centering: it needs the weight of every token at a position, and its own draws."""
    if c.policy is None or c.policy.centre is None:
        return
    given, parts = f'policy.centre = "{c.policy.centre}"', c.correction.parts
    level, spec, sampled = parts.is_level, c.loss.spec, c.loss.spec.cache == "sampled"
    if level not in (None, "token"):
        yield (
            f'{given} weighs each token at a position alone, and correction.is_level = "{level}" weighs several '
            'positions together: write is_level = "token", or drop centre'
        )
    if level is not None and parts.mode == "decoupled":
        yield (
            f"{given} needs the ratio to the current policy, and correction.preset = "
            f'"{c.correction.preset}" weighs by an older one: write "bypass_pg_token_icepop", or drop centre'
        )
    if rejects := [mode for mode in parts.rs or () if mode.startswith("token")]:
        yield (
            f"{given} does not know which tokens correction.rs rejects by {rejects[0]}: write correction.preset = "
            '"bypass_pg_token_icepop", or drop centre'
        )
    if c.correction.is_normalize:
        yield f"{given} has weights that are not normalised: drop correction.is_normalize, or centre"
    if c.mix is not None:
        yield f"{given} is for responses that the student draws alone: drop [mix], or centre"
    own = c.loss.weight and {"draws": "sampled", "top_k": "student_topk"}.get(c.policy.centre) == spec.cache
    if own and c.policy.centre_size is not None:
        yield f'policy.centre_size does nothing: loss.kind = "{c.loss.kind}" has tokens of its own: drop it'
    if c.policy.centre == "draws" and c.loss.weight and sampled and spec.draws < 2:
        yield f"{given} needs another draw at each position, and loss.m = 1 is the emitted token: write loss.m = 8"
    if c.policy.centre == "support":
        if not (c.sampler.top_k and c.sampler.keep_mask):
            yield f'{given} needs a recorded support: write sampler.top_k = 20 and keep_mask = true, say, or "draws"'
        if c.sampler.engine != "native":
            yield f'{given} needs the support from a native sampler: write sampler.engine = "native", or "draws"'
    if c.policy.centre == "top_k" and c.sampler.truncation:
        yield f'{given} needs the whole distribution, and sampler.{c.sampler.truncation[0]} cuts it: write "draws"'
    if c.policy.centre != "draws" and c.freshness is not None and c.freshness.anchor:
        yield f'{given} cannot be computed beside the draws of freshness.anchor: write "draws", or anchor = 0'


def freshness(c: Sections) -> Clashes:
    fresh = c.freshness
    if fresh is None:
        return
    if fresh.apply_to and c.policy is None:
        yield ('freshness.apply_to = "policy" weighs a policy loss, and there is none: drop it, or add [policy]')
    if not c.loss.weight and not fresh.apply_to:
        yield (
            '[freshness] weighs the distillation loss, and loss.weight = 0: write freshness.apply_to = "policy", or '
            "drop [freshness]"
        )
    if fresh.drift == "snapshots" and c.learner.snapshots == 0:
        yield (
            'freshness.drift = "snapshots" replays samples under the weights that drew them, and '
            "learner.snapshots = 0 keeps none: drop learner.snapshots, and as many are kept as needed"
        )
    if fresh.m is not None and c.loss.weight and c.loss.spec.cache == "sampled":
        yield (
            f'freshness.m does nothing: loss.kind = "{c.loss.kind}" has draws of its own, by which drift is '
            "estimated; drop it, or raise loss.m"
        )
    if fresh.m is not None and fresh.drift == "snapshots" and not fresh.anchor:
        yield 'freshness.m does nothing: drift = "snapshots" is exact, and anchor = 0: drop it'


def guards(c: Sections) -> Clashes:
    guards, tau = c.guards, c.schedule.max_tau
    if guards.kl is not None and c.schedule.adapts_tau:
        yield '[guards.kl] lowers schedule.tau, and so does tau = "auto": drop one of them'
    if guards.kl is not None and tau < 1:
        yield (
            '[guards.kl] lowers schedule.tau by one and more: write schedule.kind = "async" with tau = 1 or more, '
            "or drop it"
        )
    if guards.gac is not None and not tau:
        use = "guards.gac.limit takes out what stale samples repeat of the previous update"
        if guards.gac.limit is None:
            use = "[guards.gac] compares fresh samples with stale ones"
        yield (
            f"{use}, and here all of an update are of one age: write "
            'schedule.kind = "async" with a tau above 0, or drop it'
        )
