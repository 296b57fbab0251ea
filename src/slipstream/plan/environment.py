"""Plans and checks of an environment: its class or agent exists, and the chat template supports several turns."""

import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path

from slipstream.config.environment import RUNNING_PYTHON, EnvironmentConfig, GatewayConfig
from slipstream.config.schema import Config
from slipstream.data.tokenizers import Tokenizer, Tools
from slipstream.engines.native.config import vocabulary_of
from slipstream.environments.episodes import Limits
from slipstream.environments.gateway.agent_processes import Agent
from slipstream.environments.gateway.agent_sandbox import AgentSandbox
from slipstream.environments.gateway.judging import too_large
from slipstream.environments.host import EnvironmentSettings
from slipstream.environments.pool import schemas
from slipstream.errors import ConfigError
from slipstream.plan.engine_plans import EnvironmentPlan, GatewayPlan
from slipstream.sandbox import sandbox_of

SCRIPTS = (".py", ".sh", ".js", ".ts")
"""Ends of the names of files that an interpreter runs, as in `python agent.py`."""


def environments_of(config: Config) -> dict[str, EnvironmentPlan]:
    """Return the plan of every environment by its name, which is "" for a single one."""
    token = secrets.token_urlsafe(32)
    return {name: environment_of(config, each, token) for name, each in config.every_environment.items()}


def environment_of(config: Config, environment: EnvironmentConfig, token: str) -> EnvironmentPlan:
    use, gateway, sandbox = environment.use, environment.gateway, environment.sandbox
    return EnvironmentPlan(
        wanted=None if use is None else EnvironmentSettings(use, sandbox, environment.observation),
        gateway=None if gateway is None else gateway_of(config, gateway, token, walled=sandbox == "bubblewrap"),
        processes=environment.processes,
        limits=Limits(**{each.name: getattr(environment, each.name) for each in fields(Limits)}),
        renderer={"format": environment.format, "template_args": config.data.template_args},
    )


def gateway_of(config: Config, gateway: GatewayConfig, token: str, *, walled: bool) -> GatewayPlan:
    host, _, port = (gateway.listen or "127.0.0.1:0").rpartition(":")
    return GatewayPlan(
        agent=None if gateway.command is None else agent_of(gateway, walled),
        at_once=gateway.at_once,
        host=host.strip("[]"),
        port=int(port),
        name=config.student,
        vocabulary=vocabulary_of(config.student),
        token=token,
    )


def agent_of(gateway: GatewayConfig, walled: bool) -> Agent:
    def words(name: str, given: str | None) -> list[str]:
        try:
            return shlex.split(given or "")
        except ValueError as error:
            raise ConfigError(f"environment.gateway.{name} = {given!r}: {error}") from None

    verify = tuple(  # absolute paths, since the program starts in another directory
        str(Path(word).absolute()) if "/" in word and Path(word).exists() else word
        for word in words("verify", gateway.verify)
    )
    command = words("command", gateway.command)
    if command[:1] == [RUNNING_PYTHON]:
        modules = os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])
        command = ["/usr/bin/env", f"PYTHONPATH={modules}", sys.executable, *command[1:]]
    return Agent(
        command=tuple(command),
        verify=verify if gateway.verify is not None else None,
        workspace=gateway.workspace,
        walled=walled,
    )


def tools_of(env: EnvironmentPlan, tokenizer: Tokenizer, ends: Collection[int], say: Callable[[str], object]) -> Tools:
    """Check the environment, and return its tools for the chat template."""
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
    script = next(iter((agent.command or ())[1:]), "").removeprefix("{workspace}/")
    relative = script.endswith(SCRIPTS) and "{" not in script and not Path(script).is_absolute()
    if relative and not Path(agent.workspace or "/nowhere", script).is_file():
        where = "the workspace" if agent.workspace else "the empty directory"
        raise ConfigError(
            f"environment.gateway.command: {script!r} is not in {where} in which the agent starts: write its absolute "
            "path, or set environment.gateway.workspace to its directory, of which every episode gets a copy"
        )
