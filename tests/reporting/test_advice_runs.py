"""Advice on real runs in which something was planted: three miniatures of benchmarks/advice.py, which has them all."""

import sys
import tomllib
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.config.file import parse, to_toml
from slipstream.objective.columns import present
from slipstream.plan.plan import plan
from slipstream.reporting.advice.tree import advise, changed_config
from support.advice_examples import EXAMPLES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "advice.py"
SMALL: dict[str, Any] = {"data": {"eval": None, "limit": 200}, "eval": None, "sampler": {"max_tokens": 40}}
"""Nothing is held out, and answers are short."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("benchmarks_advice", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name, updates",
    [
        ("sampler at temperature 1.4", 2),
        ("teacher sees Q{prompt}A", 6),
        pytest.param("lr 2e-2, sync", 8, marks=pytest.mark.slow),
    ],
)
def test_what_was_planted_comes_first(name: str, updates: int, script: ModuleType, tmp_path: Path) -> None:
    plant = script.PLANTED[name]
    small = replace(plant, changes={**plant.changes, **SMALL, "updates": updates})
    advice = script.planted(small, tmp_path / "run", script.BUILT_IN)
    assert advice.answers[0].name == plant.named


def test_what_is_to_be_written_is_a_plan_that_could_be_run() -> None:
    """Not only a config: files, lengths, vocabularies and memory agree."""
    cases = [case for example in EXAMPLES if not (case := example.sick).config.task.reward]
    cases = [case for case in cases if case.config.learner.router == "free"]  # others need a mixture of experts
    found = [(case, answer.change) for case in cases for answer in advise(case).answers if answer.change]
    plans = {to_toml(present(changed_config(case.config, change))) for case, change in found}
    assert len(plans) > 15
    for text in plans:
        plan(parse({**tomllib.loads(text), "data": {"limit": 20}}, say=str), ask=False)


def test_a_run_in_which_nothing_was_planted_is_not_accused(script: ModuleType, tmp_path: Path) -> None:
    sound = script.Plant("", {**SMALL, "updates": 4})
    assert script.planted(sound, tmp_path / "run", script.BUILT_IN).wrong == []
