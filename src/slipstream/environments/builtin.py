"""Built-in environments: those of the tool tasks, and `python`, which runs programs in the sandbox.

Models were trained with the docstrings of the tools: do not edit these.
"""

from typing import Any

from slipstream.sandbox.base import Limits, Ran, Sandbox, run_python

MAX_OUTPUT = 4000
"""Maximum characters of stdout that the student sees of a program; stderr has the same, separate limit."""


def value_of(table: dict[str, Any], key: str) -> str:
    return str(table[key]) if key in table else f"no key {key}"


class Table:
    """Numbers behind keys, and a calculator."""

    def start(self, meta: dict[str, Any]) -> None:
        self._numbers: dict[str, int] = meta["table"]

    def get(self, key: str) -> str:
        """The number behind a key."""
        return value_of(self._numbers, key)

    def add(self, a: int, b: int) -> str:
        """a + b."""
        return str(a + b)

    def subtract(self, a: int, b: int) -> str:
        """a - b."""
        return str(a - b)


class Lookup:
    """Chain of keys: every key names the next one."""

    def start(self, meta: dict[str, Any]) -> None:
        self._after: dict[str, str] = meta["table"]

    def look(self, key: str) -> str:
        """The key that comes after a key."""
        return value_of(self._after, key)


class Doors:
    """Row of doors: behind each one lies the key of the next. A wrong key locks all doors for good."""

    def start(self, meta: dict[str, Any]) -> None:
        self._ahead = list(meta["table"].items())

    def get(self, key: str) -> str:
        """The key or number behind the next door."""
        if not self._ahead or key != self._ahead[0][0]:
            self._ahead = []
            return "locked"
        return str(self._ahead.pop(0)[1])


class Python:
    """Run Python programs; no state is kept between calls.

    Results are reproducible: fixed hash seed, no network, no durations in the text.
    """

    limits = Limits()

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        """Number of programs that ended with each status (`python/ok`, …), recorded as metrics of the episode."""

    def start(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    async def python(self, code: str) -> str:
        """Run a Python program and see what it prints. Nothing is kept from one call to the next."""
        ran = await run_python(self.sandbox, code, limits=self.limits)
        name = f"python/{ran.status}"
        self.metrics[name] = self.metrics.get(name, 0.0) + 1.0
        return observation(ran, self.limits)


def observation(ran: Ran, limits: Limits) -> str:
    endings = {
        "ok": "ok",
        "failed": f"failed with exit code {ran.code}",
        "timeout": f"ended after {limits.seconds:g} s",
        "output": f"ended: more than {limits.output} bytes of output",
        "memory": f"ended: more than {limits.memory >> 20} MiB of memory",
        "disk": f"ended: more than {limits.disk >> 20} MiB of files, or too many of them",
    }
    parts = [f"status: {endings[ran.status]}"]
    parts += [f"{name}:\n{shortened_output(text)}" for name, text in (("stdout", ran.out), ("stderr", ran.err)) if text]
    return "\n".join(parts)


def shortened_output(text: str) -> str:
    """Keep the first and last characters of an output that is too long; errors are usually at the end."""
    text = text.removesuffix("\n")
    left_out = len(text) - MAX_OUTPUT
    if left_out <= 0:
        return text
    half = MAX_OUTPUT // 2
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
