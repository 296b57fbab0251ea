"""Sandbox by bubblewrap: separate namespaces, no network, no files except /usr, and no privileges.

If root runs bubblewrap, the program keeps user id 0 outside of the namespace. Linux grants this id special rights, such
as writing to /proc/sys. Under root, every call therefore gets an otherwise unused user id.

The escape tests show which attack each sandbox limit stops. No limit stops attacks on defects of the kernel. Against
those, run a sandbox server in a virtual machine, and configure its URL.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from slipstream.errors import ConfigError, SandboxError
from slipstream.sandbox import cgroups, processes
from slipstream.sandbox.base import USUAL, Limits, Ran, Status, encoded, unrunnable
from slipstream.sandbox.seccomp import program

ADVICE = 'apt install bubblewrap, or environment.sandbox = "none" to run code without isolation'
NOBODY = "65534"
"""User id and group id that a program sees inside the sandbox."""
USERS, PER_PROCESS = 1_879_048_192, 64
"""First of 2^28 user ids that systemd leaves unused, and how many of these ids each Slipstream process uses."""
WORK = "/work"
KEPT = {WORK: "/tmp/work", "/tmp": "/tmp/tmp"}
"""Directories whose files a session's calls share, mapped to their paths in the session's keeper process (`Kept`)."""
FILES = "/files"
"""Mount point of new files of a session. A program in the sandbox copies them, so symbolic links stay inside."""
READY = 10.0
"""Timeout in seconds for opening a session."""
FIRST = ("/bin/sh", "-c", '"$@"; exit $?', "sh")
"""Shell that is process 1 of the sandbox. Bubblewrap's own process 1 has no seccomp filter and could be attacked."""
CALLS = itertools.count()


class Bubblewrap:
    def __init__(self) -> None:
        found = shutil.which("bwrap", path=processes.PATH)
        if found is None:
            raise ConfigError(f'environment.sandbox = "bubblewrap": there is no bwrap here: {ADVICE}')
        processes.check_installed(("prlimit", "nsenter", "env"), "apt install util-linux coreutils")
        self.bwrap, self.filter = found, program(platform.machine())
        self.path, self.system = system()
        self.cgroups = cgroups.writable()
        """Directory in which each call gets a cgroup. None: cgroups cannot be used, so memory is measured instead."""

    async def run(
        self, argv: Sequence[str], *, stdin: str = "", files: Mapping[str, str] = {}, limits: Limits = USUAL
    ) -> Ran:
        if (ran := unrunnable(argv, files, limits)) is not None:
            return ran
        size = str(limits.disk)
        places = ["--perms", "0755", "--size", size, "--tmpfs", WORK]
        places += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
        return await self.call(argv, places, WORK, stdin, files, limits, user=another_user())

    async def session(self, limits: Limits = USUAL) -> Kept:
        return await Kept.opened(self, limits)

    async def close(self) -> None:
        pass

    async def call(
        self,
        argv: Sequence[str],
        places: Sequence[str],
        files_at: str,
        stdin: str,
        files: Mapping[str, str],
        limits: Limits,
        *,
        user: int | None,
        within: Sequence[str] = (),
    ) -> Ran:
        """Run one program. `within` is a command prefix that enters a session's namespaces; empty without session."""
        since = asyncio.get_running_loop().time()
        with ExitStack() as open_:
            put: list[str] = []
            for name, content in files.items():
                descriptor = open_.enter_context(processes.sealed(encoded(content)))
                put += ["--perms", "0644", "--file", str(descriptor), f"{files_at}/{name}"]
            rules = open_.enter_context(processes.sealed(self.filter))
            said = open_.enter_context(_pipe())
            keeps = [*(int(each) for each in put[3::5]), rules, said[1]]
            words = [*FIRST, "/usr/bin/env", "-C", WORK, *argv]
            made, gate = None, list[str]()
            if self.cgroups is not None:
                made, waits = open_.enter_context(cgroups.group(self.cgroups, limits)), open_.enter_context(_pipe())
                os.set_blocking(waits[0], True)
                gate, keeps = ["--block-fd", str(waits[0])], [*keeps, waits[0]]
            process = await processes.start(
                [
                    *within, self.bwrap, *gate, *WALLS, *self.system, *places, *put,
                    *("--remount-ro", "/", "--chdir", "/"),
                    *("--seccomp", str(rules), "--json-status-fd", str(said[1])), "--clearenv",
                    *_variables(processes.environment(self.path, WORK)),
                    *("--", *processes.limited(words, limits, processes=True, space=made is None)),
                ],
                stdin=open_.enter_context(processes.sealed(encoded(stdin))), user=user, keeps=keeps,
            )  # fmt: skip
            if made is not None:
                try:
                    cgroups.enter(made, process.pid)
                    os.write(waits[1], b"\n")
                except OSError as error:
                    processes.kill(process)
                    await processes.exited(process)
                    processes.release(process)
                    raise SandboxError(f"sandbox: no process can be put into {made}: {error}") from None
            ran = await processes.finish(process, limits, since, lambda pid: over(pid, limits), outside=True)
            if made is not None and cgroups.out_of_memory(made):
                return replace(ran, status="memory", code=None)
            if ran.code is not None and not _ended_by_itself(said[0]):
                raise SandboxError(f"bubblewrap: {' '.join(ran.err.split())[:300] or f'ended with {ran.code}'}")
            return ran


WALLS = [
    *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox", "--cap-drop", "ALL", "--disable-userns"),
    *("--die-with-parent", "--new-session", "--as-pid-1", "--proc", "/proc", "--dev", "/dev"),
    *("--perms", "1777", "--size", str(16 << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
]


def system() -> tuple[str, list[str]]:
    """Return PATH for the sandbox, and bubblewrap options that mount /usr, libraries and a Python."""
    path, seen = processes.PATH, ["--ro-bind", "/usr", "/usr"]
    for top in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if Path(top).is_symlink():
            seen += ["--symlink", str(Path(top).readlink()), top]
        elif Path(top).is_dir():
            seen += ["--ro-bind", top, top]
    for file in ("/etc/ld.so.cache", "/etc/alternatives"):  # needed to find libraries and commands
        seen += ["--ro-bind-try", file, file]
    if shutil.which("python3", path=path) is None:
        seen += ["--ro-bind", sys.base_prefix, sys.base_prefix]
        path = f"{sys.base_prefix}/bin:{path}"
    return path, seen


def another_user() -> int | None:
    """Return an unused user id if this process is root of the machine, not only of a namespace; None if it is not."""
    whole = Path("/proc/self/uid_map").read_text("utf-8").split() == ["0", "0", str((1 << 32) - 1)]
    if os.geteuid() != 0 or not whole:
        return None
    return USERS + (os.getpid() % (1 << 22)) * PER_PROCESS + next(CALLS) % PER_PROCESS


def over(pid: int, limits: Limits) -> Status | None:
    """Measure a sandbox's processes from outside; return the limit that they exceed, or None if there is none."""
    inside = processes.descendants(pid)[1:]
    if (taken := processes.memory(inside, limits.memory)) > limits.memory:
        return "memory"
    if len(inside) < 2:  # the first process sets up the sandbox; before the second starts, the whole machine is visible
        return None
    if taken + processes.sockets(inside[1]) > limits.memory:
        return "memory"
    for place in (*KEPT, "/dev/shm"):
        with suppress(OSError):
            there = os.statvfs(f"/proc/{inside[1]}/root{place}")
            if there.f_files - there.f_ffree > limits.files:
                return "disk"
    return None


def _variables(of: Mapping[str, str]) -> Iterator[str]:
    for name, value in of.items():
        yield from ("--setenv", name, value)


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield ends
    finally:
        for each in ends:
            os.close(each)


def _ended_by_itself(status: int) -> bool:
    """Return True if bubblewrap reports an exit code; False if the program never started or was killed from outside."""
    with suppress(BlockingIOError):
        return any("exit-code" in json.loads(line) for line in os.read(status, 1 << 16).splitlines())
    return False


class Kept:
    """Session whose calls share a working directory and a /tmp, both in memory and with one common size limit.

    Both directories are mounted in the namespaces of a keeper process, which only sleeps. If the keeper ends, they are
    lost. It ends with the process that opened the session. Each call runs in a new sandbox in these namespaces.
    """

    def __init__(self, sandbox: Bubblewrap, keeper: asyncio.subprocess.Process, user: int | None) -> None:
        self.sandbox, self.keeper, self.user = sandbox, keeper, user
        self.turn = asyncio.Lock()

    @classmethod
    async def opened(cls, sandbox: Bubblewrap, limits: Limits) -> Kept:
        user, size = another_user(), str(limits.disk)
        keeper = await processes.start(
            [
                *(sandbox.bwrap, "--unshare-user", "--uid", NOBODY, "--gid", NOBODY, "--die-with-parent"),
                *("--dev-bind", "/", "/", "--perms", "0755", "--size", size, "--tmpfs", "/tmp"),
                *("--perms", "0755", "--dir", KEPT[WORK], "--perms", "1777", "--dir", KEPT["/tmp"]),
                *("/bin/sh", "-c", "echo; exec sleep infinity"),
            ],
            user=user,
        )
        kept = cls(sandbox, keeper, user)
        assert keeper.stdout is not None and keeper.stderr is not None
        try:
            async with asyncio.timeout(READY):
                if not await keeper.stdout.readline():
                    said = (await keeper.stderr.read(1000)).decode(errors="replace")
                    raise SandboxError(f"bubblewrap: no session: {' '.join(said.split())}")
            return kept
        except TimeoutError:
            await kept.close()
            raise SandboxError(f"bubblewrap: no session within {READY:g} s") from None
        except BaseException:
            await kept.close()
            raise

    async def run(
        self, argv: Sequence[str], *, stdin: str = "", files: Mapping[str, str] = {}, limits: Limits = USUAL
    ) -> Ran:
        if (ran := unrunnable(argv, files, limits)) is not None:
            return ran
        async with self.turn:
            if files:
                put = await self._call(["cp", "-R", "--remove-destination", f"{FILES}/.", WORK], "", files, limits)
                if put.status != "ok":
                    return put
            return await self._call(argv, stdin, {}, limits)

    async def _call(self, argv: Sequence[str], stdin: str, files: Mapping[str, str], limits: Limits) -> Ran:
        inner = processes.descendants(self.keeper.pid)[1:]
        if self.keeper.returncode is not None or not inner:
            raise SandboxError("bubblewrap: the session is over")
        within = ["/usr/bin/nsenter", "-t", str(inner[-1]), "-U", "-m", "--preserve-credentials", "--"]
        places = ["--bind", KEPT[WORK], WORK, "--bind", KEPT["/tmp"], "/tmp"]
        return await self.sandbox.call(argv, places, FILES, stdin, files, limits, user=self.user, within=within)

    async def close(self) -> None:
        processes.kill(self.keeper)
        await processes.exited(self.keeper)
        processes.release(self.keeper)
