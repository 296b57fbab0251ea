"""Agents that are started here: what they are given, how they may end, and what is learned from them."""

import asyncio
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import slipstream
from slipstream.cli import main
from slipstream.config.file import load, parse
from slipstream.environments.episodes import Limits
from slipstream.environments.gateway.agent_processes import Agent, Programs, fill
from slipstream.environments.gateway.agents import Agents
from slipstream.environments.gateway.server import Server
from slipstream.errors import ConfigError
from slipstream.plan.checks import CheckFailed
from slipstream.plan.engine_plans import EnvironmentPlan, GatewayPlan
from slipstream.plan.environment import check_agent
from slipstream.plan.plan import fast_checks
from slipstream.protocols import GradingSampler, Sampling
from slipstream.records import Handle, Prompt, handed_over, unfinished
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import announce_gateways
from support.gateways import VOCABULARY, Babble, post, renderer
from support.sandboxes import NO_BUBBLEWRAP

AGENT = """
import json, os, socket, subprocess, sys, time, urllib.error, urllib.request

def ask(messages, **more):
    body = json.dumps({"messages": messages, **more}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]

def talk(turns):
    messages = [{"role": "user", "content": task["prompt"]}]
    for turn in range(turns):
        messages += [ask(messages), {"role": "user", "content": f"seen {turn}"}]
    return messages

task = json.load(open("task.json"))
how = task["meta"].get("how", "well")
here = sorted(os.listdir())
print("begun", flush=True)
match how:
    case "well":
        talk(3)
        ask([{"role": "user", "content": "You are another."}])
        assert sys.argv[1] == open(sys.argv[2]).read() == "And?" and sys.argv[3] == os.environ["OPENAI_BASE_URL"]
        assert here == ["bug.py", "task.json"] and "ground_truth" not in task and "SECRET_KEY" not in os.environ
        json.dump({"reward": 0.5, "steps": 3}, open("reward.json", "w"))
    case "silent":
        pass
    case "fails":
        talk(1)
        sys.exit("it went wrong\\nno such thing")
    case "dies":
        talk(1)
        os.kill(os.getpid(), 9)
    case "limit":
        try:
            talk(100)
        except urllib.error.HTTPError as error:
            sys.exit(json.load(error)["error"]["code"])
    case "hangs":
        talk(1)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", task["meta"]["mark"]])
        time.sleep(600)
    case "floods":
        talk(1)
        for _ in range(200):
            print("x" * 100_000)
    case "lies":
        talk(1)
        json.dump("much", open("reward.json", "w"))
    case "breaks out":
        talk(2)
        found = []
        for file in (task["meta"]["secret"], "/etc/shadow", "/root/.bashrc", "/proc/1/environ"):
            try:
                found.append(open(file).read() and file)
            except OSError:
                pass
        for file in ("/usr/x", "/etc/x", "/x", "/run/x", sys.prefix + "/x"):
            try:
                found.append(open(file, "w") and file)
            except OSError:
                pass
        for at in (("127.0.0.1", task["meta"]["port"]), ("192.0.2.1", 80)):
            try:
                found.append(socket.create_connection(at, timeout=3) and at)
            except OSError:
                pass
        status = open("/proc/self/status").read()
        found += [line for line in status.split("\\n") if line.startswith("Cap") and int(line.split()[1], 16)]
        found += ["root"] * (os.getuid() == 0) + ["pids"] * (len(os.listdir("/proc")) > 200)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", task["meta"]["mark"]])
        print(found, file=sys.stderr)
        json.dump({"reward": float(not found)}, open("reward.json", "w"))
        sys.exit(bool(found))
    case "links":
        talk(1)
        os.symlink("/dev/zero", "reward.json")
"""
LIMITS = Limits(turns=5, calls=1000, turn_tokens=None, seconds=60.0, step_seconds=10.0)
RENDERER = renderer("qwen")
SAMPLING = Sampling(max_tokens=4000, group=2)


def asked(how: str = "well", number: int = 0, **meta: Any) -> Prompt:
    tokens = RENDERER.open([{"role": "user", "content": "And?"}])
    meta = {"how": how, **meta}
    return Prompt(id=how, number=number, tokens=tokens, seed=number, ground_truth="secret", meta=meta, asked="And?")


@contextmanager
def agents(
    path: Path, policy: Any = None, *, verify: str = "", walled: bool = False, at_once: int = 4, **limits: Any
) -> Iterator[Agents]:
    workspace = path / "given"
    workspace.mkdir()
    (workspace / "bug.py").write_text("bug")
    (path / "agent.py").write_text(AGENT)
    command = (sys.executable, "-I", "-S", str(path / "agent.py"), "{prompt}", "{prompt_file}", "{base_url}")
    checks = None
    if verify:
        (path / "verify.py").write_text(dedent(verify))
        checks = (sys.executable, "-I", "-S", str(path / "verify.py"))
    server = Server("student", say=lambda line: None, walled=walled)
    agent = Agent(command=command, workspace=str(workspace), verify=checks, walled=walled)
    made = Agents(
        policy or Babble(),
        RENDERER,
        Programs(agent, socket=server.walled_at),
        server,
        replace(LIMITS, **limits),
        vocabulary=VOCABULARY,
        at_once=at_once,
    )
    try:
        yield made
    finally:
        made.close()


def played(made: Agents, *prompts: Prompt, sampling: Sampling = SAMPLING) -> list[list[Handle]]:
    async def work() -> list[list[Handle]]:
        return await asyncio.gather(*(made.generate(prompt, sampling) for prompt in prompts))

    return asyncio.run(work())


def left(mark: str) -> list[str]:
    """Processes whose command has this mark."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in each.read_bytes() and int(each.parent.name) != os.getpid():
                found.append(each.parent.name)
        except OSError:
            pass
    return found


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_an_agent_and_its_subagent_are_two_lineages_of_one_episode(tmp_path: Path) -> None:
    with agents(tmp_path, policy := Babble()) as made:
        (group,) = played(made, asked())
        assert [handle.header.index for handle in group] == [0, 1, 2, 3]
        assert [handle.body.branch for handle in group] == [0, 0, 1, 1]
        assert [handle.header.episode for handle in group] == [0, 1, 0, 1]
        for handle in group:
            outcome = handle.header.outcome
            assert handle.header.finish == "eos" and outcome["turns"] == 4 and outcome["branches"] == 2
            assert outcome["reward"] == 0.5 and outcome["reward/steps"] == 3 and outcome["failures"] == 0
        assert sum(handle.header.trained_tokens for handle in group) == policy.drawn
    assert policy.closed and not made.server.sessions


def test_what_an_agent_is_told_and_what_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "of ours")
    told = """
        import json, os, sys
        task = json.load(open(os.environ["SLIPSTREAM_TASK"]))
        work = os.environ["SLIPSTREAM_WORKSPACE"]
        seen = json.load(open(work + "/task.json"))
        assert task["ground_truth"] == "secret" and "ground_truth" not in seen
        assert task["meta"]["info"] == {"gold": "secret", "level": 2} and seen["meta"]["info"] == {"level": 2}
        assert open(work + "/bug.py").read() == "bug"
        assert "SECRET_KEY" not in os.environ and os.environ["HOME"] != os.path.expanduser("~root")
        json.dump(1, open(os.environ["SLIPSTREAM_VERDICT"], "w"))
    """
    with agents(tmp_path, verify=told) as made:
        prompt = replace(asked(info={"gold": "secret", "level": 2}), hidden=["info.gold", "solution"])
        (group,) = played(made, prompt)
        assert {handle.header.outcome["reward"] for handle in group} == {1.0}, group[0].header.cause
    assert [each.name for each in (tmp_path / "given").iterdir()] == ["bug.py"]
    assert fill("a {b} {c} {b}", {"b": "{c}", "c": "d"}) == "a {c} d {c}"


FAILS = {
    "silent": ("error", "failed/error", "the agent got no answer: it ended before"),
    "fails": ("error", "failed/error", "the agent failed: exit status 1: no such thing"),
    "lies": ("error", "failed/error", "reward.json: returned str 'much', which is not a number"),
    "links": ("error", "failed/error", "reward.json: [Errno 40] Too many levels of symbolic links"),
}


def test_what_fails_is_counted_and_left_out_and_nobody_else_is(tmp_path: Path) -> None:
    prompts = [asked(how, n) for n, how in enumerate([*FAILS, "floods", "limit"])]
    with agents(tmp_path, at_once=8) as made:
        *failed, floods, limit = played(made, *prompts, sampling=replace(SAMPLING, group=1))
    for (finish, counted, cause), (handle,) in zip(FAILS.values(), failed, strict=True):
        assert handle.header.finish == finish and handle.body is None
        assert handle.header.cause.startswith(cause)
        assert handle.header.outcome == {counted: 1.0, "failures": 3.0}
    assert [handle.header.finish for handle in floods] == ["eos"]
    assert [(handle.header.finish, handle.header.outcome["turns"]) for handle in limit] == [("turns", 5.0)]


def test_time_ends_an_agent_with_all_that_it_has_started_and_what_it_said_is_learned_from(tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}"
    with agents(tmp_path, seconds=6) as made:
        (group,) = played(made, asked("hangs", mark=mark))
        assert [handle.header.finish for handle in group] == ["time", "time"]
        assert all(handle.header.outcome["turns"] == 1 for handle in group)
        assert not left(mark)


def test_the_work_of_an_agent_that_ran_out_of_time_is_verified(tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}-v"
    judge = "import os; open(os.environ['SLIPSTREAM_VERDICT'], 'w').write('1')"
    with agents(tmp_path, seconds=6, verify=judge) as made:
        (group,) = played(made, asked("hangs", mark=mark))
        assert [handle.header.finish for handle in group] == ["time", "time"]
        assert [handle.header.outcome["reward"] for handle in group] == [1.0, 1.0] and not left(mark)


@pytest.mark.parametrize("how", ["fails", "dies"])
def test_an_agent_with_a_judge_that_fails_after_a_turn_is_judged_at_once(tmp_path: Path, how: str) -> None:
    """Programs of the student can make its agent fail: a second try would be a way to leave out bad episodes."""
    judge = "import os; open(os.environ['SLIPSTREAM_VERDICT'], 'w').write('0')"
    with agents(tmp_path, policy := Babble(), verify=judge) as made:
        ((handle,),) = played(made, asked(how), sampling=replace(SAMPLING, group=1))
        outcome = handle.header.outcome
        assert handle.header.finish == "eos" and outcome["reward"] == 0.0
        assert outcome["crashed"] == 1.0 and outcome["failures"] == 0.0
        assert handle.header.trained_tokens == policy.drawn > 0


def test_an_agent_with_a_judge_that_never_asked_is_tried_again(tmp_path: Path) -> None:
    with agents(tmp_path, verify="raise AssertionError") as made:
        ((handle,),) = played(made, asked("silent"), sampling=replace(SAMPLING, group=1))
        assert handle.header.outcome == {"failed/error": 1.0, "failures": 3.0}


@pytest.mark.parametrize("exits", [0, 1, 7])
def test_the_exit_status_of_a_judge_is_no_verdict(tmp_path: Path, exits: int) -> None:
    with agents(tmp_path, verify=f"raise SystemExit({exits})") as made:
        (group,) = played(made, asked(), sampling=replace(SAMPLING, group=1))
        says = f"exit status {exits}" if exits else "its verdict is missing: write rewards as JSON into the file"
        assert group[0].header.cause.startswith(f"environment.gateway.verify: {says}")
        assert group[0].header.outcome == {"failed/error": 1.0, "failures": 3.0}


def test_what_verifies_and_is_killed_or_hangs_is_no_reward_of_0(tmp_path: Path) -> None:
    dies = "import os, sys; (print('so'), sys.stdout.flush()); os.kill(os.getpid(), 9)"
    with agents(tmp_path, verify=dies) as made:
        ((handle,),) = played(made, asked(), sampling=replace(SAMPLING, group=1))
        assert handle.header.cause == "environment.gateway.verify: killed by SIGKILL: so"
        assert handle.header.outcome["failed/crash"] == 1


def test_who_cancels_ends_agents_and_what_is_handed_over_keeps_what_is_complete(tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}-c"

    async def work(made: Agents) -> None:
        for ends in ("cancel", "release"):
            call = asyncio.create_task(made.generate(asked("hangs", mark=mark), SAMPLING))
            until = time.monotonic() + 20
            while len(left(mark)) < 2 and time.monotonic() < until:
                await asyncio.sleep(0.05)
            if ends == "cancel":
                call.cancel()
                await asyncio.wait([call])
            else:
                await made.release([0])
                assert unfinished(await call) and len(call.result()) == len(left(mark)) == 2
                call = asyncio.create_task(made.generate(asked("hangs", mark=mark), SAMPLING))  # anew
                await asyncio.sleep(0)
                await asyncio.sleep(0.05)
                call.cancel()
                await asyncio.wait([call])
            assert not left(mark) and not made.server.sessions and not made.playing
        whole = await made.generate(asked(), SAMPLING)
        begun = handed_over(handle.body for handle in whole if handle.body.episode)
        asked_before = len(made.policy.asked)  # type: ignore[attr-defined]
        again = await made.generate(asked(), SAMPLING, begun)
        assert len(made.policy.asked) == asked_before + 4  # type: ignore[attr-defined]
        for one, other in zip(whole, again, strict=True):
            np.testing.assert_array_equal(one.body.tokens, other.body.tokens)
            assert one.header.finish == other.header.finish == "eos"

    with agents(tmp_path, seconds=100) as made:
        asyncio.run(work(made))


def test_an_agent_that_waits_for_an_episode_that_never_comes_back_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.environments.gateway.agents.RELEASED_SECONDS", 1.0)
    mark = f"mark-{os.getpid()}-k"

    async def work(made: Agents) -> None:
        call = asyncio.create_task(made.generate(asked("hangs", mark=mark), SAMPLING))
        while len(left(mark)) < 2:
            await asyncio.sleep(0.05)
        await made.release()
        assert unfinished(await call) and len(made.playing) == 2
        while made.playing or left(mark) or made.server.sessions:
            await asyncio.sleep(0.05)

    with agents(tmp_path, seconds=100) as made:
        asyncio.run(work(made))


def test_an_episode_is_graded_once_by_the_lineage_that_was_the_last(tmp_path: Path) -> None:
    class Lengths:
        async def grade(self, group: Any) -> list[Handle]:
            return [Handle(replace(h.header, rewards={"length": float(h.header.tokens)}), h.body) for h in group]

    async def work(made: Agents) -> list[Handle]:
        return await GradingSampler(made, Lengths()).generate(asked(), SAMPLING)

    with agents(tmp_path) as made:
        group = asyncio.run(work(made))
        last = {handle.header.episode: handle.header.tokens for handle in group}
        assert len(group) == 4 and [h.header.rewards["length"] for h in group] == [
            last[h.header.episode] for h in group
        ]


# --- in a sandbox -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
def test_an_agent_in_a_sandbox_reaches_the_gateway_and_nothing_else(tmp_path: Path) -> None:
    secret, mark = tmp_path / "secret", f"mark-{os.getpid()}-w"
    secret.write_text("of ours")
    with agents(tmp_path, policy := Babble(), walled=True) as made:
        port = made.server.socket.getsockname()[1]
        given = {"secret": str(secret), "port": port, "mark": mark}
        first, second = played(made, asked("breaks out", 0, **given), asked("well", 1))
        assert {handle.header.cause for handle in (*first, *second)} == {""}
        assert {handle.header.outcome["reward"] for handle in first} == {1.0}
        assert {handle.header.outcome["reward"] for handle in second} == {0.5}
        assert len(policy.calls) == 2 * 2 + 2 * 4 and not left(mark)
        place = Path(made.server.walled_at).parent
    assert not place.exists()


@pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
def test_a_judge_is_in_a_sandbox_of_its_own(tmp_path: Path) -> None:
    told = """
        import json, os, sys
        assert json.load(open(os.environ["SLIPSTREAM_TASK"]))["ground_truth"] == "secret" and os.getuid() != 0
        assert [each for each in os.listdir("/tmp") if "slipstream" in each] == [os.environ["HOME"].split("/")[2]]
        assert not os.path.exists("/root/.bashrc")
        json.dump(1, open(os.environ["SLIPSTREAM_VERDICT"], "w"))
    """
    with agents(tmp_path, verify=told, walled=True) as made:
        (group,) = played(made, asked(), sampling=replace(SAMPLING, group=1))
        assert {handle.header.outcome.get("reward") for handle in group} == {1.0}, group[0].header.cause


# --- what is refused before anything starts ---------------------------------------------------------------------------

SECTION = 'student = "x"\n[data]\ntrain = "builtin:table"\n[teachers.main]\nmodel = "x"\n[environment]\n'
WRONG = {
    "neither": ("turns = 3", "needs use, an environment, or [environment.gateway], an agent; one of the two"),
    "both": ('use = "table"\ngateway = {command = "ls"}', "one of the two"),
    "no sandbox": ('gateway = {command = "ls"}', 'write sandbox = "bubblewrap", or "none" if it isolates itself'),
    "calls": ('calls = 3\nsandbox = "none"\ngateway = {command = "ls"}', "calls does nothing with a gateway"),
    "no agent": ("gateway = {at_once = 3}", "write command, or listen for agents that are started elsewhere"),
    "a workspace of others": ('gateway = {listen = "127.0.0.1:1", workspace = "."}', "workspace is for agents that"),
    "a sandbox of others": (
        'sandbox = "none"\ngateway = {listen = "127.0.0.1:1"}',
        "agents are started elsewhere",
    ),
    "everybody": ('gateway = {listen = "0.0.0.0:8008"}', "is no port of this machine"),
    "a port twice": ('gateway = {listen = "127.0.0.1:1"}\n[sampler]\nreplicas = 2', "is one port, of one sampler"),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_do_not_go_together_are_refused_in_one_line(name: str) -> None:
    lines, says = WRONG[name]
    with pytest.raises(ConfigError) as refused:
        parse(tomllib.loads(SECTION + lines))
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"command": ("no-such-program",)}, "environment.gateway.command: there is no program 'no-such-program' here"),
        ({"verify": ("no-such-program",)}, "environment.gateway.verify: there is no program 'no-such-program' here"),
        ({"workspace": "nowhere"}, "environment.gateway.workspace = 'nowhere' is no directory"),
        (
            {"command": ("python3", "agent.py")},
            "environment.gateway.command: 'agent.py' is not in the empty directory in which the agent starts: write "
            "its absolute path, or set environment.gateway.workspace to its directory",
        ),
        ({"command": ("sh", "a.sh"), "workspace": "."}, "'a.sh' is not in the workspace in which the agent starts"),
    ],
)
def test_an_agent_that_is_not_there_is_missed_before_a_run(given: dict[str, Any], says: str) -> None:
    whole = Agent(command=("ls",), workspace=None, verify=None)
    here = str(Path(__file__).parent)
    for command in (
        ("ls",),
        ("sh", "/elsewhere/a.sh"),
        ("sh", "{prompt_file}.sh"),
        ("sh", "{workspace}/test_agents.py"),
    ):
        check_agent(replace(whole, command=command, workspace=here))
    check_agent(whole)
    with pytest.raises(ConfigError, match=says):
        check_agent(replace(whole, **given))


def test_the_server_is_an_extra_that_is_missed_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.plan.facts.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"environment.gateway needs uvicorn: pip install 'slipstream\["):
        fast_checks(load(written(tmp_path)))


def test_a_token_is_written_anew_for_its_owner_alone_and_through_no_link(tmp_path: Path) -> None:
    other, said = tmp_path / "other", list[str]()
    other.write_text("of somebody else's")
    (tmp_path / "gateway.token").symlink_to(other)
    tokens = list[str]()
    names = ("", "shop", "")
    for agent in (None, None, Agent(command=("ls",), workspace=None, verify=None)):
        port = GatewayPlan(agent=agent, at_once=1, host="::1", port=8008, name="student", vocabulary=7)
        limits = Limits(turns=1, calls=1, turn_tokens=None, seconds=1, step_seconds=1)
        made = EnvironmentPlan(wanted=None, gateway=port, processes=1, limits=limits, renderer={})
        announce_gateways({names[len(tokens)]: made}, tmp_path, said.append)
        tokens.append(port.token)
        assert port.token not in repr(port)
    found = tmp_path / "gateway.token"
    assert found.read_text() == f"{tokens[1]}\n" and not found.is_symlink() and found.stat().st_mode & 0o777 == 0o600
    assert other.read_text() == "of somebody else's" and len(set(tokens)) == 3
    assert said == [
        f"agents take episodes{whose} at http://[::1]:8008/sessions with the token {token}, which is also in {found}"
        for whose, token in zip(("", " of shop"), tokens, strict=False)
    ]


def test_a_port_that_is_taken_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"environment.gateway.listen: cannot listen at 127.0.0.1:{port}: "):
            Server("student", port=port)


# --- a run ------------------------------------------------------------------------------------------------------------


PLAYER = """
import json, os, urllib.error, urllib.request

TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
task = json.load(open("task.json"))
messages = task["prompt"]
said = {}
try:
    while "tool_calls" in said or not said:
        body = json.dumps({"messages": messages, "tools": [TOOL], "temperature": 0.3}).encode()
        with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body) as answer:
            said = json.load(answer)["choices"][0]["message"]
        messages.append(said)
        for call in said.get("tool_calls", ()):
            key = json.loads(call["function"]["arguments"]).get("key")
            back = str(task["meta"]["table"].get(key, "none"))
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": "get", "content": back})
except urllib.error.HTTPError as error:
    assert json.load(error)["error"]["code"] == "context_length_exceeded"
with open("answer.txt", "w") as file:
    file.write(said.get("content") or "")
"""
VERIFY = """
import json, os
task = json.load(open(os.environ["SLIPSTREAM_TASK"]))
said = open(os.environ["SLIPSTREAM_WORKSPACE"] + "/answer.txt").read()
right = said.strip() == task["ground_truth"]
json.dump({"reward": float(right), "told": 1.0}, open(os.environ["SLIPSTREAM_VERDICT"], "w"))
"""
RUN = """
student = "builtin:tool_student"
updates = 2
output = "{output}"
[data]
train = "builtin:table"
limit = 8
[environment]
turns = 4
turn_tokens = 40
seconds = 60
sandbox = "none"
[environment.gateway]
command = "{python} -I -S {here}/player.py"
workspace = "{here}/given"
verify = "{python} -I -S {here}/verify.py"
[teachers.main]
model = "builtin:tool_teacher"
[task]
reward = "environment"
[policy]
loss = "vanilla"
[sampler]
max_tokens = 150
group = 2
[learner]
batch_size = 4
lr = 1e-3
[loss]
m = 2
[runtime]
kind = "{runtime}"
device = "cpu"
"""


def written(path: Path, runtime: str = "inline") -> Path:
    (path / "given").mkdir()
    (path / "player.py").write_text(PLAYER)
    (path / "verify.py").write_text(VERIFY)
    config = path / "run.toml"
    config.write_text(RUN.format(output=path / "run", here=path, python=sys.executable, runtime=runtime))
    return config


def test_agents_may_have_the_student_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, found = written(tmp_path), tmp_path / "found.jsonl"
    assert main(["gateway", str(config), "-n", "2", "-o", str(found)]) == 0
    lines = read_lines(found)
    assert {(line["number"], line["episode"]) for line in lines} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for line in lines:
        assert line["rewards"]["environment/told"] == 1 and line["branch"] == 0 and line["cause"] == ""
        assert len(line["tokens"]) == len(line["logp"]) == len(line["turn"]) and sum(line["loss_mask"]) > 0
    assert f"4 episodes, 0 of them failed; 4 lineages are in {found}" in capsys.readouterr().err
    assert main(["gateway", str(config), "-o", str(found)]) == 2
    assert "found.jsonl cannot be written: [Errno 17] File exists" in capsys.readouterr().err


def test_agents_that_come_from_elsewhere_find_episodes_at_the_port_of_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    there = f'listen = "127.0.0.1:{port}"'
    text = re.sub(r"(?s)command =.*?verify = [^\n]*", there, written(tmp_path).read_text()).replace(
        'sandbox = "none"', ""
    )
    (tmp_path / "run.toml").write_text(text)
    found, offers, tokens = tmp_path / "found.jsonl", list[Any](), list[str]()

    def attend() -> None:
        while len(offers) < 4:
            try:
                tokens[:] = [(tmp_path / "gateway.token").read_text().strip()]
                headers = {"authorization": f"Bearer {tokens[0]}"}
                status, offer = post(f"http://127.0.0.1:{port}/sessions", b"", headers=headers)
            except OSError:
                time.sleep(0.1)
                continue
            assert status == 200
            body = {"messages": offer["row"]["prompt"], "max_tokens": 5}
            assert post(f"{offer['base_url']}/chat/completions", body)[0] == 200
            post(f"http://127.0.0.1:{port}/sessions/{offer['id']}/close", {"rewards": 1}, headers=headers)
            offers.append(offer)

    thread = threading.Thread(target=attend)
    thread.start()
    assert main(["gateway", str(tmp_path / "run.toml"), "-n", "2", "-o", str(found)]) == 0
    thread.join()
    assert [line["rewards"] for line in read_lines(found)] == [{"environment": 1.0}] * 4
    assert [len(line["tokens"]) for line in read_lines(found)] == [5] * 4
    said = f"agents take episodes at http://127.0.0.1:{port}/sessions with the token {tokens[0]}"
    assert len(tokens[0]) > 40 and capsys.readouterr().err.count(said) == 1
    assert (tmp_path / "gateway.token").stat().st_mode & 0o777 == 0o600


@pytest.mark.processes
def test_sigterm_ends_a_gateway_that_is_sent_large_requests(tmp_path: Path) -> None:
    """A message of 30 MB is refused as it arrives, so that nothing keeps the process from its signals."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lines = re.sub(r"(?s)command =.*?verify = [^\n]*", f'listen = "127.0.0.1:{port}"', written(tmp_path).read_text())
    (tmp_path / "run.toml").write_text(lines.replace('sandbox = "none"', ""))
    cli = "import sys; from slipstream.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", cli, "gateway", "run.toml", "-n", "1"]
    gateway = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        assert gateway.stderr is not None
        while b"agents take episodes at" not in (line := gateway.stderr.readline()):
            assert line, "it ended"
        token, offer = (tmp_path / "gateway.token").read_text().strip(), None
        while offer is None:
            with suppress(OSError):  # it is still loading
                _, offer = post(f"http://127.0.0.1:{port}/sessions", b"", headers={"authorization": f"Bearer {token}"})
        body = json.dumps({"messages": [{"role": "user", "content": "word " * 6_000_000}]}).encode()
        found = list[int]()

        def ask() -> None:
            with suppress(OSError, http.client.HTTPException):
                found.append(post(f"{offer['base_url']}/chat/completions", body, timeout=60)[0])

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        while not found:
            time.sleep(0.05)
        gateway.terminate()
        assert gateway.wait(60) == 143
        for thread in threads:
            thread.join()
        assert set(found) == {413}
    finally:
        gateway.kill()
        gateway.wait()
        gateway.stderr.close()


@pytest.mark.parametrize("runtime", ["inline", pytest.param("local", marks=pytest.mark.processes)])
def test_a_run_learns_from_what_an_agent_did(tmp_path: Path, runtime: str) -> None:
    slipstream.train(written(tmp_path, runtime))
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "samples" in line]
    assert len(lines) == 2 and all(line["samples"] >= 4 for line in lines)
    assert all(line["episode/turns"] > 1 and line["reward/environment/told"] == 1 for line in lines)
    assert all(line["episode/failures"] == 0 and 0 < line["episode/observed"] < 1 for line in lines)
    assert any(line["grad_norm"] > 0 for line in lines)


BELL = """
class Bell:
    def ring(self) -> str:
        "Ring the bell."
        return "ding"

    def close(self) -> float:
        return 0.5
"""


def beside_an_agent(path: Path, environment: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a run whose rows are answered by an agent and in another environment."""
    tree = tomllib.loads(written(path).read_text())
    tree["environments"] = {"agent": tree.pop("environment"), "other": environment}
    tree["data"] = {"train": {"agent": "builtin:table", "other": "builtin:doors"}, "limit": 16}
    return tree | {"learner": tree["learner"] | {"batch_size": 8}}


def test_an_agent_is_one_of_several_environments_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "bell.py").write_text(BELL)
    bell = {"use": f"{tmp_path}/bell.py:Bell", "turns": 3, "turn_tokens": 30}
    slipstream.train(beside_an_agent(tmp_path, bell), quiet=True)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert len(lines) == 2
    for line in lines:
        assert line["environments/agent/reward/environment/told"] == 1
        assert line["environments/other/reward/environment"] == 0.5
        assert line["environments/agent/turns"] > 1 and 1 <= line["environments/other/turns"] <= 3
        assert line["environments/agent/failed"] == line["environments/other/failed"] == 0


def test_the_other_environment_of_a_run_with_agents_is_tested_before_it(tmp_path: Path) -> None:
    """Doors has no reward of its own: all of its episodes would be dropped, and the agent would be trained alone."""
    tree = beside_an_agent(tmp_path, {"use": "doors", "turns": 3, "turn_tokens": 30})
    with pytest.raises(CheckFailed, match=r"none for \d of \d in environments.other: environment has no reward"):
        slipstream.train(tree, quiet=True)
    slipstream.train(tree, quiet=True, checks=False)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert lines[0]["environments/other/failed"] == 1 and lines[0]["environments/agent/failed"] == 0
