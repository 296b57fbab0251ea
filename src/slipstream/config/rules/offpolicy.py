"""Rules for responses that the student does not draw alone: `[sft]`, `[mix]`, and teachers beside the sampler."""

from slipstream.config.offpolicy import MixConfig, SupervisedConfig
from slipstream.config.sections import Clashes, Sections
from slipstream.config.teacher import problems
from slipstream.estimators.tables.policy import POLICY_LOSSES


def offpolicy(c: Sections) -> Clashes:
    for name in ("sft", "mix"):
        section: SupervisedConfig | MixConfig | None = getattr(c, name)
        if section is None:
            continue
        if c.every_environment:
            yield f"[{name}] has responses of one turn, and [environment] makes episodes: drop one"
        if section.source == "teacher":
            yield from teachers_that_roll(c, name)
    if c.sft is not None:
        yield from supervised(c, c.sft)
    if c.mix is not None:
        yield from mixed(c, c.mix)


def teachers_that_roll(c: Sections, name: str) -> Clashes:
    """Yield what prevents a teacher from generating responses: only constant models that run here natively can."""
    if not c.teachers:
        yield f'{name}.source = "teacher" needs a teacher: add [teachers.main], or write "data"'
    for key, teacher in c.teachers.items():
        if teacher.base_url is not None or teacher.engine != "native":
            what = "is an endpoint" if teacher.base_url is not None else f"runs in {teacher.engine}"
            yield (
                f'{name}.source = "teacher": teachers.{key} {what}, and only a native engine here rolls out for '
                'the student: write source = "data", or engine = "native" without base_url'
            )
        if teacher.devices > 1:
            yield (
                f'{name}.source = "teacher": teachers.{key} runs on {teacher.devices} devices, and rolls out on '
                'one only: drop its devices, or write source = "data"'
            )
        if teacher.ends == "map":
            yield (
                f'{name}.source = "teacher": the rollouts of teachers.{key} would end with its own tokens, and '
                'ends = "map" changes only its scores: write sampler.stop instead, or source = "data"'
            )
        for option in ("context", "follow"):
            if getattr(teacher, option) is not None:
                yield (
                    f'{name}.source = "teacher" rolls out from the student\'s prompt with constant weights, and '
                    f'teachers.{key}.{option} changes that: drop it, or write source = "data"'
                )


def supervised(c: Sections, sft: SupervisedConfig) -> Clashes:
    if sft.updates > c.updates:
        yield f"sft.updates = {sft.updates} is more than updates = {c.updates}, which counts both"
    if c.all_supervised:
        idle = ["loss.weight"] if c.loss.weight else []
        idle += ["sft.until"] if sft.until is not None else []
        idle += [f"[{name}]" for name in ("policy", "mix", "freshness") if getattr(c, name) is not None]
        if idle:
            drop = "write loss.weight = 0" if idle == ["loss.weight"] else f"drop {idle[-1]}"
            yield (
                f"sft.updates = {sft.updates} leaves no update for rollouts, and {idle[-1]} is for these: {drop}, "
                "or raise updates"
            )
    if c.reference is not None or "reference" in c.loss.spec.takes:
        what = "[reference]" if c.reference is not None else "the reference of loss.reward_scale"
        yield (
            f"{what} is the student at the start of the run, before [sft] has taught it anything: drop one of "
            "them, or make the supervised updates in a run of their own"
        )
    if sft.loss.weight != 1:
        yield "sft.loss.weight does nothing: the supervised updates have no other loss; drop it"
    if sft.loss.kind == "cross_entropy":
        return
    if not c.teachers:
        yield f'sft.loss.kind = "{sft.loss.kind}" needs a teacher: write "cross_entropy"'
    for key, teacher in c.teachers.items():
        if teacher.base_url is not None or teacher.engine != "native":
            yield (
                f'sft.loss.kind = "{sft.loss.kind}" needs scores that only a native teacher gives beside those of '
                f'[loss], and teachers.{key} is none: write sft.loss.kind = "cross_entropy"'
            )
    yield from (f"sft: {problem}" for problem in problems(c.teachers, sft.loss))


def mixed(c: Sections, mix: MixConfig) -> Clashes:
    if mix.prefix is not None:  # the student draws every trained token, so all losses and corrections work
        return
    spec, where = c.loss.spec, f'[mix] with source = "{mix.source}"'
    if not c.loss.weight:
        yield (
            "[mix] with loss.weight = 0 teaches nothing: the policy loss learns only from tokens that the student "
            "draws; add [teachers.main] and raise loss.weight, or drop [mix]"
        )
    if c.freshness is not None:
        yield "[freshness] weighs samples by the student's weights that drew them: drop it, or [mix]"
    if c.correction.preset != "disabled":
        yield (
            f'correction.preset = "{c.correction.preset}" rejects tokens that the student would not draw, which '
            "are those of [mix]: drop one of them"
        )
    if c.guards.gac is not None:
        yield "[guards.gac] compares samples by the age of the student's weights: drop it, or [mix]"
    if c.sampler.keep_mask:
        yield "sampler.keep_mask records the support of the student's sampler alone: drop it, or [mix]"
    if spec.cache == "student_topk":
        yield (
            f'loss.kind = "{c.loss.kind}" uses the top-k ids of the student that drew, and [mix] has tokens '
            'that it did not draw: write loss.kind = "forward_kl", "reverse_kl" or "jsd"'
        )
    if spec.cache == "sampled" and not spec.compares:
        yield (
            f'loss.kind = "{c.loss.kind}" takes every token for one of the student, without importance weights: '
            'write "forward_kl", "reverse_kl" or "jsd", or "reverse_kl_mc" with importance'
        )
    if mix.source == "data" and spec.compares:
        yield (
            f'{where} has tokens whose behaviour log-prob is unknown, and loss.kind = "{c.loss.kind}" divides '
            'by it: write "forward_kl", "reverse_kl" or "jsd"'
        )
    if mix.source == "file" and spec.draws > 1:
        yield (f"loss.m = {spec.draws}: {where} knows the emitted token and no other draws: write loss.m = 1")
    if mix.source == "data" and c.sampler.group > 1:
        yield f"{where} has one answer for each prompt: write sampler.group = 1"


def teacher_replaces(c: Sections) -> Clashes:
    """Yield what cannot use tokens that a teacher replaced or took part in, and teachers that cannot do either."""
    where, spec = f"sampler.{c.sampler.asks_teacher}", c.loss.spec
    if not c.sampler.asks_teacher:
        return
    if c.sampler.fusion is not None:
        yield from fused(c)
    if len(c.teachers) != 1:
        yield f"{where} needs exactly one teacher, and there are {len(c.teachers)}: drop it"
    if c.sampler.teacher_replaces and (names := [*c.sampler.truncation, *c.sampler.changed("keep_mask")]):
        yield f"{where}: the teacher may draw tokens outside of sampler.{names[0]}: drop one of them"
    sections = ("policy", "environment", "environments") if c.sampler.teacher_replaces else ()
    for name in ("freshness", *sections):
        if getattr(c, name):
            yield f"{where} does not work with [{name}]: drop one of them"
    if c.sampler.teacher_replaces and c.correction.preset != "disabled":
        yield (
            f'{where}: correction.preset = "{c.correction.preset}" rejects tokens that the student would not '
            "draw, which are those of the teacher: drop one of them"
        )
    if c.guards.gac is not None:
        yield f"[guards.gac] compares samples by the age of the student's weights: drop it, or {where}"
    drift = {f"[guards.{name}]": getattr(c.guards, name) is not None for name in ("kl", "ess")}
    drift['schedule.tau = "auto"'] = getattr(c.schedule, "tau", None) == "auto"
    if found := next((name for name, used in drift.items() if used), None):
        yield (f"{found} acts on drift, which the tokens of the teacher raise without staleness: drop it, or {where}")
    if c.runtime.clock == "modelled":
        yield f'runtime.clock = "modelled" has no cost for the teacher of {where}: drop one of them'
    if spec.cache == "student_topk" or (spec.cache == "sampled" and not spec.compares):
        yield (
            f'loss.kind = "{c.loss.kind}" takes every token for a draw of the student alone, and {where} has '
            'others: write "forward_kl", "reverse_kl", "jsd", or "reverse_kl_mc" with importance'
        )
    for key, teacher in c.teachers.items():
        if teacher.base_url is not None or teacher.engine != "native":
            what = "is an endpoint" if teacher.base_url is not None else f"runs in {teacher.engine}"
            yield (
                f"{where}: teachers.{key} {what}, and only a native one steps with the sampler: drop {where}, or "
                'write engine = "native" without base_url'
            )
        if option := next(iter(teacher.changed("ends", "context", "follow", "devices", "spelling")), None):
            yield (
                f"{where} needs a teacher with constant weights, the student's prompt and its end tokens: drop it, "
                f"or teachers.{key}.{option}"
            )


def fused(c: Sections) -> Clashes:
    """Yield what clashes with logit fusion alone."""
    fusion = c.sampler.fusion
    if c.sampler.teacher_replaces:
        yield "sampler.teacher_replaces and sampler.fusion both let a teacher draw: drop one of them"
    measured = c.data.order == "adaptive" and c.data.adaptive.weight_by == "reward"
    if fusion is not None and fusion.difficulty and not measured:
        yield 'sampler.fusion.difficulty is measured with data.order = "adaptive" and weight_by = "reward": write these'
    if c.policy is not None and POLICY_LOSSES[c.policy.loss].ratio == "none" and c.correction.parts.is_level is None:
        yield (
            f'policy.loss = "{c.policy.loss}" takes every token for a draw of the student alone, and sampler.fusion '
            'draws from a mixture: write correction.preset = "bypass_pg_is" and correction.is_level = "token", or '
            'policy.loss = "vanilla"'
        )
