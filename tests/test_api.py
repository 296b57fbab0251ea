"""Interface for scripts and notebooks."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import slipstream
from slipstream.api import screen_for
from slipstream.config.file import parse
from slipstream.errors import ConfigError, DataError, RunDirError
from slipstream.runs.start import Caller, train


@pytest.fixture
def config(tmp_path: Path, models_dir: Path) -> dict[str, Any]:
    """Six updates that take a second, and evaluations."""
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "student": str(models_dir / "student"),
        "updates": 6,
        "output": str(tmp_path / "run"),
        "data": {"train": str(tmp_path / "rows.jsonl"), "eval": str(tmp_path / "rows.jsonl")},
        "teachers": {"main": {"model": str(models_dir / "teacher")}},
        "sampler": {"max_tokens": 6, "slots": 8},
        "loss": {"m": 2},
        "learner": {"batch_size": 4},
        "task": {"reward": "exact"},
        "eval": {"every": 3, "prompts": 2},
        "runtime": {"kind": "inline", "device": "cpu"},
    }


def test_a_run_from_its_config_to_its_student(config: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    updates, evaluations = list[Any](), list[Any]()
    run = slipstream.train(config, on_update=updates.append, on_eval=evaluations.append, quiet=True, checks=False)
    assert capfd.readouterr() == ("", "")
    assert str(run) == f"Run({config['output']!r})" and run.finished
    assert run.config.updates == 6 and run.config.loss.kind == "reverse_kl_mc"
    assert updates == run.metrics and [line["update"] for line in updates] == [1, 2, 3, 4, 5, 6]
    assert evaluations == run.evaluations and [line["update"] for line in evaluations] == [0, 3, 6]
    assert len(run.ledger) >= 24 and {sample["update"] for sample in run.samples} == {1, 2, 3, 4, 5, 6}
    model, tokenizer = run.student
    answer = model.generate(**tokenizer("1+1=", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(answer[0]).startswith("<bos>1+1=")
    with pytest.raises(RunDirError, match="already holds a run"):
        slipstream.train(config)


def test_lines_of_a_run_are_tables_for_pandas(config: dict[str, Any]) -> None:
    run = slipstream.train(config, quiet=True, checks=False)
    for name in ("metrics", "evaluations", "ledger", "samples"):
        lines, table = getattr(run, name), run.table(name)
        assert table.num_rows == len(lines) and set(table.column_names) == set().union(*lines)
        frame = table.to_pandas()
        for key in ("update", "kind", "loss", "prompt"):
            if key in table.column_names:
                assert [line.get(key) for line in lines] == frame[key].tolist()
    assert run.table("ledger")["lag"].to_pylist() == [line.get("lag") for line in run.ledger]


def test_a_config_is_a_file_a_dict_or_a_config(config: dict[str, Any], tmp_path: Path) -> None:
    made = slipstream.train(config | {"updates": 1}, quiet=True).config.model_copy(update={"output": f"{tmp_path}/two"})
    assert slipstream.train(made, quiet=True).config == made
    file = tmp_path / "three.toml"
    file.write_text((tmp_path / "two" / "config.toml").read_text().replace("/two", "/three"))
    run = slipstream.train(file, quiet=True)
    assert run.path == tmp_path / "three" and slipstream.Run(str(run.path)).metrics == run.metrics
    assert tomllib.loads(file.read_text())["updates"] == 1


def test_who_returns_false_ends_the_run_and_it_can_go_on(config: dict[str, Any]) -> None:
    run = slipstream.train(config, on_update=lambda line: line["update"] < 3, quiet=True)
    assert not run.finished and [line["update"] for line in run.metrics] == [1, 2, 3]
    model, _ = run.student
    assert model.num_parameters() > 0, "of the last checkpoint"
    on = list[int]()
    again = slipstream.resume(run.path, on_update=lambda line: on.append(line["update"]), quiet=True)
    assert on == [4, 5, 6] and again.finished and len(again.metrics) == 6
    with pytest.raises(slipstream.SlipstreamError, match="--change learner.lr: "):
        slipstream.resume(run, updates=7, change="learner.lr", quiet=True)
    assert len(slipstream.resume(run, updates=7, quiet=True).metrics) == 7
    last = slipstream.train(
        config | {"output": config["output"] + "-2", "updates": 3}, on_eval=lambda line: line["update"] < 3, quiet=True
    )
    assert [line["update"] for line in last.evaluations] == [0, 3] and not last.finished
    assert slipstream.resume(last, quiet=True).finished and len(last.metrics) == 3


def test_what_is_raised_ends_the_run_in_order_and_arrives(config: dict[str, Any]) -> None:
    def impatient(line: dict[str, Any]) -> None:
        line.clear()  # it is theirs
        raise LookupError("no patience")

    with pytest.raises(LookupError, match="no patience"):
        slipstream.train(config, on_update=impatient, quiet=True)
    run = slipstream.Run(config["output"])
    assert [line["update"] for line in run.metrics] == [1] and (run.path / "checkpoints" / "1").exists()
    assert slipstream.resume(run.path, quiet=True).finished


def test_where_an_event_loop_runs_and_in_any_thread_one_run_at_a_time(config: dict[str, Any]) -> None:
    config |= {"updates": 2}
    threads, refused = list[Any](), list[str]()

    def nested(line: dict[str, Any]) -> None:
        threads.append(threading.current_thread())
        with pytest.raises(slipstream.SlipstreamError) as caught:
            slipstream.train(config)
        refused.append(str(caught.value))

    async def cell() -> bool:
        return slipstream.train(config, on_update=nested, quiet=True).finished

    async def beside() -> bool:
        another = config | {"output": config["output"] + "-2"}
        return (await asyncio.to_thread(slipstream.train, another, quiet=True)).finished

    assert asyncio.run(cell()) and threading.main_thread() not in threads
    assert refused == ["this process already has an active run: wait for its end, or use another process"] * 2
    assert asyncio.run(beside())


@pytest.mark.parametrize("where", ["notebook", "script"])
def test_who_is_interrupted_stops_the_run_in_order(config: dict[str, Any], where: str) -> None:
    def begin() -> None:
        slipstream.train(config | {"updates": 10_000}, on_update=told, quiet=True)

    async def cell() -> None:
        begin()

    def told(line: dict[str, Any]) -> None:
        if line["update"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    loop = asyncio.new_event_loop()  # heeds no signal, as that of a kernel
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell()) if where == "notebook" else begin()
    loop.close()
    run = slipstream.Run(config["output"])
    assert not run.finished and len(run.metrics) >= 2
    assert (run.path / "checkpoints" / str(len(run.metrics))).exists()


def test_who_asks_before_there_is_a_run_stops_it_before_its_first_update(config: dict[str, Any]) -> None:
    caller = Caller()
    caller.stop()
    with pytest.raises(KeyboardInterrupt):
        train(parse(config), Console(quiet=True), name="run", caller=caller)
    run = slipstream.Run(config["output"])
    assert run.metrics == [] and (run.path / "checkpoints" / "0").exists()


def test_a_notebook_is_shown_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it is a terminal."""

    class ZMQInteractiveShell:
        pass

    monkeypatch.setenv("FORCE_COLOR", "1")
    assert screen_for(False).is_terminal and not screen_for(True).is_terminal
    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    assert not screen_for(False).is_terminal and not screen_for(False).is_jupyter


def test_mistakes_are_raised_in_words(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'upates'; did you mean 'updates'?"):
        slipstream.train(config | {"upates": 1})
    with pytest.raises(ConfigError, match="config is a list: give the path of a TOML file, a dict, or a Config"):
        slipstream.train([config])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no.toml: no such file"):
        slipstream.train(tmp_path / "no.toml")
    with pytest.raises(DataError, match="no.jsonl: cannot be read"):
        slipstream.train(config | {"data": {"train": "no.jsonl"}, "eval": {}})
    for call in (slipstream.resume, slipstream.Run):
        with pytest.raises(RunDirError, match="nowhere holds no run") as caught:
            call(tmp_path / "nowhere")
        assert caught.value.__context__ is None
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        slipstream.trian  # type: ignore[attr-defined]  # noqa: B018
    assert {"train", "resume", "Run"} <= set(dir(slipstream))


def test_neither_the_import_nor_a_mistake_imports_anything_heavy() -> None:
    code = """
import sys
import slipstream
assert not {"pydantic", "numpy", "rich"} & sys.modules.keys(), "slipstream alone"
try:
    slipstream.train({"student": "./nowhere", "teachers": {"main": {"model": "builtin:teacher"}}})
except slipstream.SlipstreamError as error:
    print(error)
assert not {"torch", "transformers", "tokenizers", "datasets"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "./nowhere: no such directory\n" and done.stderr == ""


def test_a_process_for_users_code_starts_without_numpy_and_torch() -> None:
    code = """
import sys
import slipstream.rewards.grader, slipstream.environments.host
assert not {"numpy", "torch"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
