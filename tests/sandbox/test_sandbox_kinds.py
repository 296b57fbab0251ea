"""Three ways to run code, of one interface: the same programs come out alike. And the tool that is made of it."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.environments.builtin import MAX_OUTPUT, Python, observation
from slipstream.environments.forms import kind_of
from slipstream.errors import ConfigError, SandboxError
from slipstream.sandbox import none, remote, sandbox_of
from slipstream.sandbox.base import Limits, MiB, Program, Ran, Sandbox, run_python
from support.sandbox_server import FakeSandboxFusion, told
from support.sandboxes import NO_BUBBLEWRAP

WALLED = pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
KINDS = [pytest.param("bubblewrap", marks=WALLED), "none", "remote"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSandboxFusion]:
    monkeypatch.setattr(remote, "SANDBOX_RETRY_PAUSES", (0.001, 0.001, 0.001))
    with FakeSandboxFusion(sandbox_of("none")) as server:
        yield server


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, fake: FakeSandboxFusion) -> str:
    return fake.url if request.param == "remote" else str(request.param)


def with_one(spec: str, use: Callable[[Sandbox], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        sandbox = sandbox_of(spec)
        try:
            return await use(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(go())


def python(spec: str, code: str, **options: object) -> Ran:
    ran = with_one(spec, lambda sandbox: run_python(sandbox, code, **options))  # type: ignore[arg-type]
    assert isinstance(ran, Ran)
    return ran


# --- alike ------------------------------------------------------------------------------------------------------------


def test_a_program_gets_its_input_and_files_and_is_heard(kind: str) -> None:
    code = "import sys; print(sys.stdin.read() + open('a/b').read()); print('bad', file=sys.stderr); sys.exit(3)"
    ran = python(kind, code, stdin="grüße ", files={"a/b": "file \ud800"})
    assert (ran.status, ran.code, ran.out, ran.err) == ("failed", 3, "grüße file ?\n", "bad\n")
    ran = with_one(kind, lambda sandbox: sandbox.run(["sh", "-c", 'echo "$1" $#', "sh", "it's; $HOME"]))
    assert (ran.status, ran.code, ran.out) == ("ok", 0, "it's; $HOME 1\n")


def test_time_and_output_have_bounds_everywhere(kind: str) -> None:
    ran = python(kind, "import time; time.sleep(60)", limits=Limits(seconds=0.4))
    assert (ran.status, ran.code) == ("timeout", None) and 0.4 <= ran.seconds < 8
    ran = python(kind, "print('x' * 5000)", limits=Limits(output=4000))
    assert ran.status == "output" and ran.out == "x" * 4000


def test_memory_of_a_process_has_a_bound_everywhere(kind: str) -> None:
    ran = python(kind, "x = bytearray(300 << 20)", limits=Limits(memory=100 * MiB))
    assert ran.status == "failed" and ran.err.endswith("MemoryError\n")


def test_what_no_system_would_start_is_refused_before(kind: str) -> None:
    with pytest.raises(ValueError, match="argv is empty"):
        with_one(kind, lambda sandbox: sandbox.run([]))
    with pytest.raises(ValueError, match=re.escape("files: '../x' is not a path below the working directory")):
        with_one(kind, lambda sandbox: sandbox.run(["true"], files={"../x": ""}))
    assert with_one(kind, lambda sandbox: sandbox.run(["echo", "a\0"])).code == 126


def test_nothing_of_our_environment_is_given(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "hunter2")
    ran = python(kind, "import json, os; print(json.dumps(sorted(os.environ)))")
    known = {"PATH", "HOME", "LANG", "LC_CTYPE", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PWD"}
    assert set(json.loads(ran.out)) <= known


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_session_keeps_its_files(kind: str) -> None:
    async def go() -> None:
        session = await sandbox_of(kind).session()
        assert (await session.run(["sh", "-c", "echo 1 > a; ln -s /etc/hostname link"])).status == "ok"
        assert (await session.run(["cat", "a", "link", "c/d"], files={"link": "2\n", "c/d": "3\n"})).out == "1\n2\n3\n"
        await session.close()
        await session.close()
        with pytest.raises(SandboxError, match="the session is over"):
            await session.run(["true"])

    asyncio.run(go())


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_session_keeps_the_limits_of_each_call_and_its_own_of_the_disk(kind: str) -> None:
    async def go() -> None:
        session = await sandbox_of(kind).session(Limits(disk=MiB))
        slow = await session.run(["sleep", "60"], limits=Limits(seconds=0.3))
        assert (slow.status, slow.code) == ("timeout", None) and slow.seconds < 8
        assert (await session.run(["seq", "9999"], limits=Limits(output=1000))).status == "output"
        assert (await session.run(["sh", "-c", "head -c 700000 /dev/zero > a"])).status == "ok"
        assert (await session.run(["sh", "-c", "head -c 700000 /dev/zero > b"])).status in ("disk", "failed")
        await session.close()

    asyncio.run(go())


def test_without_isolation_files_have_bounds_of_size_and_number() -> None:
    for code in ("for i in 1 2 3; do head -c 500000 /dev/zero > $i; done; sleep 60", "touch $(seq 2000)"):
        ran = with_one("none", lambda sandbox: sandbox.run(["sh", "-c", code], limits=Limits(disk=MiB)))  # noqa: B023
        assert (ran.status, ran.code) == ("disk", None) and ran.seconds < 8


@pytest.mark.parametrize("spec", ["docker", "", "bwrap", "ftp://x", "http://", "http:///run_code"])
def test_what_is_no_sandbox_is_told(spec: str) -> None:
    with pytest.raises(ConfigError, match='write "bubblewrap", "none" or the URL of a server'):
        sandbox_of(spec)


def test_a_url_holds_no_secret() -> None:
    for spec in ("http://user:hunter2@host", "http://host/?key=hunter2", "http://host/#hunter2"):
        with pytest.raises(ConfigError, match="a URL of scheme, host, port and path only") as told:
            sandbox_of(spec)
        assert "hunter2" not in str(told.value)


# --- none -------------------------------------------------------------------------------------------------------------


def running(mark: str) -> list[int]:
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"sleep\0{mark}\0".encode() in each.read_bytes():
                found.append(int(each.parts[2]))
        except OSError:
            pass
    return found


def eventually(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + 30
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    return true()


@pytest.mark.parametrize("how", ["ends", "waits"])
def test_without_isolation_what_a_program_starts_ends_with_it(how: str) -> None:
    mark = f"41.{os.getpid()}{len(how)}"
    code = f"sleep {mark} & sleep {mark} & " + ("sleep 60" if how == "waits" else "true")
    ran = with_one("none", lambda sandbox: sandbox.run(["sh", "-c", code], limits=Limits(seconds=0.5)))
    assert ran.status == ("timeout" if how == "waits" else "ok")
    assert eventually(lambda: not running(mark))


def test_without_isolation_a_program_is_killed_with_the_process_that_started_it() -> None:
    mark = f"43.{os.getpid()}"
    code = f"""
import asyncio
from slipstream.sandbox.none import Unconfined
asyncio.run(Unconfined().run(["sleep", "{mark}"]))
"""
    ours = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        assert eventually(lambda: len(running(mark)) == 1)
    finally:
        ours.kill()
        ours.wait()
    assert eventually(lambda: not running(mark))


@pytest.mark.parametrize("place", ["call", "session"])
@pytest.mark.parametrize(
    "leaves",
    [
        "(sleep {mark}) & sleep 0.2",
        "setsid sleep {mark} & sleep 0.2",
        "setsid sh -c 'nohup sleep {mark} & sleep 60' & sleep 0.5",
        "setsid sh -c 'trap : HUP TERM; (setsid sleep {mark}) & exit' & sleep 0.5; exit 3",
    ],
)
def test_without_isolation_what_leaves_its_session_ends_with_the_call(place: str, leaves: str) -> None:
    mark = f"42.{os.getpid()}{len(leaves)}{len(place)}"

    async def go() -> Ran:
        sandbox = none.Unconfined()
        where = sandbox if place == "call" else await sandbox.session()
        other = asyncio.create_task(sandbox.run(["sleep", "600"], limits=Limits(seconds=600)))
        ran = await where.run(["sh", "-c", leaves.format(mark=mark)])
        assert not other.done()  # only a program's own processes are ended
        other.cancel()
        await asyncio.wait([other])
        if isinstance(where, none.UnconfinedSession):
            await where.close()
        return ran

    ran = asyncio.run(go())
    assert ran.code == (3 if "exit 3" in leaves else 0) and not running(mark)


def test_without_isolation_page_tables_count_as_memory() -> None:
    code = """
import mmap, os, time
for _ in range(8):
    if os.fork() == 0:
        break
pages = mmap.mmap(-1, 15 << 30, mmap.MAP_PRIVATE, mmap.PROT_READ)
for at in range(0, len(pages), 2 << 20):
    pages[at]
time.sleep(60)
"""
    ran = python("none", code, limits=Limits(memory=100 * MiB, seconds=60))
    assert (ran.status, ran.code) == ("memory", None)


def test_without_isolation_memory_of_all_together_is_bounded_and_nothing_is_left_on_disk() -> None:
    code = "import os, time\nprint(os.getcwd(), flush=True)\nfor _ in range(3): os.fork()\n"
    ran = python("none", code + "x = bytearray(b'1') * (40 << 20)\ntime.sleep(20)", limits=Limits(memory=100 * MiB))
    assert (ran.status, ran.code) == ("memory", None)
    assert not Path(ran.out.split()[0]).exists()


def test_a_session_without_isolation_leaves_no_directory_once_it_is_closed() -> None:
    async def go() -> Path:
        session = await none.Unconfined().session()
        where = Path((await session.run(["pwd"])).out.strip())
        assert where.is_dir()
        await session.close()
        return where

    assert not asyncio.run(go()).exists()


# --- by URL -----------------------------------------------------------------------------------------------------------


def test_what_is_asked_of_a_server_is_what_its_api_has() -> None:
    body = remote.request_body(Program(["ls", "-l", "a b"], "in", {"x": "1"}, Limits(seconds=2.5, memory=64 * MiB)))
    assert body == {
        "language": "bash", "code": "ls -l 'a b'", "stdin": "in", "files": {"x": "MQ=="}, "fetch_files": [],
        "compile_timeout": 2.5, "run_timeout": 2.5, "memory_limit_MB": 64,
    }  # fmt: skip


def test_python_is_asked_for_by_its_name(fake: FakeSandboxFusion) -> None:
    assert python(fake.url, "print(open('a').read())", files={"a": "b"}).out == "b\n"
    assert (fake.requests[0]["language"], fake.requests[0]["code"]) == ("python", "print(open('a').read())")
    assert fake.requests[0]["files"] == {"a": "Yg=="}


def test_what_passes_is_tried_again(fake: FakeSandboxFusion) -> None:
    for fault in ("broken", "busy", "cut", "slow"):
        fake.tell(fault)
        assert python(fake.url, "print(1)").out == "1\n"
    assert len(fake.requests) == 7


@pytest.mark.parametrize(
    ("faults", "says", "asked"),
    [
        (["broken"] * 4, "answers 500: Internal Server Error", 4),
        (["busy"] * 4, "answers 429: Too Many Requests", 4),
        (["cut"] * 4, "cannot be reached: RemoteProtocolError", 4),
        (["refused"], 'answers 422: {"detail": "language"}', 1),
        (["not json"], "gives no SandboxFusion answer: <html>", 1),
        (["other"], "gives no SandboxFusion answer: ", 1),
        (["sandbox"], "ran nothing: SandboxError: no room", 1),
    ],
)
def test_a_server_that_fails_is_no_fault_of_the_program(
    fake: FakeSandboxFusion, faults: list[str], says: str, asked: int
) -> None:
    fake.tell(*faults)  # type: ignore[arg-type]
    with pytest.raises(SandboxError, match=re.escape(f"sandbox at {fake.url} {says}")):
        python(fake.url, "print(1)")
    assert len(fake.requests) == asked


def test_a_server_that_is_not_there_or_slow_is_told(fake: FakeSandboxFusion, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeSandboxFusion() as gone:
        pass
    with pytest.raises(SandboxError, match=f"sandbox at {gone.url} cannot be reached: ConnectError"):
        python(gone.url, "print(1)")
    monkeypatch.setattr(remote, "MAX_QUEUE_TIME", 0.1)
    fake.seconds = 5.0
    fake.tell("slow")
    with pytest.raises(SandboxError, match="gives no whole answer in 0.2 s"):
        python(fake.url, "print(1)", limits=Limits(seconds=0.1))


def test_of_an_answer_without_an_end_only_so_much_is_read(fake: FakeSandboxFusion) -> None:
    fake.tell("endless")
    assert python(fake.url, "print(1)").status == "output"


def test_a_server_of_no_sandbox_runs_nothing() -> None:
    with FakeSandboxFusion() as fake, pytest.raises(SandboxError, match="SandboxError: this server runs no code"):
        python(fake.url, "print(1)")


def test_a_server_keeps_no_session(fake: FakeSandboxFusion) -> None:
    with pytest.raises(ConfigError, match="a server has no sessions"):
        with_one(fake.url, lambda sandbox: sandbox.session())


def test_how_a_program_ended_survives_the_way_there_and_back() -> None:
    there = remote.Remote("http://host")
    for ran in (Ran("ok", 0, "a", "b", 1.0), Ran("failed", 3, "", "c", 1.0), Ran("timeout", None, "d", "", 1.0)):
        assert there._ran(json.dumps(told(ran)).encode(), Limits(), 2.0) == ran
    uncompiled = {"status": "Failed", "run_result": None, "compile_result": {
        "status": "Finished", "return_code": 1, "stdout": "", "stderr": "no", "execution_time": None}}  # fmt: skip
    assert there._ran(json.dumps(uncompiled).encode(), Limits(), 2.0) == Ran("failed", 1, "", "no", 2.0)


# --- the tool ---------------------------------------------------------------------------------------------------------


def test_the_student_sees_how_a_program_ended_and_both_its_outputs() -> None:
    async def go() -> tuple[list[str], dict[str, float]]:
        environment = Python()
        environment.limits = Limits(seconds=3.0)
        environment.start(sandbox_of("none"))
        codes = ("print(6 * 7)", "x = 1", "1 / 0", "import time; time.sleep(60)", "x = 3", "print(x)")
        return [await environment.python(code) for code in codes], environment.metrics

    seen, metrics = asyncio.run(go())
    assert seen[:2] == ["status: ok\nstdout:\n42", "status: ok"]
    assert seen[2].startswith("status: failed with exit code 1\nstderr:\nTraceback (most recent call last):")
    assert seen[2].endswith("ZeroDivisionError: division by zero")
    assert seen[3] == "status: ended after 3 s"
    assert seen[5].endswith("NameError: name 'x' is not defined")
    assert metrics == {"python/ok": 3.0, "python/failed": 2.0, "python/timeout": 1.0}


def test_the_student_is_told_of_one_tool() -> None:
    schemas = kind_of("slipstream.environments.builtin:Python").schemas
    assert [each["function"]["name"] for each in schemas] == ["python"]
    assert schemas[0]["function"]["parameters"]["required"] == ["code"]


def test_an_observation_is_bounded_and_both_its_ends_are_seen() -> None:
    ran = Ran("output", None, "a" * 50_000 + "z", "", 1.0)
    seen = observation(ran, Limits())
    assert seen.startswith("status: ended: more than 65536 bytes of output\nstdout:\naaa") and seen.endswith("az")
    assert f"[{50_001 - MAX_OUTPUT} characters left out]" in seen and len(seen) < MAX_OUTPUT + 150
    assert observation(Ran("memory", None, "", "", 1.0), Limits()) == "status: ended: more than 512 MiB of memory"
    assert observation(Ran("disk", None, "", "", 1.0), Limits()).startswith("status: ended: more than 64 MiB of files")


def test_the_same_program_is_seen_the_same_every_time() -> None:
    async def go() -> set[str]:
        environment = Python()
        environment.start(sandbox_of("none"))
        code = "print({'a', 'b', 'c'}, hash('x'), __file__.endswith('main.py'))\nprint(open('nothing'))"
        return {await environment.python(code) for _ in range(3)}

    assert len({re.sub(r"/tmp/[^/]+", "", seen) for seen in asyncio.run(go())}) == 1
