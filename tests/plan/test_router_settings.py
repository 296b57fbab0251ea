"""Settings of a mixture of experts: what is refused, in which words, and a whole run that records and replays."""

import re
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.config.file import parse
from slipstream.errors import ConfigError
from slipstream.plan.plan import plan
from support.tiny_experts import save_mixture

CONFIG: dict[str, Any] = {
    "updates": 2,
    "teachers": {"main": {"model": "builtin:teacher"}},
    "data": {"train": "builtin:arithmetic", "limit": 24},
    "sampler": {"max_tokens": 8, "group": 2},
    "loss": {"m": 2},
    "runtime": {"kind": "inline", "device": "cpu"},
}


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("students")
    for family in ("qwen3_moe", "deepseek_v3"):
        save_mixture(root / family, like="builtin:student", family=family)
    return {"dense": "builtin:student"} | {path.name: str(path) for path in root.iterdir()}


@pytest.mark.parametrize(
    ("student", "changes", "line"),
    [
        (
            "dense",
            {"learner": {"router": "measure"}},
            "learner.router is for a mixture of experts, and builtin:student has no experts: drop it",
        ),
        (
            "dense",
            {"learner": {"router_aux": 0.1}},
            "learner.router_aux is for a mixture of experts, and builtin:student has no experts: drop it",
        ),
        (
            "deepseek_v3",
            {"learner": {"router_aux": 0.1}},
            "learner.router_aux: the config of {student} has no router_aux_loss_coef, as its routers are not balanced "
            "by this loss: drop it",
        ),
        (
            "qwen3_moe",
            {"learner": {"router": "replay_old"}},
            'learner.router = "replay_old" does nothing: the only pass of an update makes the same choices itself; '
            'write learner.epochs = 2, say, policy.old = "previous", or "replay_rollout"',
        ),
        (
            "qwen3_moe",
            {"learner": {"router_aux": "model"}, "freshness": {"weight": "freshness"}},
            "learner.router_aux has no freshness weights: drop it, or [freshness]",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    students: dict[str, str], student: str, changes: dict[str, Any], line: str
) -> None:
    learner = {"batch_size": 8, **changes["learner"]}
    with pytest.raises(ConfigError) as refused:
        plan(parse({**CONFIG, "student": students[student], **changes, "learner": learner}), ask=False)
    assert str(refused.value).removeprefix("config: ") == line.replace("{student}", students[student])


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("vllm", "vLLM returns them only from its V2 runner on GPUs, which is not used here"),
        ("server", "a rollout server does not return them"),
    ],
)
def test_engines_that_return_no_experts_are_refused(engine: str, why: str) -> None:
    line = (
        f'learner.router needs the experts that the sampler chose, and {why}: write sampler.engine = "native", or '
        'learner.router = "replay_old", which needs none'
    )
    server = {"server": {"url": "http://127.0.0.1:1", "folder": "/tmp"}} if engine == "server" else {}
    for router in ("measure", "replay_rollout"):
        with pytest.raises(ConfigError, match=re.escape(line)):
            parse({**CONFIG, "student": "m", "sampler": {"engine": engine, **server}, "learner": {"router": router}})


def test_a_run_replays_what_its_sampler_recorded(students: dict[str, str], tmp_path: Path) -> None:
    """In float32 sampler and learner choose alike: no flip at the first update, and the same log-probs."""
    learner = {"batch_size": 8, "router": "replay_rollout", "router_aux": "model", "checkpointing": True}
    schedule = {"kind": "async", "tau": 2, "on_publish": "keep"}
    changes = {"student": students["qwen3_moe"], "learner": learner, "schedule": schedule, "output": str(tmp_path)}
    lines = slipstream.train({**CONFIG, **changes}, quiet=True, checks=False).metrics
    assert [line["update"] for line in lines] == [1, 2]
    assert lines[0]["router/flips"] == 0 and lines[0]["drift/k3_kl"] < 1e-6
    assert all(line["router/balance"] >= 2 for line in lines), "X = 2 if all experts are alike"
