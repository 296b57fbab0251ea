"""Rewards of form and length: `format` and `overlong`."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.config.file import parse
from slipstream.errors import ConfigError
from slipstream.grades import Grades, Ungraded
from slipstream.plan.graders import reward_settings
from slipstream.plan.plan import plan
from slipstream.rewards.functions import Answer, grade, match_format, overlong, reward_of
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import resume, train

TREE: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 2,
    "teachers": {"main": {"model": "builtin:teacher"}},
    "data": {"limit": 24},
    "sampler": {"max_tokens": 16, "group": 4},
    "learner": {"batch_size": 8},
    "policy": {"loss": "vanilla", "reward_weights": {"format": 0.5}},
    "task": {
        "reward": ["exact", "format", "overlong"],
        "format": {"pattern": r"\d+"},
        "overlong": {"buffer": 14, "penalty": 0.25},
    },
    "runtime": {"kind": "inline", "device": "cpu"},
}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>\n1 < 2\n</think>\n\n<answer></answer>\n", 1.0),
        ("<think>a</think>so<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>.", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_a_response_has_its_tags_in_order_and_once(text: str, reward: float) -> None:
    assert match_format(text, pattern=None, tags=("think", "answer")) == reward


def test_a_pattern_must_match_the_whole_response() -> None:
    found = [match_format(text, pattern=r"A.*Z", tags=()) for text in ("AZ", "A\nZ", "AZ.", "xAZ")]
    assert found == [1.0, 1.0, 0.0, 0.0]


def test_the_length_penalty_is_that_of_dapo() -> None:
    """DAPO, equation 13, with a maximum of 20 and a cache of 8: 0 up to 12 tokens, (12 − |y|)/8, −1 above 20."""
    rewards = [overlong([0] * n, "eos", max_tokens=20, buffer=8, penalty=1.0) for n in (1, 12, 13, 16, 20, 21, 99)]
    assert rewards == [0.0, 0.0, -0.125, -0.5, -1.0, -1.0, -1.0]
    assert overlong([0] * 16, "eos", max_tokens=20, buffer=8, penalty=0.5) == -0.25
    assert overlong([0] * 4, "length", max_tokens=20, buffer=8, penalty=0.5) == -0.5, "a long message left no room"


def graded(spec: str, tree: dict[str, Any], timeout: float = 10.0, **given: Any) -> Grades:
    fields = {"text": "", "messages": [], "tokens": [1], "prompt": "?", "ground_truth": None, "meta": {}}
    answer = Answer(**fields | {"data_source": "default", "finish": "eos", "outcome": {}} | given)
    return grade([reward_of(spec, settings=reward_settings(parse(tree)))], answer, timeout)


def test_the_settings_of_a_config_reach_the_functions() -> None:
    assert graded("format", TREE, text="12") == {"format": 1.0}
    assert graded("overlong", TREE, tokens=[0] * 9) == {"overlong": -0.125}
    default = TREE | {"task": {"reward": ["exact", "format"]}}
    assert graded("format", default, text="<think></think><answer></answer>") == {"format": 1.0}


def test_a_pattern_that_takes_forever_is_a_timeout() -> None:
    slow = TREE | {"task": {"reward": ["exact", "format"], "format": {"pattern": "(a+)+b"}}}
    late = Ungraded("timeout", "format took more than 0.2 s (task.timeout)")
    assert graded("format", slow, 0.2, text="a" * 60) == late


def run(tmp_path: Path, name: str, **changes: Any) -> Path:
    tree = TREE | {"output": str(tmp_path / name)} | changes
    return train(parse(tree), Console(file=io.StringIO()), name=name)


def lines_of(path: Path) -> list[dict[str, Any]]:
    times = ("time", "seconds", "second")
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train"]
    return [{k: v for k, v in line.items() if not any(word in k for word in times)} for line in lines]


def test_a_run_learns_from_them_and_resumes_with_them(tmp_path: Path) -> None:
    sync = {"schedule": {"kind": "sync"}}
    whole = lines_of(run(tmp_path, "whole", **sync))
    path = run(tmp_path, "parts", **sync, updates=1)
    resume(path, Console(file=io.StringIO()), updates=2)
    parts = lines_of(path)
    for line in whole:
        assert 0 <= line["reward/format"] <= 1 and -0.25 <= line["reward/overlong"] <= 0
        total = line["policy/reward/exact"] + 0.5 * line["policy/reward/format"] + line["policy/reward/overlong"]
        assert line["policy/reward"] == pytest.approx(total, abs=1e-6)
    names = ("distill/loss", "policy/loss", "reward/format", "reward/overlong", "grad_norm")
    assert [[line[name] for name in names] for line in whole] == [[line[name] for name in names] for line in parts]


def test_rewards_of_form_are_not_warned_of_as_wrong(tmp_path: Path) -> None:
    assert not [each for each in plan(parse(TREE | {"output": str(tmp_path)})).warnings if "gives 0" in each]


def test_evaluating_a_bare_model_by_them_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'overlong': its settings are in \[task.overlong\] of the config of a run"):
        reward_of("overlong")


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ({"reward": ["overlong"]}, 'reward = "overlong" needs its settings: write, for example, overlong = { buffer'),
        ({"reward": ["exact"], "format": {}}, '[task.format] does nothing: add "format" to task.reward, or drop it'),
        ({"reward": ["overlong"], "overlong": {"buffer": 17}}, "task.overlong.buffer = 17 is more than sampler.max_to"),
        ({"reward": ["format"], "format": {"pattern": "("}}, "task.format.pattern: '(' is no regular expression"),
        ({"reward": ["format"], "format": {"tags": ["<a>"]}}, "task.format.tags: write the names of different tags"),
        ({"reward": ["format"], "format": {"tags": ["a"], "pattern": "a"}}, "pattern and tags both describe"),
    ],
)
def test_what_makes_no_sense_is_refused(task: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(TREE | {"task": task, "policy": {"loss": "vanilla"}})
    assert line in str(caught.value) and "\n" not in str(caught.value)
