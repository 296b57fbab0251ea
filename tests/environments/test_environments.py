"""Environments of the user's own: their tools, and the processes in which they may do what they like."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from slipstream.environments import Call, Reply, Start, Step
from slipstream.environments.forms import Acting, kind_of, shorten
from slipstream.environments.pool import EnvironmentPool, EnvironmentSettings, Episode, schemas
from slipstream.environments.tools import without_titles
from slipstream.errors import ConfigError, EnvironmentFailed

GIVEN = {"id": "a", "prompt": "?", "ground_truth": 4, "meta": {"k": 2}, "data_source": "x", "seed": 5}
TOOLS = '''
    class Adder:
        """Adds."""

        def start(self, meta, seed=0):
            self.offset, self.metrics = meta["k"], {"uses": 0}

        def add(self, a: int, b: int = 1) -> int:
            """The sum of two numbers, and a secret one."""
            self.metrics["uses"] += 1
            return a + b + self.offset

        async def wait(self, seconds: float):
            """Wait."""
            import asyncio
            await asyncio.sleep(seconds)
            return {"waited": seconds}

        def fail(self, how: str) -> str:
            """Fail in some way."""
            import os, time, sys
            match how:
                case "raise": raise ValueError("no such thing\\nat all")
                case "stop": return next(iter([]))
                case "exit": os._exit(3)
                case "fork":
                    if os.fork() == 0: time.sleep(1000)
                    os._exit(3)
                case "leave":
                    if os.fork() == 0: time.sleep(1000)
                case "sleep": time.sleep(1000)
                case "spin":
                    while True: pass
                case "flood": return "x" * 10_000_000
                case "odd": return object()

        def close(self):
            return {"reward": 1.0, "uses": self.metrics["uses"]}
'''


@pytest.fixture
def adder(tmp_path: Path) -> str:
    return written(tmp_path, TOOLS, "Adder")


def written(path: Path, source: str, name: str) -> str:
    file = path / f"tools{len(list(path.iterdir()))}.py"
    file.write_text(dedent(source))
    return f"{file}:{name}"


def call(name: str, **arguments: Any) -> Reply:
    return Reply("", (Call(name, arguments),))


@contextmanager
def hosts(spec: str, processes: int = 1, shown: int = 200) -> Iterator[EnvironmentPool]:
    made = EnvironmentPool(EnvironmentSettings(spec, None, shown), processes)
    try:
        yield made
    finally:
        made.close()


async def opened(made: EnvironmentPool, *, alone: bool = False) -> Episode:
    """An environment that has started."""
    episode = made.place(alone=alone)
    try:
        await episode.ready()
        await episode.start(GIVEN)
    except EnvironmentFailed:
        episode.drop()
        raise
    return episode


def test_a_host_that_reads_no_more_holds_nobody_up(adder: str) -> None:
    """A step that keeps its interpreter to itself, as a slow regular expression does, stops a host likewise."""

    async def main() -> None:
        with hosts(adder) as made:
            episode = await opened(made)
            os.kill(episode.host.process.pid, signal.SIGSTOP)
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await episode.step(Reply("x" * 2_000_000))  # more than fits into the connection
        with pytest.raises(EnvironmentFailed, match="ended its process"):  # also after the end of all hosts
            await episode.step(Reply("x"))

    asyncio.run(main())


def test_tools_are_told_as_their_types_and_docstrings_say(adder: str) -> None:
    add, wait, fail = schemas(EnvironmentSettings(adder, None, 200))
    assert add == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers, and a secret one.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
            },
        },
    }
    assert [each["function"]["name"] for each in (wait, fail)] == ["wait", "fail"]
    default = {"title": "a", "n": 1}
    shown = without_titles({"properties": {"title": {"title": "Title", "default": default}}, "title": "Arguments"})
    assert shown == {"properties": {"title": {"default": default}}}


OWN_STEPS = """
    from slipstream.environments import Step

    class Mine(Step):
        pass

    class Game:
        metrics = {}

        def step(self, reply):
            if reply.text in ("speed", "cost"):
                self.metrics = {reply.text: float("nan") if reply.text == "speed" else 1e200}
            reward = [1.0, 2.0] if reply.text == "list" else 0.5
            return Mine(({"role": "user", "content": "go on"},), reward=reward)

        def close(self):
            return {}
"""


def test_an_environment_may_have_steps_of_its_own_class_and_faults_are_named(tmp_path: Path) -> None:
    async def main(made: EnvironmentPool) -> None:
        episode = await opened(made)
        step = await episode.step(Reply("x"))
        assert type(step) is Step and step.reward == 0.5
        assert await episode.close() == {}, "no reward, as with None"
        for said, fault in {
            "list": r"Game.step returned for 'reward' list \[1.0, 2.0\], which is not a number",
            "speed": "Game.metrics returned nan for 'speed'",
            "cost": r"Game.metrics returned 1e\+200 for 'cost', which is larger than 1e\+150",
        }.items():
            episode = await opened(made)
            with pytest.raises(EnvironmentFailed, match=fault):
                await episode.step(Reply(said))
            episode.drop()

    with hosts(written(tmp_path, OWN_STEPS, "Game")) as made:
        asyncio.run(main(made))


def test_episodes_that_begin_together_wait_together_for_a_process(adder: str) -> None:
    async def main(made: EnvironmentPool) -> None:
        episodes = await asyncio.gather(*(opened(made) for _ in range(16)))
        steps = await asyncio.gather(*(episode.step(call("add", a=3)) for episode in episodes))
        assert {step.messages[0]["content"] for step in steps} == {"6"}

    with hosts(adder, processes=2) as made:
        asyncio.run(main(made))


def test_an_episode_with_tools_from_its_start_to_its_reward(adder: str) -> None:
    async def main(made: EnvironmentPool) -> None:
        episode = await opened(made)
        step = await episode.step(call("add", a=3))
        assert step.messages == ({"role": "tool", "content": "6", "name": "add"},) and not step.done
        both = Reply("so", (Call("wait", {"seconds": 0}), Call("add", {"a": 1, "b": 1})), ("this is no JSON",))
        step = await episode.step(both)
        assert [m["content"] for m in step.messages] == ['{"waited": 0.0}', "4", "error: this is no JSON"]
        assert step.metrics == {"calls": 4.0, "invalid": 1.0, "own/uses": 2.0}
        assert (await episode.step(Reply("6"))).done
        assert await episode.close() == {"reward": 1.0, "reward/uses": 2.0}

    with hosts(adder) as made:
        asyncio.run(main(made))


@pytest.mark.parametrize(
    ("reply", "said", "counted"),
    [
        (call("ad", a=1), "error: there is no tool 'ad'; there are add, wait, fail", "invalid"),
        (call("add", a="x"), "error: add: a: Input should be a valid integer", "invalid"),
        (call("add"), "error: add: a: Field required", "invalid"),
        (call("add", a=1, c=2), "error: add: c: Extra inputs are not permitted", "invalid"),
        (call("fail", how="raise"), "error: ValueError: no such thing", "failed"),
    ],
)
def test_what_a_student_does_wrong_is_answered_and_counted(adder: str, reply: Reply, said: str, counted: str) -> None:
    async def main() -> None:
        acting = Acting(kind_of(adder), plainly, 200)
        await acting.start(Start(**GIVEN, sandbox=None))
        step = await acting.step(reply)
        assert step.messages[0]["content"].startswith(said) and not step.done
        assert step.metrics[counted] == 1

    asyncio.run(main())


async def plainly(method: Any, **given: Any) -> Any:
    found = method(**given)
    return await found if asyncio.iscoroutine(found) else found


def test_an_observation_is_no_longer_than_it_may_be(adder: str) -> None:
    async def main(made: EnvironmentPool) -> str:
        episode = await opened(made)
        return str((await episode.step(call("fail", how="flood"))).messages[0]["content"])

    with hosts(adder) as made:
        assert len(asyncio.run(main(made))) < 260
    assert shorten("abcdefghi", 3) == "ab\n… (6 characters left out)\ni" and shorten("abc", 3) == "abc"


@pytest.mark.parametrize("how", ["exit", "fork", "sleep", "spin"])
def test_what_crashes_or_hangs_takes_no_other_environment_for_good(adder: str, how: str) -> None:
    """Those beside one that hangs go on; those beside one that crashes are told, and a new host takes the next."""

    async def main(made: EnvironmentPool) -> None:
        bad, good = await opened(made), await opened(made)
        step = asyncio.create_task(bad.step(call("fail", how=how)))
        crashes = how in ("exit", "fork")  # also if a process that it forked holds its end of the connection
        await asyncio.wait([step], timeout=20 if crashes else 0.3)
        if crashes:
            assert str(step.exception()) == f"{adder} ended its process: exit status 3"
            with pytest.raises(EnvironmentFailed, match="exit status 3"):
                await good.step(call("add", a=1))
        else:
            step.cancel()
            bad.drop()
            assert (await good.step(call("add", a=1))).messages[0]["content"] == "4"
        fresh = await opened(made)
        assert (await fresh.step(call("add", a=2))).messages[0]["content"] == "5"

    with hosts(adder) as made:
        asyncio.run(main(made))
        pids = [host.process.pid for host in made.children]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_host_with_what_hangs_takes_nothing_new_and_ends_with_the_last(
    adder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.environments.pool.ABANDON_TIMEOUT", 0.2)

    async def main(made: EnvironmentPool) -> None:
        bad, good = await opened(made), await opened(made)
        old = bad.host
        step = asyncio.create_task(bad.step(call("fail", how="sleep")))
        await asyncio.sleep(0.1)
        step.cancel()
        bad.drop()
        await asyncio.sleep(0.4)
        assert made.retired == [old] and not old.ended
        fresh = await opened(made)
        assert fresh.host is not old
        await good.close()
        assert old.ended and not made.retired

    with hosts(adder) as made:
        asyncio.run(main(made))


def test_a_tool_may_have_parameters_that_are_named_like_methods_of_pydantic(tmp_path: Path) -> None:
    source = """
        from dataclasses import dataclass
        from typing import Annotated
        from pydantic import Field

        @dataclass
        class Query:
            parameter_name: str
            name: str = "n"

        class Odd:
            def g(self, query: Query):
                '''G.'''
                return query.parameter_name + query.name

            def f(self, json: Annotated[str, Field(description="A.")], model_config: int, copy: int = Field(3, ge=1)):
                '''F.'''
                return f"{json} {model_config} {copy}"
    """
    spec = written(tmp_path, source, "Odd")

    async def main(made: EnvironmentPool) -> None:
        episode = await opened(made)
        (seen,) = (await episode.step(call("f", json="a", model_config=2))).messages
        assert seen["content"] == "a 2 3"
        (seen,) = (await episode.step(call("f", json="a"))).messages
        assert "model_config: Field required" in seen["content"]
        (seen,) = (await episode.step(call("g", query={"parameter_name": "x", "name": "y"}))).messages
        assert seen["content"] == "xy"

    with hosts(spec) as made:
        _, schema = made.schemas()
        assert schema["function"]["parameters"] == {
            "type": "object",
            "properties": {
                "json": {"type": "string", "description": "A."},
                "model_config": {"type": "integer"},
                "copy": {"type": "integer", "default": 3, "minimum": 1},
            },
            "required": ["json", "model_config"],
        }
        asyncio.run(main(made))


def test_an_environment_that_takes_replies_itself(tmp_path: Path) -> None:
    source = """
        from slipstream.environments import Step

        class Guess:
            tools = [{"type": "function", "function": {"name": "guess"}}]

            async def start(self, ground_truth):
                self.truth, self.tries = ground_truth, 0

            async def step(self, reply):
                self.tries += 1
                if reply.text == str(self.truth):
                    return None
                if self.tries == 2:
                    return [{"role": "user", "content": "again"}]
                if self.tries == 3:
                    raise RuntimeError("enough")
                return "wrong"

            def close(self):
                return 1 / self.tries
    """
    spec = written(tmp_path, source, "Guess")

    async def main(made: EnvironmentPool) -> None:
        episode = await opened(made)
        assert (await episode.step(Reply("3"))).messages == ({"role": "tool", "content": "wrong"},)
        assert (await episode.step(Reply("5"))).messages == ({"role": "user", "content": "again"},)
        with pytest.raises(EnvironmentFailed, match=r"step raised RuntimeError: enough \(.*tools0.py:17\)"):
            await episode.step(Reply("6"))
        assert (await episode.step(Reply("4"))).done
        assert await episode.close() == {"reward": 0.25}

    with hosts(spec) as made:
        assert made.schemas() == [{"type": "function", "function": {"name": "guess"}}]
        asyncio.run(main(made))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("class A: pass", "the class has no tools: write a public method for each, with types and a docstring"),
        ("class A:\n    def f(self, x: int): pass", "the tool 'f' has no docstring"),
        ("class A:\n    def f(self, x):\n        '''F.'''", "the tool 'f' has a parameter 'x' without a type"),
        (
            "class A:\n    def f(self, *x: int):\n        '''F.'''",
            "the tool 'f' has a parameter *x: int, which a call cannot pass by name",
        ),
        (
            "class A:\n    def f(self, x: 'Y'):\n        '''F.'''",
            "the types of the tool 'f' cannot be read: name 'Y'",
        ),
        ("import io\nclass A:\n    def f(self, x: io.BytesIO):\n        '''F.'''", "the tool 'f' has a type that JSON"),
        (
            "class A:\n    def start(self, where): pass\n    def step(self, reply): pass",
            "no value is available for its param",
        ),
        ("A = 3", "A is int 3, not a class"),
        (
            "class A:\n    tools = [A for A in (len,)]\n    def step(self, reply): pass",
            "tools is not, or does not return, a list of JSON schemas: TypeError",
        ),
        ("class B: pass", "no class 'A' in it; known: B"),
        ("import nowhere", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("import os\nos._exit(4)", "its process ends during the import (exit status 4)"),
    ],
)
def test_a_class_that_cannot_be_used_is_told_in_one_line(tmp_path: Path, source: str, line: str) -> None:
    spec = written(tmp_path, source, "A")
    with pytest.raises(ConfigError) as error:
        schemas(EnvironmentSettings(spec, None, 200))
    assert str(error.value).startswith(f"environment.use = {spec!r}: ") and line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ("def f(self, _x: int): 'F.'", "the tool 'f' has a parameter '_x': begin the name with a letter"),
        ("@staticmethod\n    def f(x: int): 'F.'", "the method 'f' is a staticmethod: write one with self, or begin"),
        (
            "@classmethod\n    def f(cls, x: int): 'F.'",
            "the method 'f' is a classmethod: write one with self, or begin",
        ),
        ("@staticmethod\n    def step(reply): pass", "the method 'step' is a staticmethod: write one with self"),
        (
            "def step(self, reply) -> bool: pass",
            "the method 'step' is annotated to return bool: return a text, a list",
        ),
        (
            "def step(self, reply) -> int | None: pass",
            "the method 'step' is annotated to return int: return a text",
        ),
        ("async def step(self, reply) -> 'dict[str, str]': pass", "the method 'step' is annotated to return dict"),
        ("def f(self) -> bytes: 'F.'", "the method 'f' is annotated to return bytes: return a text, or what JSON"),
        ("def f(self) -> set[str]: 'F.'", "the method 'f' is annotated to return set"),
    ],
)
def test_methods_that_cannot_work_are_refused_before_anything_starts(tmp_path: Path, lines: str, line: str) -> None:
    source = f"{TYPED}\nclass A:\n    {lines}"
    spec = written(tmp_path, source, "A")
    with pytest.raises(ConfigError) as error:
        schemas(EnvironmentSettings(spec, None, 200))
    assert str(error.value).startswith(f"environment.use = {spec!r}: {line}") and "\n" not in str(error.value)


TYPED = """
from __future__ import annotations
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict
from slipstream.environments import Step
class Row(TypedDict):
    x: int
class Pair(NamedTuple):
    x: int
"""


@pytest.mark.parametrize(
    "lines",
    [
        *(
            f"def step(self, reply) -> {kind}: pass"
            for kind in (
                "Step",
                "str | None",
                "list[dict[str, str]]",
                "Sequence[dict]",
                "Any",
                "object",
                "tuple | Step",
            )
        ),
        *(
            f"def f(self) -> {kind}: 'F.'"
            for kind in ("bool", "int", "Row", "Pair", "None", "Awaitable[str]", "dict[str, int] | Literal['x', 3]")
        ),
        "async def f(self) -> float: 'F.'",
        "def step(self, reply) -> OnlyForTypeCheckers: pass",
        "def step(self, reply): pass\n    @staticmethod\n    def helper(x): pass",
        "def _hidden(x): pass\n    @staticmethod\n    def _other(x): pass\n    def f(self): 'F.'",
    ],
)
def test_methods_that_may_work_are_not(tmp_path: Path, lines: str) -> None:
    schemas(EnvironmentSettings(written(tmp_path, f"{TYPED}\nclass A:\n    {lines}", "A"), None, 200))


STEPS = {
    "True": "Odd.step returned bool True: return a text, a list of messages, a Step, or None at the end",
    "False": "Odd.step returned bool False: return a text",
    "3": "Odd.step returned int 3: return a text",
    "{'role': 'tool', 'content': 'x'}": "Odd.step returned dict {'role': 'tool', 'content': 'x'}: return a text",
    "[{'content': 'x'}]": "Odd.step returned the message dict {'content': 'x'}: write {'role': 'tool', 'content'",
    "Step({'role': 'tool', 'content': 'x'})": "Odd.step returned the message str 'role': write {'role': ",
    "Step('x')": "Odd.step returned the message str 'x': write {'role': 'tool', 'content': text}",
    "[]": "Odd.step returned no message for the student: add one, or set done=True",
}


def test_what_an_environment_must_not_return_is_its_failure_and_names_class_and_method(tmp_path: Path) -> None:
    source = """
        from slipstream.environments import Step

        class Odd:
            def step(self, reply):
                return eval(reply.text)

            def close(self):
                return "much"
    """
    tools = "class Tools:\n    def f(self):\n        'F.'\n        return {1, 2}"
    returned = "Tools.f returned set {1, 2}: return a text, or what JSON holds"

    async def main(made: EnvironmentPool, replies: dict[Reply, str], close: str) -> None:
        episode = await opened(made)
        for reply, line in replies.items():
            with pytest.raises(EnvironmentFailed) as error:
                await episode.step(reply)
            assert error.value.cause == "error" and str(error.value).startswith(line)
        if close:
            with pytest.raises(EnvironmentFailed, match=close):
                await episode.close()
        episode.drop()

    async def all_of_them(made: EnvironmentPool) -> None:
        for text, line in STEPS.items():
            await main(made, {Reply(text): line}, "Odd.close returned str 'much', which is not a number")

    with hosts(written(tmp_path, source, "Odd")) as made:
        asyncio.run(all_of_them(made))

    async def of_tools(made: EnvironmentPool) -> None:
        episode = await opened(made)
        with pytest.raises(EnvironmentFailed) as error:
            await episode.step(call("f"))
        assert str(error.value) == returned
        episode.drop()

    with hosts(written(tmp_path, tools, "Tools")) as made:
        asyncio.run(of_tools(made))


SLOW = """
    import asyncio, time

    class Slow:
        def start(self):
            self.said, self.ended = 0, 0

        async def step(self, reply):
            self.said += 1
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.05)
                self.ended += 1

        def close(self):
            return {"said": self.said, "ended": self.ended}

    class Sleeper(Slow):
        def step(self, reply):
            self.said += 1
            time.sleep(0.5)
            self.ended += 1
            return "x"

    class Stuck(Slow):
        def step(self, reply):
            time.sleep(1000)
"""


@pytest.mark.parametrize("name", ["Slow", "Sleeper"])
def test_closing_ends_a_step_that_is_at_work_or_waits_for_it(tmp_path: Path, name: str) -> None:
    """A coroutine on the loop is cancelled; a thread cannot be, and nothing else of the environment runs beside it."""

    async def main(made: EnvironmentPool) -> dict[str, float]:
        episode = await opened(made)
        step = asyncio.create_task(episode.step(Reply("")))
        await asyncio.wait([step], timeout=0.2)
        step.cancel()
        rewards = await episode.close()
        assert not episode.host.live and not episode.host.waiting
        return rewards

    with hosts(written(tmp_path, SLOW, name)) as made:
        assert asyncio.run(main(made)) == {"reward": 2.0, "reward/said": 1.0, "reward/ended": 1.0}


def test_an_environment_whose_close_hangs_behind_a_step_takes_its_process_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.environments.pool.ABANDON_TIMEOUT", 0.2)

    async def main(made: EnvironmentPool) -> None:
        episode = await opened(made)
        step = asyncio.create_task(episode.step(Reply("")))
        await asyncio.wait([step], timeout=0.1)
        step.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await episode.close()
        episode.drop()
        await asyncio.gather(*made.leaving)
        assert episode.host.ended and episode.host not in made.children

    with hosts(written(tmp_path, SLOW, "Stuck")) as made:
        asyncio.run(main(made))


OPENINGS = {
    "return 'Two doors.'": [{"role": "user", "content": "Two doors."}],
    "return 'x' * 999": None,
    "return [{'role': 'tool', 'content': 'a'}, {'role': 'user', 'content': 'b'}]": [
        {"role": "tool", "content": "a"},
        {"role": "user", "content": "b"},
    ],
    "pass": [],
    "return 7": "returned int 7: return a text, a list of messages, or None",
    "return ['a']": "returned the message str 'a': write",
    "return []": [],
}


def test_a_tool_that_raises_stop_iteration_is_answered_like_any_other(adder: str) -> None:
    async def main(made: EnvironmentPool) -> Any:
        episode = await opened(made)
        return (await asyncio.wait_for(episode.step(call("fail", how="stop")), 60)).messages[0]

    with hosts(adder) as made:
        assert asyncio.run(main(made))["content"] == "error: RuntimeError: raised StopIteration"


@pytest.mark.parametrize("code", OPENINGS)
def test_what_start_returns_is_the_first_observation(tmp_path: Path, code: str) -> None:
    source, expected = (
        f"class A:\n    def start(self):\n        {code}\n    def step(self, reply): pass",
        OPENINGS[code],
    )

    async def main(made: EnvironmentPool) -> Any:
        episode = made.place()
        await episode.ready()
        return await episode.start(GIVEN)

    with hosts(written(tmp_path, source, "A"), shown=40) as made:
        if isinstance(expected, str):
            with pytest.raises(EnvironmentFailed, match=re.escape(f"A.start {expected}")):
                asyncio.run(main(made))
        elif expected is None:
            assert "characters left out" in asyncio.run(main(made))[0]["content"]
        else:
            assert list(asyncio.run(main(made))) == expected


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_tools_may_be_asked_for_when_a_run_starts(tmp_path: Path, kind: str) -> None:
    source = f"""
        class A:
            @classmethod
            {kind} tools(cls):
                return [{{"type": "function", "function": {{"name": cls.__name__}}}}]

            def step(self, reply):
                pass
    """
    found = schemas(EnvironmentSettings(written(tmp_path, source, "A"), None, 200))
    assert found == [{"type": "function", "function": {"name": "A"}}]
    broken = written(tmp_path, source.replace("return [", "raise ValueError('no server') #"), "A")
    with pytest.raises(ConfigError, match="a list of JSON schemas: ValueError: no server .*:5"):
        schemas(EnvironmentSettings(broken, None, 200))


SCOPES = """
    import anyio
    from contextlib import AsyncExitStack

    class Server:
        async def start(self, meta):
            self.stack = AsyncExitStack()
            self.tasks = await self.stack.enter_async_context(anyio.create_task_group())
            self.asked, self.answers = anyio.create_memory_object_stream(0)
            await self.stack.enter_async_context(self.asked)
            self.tasks.start_soon(self.serve)

        async def serve(self):
            async with self.answers:
                async for call in self.answers:
                    if call == "fail":
                        raise ValueError("the server has ended")

        async def step(self, reply):
            with anyio.move_on_after(60):
                if reply.text == "sleep":
                    await anyio.sleep_forever()
                await self.asked.send(reply.text)
            return reply.text

        async def close(self):
            await self.asked.aclose()
            await self.stack.aclose()
            return 1.0
"""


def test_libraries_whose_scopes_belong_to_a_task_work_from_start_to_close(tmp_path: Path) -> None:
    async def main(made: EnvironmentPool) -> None:
        for cancelled in (False, True):
            episode = await opened(made)
            assert (await episode.step(Reply("a"))).messages[0]["content"] == "a"
            if cancelled:
                step = asyncio.create_task(episode.step(Reply("sleep")))
                await asyncio.wait([step], timeout=0.1)
                step.cancel()
            assert await episode.close() == {"reward": 1.0}
            assert not episode.host.live and not episode.host.waiting

    with hosts(written(tmp_path, SCOPES, "Server")) as made:
        asyncio.run(main(made))


def test_a_background_task_that_fails_between_two_steps_fails_its_environment_only(tmp_path: Path) -> None:
    async def main(made: EnvironmentPool) -> None:
        other, episode = await opened(made), await opened(made)
        await episode.step(Reply("fail"))
        await other.step(Reply("a"))
        with pytest.raises(EnvironmentFailed, match="a background task of the environment has failed") as caught:
            await episode.step(Reply("b"))
        assert caught.value.cause == "error"
        episode.drop()
        assert await other.close() == {"reward": 1.0}
        await asyncio.gather(*made.leaving)
        assert other.host in made.children and not other.host.live

    with hosts(written(tmp_path, SCOPES, "Server")) as made:
        asyncio.run(main(made))


KILLED = """
import os, signal
from pathlib import Path
starts = Path({starts!r})
starts.write_text(starts.read_text() + "x")
if len(starts.read_text()) <= {times}:
    os.kill(os.getpid(), signal.SIGKILL)
class A:
    def f(self, x: int):
        "F."
"""


def test_a_host_that_is_killed_while_it_starts_is_started_once_more(tmp_path: Path) -> None:
    """Also where the plan asks for its tools. Killed twice, it is the environment's own doing."""
    starts = tmp_path / "starts"
    starts.write_text("")
    spec = written(tmp_path, KILLED.format(starts=str(starts), times=1), "A")
    assert [tool["function"]["name"] for tool in schemas(EnvironmentSettings(spec, None, 200))] == ["f"]
    assert starts.read_text() == "xx"
    starts.write_text("")
    spec = written(tmp_path, KILLED.format(starts=str(starts), times=2), "A")
    with pytest.raises(ConfigError, match=r"its process ends during the import \(killed by SIGKILL\)"):
        schemas(EnvironmentSettings(spec, None, 200))
    assert starts.read_text() == "xx"


def test_what_a_host_has_started_ends_with_the_pool_also_if_the_host_ended_first(tmp_path: Path) -> None:
    source = """
        import subprocess

        class Service:
            def begin(self, command: str) -> int:
                "Begin."
                return subprocess.Popen(command.split()).pid
    """

    async def main(made: EnvironmentPool) -> int:
        first = await opened(made)
        begun = await first.step(call("begin", command="sleep 1000"))
        (host,) = made.children
        os.kill(host.process.pid, signal.SIGKILL)
        while not host.ended:
            await asyncio.sleep(0.01)
        await opened(made)  # by a new host
        return int(begun.messages[0]["content"])

    with hosts(written(tmp_path, source, "Service")) as made:
        service = asyncio.run(main(made))
    assert gone(service)


def gone(pid: int) -> bool:
    """Wait until a process has ended; whoever adopted it may not have collected it yet."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_step_after_the_death_of_a_host_that_forked_is_a_crash(adder: str) -> None:
    async def main(made: EnvironmentPool) -> None:
        episode = await opened(made)
        await episode.step(call("fail", how="leave"))
        (host,) = made.children
        os.kill(host.process.pid, signal.SIGKILL)
        await asyncio.to_thread(host.reader.join, 20)  # the step begins after the death was noticed
        with pytest.raises(EnvironmentFailed, match="ended its process: killed by SIGKILL"):
            await asyncio.wait_for(episode.step(call("add", a=1)), 20)

    with hosts(adder) as made:
        asyncio.run(main(made))


def test_a_host_ends_with_whoever_started_it(adder: str) -> None:
    program = f"""
        import asyncio, os, signal
        from slipstream.environments.pool import EnvironmentPool, EnvironmentSettings
        made = EnvironmentPool(EnvironmentSettings({adder!r}, None, 200))
        made.schemas()
        print(made.children[0].process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    import subprocess
    import sys

    run = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, timeout=60)
    assert run.returncode == -signal.SIGKILL
    pid, until = int(run.stdout), time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:  # noqa: PTH110
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_what_only_the_users_file_knows_stays_there(tmp_path: Path) -> None:
    """Its classes cannot be had in the sampler's process: of a text that is one of them the text goes on."""
    source = """
        class Said(str):
            pass

        class Shop:
            def price(self, item: str) -> str:
                '''The price.'''
                return Said("7")

        class Talks:
            tools = [{"type": Said("function"), "function": {"name": "price"}}]

            def step(self, reply):
                return [{"role": Said("tool"), "content": Said("8"), "more": object() if reply.text else Said("x")}]
    """
    spec = written(tmp_path, source, "Shop")

    async def main(made: EnvironmentPool, *replies: Reply) -> list[Any]:
        episodes = [await opened(made) for _ in replies]
        asked = [episode.step(reply) for episode, reply in zip(episodes, replies, strict=True)]
        return await asyncio.gather(*asked, return_exceptions=True)

    with hosts(spec) as made:
        (step,) = asyncio.run(main(made, call("price", item="a")))
        assert [type(value) for value in step.messages[0].values()] == [str] * 3
    with hosts(spec.replace(":Shop", ":Talks")) as made:
        assert made.schemas() == [{"type": "function", "function": {"name": "price"}}]
        odd, step = asyncio.run(main(made, Reply("odd"), Reply("")))
        assert step.messages == ({"role": "tool", "content": "8", "more": "x"},)
        assert str(odd).startswith("step raised TypeError: Object of type object is not JSON serializable")


def test_a_host_that_cannot_start_again_leaves_nothing_open(adder: str) -> None:
    async def main(made: EnvironmentPool) -> None:
        await (await opened(made)).close()
        Path(adder.partition(":")[0]).unlink()
        for _ in range(2):
            made.children[0].kill()
            made.children[0].process.wait()
            with pytest.raises(EnvironmentFailed, match="there is no file"):
                await opened(made)
            await asyncio.gather(*made.leaving)
            assert not made.retired

    with hosts(adder) as made:
        asyncio.run(main(made))
