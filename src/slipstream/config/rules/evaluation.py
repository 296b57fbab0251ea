"""Rules of evaluation, and a table of settings that have no effect without another setting."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from slipstream.config.base import Section
from slipstream.config.sections import Clashes, Sections


def evaluation(c: Sections) -> Clashes:
    if c.eval.suite is not None and not (c.checkpoint.every or c.checkpoint.minutes):
        yield "eval.suite scores checkpoints, and none is saved: set checkpoint.minutes or checkpoint.every"
    if c.eval.suite is not None and c.runtime.clock == "modelled":
        yield 'eval.suite takes real time: write runtime.clock = "real", or drop it'
    if not c.eval.every:
        return
    if c.data.eval is None:
        yield "eval.every needs held-out prompts: set data.eval"
    if not c.task.reward and not c.teachers:
        yield 'eval.every needs a way to grade answers: set task.reward, for example "exact"'
    if not c.task.reward and c.eval.changed("temperature"):
        yield (
            "eval.temperature does nothing without task.reward: the KL to the teacher is that of the policy that "
            "training samples from; drop it"
        )
    for key in "every", "prompts", "n":
        named = getattr(c.eval, key)
        if isinstance(named, dict) and (other := sorted(named.keys() ^ c.data.held_out.keys())):
            yield (
                f"eval.{key} is a table, and data.eval, too, must be one with the same names: {other[0]!r} is in "
                "one of them only"
            )
    publish_every = c.schedule.max_publish_every
    for name in c.data.held_out:
        every, n = c.eval.of(name, "every"), c.eval.of(name, "n")
        if n > c.sampler.slots:
            yield f"eval.n = {n} needs sampler.slots of at least {n}"
        if every % publish_every:
            yield (
                f"eval.every = {every} is not a multiple of schedule.publish_every = {publish_every}: samplers do "
                "not have the weights in between"
            )


class Needed(NamedTuple):
    """Settings of a section that have no effect unless another setting is made."""

    section: str
    settings: tuple[str, ...]
    has_effect: Callable[[Sections], bool]
    what: str
    """The other setting, as the error message names it."""


EVERY = "eval.every (0 if only `slipstream eval` uses it)"
NEEDED = (
    Needed(
        "task",
        ("timeout",),
        lambda c: bool(c.task.reward) or any(each.own_context for each in c.teachers.values()),
        "task.reward, or a function that writes a context",
    ),
    Needed("runtime", ("graders",), lambda c: bool(c.task.reward), "task.reward"),
    Needed(
        "runtime", ("heartbeat", "restarts"), lambda c: c.runtime.kind != "inline", 'runtime.kind = "local" or "ray"'
    ),
    Needed("data", ("eval", "eval_split"), lambda c: "every" in c.eval.model_fields_set, EVERY),
    Needed("eval", ("prompts", "n", "temperature"), lambda c: "every" in c.eval.model_fields_set, EVERY),
    Needed("log", ("project",), lambda c: bool({*c.log.to} - {"tensorboard"}), "a tracker in log.to that has projects"),
    Needed("data", ("teacher_key",), lambda c: len(c.teachers) > 1, "several teachers"),
    Needed(
        "data",
        ("weights", "weights_temperature"),
        lambda c: len(c.data.sources) > 1,
        "several sources in data.train",
    ),
    Needed(
        "data.curriculum",
        ("column", "epochs"),
        lambda c: c.data.order == "curriculum",
        'data.order = "curriculum"',
    ),
    Needed(
        "data.adaptive",
        ("weight_by", "half_life", "uniform_share"),
        lambda c: c.data.order == "adaptive",
        'data.order = "adaptive"',
    ),
    Needed("data", ("response",), lambda c: "data" in c.offpolicy_sources, '[sft] or [mix] with source = "data"'),
    Needed("health", ("kl", "invalid", "rise"), lambda c: bool(c.teachers), "a teacher"),
    Needed("health", ("reward",), lambda c: bool(c.task.reward), "task.reward"),
)


def unused(c: Sections) -> Clashes:
    for where, each in c.workers.items():
        if each.replicas != "auto":
            yield from without_effect(where, each, ("replicas_max",), 'replicas = "auto"')
    for row in NEEDED:
        if not row.has_effect(c):
            yield from without_effect(row.section, attrgetter(row.section)(c), row.settings, row.what)
    for name, teacher in c.teachers.items() if len(c.teachers) == 1 else ():
        yield from without_effect(f"teachers.{name}", teacher, ("key",), "another teacher")
    if not c.loss.weight:
        if c.loss.kind != type(c).model_fields["loss"].default.kind:
            yield "loss.kind does nothing without loss.weight: set that, or drop loss.kind"
        settings = tuple(name for name in type(c.loss).model_fields if name != "weight")
        yield from without_effect("loss", c.loss, settings, "loss.weight")


def without_effect(where: str, section: Section, settings: tuple[str, ...], what: str) -> Iterator[str]:
    for name in section.changed(*settings):
        yield f"{where}.{name} does nothing without {what}: set that, or drop {where}.{name}"
