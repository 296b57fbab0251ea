"""Settings of environments, in which the student acts in several turns, and limits of an episode."""

import re
import shlex
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from slipstream.config.base import LocalAddress, Section, check_own
from slipstream.config.integrations import INTEGRATIONS, fault_of, integration_of

ENVIRONMENTS = ("table", "lookup", "doors", "python")
"""Names of the built-in environments."""


def check_sandbox(sandbox: str | None) -> str | None:
    if sandbox is not None and not re.match(r"(bubblewrap|none)\Z|https?://[^\s/]+", sandbox):
        raise ValueError(f'{sandbox!r} is no sandbox: write "bubblewrap", the URL of a server, or "none"')
    return sandbox


Where = Annotated[str | None, AfterValidator(check_sandbox)]


RUNNING_PYTHON = "{python}"
"""First word of an agent's command that stands for the run's own Python, with the modules that the run can import."""


class GatewayConfig(Section):
    command: str | None = Field(None, min_length=1)
    """Program and arguments that start the agent, without a shell. OPENAI_BASE_URL, OPENAI_API_KEY, and the same for
    ANTHROPIC are set. {base_url}, {session}, {workspace}, {prompt} and {prompt_file} are filled in. The first word may
    be {python}, the run's own Python with its modules. None needs `listen`."""
    workspace: str | None = Field(None, min_length=1)
    """Directory that is copied for every episode. The agent starts in the copy and finds task.json there: the data
    row without the answer. None starts the agent in an empty directory."""
    verify: str | None = Field(None, min_length=1)
    """Program that judges the agent's work after the agent has ended. It writes the reward, or several rewards by name,
    as JSON into the file $SLIPSTREAM_VERDICT. An exit status other than 0 is a failure: the episode is tried again. It
    has its own working directory, HOME and sandbox, a copy of the workspace ($SLIPSTREAM_WORKSPACE), and the row with
    its answer ($SLIPSTREAM_TASK). None lets the agent, and any program that the student runs, write the reward into
    reward.json."""
    at_once: int = Field(8, ge=1)
    """Largest number of agents that run at the same time for each sampler."""
    listen: LocalAddress | None = None
    """Address for agents that are started elsewhere, such as "127.0.0.1:8008". None needs `command`."""

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
        if (self.command is None) == (self.listen is None):
            raise ValueError("write command, or listen for agents that are started elsewhere; one of the two")
        if self.listen is not None:
            for name in self.changed("workspace", "verify", "at_once"):
                raise ValueError(f"{name} is for agents that `command` starts, not for listen: drop it")
        return self


class EnvironmentConfig(Section):
    use: str | None = None
    """Environment: table, lookup, doors or python, or a user class, "./file.py:Class" or "module:Class". The tools are
    the public methods of the class, or the class has step(reply). Or tools of an MCP server, "mcp:COMMAND" or "mcp:URL"
    (mcp_shared: one server for each process). Or a game for one player, "textarena:NAME" or "gymnasium:NAME". Or the
    sessions of an OpenEnv server, "openenv:URL". Or a taskset of verifiers, "verifiers:TASKSET+HARNESS", which stands
    for a gateway. Or a directory of tasks of Harbor or Terminal-Bench, "tasks:PATH". None needs `gateway`."""
    gateway: GatewayConfig | None = None
    """Agent that uses the student through a chat API, instead of an environment in `use`."""
    turns: int = Field(10, ge=1)
    """Largest number of the student's turns in an episode. With `gateway`: largest number of API calls of the agent."""
    calls: int = Field(6, ge=0)
    """Largest number of tool calls in an episode, malformed calls included."""
    turn_tokens: int | None = Field(None, ge=1)
    """Largest number of tokens of one turn. None allows the rest of sampler.max_tokens, the limit of the episode."""
    observation: int = Field(4096, ge=32)
    """Largest number of characters of one observation. The middle of a longer observation is left out."""
    seconds: float = Field(600.0, gt=0)
    """Time limit of an episode in seconds. At the limit it stops, is graded, and is used for training."""
    step_seconds: float = Field(60.0, gt=0)
    """Time limit in seconds of each start, step and close of the environment. A slower episode fails and is retried."""
    processes: int = Field(1, ge=1)
    """Number of environment processes for each sampler. If one dies, each of its episodes is retried separately."""
    sandbox: Where = None
    """Sandbox in which code of the student runs: bubblewrap, the URL of a server with SandboxFusion's API, or "none",
    which isolates nothing. None provides no sandbox."""
    format: Literal["auto", "hermes"] = "auto"
    """Format of the student's tool calls. auto: the format of its chat template. hermes: JSON between <tool_call> and
    </tool_call>, which the system prompt must explain."""

    @model_validator(mode="before")
    @classmethod
    def _use_as_agent(cls, given: Any) -> Any:
        """Replace the name of an environment that is played by an agent by a gateway with the agent's command."""
        if not isinstance(given, dict) or not isinstance(use := given.get("use"), str):
            return given
        integration, gateway = integration_of(use), given.get("gateway") or {}
        if integration is None or not integration.agent or "command" in gateway:
            return given
        if not (name := use.partition(":")[2]).strip():
            raise ValueError(f"use = {use!r} {fault_of(use)}")
        if given.get("sandbox") not in (None, "none"):
            raise ValueError(f"sandbox does nothing: {use!r} runs no code of the student; drop it")
        command = f"{RUNNING_PYTHON} -m {integration.agent} {shlex.quote(name)}"
        return {**given, "use": None, "sandbox": "none", "gateway": {**gateway, "command": command}}

    @property
    def integration(self) -> str | None:
        """Return the name of the integration in `use`, or of the one that the gateway's command plays; else None."""
        command = (self.gateway and self.gateway.command) or ""
        for prefix, each in INTEGRATIONS.items():
            if each.agent and command.startswith(start := f"{RUNNING_PYTHON} -m {each.agent} "):
                return f"{prefix}:{command.removeprefix(start)}"
        return self.use if self.use is not None and integration_of(self.use) is not None else None

    @field_validator("use")
    @classmethod
    def _check_use(cls, use: str | None) -> str | None:
        if use is None:
            return use
        if (integration := integration_of(use)) is None:
            check_own(use, ENVIRONMENTS, "environment", "Class")
        elif not integration.environment:
            raise ValueError(f"{use!r} is data, and no environment: name it in data.train, and drop [environment]")
        return use

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
        if (self.use is None) == (self.gateway is None):
            raise ValueError("needs use, an environment, or [environment.gateway], an agent; one of the two")
        if self.gateway is None:
            return self
        for name in self.changed("calls", "observation", "processes"):
            raise ValueError(f"{name} does nothing with a gateway, whose agent runs its own tools: drop it")
        if self.gateway.listen is not None and self.sandbox is not None:
            raise ValueError("sandbox does nothing: agents are started elsewhere; drop it")
        if self.gateway.command is not None and self.sandbox not in ("bubblewrap", "none"):
            raise ValueError(
                'an agent may run code of the student: write sandbox = "bubblewrap", or "none" if it isolates itself'
            )
        return self
