"""Every example config that needs no download trains: real models, few and short updates."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from slipstream.commands import train as launch
from slipstream.config.file import load
from slipstream.runlog import read_lines

CONFIGS = Path(__file__).parents[1] / "configs"
SHORT = {
    "updates": "3",
    "sampler.max_tokens": "12",
    "learner.batch_size": "16",
    "data.limit": "40",
    "eval.every": "0",
    "runtime.kind": "inline",
    "runtime.device": "cpu",
}
TELLS = {
    "arithmetic": {"distill/loss", "distill/ratio", "drift/kl"},
    "forward_kl": {"distill/loss", "drift/kl"},
    "fopd": {"distill/loss", "freshness/f", "freshness/anchor", "freshness/buffer_f", "freshness/refreshes"},
    "fopd_self": {"freshness/f", "freshness/sup", "freshness/sup_coverage", "teacher/self/version"},
    "grpo_opd": {"distill/loss", "policy/loss", "policy/reward", "policy/clip_fraction", "saved/prompt"},
    "decoupled": {"policy/loss", "correction/rollout_is_mean", "mismatch/kl", "old_logp_missing", "drift/kl_last"},
    "periodic_grpo": {"policy/loss", "reference/kl", "drift/kl/lag_0", "saved/prompt"},
    "tools": {"distill/loss", "reward/exact", "episode/calls", "episode/invalid"},
    "lookup": {"distill/loss", "reward/exact", "episode/calls", "episode/invalid"},
    "self_privileged": {"distill/loss", "teacher/kl"},
    "self_best": {"distill/loss", "reward/exact", "teacher/kl"},
    "self_ema": {"distill/loss", "teacher/self/version", "teacher/kl"},
}


def test_every_example_is_tried_or_needs_a_download() -> None:
    downloads = {path.stem for path in CONFIGS.glob("*.toml") if "Qwen/" in path.read_text()}
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(TELLS) | downloads


@pytest.mark.parametrize("name", TELLS)
def test_an_example_trains_and_its_metrics_say_what_ran(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)  # as the examples say
    config = load(CONFIGS / f"{name}.toml", [*SHORT.items(), ("output", str(tmp_path / "run"))], say=str)
    path = launch.train(config, Console(quiet=True), name=name)
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["update"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert TELLS[name] <= set(line), TELLS[name] - set(line)
        if not line.get("policy/rows_moved", 1.0):
            continue  # all answers were equally wrong
        assert line["grad_norm"] > 0
    assert (path / "final" / "model.safetensors").exists()
