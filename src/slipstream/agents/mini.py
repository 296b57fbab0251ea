"""Sandbox for the commands of mini-swe-agent: `mini --environment-class slipstream.agents.mini.Sandboxed`.

mini-swe-agent's own environment gives commands access to the network, the agent's variables and all files. In this
environment, commands run in a copy of the workspace. The copy replaces the workspace when the agent ends. One process
can run only one agent.
"""

import asyncio
import atexit
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.agents.workspace import put, take
from slipstream.errors import ConfigError
from slipstream.sandbox import sandbox_of
from slipstream.sandbox.base import Limits, MiB, Ran, Session

SUBMISSION_MARK = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""First output line of the command by which the agent submits."""


@dataclass(kw_only=True)
class Settings:
    """Settings under `environment` in a config of mini-swe-agent."""

    workspace: str = field(default_factory=lambda: os.environ.get("SLIPSTREAM_WORKSPACE", ""))
    """Directory that is copied into the sandbox; commands start there."""
    sandbox: str = "bubblewrap"
    cwd: str = ""
    """Directory of commands: relative to the workspace, or an absolute path in the sandbox; "" is the workspace."""
    env: dict[str, str] = field(default_factory=dict)
    timeout: float = 30.0
    """Maximum seconds of a command."""
    memory: int = 1024
    """Maximum MiB of memory of a command."""
    disk: int = 256
    """Maximum MiB of the workspace."""
    processes: int = 64

    @property
    def limits(self) -> Limits:
        return Limits(
            seconds=self.timeout,
            memory=self.memory * MiB,
            disk=self.disk * MiB,
            output=MiB,
            processes=self.processes,
        )


class Sandboxed:
    def __init__(self, **settings: Any) -> None:
        self.config = Settings(**settings)
        self.workspace = Path(self.config.workspace)
        if not self.config.workspace or not self.workspace.is_dir():
            raise ConfigError(f"environment.workspace = {self.config.workspace!r} is not a directory")
        self.loop = asyncio.Runner()
        self.session: Session | None = self.loop.run(self._open_session())
        atexit.register(self.close)

    async def _open_session(self) -> Session:
        session = await sandbox_of(self.config.sandbox).session(self.config.limits)
        try:
            await put(session, self.workspace, self.config.limits)
        except BaseException:
            await session.close()
            raise
        return session

    def execute(self, action: Mapping[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run one command, and return its output and errors as one text; raise Submitted if the agent submits."""
        assert self.session is not None
        variables = [f"{name}={value}" for name, value in self.config.env.items()]
        command = ["env", "-C", cwd or self.config.cwd or ".", *variables, "bash", "-c", action.get("command", "")]
        argv = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *command]
        ran = self.loop.run(self.session.run(argv, limits=self.config.limits))
        first_line, _, submission = ran.out.lstrip().partition("\n")
        if ran.code == 0 and first_line.strip() == SUBMISSION_MARK:
            from minisweagent.exceptions import Submitted

            self.close()
            extra = {"exit_status": "Submitted", "submission": submission}
            raise Submitted({"role": "exit", "content": submission, "extra": extra})
        return observation_of(ran, self.config.limits)

    def close(self) -> None:
        """Copy the workspace back from the sandbox, and close the sandbox."""
        if self.session is None:
            return
        session, self.session = self.session, None
        atexit.unregister(self.close)
        try:
            if fault := self.loop.run(take(session, self.workspace, self.config.limits)):
                print(f"{self.workspace} is unchanged: {fault}", file=sys.stderr)
        finally:
            self.loop.run(session.close())
            self.loop.close()

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        """Return the variables for prompt templates, without this machine's environment variables."""
        return asdict(self.config) | platform.uname()._asdict() | {"node": "sandbox"} | more

    def serialize(self) -> dict[str, Any]:
        kind = f"{type(self).__module__}.{type(self).__name__}"
        return {"info": {"config": {"environment": asdict(self.config), "environment_type": kind}}}


def observation_of(ran: Ran, limits: Limits) -> dict[str, Any]:
    """Return the result of a command in the format that mini-swe-agent shows to its model."""
    ended = {
        "timeout": f"the command was stopped after {limits.seconds:g} s",
        "output": f"the command was stopped: more than {limits.output >> 20} MiB of output",
        "memory": f"the command was stopped: more than {limits.memory >> 20} MiB of memory",
        "disk": f"the command was stopped: more than {limits.disk >> 20} MiB of files, or too many files",
    }
    code = -1 if ran.code is None else ran.code
    return {"output": ran.out + ran.err, "returncode": code, "exception_info": ended.get(ran.status, "")}
