"""Environment `python` with one tool: run a Python program in the sandbox. No state is kept between calls."""

from __future__ import annotations

from slipstream.sandbox.base import Limits, Ran, Sandbox, run_python

SHOWN = 4000
"""Maximum characters of stdout that the student sees; stderr has the same, separate limit."""


class Python:
    """Environment `python`. Results are reproducible: fixed hash seed, no network, no durations in the text."""

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
    parts += [f"{name}:\n{shown(text)}" for name, text in (("stdout", ran.out), ("stderr", ran.err)) if text]
    return "\n".join(parts)


def shown(text: str) -> str:
    """Keep the first and last characters of an output that is too long; errors are usually at the end."""
    text = text.removesuffix("\n")
    left_out = len(text) - SHOWN
    if left_out <= 0:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
