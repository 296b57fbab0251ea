"""Agents started by this process: each episode has one child process and one workspace, and is then graded."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slipstream import processes
from slipstream.agents.snapshot import OPEN_DIRECTORY, OPEN_FILE
from slipstream.agents.workspace import snapshot_of
from slipstream.data.layouts import without
from slipstream.environments.gateway import judging
from slipstream.environments.gateway.agent_sandbox import GATEWAY_PORT, AgentSandbox
from slipstream.errors import EnvironmentFailed, SandboxError, first_line
from slipstream.rewards.functions import TOTAL_REWARD, rewards_of
from slipstream.run_dir.temporary import TemporaryDirectory
from slipstream.sandbox.limits import DRAIN_TIMEOUT

OUTPUT_BYTES = 4096
"""Number of bytes that are kept from the end of an agent's output."""
REWARD_FILE = "reward.json"
VERDICT_FILE = "verdict.json"
MAX_REWARD_BYTES = 1 << 20
"""Maximum bytes of a file with rewards."""
JUDGE_ONLY = "ground_truth"
"""Field of the row that only the judge gets, not the agent."""
COPY_SHARE, SOLUTION_SHARE = 0.25, 0.5
"""Shares of `step_seconds` for the copy of the workspace and for the solution; the judge itself has the rest."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    command: tuple[str, ...]
    """Command line, with the placeholders {base_url}, {session}, {workspace}, {prompt} and {prompt_file}."""
    workspace: str | None
    """Directory that is copied for every episode. None: the workspace starts empty."""
    verify: tuple[str, ...] | None
    """Command of the judge, which runs after the agent. None: the agent writes its own rewards."""
    walled: bool = False
    """True: agent and judge run in separate sandboxes. The agent's sandbox can reach only the gateway."""


class Programs:
    def __init__(self, agent: Agent, *, socket: str = "", seconds: float = 600.0, step_seconds: float = 60.0) -> None:
        """Limit each sandboxed process to `seconds` of CPU time per core; `step_seconds` is the time of the judge."""
        self.agent, self.socket, self.seconds, self.step_seconds = agent, socket, seconds, step_seconds
        self.made = TemporaryDirectory("slipstream-agents-", before_removal=processes.kill_below)
        """Directory of all episodes. What agents of a killed process started ends before its directory is removed."""

    @asynccontextmanager
    async def playing(
        self, row: dict[str, Any], base_url: str, session: str, *, hidden: Sequence[str] = ()
    ) -> AsyncIterator[Program]:
        place = Path(tempfile.mkdtemp(prefix="agent-", dir=self.made.path))
        try:
            walls = AgentSandbox.new() if self.agent.walled else None
            program = Program(self, place, row, hidden, base_url, session, walls)
            await in_thread(program.prepare)
            try:
                await program.start(self.agent.command, place, "workspace", program._environment(), self.socket)
                yield program
            finally:
                await program.end()
        finally:
            await in_thread(remove_tree, place)

    def close(self) -> None:
        """Remove the directory; every process has ended with its episode."""
        self.made.close()


async def in_thread(work: Any, *args: Any) -> Any:
    """Run a function in a thread; wait for its end even if the caller is cancelled."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def remove_tree(place: Path) -> None:
    """Remove a directory with `rm`, because it may be nested too deeply for `shutil.rmtree`."""
    subprocess.run(["rm", "-rf", "--", place], check=False, stderr=subprocess.DEVNULL)


@dataclass(eq=False)
class Program:
    kind: Programs
    place: Path
    row: dict[str, Any]
    hidden: Sequence[str]
    """Paths of answers in the row's `meta`."""
    base_url: str
    session: str
    walls: AgentSandbox | None
    process: asyncio.subprocess.Process | None = None
    home: str = ""
    """HOME of the process; no other program has the same HOME, so processes are found by it."""
    reading: list[asyncio.Task[None]] = field(default_factory=list)
    output: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))

    @property
    def url(self) -> str:
        """Session's base URL as the agent sees it."""
        path = urlsplit(self.base_url).path
        return self.base_url if self.walls is None else f"http://127.0.0.1:{GATEWAY_PORT}{path}"

    @property
    def judged(self) -> bool:
        return self.kind.agent.verify is not None

    @property
    def workspace(self) -> Path:
        return self.place / "workspace"

    @property
    def prompt(self) -> str:
        """Text of the prompt; if the prompt is a list of messages, text of the last message."""
        prompt = self.row["prompt"]
        return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])

    def prepare(self) -> None:
        if self.kind.agent.workspace is None:
            self.workspace.mkdir()
        else:
            shutil.copytree(self.kind.agent.workspace, self.workspace, symlinks=True)
        for each in ("home", "tmp"):
            (self.place / each).mkdir()
        visible = {name: value for name, value in self.row.items() if name != JUDGE_ONLY}
        for path in self.hidden:
            visible["meta"] = without(visible["meta"], path)
        (self.workspace / "task.json").write_text(json.dumps(visible, ensure_ascii=False), "utf-8", "replace")
        (self.place / "prompt.txt").write_text(self.prompt, "utf-8", "replace")
        if self.walls is not None:
            self.walls.give(self.place)

    async def start(self, command: Sequence[str], place: Path, cwd: str, more: dict[str, str], socket: str) -> None:
        """Start a program in directory `cwd` of `place`, which also holds its HOME."""
        values = {
            "base_url": self.url,
            "session": self.session,
            "workspace": str(place / "workspace"),
            "prompt_file": str(place / "prompt.txt"),
            "prompt": self.prompt,
        }
        words, env = [fill(each, values) for each in command], environment_of(place) | more
        self.home = env["HOME"]
        try:
            if self.walls is None:
                self.process = await processes.start_program(
                    [*processes.WITH_PARENT, *words], env=env, cwd=str(place / cwd)
                )
            else:
                around = self.walls.wrap(words, command, place, cwd, env, socket, self.kind.seconds)
                with around as (inside, descriptors):
                    self.process = await processes.start_program(inside, descriptors=descriptors)
        except SandboxError as error:
            raise EnvironmentFailed("error", str(error).removeprefix("sandbox: ")) from None
        assert self.process.stdout is not None and self.process.stderr is not None
        for each in self.output:
            each.clear()
        streams = zip((self.process.stdout, self.process.stderr), self.output, strict=True)
        self.reading = [asyncio.create_task(_read(stream, into)) for stream, into in streams]

    def _environment(self) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_BASE": self.url,
            "OPENAI_API_KEY": self.session,
            "ANTHROPIC_BASE_URL": self.url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.session,
            "SLIPSTREAM_BASE_URL": self.url,
            "SLIPSTREAM_SESSION": self.session,
            "SLIPSTREAM_WORKSPACE": str(self.workspace),
            "SLIPSTREAM_TASK": str(self.workspace / "task.json"),
        }

    async def wait_for_end(self) -> str:
        assert self.process is not None
        await processes.wait_for_exit(self.process)
        await self.end()
        code = self.process.returncode
        return f"{processes.exit_text(code)}{self._last_line()}" if code else ""

    def _last_line(self) -> str:
        for output in reversed(self.output):
            if text := output.decode(errors="replace").strip():
                return ": " + text.split("\n")[-1].strip()[:200]
        return ""

    async def end(self) -> None:
        if self.process is None:
            return
        processes.kill_program(self.process)
        if self.walls is None:
            processes.kill_at_home(self.home)
        await processes.wait_for_exit(self.process)
        if self.reading:
            await asyncio.wait(self.reading, timeout=DRAIN_TIMEOUT)
            for task in self.reading:
                task.cancel()
        processes.close_pipes(self.process)

    async def rewards(self) -> dict[str, float]:
        """Return the judge's rewards; if there is no judge, return the rewards that the agent wrote."""
        if (verify := self.kind.agent.verify) is None:
            return own_rewards(self.workspace)
        place = Path(tempfile.mkdtemp(prefix="verify-", dir=self.kind.made.path))
        try:
            await in_thread(judging.prepare, place, self.row, self.prompt)
            bounds = {"size": judging.MAX_WORKSPACE_BYTES, "entries": judging.MAX_WORKSPACE_FILES}
            seconds = COPY_SHARE * self.kind.step_seconds
            if await snapshot_of(self.workspace, place / "workspace", seconds=seconds, **bounds):
                return {TOTAL_REWARD: 0.0}  # a failure would let a student choose which of its episodes count
            solution = judging.Solution(place / "workspace", SOLUTION_SHARE * self.kind.step_seconds)
            async with solution.serve(place / "solution"):
                if self.walls is not None:
                    self.walls = AgentSandbox.new()  # a user other than the agent's
                    await in_thread(self.walls.give, place)
                variables = {
                    "PYTHONSAFEPATH": "1",
                    "PYTHONNOUSERSITE": "1",
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "SLIPSTREAM_WORKSPACE": str(place / "workspace"),
                    "SLIPSTREAM_TASK": str(place / "task.json"),
                    "SLIPSTREAM_SOLUTION": str(place / "solution"),
                    "SLIPSTREAM_VERDICT": str(place / VERDICT_FILE),
                }
                await self.start(verify, place, judging.JUDGE_DIRECTORY, variables, str(place / "solution"))
                why = await self.wait_for_end()
            if solution.fault or why:
                cause = "crash" if why.startswith("killed") else "error"
                raise EnvironmentFailed(cause, f"environment.gateway.verify: {solution.fault or why}")
            return rewards_in(place / VERDICT_FILE, "environment.gateway.verify: its verdict", missing=None)
        except SandboxError as error:
            raise EnvironmentFailed("error", f"environment.gateway.verify: {error}") from None
        finally:
            await self.end()
            await in_thread(remove_tree, place)


def environment_of(place: Path) -> dict[str, str]:
    """Return the environment variables of every program. Only PATH comes from this process; others may hold keys."""
    return {
        "PATH": os.environ.get("PATH", processes.PATH),
        "LANG": "C.UTF-8",
        "HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
    }


def fill(text: str, values: dict[str, str]) -> str:
    """Replace placeholders in a text; inserted values are not searched for placeholders."""
    for name, value in values.items():
        before, mark, after = text.partition(f"{{{name}}}")
        if mark:
            return f"{fill(before, values)}{value}{fill(after, values)}"
    return text


def own_rewards(workspace: Path) -> dict[str, float]:
    """Return the rewards that an agent wrote into its workspace: 0 if that is no directory any more."""
    try:
        directory = os.open(workspace, OPEN_DIRECTORY)
    except OSError:
        return {TOTAL_REWARD: 0.0}
    try:
        return rewards_in(Path(REWARD_FILE), REWARD_FILE, missing={}, directory=directory)
    finally:
        os.close(directory)


def rewards_in(
    file: Path, source: str, *, missing: dict[str, float] | None, directory: int | None = None
) -> dict[str, float]:
    """Read rewards from a JSON file, below the open `directory` unless that is None.

    If the file is missing, return `missing`, or raise an error if that is None.
    """
    try:
        descriptor = os.open(file, OPEN_FILE, dir_fd=directory)
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("is not a regular file")
            content = opened.read(MAX_REWARD_BYTES + 1)
        if len(content) > MAX_REWARD_BYTES:
            raise ValueError(f"has more than {MAX_REWARD_BYTES} bytes")
        return rewards_of(json.loads(content))
    except FileNotFoundError:
        if missing is not None:
            return missing
        why = "is missing: write rewards as JSON into the file $SLIPSTREAM_VERDICT (an exit status is no verdict)"
        raise EnvironmentFailed("error", f"{source} {why}") from None
    except Exception as error:  # any error in the file is an error of the program that wrote it
        raise EnvironmentFailed("error", f"{source}: {first_line(error)}") from None


async def _read(stream: asyncio.StreamReader, into: bytearray) -> None:
    while part := await stream.read(1 << 16):
        into += part
        del into[:-OUTPUT_BYTES]
