"""The end of a run: it saves the final student, or stops with a checkpoint from which `resume` continues."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from slipstream.errors import NonFiniteError, RunDirError, Stalled, Unhealthy, WorkerDied, first_line
from slipstream.pipeline.checkpoint import Checkpoints, RunState, save_whole
from slipstream.pipeline.learning import Learning, Save
from slipstream.pipeline.suites import SuiteRuns
from slipstream.protocols import Learner
from slipstream.run_dir.formats import resumable
from slipstream.run_dir.writing import LogPosition, RunLog

T = TypeVar("T")
HAND_OVER_TIMEOUT = 30.0
"""Seconds that samplers get to return partial rollouts when a run stops; a response may have to be graded first."""
STALLED_SAVE_TIMEOUT = 60.0
"""Time limit in seconds for saving the checkpoint of a stalled run, because the learner itself may hang."""


@dataclass
class Ending:
    learner: Learner
    log: RunLog
    checkpoints: Checkpoints
    suites: SuiteRuns
    state: Callable[[], RunState]
    mark: Callable[[], LogPosition]
    """Write what the run's files lack until now, and return their state."""
    patience: float | None
    """Longest time in seconds that the learner may take to save; None: no limit."""
    say: Callable[[str], None]

    def capture(self, *, stopping: bool = False, suspect: bool = False) -> Save:
        """Capture the state of the run now, and return the function that saves it as a checkpoint."""
        state, mark = self.state(), self.mark()

        async def save() -> Path:
            return await self.checkpoints.save(self.learner, state, mark, stopping=stopping, suspect=suspect)

        return save

    async def complete(self, model_card: Callable[[], str]) -> Path:
        """Save and score a last checkpoint, if any is saved, and return the directory of the final student."""
        if self.checkpoints.at_end:
            checkpoint = await with_timeout(self.capture()(), self.patience, "writing a checkpoint")
            await self.suites.finish(checkpoint)
        final, files = self.log.path / "final", dict[str, bytes]()
        try:
            files["README.md"] = model_card().encode()
        except Exception as error:  # a student without a card is better than none
            self.say(f"the final student has no model card: {type(error).__name__}: {first_line(error)}")
        writing = save_whole(self.learner, final, files)
        await with_timeout(writing, self.patience, "writing the final student")
        return final

    async def hand_over(self, learning: Learning) -> None:
        """Collect partial rollouts for the checkpoint of a stopping run; print errors and a timeout, do not raise."""
        learning.groups.stopping = True
        try:
            await asyncio.wait_for(learning.rollouts.pause(), HAND_OVER_TIMEOUT)
        except Exception as error:  # the error that stopped the run must still be raised
            late = isinstance(error, TimeoutError)
            why = f"{HAND_OVER_TIMEOUT:.0f} s were not enough" if late else first_line(cause_of(error))
            self.say(f"partial rollouts are lost and will start again: {why}")

    async def stop(self, cause: BaseException, learning: Learning | None, *, at_once: bool) -> NoReturn:
        """Save a checkpoint, record the groups in flight as dropped in the ledger, and raise `cause`.

        After a non-finite loss or gradient the weights are still those of the last update, and are saved. Nothing is
        saved between two steps of one update, because such weights belong to no version. Nothing is saved either if
        the disk or the learner failed, or if `at_once` is True. `resume` then uses the last saved checkpoint.
        """
        if isinstance(cause, RunDirError):
            raise cause from cause.__cause__
        suspect = isinstance(cause, NonFiniteError) or (isinstance(cause, Unhealthy) and cause.harmful)
        # captured before groups are recorded as dropped: a resumed run continues them
        save = self.capture(stopping=True, suspect=suspect)
        if learning is not None:
            groups = learning.groups
            stored = groups.admission.store.groups.items()
            groups.ledger.write_trained([(groups.responses[number], each.uses) for number, each in stored], {})
            for number in groups.admission.live:
                groups.ledger.write_dropped(groups.choice.prompt(number), "run stopped")
        if at_once or isinstance(cause, WorkerDied):
            raise cause
        if learning is not None and learning.torn:
            self.say("no checkpoint is saved: the current update may have made only some of its optimizer steps")
            raise cause from cause.__cause__
        limit = STALLED_SAVE_TIMEOUT if isinstance(cause, Stalled) else self.patience
        try:
            path = await with_timeout(save(), limit, "saving")
        except Exception as error:  # the learner itself may have failed; `cause` must still be raised
            self.say(f"no checkpoint could be saved: {type(error).__name__}: {error}")
        else:
            if isinstance(cause, NonFiniteError | Unhealthy):
                raise type(cause)(f"{cause}; {self._saved(path, suspect)}") from None
        raise cause from cause.__cause__

    def _saved(self, path: Path, suspect: bool) -> str:
        """Return where the weights are, and where those are from which `resume` goes on."""
        version, directory = self.state().admission.version, self.checkpoints.directory
        before = resumable(directory, self.checkpoints.proof)[-1:] if suspect else []
        what = "sound" if self.checkpoints.proven_numbers(version) else "earlier"
        other = "".join(f", and {what} ones in {directory / str(each)}" for each in before)
        return f"the weights of update {version} are in {path}{other}"


async def with_timeout(work: Coroutine[Any, Any, T], seconds: float | None, doing: str) -> T:
    """Await work by the learner; raise Stalled after `seconds` (None: no limit). No watchdog runs at this time."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise Stalled(f"the learner has not finished {doing} after {seconds:.0f} s") from None


def cause_of(error: BaseException) -> BaseException:
    """Return the first error in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
