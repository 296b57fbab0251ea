"""Runs of which agents are the environment, and the lineages that they learn from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dictation import PYTHON, ROOT, Dictated, Script, encoded

import slipstream
from slipstream.config.schema import Config
from slipstream.environments.episodes import Episodes
from slipstream.environments.gateway.agents import Agents
from slipstream.records import Handle, Rollout, parts_of
from slipstream.run_dir.writing import read_lines
from slipstream.runtimes import build

OURS = f"PYTHONPATH={ROOT / 'src'}"
"""For a checkout beside which the package is not installed."""
QUIET = "MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 LITELLM_LOCAL_MODEL_COST_MAP=True"
MINI = (
    f"env {OURS} {QUIET} {PYTHON.parent}/mini --yolo --exit-immediately --task {{prompt}} --model openai/student "
    "-c mini.yaml -c model.cost_tracking=ignore_errors"
)
APART = f"{MINI} --environment-class slipstream.agents.mini.Sandboxed"
"""Its commands are in a sandbox, and it is not."""


@dataclass
class Played:
    lines: list[dict[str, Any]]
    """Metrics of the updates."""
    path: Path
    calls: list[tuple[Any, Any]] = field(default_factory=list)
    """Prompts of the student, and its sampling options; for a student that is dictated to."""
    rollouts: list[Rollout] = field(default_factory=list)

    def of(self, index: int) -> list[Rollout]:
        """The lineages of an episode in every group, one group after the other."""
        return [rollout for rollout in self.rollouts if rollout.episode == index]


def trained(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    models: Path,
    rows: Sequence[dict[str, Any]],
    environment: dict[str, Any],
    script: Script | None,
    **sections: dict[str, Any],
) -> Played:
    """The run of a config; its student says what is in the script, if there is one."""
    played = Played([], path)
    build_policy = build.build_policy

    def watch(kind: Any) -> None:
        generate = kind.generate

        async def seen(self: Any, *given: Any) -> list[Handle]:
            group: list[Handle] = await generate(self, *given)
            if not given[1].alone:
                played.rollouts += [handle.body for handle in group if handle.body is not None]
            return group

        monkeypatch.setattr(kind, "generate", seen)

    def dictated(*given: Any) -> Any:
        policy = build_policy(*given)
        if script is None:
            return policy
        found = Dictated(policy, script)  # type: ignore[arg-type]
        played.calls = found.asked
        return found

    watch(Agents)
    watch(Episodes)
    monkeypatch.setattr(build, "build_policy", dictated)
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    usual: dict[str, Any] = {
        "task": {"reward": "environment"},
        "data": {"train": str(path / "rows.jsonl")},
        "sampler": {"max_tokens": 8000, "group": 2, "slots": 4},
        "learner": {"batch_size": 2, "lr": 1e-3},
    }
    config = Config(
        student=str(models / "student"),
        teachers={"main": {"model": str(models / "teacher")}},
        environment={"seconds": 120, **environment},
        schedule={"kind": "sync"},
        runtime={"kind": "inline", "device": "cpu"},
        output=str(path / "run"),
        **{name: usual.get(name, {}) | sections.get(name, {}) for name in usual | sections},
        updates=2,
    )
    # the checks before a run play episodes, too, whose replies no script has; those of agents they leave out
    slipstream.train(config, quiet=True, checks="gateway" in environment)
    played.lines = [line for line in read_lines(path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    return played


def check_laws(rollout: Rollout, replies: Sequence[str]) -> None:
    """The sampled ids are trained as they are, and nothing else."""
    said = [part for part in parts_of(rollout) if isinstance(part, Rollout)]
    assert [part.tokens.tolist() for part in said] == [encoded(reply) for reply in replies]
    mask = rollout.loss_mask
    assert rollout.tokens[mask].tolist() == rollout.actions[:, 0].tolist()
    assert sorted(set(rollout.turn[mask].tolist())) == list(range(len(replies)))
    assert (rollout.turn[~mask] == -1).all() and (rollout.versions[~mask] == -1).all()
    assert not rollout.logp[~mask].any() and (rollout.logp[mask] < 0).all()
    assert len(set(rollout.versions[mask].tolist())) == 1


def check_calls(played: Played) -> None:
    """Every prompt that a sampler was given, with what it said, begins a lineage, and no sampled token is in two."""
    rows = [np.concatenate([rollout.prompt.tokens, rollout.tokens]).tolist() for rollout in played.rollouts]
    for prompt, _ in played.calls:
        asked = prompt.tokens.tolist()
        assert any(row[: len(asked)] == asked for row in rows)
    seeds = [(prompt.number, prompt.first, prompt.seed, prompt.offset) for prompt, _ in played.calls]
    assert len(seeds) == len(set(seeds))
