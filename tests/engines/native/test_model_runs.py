"""Whole runs and evaluations of models that were silently wrong: recurrent ones, and positions chosen by length."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Lfm2Config, Phi3Config, PreTrainedConfig

from slipstream.commands.evaluate import measure
from slipstream.config.file import load
from slipstream.engines.native import model as model_module
from slipstream.plan.checks import CheckFailed
from slipstream.plan.engine_plans import GraderPlan
from slipstream.plan.evaluation import EvalRequest, config_of_model, evaluation, with_options
from slipstream.records import Prompt
from slipstream.runs import start as launch
from slipstream.runtimes.build import build_grader
from support.model_directories import build_tokenizer

TOKENIZER = build_tokenizer()
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 24,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "recurrent": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
    "longrope": Phi3Config(**SHAPE, original_max_position_embeddings=24, rope_parameters=LONGROPE),
}
PACKING = {"recurrent": "false", "longrope": "true"}
QUIET = Console(quiet=True)


def saved(path: Path, name: str) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for role in ("student", "teacher"):
        model.save_pretrained(path / role)
        TOKENIZER.save_pretrained(path / role)
        with torch.no_grad():  # a teacher is another model, but not of something else
            for weights in model.parameters():
                weights += 0.1 * torch.randn_like(weights)
    rows = [{"prompt": "ab" * n, "answer": "c"} for n in [*([1, 2, 3] * 20), 25]]  # the long one is not among the first
    (path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "run.toml").write_text(
        f"""student = "{path}/student"
updates = 2
output = "{path}/run"
[teachers.main]
model = "{path}/teacher"
packing = {PACKING[name]}
[data]
train = "{path}/data.jsonl"
[sampler]
max_tokens = 8
[learner]
batch_size = 8
packing = {PACKING[name]}
[schedule]
kind = "sync"
[runtime]
kind = "inline"
device = "cpu"
"""
    )
    return path / "run.toml"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_learns_from_what_its_policy_drew(name: str, tmp_path: Path) -> None:
    """At lag 0, sampler and learner are one policy: in the start check, and in every update."""
    said: list[str] = []
    out = StringIO()
    run = launch.train(load(saved(tmp_path, name), [], say=said.append), Console(width=400, file=out), name="x")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["drift/k3_kl"] < 1e-7 for line in lines)
    assert re.search(r"sequences of up to 5\d tokens", out.getvalue()), "the start check reaches the longest"
    assert ("longrope positions: a run uses the factors for 59 tokens (long" in out.getvalue()) == (name == "longrope")
    assert "max_length = 59" in (run / "config.toml").read_text()


def test_without_one_set_of_factors_the_start_check_would_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "pin", lambda model, max_length: None)
    with pytest.raises(CheckFailed, match=r"sampler and learner, one checkpoint: .* sequences of up to 5\d tokens"):
        launch.train(load(saved(tmp_path, "longrope"), [], say=str), QUIET, name="x")


@pytest.mark.parametrize("name", CONFIGS)
def test_evaluation_sees_what_hf_generates(name: str, tmp_path: Path) -> None:
    saved(tmp_path, name)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "student").eval()
    rng = np.random.default_rng(0)
    prompts, answers = [], []
    for number in range(12):
        tokens = rng.integers(7, len(TOKENIZER), 3 + number % 4)
        with torch.no_grad():
            ids = torch.from_numpy(tokens)[None]
            for _ in range(8):  # by whole passes: no cache at all
                ids = torch.cat([ids, hf(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        response = ids[0, len(tokens) :].tolist()
        if TOKENIZER.eos_token_id in response:
            response = response[: response.index(TOKENIZER.eos_token_id)]
        answers.append(TOKENIZER.decode(response, skip_special_tokens=True).strip())
        prompts.append(Prompt(id=f"p{number}", number=number, tokens=tokens, ground_truth=answers[-1]))
    grader = build_grader(GraderPlan(rewards=("exact",)), TOKENIZER)
    try:
        student = config_of_model(str(tmp_path / "student"))
        asked = EvalRequest(with_options(student, {"sampler.max_tokens": 8, "eval.n": 1}))
        found = measure(evaluation(asked, {"": prompts}, TOKENIZER), grader)[""]
    finally:
        grader.close()
    texts = [TOKENIZER.decode(handle.body.tokens, skip_special_tokens=True).strip() for handle in found.best]
    assert texts == answers
