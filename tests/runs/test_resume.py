"""A run that was stopped goes on where it was: every group ends exactly once, and the weights are the same."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import slipstream
from slipstream.cli import main
from slipstream.config.data import AdaptiveConfig, DataConfig
from slipstream.config.objective import PolicyConfig
from slipstream.config.rewards import TaskConfig
from slipstream.config.running import HealthConfig
from slipstream.config.schedule import Async, Periodic, Replay, StepOff, Sync
from slipstream.engines.record_files import read_groups
from slipstream.errors import RunDirError, WorkerDied
from slipstream.pipeline.checkpoint import newest
from slipstream.pipeline.ledger import Ledger
from slipstream.protocols import Engines, Sampler, Sampling
from slipstream.records import Group, Prompt, unfinished
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runs import start as command
from support import toy_runs
from support.coordinators import Coordinators
from support.toy_runs import config, ends, go

SCHEDULES = [
    Sync(),
    Periodic(),
    StepOff(k=2),
    Replay(k=2),
    Async(tau=2),
    Async(tau=2, order="submission"),
    Async(tau=1, publish_every=2),
    Async(tau=2, max_lag=2),
    Async(tau=2, max_lag=1, on_old="restart"),
    Async(tau=2, max_lag=1, on_old="drop"),
]


def quoted(path: Path) -> list[int]:
    return [quote["update"] for quote in read_lines(path / "samples.jsonl")]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_stopped_at_any_time_and_gone_on_every_group_is_trained_on_once(tmp_path: Path, schedule: Any) -> None:
    for index, seconds in enumerate((0.1, 3.1, 6.1)):
        path = tmp_path / str(index)
        go(path, schedule, until=seconds)
        assert not (path / "final").exists() and (path / "checkpoints").exists()
        go(path, schedule, until=1.3)
        go(path, schedule)
        ledger = read_lines(path / "ledger.jsonl")
        assert sorted(entry["number"] for entry in ledger) == list(range(len(ledger))), "each exactly once"
        assert len(ends(path)) == 24
        lines = read_lines(path / "metrics.jsonl")
        assert len(ledger) - 24 == lines[-1]["dropped"]
        assert [line["update"] for line in lines] == list(range(1, 9))
        assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
        assert quoted(path) == sorted([*range(1, 9)] * 2), "two of each update"
        assert (path / "final" / "table.npy").exists()
        events = json.loads((path / "trace.json").read_text().rstrip(",\n") + "]")
        assert {event["name"] for event in events} >= {"update 1", "update 8"}


def test_the_last_line_names_the_checkpoint_from_which_resume_continues(tmp_path: Path) -> None:
    for name in ("12", "15", "16", "17", "18", "20.suspect"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    said, made = io.StringIO(), config(Sync()).model_copy(update={"health": HealthConfig()})
    command.print_resume_command(tmp_path, made, Console(file=said, width=200))
    assert made.health.proof == 5 and "saved after update 15;" in said.getvalue()


@pytest.mark.parametrize("schedule", [Sync(), Periodic()], ids=str)
def test_an_on_policy_run_ends_with_the_same_weights(tmp_path: Path, schedule: Any) -> None:
    whole = go(tmp_path / "whole", schedule)
    go(tmp_path / "parts", schedule, until=9.0)
    parts = go(tmp_path / "parts", schedule)
    np.testing.assert_allclose(parts.table.detach().numpy(), whole.table.detach().numpy(), rtol=1e-12)


OFTEN = [
    *SCHEDULES,
    Async(tau=2, on_publish="restart"),
    Async(tau=2, on_publish="drain"),
    Async(tau=3, publish_every=2, on_publish="restart"),
]


@pytest.mark.parametrize("schedule", OFTEN, ids=str)
def test_gone_on_with_from_any_checkpoint_a_run_makes_the_updates_of_one_never_stopped(
    tmp_path: Path, schedule: Any
) -> None:
    """Records are of the same groups in the same order, with the same tokens of the same versions.

    The checkpoint has groups that are half rolled out, rolled out or scored. Scores take no time here: a group that is
    being scored is scored anew.
    """
    whole = go(tmp_path / "whole", schedule, score=0.0)
    places = set()
    for version in (2, 4, 6):
        path = tmp_path / str(version)
        shutil.copytree(tmp_path / "whole", path)
        shutil.rmtree(path / "final")
        for later in range(version + 1, 9):
            shutil.rmtree(path / "checkpoints" / str(later), ignore_errors=True)
        saved = newest(path)
        groups = read_groups(saved.path)
        places |= {"half" for group in groups if unfinished(group)}
        places |= {"ready" for _ in saved.state.admission.ready}
        parts = go(path, schedule, score=0.0)
        np.testing.assert_allclose(parts.table.detach().numpy(), whole.table.detach().numpy(), rtol=0, atol=1e-12)
        assert read_lines(path / "ledger.jsonl") == read_lines(tmp_path / "whole" / "ledger.jsonl")
        lines = [read_lines(tmp_path / name / "metrics.jsonl") for name in (str(version), "whole")]
        for line, expected in zip(*lines, strict=True):
            for name in ("loss", "lag/mean", "lag/max", "tokens", "version", "dropped", "restarted", "thrown_tokens"):
                assert line[name] == pytest.approx(expected[name], abs=1e-12), name
    match schedule:
        case Sync() | Periodic():
            assert not places
        case StepOff() | Async(publish_every=1):
            assert places == {"half", "ready"}
        case _:
            assert "ready" in places


@pytest.mark.parametrize("changes", [{"max_lag": 1, "on_old": "restart"}, {"on_publish": "restart"}], ids=str)
def test_tokens_thrown_away_since_the_last_update_count_after_a_stop_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    ledgers, starts, init = list[Ledger](), list[int](), Ledger.__init__

    def remembered(self: Ledger, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        ledgers.append(self)
        starts.append(self.counts["thrown_tokens"])

    monkeypatch.setattr(Ledger, "__init__", remembered)
    go(tmp_path, Async(tau=3, **changes), until=8.0)
    before, last = ledgers[0].totals, read_lines(tmp_path / "metrics.jsonl")[-1]
    assert before["thrown_tokens"] > last["thrown_tokens"]
    go(tmp_path, Async(tau=3, **changes))
    assert starts == [0, before["thrown_tokens"]]


CHOSEN: dict[str, Any] = {
    "data": DataConfig(order="adaptive", adaptive=AdaptiveConfig(half_life=3.0)),
    "policy": PolicyConfig(refill=2.0),
    "task": TaskConfig(reward=("./own.py:ended",)),
}


@pytest.mark.parametrize("schedule", OFTEN, ids=str)
def test_a_run_that_chooses_its_prompts_goes_on_exactly(tmp_path: Path, schedule: Any) -> None:
    """The rates of prompts, the prompts of groups in flight and the groups that may still be replaced are saved."""
    whole = go(tmp_path / "whole", schedule, score=0.0, sections=CHOSEN)
    expected = read_lines(tmp_path / "whole" / "ledger.jsonl")
    assert any(line.get("reason") == "no advantage" for line in expected)
    assert len({line["prompt"] for line in expected[:10]}) < 10 or len(expected) > 24
    for version in (2, 6):
        path = tmp_path / str(version)
        shutil.copytree(tmp_path / "whole", path)
        shutil.rmtree(path / "final")
        for later in range(version + 1, 9):
            shutil.rmtree(path / "checkpoints" / str(later), ignore_errors=True)
        parts = go(path, schedule, score=0.0, sections=CHOSEN)
        np.testing.assert_allclose(parts.table.detach().numpy(), whole.table.detach().numpy(), rtol=0, atol=1e-12)
        assert read_lines(path / "ledger.jsonl") == expected
        lines = [read_lines(tmp_path / name / "metrics.jsonl") for name in (str(version), "whole")]
        for name in ("prompts/tried", "prompts/effective", "dropped"):
            assert [line[name] for line in lines[0]] == [line[name] for line in lines[1]], name


def test_what_was_in_flight_when_a_run_was_stopped_is_not_drawn_again(tmp_path: Path) -> None:
    """Stopped in the middle of an update, twice at the same one: what each part has drawn stays."""
    drawn, schedule = 0, Async(tau=3)
    for seconds in (2.0, 0.4, 0.4):
        go(tmp_path, schedule, until=seconds)
        saved = newest(tmp_path)
        assert saved.state.admission.version == 0
        groups = read_groups(saved.path)
        tokens = sum(handle.header.tokens for group in groups for handle in group)
        assert tokens > drawn and len(groups) == 12
        drawn = tokens
    go(tmp_path, schedule)
    assert ends(tmp_path) == list(range(24))
    assert read_lines(tmp_path / "metrics.jsonl")[-1]["thrown_tokens"] == 0


def test_what_came_after_the_checkpoint_is_forgotten(tmp_path: Path) -> None:
    """Cut the files as a power cut does: the last checkpoint is of update 4, lines go on and end in the middle."""
    go(tmp_path, Async(tau=1), until=12.0)
    version = newest(tmp_path).state.admission.version
    assert version > 4
    for later in range(5, version + 1):
        checkpoint = tmp_path / "checkpoints" / str(later)
        if checkpoint.exists():
            checkpoint.rename(tmp_path / f"lost-{later}")
    for name in ("metrics.jsonl", "ledger.jsonl", "samples.jsonl", "trace.json"):
        with (tmp_path / name).open("a") as file:
            file.write('{"kind": "train", "upd')
    go(tmp_path, Async(tau=1))
    assert ends(tmp_path) == list(range(24))
    assert quoted(tmp_path) == sorted([*range(1, 9)] * 2)
    assert [line["update"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 9))


def test_a_run_that_cannot_be_gone_on_with_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} holds no run: there is no config.toml in it\n"
    with RunLog.create(config(Sync()), tmp_path):
        pass
    assert main(["resume", str(tmp_path)]) == 2
    assert f"{tmp_path} has no checkpoint to go on from: it was stopped before the first" in capsys.readouterr().err
    (tmp_path / "final").mkdir()
    assert main(["resume", str(tmp_path)]) == 2
    assert "is finished: the student is in" in capsys.readouterr().err
    with pytest.raises(RunDirError, match="no checkpoint"):
        newest(tmp_path / "nothing")


# --- the command line, killed for real -----------------------------------------------------------------------------


def write_config(path: Path, models: Path) -> Path:
    (path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{i} and {i}?"}) + "\n" for i in range(50)))
    (path / "run.toml").write_text(
        f"""
student = "{models / "student"}"
updates = 300
output = "{path / "run"}"
data.train = "{path / "data.jsonl"}"
teachers.main.model = "{models / "teacher"}"
sampler.max_tokens = 12
learner.batch_size = 4
loss.m = 2
checkpoint.every = 3
runtime.kind = "inline"
"""
    )
    return path / "run.toml"


def test_what_goes_on_knows_every_policy_that_its_tokens_are_of(tmp_path: Path, models_dir: Path) -> None:
    """Groups in flight go on, and the weights that drew them are in the checkpoint."""
    written, run = write_config(tmp_path, models_dir), tmp_path / "run"
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}?", "answer": "1"}) + "\n" for i in range(50))
    )
    settings = {
        "updates": 8,
        "checkpoint.keep": 9,
        "task.reward": "exact",
        "sampler.group": 2,
        "schedule.order": "submission",
        "learner.exact_drift": "true",
        "correction.preset": "decoupled_token_is",
        "policy.advantage": "grpo",
    }
    changes = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    assert main(["train", str(written), *changes]) == 0
    assert main(["resume", str(run), "--from", "3"]) == 0
    lines = read_lines(run / "metrics.jsonl")
    assert [line["update"] for line in lines] == list(range(1, 9))
    assert max(line["lag/max"] for line in lines[3:]) > 0, "there are tokens of the ring's versions"
    assert lines[3]["lag/max"] > 0, "of tokens that are older than the checkpoint"
    for line in lines:
        assert line["old_logp_missing"] == 0 and line["drift/rollout_kl_coverage"] == 1
        assert line["lag/max"] <= line["update"] - 1


def test_who_dies_while_a_run_goes_on_is_loaded_again(
    tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, opens, deaths = tmp_path / "run", command.open_engines, iter([True, False])
    assert main(["train", str(write_config(tmp_path, models_dir)), "--updates", "3"]) == 0

    def opened(*given: Any) -> Any:
        if next(deaths):
            raise WorkerDied("scorer died while it was loaded: killed by SIGKILL")
        return opens(*given)

    monkeypatch.setattr(command, "open_engines", opened)
    assert main(["resume", str(run), "--updates", "5"]) == 0
    assert "scorer died while it was loaded: killed by SIGKILL; the run restarts" in capsys.readouterr().out
    assert [line["update"] for line in read_lines(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def coordinators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinators]:
    made = Coordinators(tmp_path_factory.mktemp("coordinators"))
    yield made
    made.close()


def begun(coordinators: Coordinators, path: Path, *command: str) -> int:
    """A training run of which some updates are made."""
    pid, metrics, until = coordinators.begin(*command), path / "run" / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and len(read_lines(metrics)) >= 8):
        assert time.monotonic() < until, coordinators.output()
        time.sleep(0.02)
    return pid


def finish(path: Path) -> None:
    """Go on, and stop after few more updates, so that the test is short."""
    last = newest(path / "run").state.admission.version
    assert main(["resume", str(path / "run"), "--updates", str(last + 5)]) == 0
    numbers = ends(path / "run")
    assert numbers == sorted(set(numbers)) and len(numbers) == 4 * (last + 5)
    updates = [line["update"] for line in read_lines(path / "run" / "metrics.jsonl")]
    assert updates == list(range(1, last + 6))


@pytest.mark.processes
def test_a_run_that_was_killed_goes_on(coordinators: Coordinators, tmp_path: Path, models_dir: Path) -> None:
    os.kill(begun(coordinators, tmp_path, "train", str(write_config(tmp_path, models_dir))), signal.SIGKILL)
    assert coordinators.end() == -signal.SIGKILL
    finish(tmp_path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.processes
def test_a_run_that_is_told_to_stop_says_how_to_go_on(
    coordinators: Coordinators, tmp_path: Path, models_dir: Path, number: signal.Signals, code: int
) -> None:
    os.kill(begun(coordinators, tmp_path, "train", str(write_config(tmp_path, models_dir))), number)
    assert coordinators.end() == code
    output = coordinators.output()
    assert f"continue with: slipstream resume {tmp_path / 'run'}" in output and "Traceback" not in output
    version = newest(tmp_path / "run").state.admission.version
    assert f"saved after update {version}; continue with" in output
    stopped = [e for e in read_lines(tmp_path / "run" / "ledger.jsonl") if e.get("reason") == "run stopped"]
    assert len(stopped) > 0
    finish(tmp_path)


@pytest.mark.processes
def test_a_run_whose_terminal_is_closed_saves_itself(tmp_path: Path, models_dir: Path) -> None:
    config, (ours, theirs) = write_config(tmp_path, models_dir), os.openpty()
    script = "import os, sys; os.login_tty(int(sys.argv.pop()))\n"
    script += "from slipstream.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", script, "train", str(config), str(theirs)]
    with subprocess.Popen(words, pass_fds=[theirs], start_new_session=True) as process:
        os.close(theirs)
        os.set_blocking(ours, False)
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and len(read_lines(metrics)) >= 4):
            with contextlib.suppress(BlockingIOError):
                os.read(ours, 1 << 16)
            time.sleep(0.01)
        os.close(ours)
        assert process.wait(60) == 129
    admission = newest(tmp_path / "run").state.admission
    assert admission.in_flight and admission.version >= 4


def test_a_run_that_is_not_to_care_for_its_terminal_goes_on(
    coordinators: Coordinators, tmp_path: Path, models_dir: Path
) -> None:
    pid = begun(coordinators, tmp_path, "nohup", "train", str(write_config(tmp_path, models_dir)))
    os.kill(pid, signal.SIGHUP)
    os.kill(pid, signal.SIGTERM)
    assert coordinators.end() == 143, coordinators.output()


def test_a_stall_report_can_be_asked_for_and_stops_nothing(
    coordinators: Coordinators, tmp_path: Path, models_dir: Path
) -> None:
    pid = begun(coordinators, tmp_path, "train", str(write_config(tmp_path, models_dir)))
    os.kill(pid, signal.SIGQUIT)
    until = time.monotonic() + 60
    while "learner " not in coordinators.output():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(pid, signal.SIGTERM)
    assert coordinators.end() == 143
    for part in ("after the last change, at version", "credits in use", "sampler ", "scorer ", "learner "):
        assert part in coordinators.output()


@settings(max_examples=20)
@given(updates=st.integers(1, 9), evals=st.integers(1, 4), further=st.integers(1, 4), tau=st.integers(0, 2))
def test_a_run_that_evaluates_ends_with_an_evaluation_of_its_last_student(
    updates: int, evals: int, further: int, tau: int
) -> None:
    """Evaluate at the end also if updates are no multiple of eval.every, and after `resume --updates`."""
    ends = updates, updates + further
    with tempfile.TemporaryDirectory() as place:
        for end in ends:
            go(Path(place), Async(tau=tau), updates=end, evals=evals)
        found = [line["update"] for line in read_lines(Path(place) / "metrics.jsonl") if line["kind"] == "eval"]
    assert found == sorted({*range(0, ends[1] + 1, evals), *ends})


def trained(run: Path, m: int, **sections: Any) -> Path:
    """Train four updates with a checkpoint after each, so that groups are in flight at the second."""
    slipstream.train(
        {
            "student": "builtin:student",
            "teachers": {"main": {"model": "builtin:teacher"}},
            "updates": 4,
            "sampler": {"max_tokens": 40, "slots": 4},
            "loss": {"kind": "reverse_kl_mc", "m": m},
            "learner": {"batch_size": 8},
            "schedule": {"kind": "async", "tau": 2},
            "checkpoint": {"every": 1, "keep": 4},
            "runtime": {"kind": "inline", "device": "cpu"},
            "output": str(run),
            **sections,
        }
    )
    return run


@pytest.mark.parametrize(
    ("m", "changes"),
    [
        (2, {"loss.m": "m = 4"}),
        pytest.param(4, {"loss.m": "m = 1"}, marks=pytest.mark.slow),
        pytest.param(2, {"sampler.max_tokens": "max_tokens = 12"}, marks=pytest.mark.slow),
        pytest.param(
            2, {"sampler.top_k": "top_k = 8", "sampler.keep_mask": "keep_mask = true"}, marks=pytest.mark.slow
        ),
        (2, {"freshness": "[freshness]"}),
    ],
    ids=str,
)
def test_groups_in_flight_begin_again_if_what_is_recorded_of_them_changes(
    m: int, changes: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "run", m)
    begun = [handle.header for group in read_groups(run / "checkpoints" / "2") for handle in group]
    assert any(header.finish == "released" for header in begun)
    text = (run / "config.toml").read_text()
    for line in changes.values():
        if line.startswith("["):
            text += f"\n{line}\n"
            continue
        text, count = re.subn(rf"(?m)^{line.partition(' ')[0]} = .*$", line, text, count=1)
        assert count == 1
    (run / "config.toml").write_text(text)
    capsys.readouterr()
    assert main(["resume", str(run), "--from", "2", "--change", *changes]) == 0
    why = " ".join(capsys.readouterr().out.split())
    assert any(f"groups in flight begin again, because {setting}" in why for setting in changes)
    ledger = read_lines(run / "ledger.jsonl")
    assert sorted(entry["number"] for entry in ledger) == list(range(len(ledger)))
    lines = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["update"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["thrown_tokens"] >= sum(header.tokens for header in begun) > 0
    # a checkpoint of before the change, in a run that has the new settings since then
    assert main(["resume", str(run), "--from", "2"]) == 0
    assert "groups in flight begin again" in " ".join(capsys.readouterr().out.split())
    assert main(["resume", str(run), "--from", "3"]) == 0
    assert "groups in flight continue" in " ".join(capsys.readouterr().out.split())


def test_samples_that_are_learned_from_again_keep_the_settings_of_their_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "run", 2, reuse={})
    assert main(["resume", str(run), "--from", "2"]) == 0
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("slots = 4\n", "slots = 12\n"))
    assert main(["resume", str(run), "--from", "2", "--change", "sampler.slots"]) == 0
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("m = 2\n", "m = 4\n"))
    capsys.readouterr()
    assert main(["resume", str(run), "--from", "2", "--change", "loss.m"]) == 2
    assert "has samples that [reuse] learns from again, and loss.m was changed since" in capsys.readouterr().err


def rows_of(path: Path, first: int) -> str:
    rows = [{"prompt": f"A{i}B{9 - i}C1=", "answer": "1"} for i in range(first, first + 6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    return str(path)


@pytest.mark.parametrize("setting", ["data.train", "data.shuffle"])
def test_other_data_begins_groups_again_and_accuses_no_teacher(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Canary texts are made from the first prompts, so the reference of a teacher is of other texts now."""
    data = {"train": rows_of(tmp_path / "rows.jsonl", 0), "shuffle": True}
    run = trained(tmp_path / "run", 2, data=data, health={"canary": 1})
    if setting == "data.train":
        rows_of(tmp_path / "rows.jsonl", 3)
    else:
        config = (run / "config.toml").read_text()
        (run / "config.toml").write_text(config.replace("shuffle = true", "shuffle = false"))
    capsys.readouterr()
    assert main(["resume", str(run), "--from", "2", "--change", setting]) == 0
    said = " ".join(capsys.readouterr().out.split())
    again = "begin again, because data.train was changed"
    assert (again if setting == "data.train" else "groups in flight continue") in said
    assert not list((run / "checkpoints").glob("*.suspect"))


class HalfBroken:
    """A sampler whose second response of each finished group has failed."""

    def __init__(self, inner: Sampler) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> Group:
        one, other = await self.inner.generate(prompt, sampling, begun)
        if not unfinished([one, other]):
            other = other.with_header(finish="error", cause="the environment broke", outcome={"failed/error": 1.0})
        return [one, other]


def test_a_stop_forgets_no_cause_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = toy_runs.engines

    def broken(**options: Any) -> Engines:
        engines = made(**options)
        return replace(engines, samplers=tuple(map(HalfBroken, engines.samplers)))  # type: ignore[arg-type]

    monkeypatch.setattr(toy_runs, "engines", broken)
    for until in (4.1, None):
        toy_runs.go(tmp_path / "run", Async(tau=2), until=until)
    entries = [entry for entry in read_lines(tmp_path / "run" / "ledger.jsonl") if entry["end"] == "trained"]
    assert len(entries) == 24
    assert all((entry["failed"], entry["causes"]) == ([1], ["the environment broke"]) for entry in entries)
