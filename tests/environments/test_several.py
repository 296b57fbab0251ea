"""Several environments in one run: which one a row uses, with what limits, and what is measured of each."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipstream
from slipstream.config.data import DataConfig
from slipstream.config.file import parse
from slipstream.data.prompts import Row
from slipstream.data.tokenizers import encode_rows, load_tokenizer
from slipstream.environments.pool import EnvironmentSettings, schemas
from slipstream.environments.several import SeveralEnvironments
from slipstream.errors import ConfigError
from slipstream.metrics import failed_shares, sample_metrics
from slipstream.plan.plan import Plan, plan
from slipstream.protocols import Sampling
from slipstream.records import Handle, Header, Prompt, unfinished
from slipstream.run_dir.writing import read_lines
from slipstream.simulation import virtual_clock as virtual
from support import tabular_engines as toy
from support.toy_episodes import WIDE, World

FULL = Sampling(max_tokens=30, group=3, draws=4)
TREE: dict[str, Any] = {
    "student": "builtin:tool_student",
    "updates": 2,
    "teachers": {"main": {"model": "builtin:tool_teacher"}},
    "data": {"train": {"table": "builtin:table", "doors": "builtin:doors"}, "limit": 24},
    "environments": {
        "table": {"use": "table", "turns": 3, "turn_tokens": 40},
        "doors": {"use": "doors", "turns": 5, "turn_tokens": 30},
    },
    "sampler": {"max_tokens": 160, "group": 2, "slots": 8},
    "task": {"reward": "exact"},
    "learner": {"batch_size": 8, "lr": 1e-3},
    "runtime": {"kind": "inline", "device": "cpu"},
}


def planned(**changes: Any) -> Plan:
    return plan(parse(TREE | changes, say=str), ask=False)


def prompt_in(environment: str, number: int = 7) -> Prompt:
    return Prompt(id="p", number=number, tokens=np.array([1, 2], np.int32), seed=5, environment=environment)


class Closable(toy.ToySampler):
    closed = 0

    def close(self) -> None:
        self.closed += 1


def several(policy: Closable, **worlds: tuple[World, int]) -> SeveralEnvironments:
    """Environments with a limit of their turns."""
    by_name = {name: world.sampler(policy, replace(WIDE, turns=turns)) for name, (world, turns) in worlds.items()}
    return SeveralEnvironments(policy, by_name)


def test_a_prompt_is_answered_in_its_environment_with_the_limits_of_that() -> None:
    long, short, policy = World(turns=9), World(turns=9), Closable(toy.random_table(8, seed=0))
    sampler = several(policy, long=(long, 4), short=(short, 1))
    for environment, turns in ("long", 4), ("short", 1):
        group, _ = virtual.run(sampler.generate(prompt_in(environment), FULL))
        assert [handle.header.outcome["turns"] for handle in group] == [turns] * 3
        assert {handle.header.environment for handle in group} == {environment}
        assert {handle.header.finish for handle in group} == {"turns"}
    assert (long.closed, short.closed) == (3, 3)
    sampler.close()
    assert long.ended and short.ended and policy.closed == 1


def test_groups_of_all_environments_are_released_and_continue() -> None:
    async def main() -> list[list[Handle]]:
        worlds = {name: (World(seconds=lambda rng: 1.0), 4) for name in ("a", "b")}
        sampler = several(Closable(toy.random_table(8, seed=0), seconds=0.4), **worlds)
        calls = {name: asyncio.create_task(sampler.generate(prompt_in(name), FULL)) for name in worlds}
        await asyncio.sleep(4.5)
        await sampler.release()
        begun = {name: await call for name, call in calls.items()}
        assert all(unfinished(group) and group for group in begun.values())
        return [await sampler.generate(prompt_in(name), FULL, group) for name, group in begun.items()]

    for group in virtual.run(main())[0]:
        assert [handle.header.finish for handle in group] == ["eos"] * 3


def test_a_row_has_the_tools_of_its_environment_and_no_others() -> None:
    tokenizer = load_tokenizer("builtin:tool_student")
    tokenizer.chat_template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    tools = {name: schemas(EnvironmentSettings(name, None, 200)) for name in ("table", "doors")}
    rows = [Row(name, [{"role": "user", "content": "?"}], environment=name) for name in ("table", "doors")]
    texts = [tokenizer.decode(ids) for ids in encode_rows(rows, tokenizer, DataConfig(), tools)]
    assert texts == ["get add subtract ", "get "]


def test_each_environment_is_planned_with_its_own_settings() -> None:
    made = planned()
    prompts = [made.prompts.at(number) for number in range(20)]
    assert {(prompt.data_source, prompt.environment) for prompt in prompts} == {("table", "table"), ("doors", "doors")}
    table, doors = (made.engines.sampler.environments[name] for name in ("table", "doors"))
    assert (table.limits.turns, table.limits.turn_tokens) == (3, 40)
    assert (doors.limits.turns, doors.limits.turn_tokens) == (5, 30)


def rows(path: Path, *environments: str | None) -> str:
    asked = [{"role": "user", "content": "A?"}]
    written = [{"prompt": asked, "answer": "x", "table": {}, "environment": each} for each in environments]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    return str(path / "rows.jsonl")


def test_a_column_goes_before_the_name_of_the_source(tmp_path: Path) -> None:
    made = planned(data={"train": {"table": rows(tmp_path, "doors", None, "table")}, "shuffle": False})
    assert [made.prompts.at(number).environment for number in range(3)] == ["doors", "table", "table"]


@pytest.mark.parametrize(
    ("environments", "why"),
    [
        (
            ("doors", "tabel"),
            r"rows.jsonl:2: its column environment names 'tabel', which is no section; did you mean 'table'",
        ),
        (("doors", None), r"rows.jsonl:2: has no column 'environment'"),
        (("doors", "doors"), "environments.table: no prompt uses it"),
    ],
)
def test_a_row_without_an_environment_or_the_reverse_is_refused(
    tmp_path: Path, environments: tuple[str | None, ...], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        planned(data={"train": rows(tmp_path, *environments)})


def test_an_environment_whose_prompts_are_all_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    asked = {"doors": "A?", "table": "A?" * 3000}
    written = [
        {"prompt": [{"role": "user", "content": text}], "answer": "x", "environment": name}
        for name, text in asked.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    with pytest.raises(
        ConfigError, match="environments.table: no prompt uses it, or data.too_long leaves them all out"
    ):
        planned(data={"train": str(path), "too_long": "skip"})


def test_parts_of_a_reward_are_means_over_the_environments_that_have_them() -> None:
    def header(number: int, environment: str, **parts: float) -> Header:
        rewards = {"environment": 1.0} | {f"environment/{name}": value for name, value in parts.items()}
        return Header(
            prompt="p", number=number, index=0, episode=0, data_source="", prompt_tokens=1, tokens=4,
            versions=((0, 4),), finish="eos", rewards=rewards, environment=environment,
        )  # fmt: skip

    found = sample_metrics([header(0, "a", form=1.0), header(1, "a"), header(2, "b")])
    assert {name: value for name, value in found.items() if name.startswith("reward/")} == {
        "reward/environment": 1.0,
        "reward/environment/form": 0.5,  # of the two episodes in a
    }


def test_what_is_measured_of_each_environment() -> None:
    def header(number: int, environment: str, turns: float, reward: float, **own: float) -> Header:
        outcome = {"turns": turns} | {f"own/{name}": value for name, value in own.items()}
        return Header(
            prompt="p", number=number, index=0, episode=0, data_source="", prompt_tokens=1, tokens=4,
            versions=((0, 4),), finish="eos", rewards={"exact": reward}, outcome=outcome, environment=environment,
        )  # fmt: skip

    headers = [header(0, "a", 1, 1.0, uses=4.0), header(1, "a", 3, 0.0), header(2, "b", 5, 1.0)]
    found = sample_metrics(headers)
    assert {name: value for name, value in found.items() if name.startswith("environment")} == {
        "environment/uses": 2.0,  # of the two episodes in a
        "environments/a/episodes": 2.0,
        "environments/a/turns": 2.0,
        "environments/a/reward/exact": 0.5,
        "environments/b/episodes": 1.0,
        "environments/b/turns": 5.0,
        "environments/b/reward/exact": 1.0,
    }
    assert failed_shares(headers, {"a": 2, "c": 1}) == {
        "environments/a/failed": 0.5,
        "environments/b/failed": 0.0,
        "environments/c/failed": 1.0,
    }
    alone = [replace(each, environment="") for each in headers]
    assert not [name for name in sample_metrics(alone) if name.startswith("environments/")]
    assert failed_shares(alone, {"": 2}) == {}


def test_two_environments_are_trained_in_one_run(tmp_path: Path) -> None:
    held_out = {"table": "builtin:table", "doors": "builtin:doors"}
    slipstream.train(
        TREE
        | {
            "output": str(tmp_path / "run"),
            "data": TREE["data"] | {"eval": held_out},
            "eval": {"every": 2, "prompts": 4, "n": 2},
        },
        quiet=True,
        checks=False,
    )
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    trained = [line for line in lines if line["kind"] == "train"]
    for line in trained:
        for name, turns in ("table", 3), ("doors", 5):
            assert 1 <= line[f"environments/{name}/turns"] <= turns
            assert 0 <= line[f"environments/{name}/reward/exact"] <= 1
            assert line[f"environments/{name}/failed"] == 0
        assert sum(line[f"environments/{name}/episodes"] for name in held_out) == line["samples"] == 8
    evaluated = [line for line in lines if line["kind"] == "eval"]
    assert {line["set"]: line[f"environments/{line['set']}/episodes"] for line in evaluated} == {"table": 8, "doors": 8}
