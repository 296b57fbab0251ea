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

from slipstream import processes
from slipstream.errors import ConfigError, SandboxError
from slipstream.processes import descendants
from slipstream.sandbox import cgroups
from slipstream.sandbox.base import COPY_COMMAND, DEFAULT_LIMITS, Limits, Program, Ran, Sandbox, Session, Status, encode
from slipstream.sandbox.limits import (
    check_installed,
    environment,
    finish,
    memory,
    sealed_file,
    sockets,
    stdin_file,
    with_limits,
)
from slipstream.sandbox.seccomp import program as seccomp_program

NOBODY_ID = "65534"
"""User id and group id that a program sees inside the sandbox."""
FIRST_USER, USERS_PER_PROCESS = 1_879_048_192, 64
"""First of 2^28 user ids that systemd leaves unused, and how many of these ids each Slipstream process uses."""
WORK = "/work"
SESSION_DIRECTORIES = {WORK: "/tmp/work", "/tmp": "/tmp/tmp"}
"""Directories whose files a session's calls share, mapped to their paths in the session's keeper process."""
FILES_MOUNT = "/files"
"""Mount point of new files of a session, from which the program `COPY_COMMAND` copies them."""
SESSION_TIMEOUT = 10.0
"""Timeout in seconds for opening a session."""
FIRST_PROCESS = ("/bin/sh", "-c", '"$@"; exit $?', "sh")
"""Shell that is process 1 of the sandbox. Bubblewrap's own process 1 has no seccomp filter and could be attacked."""
CALL_NUMBERS = itertools.count()


class Bubblewrap(Sandbox):
    def __init__(self, setting: str = "environment.sandbox") -> None:
        found = shutil.which("bwrap", path=processes.PATH)
        if found is None:
            raise ConfigError(
                f'{setting} = "bubblewrap": there is no bwrap here: apt install bubblewrap, or {setting} = "none" to '
                "run code without isolation"
            )
        check_installed(("prlimit", "nsenter", "env"), "apt install util-linux coreutils")
        self.bwrap, self.filter = found, seccomp_program(platform.machine())
        self.path, self.system = system()
        self.cgroups = cgroups.writable()
        """Directory in which each call gets a cgroup. None: cgroups cannot be used, so memory is measured instead."""

    async def execute(self, program: Program) -> Ran:
        size = str(program.limits.disk)
        mounts = ["--perms", "0755", "--size", size, "--tmpfs", WORK]
        mounts += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
        return await self.call(program, mounts, WORK, user=another_user())

    async def session(self, limits: Limits = DEFAULT_LIMITS) -> KeeperSession:
        return await KeeperSession.open(self, limits)

    async def call(
        self, program: Program, mounts: Sequence[str], files_at: str, *, user: int | None, prefix: Sequence[str] = ()
    ) -> Ran:
        """Run a program, whose files are at `files_at`. `prefix` is a command that enters a session's namespaces."""
        since, limits = asyncio.get_running_loop().time(), program.limits
        with ExitStack() as stack:
            files: list[str] = []
            for name, content in program.files.items():
                descriptor = stack.enter_context(sealed_file(encode(content)))
                files += ["--perms", "0644", "--file", str(descriptor), f"{files_at}/{name}"]
            rules = stack.enter_context(sealed_file(self.filter))
            status, status_end = stack.enter_context(_pipe())
            descriptors = [*(int(each) for each in files[3::5]), rules, status_end]
            words = [*FIRST_PROCESS, "/usr/bin/env", "-C", WORK, *program.argv]
            cgroup, gate = None, list[str]()
            if self.cgroups is not None:
                cgroup = stack.enter_context(cgroups.group(self.cgroups, limits))
                blocked, release = stack.enter_context(_pipe())
                os.set_blocking(blocked, True)
                gate, descriptors = ["--block-fd", str(blocked)], [*descriptors, blocked]
            process = await processes.start_program(
                [
                    *prefix, self.bwrap, *gate, *ISOLATION, *self.system, *mounts, *files,
                    *("--remount-ro", "/", "--chdir", "/"),
                    *("--seccomp", str(rules), "--json-status-fd", str(status_end)), "--clearenv",
                    *(word for entry in environment(self.path, WORK).items() for word in ("--setenv", *entry)),
                    *("--", *with_limits(words, limits, processes=True, space=cgroup is None)),
                ],
                stdin=stack.enter_context(stdin_file(program.stdin)), user=user, descriptors=descriptors,
            )  # fmt: skip
            if cgroup is not None:
                try:
                    cgroups.enter(cgroup, process.pid)
                    os.write(release, b"\n")
                except OSError as error:
                    await processes.end_program(process)
                    raise SandboxError(f"sandbox: no process can be put into {cgroup}: {error}") from None
            ran = await finish(process, limits, since, lambda pid: exceeded_limit(pid, limits), outside=True)
            if cgroup is not None and cgroups.out_of_memory(cgroup):
                return replace(ran, status="memory", code=None)
            if ran.code is not None and not _ended_by_itself(status):
                raise SandboxError(f"bubblewrap: {' '.join(ran.err.split())[:300] or f'ended with {ran.code}'}")
            return ran


ISOLATION = [
    *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--uid", NOBODY_ID, "--gid", NOBODY_ID, "--hostname", "sandbox", "--cap-drop", "ALL", "--disable-userns"),
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
    return FIRST_USER + (os.getpid() % (1 << 22)) * USERS_PER_PROCESS + next(CALL_NUMBERS) % USERS_PER_PROCESS


def exceeded_limit(pid: int, limits: Limits) -> Status | None:
    """Measure a sandbox's processes from outside; return the limit that they exceed, or None if there is none."""
    inside = descendants(pid)
    if (taken := memory(inside, limits.memory)) > limits.memory:
        return "memory"
    if len(inside) < 2:  # the first process sets up the sandbox; before the second starts, the whole machine is visible
        return None
    if taken + sockets(inside[1]) > limits.memory:
        return "memory"
    for directory in (WORK, "/tmp", "/dev/shm"):
        with suppress(OSError):
            used = os.statvfs(f"/proc/{inside[1]}/root{directory}")
            if used.f_files - used.f_ffree > limits.files:
                return "disk"
    return None


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


class KeeperSession(Session):
    """Session whose calls share a working directory and a /tmp, both in memory and with one common size limit.

    Both directories are mounted in the namespaces of a keeper process, which only sleeps. The directories are lost when
    the keeper ends, which is when its parent ends at the latest. Each call runs in a new sandbox in these namespaces.
    """

    def __init__(self, sandbox: Bubblewrap, keeper: asyncio.subprocess.Process, user: int | None) -> None:
        super().__init__()
        self.sandbox, self.keeper, self.user = sandbox, keeper, user
        self.links: Mapping[str, str] = {}
        """Paths that lead to other ones, relative to the working directory."""

    @classmethod
    async def open(cls, sandbox: Bubblewrap, limits: Limits) -> KeeperSession:
        user, size = another_user(), str(limits.disk)
        keeper = await processes.start_program(
            [
                *(sandbox.bwrap, "--unshare-user", "--uid", NOBODY_ID, "--gid", NOBODY_ID, "--die-with-parent"),
                *("--dev-bind", "/", "/", "--perms", "0755", "--size", size, "--tmpfs", "/tmp"),
                *("--perms", "0755", "--dir", SESSION_DIRECTORIES[WORK]),
                *("--perms", "1777", "--dir", SESSION_DIRECTORIES["/tmp"]),
                *("/bin/sh", "-c", "echo; exec sleep infinity"),
            ],
            user=user,
        )
        session = cls(sandbox, keeper, user)
        assert keeper.stdout is not None and keeper.stderr is not None
        try:
            async with asyncio.timeout(SESSION_TIMEOUT):
                if not await keeper.stdout.readline():
                    reason = (await keeper.stderr.read(1000)).decode(errors="replace")
                    raise SandboxError(f"bubblewrap: no session: {' '.join(reason.split())}")
            return session
        except BaseException as error:
            await session.close()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"bubblewrap: no session within {SESSION_TIMEOUT:g} s") from None
            raise

    async def copy(self, files: Mapping[str, str], limits: Limits) -> Ran:
        return await self.call(Program([*COPY_COMMAND, f"{FILES_MOUNT}/.", WORK], files=files, limits=limits))

    async def call(self, program: Program) -> Ran:
        inside = descendants(self.keeper.pid)
        if self.keeper.returncode is not None or not inside:
            raise SandboxError("bubblewrap: the session is over")
        prefix = ["/usr/bin/nsenter", "-t", str(inside[-1]), "-U", "-m", "--preserve-credentials", "--"]
        mounts = ["--bind", SESSION_DIRECTORIES[WORK], WORK, "--bind", SESSION_DIRECTORIES["/tmp"], "/tmp"]
        mounts += [word for link, path in self.links.items() for word in ("--symlink", str(Path(WORK, path)), link)]
        return await self.sandbox.call(program, mounts, FILES_MOUNT, user=self.user, prefix=prefix)

    async def close(self) -> None:
        await processes.end_program(self.keeper)
