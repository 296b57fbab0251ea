"""Programs of a model in a sandbox: they can do their work, within limits, and cannot get out."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from slipstream.config.file import parse
from slipstream.errors import ConfigError, SandboxError
from slipstream.plan.notes import sandbox_notes
from slipstream.sandbox import bubblewrap, cgroups, sandbox_of, seccomp
from slipstream.sandbox.base import DEFAULT_LIMITS, PYTHON_COMMAND, Limits, MiB, Ran, Sandbox, Session, run_python
from support.sandboxes import NO_BUBBLEWRAP

pytestmark = pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
PLACES = ("call", "session")
SECRET = "hunter2-of-the-trainer"


def inside(
    place: str, use: Callable[[Sandbox | Session], Awaitable[object]], limits: Limits = DEFAULT_LIMITS
) -> object:
    async def go() -> object:
        sandbox = sandbox_of("bubblewrap")
        if place == "call":
            return await use(sandbox)
        session = await sandbox.session(limits)
        try:
            return await use(session)
        finally:
            await session.close()

    return asyncio.run(go())


def python(code: str, place: str = "call", **options: object) -> Ran:
    ran = inside(place, lambda where: run_python(where, code, **options))  # type: ignore[arg-type]
    assert isinstance(ran, Ran)
    return ran


def alive(mark: str) -> list[int]:
    """Processes of this machine with this in their command line."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in each.read_bytes():
                found.append(int(each.parts[2]))
        except OSError:
            pass
    return [pid for pid in found if pid != os.getpid()]


def gone(mark: str, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while alive(mark) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(mark)


# --- ways out ---------------------------------------------------------------------------------------------------------

ATTACKS = {
    "reaching a server on this machine": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "reaching an address outside": "socket.create_connection(('192.0.2.1', 53), 2)",
    "asking for a name": "socket.getaddrinfo('example.com', 80)",
    "reaching an abstract socket": "socket.socket(socket.AF_UNIX).connect(ABSTRACT)",
    "a socket to the host of a virtual machine": "socket.socket(40, socket.SOCK_STREAM)",
    "a socket to the kernel": "socket.socket(16, socket.SOCK_RAW)",
    "a pair of sockets of a strange family": "syscall(libc_number('socketpair'), 30, 1, 0, buffer)",
    "raw packets": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "reading passwords": "open('/etc/shadow').read()",
    "reading users": "open('/etc/passwd').read()",
    "looking into root's home": "os.listdir('/root')",
    "looking into homes": "os.listdir('/home')",
    "reading this file": "open(REPOSITORY).read()",
    "reading it through the root of another process": "open(f'/proc/{HOST}/root{REPOSITORY}').read()",
    "reading it through the root of the first process": "open(f'/proc/1/root{REPOSITORY}').read()",
    "reading it through its working directory": "open(f'/proc/1/cwd/../../../..{REPOSITORY}').read()",
    "looking into the old root": "os.listdir('/oldroot')",
    "writing to /usr": "open('/usr/slipstream', 'w')",
    "changing a program": "open('/usr/bin/env', 'r+b')",
    "writing beside /usr": "open('/slipstream', 'w')",
    "writing among devices": "open('/dev/slipstream', 'w')",
    "writing to /etc": "open('/etc/ld.so.preload', 'w')",
    "changing what happens to a core": "open('/proc/sys/kernel/core_pattern', 'r+')",
    "changing a setting of the kernel": "open('/proc/sys/vm/swappiness', 'r+')",
    "changing the name of the machine": "open('/proc/sys/kernel/hostname', 'r+')",
    "pressing magic keys": "open('/proc/sysrq-trigger', 'w')",
    "reading the kernel's memory": "open('/proc/kcore', 'rb').read(1)",
    "reading the kernel's messages": "syscall(libc_number('syslog'), 3, buffer, 100)",
    "opening the disk": "open('/dev/vda', 'rb')",
    "making the disk": "os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0))",
    "mounting": "call('mount', b'proc', b'/tmp', b'proc', 0, None)",
    "mounting /usr for writing": "call('mount', b'/usr', b'/usr', None, 32 | 4096, None)",
    "unmounting": "call('umount2', b'/usr', 2)",
    "a user namespace": "call('unshare', 0x10000000)",
    "a user namespace by clone": "cloned(0x10000000)",
    "a user namespace by clone3": "syscall(435, ctypes.c_char_p(struct.pack('11Q', 0x10000000, *[0] * 10)), 88)",
    "a mount namespace": "call('unshare', 0x20000)",
    "another process's namespace": "call('setns', os.open('/proc/1/ns/mnt', os.O_RDONLY), 0)",
    "another root": "os.chroot('/tmp')",
    "being root": "os.setuid(0)",
    "being in a group": "os.setgroups([0])",
    "seeing this process": "os.kill(HOST, 0)",
    "seeing its directory in /proc": "os.stat(f'/proc/{HOST}/cwd' if HOST > 100 else '/proc/none')",
    "tracing the first process": "call('ptrace', 16, 1, None, None)",
    "reading another process's memory": "syscall(libc_number('process_vm_readv'), 1, buffer, 1, buffer, 1, 0)",
    "outliving us": "call('prctl', 1, 0)",
    "memory that is nobody's": "os.memfd_create('x')",
    "shared memory of System V": "call('shmget', 0, 1 << 30, 0o1600)",
    "a key in the kernel": "syscall(libc_number('add_key'), b'user', b'x', b'y', 1, -1)",
    "a program in the kernel": "syscall(libc_number('bpf'), 0, buffer, 64)",
    "a ring in the kernel": "syscall(425, 8, buffer)",
    "more processes": "resource.setrlimit(resource.RLIMIT_NPROC, (1 << 20, 1 << 20))",
    "more memory": "resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40))",
    "larger files": "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40))",
    "a better priority": "os.setpriority(os.PRIO_PROCESS, 0, -20)",
    "real time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))",
    "a terminal": "os.open('/dev/tty', os.O_RDWR)",
    "less of a badness when memory is short": "os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000')",
}
TRIAL = """
import ctypes, errno, json, os, platform, resource, socket, stat, struct, sys
PORT, HOST, REPOSITORY, ABSTRACT, NUMBERS, attacks = json.load(sys.stdin)
libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(4096)
libc_number = NUMBERS.__getitem__
def checked(found):
    if found == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def call(name, *arguments):
    checked(getattr(libc, name)(*arguments))
def syscall(number, *arguments):
    checked(libc.syscall(number, *arguments))
def cloned(flags):
    found = libc.syscall({'x86_64': 56, 'aarch64': 220}[platform.machine()], flags | 17, 0, 0, 0, 0)
    if found == 0:
        os._exit(0)
    checked(found)
outcomes = {}
for name, attack in attacks.items():
    try:
        outcomes[name] = f"OUT: {eval(attack)!r}"
    except Exception as error:
        outcomes[name] = errno.errorcode.get(getattr(error, "errno", None), type(error).__name__)
print(json.dumps(outcomes))
"""


HELD = {
    *("EACCES", "EPERM", "EROFS", "ENOENT", "ESRCH", "ENXIO", "EINVAL", "ENOSPC", "ENOSYS"),
    *("EAFNOSUPPORT", "ECONNREFUSED", "ENETUNREACH", "gaierror", "ValueError"),
}


@cache
def outcomes(place: str) -> dict[str, str]:
    """Results of all attacks, made by one program."""
    abstract = f"\0slipstream-{os.getpid()}-{place}"
    machine = seccomp.MACHINES.index(os.uname().machine)
    numbers = {name: of_machines[machine] for name, of_machines in seccomp.REFUSED_CALLS.items()}
    numbers["socketpair"] = seccomp.SOCKETS[machine][1]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        given = [server.getsockname()[1], os.getpid(), __file__, abstract, numbers, ATTACKS]
        ran = python(TRIAL, place, stdin=json.dumps(given), limits=Limits(seconds=30))
    assert ran.status == "ok", ran
    return json.loads(ran.out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("place", PLACES)
def test_there_is_no_way_out_by(place: str, name: str) -> None:
    assert outcomes(place)[name] in HELD


@pytest.mark.parametrize("place", PLACES)
def test_a_program_is_nobody_with_no_capability(place: str) -> None:
    code = "print(open('/proc/self/status').read()); import os; print(os.getuid(), os.getgid(), os.getgroups())"
    said = python(code, place).out
    for capabilities in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert f"{capabilities}:\t0000000000000000\n" in said
    assert "NoNewPrivs:\t1\n" in said and "Seccomp:\t2\n" in said
    assert said.splitlines()[-1] in ("65534 65534 []", "65534 65534 [65534]")


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_under_root_every_call_has_a_user_of_its_own_who_is_not_root() -> None:
    users = {bubblewrap.another_user() for _ in range(bubblewrap.USERS_PER_PROCESS)}
    assert len(users) == 64 and all(user is not None and user >= 1_879_048_192 for user in users)
    seen = python("print(open('/proc/self/uid_map').read())").out.split()
    assert seen[0] == "65534" and seen[2] == "1"
    mark = f"31.{os.getpid()}1"

    async def go() -> int:
        running = asyncio.create_task(sandbox_of("bubblewrap").run(["sleep", mark]))
        while len(found := alive(mark)) < 3:
            await asyncio.sleep(0.01)
        owners = {Path(f"/proc/{pid}").stat().st_uid for pid in found}
        running.cancel()
        await asyncio.wait([running])
        assert len(owners) == 1
        return owners.pop()

    assert asyncio.run(go()) >= 1_879_048_192


@pytest.mark.parametrize("place", PLACES)
def test_nothing_of_our_environment_is_seen(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", SECRET)
    code = """
import glob, json, os
print(json.dumps(dict(os.environ)))
for file in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):
    try:
        print(open(file, 'rb').read())
    except OSError:
        pass
"""
    said = python(code, place).out
    assert SECRET not in said and "API_KEY" not in said
    assert set(json.loads(said.splitlines()[0])) - {"PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PWD", "LC_CTYPE"} == {
        "PATH",
        "HOME",
        "LANG",
    }


@pytest.mark.parametrize("place", PLACES)
def test_no_descriptor_of_ours_is_inherited(place: str, tmp_path: Path) -> None:
    (tmp_path / "open").write_text(SECRET)
    with (tmp_path / "open").open() as file, socket.create_server(("127.0.0.1", 0)):
        os.set_inheritable(file.fileno(), True)
        code = "import os; print([n for n in range(3, 256) if os.path.lexists(f'/proc/self/fd/{n}')])"
        assert python(code, place, files={"a": "b"}).out == "[]\n"


@pytest.mark.parametrize("place", PLACES)
def test_other_processes_are_not_there(place: str) -> None:
    said = python("import os; print(sorted(int(n) for n in os.listdir('/proc') if n.isdigit()))", place).out
    assert said == "[1, 2]\n"


def test_what_standard_input_is_cannot_be_changed() -> None:
    code = """
import os
for how in (os.O_RDWR, os.O_WRONLY):
    try:
        os.write(os.open('/proc/self/fd/0', how), b'x')
        print('written')
    except OSError as error:
        print('held')
"""
    assert python(code, stdin="abc").out == "held\nheld\n"


def test_the_filter_of_each_machine_is_whole() -> None:
    for machine, numbers in zip(seccomp.MACHINES, zip(*seccomp.REFUSED_CALLS.values(), strict=True), strict=True):
        program = seccomp.program(machine)
        assert len(program) % 8 == 0 and len(program) // 8 == 2 * len(numbers) + 31
        assert len(set(numbers)) == len(numbers)
    with pytest.raises(SandboxError, match="there is no filter for riscv64"):
        seccomp.program("riscv64")


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_time_ends_what_sleeps_and_what_spins_and_what_will_not_end(place: str) -> None:
    limits = Limits(seconds=0.5)
    for code in (
        "import time; print('begun', flush=True); time.sleep(60)",
        "print('begun', flush=True)\nwhile True: pass",
        "import signal, time\nfor n in range(1, 32):\n    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
        "print('begun', flush=True)\nwhile True: time.sleep(1)",
        "import os, time; print('begun', flush=True); os.close(0); os.close(1); os.close(2); time.sleep(60)",
    ):
        ran = python(code, place, limits=limits)
        assert (ran.status, ran.code) == ("timeout", None)
        assert ran.out in ("begun\n", "")  # a slow machine may not have begun
        assert 0.5 <= ran.seconds < 8


def test_a_fork_bomb_goes_off_in_a_small_room() -> None:
    count = """
import os, time
made = 0
try:
    while made < 100:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    pass
print(made)
"""
    assert 1 <= int(python(count, limits=Limits(processes=12)).out) <= 12
    threads = count.replace(
        "if os.fork() == 0:\n            time.sleep(60)",
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    )
    threads = threads.replace("import os", "import os, threading").replace("BlockingIOError", "RuntimeError")
    assert 1 <= int(python(threads, limits=Limits(processes=12)).out) <= 12
    mark = f"bomb{os.getpid()}"
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    ran = inside("call", lambda where: where.run(["python3", "-c", bomb, mark], limits=Limits(seconds=1, processes=12)))
    assert isinstance(ran, Ran) and ran.status == "timeout" and ran.seconds < 10
    assert not alive(mark)


def test_memory_of_one_process_is_bounded_by_itself() -> None:
    ran = python("x = bytearray(300 << 20)", limits=Limits(memory=100 * MiB))
    assert (ran.status, ran.code) == ("failed", 1) and ran.err.endswith("MemoryError\n")


@pytest.mark.parametrize(
    "code",
    [
        "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(b'1') * (40 << 20)\ntime.sleep(20)",
        "import mmap, time\nx = mmap.mmap(-1, 200 << 20)\nfor _ in range(200): x.write(bytes(1 << 20))\ntime.sleep(20)",
    ],
    ids=["many processes", "shared"],
)
def test_memory_of_all_together_is_bounded(code: str) -> None:
    ran = python(code, limits=Limits(memory=100 * MiB, seconds=15))
    assert (ran.status, ran.code) == ("memory", None)


TABLES = """
import mmap, os, time
for _ in range(8):
    if os.fork() == 0:
        break
pages = mmap.mmap(-1, 15 << 30, mmap.MAP_PRIVATE, mmap.PROT_READ)
for at in range(0, len(pages), 2 << 20):
    pages[at]
time.sleep(60)
"""
SOCKETS = """
import os, socket, time
for _ in range(8):
    if os.fork() == 0:
        break
pairs = []
for _ in range(55):
    pair = socket.socketpair()
    pair[0].setblocking(False)
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
    pairs.append(pair)
    try:
        while pair[0].send(bytes(1 << 14)):
            pass
    except BlockingIOError:
        pass
time.sleep(60)
"""
TCP = """
import socket, time
server = socket.create_server(("127.0.0.1", 0), backlog=100)
clients = []
for _ in range(50):
    clients.append((socket.create_connection(server.getsockname()), server.accept()))
    clients[-1][0].setblocking(False)
    try:
        while clients[-1][0].send(bytes(1 << 16)):
            pass
    except BlockingIOError:
        pass
time.sleep(60)
"""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("code", [TABLES, SOCKETS, TCP], ids=["tables", "sockets", "TCP"])
def test_memory_of_the_kernel_counts_as_a_programs_own(code: str, place: str) -> None:
    ran = python(code, place, limits=Limits(memory=100 * MiB, seconds=60))
    assert (ran.status, ran.code) == ("memory", None), ran


def test_addresses_are_bounded_and_with_them_page_tables() -> None:
    code = "import mmap\nmmap.mmap(-1, {}, mmap.MAP_PRIVATE, mmap.PROT_READ)"
    assert python(code.format(15 << 30)).status == "ok"
    ran = python(code.format(17 << 30))
    assert ran.status == "failed" and "Cannot allocate memory" in ran.err


def test_a_buffer_for_sending_cannot_be_enlarged() -> None:
    code = """
import socket
one = socket.socket(socket.AF_UNIX)
before = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
print(before == one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
print(one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
"""
    assert python(code).out == f"True\n{2 << 16}\n"


# --- cgroups ----------------------------------------------------------------------------------------------------------


def delegated(path: Path, controllers: str = "cpu memory pids") -> Path:
    """A directory tree as a cgroup file system has it, in which this process's own cgroup is a/b."""
    (path / "cgroups" / "a" / "b").mkdir(parents=True)
    for each, on in (("a", controllers), ("a/b", "")):
        (path / "cgroups" / each / "cgroup.subtree_control").write_text(on + "\n")
        (path / "cgroups" / each / "cgroup.procs").write_text("")
    (path / "own").write_text("4:memory:/old\n0::/a/b\n")
    return path / "cgroups" / "a"


def test_a_cgroup_is_made_where_memory_and_pids_are_switched_on(tmp_path: Path) -> None:
    parent = delegated(tmp_path)
    found = cgroups.writable(tmp_path / "cgroups", tmp_path / "own")
    assert found == parent and f"by a cgroup for each program, below {parent}" in cgroups.in_force(found)
    (parent / "b" / "cgroup.subtree_control").write_text("memory pids")
    assert cgroups.writable(tmp_path / "cgroups", tmp_path / "own") == parent / "b"


@pytest.mark.parametrize("lacks", ["memory", "pids", "version 2", "the tree"])
def test_without_a_cgroup_the_other_bounds_are_said(tmp_path: Path, lacks: str) -> None:
    delegated(tmp_path, {"memory": "pids", "pids": "memory"}.get(lacks, "memory pids"))
    if lacks == "version 2":
        (tmp_path / "own").write_text("4:memory:/a/b\n")
    found = cgroups.writable(tmp_path / ("nowhere" if lacks == "the tree" else "cgroups"), tmp_path / "own")
    assert found is None and "measured every 0.1 s" in cgroups.in_force(found)


@pytest.mark.parametrize("place", PLACES)
def test_every_process_of_a_call_is_in_its_cgroup_before_the_program_begins(tmp_path: Path, place: str) -> None:
    parent = delegated(tmp_path)

    async def go() -> Ran:
        sandbox = bubblewrap.Bubblewrap()
        sandbox.cgroups = parent
        where = await sandbox.session() if place == "session" else sandbox
        ran = await run_python(where, "import resource; print(resource.getrlimit(resource.RLIMIT_AS)[0])")
        if place == "session":
            await where.close()
        return ran

    before = set(parent.iterdir())
    ran = asyncio.run(go())
    assert (ran.status, ran.out) == ("ok", "-1\n"), ran
    made = sorted(set(parent.iterdir()) - before)
    assert made
    limits = Limits()
    for each in made:
        assert (each / "memory.max").read_text() == str(limits.memory + 2 * limits.disk + 32 * MiB)
        assert (each / "pids.max").read_text() == str(limits.processes + 8)
        assert int((each / "cgroup.procs").read_text()) > 0


def test_a_cgroup_that_cannot_be_had_is_no_fault_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = delegated(tmp_path)
    number, mark = next(cgroups.CGROUP_NUMBERS) + 2, f"37.{os.getpid()}"
    (parent / f"slipstream-{os.getpid()}-{number}").mkdir()

    async def go(where: Path) -> None:
        sandbox = bubblewrap.Bubblewrap()
        sandbox.cgroups = where
        await sandbox.run(["sleep", mark])

    with pytest.raises(SandboxError, match="no cgroup can be made: .*No such file or directory"):
        asyncio.run(go(tmp_path / "nowhere"))
    with pytest.raises(SandboxError, match="no cgroup can be made: .*File exists"):
        asyncio.run(go(parent))

    def refused(made: Path, pid: int) -> None:
        raise PermissionError(13, "Permission denied", str(made / "cgroup.procs"))

    monkeypatch.setattr(cgroups, "enter", refused)
    with pytest.raises(SandboxError, match=r"no process can be put into .*/slipstream-.*Permission denied"):
        asyncio.run(go(parent))
    assert gone(mark)


def test_what_linux_ends_for_its_memory_is_out_of_memory(tmp_path: Path) -> None:
    parent = delegated(tmp_path)
    with cgroups.group(parent, Limits()) as made:
        assert not cgroups.out_of_memory(made)
        for count, out in ((0, False), (2, True)):
            (made / "memory.events").write_text(f"low 0\nmax 7\noom 1\noom_kill {count}\n")
            assert cgroups.out_of_memory(made) is out
        for each in made.iterdir():
            each.unlink()  # as Linux does with a cgroup that is removed
    assert not made.exists()


RUNS = """
student = "builtin:tool_student"
[data]
train = "builtin:table"
[teachers.main]
model = "builtin:tool_teacher"
"""
JUDGED = 'gateway = {command = "cat", verify = "cat"}'


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('[environment]\nuse = "python"\nsandbox = "bubblewrap"', True),
        ('[environment]\nuse = "python"\nsandbox = "none"', False),
        (f'[environment]\nsandbox = "none"\n{JUDGED}', True),
        ('[environment]\nsandbox = "bubblewrap"\ngateway = {command = "cat"}', False),
        ('[task]\nreward = "./x.py:f"\nsandbox = "bubblewrap"', True),
        ("", False),
    ],
)
def test_what_is_in_force_is_said_where_programs_run_in_a_sandbox_here(lines: str, said: bool) -> None:
    notes = sandbox_notes(parse(tomllib.loads(RUNS + lines)))
    assert notes == ([cgroups.in_force(cgroups.writable())] if said else [])


REAL = cgroups.writable()


@pytest.mark.skipif(REAL is None, reason="NO CGROUP IS TESTED HERE: " + cgroups.in_force(REAL))
def test_linux_ends_what_takes_more_than_its_cgroup_has() -> None:
    ran = python(TABLES.replace("15 << 30", "200 << 30"), limits=Limits(memory=100 * MiB, disk=MiB, seconds=60))
    assert (ran.status, ran.code) == ("memory", None)
    assert REAL is not None and not list(REAL.glob(f"slipstream-{os.getpid()}-*"))


def test_memory_that_processes_share_counts_once() -> None:
    code = "import os, time\nx = bytearray(b'1') * (40 << 20)\nfor _ in range(2): os.fork()\ntime.sleep(0.5)"
    assert python(code, limits=Limits(memory=100 * MiB)).status == "ok"


@pytest.mark.parametrize("where", ["/work", "/tmp", "/dev/shm"])
def test_the_disk_is_small(where: str) -> None:
    code = f"""
import errno, os
written = 0
try:
    for n in range(200):
        with open(f'{where}/{{n}}', 'wb') as file:
            written += file.write(bytes(1 << 20))
except OSError as error:
    print(errno.errorcode[error.errno], written >> 20)
"""
    ran = python(code, limits=Limits(disk=8 * MiB))
    said, written = ran.out.split()
    assert said == "ENOSPC" and int(written) <= 16


def test_a_session_is_of_one_size_however_many_calls_fill_it() -> None:
    async def fill(where: Sandbox | Session) -> list[Ran]:
        fill = "head -c 5000000 /dev/zero > /{}/{}; ls -l /work /tmp | wc -l"
        runs = [await where.run(["sh", "-c", fill.format(*at)]) for at in (("work", 1), ("tmp", 2), ("work", 3))]
        return [
            *runs,
            await where.run(["true"], files={"new": "x" * 5_000_000}),
            await where.run(["df", "-k", "/work"]),
        ]

    runs = inside("session", fill, Limits(disk=8 * MiB))
    assert isinstance(runs, list)
    assert "No space left on device" not in runs[0].err and "No space left on device" in runs[2].err
    assert runs[3].status == "failed" and "No space left on device" in runs[3].err
    assert runs[4].out.splitlines()[1].split()[1:4] == ["8192", "8192", "0"]


def test_a_file_is_no_larger_than_the_disk_and_empty_ones_are_not_endless() -> None:
    ran = python("open('x', 'wb').truncate(100 << 20)", limits=Limits(disk=8 * MiB))
    assert ran.status == "failed" and "File too large" in ran.err
    ran = python("n = 0\nwhile True:\n    open(str(n), 'w').close()\n    n += 1", limits=Limits(disk=MiB, seconds=30))
    assert (ran.status, ran.code) == ("disk", None)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_ends_what_makes_it(stream: str) -> None:
    ran = python(f"import sys\nwhile True: sys.{stream}.write('x' * 999)", limits=Limits(output=10_000))
    assert (ran.status, ran.code) == ("output", None) and ran.seconds < 9
    assert (ran.out + ran.err).count("x") == 10_000
    ran = python(f"import sys; sys.{stream}.write('x' * 10_000)", limits=Limits(output=10_000))
    assert ran.status == "ok" and (ran.out + ran.err) == "x" * 10_000
    ran = python(f"import sys; sys.{stream}.write('x' * 10_001)", limits=Limits(output=10_000))
    assert ran.status == "output"


def test_standard_input_may_be_huge_whether_it_is_read_or_not() -> None:
    huge = "x" * (20 * MiB)
    assert python("import sys; print(len(sys.stdin.read()))", stdin=huge).out == f"{20 * MiB}\n"
    assert python("print('done')", stdin=huge).out == "done\n"


# --- what is left -----------------------------------------------------------------------------------------------------

ORPHANS = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp('sleep', ['sleep', sys.argv[1]])
    os._exit(0)
if sys.argv[2] == 'wait':
    time.sleep(60)
"""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["wait", "end"])
def test_what_a_program_leaves_behind_ends_with_it(place: str, how: str) -> None:
    mark = f"3{len(how)}{len(place)}.{os.getpid()}2"
    limits = Limits(seconds=1.0 if how == "wait" else 20.0)
    ran = inside(place, lambda where: where.run(["python3", "-c", ORPHANS, mark, how], limits=limits))
    assert isinstance(ran, Ran) and ran.status == ("timeout" if how == "wait" else "ok")
    assert not alive(mark)


def test_what_is_cancelled_is_gone() -> None:
    mark = f"34.{os.getpid()}3"

    async def go() -> None:
        running = asyncio.create_task(sandbox_of("bubblewrap").run(["sleep", mark]))
        while len(alive(mark)) < 3:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert gone(mark)
        for moment in (0.0, 0.002, 0.005, 0.01, 0.02):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sandbox_of("bubblewrap").run(["sleep", mark]), moment)
            assert gone(mark)

    asyncio.run(go())


@pytest.mark.parametrize("place", PLACES)
def test_when_our_process_is_killed_all_of_it_is_gone(place: str) -> None:
    mark = f"35.{os.getpid()}{len(place)}"
    code = f"""
import asyncio
from slipstream.sandbox import sandbox_of
async def go():
    where = sandbox_of("bubblewrap")
    if {place!r} == "session":
        where = await where.session()
    await where.run(["sh", "-c", "setsid sleep {mark} & sleep {mark}"])
asyncio.run(go())
"""
    ours = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        until = time.monotonic() + 30
        while len(alive(f"sleep\0{mark}")) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        assert len(alive(f"sleep\0{mark}")) == 2
        below = bubblewrap.processes.descendants(ours.pid)
    finally:
        ours.send_signal(signal.SIGKILL)
        ours.wait()
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
    assert gone(mark)


def test_the_first_process_inside_cannot_be_ended_from_there() -> None:
    ran = inside("call", lambda where: where.run(["sh", "-c", "kill -9 1; kill -TERM 1; sleep 0.1; echo still here"]))
    assert isinstance(ran, Ran) and ran.out == "still here\n"


def test_every_process_inside_is_behind_the_filter() -> None:
    """Any of them may write into the memory of any other, and have it do what it will."""
    code = """
import glob
for file in sorted(glob.glob('/proc/[0-9]*/status')):
    lines = [line.split() for line in open(file)]
    print(*(line[1] for line in lines if line[0] in ('Pid:', 'Seccomp:', 'NoNewPrivs:')))
"""
    for place in PLACES:
        assert python(code, place).out == "1 1 2\n2 1 2\n"


def test_what_is_killed_from_outside_is_no_result() -> None:
    mark = f"36.{os.getpid()}4"

    async def go() -> None:
        running = asyncio.create_task(sandbox_of("bubblewrap").run(["sleep", mark]))
        while len(found := alive(mark)) < 3:
            await asyncio.sleep(0.01)
        os.kill(min(found), signal.SIGKILL)
        with pytest.raises(SandboxError, match="bubblewrap: "):
            await running

    asyncio.run(go())


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_call_begins_anew_and_a_session_goes_on() -> None:
    async def twice(where: Sandbox | Session) -> list[str]:
        both = ["sh", "-c", "cat a /tmp/b 2>&1; echo 1 >> a; echo 2 >> /tmp/b"]
        return [
            (await where.run(both, files={"c/d.txt": "3"})).out,
            (await where.run([*both[:2], both[2] + "; cat c/d.txt"])).out,
        ]

    fresh = "cat: a: No such file or directory\ncat: /tmp/b: No such file or directory\n"
    assert inside("call", twice) == [fresh, fresh]
    assert inside("session", twice) == [fresh, "1\n2\n3"]


def test_two_sessions_see_nothing_of_each_other_and_nothing_of_them_is_on_the_machine() -> None:
    async def go() -> None:
        sandbox = sandbox_of("bubblewrap")
        one, other = await sandbox.session(), await sandbox.session()
        before = set(Path("/tmp").iterdir())
        await one.run(["sh", "-c", "echo x > mine; echo y > /tmp/slipstream-mine"])
        assert (await other.run(["ls", "-A", "/work", "/tmp"])).out == "/tmp:\n\n/work:\n"
        assert not {each.name for each in set(Path("/tmp").iterdir()) - before} & {"work", "mine", "slipstream-mine"}
        await one.close()
        with pytest.raises(SandboxError, match="the session is over"):
            await one.run(["true"])
        assert (await other.run(["pwd"])).out == "/work\n"
        await other.close()
        await other.close()

    asyncio.run(go())


def test_links_that_a_program_leaves_lead_us_nowhere(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("as it was")
    tmp_path.chmod(0o777)
    target.chmod(0o666)

    async def trick(where: Sandbox | Session) -> list[Ran]:
        links = f"ln -s {target} file; ln -s {tmp_path} directory; ln -s /proc/self/fd/1 out; mkfifo pipe; ln file hard"
        first = await where.run(["sh", "-c", links])
        assert first.status == "ok", first
        names = ("file", "directory/target", "out", "pipe", "hard")
        return [await where.run(["sh", "-c", f"cat {name}"], files={name: f"new {name}"}) for name in names]

    runs = inside("session", trick)
    assert isinstance(runs, list)
    assert target.read_text() == "as it was" and sorted(each.name for each in tmp_path.iterdir()) == ["target"]
    assert [(ran.status, ran.out) for ran in runs if ran.status == "ok"] == [
        ("ok", f"new {name}") for name in ("file", "out", "pipe", "hard")
    ]
    assert runs[1].status == "failed" and "directory" in runs[1].err


def test_a_working_directory_that_is_shut_is_the_programs_own_fault() -> None:
    async def shut(where: Sandbox | Session) -> list[Ran]:
        return [await where.run(["sh", "-c", "chmod 000 /work"]), await where.run(["pwd"])]

    runs = inside("session", shut)
    assert isinstance(runs, list) and [ran.status for ran in runs] == ["ok", "failed"]


# --- and what is wanted of it -----------------------------------------------------------------------------------------


def test_files_lie_in_the_working_directory_and_their_names_stay_there() -> None:
    ran = python("print(open('a/b/c.txt').read(), open('d').read())", files={"a/b/c.txt": "one", "d": "zwölf"})
    assert (ran.status, ran.out, ran.err) == ("ok", "one zwölf\n", "")
    for name in ("/etc/x", "../x", "a/../../x", "", "a\0b", "..", ".", "a/", "a//b", "./a", "x" * 256):
        with pytest.raises(ValueError, match="is not a path below the working directory, such as 'src/main.py'"):
            python("", files={name: ""})
    with pytest.raises(ValueError, match="'a/b' is below a file"):
        python("", files={"a": "", "a/b": ""})
    assert python("", files={"x": "y" * 100}, limits=Limits(disk=99)).status == "disk"


@pytest.mark.parametrize("place", PLACES)
def test_what_cannot_be_started_is_the_programs_fault_and_said_in_words(place: str) -> None:
    runs = [
        inside(place, lambda where, argv=argv: where.run(argv))
        for argv in (
            ["no-such-program"],
            ["/work"],
            ["echo", "a\0b"],
            ["echo", "x" * 200_000],
            ["sh", "-c", "kill -9 $$"],
        )
    ]
    assert [(ran.status, ran.code) for ran in runs if isinstance(ran, Ran)] == [
        ("failed", 127), ("failed", 126), ("failed", 126), ("failed", 126), ("failed", 137),
    ]  # fmt: skip
    assert isinstance(runs[0], Ran) and "no-such-program" in runs[0].err


def test_output_that_is_no_text_and_text_that_is_none_come_through() -> None:
    ran = python("import sys; sys.stdout.buffer.write(b'a\\xff\\xfeb\\0c')")
    assert (ran.status, ran.out) == ("ok", "a\ufffd\ufffdb\0c")
    ran = inside("call", lambda where: where.run(["sh", "-c", "echo \ud800; ls"], files={"\ud800": ""}))
    assert isinstance(ran, Ran) and (ran.status, ran.out) == ("ok", "?\n?\n")
    assert python("print(input())", stdin="half a pair: \ud800").out == "half a pair: ?\n"


def test_many_at_a_time() -> None:
    async def go() -> list[Ran]:
        sandbox = sandbox_of("bubblewrap")
        return await asyncio.gather(*(run_python(sandbox, f"print({n})") for n in range(12)))

    assert [ran.out for ran in asyncio.run(go())] == [f"{n}\n" for n in range(12)]


def test_it_runs_beside_other_threads() -> None:
    found: list[Ran] = []
    threads = [threading.Thread(target=lambda: found.append(python("print(1)"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ran.out for ran in found] == ["1\n"] * 3


def test_hashes_are_the_same_in_every_run() -> None:
    code = "print(hash('a'), {'x', 'y', 'z'})"
    assert python(code).out == python(code).out
    assert PYTHON_COMMAND[0] == "env"


def test_without_bwrap_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bubblewrap.processes, "PATH", str(tmp_path))
    for setting in ("environment.sandbox", "task.sandbox"):
        with pytest.raises(
            ConfigError, match=f'no bwrap here: apt install bubblewrap, or {setting} = "none" to run code'
        ):
            sandbox_of("bubblewrap", setting)


def test_without_pythons_own_in_usr_it_is_the_one_that_runs_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name, path: None)
    path, seen = bubblewrap.system()
    assert path == f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    assert seen[-3:] == ["--ro-bind", sys.base_prefix, sys.base_prefix]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process and no descriptor, whatever a test did."""
    before = len([*Path("/proc/self/fd").iterdir()])
    yield
    assert not [pid for pid in bubblewrap.processes.descendants(os.getpid()) if b"bwrap" in read(pid)]
    assert len([*Path("/proc/self/fd").iterdir()]) <= before


def read(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
