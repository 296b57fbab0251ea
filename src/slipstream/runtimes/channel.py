"""Messages over a pair of sockets: a value, pickled, with parcels that nobody opens on the way.

    8 bytes     length of the head
    head        the pickle of (value, what is said of each parcel)
    parcels     Packed: its bytes. Mapped: nothing; its descriptor came with the first bytes of the message

Nothing here waits: `read` takes what has come, `write` gives what is taken, and an event loop calls them when there is
something to do. What is half read or half written stays with the channel, so one loop may follow another.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import pickle
import socket
import sys
import tempfile
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = 8
DESCRIPTORS = 16
"""The most that come at a time."""
TOGETHER = 64
"""Parts that one system call takes."""
KEPT_HERE = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
"""Descriptors that come are not for programs that are started here."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A pickle, for its reader."""

    data: bytes | bytearray


class Mapped:
    """Bytes in memory that has no name: whoever has it reads them in place, and they are freed when nobody has it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, data: memoryview) -> Mapped:
        made = cls(nameless(), data.nbytes)
        while data.nbytes:
            data = data[os.write(made.descriptor, data) :]
        return made

    def read_only(self) -> mmap.mmap:
        return mmap.mmap(self.descriptor, self.size, prot=mmap.PROT_READ)


def nameless() -> int:
    if sys.platform == "linux":
        return os.memfd_create("slipstream")
    with tempfile.TemporaryFile() as file:  # it has lost its name already
        return os.dup(file.fileno())


Parcel = Packed | Mapped


class Channel:
    def __init__(self, ours: socket.socket, heard: Callable[[Any, list[Parcel]], None]) -> None:
        ours.setblocking(False)
        self.socket, self.heard = ours, heard
        self.loop: asyncio.AbstractEventLoop | None = None
        self.unsent: deque[tuple[list[memoryview], list[Mapped]]] = deque()
        """What is left of each message, and the memory whose descriptors go with its first byte."""
        self.descriptors: deque[int] = deque()
        """They have come, and their message has not been read so far."""
        self.parts = self._parts()
        self.part = next(self.parts)

    # --- with an event loop ----------------------------------------------------------------------------------

    def attach(self, lost: Callable[[], None]) -> None:
        """To the loop that runs, from now on; `lost` is called when the other end is gone."""
        self.detach()
        self.loop, self.lost = asyncio.get_running_loop(), lost
        self.loop.add_reader(self.socket, self._readable)
        if self.unsent:
            self.loop.add_writer(self.socket, self._writable)

    def detach(self) -> None:
        if self.loop is not None and not self.loop.is_closed():
            self.loop.remove_reader(self.socket)
            self.loop.remove_writer(self.socket)
        self.loop = None

    def _readable(self) -> None:
        if not self.read():
            self.detach()
            self.lost()

    def _writable(self) -> None:
        if self.write() and self.loop is not None:
            self.loop.remove_writer(self.socket)

    # --- messages --------------------------------------------------------------------------------------------

    def send(self, value: Any, parcels: Sequence[Parcel] = ()) -> None:
        """Now, as far as the other end takes it; raises what pickling raises, and then nothing has left."""
        sizes = [len(p.data) if isinstance(p, Packed) else -1 - p.size for p in parcels]
        head = pickle.dumps((value, sizes), protocol=5)
        idle = not self.unsent
        parts = [len(head).to_bytes(PREFIX, "little") + head, *(p.data for p in parcels if isinstance(p, Packed))]
        mapped = [p for p in parcels if isinstance(p, Mapped)]
        self.unsent.append(([memoryview(part) for part in parts], mapped))
        if idle and not self.write() and self.loop is not None:
            self.loop.add_writer(self.socket, self._writable)

    def write(self) -> bool:
        """Whether all has left. What nobody is there to take is gone: whoever reads here finds that out."""
        while self.unsent:
            parts, mapped = self.unsent[0]
            try:
                sent = socket.send_fds(self.socket, parts[:TOGETHER], [each.descriptor for each in mapped])
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                self.unsent.clear()
                return True
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
                self.unsent[0] = parts, []
            else:
                self.unsent.popleft()
        return True

    def read(self) -> bool:
        """Take what has come; false when the other end is gone."""
        while True:
            try:
                count, extras, _, _ = self.socket.recvmsg_into([self.part], 4 * DESCRIPTORS, KEPT_HERE)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            for _, _, numbers in extras:
                self.descriptors.extend(array("i", numbers))
            if count == 0:
                return False
            self.part = self.part[count:]
            if not self.part:
                self.part = next(self.parts)

    def _parts(self) -> Iterator[memoryview]:
        """What is to be filled next."""
        while True:
            yield from self._message()  # which forgets what was in it

    def _message(self) -> Iterator[memoryview]:
        prefix = bytearray(PREFIX)
        yield memoryview(prefix)
        head = bytearray(int.from_bytes(prefix, "little"))
        yield memoryview(head)
        value, sizes = pickle.loads(head)
        parcels: list[Parcel] = []
        for size in sizes:
            if size < 0:
                parcels.append(Mapped(self.descriptors.popleft(), -1 - size))
            else:
                data = bytearray(size)
                yield memoryview(data)
                parcels.append(Packed(data))
        self.heard(value, parcels)

    # --- the end ---------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """As `say_goodbye`, and nobody listens here any more."""
        self.detach()
        self.say_goodbye()

    def say_goodbye(self) -> None:
        """The other end reads to the end of what was sent, and then that there is no more."""
        with contextlib.suppress(OSError):  # it may be gone
            self.socket.shutdown(socket.SHUT_WR)

    def drain(self, until: float) -> None:
        """Wait for the other end to go, by this time of the monotonic clock; what it still says is nobody's."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while (left := until - time.monotonic()) > 0:
                self.socket.settimeout(left)
                if not self.socket.recv(1 << 16):
                    break

    def close(self) -> None:
        self.detach()
        self.socket.close()
