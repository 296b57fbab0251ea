"""What a student acts upon, in several turns, and how far an episode may go."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from slipstream.config.base import OWN, Section
from slipstream.errors import did_you_mean

ENVIRONMENTS = ("table", "lookup", "python")
"""Those that ship."""


def somewhere(sandbox: str | None) -> str | None:
    if sandbox not in (None, "bubblewrap", "none") and not re.match(r"https?://[^\s/]+", str(sandbox)):
        raise ValueError(f'{sandbox!r} is no sandbox: write "bubblewrap", the URL of a server, or "none"')
    return sandbox


Where = Annotated[str | None, AfterValidator(somewhere)]


class EnvironmentConfig(Section):
    """Roll out episodes: the student calls tools, sees what they return, and goes on."""

    use: str
    """The environment: one that ships (table, lookup, python), or a class of your own, "./file.py:Class" or
    "module:Class", whose public methods are the tools, or which has step(reply)."""
    turns: int = Field(10, ge=1)
    """Most turns of the student."""
    calls: int = Field(6, ge=0)
    """Most calls of tools, malformed ones among them."""
    turn_tokens: int | None = Field(None, ge=1)
    """Most tokens of one turn; without it what is left of sampler.max_tokens, which is for a whole episode."""
    observation: int = Field(4096, ge=32)
    """Most characters of one observation; of a longer one the middle is left out."""
    seconds: float = Field(600.0, gt=0)
    """Of an episode; one that takes longer ends, and is learned from."""
    step_seconds: float = Field(60.0, gt=0)
    """In which the environment must start, answer a turn, and close; one that takes longer has failed, and is tried
    again."""
    processes: int = Field(1, ge=1)
    """In which environments are at work, beside each sampler."""
    sandbox: Where = None
    """Where code runs that the student writes: bubblewrap, the URL of a server that speaks SandboxFusion's API, or
    "none", which isolates nothing."""
    format: Literal["auto", "hermes"] = "auto"
    """How the student writes a call: as its chat template does, or as JSON between <tool_call> and </tool_call>, which
    the system prompt must then tell it."""

    @field_validator("use")
    @classmethod
    def _known(cls, use: str) -> str:
        if use not in ENVIRONMENTS and not OWN.fullmatch(use):
            near = f"{did_you_mean(use, ENVIRONMENTS)}; " if ":" not in use else ""
            raise ValueError(f'{use!r} is no environment; {near}your own is "./file.py:Class" or "module:Class"')
        return use
