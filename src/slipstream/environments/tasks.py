"""Task directories of Harbor and Terminal-Bench in the sandbox: `tasks:PATH`, a directory of tasks.

A task may copy files to /app, where the student has a shell. Afterwards its tests run in /tests beside these files. A
task that needs an image or a network is refused, since the sandbox has neither.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from slipstream.environments import forms
from slipstream.environments.builtin import observation
from slipstream.errors import DataError, EnvironmentFailed, first_line
from slipstream.sandbox.base import Limits, MiB, Sandbox
from slipstream.sandbox.bubblewrap import KeeperSession

APP = PurePosixPath("/app")
LINKS = {"/app": ".", "/tests": "/tmp/tests", "/logs": "/tmp/logs"}
"""Directories that tasks expect, and where they are in a session."""
SHELL_LIMITS = Limits(seconds=60, memory=1024 * MiB, disk=256 * MiB, processes=64)
NETWORK = re.compile(r"^(?!\s*#).*?\b(apt|apt-get|curl|wget|pip3?|uvx?|npm|docker)\s", re.M)
"""Command of a test script that needs a network or an image."""
VARIABLE = re.compile(r"[A-Za-z_]\w*=[^$`]*")
"""Variable of a Dockerfile's ENV whose value is plain text."""
JUDGE = (
    "rm -rf /tmp/tests /tmp/logs; mkdir -p /tmp/logs/verifier; mv .tests /tmp/tests; cd /app; TEST_DIR=/tests bash {}"
)
VERDICTS = "cat /logs/verifier/reward.json 2>/dev/null || cat /logs/verifier/reward.txt"


class Task(NamedTuple):
    instruction: str
    files: dict[str, str]
    """Contents of the files that the student finds in /app, by path."""
    variables: tuple[str, ...]
    """Environment variables of the shell and of the tests, as NAME=VALUE."""
    tests: dict[str, str]
    """Contents of the tests, by path below /tests."""
    script: str
    """Script in /tests that runs the tests."""
    seconds: float
    by_status: bool
    """True if the exit status of the script is the verdict; otherwise the script writes it into /logs/verifier."""


def task_of(place: Path) -> Task:
    """Read a task; raise DataError if it is not complete, or cannot run without its image."""
    if (place / "task.toml").is_file():
        config = tomllib.loads(text_in(place / "task.toml"))
        if image := config.get("environment", {}).get("docker_image"):
            raise DataError(f"{place / 'task.toml'}: needs the image {image}, and tasks run without images")
        tests = below(place / "tests")
        check_script(place / "tests" / "test.sh")
        seconds = float(config.get("verifier", {}).get("timeout_sec", SHELL_LIMITS.seconds))
        built = built_by(place / "environment" / "Dockerfile")
        return Task(text_in(place / "instruction.md"), *built, tests, "/tests/test.sh", seconds, False)
    import yaml

    config = yaml.safe_load(text_in(place / "task.yaml"))
    tests = {**below(place / "tests"), "run-tests.sh": text_in(place / "run-tests.sh")}
    check_script(place / "run-tests.sh")
    seconds = float(config.get("max_test_timeout_sec", SHELL_LIMITS.seconds))
    return Task(config["instruction"], *built_by(place / "Dockerfile"), tests, "/tests/run-tests.sh", seconds, True)


def text_in(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: is not there, or no text, which this task needs: {first_line(error)}") from None


def below(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): text_in(file) for file in sorted(folder.rglob("*")) if file.is_file()}


def check_script(file: Path) -> None:
    if (found := NETWORK.search(text_in(file))) is not None:
        raise DataError(f"{file}: runs {found[1]}, and tasks run without network and images: write tests without it")


def variables_in(line: str) -> list[str]:
    """Return the variables of an ENV as NAME=VALUE; raise ValueError if they are not plain text."""
    _, first, *rest = shlex.split(line)
    if rest and "=" not in first:  # the old form, ENV NAME VALUE
        return variables_in(shlex.join(["ENV", f"{first}={' '.join(rest)}"]))
    if not all(map(VARIABLE.fullmatch, (first, *rest))):
        raise ValueError
    return [first, *rest]


def built_by(dockerfile: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the files that a Dockerfile copies to /app, and its variables; raise DataError for what needs an image."""
    folder = dockerfile.parent
    files, variables, base = dict[str, str](), list[str](), PurePosixPath("/")
    lines = text_in(dockerfile).replace("\\\n", " ").splitlines() if dockerfile.exists() else []
    for number, line in enumerate(lines, 1):
        word, *rest = line.split() or ["#"]
        if word in ("FROM", "CMD") or word.startswith("#"):
            continue
        if word == "ENV":
            try:
                variables += variables_in(line)
            except ValueError:
                known = f"{dockerfile}:{number}: {line.strip()[:60]}"
                raise DataError(f"{known} is not plain text: write NAME=VALUE, without $ and `") from None
            continue
        target = base / rest[-1] if rest else base
        if word == "WORKDIR" and target == APP:
            base = APP
            continue
        if word != "COPY" or (target != APP and APP not in target.parents) or ".." in target.parts:
            known = f"{dockerfile}:{number}: {line.strip()[:60]}"
            raise DataError(f"{known} needs an image, and tasks run without images")
        for source in map(Path, rest[:-1]):
            inner = below(folder / source) if (folder / source).is_dir() else {"": text_in(folder / source)}
            into = target / source.name if "" in inner and (rest[-1].endswith("/") or target == APP) else target
            files |= {str((into / path).relative_to(APP)): text for path, text in inner.items()}
    return files, tuple(variables)


def rows(name: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    found = [
        each for each in sorted(Path(name).glob("*")) if list(each.glob("task.toml")) or list(each.glob("task.yaml"))
    ]
    if not found:
        raise DataError("there is no directory with task.toml or task.yaml in it")
    for place in islice(found, count):
        prompt = [{"role": "user", "content": task_of(place).instruction}]
        yield {"id": place.name, "prompt": prompt, "data_source": "tasks", "task": str(place)}


class Terminal:
    """Shell in the files of a task, whose tests give the reward."""

    async def start(self, meta: dict[str, Any], sandbox: Sandbox) -> None:
        self._task = task_of(Path(meta["task"]))
        session = await sandbox.session(SHELL_LIMITS)
        if not isinstance(session, KeeperSession):
            raise EnvironmentFailed("error", 'tasks need environment.sandbox = "bubblewrap"')
        self._session = session
        session.links = LINKS
        ran = await session.run(["true"], files=self._task.files, limits=SHELL_LIMITS)
        if ran.status != "ok":
            raise EnvironmentFailed("error", f"the files of the task cannot be copied: {ran.status} {ran.err.strip()}")

    async def bash(self, command: str) -> str:
        """Run a shell command in /app, and see what it prints. Files are kept from one call to the next."""
        shell = ["env", *self._task.variables, "bash", "-c", command]
        return observation(await self._session.run(shell, limits=SHELL_LIMITS), SHELL_LIMITS)

    async def close(self) -> float | dict[str, float]:
        task, limits = self._task, replace(SHELL_LIMITS, seconds=self._task.seconds)
        try:
            await self._session.run(["rm", "-rf", ".tests"], limits=limits)
            files = {f".tests/{path}": text for path, text in task.tests.items()}
            copied = await self._session.run(["true"], files=files, limits=limits)
            if copied.status != "ok":  # the student has made the directory unwritable, or the disk full
                return 0.0
            judge = ["env", *task.variables, "bash", "-c", JUDGE.format(task.script)]
            ran = await self._session.run(judge, limits=limits)
            if task.by_status or ran.status not in ("ok", "failed"):  # at a limit, which the student's files may cause
                return float(ran.status == "ok")
            verdict = await self._session.run(["bash", "-c", VERDICTS], limits=limits)
        finally:
            await self._session.close()
        try:
            found: float | dict[str, float] = json.loads(verdict.out)
        except ValueError:
            said = (ran.err or ran.out).strip()[-200:]
            raise EnvironmentFailed("error", f"its tests wrote no reward ({ran.status}: {said!r})") from None
        return found


def kind_of(spec: str) -> forms.Kind:
    return replace(forms.kind_of(f"{Terminal.__module__}:{Terminal.__name__}"), spec=spec)
