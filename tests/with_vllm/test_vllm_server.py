"""vLLM's own server as rollout engine: weights through a folder, versions, and a whole run.

Needs vLLM in this Python, or in the one that VLLM_PYTHON names.
"""

import asyncio
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.config.file import parse
from slipstream.engines.native.model import load_model
from slipstream.engines.server.api import ServerEndpoint, ServerSettings
from slipstream.engines.server.sampler import ServerSampler, log_probs_of
from slipstream.engines.weights import export_weights
from slipstream.models.resolve import model_path
from slipstream.protocols import Sampling
from slipstream.records import Handle, Prompt
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import train

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
    "VLLM_SERVER_DEV_MODE": "1",
}
STARTS = 300.0


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The student with an untied head: on CPUs vLLM does not load a tied one again."""
    path = tmp_path_factory.mktemp("student")
    model = AutoModelForCausalLM.from_pretrained(model_path("builtin:student"), dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model._tied_weights_keys = None
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(model_path("builtin:student")).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def url(student: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert PYTHON is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", student, "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "128"]
    command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "256"]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=os.environ | SETTINGS, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + STARTS
            while True:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                try:
                    if httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                except httpx2.TransportError:
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def test_weights_arrive_and_every_token_has_its_version(student: str, url: str, tmp_path: Path) -> None:
    model = load_model(student, dtype="float32", device="cpu")
    prompts = [Prompt(id=f"p{i}", number=i, tokens=np.array([5, 6, 7 + i], np.int32), seed=i) for i in range(4)]
    settings = ServerSettings(ServerEndpoint("", url, student), "vllm", student, "float32", str(tmp_path))
    sampler = ServerSampler(settings, stop_ids={1})

    def gap(handles: list[Handle], version: int) -> float:
        gaps = [0.0]
        for rollout in (handle.body for handle in handles):
            known = log_probs_of(model, [*rollout.prompt.tokens.tolist(), *rollout.tokens.tolist()])[0]
            its = np.abs(known[len(rollout.prompt.tokens) - 1 :] - rollout.logp)[rollout.versions == version]
            gaps += its.tolist()
        return max(gaps)

    async def work() -> list[Handle]:
        before = await sampler.generate(prompts[0], Sampling(max_tokens=100, group=4, temperature=1.0, top_k=0))
        assert gap(before, 0) < 1e-3
        calls = [asyncio.create_task(sampler.generate(p, Sampling(max_tokens=120, group=8))) for p in prompts]
        while not sampler.running:
            await asyncio.sleep(0.01)
        with torch.no_grad():
            for parameter in model.model.parameters():
                parameter += 1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        await sampler.publish(export_weights(model.model, "float32", version=1), "keep")
        return [handle for group in await asyncio.gather(*calls) for handle in group]

    handles = asyncio.run(work())
    sampler.close()
    assert {version for handle in handles for version, _ in handle.header.versions} >= {1}
    assert gap(handles, 1) < 1e-3


def test_a_run(student: str, url: str, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    config = parse(
        {
            "student": student,
            "updates": 3,
            "output": str(tmp_path / "run"),
            "teachers": {"main": {"model": "builtin:teacher"}},
            "sampler": {
                "engine": "server",
                "max_tokens": 40,
                "group": 2,
                "server": {"url": url, "folder": str(tmp_path / "weights")},
            },
            "loss": {"kind": "reverse_kl_mc", "m": 1},
            "learner": {"batch_size": 16, "lr": 1e-3},
            "runtime": {"kind": "local"},
        }
    )
    path = train(config, Console(file=io.StringIO()), name="server")
    trained = [line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train"]
    assert len(trained) == 3 and 0 < trained[0]["drift/probs_diff_max"] < 1e-4
