"""Limits of a sandboxed program: set them, measure its memory, and end the program when it exceeds one."""

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slipstream import processes
from slipstream.errors import ConfigError
from slipstream.processes import read_proc
from slipstream.sandbox.base import Limits, Ran, Status, encode

MEASURE_INTERVAL = 0.1
"""Seconds between two measurements of a program's processes."""
KILL_TIMEOUT = 5.0
"""Timeout in seconds for the end of a killed process."""
DRAIN_TIMEOUT = 1.0
"""Timeout in seconds for reading the remaining output of an ended program."""
MAX_ADDRESS_SPACE = 16 << 30
"""Maximum address space of a process in bytes (32 times its memory limit, if that is more)."""
UNIX_SOCKET_BYTES = 64 << 10
"""Bytes that a Unix socket may hold in addition to its send buffer."""


def environment(path: str, home: str) -> dict[str, str]:
    return {"PATH": path, "HOME": home, "LANG": "C.UTF-8"}


def with_limits(argv: Sequence[str], limits: Limits, *, processes: bool, space: bool = False) -> list[str]:
    """Return a command line that sets limits on each process and runs `argv`.

    `processes` limits their number too (per user and user namespace), `space` the address space and so page tables.
    """
    cpu = int(limits.seconds * (os.cpu_count() or 1)) + 1
    return [
        "/usr/bin/prlimit",
        *(f"--cpu={cpu}", f"--data={limits.memory}", f"--fsize={limits.disk}", "--nofile=128", "--memlock=0"),
        *("--rtprio=0", "--msgqueue=0", "--sigpending=256"),
        "--core=1",  # a limit of 0 would still start the system's crash handler, as root
        *([f"--nproc={limits.processes}"] if processes else []),
        *([f"--as={max(MAX_ADDRESS_SPACE, 32 * limits.memory)}"] if space else []),
        *("--", *argv),
    ]


def check_installed(programs: Iterable[str], advice: str) -> None:
    for each in programs:
        if not os.access(f"/usr/bin/{each}", os.X_OK):
            raise ConfigError(f"sandbox: there is no /usr/bin/{each} here: {advice}")
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise ConfigError("sandbox: this kernel does not list a process's children (CONFIG_PROC_CHILDREN)")


@contextmanager
def sealed_file(content: bytes) -> Iterator[int]:
    """Yield the file descriptor of an in-memory file that has this content and is read-only for everyone."""
    descriptor = os.memfd_create("slipstream", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        all_seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, all_seals)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def stdin_file(stdin: str | Path) -> Iterator[int]:
    """Yield the file descriptor of a program's standard input."""
    if isinstance(stdin, Path):
        with stdin.open("rb") as file:
            yield file.fileno()
    else:
        with sealed_file(encode(stdin)) as descriptor:
            yield descriptor


async def finish(
    process: asyncio.subprocess.Process,
    limits: Limits,
    since: float,
    over: Callable[[int], Status | None],
    *,
    outside: bool = False,
) -> Ran:
    """Wait until a program ends or exceeds a limit, and kill it then. `outside`: `process` only starts the sandbox."""
    loop = asyncio.get_running_loop()
    assert process.stdout is not None and process.stderr is not None
    out, err = bytearray(), bytearray()
    ended = asyncio.create_task(processes.wait_for_exit(process))
    reading = [
        asyncio.create_task(_read(process.stdout, out, limits.output)),
        asyncio.create_task(_read(process.stderr, err, limits.output)),
    ]
    watching = asyncio.create_task(_watch(process.pid, over))
    status: Status | None = None
    waiting: set[asyncio.Task[Any]] = {ended, watching, *reading}
    try:
        while status is None and ended in waiting:
            left = since + limits.seconds - loop.time()
            done, waiting = await asyncio.wait(waiting, timeout=max(0, left), return_when=asyncio.FIRST_COMPLETED)
            status = "timeout" if not done else next((t.result() for t in done if t is not ended and t.result()), None)
        if outside and not ended.done() and (inside := processes.descendants(process.pid)):
            for pid in inside:
                processes.kill(pid)
            await asyncio.wait([ended], timeout=KILL_TIMEOUT)  # the sandbox reports the end of the program, then exits
        processes.kill_program(process)
        await asyncio.wait([ended], timeout=KILL_TIMEOUT)
        await asyncio.wait(reading, timeout=DRAIN_TIMEOUT)
        if status is None:
            status = next((each.result() for each in reading if each.done() and each.result()), None)
    finally:
        processes.kill_program(process)
        try:
            await asyncio.wait([ended], timeout=KILL_TIMEOUT)
        finally:
            for task in (ended, watching, *reading):
                task.cancel()
            processes.close_pipes(process)
    code = process.returncode if status is None else None
    out_text, err_text = [bytes(stream[: limits.output]).decode(errors="replace") for stream in (out, err)]
    return Ran(status or ("ok" if code == 0 else "failed"), code, out_text, err_text, loop.time() - since)


async def _read(stream: asyncio.StreamReader, into: bytearray, most: int) -> Status | None:
    while part := await stream.read(1 << 16):
        into += part
        if len(into) > most:
            return "output"
    return None


async def _watch(pid: int, over: Callable[[int], Status | None]) -> Status:
    while True:
        await asyncio.sleep(MEASURE_INTERVAL)
        if (status := over(pid)) is not None:
            return status


def memory(pids: Iterable[int], most: int) -> int:
    """Return the memory of processes in bytes, without mapped files. Above `most`, count shared memory only once."""
    pids = list(pids)
    tables = sum(_kilobytes(f"/proc/{pid}/status", ("VmPTE:",)) for pid in pids) << 10
    rough = sum(_kilobytes(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:")) for pid in pids) << 10
    if rough + tables <= most:
        return rough + tables
    shared = sum(_kilobytes(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for pid in pids) << 10
    return (shared or rough) + tables


def sockets(pid: int) -> int:
    """Return the bytes that the sockets of a process's network namespace may hold.

    For TCP and UDP sockets this is twice the queues that Linux reports; for Unix sockets it is their maximum capacity.
    """
    each = int(read_proc("/proc/sys/net/core/wmem_default") or 0) + UNIX_SOCKET_BYTES
    found = each * max(0, len(read_proc(f"/proc/{pid}/net/unix").splitlines()) - 1)
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in read_proc(f"/proc/{pid}/net/{kind}").splitlines()[1:]:
            found += 2 * sum(int(waiting, 16) for waiting in line.split()[4].split(":"))
    return found


def _kilobytes(file: str, names: tuple[str, ...]) -> int:
    return sum(int(line.split()[1]) for line in read_proc(file).splitlines() if line.startswith(names))


def holds_more(directory: str | Path, size: int, files: int) -> bool:
    """Return True if the files below a directory have more than `size` bytes, or if there are more than `files`."""
    used = count = 0
    for folder, folders, names in os.walk(directory):
        count += len(folders) + len(names)
        for name in names:
            with suppress(OSError):  # a program may remove it meanwhile
                used += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 (many)
        if used > size or count > files:
            return True
    return False
