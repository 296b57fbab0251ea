"""Whole runs with rollouts by vLLM: every law of the pipeline, through both runtimes, on the student that ships."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.cli import main
from slipstream.config.file import parse
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, DataError
from slipstream.plan.plan import plan
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import train

DRAWS = {"kind": "reverse_kl_mc", "m": 4}


def config_of(
    path: Path,
    *,
    student: str = "builtin:student",
    runtime: str = "inline",
    schedule: str = "async",
    loss: dict[str, Any] = DRAWS,
    lora: dict[str, Any] | None = None,
    **sampler: object,
) -> Config:
    return parse(
        {
            "student": student,
            "updates": 4,
            "output": str(path / "run"),
            "teachers": {"main": {"model": "builtin:teacher"}},
            "sampler": {"engine": "vllm", "max_tokens": 80, "group": 2, "slots": 32, **sampler},
            "learner": {"batch_size": 32, "lr": 1e-3, **({"lora": lora} if lora else {})},
            "loss": loss,
            "data": {"eval": "builtin:arithmetic"},
            "task": {"reward": "exact"},
            "eval": {"every": 4, "prompts": 20, "temperature": 0},
            "schedule": {"kind": schedule},
            "runtime": {"kind": runtime},
        }
    )


@pytest.mark.parametrize(
    ("runtime", "schedule", "loss"),
    [("inline", "sync", DRAWS), ("local", "async", DRAWS), ("inline", "sync", {"kind": "reverse_kl_topk", "k": 8})],
)
def test_a_run(tmp_path: Path, runtime: str, schedule: str, loss: dict[str, Any]) -> None:
    """Publishes are checked by fingerprint, or the run would not end; what is on-policy is close to the learner."""
    said = io.StringIO()
    path = train(config_of(tmp_path, runtime=runtime, schedule=schedule, loss=loss), Console(file=said), name="vllm")
    lines = read_lines(path / "metrics.jsonl")
    trained = [line for line in lines if line["kind"] == "train"]
    assert len(trained) == 4 and (path / "final" / "model.safetensors").exists()
    assert [line["update"] for line in lines if line["kind"] == "eval"] == [0, 4]
    fresh = trained if schedule == "sync" else trained[:1]
    assert all(0 < line["drift/probs_diff_max"] < 1e-4 for line in fresh), "sampler and learner are one policy"


def test_a_run_that_trains_adapters(tmp_path: Path) -> None:
    """Every publish is an adapter, checked by fingerprint; and its student goes on as the student of a second run."""
    targets = ["q_proj", "v_proj", "down_proj"]
    first = config_of(tmp_path, schedule="async", lora={"rank": 4, "targets": targets})
    path = train(first, Console(file=io.StringIO()), name="vllm")
    again = config_of(tmp_path / "again", student=str(path / "final" / "adapter"), runtime="local")
    for run in path, train(again, Console(file=io.StringIO()), name="vllm"):
        trained = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]
        assert len(trained) == 4 and (run / "final" / "adapter").is_dir()
        assert 0 < trained[0]["drift/probs_diff_max"] < 1e-4


def test_a_context_that_is_too_short_is_told_at_start_up(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sampler.max_tokens = 80 exceed the context of 90"):
        plan(config_of(tmp_path, engine_args={"max_model_len": 90}))


def test_a_temperature_at_which_vllm_does_not_draw(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sampler.temperature = 0.001: vLLM would sample at 0.01"):
        train(config_of(tmp_path, temperature=0.001), Console(file=io.StringIO()), name="vllm")


def test_an_evaluation_by_vllm_gives_the_greedy_accuracy_of_the_native_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["eval", "builtin:student", "--limit", "20", "-n", "2", "--max-tokens", "40", "--json"]
    found = []
    for engine in "native", "vllm":
        assert main([*words, "--engine", engine]) == 0
        found.append(json.loads(capsys.readouterr().out))
    native, vllm = found
    assert (vllm["engine"], vllm["greedy"], vllm["prompts"]) == ("vllm", native["greedy"], 20)
    assert 0 < vllm["avg@2"] <= 1
