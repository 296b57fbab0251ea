"""A grading process: it grades one response at a time, until its parent ends."""

import importlib
import inspect
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue

from slipstream.children import first_message
from slipstream.errors import ConfigError
from slipstream.rewards.functions import REWARD_PACKAGES, Reward, grade, reward_of
from slipstream.sandbox import sandbox_of
from slipstream.sandbox.base import Sandbox


def serve(parent: Connection) -> None:
    """Load the functions that the parent names, send their required fields, and grade until the parent ends."""
    setting, specs, timeout, sandbox_name, settings = first_message(parent)
    inbox = SimpleQueue[bytes]()
    threading.Thread(target=_hear, args=(parent, inbox), daemon=True).start()
    try:
        rewards = [reward_of(spec, setting, settings) for spec in specs]
        sandbox = sandbox_for(rewards, sandbox_name)
        for spec in REWARD_PACKAGES.keys() & set(specs):
            importlib.import_module(REWARD_PACKAGES[spec])
    except ConfigError as error:
        parent.send(error)
        return
    parent.send({reward.spec: reward.needs for reward in rewards})
    while True:
        for answer in pickle.loads(inbox.get()):
            parent.send(grade(rewards, answer if sandbox is None else replace(answer, sandbox=sandbox), timeout))


def sandbox_for(rewards: Sequence[Reward], name: str | None) -> Sandbox | None:
    """Return the sandbox that task.sandbox names, or None; raise ConfigError if setting and rewards disagree."""
    if name is None:
        for reward in rewards:
            if "sandbox" in inspect.signature(reward.function).parameters:  # **kwargs alone does not ask for a sandbox
                why = 'the function asks for a sandbox: write task.sandbox = "bubblewrap"'
                raise ConfigError(f"task.reward = {reward.spec!r}: {why}")
        return None
    if not any("sandbox" in reward.asks for reward in rewards):
        raise ConfigError("task.sandbox does nothing: no function of task.reward asks for 'sandbox'; drop it")
    return sandbox_of(name, "task.sandbox")


def _hear(parent: Connection, inbox: SimpleQueue[bytes]) -> None:
    with suppress(EOFError, OSError):
        while True:
            inbox.put(parent.recv_bytes())
    os.killpg(0, signal.SIGKILL)  # the parent has ended: kill this process and all that it started


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # the parent may end before its first message
        serve(Connection(int(sys.argv[1])))
