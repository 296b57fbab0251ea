"""`slipstream doctor`: checks of a config and its engines that take a minute or two.

Checks that need no weights run first. Then the engines start as in `train`, pass the same checks as there, make one
update and publish it. Each finding is printed at once, with its fix.
"""

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from slipstream.commands.first_run import check_gpus, versions
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.console import Screen
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.errors import SlipstreamError
from slipstream.plan import checks
from slipstream.plan.checks import Finding
from slipstream.plan.notes import sandbox_notes
from slipstream.plan.plan import Plan, changed, fast_checks, plan_with_texts
from slipstream.plan.rules.memory import check_room
from slipstream.protocols import Engines, greedy
from slipstream.records import Batch, Group, Handle, Prompt, total
from slipstream.runs.start import opened, process_launcher

LARGE_LR = 1e-3
"""Learning rate of doctor's only update: large enough to change the sampler's log-probs in any precision."""


def run(args: Namespace) -> int:
    config: Config = args.settings
    if args.gpu:
        return 0 if check_gpus(args.config, args.overrides, Screen(), small=config.runtime.device == "cpu") else 1
    return 0 if doctor(config, Screen()) else 1


def doctor(config: Config, console: Console) -> bool:
    """Print all findings; return True if every check passed."""
    found: list[Finding] = []

    def report(findings: Sequence[Finding]) -> None:
        for finding in findings:
            found.append(finding)
            mark = "[green]ok  [/]" if finding.ok else "[red]FAIL[/]"
            console.print(f"{mark} {finding.name}: ", end="")
            console.print(finding.detail, markup=False, soft_wrap=True)
            if finding.fix:
                console.print(f"     {finding.fix}", markup=False, soft_wrap=True)

    try:
        fast_checks(config)
        with process_launcher(config) as launcher:
            console.print(versions(), soft_wrap=True)
            made = plan_with_texts(config)
            files = f"{len(made.prompts.rows)} prompts; vocabularies and end tokens match"
            report([Finding("files, tokenizers and lengths", True, files)])
            report([Finding("sandbox limits", True, text) for text in sandbox_notes(made.config)])
            report(memory_findings(made))
            with opened(with_large_step(made), launcher, console) as engines:
                report(asyncio.run(check_engines(made, engines, checks.first_prompts(made))))
            if self_taught := self_taught_plan(made):
                with opened(self_taught, launcher, console) as engines:
                    report(asyncio.run(check_self_taught(self_taught, engines, checks.first_prompts(made))))
    except SlipstreamError as error:
        report([Finding("stopped", False, str(error))])
    failed = sum(not finding.ok for finding in found)
    console.print("all checks passed" if not failed else f"{failed} of {len(found)} checks failed")
    return not failed


def memory_findings(made: Plan) -> list[Finding]:
    needed = [Finding("memory", True, str(need)) for need in made.needs]
    return needed + [Finding("memory", False, text) for text in check_room(made.engines)]


def with_large_step(made: Plan) -> Plan:
    learner = made.engines.learner
    settings = learner.settings.model_copy(update={"lr": LARGE_LR, "warmup": 0, "minibatches": 1, "epochs": 1})
    return replace(made, engines=replace(made.engines, learner=replace(learner, settings=settings)))


async def check_engines(made: Plan, engines: Engines, prompts: Sequence[Prompt]) -> list[Finding]:
    found = await checks.start_checks(made, engines, prompts, version=0)
    if any(
        finding.name.startswith(("teacher", "environment")) and not finding.ok and finding.fatal for finding in found
    ):
        return found  # the learner would have no samples
    return found + await checks.episodes(made, engines, prompts) + await check_publish(made, engines, prompts)


async def check_publish(made: Plan, engines: Engines, prompts: Sequence[Prompt]) -> list[Finding]:
    """Make one update, publish it, and compare sampler and learner again, to find samplers with old weights."""
    before = await checks.publish(engines)
    groups = await checks.sample_groups(made, engines, prompts, group=made.sampling.group)
    batch = Batch(tuple(await checks.scored(engines, [with_rewards(made.config, group) for group in groups])), 1)
    await engines.learner.accumulate(batch, total(await engines.learner.prepare(batch)))
    await engines.learner.step()
    after = await checks.publish(engines)
    moved = Finding("an update changes the weights", after != before, f"{before} → {after}")
    if not moved.ok:
        return [replace(moved, fix="the gradient was zero: check the loss, and that rewards in a group differ")]
    groups = await checks.sample_groups(made, engines, prompts)
    again = checks.agreement(await checks.compared(engines, groups, update=2), made.engines.rounding, groups)[0]
    fix = "" if again.ok else f"the sampler does not run the published weights; {again.fix}"
    return [moved, replace(again, name="sampler and learner, after a publish", fix=fix)]


def with_rewards(config: Config, group: Group) -> Group:
    """Give the samples of a group different rewards, so that a policy loss has a gradient."""
    if config.policy is None:
        return group
    best = {greedy(name): 0.5 for name in config.task.names if rollout_sampling(config).greedy}

    def rewards(number: int) -> dict[str, float]:
        return dict.fromkeys(config.task.names, float(number % 2)) | best

    return [Handle(replace(h.header, rewards=rewards(h.header.number + i)), h.body) for i, h in enumerate(group)]


def self_taught_plan(made: Plan) -> Plan | None:
    """Return a plan in which the student is its own teacher; None if no teacher runs on this machine."""
    config = made.config
    here = [teacher for teacher in config.teachers.values() if teacher.base_url is None]
    if not here:
        return None
    student = TeacherConfig(model=config.student, dtype=config.learner.dtype, token_budget=here[0].token_budget)
    sampler, learner = {"temperature": config.loss.temperature}, {"quantised": False}  # as the teacher has them
    alone = config.model_copy(update={"teachers": {"main": student}})
    return changed(made, alone.with_values(sampler=sampler, learner=learner))


async def check_self_taught(made: Plan, engines: Engines, prompts: Sequence[Prompt]) -> list[Finding]:
    await checks.publish(engines)
    groups = await checks.sample_groups(made, engines, prompts)
    if not checks.without_failed(groups):  # an earlier finding reports it
        return []
    numbers = await checks.compared(engines, groups, update=1)
    return [checks.self_taught_finding(numbers, made.engines.rounding)]
