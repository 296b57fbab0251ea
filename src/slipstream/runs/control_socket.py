"""`slipstream scale`, client and server: requests for more or fewer workers, through a socket in the run's directory.

A request is a line of JSON, `["sampler=+2"]` or an empty list. The answer is a line of JSON, too: `{"workers": {KIND:
{"working": [NAME …], "starting": …, "leaving": …}}}` or `{"error": LINE}`. Only the owner of the run can connect.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, RunDirError, SlipstreamError
from slipstream.run_dir.writing import SOCKET

MAX_REQUEST_BYTES = 1 << 16
"""Longest request in bytes."""
COMMAND_TIMEOUT = 10.0
"""Timeout of client and server in seconds."""
SHORT = 100
"""Length in bytes of a socket's address that every operating system accepts."""
Workers = Mapping[str, Mapping[str, Sequence[str]]]
Answering = Callable[[Sequence[str]], Workers]


@contextmanager
def address(path: Path) -> Iterator[str]:
    """Yield an address for the socket at `path`. For a long path, /proc/self/fd/N (Linux) names the open directory."""
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
    def __init__(self, connection: socket.socket, answer: Answering, active: set[Conversation]) -> None:
        self.connection, self.answer, self.active, self.heard = connection, answer, active, b""
        self.loop = asyncio.get_running_loop()
        connection.setblocking(False)
        self.loop.add_reader(connection, self.read)
        self.limit = self.loop.call_later(COMMAND_TIMEOUT, self.end)
        active.add(self)

    def read(self) -> None:
        with suppress(OSError):  # the client has disconnected
            data = self.connection.recv(MAX_REQUEST_BYTES)
            self.heard += data
            if data and b"\n" not in self.heard and len(self.heard) <= MAX_REQUEST_BYTES:
                return
            self.connection.sendall(json.dumps(answer_of(self.heard, self.answer)).encode() + b"\n")
        self.end()

    def end(self) -> None:
        self.limit.cancel()
        self.loop.remove_reader(self.connection)
        self.connection.close()
        self.active.discard(self)


def answer_of(line: bytes, answer: Answering) -> dict[str, Any]:
    try:
        changes = json.loads(line)
    except (ValueError, RecursionError):
        changes = None
    if not isinstance(changes, list) or not all(isinstance(change, str) for change in changes):
        return {"error": 'expected one line of JSON, such as ["sampler=+2"]'}
    try:
        return {"workers": answer(changes)}
    except SlipstreamError as error:
        return {"error": str(error)}


@asynccontextmanager
async def scale_server(path: Path, answer: Answering, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Answer requests of `slipstream scale` in this context; if there can be no socket, print a note and continue."""
    file, active, loop = path / SOCKET, set[Conversation](), asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            file.unlink(missing_ok=True)  # may be left from a run that was killed
            with address(file) as name:
                listener.bind(name)
            file.chmod(0o600)
            listener.listen()
        except OSError as error:
            say(f"slipstream scale cannot reach this run: {file}: {error.strerror or error}")
            yield
            return
        loop.add_reader(listener, lambda: Conversation(listener.accept()[0], answer, active))
        try:
            yield
        finally:
            loop.remove_reader(listener)
            for conversation in list(active):
                conversation.end()
            with suppress(OSError):  # the disk is read-only, or the directory was removed
                file.unlink()


# --- the client -------------------------------------------------------------------------------------------------------


def scale(path: Path, changes: Sequence[str]) -> list[str]:
    """Send changes to an active run; return lines that list the workers of each kind."""
    if not (path / "config.toml").exists():
        raise RunDirError(f"{path} holds no run: there is no config.toml in it")
    try:
        with socket.socket(socket.AF_UNIX) as connection, address(path / SOCKET) as name:
            connection.settimeout(COMMAND_TIMEOUT)
            connection.connect(name)
            connection.sendall(json.dumps(list(changes)).encode() + b"\n")
            with connection.makefile(encoding="utf-8") as answer:
                line = answer.readline()
    except (FileNotFoundError, ConnectionError):
        line = ""
    except OSError as error:
        raise RunDirError(f"{path}: the run does not answer: {error.strerror or error}") from None
    if not line:
        raise RunDirError(
            f"{path}: no run is active there, or it is loading; "
            f"`slipstream resume {shlex.quote(str(path))}` continues a stopped run"
        )
    reply = json.loads(line)
    if "error" in reply:
        raise ConfigError(reply["error"])
    return [f"{kind}: {worker_counts(workers)}" for kind, workers in reply["workers"].items()]


def worker_counts(workers: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{len(names)} {state} ({', '.join(names)})" for state, names in workers.items() if names)
