"""One tool, a Python interpreter that remembers nothing: every call is a program of its own in the sandbox."""

from __future__ import annotations

from slipstream.sandbox.base import Limits, Ran, Sandbox, run_python

SHOWN = 4000
"""Characters of each of a program's two outputs that the student sees."""


class Python:
    """The same code has the same result: hashes are seeded, there is no network, and no clock is shown."""

    limits = Limits()

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        """How programs ended, by kind, beside the episode's own."""

    def start(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    async def python(self, code: str) -> str:
        """Run a Python program and see what it prints. Nothing is kept from one call to the next."""
        ran = await run_python(self.sandbox, code, limits=self.limits)
        name = f"python/{ran.status}"
        self.metrics[name] = self.metrics.get(name, 0.0) + 1.0
        return observation(ran, self.limits)


def observation(ran: Ran, limits: Limits) -> str:
    said = {
        "ok": "ok",
        "failed": f"failed with exit code {ran.code}",
        "timeout": f"ended after {limits.seconds:g} s",
        "output": f"ended: more than {limits.output} bytes of output",
        "memory": f"ended: more than {limits.memory >> 20} MiB of memory",
        "disk": f"ended: more than {limits.disk >> 20} MiB of files, or too many of them",
    }
    parts = [f"status: {said[ran.status]}"]
    parts += [f"{name}:\n{shown(text)}" for name, text in (("stdout", ran.out), ("stderr", ran.err)) if text]
    return "\n".join(parts)


def shown(text: str) -> str:
    """Both ends of it: what went wrong is said last."""
    text = text.removesuffix("\n")
    left_out = len(text) - SHOWN
    if left_out <= 0:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
