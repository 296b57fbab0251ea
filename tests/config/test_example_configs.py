"""Every example config that needs no download trains: real models, few and short updates."""

import re
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.config.file import load
from slipstream.run_dir.writing import read_lines
from slipstream.runs import start as launch
from support.sandboxes import NO_BUBBLEWRAP

CONFIGS = Path(__file__).parents[2] / "configs"
SHORT = {
    "updates": "3",
    "sampler.max_tokens": "12",
    "learner.batch_size": "16",
    "data.limit": "40",
    "eval.every": "0",
    "runtime.kind": "inline",
    "runtime.device": "cpu",
}
SHORTER = {"warm_start": {"sft.updates": "2", "sft.warmup": "1"}, "lookup_critic": {"critic.warmup": "1"}}
TELLS = {
    "arithmetic": {"distill/loss", "distill/ratio", "drift/kl"},
    "forward_kl": {"distill/loss", "drift/kl"},
    "other_tokenizer": {"distill/loss", "teacher/kl", "spelling/open", "spelling/span_tokens"},
    "fopd": {"distill/loss", "freshness/f", "freshness/anchor", "freshness/buffer_f", "freshness/refreshes"},
    "fopd_self": {"freshness/f", "freshness/sup", "freshness/sup_coverage", "teacher/self/version"},
    "grpo_opd": {"distill/loss", "policy/loss", "policy/reward", "policy/clip_fraction", "saved/prompt"},
    "decoupled": {"policy/loss", "correction/rollout_is_mean", "mismatch/kl", "old_logp_missing", "drift/kl_last"},
    "periodic_grpo": {"policy/loss", "reference/kl", "drift/kl/lag_0", "saved/prompt"},
    "tools": {"distill/loss", "reward/exact", "episode/calls", "episode/invalid"},
    "lookup": {"distill/loss", "reward/exact", "episode/calls", "episode/invalid"},
    "lookup_critic": {"policy/loss", "critic/loss", "critic/clip_fraction", "episode/calls"},
    "self_privileged": {"distill/loss", "teacher/kl"},
    "self_best": {"distill/loss", "reward/exact", "teacher/kl"},
    "warm_start": {"distill/loss", "sft"},
    "gkd": {"distill/loss", "off_policy/data"},
    "skd": {"distill/loss", "sampler/replaced", "teacher/kl"},
    "vcpo": {"policy/loss", "policy/reward", "correction/rollout_is_mean", "correction/ess"},
    "self_ema": {"distill/loss", "teacher/self/version", "teacher/kl"},
}


STAND_INS = {
    "student": "builtin:tool_student",
    "teachers.main.model": "builtin:tool_teacher",
    "teachers.main.dtype": "float32",
    "data.train": "builtin:table",
    "data.chat": "false",
    "data.system_prompt": "What is it?",
    "data.template_args": "{}",
    "sampler.max_tokens": "96",
    "sampler.dtype": "float32",
    "sampler.replicas": "1",
    "learner.ranks": "1",
    "learner.compute_dtype": "float32",
    "learner.lr": "1e-3",
}
"""Settings that replace downloads in an example."""


def test_every_example_is_tried_or_needs_a_download() -> None:
    downloads = {path.stem for path in CONFIGS.glob("*.toml") if re.search(r"Qwen/|build/real", path.read_text())}
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(TELLS) | downloads


@pytest.mark.parametrize("name", TELLS)
def test_an_example_trains_and_its_metrics_say_what_ran(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)  # as the examples say
    given = [*SHORT.items(), *SHORTER.get(name, {}).items(), ("output", str(tmp_path / "run"))]
    config = load(CONFIGS / f"{name}.toml", given, say=str)
    path = launch.train(config, Console(quiet=True), name=name)
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["update"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert TELLS[name] <= set(line), TELLS[name] - set(line)
        if not line.get("policy/rows_moved", 1.0):
            continue  # all answers were equally wrong
        assert line["grad_norm"] > 0
    assert (path / "final" / "model.safetensors").exists()


@pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
def test_the_recipe_of_tools_trains_on_models_that_need_no_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncated draws, freshness, Python in the sandbox and grades, all of it together."""
    monkeypatch.chdir(CONFIGS.parent)
    given = SHORT | STAND_INS | {"output": str(tmp_path / "run")}
    config = load(CONFIGS / "retool_math.toml", list(given.items()), say=str)
    path = launch.train(config, Console(quiet=True), name="retool_math")
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train"]
    assert len(lines) == 3
    for line in lines:
        assert {"distill/loss", "freshness/f", "reward/math", "episode/calls"} <= set(line), sorted(line)
        assert line["grad_norm"] > 0 and line["failed_samples"] == 0
