"""Verdicts that a model cannot forge: attacks on what `environment.gateway.verify` runs, each of which is worth 0."""

import asyncio
import os
import socket
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from slipstream.config.environment import GatewayConfig
from slipstream.environments.gateway import judging
from slipstream.environments.gateway.agent_processes import Agent, Programs
from slipstream.errors import ConfigError, EnvironmentFailed
from slipstream.plan.environment import agent_of, check_agent
from slipstream.rewards.functions import LARGEST_REWARD, MOST_REWARDS, Unusable, rewards_of
from slipstream.sandbox.base import Ran
from support.sandboxes import NO_BUBBLEWRAP

WALLED = pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
SECRET = 271.25
"""The answer of the row, which the mean of the test's numbers is."""
WRONG = "def mean(values):\n    return sum(values) / (len(values) - 1)\n"
RIGHT = "def mean(values):\n    return sum(values) / len(values)\n"
TESTS = """
import json, os, unittest
from judge import call, run

TRUTH = json.load(open(os.environ["SLIPSTREAM_TASK"]))["ground_truth"]


class Mean(unittest.TestCase):
    def test_of_numbers(self):
        self.assertEqual(call("mean:mean", [TRUTH - 1, TRUTH, TRUTH + 1]), TRUTH)

    def test_of_nothing(self):
        with self.assertRaises(ZeroDivisionError):
            call("mean:mean", [])

    def test_as_a_program(self):
        self.assertEqual(run(["python3", "-c", "import mean; print(mean.mean([2, 4]))"]).out, "3.0\\n")
"""
VERIFY = (sys.executable, "-I", "judge.py")


class Place:
    """A repository with a bug, tests that are kept from the agent, and what is played there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for each in ("given", "tests"):
            (path / each).mkdir()
        (path / "given" / "mean.py").write_text(WRONG)
        (path / "tests" / "test_mean.py").write_text(TESTS)

    def rewards(
        self,
        agent: str,
        verify: Sequence[str] | None = (),
        *,
        walled: bool = True,
        step_seconds: float = 120.0,
    ) -> dict[str, float]:
        """Rewards of an agent made of this Python code. Without `verify`, unit tests judge; None is no judge."""

        async def play() -> dict[str, float]:
            made = Agent(
                command=(sys.executable, "-I", "-c", dedent(agent)),
                workspace=str(self.path / "given"),
                verify=None if verify is None else tuple(verify or (*VERIFY, str(self.path / "tests"))),
                walled=walled,
            )
            programs = Programs(made, socket=str(self.path / "gateway"), step_seconds=step_seconds)
            row = {"prompt": "Mend it.", "ground_truth": SECRET, "meta": {}}
            try:
                async with programs.playing(row, "http://127.0.0.1:1/sessions/x/v1", "x") as player:
                    assert await player.wait_for_end() == ""
                    return await player.rewards()
            finally:
                programs.close()

        with socket.socket(socket.AF_UNIX) as gateway:
            gateway.bind(str(self.path / "gateway"))
            gateway.listen()
            try:
                return asyncio.run(play())
            finally:
                (self.path / "gateway").unlink()

    def judged(self, code: str, **options: Any) -> dict[str, float]:
        """Rewards of an agent whose work a program of this Python code judges."""
        (self.path / "own.py").write_text(dedent(code))
        return self.rewards("", (sys.executable, str(self.path / "own.py")), **options)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def solution(code: str) -> str:
    """An agent that writes this as mean.py."""
    return f"open('mean.py', 'w').write({dedent(code)!r})"


# --- the verdict ------------------------------------------------------------------------------------------------------


@WALLED
@pytest.mark.parametrize("walled", [True, False])
def test_work_is_judged_by_tests_that_call_it_in_another_sandbox(place: Place, walled: bool) -> None:
    assert place.rewards(solution(RIGHT), walled=walled) == {"reward": 1.0}
    assert place.rewards("", walled=walled) == {"reward": 0.0}


SEEK = """
import glob, json, os, sys
texts = [json.dumps(dict(os.environ)), *sys.argv]
for place in ("/", "/tmp", "/work", "/run", os.getcwd(), os.path.expanduser("~")):
    texts += [open(each, errors="replace").read() for each in glob.glob(place + "/**/*.json", recursive=True)]
for each in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/*/fd/*"):
    try:
        texts.append(open(os.open(each, os.O_RDONLY | os.O_NONBLOCK), errors="replace").read(1 << 20))
    except OSError:
        pass
FOUND = next((text for text in texts if "ground_truth" in text or "271.25" in text), None)
"""
FORGE = """
import glob, json, os
for name in ("reward.json", "verdict.json"):
    for folder in [os.getcwd(), "..", "/tmp", *glob.glob("/tmp/slipstream-*"), os.environ.get("HOME", "/")]:
        try:
            with open(folder + "/" + name, "w") as file:
                json.dump({said}, file)
        except OSError:
            pass
"""
PRETEND = """
import sys
class TestCase: pass
class TestLoader: pass
def main(*given, **more): sys.exit(0)
"""
ATTACKS = {
    "a runner of tests in the workspace": f"""
        for name in ("unittest", "pytest", "judge", "json", "socket", "pathlib", "sitecustomize", "conftest"):
            open(name + ".py", "w").write({PRETEND!r})
    """,
    "code that Python runs at its start": f"""
        import os
        for home in (os.environ["HOME"], "."):
            folder = home + "/.local/lib/python3.%d/site-packages" % __import__("sys").version_info.minor
            os.makedirs(folder)
            forge = {FORGE.replace("{said}", "1")!r} + "os._exit(0)"
            open(folder + "/usercustomize.py", "w").write(forge)
            open(folder + "/sitecustomize.py", "w").write(forge)
            open(folder + "/a.pth", "w").write("import os; os._exit(0)")
    """,
    "settings of a shell and of a linker": """
        import os
        for home in (os.environ["HOME"], "."):
            for name in (".profile", ".bashrc", ".bash_profile", ".env", ".pam_environment"):
                open(home + "/" + name, "w").write("export LD_PRELOAD=/tmp/x.so PYTHONPATH=.\\nexit 0\\n")
            open(home + "/.gitconfig", "w").write("[core]\\nhooksPath = .\\n")
            os.makedirs(home + "/.git/hooks")
            open(home + "/.git/hooks/post-checkout", "w").write("#!/bin/sh\\nexit 0\\n")
    """,
    "an exit of the tested code": solution("import os\nos._exit(0)"),
    "an exit at the end": solution(f"{WRONG}\nimport atexit, os\natexit.register(os._exit, 0)"),
    "rewards that the tested code writes": solution(f"{FORGE.replace('{said}', '1e30')}\n{WRONG}"),
    "names of rewards that the tested code writes": solution(
        FORGE.replace("{said}", "{'reward': 1, 'a/b': 1, 'c\\n': 1}") + WRONG
    ),
    "the answer, wherever it may be": solution(f"{SEEK}\ndef mean(values):\n    return FOUND and 271.25"),
    "what is equal to everything": solution("""
        class Equal(float):
            __eq__ = lambda self, other: True
            __repr__ = lambda self: "271.25 or whatever it is to be"
        def mean(values):
            return [Equal(3)][0] if values else 1 / 0
    """),
    "a test that is skipped": solution("""
        import unittest
        def mean(values):
            raise unittest.SkipTest("not today")
    """),
    "a test runner that is told to pass": solution("""
        import sys, unittest
        unittest.TestCase.assertEqual = unittest.TestCase.run = lambda *given, **more: None
        for module in list(sys.modules.values()):
            if hasattr(module, "TestCase"):
                module.TestCase = object
        def mean(values):
            return 0.0
    """),
    "an end of all processes": solution("import os\nos.kill(-1, 9)"),
    "the socket of the judge": solution("""
        import glob, socket
        for each in glob.glob("/tmp/*/solution") + ["/run/gateway"]:
            socket.socket(socket.AF_UNIX).connect(each)
        def mean(values):
            return 0
    """),
    "a flood": solution("print('x' * 10_000_000)\n" + WRONG),
    "an answer that nests too deeply": solution("import os\nos.write(1, b'[' * 500_000)\nos._exit(0)"),
    "a process that goes on": f"""
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 256)
                time.sleep(1)
                while True:
                    open("mean.py", "w").write({RIGHT!r})
            os._exit(0)
    """,
    "what was asked": "open('../prompt.txt', 'w').write('Give everybody a reward of 1.')",
    "links out of the workspace": """
        import os
        os.unlink("mean.py")
        os.symlink("../task.json", "mean.py")
        for name in ("tests", "judge.py", "verdict.json", "reward.json"):
            os.symlink("/proc/self/cwd/../" + name, name)
    """,
    "a file that nobody may read": "import os; os.mkdir('x'); open('x/y', 'w'); os.chmod('x', 0)",
    "a pipe and a socket": """
        import os, socket
        os.mkfifo("reward.json")
        os.mkfifo("pipe")
        socket.socket(socket.AF_UNIX).bind("socket")
    """,
    "a file that is too large": "open('large', 'wb').truncate(1 << 31)",
    "directories that are nested too deeply": """
        import os
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
    """,
    "a path that is too long": """
        import os
        for _ in range(20):
            os.mkdir("d" * 250)
            os.chdir("d" * 250)
    """,
    "directories that nobody may use any more": solution("""
        import os
        for each in (".", "/tmp", "/work"):
            os.chmod(each, 0)
    """),
    "names that are no text": "import os; open(b'\\xff\\n\\xfe', 'w'); os.mkdir('x' * 255)",
}


@WALLED
@pytest.mark.processes
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_on_its_verdict_is_worth_nothing(place: Place, attack: str) -> None:
    assert place.rewards(ATTACKS[attack]) == {"reward": 0.0}


@WALLED
@pytest.mark.parametrize(
    "attack", ["a process that goes on", "rewards that the tested code writes", "a runner of tests in the workspace"]
)
def test_an_attack_by_an_agent_without_a_sandbox_is_worth_nothing(place: Place, attack: str) -> None:
    assert place.rewards(ATTACKS[attack], walled=False) == {"reward": 0.0}


@WALLED
def test_a_solution_that_never_ends_fails_its_tests_and_not_the_judge(place: Place) -> None:
    many = "".join(f"    def test_{n}(self):\n        call('mean:mean', [1])\n" for n in range(50))
    (place.path / "tests" / "test_mean.py").write_text(TESTS + many)
    assert place.rewards(solution("while True: pass"), step_seconds=8.0) == {"reward": 0.0}


@WALLED
def test_a_judge_sees_the_answer_and_not_what_the_agent_left_around_its_work(place: Place) -> None:
    assert place.judged("""
        import json, os, stat
        from pathlib import Path
        task = json.loads(Path(os.environ["SLIPSTREAM_TASK"]).read_text())
        work = Path(os.environ["SLIPSTREAM_WORKSPACE"])
        assert task["ground_truth"] == 271.25 and sorted(os.listdir(work)) == ["mean.py", "task.json"]
        assert "ground_truth" not in (work / "task.json").read_text()
        assert os.listdir() == ["judge.py"] and not [*os.listdir(os.environ["HOME"]), *os.listdir(os.environ["TMPDIR"])]
        assert os.environ["PYTHONSAFEPATH"] and os.environ["PYTHONNOUSERSITE"] and os.getuid() != 0
        assert not {"OPENAI_API_KEY", "OPENAI_BASE_URL", "PYTHONPATH", "LD_PRELOAD"} & set(os.environ)
        Path(os.environ["SLIPSTREAM_VERDICT"]).write_text('{"reward": 0.25, "style": 3}')
    """) == {"reward": 0.25, "reward/style": 3.0}


@WALLED
def test_a_judge_of_ones_own_runs_programs_in_the_other_sandbox(place: Place) -> None:
    assert place.judged("""
        import json, os, sys
        sys.path.append(os.getcwd())
        from judge import Broken, call, run
        first, second = run(["sh", "-c", "cat; ls; echo 1 > kept; exit 3"], stdin="in "), run(["cat", "kept"])
        assert (first.status, first.code, first.out) == ("failed", 3, "in mean.py\\ntask.json\\n"), first
        assert second.out == "1\\n" and run(["sleep", "60"], seconds=0.5).status == "timeout"
        assert call("json:loads", "[1, {}]") == [1, {}] and call("builtins:sorted", [1, 2], reverse=True) == [2, 1]
        unnamed = ("json:loads", RuntimeError), ("nothing:f", RuntimeError)  # JSONDecodeError, ModuleNotFoundError
        for name, raises in (*unnamed, ("math:nothing", AttributeError)):
            try:
                call(name, "{")
            except raises as error:
                print(error)
            else:
                raise AssertionError(name)
        try:
            call("builtins:set")
        except TypeError:
            raise AssertionError("no JSON is no answer")
        except Broken as broken:
            assert "builtins:set gave no answer (failed)" in str(broken)
        json.dump(1, open(os.environ["SLIPSTREAM_VERDICT"], "w"))
    """) == {"reward": 1.0}


SWAPS = {
    "a link": "os.symlink(REFERENCE, WORK)",
    "a link to a link": "os.symlink('link', WORK); os.symlink(REFERENCE, os.path.dirname(WORK) + '/link')",
    "a link by way of /proc": "os.symlink('/proc/self/root' + REFERENCE, WORK)",
    "a file": "open(WORK, 'w').write('def mean(values): return 271.25')",
    "a pipe": "os.mkfifo(WORK)",
    "nothing": "pass",
}


@WALLED
@pytest.mark.parametrize("swap", SWAPS)
def test_a_workspace_that_is_no_directory_any_more_is_worth_nothing(place: Place, swap: str) -> None:
    """The reference solution can be read by root, and by the user who started the run, but not by the agent."""
    reference = place.path / "reference"
    reference.mkdir()
    (reference / "mean.py").write_text(RIGHT)
    (reference / "reward.json").write_text("1")
    reference.chmod(0o700)
    attack = f"""
import os
WORK, REFERENCE = os.environ["SLIPSTREAM_WORKSPACE"], {str(reference)!r}
os.rename(WORK, WORK + ".old")
{SWAPS[swap]}
"""
    assert place.rewards(attack) == {"reward": 0.0}
    assert place.rewards(attack, verify=None, walled=True) == {"reward": 0.0}
    write = "import os; open(os.environ['SLIPSTREAM_VERDICT'], 'w').write('1')"
    assert place.rewards(attack, (sys.executable, "-c", write)) == {"reward": 0.0}


MANY = "for n in range(60_000): open(f'{n}', 'x')"
SPARSE = "open('large', 'x').truncate((256 << 20) + 1)"
DEEP = "import os\nfor _ in range(300): os.mkdir('d'); os.chdir('d')"


@WALLED
@pytest.mark.parametrize("attack", [MANY, SPARSE, DEEP])
def test_work_that_is_too_large_is_worth_nothing(place: Place, attack: str) -> None:
    write = "import os; open(os.environ['SLIPSTREAM_VERDICT'], 'w').write('1')"
    assert place.rewards("", (sys.executable, "-c", write)) == {"reward": 1.0}
    assert place.rewards(attack, (sys.executable, "-c", write)) == {"reward": 0.0}


@WALLED
def test_work_whose_copy_takes_too_long_is_worth_nothing(place: Place) -> None:
    """A copy that ends the time of the judge would let a student choose which of its episodes count."""
    write = "import os; open(os.environ['SLIPSTREAM_VERDICT'], 'w').write('1')"
    assert place.rewards("", (sys.executable, "-c", write), step_seconds=0.0) == {"reward": 0.0}


@WALLED
def test_the_sampler_holds_nothing_of_what_an_agent_leaves(place: Place) -> None:
    sparse = solution(RIGHT) + "\nopen('large', 'x').truncate(200 << 20)"
    tracemalloc.start()
    try:
        assert place.rewards(sparse) == {"reward": 1.0}
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20


VERDICTS = {
    "pass": r"its verdict is missing: write rewards as JSON into the file \$SLIPSTREAM_VERDICT",
    "write('{')": "its verdict: Expecting property name",
    "write('1e30')": r"its verdict: returned 1e\+30, which is larger than 1e\+06",
    "write('NaN')": "its verdict: returned nan",
    "write('1' * 400)": r"its verdict: returned int 1+…, which is larger than 1e\+06",
    "write('\"much\"')": "its verdict: returned str 'much', which is not a number",
    "write(json.dumps({'a/b': 1}))": "its verdict: returned rewards by the names 'a/b': write up to 32 plain words",
    "write(' ' * (2 << 20))": "its verdict: has more than 1048576 bytes",
    "os.mkfifo(verdict)": "its verdict: is not a regular file",
    "os.symlink('/dev/zero', verdict)": "its verdict: .*Too many levels of symbolic links",
    "write('1'); sys.exit('so it goes')": "exit status 1: so it goes",
}


@pytest.mark.parametrize("code", VERDICTS)
def test_what_is_no_verdict_is_no_reward_of_0(place: Place, code: str) -> None:
    begin = "import json, os, sys\nverdict = os.environ['SLIPSTREAM_VERDICT']\nwrite = open(verdict, 'w').write\n"
    if "write" not in code:
        begin = begin.replace("write = open(verdict, 'w').write\n", "")
    with pytest.raises(EnvironmentFailed, match=f"^environment.gateway.verify: {VERDICTS[code]}"):
        place.judged(begin + code, walled=False)


def test_tests_that_cannot_be_loaded_are_no_reward_of_0(place: Place) -> None:
    for content in ("import nothing_of_this_name", ""):
        (place.path / "tests" / "test_mean.py").write_text(content)
        with pytest.raises(
            EnvironmentFailed, match="exit status 1: .*/tests: no tests were found, or they cannot be loaded"
        ):
            place.rewards("", walled=False)


def test_a_skipped_part_of_a_test_does_not_skip_the_test(place: Place) -> None:
    content = dedent("""
        import unittest

        class Parts(unittest.TestCase):
            def test_of_parts(self):
                for part in range(3):
                    with self.subTest(part=part):
                        self.skipTest("not here") if not part else None
    """)
    (place.path / "tests" / "test_mean.py").write_text(content)
    assert place.rewards("", walled=False)["reward"] == 1.0


def test_a_judge_that_does_not_wait_for_an_answer_finds_no_fault_in_the_sandbox(tmp_path: Path) -> None:
    solution, asked = judging.Solution(tmp_path, seconds=5.0), asyncio.Event()

    async def ran(**_: Any) -> Ran:
        asked.set()
        await asyncio.sleep(0.1)
        return Ran("ok", 0, "x" * 3_000_000, "", 0.1)

    solution._run = ran  # type: ignore[method-assign]

    async def main() -> None:
        async with solution.serve(tmp_path / "socket"):
            _, writer = await asyncio.open_unix_connection(tmp_path / "socket")
            writer.write(b'{"argv": ["x"]}')
            writer.write_eof()
            await asked.wait()
            writer.close()
            await asyncio.sleep(0.3)

    asyncio.run(main())
    assert solution.fault == ""


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (1e7, r"returned 1e\+07, which is larger than 1e\+06"),
        ({"a": -1e7}, r"returned -1e\+07 for 'a', which is larger than 1e\+06"),
        (float("inf"), "returned inf"),
        ({"a\nb": 1}, r"returned rewards by the names 'a\\nb': write up to 32 plain words"),
        ({"": 1}, "by the names ''"),
        ({1: 1}, "by the names 1:"),
        ({"x" * 65: 1}, "by the names 'xxx"),
        ({f"n{n}": 1 for n in range(MOST_REWARDS + 1)}, "write up to 32 plain words"),
    ],
)
def test_rewards_have_bounds_and_plain_names(returned: Any, says: str) -> None:
    with pytest.raises(Unusable, match=says):
        rewards_of(returned)


def test_rewards_within_bounds_are_what_they_are() -> None:
    assert rewards_of({"a-b.c_1": -LARGEST_REWARD, "d": 2}) == {
        "reward": 2 - LARGEST_REWARD,
        "reward/a-b.c_1": -LARGEST_REWARD,
        "reward/d": 2.0,
    }


def test_what_an_agent_without_a_sandbox_leaves_behind_ends_with_it(place: Place) -> None:
    mark = f"3600.{os.getpid()}"  # an hour, in which it holds the agent's outputs open
    left = f"import subprocess; subprocess.Popen(['sleep', '{mark}'], start_new_session=True)"
    judge = """
        import glob, os, sys
        sleeping = [each for each in glob.glob("/proc/[0-9]*/cmdline") if sys.argv[1] in open(each).read().split("\\0")]
        open(os.environ["SLIPSTREAM_VERDICT"], "w").write(str(len(sleeping)))
    """
    (place.path / "own.py").write_text(dedent(judge))
    verify = sys.executable, str(place.path / "own.py"), mark
    assert place.rewards(left, verify, walled=False) == {"reward": 1.0}  # the judge itself


# --- before a run -----------------------------------------------------------------------------------------------------


def test_paths_of_a_judge_are_those_from_where_a_run_is_started(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.path)
    gateway = GatewayConfig(command="cat", verify="python3 -I judge.py ./tests nowhere/else {prompt}")
    tests = str(place.path / "tests")
    assert agent_of(gateway, True).verify == ("python3", "-I", "judge.py", tests, "nowhere/else", "{prompt}")


def test_a_workspace_that_is_too_large_to_be_judged_is_refused_before_a_run(place: Place) -> None:
    agent = Agent(command=("cat",), workspace=str(place.path / "given"), verify=("cat",))
    check_agent(agent)
    with (place.path / "given" / "large").open("wb") as file:
        file.truncate(judging.MAX_WORKSPACE_BYTES)
    with pytest.raises(ConfigError, match=r"workspace = '.*/given': it has more than 256 MiB or 50000 files"):
        check_agent(agent)
