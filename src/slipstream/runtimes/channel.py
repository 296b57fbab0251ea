"""Messages over a socket pair: a pickled value, with shared memory that intermediate processes do not map.

    8 bytes     length of the head
    head        pickle of (value, kind and size of each memory); its first bytes carry the memories' descriptors

Only `drain` blocks: `read` takes the available bytes, `write` sends what the socket accepts, and an event loop calls
both. Partial messages stay in the channel, so it can move to another event loop.
"""

import asyncio
import contextlib
import pickle
import socket
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slipstream.engines.shared_memory import Mapped

PREFIX_BYTES = 8
MAX_DESCRIPTORS = 250
"""Largest number of descriptors per system call; Linux allows 253."""
DESCRIPTOR_SPACE = socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)


class Channel:
    def __init__(self, ours: socket.socket, on_message: Callable[[Any, list[Mapped]], None]) -> None:
        ours.setblocking(False)
        self.socket, self.on_message = ours, on_message
        self.loop: asyncio.AbstractEventLoop | None = None
        self.unsent: deque[tuple[memoryview, Sequence[Mapped]]] = deque()
        """Unsent bytes of each message, and memories whose descriptors go with the next bytes."""
        self.descriptors: deque[int] = deque()
        """Received descriptors whose message is not complete."""
        self.exchanged = 0
        """Number of bytes sent and received so far."""
        self.parts = self._parts()
        self.part = next(self.parts)

    def attach(self, lost: Callable[[], None]) -> None:
        """Attach to the running event loop; `lost` is called when the other end is closed."""
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

    def send(self, value: Any, memories: Sequence[Mapped] = ()) -> None:
        """Queue a message and send what the socket accepts. If pickling raises, nothing is sent."""
        head = pickle.dumps((value, [(type(each), each.size) for each in memories]), protocol=5)
        idle = not self.unsent
        self.unsent.append((memoryview(len(head).to_bytes(PREFIX_BYTES, "little") + head), memories))
        if idle and not self.write() and self.loop is not None:
            self.loop.add_writer(self.socket, self._writable)

    def write(self) -> bool:
        """Send what the socket accepts; return True if nothing remains. If the socket is closed, drop the rest."""
        while self.unsent:
            part, memories = self.unsent[0]
            now, later = memories[:MAX_DESCRIPTORS], memories[MAX_DESCRIPTORS:]
            try:
                # descriptors need a byte that carries them
                sent = socket.send_fds(self.socket, [part[:1] if later else part], [each.descriptor for each in now])
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                self.unsent.clear()
                return True
            self.exchanged += sent
            if sent < len(part):
                self.unsent[0] = part[sent:], later
            else:
                self.unsent.popleft()
        return True

    def read(self) -> bool:
        """Read the available bytes; return False when the other end is closed."""
        while True:
            try:
                count, extras, _, _ = self.socket.recvmsg_into([self.part], DESCRIPTOR_SPACE, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            for _, _, numbers in extras:
                self.descriptors.extend(array("i", numbers))
            if count == 0:
                return False
            self.exchanged += count
            self.part = self.part[count:]
            if not self.part:
                self.part = next(self.parts)

    def _parts(self) -> Iterator[memoryview]:
        """Yield, one after the other, the buffers that received bytes must fill."""
        while True:
            yield from self._message()  # a generator per message frees the message's buffers

    def _message(self) -> Iterator[memoryview]:
        prefix = bytearray(PREFIX_BYTES)
        yield memoryview(prefix)
        head = bytearray(int.from_bytes(prefix, "little"))
        yield memoryview(head)
        value, kinds = pickle.loads(head)
        self.on_message(value, [kind(self.descriptors.popleft(), size) for kind, size in kinds])

    def close_writing(self) -> None:
        """Close this end for writing: the other end reads all that was sent, then end of file."""
        with contextlib.suppress(OSError):  # the other end may be closed
            self.socket.shutdown(socket.SHUT_WR)

    def drain(self, until: float) -> None:
        """Wait until the other end closes or the monotonic clock reaches `until`; discard what it sends."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while (left := until - time.monotonic()) > 0:
                self.socket.settimeout(left)
                if not self.socket.recv(1 << 16):
                    break

    def close(self) -> None:
        self.detach()
        self.socket.close()
