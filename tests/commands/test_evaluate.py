"""`eval` of a run: asked what the run asks, without a trace in it but for what was found."""

import asyncio
import io
import json
import shutil
import socket
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from math import inf, isnan
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from rich.console import Console

from slipstream.cli import main
from slipstream.commands.evaluate import Watch
from slipstream.config.rewards import TaskConfig
from slipstream.config.running import EvalConfig
from slipstream.config.schedule import Sync
from slipstream.errors import RunDirError
from slipstream.models.resolve import check_reachable
from slipstream.pipeline.run import Run
from slipstream.plan.evaluation import config_of_model, with_options
from slipstream.reporting.terminal.progress import key_readings
from slipstream.run_dir.atomic_files import append, directory_lock
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from slipstream.statistics import standard_error
from slipstream.testing.endpoint import model, send
from support.fake_endpoint import FakeEndpoint
from support.toy_runs import PROMPTS, config, engines

CONFIG = """
student = "models/student"
updates = 2
[data]
train = "train.jsonl"
template = "{question}="
answer = "solution"
[data.eval]
math = "math.jsonl"
code = "code.csv"
[teachers.main]
model = "models/teacher"
[sampler]
max_tokens = 6
slots = 8
[loss]
m = 2
[learner]
batch_size = 4
lr = 1e-3
[task]
reward = ["./mine.py:share", "exact"]
[eval]
every = 1
n = 3
prompts = 5
[checkpoint]
every = 1
[runtime]
kind = "inline"
device = "cpu"
"""
MINE = """
def share(text, ground_truth, meta):
    return sum(letter in "0123456789" for letter in text) / 6 + len(meta["level"] or "")
"""
PLAIN = CONFIG.replace('[data.eval]\nmath = "math.jsonl"\ncode = "code.csv"\n', "").partition("[task]")[0]


def rows(first: int) -> str:
    asked = [
        {"question": f"{i}+1", "solution": str(i + 1), "level": "", "id": f"q{i}"} for i in range(first, first + 8)
    ]
    return "".join(json.dumps(row) + "\n" for row in asked)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Path:
    """Where commands are called: models, data, and two runs."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(models_dir, home / "models")
    code = "question,solution,level,id\n" + "".join(f"{i}-1,{i - 1},,c{i}\n" for i in range(10, 16))
    files = {"train.jsonl": rows(0), "math.jsonl": rows(20), "code.csv": code, "mine.py": MINE, "plain.toml": PLAIN}
    for name, text in {**files, "run.toml": CONFIG}.items():
        (home / name).write_text(text.replace('"level": ""', '"level": "z"') if name == "math.jsonl" else text)
    short = ["--updates", "1", "--runtime.kind", "inline", "--runtime.device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["train", "run.toml", "--output", "runs/first"]) == 0
        assert main(["train", "plain.toml", "--output", "runs/plain", *short]) == 0
    return home


@pytest.fixture
def home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, to be spoilt."""
    shutil.copytree(trained, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


def contents(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def found(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[dict], str]:
    """Return the lines of `eval --json`, and its error output."""
    capsys.readouterr()
    assert main(["eval", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["eval", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip()


def test_an_evaluation_of_a_run_continues_its_own(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same prompts, rewards, lengths, sampling and seed: the numbers are those that the run had, to the bit."""
    run = home / "runs" / "first"
    lines = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "eval"]
    assert [(line["update"], line["set"]) for line in lines] == [(u, s) for u in range(3) for s in ("math", "code")]
    before = contents(run)
    got, said = found(capsys, "runs/first")
    assert said == ""
    for line, theirs in zip(got, lines[-2:], strict=True):
        assert (line["set"], line["update"]) == (theirs["set"], 2)
        assert line["avg@3"] == theirs["accuracy"] == line["reward/share"]
        assert (line["reward/exact"], line["truncated"]) == (theirs["reward/exact"], theirs["truncated"])
        assert line["length"] == theirs["length/mean"]
        assert line["error"] > 0
    math, code = got
    assert (math["data"], code["data"]) == ("math.jsonl", "code.csv") and math["avg@3"] > 1 > code["avg@3"]
    asked = {name: math[name] for name in ("prompts", "n", "max_tokens", "seed", "template")}
    assert asked == {"prompts": 5, "n": 3, "max_tokens": 6, "seed": 0, "template": "{question}="}
    after = contents(run)
    assert [json.loads(line) for line in after.pop("eval.jsonl").splitlines()] == got
    assert after == before
    assert (run / "eval.jsonl").stat().st_mode & 0o777 == 0o600


def test_sets_with_numbers_of_their_own(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's numbers for each set are the defaults, and an option replaces all of them."""
    run = home / "runs" / "first"
    sections = (run / "config.toml").read_text().replace("\nn = 3\n", "\nn = { math = 3, code = 4 }\n")
    (run / "config.toml").write_text(sections.replace("\nprompts = 5\n", "\nprompts = { math = 5, code = 2 }\n"))
    (math, code), _ = found(capsys, "runs/first", "-k", "1", "3")
    assert (math["n"], math["limit"], math["prompts"]) == (3, 5, 5) and "avg@3" in math
    assert (code["n"], code["limit"], code["prompts"]) == (4, 2, 2) and "avg@4" in code
    # the error of pass@k is s / √P over the prompts' own estimates, which are 0 or 1 for k = n
    prompts, share = math["prompts"], math["pass@3"]
    variance = (share * prompts * (1 - share) ** 2 + (1 - share) * prompts * share**2) / (prompts - 1)
    assert math["pass@3/error"] == pytest.approx((variance / prompts) ** 0.5)
    assert main(["eval", "runs/first", "-k", "3"]) == 0
    table = capsys.readouterr().out
    assert "avg@n" in table and " n " in table and f"{share:.1%} ± {math['pass@3/error']:.1%}" in table
    assert refused(capsys, "runs/first", "-k", "4").endswith("write -n 4")
    message = "--data: eval.n of the run has a number for each of its own sets, math, code: write -n"
    assert refused(capsys, "runs/first", "--data", "other=math.jsonl") == message


def test_a_model_behind_an_endpoint_answers_as_it_does_here(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-of-this-test")
    with FakeEndpoint(model("runs/first/final"), name="it", key="sk-of-this-test") as server:
        words = ("runs/first", "--limit", "2", "--url", server.url, "--api-key-env", "SERVER_KEY")
        (served, _), said = found(capsys, *words)
        assert said == "note: runs/first sampled with native; this evaluation samples with server\n"
        (here, _), _ = found(capsys, "runs/first", "--limit", "2")
        asked = server.requests[0]
        assert asked["model"] == "it" and asked["max_tokens"] == 6 and asked["temperature"] == 1
        assert served["url"] == server.url and "dtype" not in served and "sk-of" not in str(served)
        assert served["greedy"] == here["greedy"] and served["prompts"] == here["prompts"]
        server.always = "refused"
        assert main(["eval", *words]) == 2
        assert f"error: the rollout server at {server.url} answers 400" in capsys.readouterr().err


IMPOSSIBLE = {
    "--url http://127.0.0.1:1/v1 --engine vllm": "--url: the server chooses its own --engine: drop one of them",
    "--url http://127.0.0.1:1/v1 --dtype float64": "--url: the server chooses its own --dtype: drop one of them",
    "--api-key-env SERVER_KEY": "--api-key-env is for --url: drop it, or write both",
    "--engine vllm": "--engine = 'vllm': vLLM is not installed here; pip install 'vllm==0.32.*', or write 'native'",
}


@pytest.mark.parametrize("words", IMPOSSIBLE)
@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_engines_that_cannot_be(home: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "runs/first", *words.split()) == IMPOSSIBLE[words]


def test_a_server_that_does_not_list_its_models_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeEndpoint(model("models/student"), lists=False) as server:
        said = refused(capsys, "runs/first", "--url", server.url)
    assert said.startswith(f"--url {server.url}: it does not list its models (the rollout server at {server.url} answ")


def test_a_server_of_several_models_must_name_this_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Two(FakeEndpoint):
        def get(self, to: BaseHTTPRequestHandler) -> None:
            send(to, 200, {"data": [{"id": "a"}, {"id": "b"}]})

    with Two(model("models/student")) as server:
        assert refused(capsys, "runs/first", "--url", server.url) == (
            f"--url: {server.url} has the models 'a', 'b': start it with --served-model-name runs/first/final"
        )


@pytest.mark.parametrize("name", ["runs/first/final", "runs/first/checkpoints/2", "."])
def test_a_model_of_a_run_is_known_to_be_of_it(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in read_lines(home / "runs/first/metrics.jsonl") if line["kind"] == "eval"]
    for each in ("math.jsonl", "code.csv", "mine.py"):  # as the run was started from here
        shutil.copy(each, home / "runs/first/final")
    if name == ".":
        monkeypatch.chdir(home / "runs" / "first" / "final")
    got, _ = found(capsys, name)
    assert [line["avg@3"] for line in got] == [line["accuracy"] for line in lines[-2:]]
    assert [line["update"] for line in got] == [2, 2]
    earlier, _ = found(capsys, str(home / "runs/first/checkpoints/1"), "-k", "3")
    assert [line["avg@3"] for line in earlier] == [line["accuracy"] for line in lines[2:4]]
    assert [line["update"] for line in earlier] == [1, 1] and "pass@3" in earlier[0]
    assert len(read_lines(home / "runs/first/eval.jsonl")) == 4


def test_it_says_what_is_of_the_run_and_what_is_given(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["eval", "runs/first", "-n", "2", "--dtype", "float64", "--data", "math.jsonl"]) == 0
    out, err = capsys.readouterr()
    first, *rest = out.splitlines()
    assert first == (
        "from runs/first/config.toml: answer solution, template {question}=, reward ./mine.py:share "
        "exact, limit 5, max_tokens 6, temperature 1, seed 0, device cpu; from the command line: data math.jsonl, n 2, "
        "dtype float64"
    )
    assert err == "" and "\x1b" not in out and "\r" not in out, "no progress on a pipe"
    text = "\n".join(rest)
    assert "runs/first/final after update 2, graded by share, T = 1" in text
    for head in ("prompts", "avg@2", "pass@1", "greedy", "exact", "cut off", "tokens"):
        assert head in text
    (line,) = read_lines(home / "runs/first/eval.jsonl")
    assert (line["n"], line["dtype"], line["data"], "set" in line) == (2, "float64", "math.jsonl", False)


def test_options_have_the_names_of_settings_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`train --sampler.max_tokens` and `eval --max-tokens` were two spellings of one thing."""
    given = {"--sampler.max_tokens": "3", "--eval.n": "2", "--eval.prompts": "2", "--sampler.dtype": "float64"}
    assert main(["eval", "runs/first", "--json", *(word for pair in given.items() for word in pair)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["max_tokens"], line["n"], line["limit"], line["dtype"]) == (3, 2, 2, "float64")


def test_sets_and_columns_may_be_given_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("runs/first", "--data", "a=math.jsonl", "b=train.jsonl", "--reward", "exact", "--limit", "2", "-n", "1")
    got, _ = found(capsys, *words, "--data.prompt", "question", "--temperature", "0")
    assert [(line["set"], line["data"], line["prompts"], line["reward"]) for line in got] == [
        ("a", "math.jsonl", 2, ["exact"]),
        ("b", "train.jsonl", 2, ["exact"]),
    ]
    for line in got:
        assert line["avg@1"] == line["greedy"] and (line["prompt"], "template" in line) == ("question", False)


def test_without_held_out_prompts_those_of_training_are_asked_and_called_so(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "runs/plain")
    assert said.startswith("runs/plain/config.toml has no task.reward") and "--reward exact" in said
    assert main(["eval", "runs/plain", "--reward", "exact"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert (
        "data train.jsonl" in first
        and "(training prompts, because data.eval is not set); from the command line: reward" in first
    )
    assert not (home / "runs/plain/eval.jsonl").read_text().count("arithmetic")


def test_of_a_run_that_goes_on_its_last_whole_checkpoint(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = home / "runs" / "first"
    shutil.rmtree(run / "final")
    with directory_lock(run):
        got, said = found(capsys, "runs/first")
        assert (got[0]["model"], got[0]["update"]) == ("runs/first/checkpoints/2", 2)
        assert said == "note: runs/first has no final student yet: this is its checkpoint 2\n"
    weights = run / "checkpoints/2/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    got, said = found(capsys, "runs/first")
    assert got[0]["update"] == 1 and said.startswith(
        "note: runs/first/checkpoints/2 is damaged: model.safetensors differs"
    )
    shutil.rmtree(run / "checkpoints/1")
    said = refused(capsys, "runs/first")
    assert said.startswith("runs/first has no student to evaluate, neither final nor in a checkpoint; runs/first/check")


def test_a_damaged_run_is_one_line_or_said(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = home / "runs" / "first"
    (run / "final" / "generation_config.json").write_text("{}")
    _, said = found(capsys, "runs/first", "--data", "math.jsonl")
    assert said == "note: runs/first/final: generation_config.json differs from what was saved, in its 2 bytes\n"
    weights = run / "final" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    capsys.readouterr()
    assert main(["eval", "runs/first"]) == 2
    assert "error: runs/first/final: model.safetensors is damaged" in capsys.readouterr().err
    (home / "mine.py").unlink()
    assert "there is no file mine.py" in refused(capsys, "runs/first")
    (run / "config.toml").write_text("student = ")
    assert "runs/first/config.toml: not valid TOML" in refused(capsys, "runs/first")
    (run / "config.toml").unlink()
    assert refused(capsys, "runs/first") == "runs/first holds no run: there is no config.toml in it"
    assert refused(capsys, "runs/first/final") == "runs/first holds no run: there is no config.toml in it"


def test_a_run_that_is_not_there_is_no_model_of_the_hub(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "runs/frist") == "runs/frist: no such directory; did you mean 'runs/first'?"
    assert refused(capsys, "runs") == "runs is not a run, but contains runs: name one of them, for example runs/plain"


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_reachable.cache_clear()  # a name that was looked for offline
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
        )
        said = "nowhere/at-all: no such directory, and the hub does not answer: "
        assert refused(capsys, "nowhere/at-all").startswith(said)


def test_a_student_without_its_run_is_not_asked_arithmetic(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("runs/first/final", "alone")
    assert refused(capsys, "alone").startswith("alone was saved by a run, but is outside of its run directory")
    got, _ = found(
        capsys,
        *("alone", "--data", "math.jsonl", "--data.template", "{question}"),
        *("--data.answer", "solution", "--max-tokens", "6"),
    )
    assert got[0]["reward"] == ["exact"] and "update" not in got[0] and not Path("alone/eval.jsonl").exists()


def test_results_that_cannot_be_kept_are_still_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "runs/first/eval.jsonl").mkdir()
    got, said = found(capsys, "runs/first", "--data", "math.jsonl")
    assert len(got) == 1
    assert said == "note: these results are not saved: runs/first/eval.jsonl cannot be written: Is a directory\n"


def test_answers_that_no_reward_can_grade_count_as_wrong(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "bad.py").write_text("def bad(text):\n    raise ValueError('no')\n")
    capsys.readouterr()
    assert main(["eval", "runs/first", "--data", "math.jsonl", "--reward", "exact", "./bad.py:bad", "-n", "1"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("10 answers have no reward and count as wrong: ") and "ValueError: no" in err
    (line,) = read_lines(home / "runs/first/eval.jsonl")
    assert (line["avg@1"], line["error"], line["ungraded"]) == (0.0, 0.0, 10) and "bad" in out


def test_a_sandbox_belongs_to_the_rewards_that_ask_for_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "own.py").write_text("def asks(text, sandbox):\n    return 1.0\n")
    lines, _ = found(capsys, "runs/first", "-n", "1", "--reward", "./own.py:asks", "--sandbox", "none")
    assert {line["avg@1"] for line in lines} == {1.0}
    assert "write task.sandbox" in refused(capsys, "runs/first", "--reward", "./own.py:asks")
    run = config_of_model("builtin:student", task=TaskConfig(reward=("./own.py:asks",), sandbox="none"))
    assert with_options(run, {"eval.n": 2}).task.sandbox == "none"
    assert with_options(run, {"task.reward": ("exact",)}).task.sandbox is None
    assert with_options(run, {"task.reward": ("exact", "./own.py:asks")}).task.sandbox == "none"


def test_given_words_that_mean_nothing_are_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "runs/first", "--split", "test").startswith("--split test does nothing: math.jsonl has no")
    assert "give each of several sets a name" in refused(capsys, "runs/first", "--data", "math.jsonl", "code.csv")
    assert "write -n 4" in refused(capsys, "runs/first", "-k", "4")
    assert "data.answer does nothing" in refused(capsys, "builtin:student", "--data.answer", "solution")
    assert "argument --dtype/--sampler.dtype: invalid choice: 'half'" in refused(
        capsys, "runs/first", "--dtype", "half"
    )


def test_rules_of_a_run_hold_except_those_about_training(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "train.jsonl").unlink()
    got, _ = found(capsys, "runs/first", "--limit", "1", "-n", "1")
    assert [line["prompts"] for line in got] == [1, 1]
    path = home / "models" / "student" / "config.json"
    shape = json.loads(path.read_text())
    heads, grouped = shape["num_attention_heads"], shape["num_attention_heads"] + 1
    path.write_text(json.dumps(shape | {"num_key_value_heads": grouped}))
    said = refused(capsys, "models/student", "--max-tokens", "6")
    assert said == f"models/student: {heads} attention heads cannot share {grouped} heads of keys and values evenly"


def test_a_terminal_shows_how_far_it_is() -> None:
    text = io.StringIO()
    with Watch(Console(file=text, force_terminal=True, width=80)) as watch:
        watch.begin("math sampled", 3)
        watch.answered()
        watch.refresh()
    assert "math sampled" in text.getvalue() and "1/3" in text.getvalue()


def test_lines_are_whole_beside_those_of_others(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append(path, "1\n")
    append(path, "2\n3\n")
    assert path.read_text() == "1\n2\n3\n"
    path.write_text('1\n{"time": "2')  # by a process that was killed
    append(path, "2\n")
    assert path.read_text() == "1\n2\n"
    with pytest.raises(RunDirError, match="cannot be written"):
        append(tmp_path / "nowhere" / "lines", "1\n")


def test_the_error_of_a_mean_is_of_independent_prompts() -> None:
    assert standard_error([0.5, 1.0, 0.0, 0.5]) == pytest.approx((1 / 6) ** 0.5 / 2)
    assert standard_error([0.5]) is None
    assert isnan(standard_error([0.5, inf]) or 0)


# --- several sets while a run goes on -------------------------------------------------------------------------------


class SamplingSupport:
    """A tracker."""

    every = 1

    def __init__(self) -> None:
        self.names: list[str] = []

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.names += numbers

    def samples(self, quotes: Any, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_trackers_get_each_set_under_its_name(tmp_path: Path) -> None:
    sink = SamplingSupport()
    with RunLog(tmp_path, [sink]) as log:
        log.metrics("eval", {"accuracy": 0.5, "reward/exact": 0.5}, update=3, of="math")
        log.metrics("eval", {"accuracy": 0.5}, update=3)
    assert sink.names == ["eval/math/accuracy", "eval/math/reward/exact", "eval/accuracy"]
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert lines[0] == {"kind": "eval", "update": 3, "set": "math", "accuracy": 0.5, "reward/exact": 0.5}
    assert "set" not in lines[1]
    numbers = {"eval/math/accuracy": 0.25, "eval/code/accuracy": 1.0, "eval/math/reward/exact": 0.25}
    assert key_readings(numbers) == [("math held-out accuracy", "25.0%"), ("code held-out accuracy", "100.0%")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{}", "data.eval: names no set of prompts"),
        ('{"a/b" = "math.jsonl"}', "data.eval: the name 'a/b' must be a plain word"),
        ('{math = "math.jsonl", code = "no.csv"}', "no.csv: cannot be read"),
        ('{math = "math.jsonl", code = "spoilt.csv"}', "spoilt.csv:2: has no 'question'"),
    ],
)
@pytest.mark.parametrize("command", [["train"], ["config", "--check"]], ids=" ".join)
def test_a_set_that_cannot_be_asked_is_one_line(
    home: Path, command: list[str], given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "spoilt.csv").write_text("problem,solution\n1+1,2\n")
    assert main([command[0], "run.toml", *command[1:], "--data.eval", given, "--output", "new"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and message in said
    assert not (home / "new").exists()


def test_an_evaluation_that_is_stopped_between_two_sets_is_made_again(tmp_path: Path) -> None:
    """Either all sets have a line, or none."""
    settings = config(Sync(), updates=1).model_copy(
        update={"eval": EvalConfig(every=1), "task": TaskConfig(reward=("exact",))}
    )
    sets = {name: [PROMPTS.at(number)] for number, name in enumerate(("first", "second"), 1000)}

    def stopped_after(seconds: float, path: Path) -> list[dict[str, Any]]:
        async def work() -> None:
            with RunLog.create(settings, path) as log:
                run = asyncio.create_task(Run(settings, engines(), PROMPTS, log, held_out=sets).train())
                await asyncio.wait([run], timeout=seconds)
                run.cancel()
                await asyncio.wait([run])

        virtual.run(work())
        return [line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "eval"]

    found = [stopped_after(seconds, tmp_path / str(seconds)) for seconds in range(1, 12)]
    assert {tuple(line["set"] for line in lines if line["update"] == 0) for lines in found} == {(), ("first", "second")}
