"""The run directory: what is in it, and that nothing in it is ever overwritten or half written."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from slipstream.config.file import parse
from slipstream.config.running import Tracker
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, RunDirError
from slipstream.run_dir.trackers import SINKS, Quotes, Sink, heading
from slipstream.run_dir.writing import (
    LogPosition,
    RunLog,
    check_free,
    machine,
    read_lines,
    run_path,
    write_atomic,
)

ROOT = Path(__file__).parents[2]


def config_of(**settings: object) -> Config:
    return parse({"student": "s", "teachers": {"main": {"model": "t"}}, **settings})


class Remember:
    """A sink that keeps what it is told."""

    every = 1

    def __init__(self) -> None:
        self.told: list[tuple[dict[str, float], int]] = []
        self.said: list[tuple[list[str], int]] = []
        self.closed = False

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.told.append((dict(numbers), step))

    def samples(self, quotes: Quotes, step: int) -> None:
        self.said.append(([quote["response"] for quote in quotes], step))

    def close(self) -> None:
        self.closed = True


def test_a_new_run_directory_says_what_runs_and_where(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "ä"
    config = config_of(learner={"lr": 0.5}, data={"system_prompt": "→"})
    with RunLog.create(config, path):
        assert sorted(file.name for file in path.iterdir()) == [
            "config.toml",
            "ledger.jsonl",
            "meta.json",
            "metrics.jsonl",
            "samples.jsonl",
            "trace.json",
        ]
    assert parse(tomllib.loads((path / "config.toml").read_text("utf-8"))) == config
    meta = json.loads((path / "meta.json").read_text())
    assert meta.keys() == {
        "format", "started", "command", "python", "packages", "platform", "cpus", "git", "config", "prompts"
    }  # fmt: skip
    assert meta["packages"].keys() == {"slipstream", "torch", "transformers", "numpy"}
    assert all(meta["packages"].values())


def test_lines_are_there_as_soon_as_they_are_logged(tmp_path: Path) -> None:
    with RunLog.create(config_of(), tmp_path) as log:
        log.metrics("train", {"loss": 0.5, "lag/mean": 0.0}, update=1)
        log.metrics("eval", {"accuracy": 0.25}, update=1)
        log.ledger({"number": 3, "end": "dropped", "reason": "rollout failed"})
        assert read_lines(tmp_path / "metrics.jsonl") == [
            {"kind": "train", "update": 1, "loss": 0.5, "lag/mean": 0.0},
            {"kind": "eval", "update": 1, "accuracy": 0.25},
        ]
        assert read_lines(tmp_path / "ledger.jsonl") == [{"number": 3, "end": "dropped", "reason": "rollout failed"}]


def test_sinks_can_tell_training_from_evaluation_and_are_closed(tmp_path: Path) -> None:
    sink = Remember()
    with RunLog.create(config_of(), tmp_path) as log:
        log.sinks.append(sink)
        log.metrics("train", {"loss": 0.5, "reward/exact": 0.5}, update=2)
        log.metrics("eval", {"accuracy": 0.25, "reward/exact": 0.25}, update=2)
        assert not sink.closed
    assert sink.told == [
        ({"train/loss": 0.5, "reward/exact": 0.5}, 2),
        ({"eval/accuracy": 0.25, "eval/reward/exact": 0.25}, 2),
    ]
    assert sink.closed


@pytest.mark.parametrize("file", ["config.toml", "metrics.jsonl", "ledger.jsonl", "checkpoints", "final"])
def test_a_directory_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("precious")
    with pytest.raises(RunDirError, match="already holds a run: choose another with --output, or remove it"):
        RunLog.create(config_of(), tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(file, "precious")]


def test_a_directory_that_only_exists_is_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    check_free(tmp_path)
    with RunLog.create(config_of(), tmp_path):
        assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_where_the_run_should_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(RunDirError, match="run is a file: choose another run directory"):
        RunLog.create(config_of(), tmp_path / "run")
    with pytest.raises(RunDirError, match="below cannot be written: .*run is a file; choose another"):
        RunLog.create(config_of(), tmp_path / "run" / "below")


def test_the_run_directory_is_the_configured_one_or_named_after_the_config_and_the_time() -> None:
    assert run_path(config_of(output="a/b"), "demo") == Path("a/b")
    assert re.fullmatch(r"runs/demo-\d{8}-\d{6}", str(run_path(config_of(), "demo")))


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new" * 10_000 + "\ud800")
    assert path.read_text() == "old"
    write_atomic(path, "new")
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_whoever_reads_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")
    with path.open() as reader:  # had the file been opened for writing, this reader would now find it empty
        write_atomic(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"


def test_the_machine_is_described_without_git_and_outside_a_repository(tmp_path: Path) -> None:
    script = "import json, slipstream.run_dir.writing as r; print(json.dumps(r.machine()['git']))"
    for environment in ({"PATH": ""}, {"PATH": "/usr/bin:/bin", "GIT_DIR": str(tmp_path / "none")}):
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout) is None
    assert machine()["command"] == sys.argv


# --- trackers ----------------------------------------------------------------------------------------------


def quote_of(update: int) -> dict[str, Any]:
    return {
        "update": update,
        "prompt_id": "p",
        "prompt": "2+2=\n<assistant>",
        "response": "4\n",
        "finish": "eos",
        "rewards": {"exact": 1.0},
        "versions": [[max(0, update - 3), 1], [update - 1, 1]],
        "tokens": ["4", "\n"],
        "logp": [-0.1, -0.2],
        "teacher": "main",
        "teacher_logp": [-0.1, None],
    }


def test_a_sink_gets_the_samples_of_as_many_updates_as_it_can_bear(tmp_path: Path) -> None:
    every, some = Remember(), Remember()
    some.every = 10
    with RunLog.create(config_of(), tmp_path) as log:
        log.sinks += [every, some]
        for update in range(1, 22):
            log.samples([quote_of(update)], update=update)
    assert [step for _, step in every.said] == list(range(1, 22))
    assert [step for _, step in some.said] == [1, 11, 21]
    assert len(read_lines(tmp_path / "samples.jsonl")) == 21


def test_a_sample_is_told_in_a_line() -> None:
    assert heading(quote_of(5)) == "update 5, lag 0 to 2, exact 1, 2 tokens, ended"
    fresh = quote_of(1) | {"finish": "length", "rewards": {}, "versions": [[0, 2]]}
    assert heading(fresh) == "update 1, lag 0, 2 tokens, cut off"
    for finish, said in (("turns", "out of turns"), ("time", "out of time")):
        assert heading(fresh | {"finish": finish}) == f"update 1, lag 0, 2 tokens, {said}"


def test_tensorboard_shows_samples_as_they_are(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog.create(config_of(log={"to": ["tensorboard"]}), tmp_path) as log:
        for update in range(1, 13):
            log.samples([quote_of(update), quote_of(update)], update=update)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["tensors"] == ["samples/0/text_summary", "samples/1/text_summary"]
    found = {
        event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/1/text_summary")
    }
    assert found.keys() == {1, 11}
    assert found[11] == (
        "update 11, lag 0 to 2, exact 1, 2 tokens, ended\n\n"
        "prompt:\n\n    2+2=\n    <assistant>\n\nresponse:\n\n    4\n"
    )


class Told:
    """In place of a tracker that is not installed: keeps every call, by its name, and answers with itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.id = self.run_id = "the run"
        self.info = self

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **given: Any) -> Told:
            self.calls.append((name, args, given))
            return self

        return call


ROW = ["update 1, lag 0, exact 1, 2 tokens, ended", "2+2=\n<assistant>", "4\n"]
TABLE = ("Table", (), {"columns": ["sample", "prompt", "response"], "data": [ROW]})
TEXTS: dict[str, list[Any]] = {
    "wandb": [TABLE, ("log", (), {"step": 1})],
    "trackio": [TABLE, ("log", (), {"step": 1})],
    "mlflow": [("log_text", ("\n".join(ROW), "samples/update-000001.txt"), {})],
}
"""Calls of each tracker for one sample."""


@pytest.mark.parametrize("tracker", TEXTS)
def test_every_other_tracker_is_told_samples_in_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: Tracker
) -> None:
    told = Told()
    monkeypatch.setitem(sys.modules, tracker, told)
    sink = SINKS[tracker](config_of(), tmp_path)
    before = len(told.calls)
    sink.samples([quote_of(1)], 1)
    assert told.calls[before:] == [
        (name, args or ({"samples": told},), given) if name == "log" else (name, args, given)
        for name, args, given in TEXTS[tracker]
    ]


def refuse(config: Config, path: Path, known: str | None) -> Sink:
    raise PermissionError("no key")


CONTINUED: dict[str, tuple[str, dict[str, Any]]] = {
    "wandb": ("init", {"id": "the run", "resume": "allow"}),
    "trackio": ("init", {"name": "run", "resume": "allow"}),
    "mlflow": ("start_run", {"run_id": "the run"}),
}
"""Calls by which trackers continue a run whose identity they gave before."""


@pytest.mark.parametrize("tracker", CONTINUED)
def test_a_resumed_run_continues_its_run_of_a_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: Tracker
) -> None:
    told, (name, options) = Told(), CONTINUED[tracker]
    monkeypatch.setitem(sys.modules, tracker, told)
    monkeypatch.setattr("slipstream.run_dir.trackers.importlib.util.find_spec", lambda name: name)
    config = config_of(log={"to": [tracker]})
    with RunLog.create(config, tmp_path / "run") as log:
        mark = log.mark()
    with RunLog.reopen(config, tmp_path / "run", mark):
        pass
    monkeypatch.setitem(SINKS, tracker, refuse)
    with pytest.raises(ConfigError, match=r"no key; to begin a new run there instead of .*run, remove it from .*meta"):
        RunLog.reopen(config, tmp_path / "run", mark)
    first, second = [given for each, _, given in told.calls if each == name]
    assert not options.items() <= first.items() and options.items() <= second.items()


def test_tensorboard_holds_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog.create(config_of(log={"to": ["tensorboard"]}), tmp_path) as log:
        for update in (1, 2, 3):
            log.metrics("train", {"loss": 1 / 2**update, "lag/mean": float(update)}, update=update)
        log.metrics("eval", {"accuracy": 0.25}, update=3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {
        "train/loss": [(1, 0.5), (2, 0.25), (3, 0.125)],
        "lag/mean": [(1, 1.0), (2, 2.0), (3, 3.0)],
        "eval/accuracy": [(3, 0.25)],
    }


def test_a_tracker_that_fails_is_told_of_once_and_left_out(tmp_path: Path) -> None:
    class Failing(Remember):
        def log(self, numbers: Mapping[str, float], step: int) -> None:
            super().log(numbers, step)
            raise ConnectionError("no route to host\nand more")

        def close(self) -> None:
            raise AssertionError("it is not asked any more")

    class Late(Remember):
        def close(self) -> None:
            raise TimeoutError("still sending")

    class Mute(Remember):
        def samples(self, quotes: Quotes, step: int) -> None:
            raise ValueError("no texts")

    said, failing, other = list[str](), Failing(), Late()
    with RunLog.create(config_of(), tmp_path) as log:
        log.say = said.append
        log.sinks += [failing, Mute(), other]
        for update in (1, 2):
            log.samples([quote_of(update)], update=update)
            log.metrics("train", {"loss": 1.0}, update=update)
    assert [len(sink.told) for sink in (failing, other)] == [1, 2]
    assert other.said == [(["4\n"], 1), (["4\n"], 2)]
    assert said == [
        "Mute failed and gets no more metrics, metrics.jsonl has them all: no texts",
        "Failing failed and gets no more metrics, metrics.jsonl has them all: no route to host",
        "Late failed and gets no more metrics, metrics.jsonl has them all: still sending",
    ]
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2


def test_a_resume_without_samples_and_trace_cuts_those_of_discarded_updates(tmp_path: Path) -> None:
    marks = list[LogPosition]()
    with RunLog.create(config_of(), tmp_path) as log:
        for update in (1, 2):
            log.samples([quote_of(update)], update=update)
            assert log.trace is not None
            log.trace.write(f"{{{update}}},\n")
            marks.append(log.mark())
    without = config_of().with_values(log={"samples": 0, "trace": False})
    with RunLog.reopen(without, tmp_path, marks[0]) as log:
        assert log.trace is None
        marks.append(log.mark())
    assert [line["update"] for line in read_lines(tmp_path / "samples.jsonl")] == [1]
    assert (tmp_path / "trace.json").read_text() == "[\n{1},\n"
    with RunLog.reopen(config_of(), tmp_path, marks[-1]) as log:
        log.samples([quote_of(2)], update=2)
    assert [line["update"] for line in read_lines(tmp_path / "samples.jsonl")] == [1, 2]


@pytest.mark.parametrize("tracker", get_args(Tracker))
def test_a_tracker_that_is_not_installed_is_named_with_its_extra_before_anything_is_written(
    tmp_path: Path, tracker: str
) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert tracker in extras
    if importlib.util.find_spec(tracker):
        pytest.skip(f"{tracker} is installed")
    message = f"log.to = ['{tracker}'] needs {tracker}: pip install 'slipstream[{tracker}]'"
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunLog.create(config_of(log={"to": ["tensorboard", tracker]}), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_refuses_to_start_leaves_no_run_and_nobody_elses_files_are_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setitem(SINKS, "tensorboard", refuse)
    config = parse({"student": "s", "teachers": {"main": {"model": "t"}}, "log": {"to": "tensorboard"}})
    with pytest.raises(ConfigError, match="cannot start: no key"):
        RunLog.create(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    check_free(tmp_path)
