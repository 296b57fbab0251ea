"""A real vLLM server as teacher: its answers, held against the same model run here; and what it refuses.

Needs vLLM in this Python, or in the one that VLLM_PYTHON names.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from pydantic import SecretStr
from rich.console import Console

from slipstream.config.file import parse
from slipstream.engines.http.check import Requirements, check
from slipstream.engines.http.client import Endpoint
from slipstream.engines.native.model import load_model
from slipstream.engines.server.api import Served, ServerEndpoint, served_name
from slipstream.engines.server.sampler import CompletionsSampler
from slipstream.errors import ConfigError
from slipstream.models.resolve import model_path
from slipstream.protocols import Sampling
from slipstream.records import Handle, Prompt
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import train
from support.engines import http_scorer, native_sampler, native_scorer
from support.other_spelling import permuted

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if find_spec("vllm") else None)
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="needs vLLM here, or VLLM_PYTHON, a Python that has it"),
    pytest.mark.timeout(600),
]
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
KEY, CONTEXT, MAX_LOGPROBS, STARTS = "sk-of-this-test", 128, 10, 300.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert PYTHON is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model_path("builtin:teacher")]
    command += ["--served-model-name", "teacher", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", str(CONTEXT), "--max-logprobs", str(MAX_LOGPROBS)]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with log.open("w") as out:
        environment = os.environ | SETTINGS | {"VLLM_API_KEY": KEY}
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            wait_for(process, port, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


def wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + STARTS
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            if httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.5)


def endpoint(url: str, **changes: Any) -> Endpoint:
    return Endpoint(**{"teacher": "main", "url": url, "model": "teacher", "key": SecretStr(KEY)} | changes)


async def rolled() -> list[list[Handle]]:
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(id=f"p{i}", number=i, tokens=rng.integers(3, 39, 3 + i).astype(np.int32), seed=i) for i in range(5)
    ]
    sampler = native_sampler(load_model("builtin:student", dtype="float32", device="cpu"), slots=16, stop_ids={1})
    groups = [await sampler.generate(prompt, Sampling(max_tokens=30, group=2)) for prompt in prompts]
    sampler.close()
    return groups


@pytest.mark.parametrize("cache, k", [("sampled", 0), ("teacher_topk", 1), ("teacher_topk", MAX_LOGPROBS)])
def test_vllm_scores_as_the_model_does_here(cache: Any, k: int, server: str) -> None:
    async def work() -> list[list[Handle]]:
        groups = await rolled()
        lm = load_model("builtin:teacher", dtype="float32", device="cpu")
        native = native_scorer(lm, cache=cache, k=max(k, 1), name="main")
        remote = http_scorer(endpoint(server), k=k)
        here = [handle for group in groups for handle in await native.score(group)]
        there = await asyncio.gather(*[remote.score(group) for group in groups])
        native.close()
        return [here, [handle for group in there for handle in group]]

    for a, b in zip(*asyncio.run(work()), strict=True):
        np.testing.assert_allclose(a.body.teacher_logp, b.body.teacher_logp, atol=1e-3)
        if k:
            np.testing.assert_allclose(a.body.teacher_topk_logp, b.body.teacher_topk_logp, atol=1e-3)
            assert (a.body.teacher_ids == b.body.teacher_ids).mean() > 0.99, "but for near ties"


NEED = Requirements(tokens=[5, 6, 7, 8], highest=38, max_length=CONTEXT - 1, k=MAX_LOGPROBS)


def test_vllm_passes_the_check(server: str) -> None:
    said = asyncio.run(check(endpoint(server), NEED))
    assert said == f"teacher main at {server} serves teacher, context {CONTEXT}"


@pytest.mark.parametrize(
    "changes, need, message",
    [
        ({}, {"k": MAX_LOGPROBS + 1}, f"start the server with --max-logprobs {MAX_LOGPROBS + 1}"),
        ({}, {"max_length": CONTEXT}, f"--max-model-len {CONTEXT + 1}"),
        ({}, {"highest": 1000}, "cannot score token 1000"),
        ({"model": "qwen"}, {}, "does not serve it; write one of its models: 'teacher'"),
        ({"key": SecretStr("wrong")}, {}, "teachers.main.api_key_env: the endpoint wants another key"),
    ],
    ids=str,
)
def test_what_vllm_refuses_is_told_with_what_to_write(
    changes: dict[str, Any], need: dict[str, Any], message: str, server: str
) -> None:
    wanted = Requirements(**{name: getattr(NEED, name) for name in ("tokens", "highest", "max_length", "k")} | need)
    with pytest.raises(ConfigError, match=message):
        asyncio.run(check(endpoint(server, **changes), wanted))


@pytest.mark.parametrize(
    "loss",
    [{"m": 1}, {"kind": "common_topk", "cache": "teacher_topk", "k": MAX_LOGPROBS}],
    ids=lambda loss: loss.get("kind", "draws"),
)
def test_a_student_with_another_tokenizer_learns_the_same_from_vllm_as_from_the_model_here(
    loss: dict[str, Any], server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEST", KEY)
    student = str(permuted("builtin:student", tmp_path / "student"))
    there = {"model": "teacher", "base_url": server, "tokenizer": "builtin:teacher", "api_key_env": "KEY_OF_THE_TEST"}
    there |= {"max_logprobs": MAX_LOGPROBS}
    first = []
    for name, teacher in {"here": {"model": "builtin:teacher"}, "remote": there}.items():
        tree: dict[str, Any] = {
            "student": student,
            "updates": 1,
            "data": {"train": "builtin:arithmetic", "limit": 40},
            "teachers": {"main": {**teacher, "spelling": "own"}},
            "sampler": {"max_tokens": 40},
            "loss": loss,
            "learner": {"batch_size": 8},
            "runtime": {"kind": "inline", "device": "cpu"},
            "schedule": {"kind": "sync"},
            "output": str(tmp_path / name),
        }
        path = train(parse(tree, say=str), Console(quiet=True), name=name)
        first.append(next(line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train"))
    here, remote = first
    for name in ("tokens", "spelling/open", "spelling/unwritten", "spelling/span_tokens"):
        assert remote[name] == here[name], name
    for name in ("loss", "teacher/kl", "grad_norm"):
        assert remote[name] == pytest.approx(here[name], rel=1e-3), name


def test_an_evaluation_gets_the_answers_of_the_model(server: str) -> None:
    """Greedy answers are those of the same model here; samples differ, and are the same with the same seed."""
    there = ServerEndpoint("", server, "teacher", SecretStr(KEY), 8)
    assert served_name(there, "builtin:teacher") == "teacher"
    served = CompletionsSampler(Served(there, "openai", "builtin:teacher", "float32", ""), stop_ids={1})
    native = native_sampler(load_model("builtin:teacher", dtype="float32", device="cpu"), slots=16, stop_ids={1})
    prompts = [Prompt(id=f"p{i}", number=i, tokens=np.arange(3 + i, 9 + i, dtype=np.int32), seed=i) for i in range(5)]

    async def answers(sampler: Any, sampling: Sampling) -> list[tuple[list[int], str]]:
        groups = await asyncio.gather(*(sampler.generate(prompt, sampling) for prompt in prompts))
        return [(handle.body.tokens.tolist(), handle.body.finish) for group in groups for handle in group]

    greedy, four = Sampling(max_tokens=30, temperature=0), Sampling(max_tokens=30, group=4)
    assert asyncio.run(answers(served, greedy)) == asyncio.run(answers(native, greedy))
    first = asyncio.run(answers(served, four))
    assert len(set(map(str, first))) > len(prompts) and first == asyncio.run(answers(served, four))
    native.close()
