"""What can go wrong, as one tree.

SlipstreamError         a run cannot start or go on; the command line prints one line and exits with 2
├── ConfigError         the configuration is wrong: names the field and what to write instead
├── DataError           a file or a row is wrong: names the file, the line and what is expected
├── ModelError          a model or tokenizer cannot be used: names it and why
├── RunDirError         the run directory is missing, already holds a run, was changed, or cannot be written
├── EngineError         an engine failed, again and again: names it and the cause
│   ├── WorkerDied      the process of an engine is gone, or hangs
│   │   └── AllDied     and so are those of all others: none can be started again from where they were
│   ├── LearnerDied     and it was the learner's: the run can go back to its last checkpoint
│   └── RecordsLost     records that a call was to take with it are gone with the machine on which they lay
├── SandboxError        a program of a model's could not be run, by no fault of its own: names the sandbox and the cause
├── Stalled             nothing has moved for too long: says who waits for whom
├── NonFiniteError      a loss, gradient, logit or score is NaN or infinite
└── Unhealthy           the run's own metrics say that going on is no use: names the finding and what to do

EndpointError           an endpoint gave no answer, or a wrong one: the call may be tried again, and is
EnvironmentFailed       an environment hung, crashed or raised: its episode is tried again, and then left out
└── Suspected           its process ended with other environments in it: its episode is tried again alone, uncharged
NoContext               of one response there is nothing for a teacher to see: it is not scored, and others are
Terminated              not an error: the run was told to stop by SIGTERM, as KeyboardInterrupt tells by Ctrl-C
└── HungUp              by SIGHUP: its terminal was closed

Anything else that is raised is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from unicodedata import category

COMMANDS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of characters that are not shown as they are."""


class SlipstreamError(Exception):
    pass


class ConfigError(SlipstreamError):
    pass


class DataError(SlipstreamError):
    pass


class ModelError(SlipstreamError):
    pass


class RunDirError(SlipstreamError):
    pass


class EngineError(SlipstreamError):
    pass


class WorkerDied(EngineError):
    pass


class AllDied(WorkerDied):
    pass


class RecordsLost(EngineError):
    pass


class LearnerDied(EngineError):
    pass


class SandboxError(SlipstreamError):
    pass


class Stalled(SlipstreamError):
    pass


class NonFiniteError(SlipstreamError):
    pass


class Unhealthy(SlipstreamError):
    """`harmful`: the weights may be worse for it."""

    def __init__(self, message: str, *, harmful: bool = False) -> None:
        super().__init__(message)
        self.harmful = harmful


class EndpointError(Exception):
    """Names the endpoint and what was wrong; `status` is that of its answer, if it has given one."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class EnvironmentFailed(Exception):
    """`cause` is a word to count by: timeout, crash or error."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(cause, message)  # both, as it is pickled
        self.cause, self.message = cause, message

    def __str__(self) -> str:
        return self.message


class Suspected(EnvironmentFailed):
    """Any environment of the process may have ended it; `acting`: this one was at work then."""

    def __init__(self, message: str, *, acting: bool) -> None:
        super().__init__("crash", message)
        self.acting = acting


class NoContext(Exception):
    pass


class Terminated(BaseException):
    pass


class HungUp(Terminated):
    pass


def first_line(error: BaseException) -> str:
    """What went wrong in a library, short enough for a line of ours."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def printable(text: str) -> str:
    """Show what a terminal would obey (control characters, escapes) or use to reorder text (bidirectional marks)."""
    if text.isprintable():
        return text
    return "".join(repr(c)[1:-1] if category(c) in COMMANDS and c not in "\n\t" else c for c in text)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`did you mean 'lr'?` for a near miss or spelled-out initials, else the list of what there is."""
    known = sorted(choices)
    initials = "".join(word[:1] for word in name.split("_"))
    near = [initials] if initials in known else difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
