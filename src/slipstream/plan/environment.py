"""Checks of an environment: its class or agent exists, its tools load, and the chat template supports several turns."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from slipstream.data.tokenizers import Tokenizer
from slipstream.environments.gateway.agent_processes import Agent
from slipstream.environments.gateway.agent_sandbox import AgentSandbox
from slipstream.environments.gateway.judging import too_large
from slipstream.environments.hosts import schemas
from slipstream.errors import ConfigError
from slipstream.plan.engines import EnvironmentPlan
from slipstream.sandbox import sandbox_of

Tools = Sequence[dict[str, Any]] | None
"""JSON schemas of an environment's tools; None if there is no environment, or a gateway."""


def tools_of(
    env: EnvironmentPlan | None, tokenizer: Tokenizer, ends: Collection[int], say: Callable[[str], object]
) -> Tools:
    """Check the environment, and return its tools for the chat template. None for a gateway or no environment."""
    if env is None:
        return None
    from slipstream.environments.chat.renderer import Renderer

    if env.gateway is not None and env.gateway.agent is not None:
        check_agent(env.gateway.agent)
    found = [] if env.wanted is None else schemas(env.wanted)
    for note in Renderer(tokenizer, stop_ids=ends, tools=found, **env.renderer).notes:
        say(note)
    return found if env.wanted is not None else None


def check_agent(agent: Agent) -> None:
    """Raise ConfigError unless this machine has the agent's programs and sandbox, and a workspace that fits."""
    if agent.walled:
        AgentSandbox.new()
    if agent.workspace is not None and not Path(agent.workspace).is_dir():
        raise ConfigError(f"environment.gateway.workspace = {agent.workspace!r} is no directory")
    if agent.verify and agent.workspace is not None and (why := too_large(Path(agent.workspace))):
        raise ConfigError(f"environment.gateway.workspace = {agent.workspace!r}: {why}: leave out what is not needed")
    if agent.verify and "judge.py" in agent.verify:
        sandbox_of("bubblewrap")  # judge.py runs solutions in this sandbox, even if the agent runs without one
    for name, words in (("command", agent.command), ("verify", agent.verify)):
        word = words[0] if words else ""
        inside = name == "command" and "/" in word and not Path(word).is_absolute()
        program = str(Path(agent.workspace or "/nowhere", word)) if inside else word
        if words is not None and shutil.which(program) is None:
            where = "in the workspace, where it starts (for others write an absolute path)" if inside else "here"
            raise ConfigError(f"environment.gateway.{name}: there is no program {word!r} {where}, or it cannot be run")
