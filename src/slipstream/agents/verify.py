"""Verify an agent's work in the sandbox: `python -m slipstream.agents.verify --restore DIR -- python3 -m unittest`.

The workspace is where this is begun. What `--restore` names lies over it, so that nobody passes tests by changing them.
The exit status is 0 if the command's is; a sandbox that fails ends this by a signal, as it says nothing of the agent.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.agents.workspace import put
from slipstream.errors import SlipstreamError
from slipstream.tasks.sandbox import sandbox_of
from slipstream.tasks.sandbox.base import Limits, MiB, Ran


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("slipstream.agents.verify", description="Run a command on a copy of a workspace.")
    parser.add_argument("--restore", type=Path, action="append", default=[], help="a directory to lay over it")
    parser.add_argument("--sandbox", default="bubblewrap", help="bubblewrap, or none")
    parser.add_argument("--seconds", type=float, default=50.0, help="that the command may take")
    parser.add_argument("--memory", type=int, default=1024, help="MiB that it may take")
    parser.add_argument("--disk", type=int, default=256, help="MiB of the workspace")
    parser.add_argument("command", nargs="+", help="behind --")
    given = parser.parse_args(argv)
    limits = Limits(seconds=given.seconds, memory=given.memory * MiB, disk=given.disk * MiB, output=MiB, processes=64)
    try:
        ran = asyncio.run(verified([Path(), *given.restore], given.command, given.sandbox, limits))
    except SlipstreamError as error:
        print(error, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    sys.stdout.write(ran.out)
    sys.stderr.write(ran.err)
    return 0 if ran.code == 0 else 1


async def verified(directories: Sequence[Path], command: Sequence[str], sandbox: str, limits: Limits) -> Ran:
    session = await sandbox_of(sandbox).session(limits)
    try:
        for each in directories:
            await put(session, each, limits)
        return await session.run(command, limits=limits)
    finally:
        await session.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
