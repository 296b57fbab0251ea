"""Rules about lost work and about waiting."""

from slipstream.config.schedule import Async
from slipstream.metrics import INTENDED, new_tokens
from slipstream.reporting.advice.measurements import Case, Change, Evidence

LONG_WAIT = 0.5
"""Largest share of time that the learner should wait; beyond it, throughput could double."""
MUCH_LOST, MUCH_DISCARDED = 0.1, 0.25
"""Largest shares of lost groups or responses, and of tokens that were discarded."""
HARDLY_WAITS, DOMINANT_STAGE = 0.1, 0.8
"""Share of time below which the learner hardly waits; share of one stage above which it dominates a serial schedule."""


# --- lost work --------------------------------------------------------------------------------------------------------


def share_of(lost: float, trained: float) -> float:
    """Return the share of lost work; 0 for fewer than three losses, which are not significant."""
    return lost / (lost + trained) if lost >= 3 else 0.0


def new_samples(case: Case) -> float:
    """Return the number of samples of all updates, each counted at its first use ([reuse])."""
    return float(sum(line.get("samples", 0.0) * (1 - line.get("reuse/share", 0.0)) for line in case.lines))


def dropped_groups(case: Case) -> Evidence | None:
    lost = case.last("dropped") - sum(map(case.last, INTENDED))
    share = share_of(lost, new_samples(case) / case.config.sampler.group)
    if share <= MUCH_LOST:
        return None
    last = case.lines[-1] if case.lines else {}
    reasons = {name: case.last(name) for name in last if name.startswith("dropped/") and name not in INTENDED}
    reason = max(reasons, key=lambda name: reasons[name], default="dropped")
    too_old = "old" in reason or "lag" in reason
    changes: list[Change] = [{"schedule.on_old": "wait"}, {"schedule.on_old": "restart"}] if too_old else []
    show = f"grep -v trained {case.at}/ledger.jsonl | tail"
    return Evidence(reason, share, MUCH_LOST, changes, run=show)


def failed_responses(case: Case) -> Evidence | None:
    trained = new_samples(case)
    names = {name for line in case.lines for name in line if name.startswith("ungraded/") or name == "failed_samples"}
    for name in sorted(names):
        share = share_of(case.last(name), trained)
        if share > MUCH_LOST:
            changes: list[Change] = [{"task.timeout": 2 * case.config.task.timeout}] if name.endswith("timeout") else []
            show = f"grep error {case.at}/ledger.jsonl | tail"
            return Evidence(name, share, MUCH_LOST, changes, run=show)
    return None


def discarded_tokens(case: Case) -> Evidence | None:
    thrown = case.last("thrown_tokens") - case.last("refilled_tokens")  # what policy.refill replaces is wanted
    share = share_of(thrown, sum(map(new_tokens, case.lines)))
    if share <= MUCH_DISCARDED:
        return None
    schedule, freshness = case.config.schedule, case.config.freshness
    changes: list[Change] = []
    if isinstance(schedule, Async) and schedule.on_publish == "restart":
        changes.append({"schedule.on_publish": "keep"})
    if isinstance(schedule, Async) and schedule.on_old in ("restart", "drop"):
        changes.append({"schedule.on_old": "wait"})
    if freshness is not None and freshness.refresh == "adaptive":
        changes.append({"freshness.cooldown": 2 * max(freshness.cooldown, 1)})
    return Evidence("thrown_tokens", share, MUCH_DISCARDED, changes)


def restarted_workers(case: Case) -> Evidence | None:
    names = {name for line in case.lines for name in line if name.startswith("restarts/")}
    worst = max(sorted(names), key=case.last, default=None)
    if worst is None or case.last(worst) < 2:
        return None
    return Evidence(worst, case.last(worst), 1.0, run=f"cat {case.at}/meta.json")


# --- waiting ----------------------------------------------------------------------------------------------------------


def stages(case: Case) -> tuple[str, str, float, float]:
    """Return the stage that the learner waits for, its metric, its share of time, and the limit of this share."""
    if case.config.schedule.serial:  # here stages run one after the other
        scored, rolled = case.usual("stage/score"), case.usual("stage/rollout")
        who = "teacher" if scored > rolled else "sampler"
        return who, "stage/score" if who == "teacher" else "stage/rollout", max(scored, rolled), DOMINANT_STAGE
    scored = case.usual("groups/waiting") + case.usual("groups/scoring")
    who = "teacher" if scored > case.usual("groups/rolling") else "sampler"
    return who, "seconds/data", case.share("seconds/data"), LONG_WAIT


def slow_teacher(case: Case) -> Evidence | None:
    who, metric, share, limit = stages(case)
    if case.too_short or who != "teacher" or share <= limit or not case.config.teachers:
        return None
    changes: list[Change] = []
    for name, teacher in case.config.teachers.items():
        if teacher.base_url is not None:
            changes.append({f"teachers.{name}.concurrency": 2 * teacher.concurrency})
        elif teacher.replicas != "auto":
            changes.append({f"teachers.{name}.replicas": 2 * teacher.replicas})
    return Evidence(metric, share, limit, changes)


def slow_sampler(case: Case) -> Evidence | None:
    who, metric, share, limit = stages(case)
    if case.too_short or who != "sampler" or share <= limit:
        return None
    changes: list[Change] = [] if metric == "seconds/data" else [{"schedule.kind": "periodic"}]
    if case.config.sampler.replicas != "auto":
        changes.append({"sampler.replicas": 2 * case.config.sampler.replicas})
    if case.config.loss.weight and case.config.reuse is None:  # with rewards alone, later uses teach nothing
        changes.append({"reuse.times": 2})
    return Evidence(metric, share, limit, changes)


def slow_learner(case: Case) -> Evidence | None:
    waited = sum(map(case.share, ("seconds/data", "seconds/turn", "seconds/weights")))
    if case.too_short or waited > HARDLY_WAITS or case.usual("groups/ready") < case.config.new_groups:
        return None
    learner = case.config.learner
    changes, show = list[Change]([{"learner.ranks": 2 * learner.ranks}]), ""
    if case.config.runtime.device.startswith("cuda"):
        changes.append({"learner.compute_dtype": "bfloat16"})
    elif case.large and case.config.runtime.device == "cpu":
        changes = [{"learner.threads": 2 * (learner.threads or case.config.runtime.threads)}]
        if learner.compute_dtype is None:  # processors differ in whether bfloat16 is faster: the check measures it
            show = f"slipstream config {case.at}/config.toml --check | grep bfloat16"
    return Evidence("seconds/data", waited, HARDLY_WAITS, changes, run=show)


def slow_publish(case: Case) -> Evidence | None:
    share, schedule = case.share("seconds/weights"), case.config.schedule
    if case.too_short or share <= LONG_WAIT:
        return None
    if not isinstance(schedule, Async):  # others publish when no request is running, after every update
        return Evidence("seconds/weights", share, LONG_WAIT, [{"schedule.kind": "async", "schedule.publish_every": 2}])
    changes: list[Change] = [{"schedule.on_publish": "keep"}] if schedule.on_publish == "drain" else []
    if schedule.tau == "auto" and schedule.publish_every != "auto":
        changes.append({"schedule.publish_every": "auto"})
    elif schedule.publish_every != "auto":
        changes.append({"schedule.publish_every": 2 * schedule.publish_every})
    return Evidence("seconds/weights", share, LONG_WAIT, changes)


def schedule_wait(case: Case) -> Evidence | None:
    share = case.share("seconds/turn")
    if case.too_short or share <= LONG_WAIT or not isinstance(case.config.schedule, Async):
        return None  # other schedules bound the age by waiting
    changes: list[Change] = [{"schedule.order": "mixture"}] if case.config.schedule.order == "submission" else []
    if case.config.schedule.max_lag is not None:
        changes.append({"schedule.max_lag": 2 * case.config.schedule.max_lag})
    return Evidence("seconds/turn", share, LONG_WAIT, changes)
