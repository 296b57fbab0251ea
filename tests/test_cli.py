"""The command line as a person meets it: instant help, one line for every mistake, and a run from beginning to end."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from statistics import fmean

import pytest

from slipstream.cli import main, parser, split_overrides
from slipstream.commands import table
from slipstream.config.file import fields, load, parse
from slipstream.errors import ConfigError
from slipstream.models.resolve import DEMO
from slipstream.run_dir.writing import read_lines
from support.shell import Shell

COMMANDS = [
    *("demo", "init", "train", "doctor", "resume", "scale", "eval", "gateway", "sweep", "plan"),
    *("samples", "report", "watch", "advise", "push", "export", "config", "estimators"),
]
HEAVY = {"torch", "transformers", "tokenizers", "datasets", "pydantic", "numpy", "rich"}

CONFIG = """
student = "models/student"
updates = 2
output = "run"

[data]
train = "good.jsonl"
eval = "good.jsonl"

[teachers.main]
model = "models/teacher"

[sampler]
max_tokens = 6
slots = 8

[loss]
m = 2

[learner]
batch_size = 4

[task]
reward = "exact"

[eval]
every = 2
"""

MINE = """
def score(text, ground_truth, tokens):
    if len(tokens) == 5:
        raise ValueError("five")
    return {"length": len(tokens), "right": text == ground_truth}
"""
GOOD = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)} for i in range(6)]
FILES = {
    "good.toml": CONFIG,
    "unknown.toml": CONFIG.replace("updates", "upates"),
    "broken.toml": "student = ",
    "good.jsonl": "".join(json.dumps(row) + "\n" for row in GOOD),
    "malformed.jsonl": json.dumps(GOOD[0]) + '\n{"question": "?"}\n',
    "unanswered.jsonl": '{"prompt": "a"}\n',
    "long.jsonl": '{"prompt": "' + "a" * 100 + '", "answer": "x"}\n',
    "mine.py": MINE,
    "empty.jsonl": "",
    "taken/config.toml": "precious",
    "file": "",
}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[Shell]:
    home = tmp_path_factory.mktemp("shell")
    shutil.copytree(models_dir, home / "models")
    for name, text in FILES.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(text)
    shell = Shell(home)
    yield shell
    shell.close()


@pytest.mark.parametrize("command", [["report"], ["samples"], ["watch", "--once"], ["advise"], ["resume"], ["export"]])
def test_a_run_of_another_user_is_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    words = [*command, str(run), *(["--gguf", str(tmp_path / "a.gguf")] if command == ["export"] else [])]
    main(words)  # loads modules, which another user may not be able to read
    capsys.readouterr()
    run.chmod(0)
    tmp_path.chmod(0o755)
    user = os.geteuid()
    try:
        if not user:  # root may read everything
            for parent in tmp_path.parents[:2]:
                parent.chmod(0o755)
            os.seteuid(65534)
        assert main(words) == 2
    finally:
        os.seteuid(user)
        run.chmod(0o700)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and "Permission denied" in said


# --- help --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_every_command_explains_itself(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"] if command else ["--help"])
    assert caught.value.code == 0
    text, err = capsys.readouterr()
    assert err == "" and text.startswith(f"usage: slipstream {command or ''}")
    if command is None:
        assert all(name in text for name in COMMANDS)


def test_the_commands_are_those_that_are_tested() -> None:
    assert re.findall(r"^    (\w+)", parser().format_help(), re.MULTILINE) == COMMANDS


def test_every_command_has_its_function() -> None:
    for command in table.COMMANDS:
        assert callable(getattr(import_module(f"slipstream.commands.{command.file}"), command.function))


def loaded_by(*argv: str) -> set[str]:
    code = f"import sys\nfrom slipstream.cli import main\ntry: main({list(argv)})\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}


def test_help_loads_nothing_heavy() -> None:
    assert not loaded_by("--help") & HEAVY
    assert not loaded_by("train", "--help") & HEAVY


def test_listing_the_settings_loads_no_models() -> None:
    assert not loaded_by("config") & {"torch", "transformers", "tokenizers", "datasets"}


def test_the_demo_has_a_prompt_for_each_of_its_samples() -> None:
    """It plans no more rows than it uses, because a start waits for them."""
    config = load(DEMO)
    used = config.updates * config.groups_per_update
    assert config.data.limit is not None and used <= config.data.limit < 1.1 * used


@pytest.mark.parametrize(
    "command", [[Path(sys.executable).parent / "slipstream"], [sys.executable, "-m", "slipstream"]]
)
def test_the_installed_command_and_module_are_this_one(command: list[str]) -> None:
    done = subprocess.run([*command, "train", "no.toml"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: no.toml: no such file\n")


# --- config ------------------------------------------------------------------------------------------------


def test_config_alone_lists_every_setting_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    text = capsys.readouterr().out
    for name, info, kind in fields():
        assert re.search(rf"^{re.escape(name)}: .*{f'kind = {kind}' if kind else ''}", text, re.MULTILINE), name
        assert info.description and info.description in text
    assert "\nlearner.lr: float = 1e-05   (> 0, ≤ 1)\n" in text
    assert "\nloss.beta: float = 0.5   (≥ 0, ≤ 1; kind = jsd)\n" in text


def test_config_prints_the_resolved_file(shell: Shell) -> None:
    done = shell("config", "good.toml", "--loss.m", "4", "--learner.lr=0.5")
    assert (done.code, done.err, done.written) == (0, "", [])
    config = parse(tomllib.loads(done.out))
    assert (config.loss.model_dump()["m"], config.learner.lr, config.updates) == (4, 0.5, 2)


def test_config_says_what_a_new_kind_discards(shell: Shell) -> None:
    done = shell("config", "good.toml", "--loss.k", "4", "--loss.kind", "forward_kl")
    assert done.code == 0
    assert done.err == "note: kind = 'forward_kl' replaces 'reverse_kl_mc'; its settings m are discarded\n"
    assert parse(tomllib.loads(done.out)).loss.model_dump()["k"] == 4


def test_config_check_reads_everything_and_writes_nothing(shell: Shell) -> None:
    done = shell("config", "good.toml", "--check")
    assert (done.code, done.err, done.written) == (0, "", [])
    assert done.out.endswith("# ok: 6 prompts; vocabularies match; everything fits the context\n")
    assert parse(tomllib.loads(done.out)).student == "models/student", "with the check's line it is still TOML"


# --- mistakes ----------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[list[str], str]] = {
    "no command": ([], "the following arguments are required: COMMAND; see slipstream --help"),
    "unknown command": (["trian", "good.toml"], "argument COMMAND: invalid choice: 'trian'"),
    "no config": (["train"], "the following arguments are required: config; see slipstream train --help"),
    "missing config": (["train", "no.toml"], "no.toml: no such file"),
    "directory as config": (["train", "models"], "models: is a directory; name its config.toml"),
    "broken config": (["train", "broken.toml"], "broken.toml: not valid TOML: "),
    "unknown key": (["train", "unknown.toml"], "unknown.toml: unknown key 'upates'; did you mean 'updates'?"),
    "unknown override": (
        ["train", "good.toml", "--learner.learning_rate", "1"],
        "good.toml: unknown key 'learner.learning_rate': write learner.lr = 1",
    ),
    "unknown demo override": (
        ["demo", "--lr", "1"],
        "demo.toml: unknown key 'lr': write learner.lr = 1",
    ),
    "abbreviated option": (["config", "good.toml", "--che", "1"], "good.toml: unknown key 'che'"),
    "override without value": (["train", "good.toml", "--learner.lr"], "--learner.lr needs a value"),
    "argument that is no override": (["train", "good.toml", "fast"], "unrecognized arguments: fast; see slipstream"),
    "unknown argument": (["eval", "models/student", "--fast", "1"], "unrecognized arguments: --fast 1; see slipstream"),
    "wrong type of argument": (
        ["eval", "models/student", "-n", "many"],
        "argument -n/--eval.n: 'many' is not a whole number of at least 1",
    ),
    "negative number": (
        ["eval", "models/student", "-n", "0"],
        "argument -n/--eval.n: '0' is not a whole number of at least 1",
    ),
    "negative temperature": (
        ["eval", "models/student", "--temperature", "-1"],
        "argument --temperature/--eval.temperature: -1 is neither 0",
    ),
    "more tries than samples": (["eval", "models/student", "-n", "2", "-k", "3"], "pass@3 needs at least 3 samples"),
    "override without config": (["config", "--check"], "name a config file: slipstream config CONFIG"),
    "wrong type": (["train", "good.toml", "--updates", "many"], "good.toml: updates: input should be a valid integer"),
    "wrong kind": (
        ["train", "good.toml", "--loss.kind", "forward_lk"],
        "good.toml: loss.kind: did you mean 'forward_kl'?",
    ),
    "existing run": (
        ["train", "good.toml", "--output", "taken"],
        "taken already holds a run: choose another with --out",
    ),
    "file as run": (["train", "good.toml", "--output", "file"], "file is a file: choose another run directory"),
    "missing data": (["train", "good.toml", "--data.train", "no.jsonl"], "no.jsonl: cannot be read: No such file"),
    "malformed row": (
        ["train", "good.toml", "--data.train", "malformed.jsonl"],
        "malformed.jsonl:2: expected 'prompt' (text or a list of messages) or 'messages'; found 'question'",
    ),
    "malformed held-out row": (["train", "good.toml", "--data.eval", "malformed.jsonl"], "malformed.jsonl:2: expected"),
    "empty data": (["train", "good.toml", "--data.train", "empty.jsonl"], "empty.jsonl: no rows"),
    "data without answers": (
        ["train", "good.toml", "--data.train", "unanswered.jsonl"],
        "unanswered.jsonl:1: has no answer, which the reward 'exact' needs: set data.answer to its column",
    ),
    "held-out data without answers": (
        ["train", "good.toml", "--data.eval", "unanswered.jsonl"],
        "unanswered.jsonl:1: has no answer, which the reward 'exact' needs: set data.answer to its column",
    ),
    "prompt longer than the context": (
        ["train", "good.toml", "--data.train", "long.jsonl"],
        "long.jsonl:1: 101 prompt tokens + sampler.max_tokens = 6 exceed the context of 64 of models/student",
    ),
    "held-out prompt longer than the context": (
        ["train", "good.toml", "--data.eval", "long.jsonl"],
        "long.jsonl:1: 101 prompt tokens + sampler.max_tokens = 6 exceed the context of 64 of models/student",
    ),
    "response longer than the context": (
        ["train", "good.toml", "--sampler.max_tokens", "60"],
        "good.jsonl:1: 8 prompt tokens + sampler.max_tokens = 60 exceed the context of 64",
    ),
    "micro-batch too small": (
        ["train", "good.toml", "--learner.token_budget", "12"],
        "learner.token_budget = 12 is less than the longest sequence of 14 tokens",
    ),
    "different tokenizers": (
        ["train", "good.toml", "--teachers.main.model", "models/stranger"],
        "student models/student and teacher models/stranger have different tokenizers: id 17 is 'a' in one and 'b'",
    ),
    "model that is nowhere": (
        ["train", "good.toml", "--student", "no/such-model"],
        "no/such-model: cannot read its model config: ",
    ),
    "teacher that is nowhere": (
        ["config", "good.toml", "--check", "--teachers.main.model", "nowhere"],
        "nowhere: cannot",
    ),
    "directory without a model": (
        ["train", "good.toml", "--student", "taken"],
        "taken: no model there: the directory has no config.json",
    ),
    **{
        f"ratio to a cut distribution, {command}": (
            [command, "good.toml", *flags, "--sampler.top_p", "0.9"],
            "sampler.top_p = 0.9 leaves out tokens of the sampling distribution",
        )
        for command, flags in (("train", []), ("config", ["--check"]))
    },
    "tracker that is not installed": (
        ["train", "good.toml", "--log.to", '["mlflow"]'],
        "log.to = ['mlflow'] needs mlflow",
    ),
    "evaluated model that is nowhere": (["eval", "no/such-model"], "no/such-model: cannot load a tokenizer there: "),
    "evaluation on a malformed row": (
        ["eval", "models/student", "--data", "malformed.jsonl"],
        "malformed.jsonl:2: expec",
    ),
    "evaluation without answers": (
        ["eval", "models/student", "--data", "unanswered.jsonl"],
        "unanswered.jsonl:1: has no answer",
    ),
    "evaluation beyond the context": (
        ["eval", "models/student", "--data", "long.jsonl", "--max-tokens", "2"],
        "long.jsonl:1: prompt and --max-tokens exceed the context of 64 of models/student",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_costs_one_line_and_leaves_nothing_behind(shell: Shell, mistake: str) -> None:
    argv, message = MISTAKES[mistake]
    done = shell(*argv)
    assert done.err.startswith("error: ") and message in done.err
    assert (done.code, done.err.count("\n"), done.err[-1]) == (2, 1, "\n")
    assert done.written == []
    assert (shell.home / "taken" / "config.toml").read_text() == "precious"


def test_overrides_are_pairs_in_either_form() -> None:
    """And may stand before the file, as options may."""
    words = ["config", "--a.b", "1", "x.toml", "--check", "--c=x=y", "--d", "--e"]
    kept, changes = split_overrides(words)
    assert kept == ["config", "x.toml", "--check"]
    assert changes == [("a.b", "1"), ("c", "x=y"), ("d", "--e")]
    assert split_overrides(["eval", "model", "--data", "x"]) == (["eval", "model", "--data", "x"], [])
    with pytest.raises(ConfigError, match=r"--a\.b needs a value"):
        split_overrides(["train", "--a.b"])


# --- a run -------------------------------------------------------------------------------------------------


def test_a_reward_of_ones_own_is_trained_on_and_what_was_said_is_printed(shell: Shell) -> None:
    own = ("--task.reward", '["./mine.py:score", "exact"]', "--policy.loss", "vanilla", "--sampler.group", "2")
    done = shell("train", "good.toml", *own, "--policy.reward_weights", "{exact = 2.0}", "--output", "own")
    assert done.code == 0, done.err
    assert "rewards of a few short answers: score " in done.out
    for line in read_lines(shell.home / "own" / "metrics.jsonl"):
        assert line["reward/score"] == pytest.approx(line["reward/score/length"] + line["reward/score/right"])
        if line["kind"] == "train":
            both = line["policy/reward/score"] + 2 * line["policy/reward/exact"]
            assert line["policy/reward"] == pytest.approx(both)
    said = read_lines(shell.home / "own" / "samples.jsonl")
    assert [quote["update"] for quote in said] == [1, 1, 2, 2]
    for quote in said:
        assert quote["rewards"]["score/length"] == len(quote["tokens"]) == len(quote["logp"]) != 5
        assert len(quote["teacher_logp"]) == sum(count for _, count in quote["versions"]) == len(quote["tokens"])
    printed = shell("samples", "own", "--update", "1", "-n", "1")
    assert printed.code == 0 and printed.out.startswith(f"update 1: {said[1]['prompt_id']}, answer ")
    gap = fmean(ours - theirs for ours, theirs in zip(said[1]["logp"], said[1]["teacher_logp"], strict=True))
    scored = f"scored by main: log-probs of its tokens are {abs(gap):.3f} {'lower' if gap > 0 else 'higher'} than the"
    assert f"prompt:\n{said[1]['prompt']}\nresponse:\n{said[1]['response']}\n{scored} student's" in printed.out
    assert shell("samples", "own", "--update", "7").err == (
        "error: own has no samples of update 7: it has samples of updates 1 to 2\n"
    )
    assert shell("samples", "nowhere").err == "error: nowhere holds no run: there is no config.toml in it\n"


def test_a_run_leaves_a_directory_that_can_be_evaluated_and_is_never_overwritten(shell: Shell) -> None:
    done = shell("train", "good.toml", "--output", "first")
    assert (done.code, done.err) == (0, ""), done.err
    assert done.out.endswith("done: student in first/final, metrics in first/metrics.jsonl\n")
    run = shell.home / "first"
    assert parse(tomllib.loads((run / "config.toml").read_text())).output == "first"
    lines = read_lines(run / "metrics.jsonl")
    assert [(line["kind"], line["update"]) for line in lines] == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]
    assert [entry["end"] for entry in read_lines(run / "ledger.jsonl")] == ["trained"] * 8

    ask = ["--data", "good.jsonl", "--max-tokens", "4", "-n", "2", "-k", "1", "2", "--json"]
    evaluated = shell("eval", "first", *ask)
    assert (evaluated.code, evaluated.err, evaluated.written) == (0, "", ["first/eval.jsonl"])
    scores = json.loads(evaluated.out)
    assert scores.keys() > {"model", "prompts", "temperature", "avg@2", "error", "pass@1", "pass@2", "greedy"}
    assert (scores["model"], scores["prompts"], scores["max_tokens"]) == ("first/final", 6, 4)
    again = json.loads(shell("eval", "first", *ask).out)
    for line in (scores, again):
        del line["time"], line["seconds"]
    assert again == scores, "the same seed gives the same answers"

    taken = shell("train", "good.toml", "--output", "first")
    assert (taken.code, taken.written) == (2, [])
    assert taken.err == "error: first already holds a run: choose another with --output, or remove it\n"
