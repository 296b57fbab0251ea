"""The official MCP SDK as an environment: a server for each episode, whose session is open from start to close."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from dictation import PYTHON, ROOT

SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")
sold = []


@server.tool()
def sell(item: str) -> str:
    "Sell an item."
    sold.append(item)
    return f"{len(sold)} sold, last {item}"


server.run()
"""
SHOP = """
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client


@asynccontextmanager
async def connected():
    server = StdioServerParameters(command=sys.executable, args=[str(Path(__file__).with_name("server.py"))])
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        yield session


class Shop:
    @classmethod
    async def tools(cls):
        async with connected() as session:
            found = (await session.list_tools()).tools
        return [{"type": "function", "function": {
            "name": tool.name, "description": tool.description, "parameters": tool.input_schema,
        }} for tool in found]

    async def start(self):
        self.stack = AsyncExitStack()
        self.session = await self.stack.enter_async_context(connected())
        return "The shop is open."

    async def step(self, reply):
        answers = [await self.session.call_tool(call.name, call.arguments) for call in reply.calls]
        return [{"role": "tool", "content": answer.content[0].text} for answer in answers] or None

    async def close(self):
        await self.stack.aclose()
        return 1.0
"""
PLAY = """
import asyncio, json, sys
from slipstream.environments import Call, Reply
from slipstream.environments.hosts import Hosts, HostSettings

GIVEN = {"id": "a", "prompt": "?", "ground_truth": 4, "meta": {}, "data_source": "x", "seed": 5}


async def played(hosts, item):
    episode = hosts.place()
    await episode.ready()
    said = [(await episode.start(GIVEN))[0]["content"]]
    for _ in range(2):
        said.append((await episode.step(Reply("", (Call("sell", {"item": item}),)))).messages[0]["content"])
    return said, await episode.close()


async def main():
    hosts = Hosts(HostSettings(sys.argv[1], None, 200))
    try:
        names = [schema["function"]["name"] for schema in hosts.ready()]
        return names, await asyncio.gather(*(played(hosts, item) for item in "abc"))
    finally:
        hosts.close()


print(json.dumps(asyncio.run(main())))
"""


def test_every_episode_has_its_own_server_from_start_to_close(tmp_path: Path) -> None:
    for name, source in (("server.py", SERVER), ("shop.py", SHOP), ("play.py", PLAY)):
        (tmp_path / name).write_text(source, "utf-8")
    argv = [str(PYTHON), str(tmp_path / "play.py"), f"{tmp_path / 'shop.py'}:Shop"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    episodes = [[["The shop is open.", f"1 sold, last {n}", f"2 sold, last {n}"], {"reward": 1.0}] for n in "abc"]
    assert done.stdout.strip().splitlines()[-1] == repr([["sell"], episodes]).replace("'", '"')
