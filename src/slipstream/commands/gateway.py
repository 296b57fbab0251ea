"""`slipstream gateway`: serve a student to agents and record episodes. A lineage is the tokens after one prompt."""

import asyncio
import json
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from slipstream.commands.common import note
from slipstream.errors import ConfigError, RunDirError, first_line
from slipstream.plan.plan import Plan, plan
from slipstream.records import Group, Handle, Rollout
from slipstream.runs.start import announce_gateways

LINEAGE_ARRAYS = ("tokens", "loss_mask", "turn", "versions", "logp")


def run(args: Namespace) -> None:
    gateway(plan(args.settings, ask=False), args.to, prompts=args.n, say=note)


def gateway(made: Plan, to: Path, *, prompts: int | None, say: Callable[[str], object]) -> None:
    """Run episodes for all prompts, or for the first `prompts` ones; write lineages to the new file `to`."""
    environment = made.engines.sampler.environments.get("")
    if environment is None or environment.gateway is None:
        raise ConfigError("slipstream gateway serves external agents: write [environment.gateway] into the config")
    from slipstream.runtimes.build import SelfGrading

    try:
        file = os.fdopen(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8")
    except OSError as error:
        raise RunDirError(f"{to} cannot be written: {first_line(error)}") from None
    with file:
        sampler = SelfGrading(made.engines.sampler, made.engines.grader, made.tokenizer)
        try:
            announce_gateways({"": environment}, to.parent, say)
            counts = asyncio.run(play(made, sampler, file, prompts or len(made.prompts.rows)))
        finally:
            sampler.close()
    say(f"{counts['episodes']} episodes, {counts['failed']} of them failed; {counts['lineages']} lineages are in {to}")


async def play(made: Plan, sampler: Any, file: TextIO, prompts: int) -> Counter[str]:
    """Run the episodes and write their lineages; return the numbers of episodes, failed episodes, and lineages."""
    numbers, counts = iter(range(prompts)), Counter[str]()

    async def one_after_the_other() -> None:
        for number in numbers:
            group: Group = await sampler.generate(made.prompts.at(number), made.sampling)
            failed = sum(handle.header.finish == "error" for handle in group)
            episodes = len({handle.header.episode for handle in group})
            counts.update(episodes=episodes, failed=failed, lineages=len(group) - failed)
            file.writelines(line(handle) for handle in group)
            file.flush()

    groups = max(1, made.engines.learner.settings.batch_size // made.sampling.group)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(groups, prompts)):
                tasks.create_task(one_after_the_other())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return counts


def line(handle: Handle) -> str:
    header, body = handle.header, handle.body
    record: dict[str, Any] = {
        "prompt": header.prompt,
        "number": header.number,
        "episode": header.episode,
        "finish": header.finish,
        "cause": header.cause,
        "rewards": header.rewards,
        "outcome": header.outcome,
    }
    if isinstance(body, Rollout):
        record |= {"branch": body.branch, "prompt_tokens": body.prompt.tokens.tolist()}
        record |= {name: getattr(body, name).tolist() for name in LINEAGE_ARRAYS}
    return json.dumps(record) + "\n"
