"""A taskset of verifiers, unmodified, with its harness and rewards: its tasks are the rows, and a run learns."""

import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from dictation import PYTHON, ROOT, TOKENIZER
from pydantic import ValidationError

from runs import check_calls, check_laws, trained
from slipstream.config.environment import EnvironmentConfig
from slipstream.data.prompts import load_rows
from slipstream.errors import DataError

TASKSET = '''
import sys

import verifiers.v1 as vf

__all__ = ["Sums", "Direct"]
ASKS = """
import sys
from openai import OpenAI

url, key, model, *asked = sys.argv[1:]
said = []
for each in asked:
    said.append({"role": "user", "content": each})
    answer = OpenAI(base_url=url, api_key=key, max_retries=0).chat.completions.create(model=model, messages=said)
    said.append({"role": "assistant", "content": answer.choices[0].message.content})
"""


class Direct(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more):
        asked = [self.resolve_text_prompt(data)[1], "Are you sure?"]
        return await runtime.run_program([sys.executable, "-c", ASKS, endpoint, secret, ctx.model, *asked], {})


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data, vf.State]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.assistant_messages[-1].content == self.data.answer)

    @vf.reward
    async def brief(self, trace) -> float:
        return BRIEF


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        return [Sum(Data(prompt=f"What is {n} + 4?", answer=str(n + 4)), self.config.task) for n in range(3, 8)]
'''


@pytest.fixture(autouse=True)
def taskset(tmp_path: Path, packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "0.5")
    monkeypatch.chdir(tmp_path)


def write(place: Path, brief: str) -> None:
    (place / "sums_taskset.py").write_text(TASKSET.replace("BRIEF", brief))


def test_tasks_are_rows_and_the_environment_is_a_gateway_with_a_command() -> None:
    rows = load_rows("verifiers:sums_taskset")
    assert [row.id for row in rows] == [f"sums_taskset:{n}" for n in range(5)]
    assert rows[1].prompt == [{"role": "user", "content": "What is 4 + 4?"}] and rows[1].ground_truth == "8"
    environment = EnvironmentConfig(use="verifiers:sums_taskset+null", gateway={"at_once": 2})
    assert environment.use is None and environment.gateway is not None and environment.gateway.at_once == 2
    assert environment.gateway.command == "{python} -m slipstream.agents.verifiers sums_taskset+null"
    assert EnvironmentConfig(**environment.model_dump(exclude_unset=True)) == environment
    with pytest.raises(
        ValidationError, match="sandbox does nothing: 'verifiers:a' runs no code of the student; drop it"
    ):
        EnvironmentConfig(use="verifiers:a", sandbox="bubblewrap")
    with pytest.raises(DataError, match=r"verifiers:no_taskset: ModuleNotFoundError: .*no_taskset"):
        load_rows("verifiers:no_taskset")


def test_a_run_learns_from_a_taskset(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {0: ["seven.", "7"], 1: ["7", "eight."]}
    environment = {"use": "verifiers:sums_taskset"}
    data = {"train": "verifiers:sums_taskset", "limit": 1}
    run = trained(monkeypatch, tmp_path, models, [], environment, lambda p: said[p.first], data=data)
    check_calls(run)
    assert len(run.rollouts) == 4
    for number, rollout in enumerate(run.rollouts):
        check_laws(rollout, said[rollout.episode])
        right = float(rollout.episode == 0)
        assert rollout.outcome["reward"] == 2 * right + 0.5 and rollout.outcome["reward/right"] == 2 * right
        assert rollout.outcome["reward/brief"] == 0.5 and rollout.versions.max() == number // 2
        assert "Are you sure?" in str(TOKENIZER.decode(rollout.tokens[~rollout.loss_mask]))
    for line in run.lines:
        assert line["reward/environment"] == 1.5 and line["grad_norm"] > 0 and line["failed_samples"] == 0
        assert abs(line["distill/ratio_max"] - 1) < 1e-5


class Answers(BaseHTTPRequestHandler):
    """Endpoint whose model says 7; at `/full` the second turn of an episode exceeds a limit."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        full = self.path.startswith("/full") and b"Are you sure" in asked
        said = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "7"}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "a", "object": "chat.completion", "created": 0, "model": "student"}
        fault = {"error": {"message": "the episode is full", "code": "context_length_exceeded", "type": "invalid"}}
        body = json.dumps(fault if full else {**head, "choices": [said], "usage": usage}).encode()
        self.send_response(400 if full else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def agent_on(name: str, meta: dict[str, Any], url: str, place: Path) -> subprocess.CompletedProcess[str]:
    """Run the agent as a gateway does."""
    (place / "task.json").write_text(json.dumps({"id": "a", "meta": meta}))
    told = {"SLIPSTREAM_TASK": str(place / "task.json"), "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
    env = {"PATH": "/usr/bin:/bin", "HOME": str(place), "PYTHONPATH": f"{place}:{ROOT / 'src'}", **told}
    command = [PYTHON, "-m", "slipstream.agents.verifiers", name]
    return subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, timeout=100)


def test_the_agent_writes_the_rewards_of_the_task_or_ends_with_one_line(tmp_path: Path) -> None:
    task = {"verifiers": 1}
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        assert agent_on("sums_taskset", task, url, tmp_path).returncode == 0
        assert json.loads((tmp_path / "reward.json").read_text()) == {"right": 0.0, "brief": 0.5, "reward": 0.5}
        assert agent_on("sums_taskset", task, url.replace("/v1", "/full/v1"), tmp_path).returncode == 0
        assert json.loads((tmp_path / "reward.json").read_text()) == {"reward": 0.0}
        write(tmp_path, "1 / 0")
        broken = agent_on("sums_taskset", task, url, tmp_path)
        server.shutdown()
    dead = agent_on("sums_taskset", task, "http://127.0.0.1:1/v1", tmp_path)
    forging = agent_on("sums_taskset+bash", task, "http://127.0.0.1:1/v1", tmp_path)
    other = agent_on("sums_taskset", {}, "http://127.0.0.1:1/v1", tmp_path)
    for done, line in (
        (broken, "division by zero"),
        (dead, "ProviderError: All connection attempts failed"),
        (forging, "the harness bash runs the student's code beside the rewards, which the code can forge"),
        (other, 'the row is no task of verifiers: write data.train = "verifiers:sums_taskset"'),
    ):
        assert done.returncode == 1 and line in done.stderr.strip().splitlines()[-1], done.stderr
