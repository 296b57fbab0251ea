"""Whether a student can act upon an environment: that it is there, and that the chat template can be gone on with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.data.tokenizers import Tokenizer, stop_ids
from slipstream.engines.native.config import generation_of
from slipstream.environments.gateway.judging import too_large
from slipstream.environments.gateway.programs import Agent
from slipstream.environments.gateway.walls import Walls
from slipstream.environments.hosts import schemas
from slipstream.errors import ConfigError
from slipstream.plan.engines import EnvironmentPlan
from slipstream.sandbox import sandbox_of

Tools = Sequence[dict[str, Any]] | None
"""Their JSON schemas; None where there is no environment."""


def tools_of(there: EnvironmentPlan | None, tokenizer: Tokenizer, model: str, say: Callable[[str], object]) -> Tools:
    """What chat templates are told of; an agent has tools of its own."""
    if there is None:
        return None
    from slipstream.environments.chat.renderer import Renderer

    if there.gateway is not None and there.gateway.agent is not None:
        check_agent(there.gateway.agent)
    found = [] if there.wanted is None else schemas(there.wanted)
    ends = stop_ids(tokenizer, generation_of(model))
    for note in Renderer(tokenizer, stop_ids=ends, tools=found, **there.renderer).notes:
        say(note)
    return found if there.wanted is not None else None


def check_agent(agent: Agent) -> None:
    """ConfigError unless its programs and its workspace are there."""
    if agent.walled:
        Walls.new()
    if agent.workspace is not None and not Path(agent.workspace).is_dir():
        raise ConfigError(f"environment.gateway.workspace = {agent.workspace!r} is no directory")
    if agent.verify and agent.workspace is not None and (why := too_large(Path(agent.workspace))):
        raise ConfigError(f"environment.gateway.workspace = {agent.workspace!r}: {why}: leave out what is not needed")
    if agent.verify and "judge.py" in agent.verify:
        sandbox_of("bubblewrap")  # whose tests run the solution there, whatever sandbox the agent has
    for name, words in (("command", agent.command), ("verify", agent.verify)):
        said = words[0] if words else ""
        inside = name == "command" and "/" in said and not Path(said).is_absolute()
        there = str(Path(agent.workspace or "/nowhere", said)) if inside else said
        if words is not None and shutil.which(there) is None:
            where = "in the workspace, where it begins (a program elsewhere has an absolute path)" if inside else "here"
            raise ConfigError(f"environment.gateway.{name}: there is no program {said!r} {where}, or it cannot be run")
