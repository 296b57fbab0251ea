"""Both ends of `slipstream scale`: a socket in a run's directory, by which it is told to have more workers or fewer.

A line of JSON goes in, `["sampler=+2"]` or an empty list, and one comes out: `{"workers": {KIND: {"working": [NAME …],
"starting": …, "leaving": …}}}`, or `{"error": LINE}`. Only the owner of the run can connect.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, RunDirError, SlipstreamError
from slipstream.run_dir.writing import SOCKET

LONGEST = 1 << 16
"""Bytes of a line that is read."""
PATIENCE = 10.0
"""Seconds that either end waits for the other."""
SHORT = 100
"""Bytes that the address of a socket may have everywhere."""
Workers = Mapping[str, Mapping[str, Sequence[str]]]
Answering = Callable[[Sequence[str]], Workers]


@contextmanager
def address(path: Path) -> Iterator[str]:
    """Of a socket, however long its path is: on Linux a directory that is open has a short name."""
    if len(os.fsencode(path)) <= SHORT:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


# --- the run ----------------------------------------------------------------------------------------------------------


class Conversation:
    def __init__(self, there: socket.socket, answer: Answering, going_on: set[Conversation]) -> None:
        self.there, self.answer, self.going_on, self.heard = there, answer, going_on, b""
        self.loop = asyncio.get_running_loop()
        there.setblocking(False)
        self.loop.add_reader(there, self.read)
        self.limit = self.loop.call_later(PATIENCE, self.end)
        going_on.add(self)

    def read(self) -> None:
        with suppress(OSError):  # who asked is gone
            data = self.there.recv(LONGEST)
            self.heard += data
            if data and b"\n" not in self.heard and len(self.heard) <= LONGEST:
                return
            self.there.sendall(json.dumps(answered(self.heard, self.answer)).encode() + b"\n")
        self.end()

    def end(self) -> None:
        self.limit.cancel()
        self.loop.remove_reader(self.there)
        self.there.close()
        self.going_on.discard(self)


def answered(line: bytes, answer: Answering) -> dict[str, Any]:
    try:
        changes = json.loads(line)
    except ValueError:
        changes = None
    if not isinstance(changes, list) or not all(isinstance(change, str) for change in changes):
        return {"error": 'expected one line of JSON, such as ["sampler=+2"]'}
    try:
        return {"workers": answer(changes)}
    except SlipstreamError as error:
        return {"error": str(error)}


@asynccontextmanager
async def reachable(path: Path, answer: Answering, say: Callable[[str], None]) -> AsyncIterator[None]:
    """As long as this lasts. A run goes on without it where it is not possible."""
    file, going_on, loop = path / SOCKET, set[Conversation](), asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            file.unlink(missing_ok=True)  # of a run that was killed
            with address(file) as name:
                listener.bind(name)
            file.chmod(0o600)
            listener.listen()
        except OSError as error:
            say(f"slipstream scale will not reach this run: {file}: {error.strerror or error}")
            yield
            return
        loop.add_reader(listener, lambda: Conversation(listener.accept()[0], answer, going_on))
        try:
            yield
        finally:
            loop.remove_reader(listener)
            for conversation in list(going_on):
                conversation.end()
            with suppress(OSError):  # a disk that takes no change, or a directory that is gone
                file.unlink()


# --- whoever asks -----------------------------------------------------------------------------------------------------


def scale(path: Path, changes: Sequence[str]) -> list[str]:
    """Tell a run that goes on; returns who works there now, in lines."""
    if not (path / "config.toml").exists():
        raise RunDirError(f"{path} holds no run: there is no config.toml in it")
    try:
        with socket.socket(socket.AF_UNIX) as there, address(path / SOCKET) as name:
            there.settimeout(PATIENCE)
            there.connect(name)
            there.sendall(json.dumps(list(changes)).encode() + b"\n")
            with there.makefile(encoding="utf-8") as answer:
                line = answer.readline()
    except (FileNotFoundError, ConnectionError):
        line = ""
    except OSError as error:
        raise RunDirError(f"{path}: the run does not answer: {error.strerror or error}") from None
    if not line:
        raise RunDirError(
            f"{path}: no run goes on there, or it is still loading; `slipstream resume {path}` goes on with one that "
            "was stopped"
        )
    told = json.loads(line)
    if "error" in told:
        raise ConfigError(told["error"])
    return [f"{kind}: {said(workers)}" for kind, workers in told["workers"].items()]


def said(workers: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{len(names)} {state} ({', '.join(names)})" for state, names in workers.items() if names)
