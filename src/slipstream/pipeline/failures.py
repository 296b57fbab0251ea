"""Failures: retries of failed calls, restarts of dead workers, and warnings about endpoints that do not answer.

If all tries of a call fail, its group is dropped; many failed tries in a row stop the run. This layer retries the calls
of whole groups, with pauses of seconds. An engine may retry a request at once by itself, for example after a lost
connection. The engine must raise soon, so that this layer can report the problem.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from slipstream.errors import EndpointError, EngineError, SlipstreamError, first_line

T = TypeVar("T")
GROUP_PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds between the tries of a failing call."""
CALL_TRIES = len(GROUP_PAUSES) + 1
MAX_FAILED_TRIES = 3 * CALL_TRIES
"""Number of failed tries without a success after which the run stops: three groups with five tries each."""
DEFECTS = (TypeError, AttributeError, NameError, AssertionError)
"""Errors in the program itself: a retry cannot help, and the traceback is needed."""
FIRST_WARNING = 10.0
"""Seconds without an answer until the first warning; the time doubles with each further warning."""
HOUR = 3600.0
MAX_PAUSE = 60.0
"""Largest pause in seconds before a restart."""
METRIC = "restarts/"


# --- calls ------------------------------------------------------------------------------------------------------------


def is_final(error: Exception) -> bool:
    """Return True if a repeated call cannot help. An engine may raise anything else for a failure that passes."""
    return isinstance(error, (SlipstreamError, *DEFECTS)) and not isinstance(error, EndpointError)


class GivenUp(Exception):
    """Raised for a call that failed at every try, or whose error a retry cannot fix."""


class Retries:
    """Retries, with growing pauses, of the calls to one stage or one teacher."""

    def __init__(self, stage: str, *, say: Callable[[str], None] = print) -> None:
        self.stage, self.say, self.in_vain = stage, say, 0
        """Number of failed tries of groups that were given up since the last success."""
        self.successes = 0
        self.failures, self.cause = 0, ""
        """Number of failed tries since the last success, and the cause of the last failure."""
        self.since = 0.0
        self.recovered = False
        """True if a call succeeded after a failed one; the code that reads this value sets it back to False."""

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        for pause in (*GROUP_PAUSES, None):
            before = self.successes
            try:
                result = await work()
            except GivenUp as error:
                self._note(str(error))
                raise self._failed(1, str(error), before) from error
            except Exception as error:
                if is_final(error):
                    raise
                self._note(f"{type(error).__name__}: {first_line(error)}")
                if pause is None:
                    raise self._failed(CALL_TRIES, self.cause, before) from error
                await asyncio.sleep(pause)
            else:
                self._fine()
                return result
        raise AssertionError("the last try returns or raises")

    def report(self) -> list[str]:
        if not self.failures:
            return []
        seconds = asyncio.get_running_loop().time() - self.since
        return [f"{self.stage} has failed at the last {self.failures} tries, for {seconds:.1f} s: {self.cause}"]

    def _note(self, cause: str) -> None:
        if not self.failures:
            self.since = asyncio.get_running_loop().time()
        self.failures, self.cause = self.failures + 1, cause
        if self.failures == CALL_TRIES:
            self.say(f"{self.stage} has failed at the last {CALL_TRIES} tries, and will be retried: {cause}")

    def _fine(self) -> None:
        if self.failures >= CALL_TRIES:
            self.say(f"{self.stage} works again after {self.failures} failed tries")
        self.recovered = self.recovered or self.failures > 0
        self.in_vain = self.failures = 0
        self.successes += 1

    def _failed(self, tries: int, cause: str, before: int) -> Exception:
        self.in_vain += tries if before == self.successes else 0
        if self.in_vain < MAX_FAILED_TRIES:
            return GivenUp(cause)
        return EngineError(f"{self.stage} failed at the last {self.in_vain} tries, and none succeeded: {cause}")


class ResponseWatch:
    """Timer of an endpoint's silence: runs while requests are open, and starts again after each answer."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self.name, self.say = name, say
        self.open_requests, self.since, self.warned = 0, 0.0, 0.0
        """Number of open requests, start of the silence, and seconds of silence at the last warning (0: none yet)."""
        self.timer: asyncio.TimerHandle

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if not self.open_requests:
            self._start_timer()
        self.open_requests += 1
        try:
            yield
            if self.warned:
                seconds = asyncio.get_running_loop().time() - self.since
                self.say(f"{self.name} answers again after {seconds:.0f} s")
        finally:
            self.open_requests -= 1
            self.timer.cancel()
            if self.open_requests:
                self._start_timer()

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self.since, self.warned = loop.time(), 0.0
        self.timer = loop.call_later(FIRST_WARNING, self._warn)

    def _warn(self) -> None:
        loop = asyncio.get_running_loop()
        self.warned = loop.time() - self.since
        self.say(f"{self.name} has given no scores for {self.warned:.0f} s ({self.open_requests} requests are open)")
        self.timer = loop.call_later(self.warned, self._warn)


# --- workers ----------------------------------------------------------------------------------------------------------


class Restarts:
    """The decision whether to restart a dead worker, and after which pause, by the counts of earlier restarts.

    If the learner dies, the run restarts with the same object.
    """

    def __init__(self, most: int) -> None:
        """Allow each worker `most` restarts per hour."""
        self.most = most
        self.counts = Counter[str]()
        """Restarts of each worker in the whole run."""
        self.lately = defaultdict[str, deque[float]](deque)
        """Times of each worker's restarts in the last hour."""
        self.sizes: dict[str, int] = {}
        """Number of workers by kind, for kinds whose number was changed during the run."""
        self.began: float | None = None
        """Start of the run in seconds of the event loop's clock; None before the start."""

    def recall(self, metrics: Mapping[str, Any]) -> None:
        """Restore the counts from the last metrics line of an earlier part of the run."""
        for name, value in metrics.items():
            if name.startswith(METRIC):
                worker = name.removeprefix(METRIC)
                self.counts[worker] = max(self.counts[worker], round(value))

    def grant(self, name: str, now: float) -> float | None:
        """Count a restart and return the pause before it in seconds (1, 2, 4, …), or None if the limit is reached."""
        lately = self.lately[name]
        while lately and now - lately[0] >= HOUR:
            lately.popleft()
        if len(lately) >= self.most:
            return None
        lately.append(now)
        self.counts[name] += 1
        return min(2.0 ** (len(lately) - 1), MAX_PAUSE)

    def describe(self, name: str) -> str:
        """Return how often a worker died, as text for the message that it is not restarted; empty if once."""
        times = len(self.lately[name])
        return f" {times + 1} times in an hour (runtime.restarts = {self.most})" if times else ""

    @property
    def metrics(self) -> dict[str, float]:
        return {METRIC + name: float(count) for name, count in sorted(self.counts.items())}
