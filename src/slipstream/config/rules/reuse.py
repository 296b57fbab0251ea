"""Rules for groups that several updates learn from (`[reuse]`)."""

from slipstream.config.schedule import ReuseConfig
from slipstream.config.sections import Clashes, Sections
from slipstream.estimators.tables.policy import POLICY_LOSSES


def reuse(c: Sections) -> Clashes:
    if c.reuse is None or c.reuse.times == 1:
        return
    times, where = c.reuse.times, f"reuse.times = {c.reuse.times}"
    if c.groups_per_update % times:
        yield (
            f"{where} does not divide the {c.groups_per_update} groups of an update: write learner.batch_size = "
            f"{c.sampler.group * times * max(1, round(c.groups_per_update / times))}, say"
        )
    for name in ("sft", "mix"):
        if getattr(c, name) is not None:
            yield f"[reuse] is for responses that the student draws alone: drop it, or [{name}]"
    for name, teacher in c.teachers.items():
        if teacher.follow is not None and teacher.relabel == "never":
            yield (
                f"{where} learns from scores of earlier weights of teachers.{name}, which follows the student: write "
                f'teachers.{name}.relabel = "stale", or drop [reuse]'
            )
    if c.schedule.adapts_tau or c.guards.kl is not None:
        key = 'schedule.tau = "auto"' if c.schedule.adapts_tau else "[guards.kl]"
        yield f"{key} acts on drift, which stored groups raise at every tau: drop it, or [reuse]"
    yield from stored(c, c.reuse)
    yield from own_draws(c, where)


def stored(c: Sections, reuse: ReuseConfig) -> Clashes:
    """Yield settings of the store that do nothing beside others."""
    taken, bound = c.new_groups * (reuse.times - 1), getattr(c.schedule, "max_lag", None)
    if reuse.groups is not None and reuse.groups <= taken:
        yield (
            f"reuse.groups = {reuse.groups} is all that an update takes from the store, so that reuse.order = "
            f'"{reuse.order}" has no choice: write more than {taken}, or order = "age"'
        )
    if reuse.order == "advantage" and (c.policy is None or c.sampler.group == 1):
        needs = "needs [policy], whose rewards it compares" if c.policy is None else "compares answers of one prompt"
        yield f'reuse.order = "advantage" {needs}: write "freshness" or "age", or sampler.group = 8 with [policy]'
    if reuse.max_lag is not None and bound is not None and reuse.max_lag >= bound:
        yield (
            f"reuse.max_lag = {reuse.max_lag} does nothing: schedule.max_lag = {bound} holds at each use; write less, "
            "or drop it"
        )
    if bound is not None and bound < reuse.times - 1:
        yield (
            f"schedule.max_lag = {bound} leaves no time for {reuse.times} uses in different updates: write max_lag = "
            f"{reuse.times - 1} or more, or reuse.times = {bound + 1}"
        )


def own_draws(c: Sections, where: str) -> Clashes:
    """Yield losses that take every token for a draw of the current student, which those of the store are not."""
    loss, policy, reference = c.loss, c.policy, c.reference
    if loss.weight and loss.spec.cache == "sampled" and not loss.spec.compares:
        yield (
            f'loss.kind = "{loss.kind}" takes every token for a draw of the current student, and {where} has older '
            'ones: write "reverse_kl_mc" with importance, "forward_kl", "reverse_kl" or "jsd"'
        )
    if policy is not None and POLICY_LOSSES[policy.loss].ratio == "none" and c.correction.parts.is_level is None:
        yield (
            f'policy.loss = "{policy.loss}" takes every token for a draw of the current student, and {where} has older '
            'ones: write correction.preset = "bypass_pg_is", or loss = "vanilla"'
        )
    if reference is not None and reference.into == "loss" and not reference.importance:
        yield (
            f'reference.into = "loss" takes every token for a draw of the current student, and {where} has older '
            "ones: write reference.importance = true"
        )
