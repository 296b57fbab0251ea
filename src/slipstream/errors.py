"""All exceptions of this package, as one tree.

SlipstreamError         a run cannot start or continue; the command line prints one line and exits with code 2.
├── ConfigError         the configuration is wrong: the message names the field and what to write instead.
├── DataError           a file or a row is wrong: the message names the file, the line and what is expected.
├── ModelError          a model or tokenizer cannot be used: the message names the model and the reason.
├── RunDirError         the run directory is missing, already holds a run, was changed, or cannot be written.
├── EngineError         an engine failed repeatedly: the message names the engine and the cause.
│   ├── WorkerDied      the process of an engine has ended or hangs.
│   │   └── AllDied     the processes of all engines have ended, and none can restart from its last state.
│   ├── LearnerDied     the learner's process has ended: the run can restart from its last checkpoint.
│   └── RecordsLost     records needed by a call were stored on a machine that is no longer available.
├── EndpointError       an endpoint gave no answer or a wrong one: during a run, the call is retried.
├── SandboxError        a sandbox could not run a model's program: the message names the sandbox and the cause.
├── Stalled             the pipeline has made no progress for too long: the message names which part waits for which.
├── NonFiniteError      a loss, gradient, logit or score is NaN or infinite.
└── Unhealthy           the run's metrics show that it should stop: the message names the finding and what to do.

EnvironmentFailed       an environment hung, crashed or raised: its episode is retried, and finally left out.
└── Suspected           a process ended with several environments in it: each episode gets an extra attempt, alone.
NoContext               a teacher's context cannot be built for one response: only that response is not scored.
Terminated              not an error: SIGTERM stops the run, as Ctrl-C does by KeyboardInterrupt.
└── HungUp              SIGHUP stops the run: its terminal was closed.

Any other exception is a defect of this package and keeps its traceback.
"""

import difflib
from collections.abc import Iterable
from unicodedata import category

CONTROL_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that are printed as escape sequences."""


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
    """The run's metrics show that it should stop. `harmful` is True if updates may have damaged the weights."""

    def __init__(self, message: str, *, harmful: bool = False) -> None:
        super().__init__(message)
        self.harmful = harmful


class EndpointError(SlipstreamError):
    """Failure of an endpoint. `status` is the HTTP status of its answer, 0 if there was no answer."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class EnvironmentFailed(Exception):
    """Failure of an environment. `cause` is timeout, crash or error; failures are counted by it."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(cause, message)  # unpickling calls the constructor with both arguments
        self.cause, self.message = cause, message

    def __str__(self) -> str:
        return self.message


class Suspected(EnvironmentFailed):
    """A process ended, and any environment in it may be the cause. `acting` is True if this one was running a call."""

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
    """Return the first line of an exception's message, or the name of its type if the message is empty."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # user code may have such exceptions
        lines = []
    return next(iter(lines), type(error).__name__)


def printable(text: str) -> str:
    """Replace control characters and bidirectional marks by escape sequences, so that no terminal obeys them."""
    if text.isprintable():
        return text
    return "".join(repr(c)[1:-1] if category(c) in CONTROL_CATEGORIES and c not in "\n\t" else c for c in text)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return `did you mean 'lr'?` for a similar name or for spelled-out initials, else the list of known names."""
    known = sorted(choices)
    initials = "".join(word[:1] for word in name.split("_"))
    near = [initials] if initials in known else difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
