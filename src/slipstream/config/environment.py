"""What a student acts upon, in several turns, and how far an episode may go."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from slipstream.config.base import OWN, Section
from slipstream.errors import did_you_mean

ENVIRONMENTS = ("table", "lookup", "python")
"""Those that ship."""


def somewhere(sandbox: str | None) -> str | None:
    if sandbox not in (None, "bubblewrap", "none") and not re.match(r"https?://[^\s/]+", str(sandbox)):
        raise ValueError(f'{sandbox!r} is no sandbox: write "bubblewrap", the URL of a server, or "none"')
    return sandbox


Where = Annotated[str | None, AfterValidator(somewhere)]


class GatewayConfig(Section):
    """An agent that speaks to the student over the chat API: started here for every episode, or somewhere else."""

    command: str | None = Field(None, min_length=1)
    """The agent: a program and its arguments, without a shell. OPENAI_BASE_URL and OPENAI_API_KEY are set, and
    {base_url}, {session}, {workspace}, {prompt} and {prompt_file} are filled in."""
    workspace: str | None = Field(None, min_length=1)
    """A directory of which every episode has a copy. There the agent begins, and finds task.json: its row, but for the
    answer."""
    verify: str | None = Field(None, min_length=1)
    """A program that judges the agent's work when the agent has ended. It writes the reward, or several by name, as
    JSON into the file $SLIPSTREAM_VERDICT; its exit status is no verdict. It begins in a directory, HOME and sandbox
    of its own, with a copy of the workspace ($SLIPSTREAM_WORKSPACE) and the row with its answer ($SLIPSTREAM_TASK).
    Without it the agent may write its reward into reward.json, and whatever the student runs may do so, too."""
    at_once: int = Field(8, ge=1)
    """Agents that are at work at a time, beside each sampler."""
    listen: str | None = Field(None, min_length=1)
    """In place of a command: where agents that are started elsewhere ask for episodes, such as "127.0.0.1:8008"."""

    @field_validator("listen")
    @classmethod
    def _here(cls, listen: str | None) -> str | None:
        if listen is not None and not re.fullmatch(r"(127(\.\d{1,3}){3}|localhost|\[::1\]):\d{1,5}", listen):
            raise ValueError(
                f'{listen!r} is no port of this machine, such as "127.0.0.1:8008"; who is elsewhere comes by a tunnel'
            )
        return listen

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.command is None) == (self.listen is None):
            raise ValueError("write command, or listen for agents that are started elsewhere; one of the two")
        if self.listen is not None:
            for name in ("workspace", "verify", "at_once"):
                if name in self.model_fields_set:
                    raise ValueError(f"{name} is of agents that are started here, and listen waits for others: drop it")
        return self


class EnvironmentConfig(Section):
    """Roll out episodes: the student calls tools, sees what they return, and goes on."""

    use: str | None = None
    """The environment: one that ships (table, lookup, python), or a class of your own, "./file.py:Class" or
    "module:Class", whose public methods are the tools, or which has step(reply)."""
    gateway: GatewayConfig | None = None
    """In place of use: an agent that is given the student as a chat API."""
    turns: int = Field(10, ge=1)
    """Most turns of the student; of an agent, most calls in all its conversations."""
    calls: int = Field(6, ge=0)
    """Most calls of tools, malformed ones among them."""
    turn_tokens: int | None = Field(None, ge=1)
    """Most tokens of one turn; without it what is left of sampler.max_tokens, which is for a whole episode."""
    observation: int = Field(4096, ge=32)
    """Most characters of one observation; of a longer one the middle is left out."""
    seconds: float = Field(600.0, gt=0)
    """Of an episode; one that takes longer ends: its step is cancelled, and it is closed, graded and learned from."""
    step_seconds: float = Field(60.0, gt=0)
    """In which the environment must start, answer a turn, and close; one that takes longer has failed, and is tried
    again."""
    processes: int = Field(1, ge=1)
    """In which environments are at work, beside each sampler; those that may have ended one are tried again alone."""
    sandbox: Where = None
    """Where code runs that the student writes: bubblewrap, the URL of a server that speaks SandboxFusion's API, or
    "none", which isolates nothing."""
    format: Literal["auto", "hermes"] = "auto"
    """How the student writes a call: as its chat template does, or as JSON between <tool_call> and </tool_call>, which
    the system prompt must then tell it."""

    @field_validator("use")
    @classmethod
    def _known(cls, use: str | None) -> str | None:
        if use is not None and use not in ENVIRONMENTS and not OWN.fullmatch(use):
            near = f"{did_you_mean(use, ENVIRONMENTS)}; " if ":" not in use else ""
            raise ValueError(f'{use!r} is no environment; {near}your own is "./file.py:Class" or "module:Class"')
        return use

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.use is None) == (self.gateway is None):
            raise ValueError("needs use, an environment, or [environment.gateway], an agent; one of the two")
        if self.gateway is None:
            return self
        for name in ("calls", "observation", "processes"):
            if name in self.model_fields_set:
                raise ValueError(f"{name} does nothing with a gateway: what its agent does is its own matter; drop it")
        if self.gateway.listen is not None and self.sandbox is not None:
            raise ValueError("sandbox does nothing: agents are started elsewhere; drop it")
        if self.gateway.command is not None and self.sandbox not in ("bubblewrap", "none"):
            raise ValueError(
                'an agent may run what the student writes: write sandbox = "bubblewrap", or "none" if it sees to that'
            )
        return self
