"""Scores of checkpoints by tasks of lm-evaluation-harness, in a process beside the run.

The process is `slipstream eval CHECKPOINT --suite TASK …`, which appends its results to the run's eval.jsonl.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.config.running import SuiteConfig
from slipstream.errors import SandboxError, first_line
from slipstream.processes import end_program, exit_text, start_program
from slipstream.run_dir.writing import suite_lines

CHILD = (
    "import sys; from slipstream.cli import main; from slipstream.processes import die_with_parent; "
    "die_with_parent(); sys.exit(main())"
)
EVAL_COMMAND = (sys.executable, "-P", "-c", CHILD, "eval")
"""Command that scores a model; the model and the options follow."""


class SuiteRuns:
    """Evaluations of checkpoints, one at a time."""

    def __init__(
        self,
        settings: SuiteConfig | None,
        dtype: str,
        in_use: set[int],
        say: Callable[[str], None],
        command: Sequence[str] = EVAL_COMMAND,
    ) -> None:
        """Score checkpoints in `dtype`, as `settings` say; None scores none. `in_use` gets the one being scored."""
        self.settings, self.dtype, self.in_use, self.say, self.command = settings, dtype, in_use, say, command
        self.running: asyncio.Task[None] | None = None

    def due(self, update: int) -> bool:
        return self.settings is not None and update % self.settings.every == 0

    def resume(self, updates: Sequence[int], run: Path) -> None:
        """Score the newest checkpoint of a run that is due, if it has no scores: the run may have stopped meanwhile."""
        due = [update for update in updates if update and self.due(update)]
        if due and due[-1] not in {line.get("update") for line in suite_lines(run)}:
            self.start(run / "checkpoints" / str(due[-1]))

    def start(self, checkpoint: Path) -> None:
        """Begin to score a checkpoint, unless an earlier one is still being scored.

        Raise the exception of the previous evaluation, if it ended with one.
        """
        if self.running is not None and self.running.done():
            self.running.result()
        if self.in_use:
            self.say(
                f"eval.suite leaves out update {checkpoint.name}, because update {min(self.in_use)} is still being "
                "scored: raise eval.suite.every"
            )
            return
        self.in_use.add(int(checkpoint.name))
        self.running = asyncio.get_running_loop().create_task(self._score(checkpoint))

    async def finish(self, checkpoint: Path) -> None:
        """Wait for the evaluation that runs, and score the last checkpoint."""
        if self.settings is None:
            return
        if self.running is not None:
            await asyncio.wait([self.running])
        self.start(checkpoint)
        assert self.running is not None
        await asyncio.wait([self.running])  # a run that stops now leaves it to `stop`
        self.running.result()

    async def stop(self) -> None:
        if self.running is not None and not self.running.done():
            self.say(f"eval.suite has no scores of update {min(self.in_use)}: the run stops while it is being scored")
            self.running.cancel()
            await asyncio.wait([self.running])
            self.in_use.clear()

    async def _score(self, checkpoint: Path) -> None:
        try:
            failed = await self._run_child(checkpoint)
        except (SandboxError, OSError) as error:
            failed = first_line(error)
        finally:
            self.in_use.clear()
        if failed:
            self.say(f"eval.suite has no scores of update {checkpoint.name}: {failed}")

    async def _run_child(self, checkpoint: Path) -> str:
        """Score a checkpoint in a process; return the reason if it failed, else an empty text."""
        assert self.settings is not None
        process = await start_program(
            [*self.command, str(checkpoint), *self._options()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd=str(Path.cwd()),
        )
        try:
            async with asyncio.timeout(self.settings.seconds):
                _, errors = await process.communicate()
        except TimeoutError:
            return f"it took more than {self.settings.seconds:g} s (eval.suite.seconds)"
        finally:
            if process.returncode is None:
                await end_program(process)
        *_, why = ["no reason is given", *errors.decode(errors="replace").splitlines()]
        return f"{exit_text(process.returncode)}: {why}" if process.returncode else ""

    def _options(self) -> list[str]:
        assert self.settings is not None
        path, limit = self.settings.path, self.settings.limit
        return [
            *("--suite", *self.settings.tasks),
            *(() if path is None else ("--suite-path", path)),
            *(() if limit is None else ("--limit", str(limit))),
            *("--dtype", self.dtype, "--device", self.settings.device, "--json"),
        ]
