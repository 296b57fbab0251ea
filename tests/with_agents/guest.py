"""verifiers at the gateway: plays episodes as its environments do, and tells their rewards. By .venv-agents' python.

The smallest environment there is: one question, one answer, and a reward for it. Its harness is a program of its own,
which knows no more than an address and asks in plain OpenAI.
"""

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

__all__ = ["Direct"]
ASKS = """
import sys
from openai import OpenAI

url, key, model, *asked = sys.argv[1:]
said = []
for each in asked:
    said.append({"role": "user", "content": each})
    answer = OpenAI(base_url=url, api_key=key).chat.completions.create(model=model, messages=said)
    said.append({"role": "assistant", "content": answer.choices[0].message.content})
"""


class Direct(vf.Harness[vf.HarnessConfig]):
    """Asks its question, and whether that is sure."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **more: Any
    ) -> Any:
        asked = [self.resolve_text_prompt(data)[1], "Are you sure?"]
        return await runtime.run_program([sys.executable, "-c", ASKS, endpoint, secret, ctx.model, *asked], {})


class Data(vf.TaskData):
    answer: str


class Question(vf.Task[Data, vf.State]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content == self.data.answer)


def post(url: str, body: Any, token: Path) -> Any:
    """With the token of the run, which is in a file of its directory."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {token.read_text().strip()}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def next_episode(gateway: str, token: Path) -> Any:
    """Nobody may be there yet, or have one."""
    while True:
        try:
            return post(f"{gateway}/sessions", {}, token)
        except (urllib.error.URLError, ConnectionError, FileNotFoundError):
            time.sleep(0.2)


async def play(episode: Any) -> float:
    row, endpoint = episode["row"], {"base_url": episode["base_url"], "api_key_var": "OPENAI_API_KEY"}
    config = vf.AgentConfig(
        model="student", harness={"id": "guest"}, runtime=vf.SubprocessConfig(), client={"type": "eval", **endpoint}
    )
    data = Data(idx=0, prompt=row["prompt"][-1]["content"], answer=row["ground_truth"])
    trace = await vf.Agent(config).run(Question(data))
    assert trace.ok, trace.errors
    return trace.reward


def main(gateway: str, episodes: int, token: Path) -> None:
    for _ in range(episodes):
        episode = next_episode(gateway, token)
        reward = asyncio.run(play(episode))
        post(f"{gateway}/sessions/{episode['id']}/close", {"rewards": {"right": reward}}, token)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
