"""MCP servers of the official SDK as environments: over stdio and HTTP, for each episode or shared, and lost ones."""

import asyncio
import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dictation import PYTHON, TOKENIZER

from runs import check_calls, check_laws, trained
from slipstream.environments import Call, Reply, Step
from slipstream.environments.pool import EnvironmentPool, EnvironmentSettings, schemas
from slipstream.errors import ConfigError, EnvironmentFailed
from slipstream.run_dir.writing import read_lines

pytestmark = pytest.mark.usefixtures("packages")
SERVER = """
import os, sys, time
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("shop", log_level="ERROR")
sold = []


@server.tool()
def sell(item: str, count: int = 1) -> str:
    "Sell an item."
    if item == "ghost":
        raise ValueError("no ghosts")
    if item == "door":
        os._exit(3)
    if item == "bed":
        time.sleep(1000)
    sold.append(item)
    return f"{len(sold)} sold, last {count} {item}"


@server.tool(name="look-at")
def look(item: str) -> Image:
    return Image(data=b"1", format="png")


if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run()
"""
GIVEN = {"id": "a", "prompt": "?", "ground_truth": 4, "meta": {}, "data_source": "x", "seed": 5}
ROW = {"prompt": [{"role": "user", "content": "Sell a cup and a pen."}], "answer": "Sold."}


@pytest.fixture
def server(tmp_path: Path) -> Path:
    (tmp_path / "server.py").write_text(SERVER)
    return tmp_path / "server.py"


@pytest.fixture
def address(server: Path) -> Iterator[str]:
    """Run a server for HTTP, which is started again whenever it ends."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    again = f"import subprocess\nwhile True: subprocess.run([{str(PYTHON)!r}, {str(server)!r}, '{port}'])"
    process = subprocess.Popen([PYTHON, "-c", again], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=True)
        process.wait()


def wait_for(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server does not start")


def sells(*items: Any) -> list[Reply]:
    given = [item if isinstance(item, dict) else {"item": item} for item in items]
    return [Reply("", (Call("sell", each),)) for each in given]


async def play(hosts: EnvironmentPool, *replies: Reply) -> list[Step | str]:
    """Return the steps of an episode, and at last its failure, if there is one."""
    episode, found = hosts.place(), list[Step | str]()
    await episode.ready()
    try:
        assert await episode.start(GIVEN) == ()
        for reply in replies:
            found.append(await episode.step(reply))
        assert await episode.close() == {}
    except EnvironmentFailed as error:
        episode.drop()
        found.append(str(error))
    return found


def played(spec: str, *episodes: list[Reply], at_once: bool = True) -> list[list[str]]:
    """Return what students read in episodes on one process."""

    async def main() -> list[list[Step | str]]:
        if at_once:
            return list(await asyncio.gather(*(play(hosts, *replies) for replies in episodes)))
        return [await play(hosts, *replies) for replies in episodes]

    hosts = EnvironmentPool(EnvironmentSettings(spec, None, 200))
    try:
        found = asyncio.run(main())
    finally:
        hosts.close()
    return [[s if isinstance(s, str) else "\n".join(m["content"] for m in s.messages) for s in each] for each in found]


def test_tools_have_the_schemas_of_the_server(server: Path) -> None:
    sell, look = schemas(EnvironmentSettings(f"mcp:{PYTHON} {server}", None, 200))
    assert sell["type"] == "function" and sell["function"]["description"] == "Sell an item."
    assert look["function"]["name"] == "look-at"
    assert sell["function"]["parameters"] == {
        "type": "object",
        "properties": {"item": {"type": "string"}, "count": {"default": 1, "type": "integer"}},
        "required": ["item"],
    }


def test_every_episode_has_its_own_server_or_all_share_one(server: Path, address: str) -> None:
    apart = played(f"mcp:{PYTHON} {server}", sells("cup", "pen"), sells("hat"))
    assert apart == [["1 sold, last 1 cup", "2 sold, last 1 pen"], ["1 sold, last 1 hat"]]
    for spec in (f"mcp_shared:{PYTHON} {server}", f"mcp:{address}"):
        shared = played(spec, sells("cup"), sells("cup", "cup"), sells("cup"))
        assert sorted(text for each in shared for text in each) == [f"{n} sold, last 1 cup" for n in (1, 2, 3, 4)]


def test_the_student_reads_its_mistakes_and_those_of_tools(server: Path) -> None:
    wrong = [Reply("", (Call("buy", {}),)), *sells({}, {"item": 3}, {"item": "cup", "count": "many"}, "ghost", "cup")]
    (found,) = played(f"mcp:{PYTHON} {server}", wrong)
    found[4] = found[4].removesuffix(": no ghosts")  # newer versions of the SDK tell the student no more than the tool
    assert found == [
        "error: there is no tool 'buy'; there are sell, look-at",
        "error: sell: arguments: 'item' is a required property",
        "error: sell: item: 3 is not of type 'string'",
        "error: sell: count: 'many' is not of type 'integer'",
        "error: Error executing tool sell",
        "1 sold, last 1 cup",
    ]


def test_a_lost_server_fails_the_episode_and_the_next_one_connects_again(server: Path, address: str) -> None:
    lost = "the server was lost in a call of sell: MCPError: Connection closed"
    for spec in (f"mcp:{PYTHON} {server}", f"mcp_shared:{PYTHON} {server}", f"mcp:{address}"):
        found = played(spec, sells("cup", "door", "pen"), sells("hat"), at_once=False)
        assert found == [["1 sold, last 1 cup", lost], ["1 sold, last 1 hat"]], spec


def test_an_image_is_refused_by_the_name_of_its_tool(server: Path) -> None:
    (found,) = played(f"mcp:{PYTHON} {server}", [Reply("", (Call("look-at", {"item": "cup"}),))])
    assert found == ["the tool look-at returned image, and a student reads only text"]


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("mcp:no-such-program x", "there is no program 'no-such-program' here, or it cannot be run"),
        (f"mcp:{PYTHON} nowhere.py", "cannot connect: MCPError: Connection closed .*can't open file .*nowhere.py"),
        ('mcp:python "x', "the command cannot be split into words: No closing quotation"),
        ("mcp:sleep 0", "cannot connect: MCPError: Connection closed"),
        ("mcp:http://127.0.0.1:1/mcp", "cannot connect: ConnectError: All connection attempts failed"),
    ],
)
def test_a_server_that_is_not_there_is_one_line(spec: str, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^environment.use = '{re.escape(spec)}': {line}") as caught:
        schemas(EnvironmentSettings(spec, None, 200))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["mcp", "mcp_shared"])
def test_a_run_learns_from_calls_of_a_server(
    kind: str, server: Path, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(item: str) -> str:
        return f"<tool_call>\n{json.dumps({'name': 'sell', 'arguments': {'item': item}})}\n</tool_call>"

    said = {0: [call("cup"), call("pen"), "Sold."], 1: [call("ghost"), "None."]}
    environment = {"use": f"{kind}:{PYTHON} {server}"}
    run = trained(monkeypatch, tmp_path, models, [ROW], environment, lambda p: said[p.first], task={"reward": "exact"})
    check_calls(run)
    assert len(run.rollouts) == 4
    for update in range(2):
        sold, failed = run.rollouts[2 * update : 2 * update + 2]
        check_laws(sold, said[0])
        check_laws(failed, said[1])
        assert sold.versions.max() == update and failed.outcome["failed"] == 1
        seen = str(TOKENIZER.decode(sold.tokens[~sold.loss_mask]))
        assert ("1 sold, last 1 cup" in seen and "2 sold, last 1 pen" in seen) or kind == "mcp_shared"
        assert "sold, last 1 pen" in seen
    for line in run.lines:
        assert line["reward/exact"] == 0.5 and line["grad_norm"] > 0 and line["failed_samples"] == 0
        assert abs(line["distill/ratio_max"] - 1) < 1e-5


def test_an_episode_whose_tool_hangs_is_counted_and_named(
    server: Path, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>\n{"name": "sell", "arguments": {"item": "bed"}}\n</tool_call>'
    said = {0: [call, "Sold."], 1: ["Sold."]}
    environment = {"use": f"mcp:{PYTHON} {server}", "step_seconds": 5.0}
    run = trained(monkeypatch, tmp_path, models, [ROW], environment, lambda p: said[p.first], task={"reward": "exact"})
    for update, line in enumerate(run.lines, 1):  # both count from the start of the run
        assert line["failed_samples"] == line["failed/timeout"] == update and line["reward/exact"] == 1
    (cause,) = {cause for line in read_lines(run.path / "run" / "ledger.jsonl") for cause in line["causes"]}
    assert cause == "the environment took more than 5 s to step"
