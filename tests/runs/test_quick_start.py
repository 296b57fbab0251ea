"""A mistake is told before anything heavy is imported, in every command; and whoever coordinates local engines never is
heavy: what computes is imported where they live."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream import __version__

HEAVY = ["torch", "transformers", "tokenizers", "ray", "datasets", "pyarrow", "vllm", "sympy", "triton"]
CONFIG = """
student = "builtin:student"
updates = 1
output = "run"
[teachers.main]
model = "builtin:teacher"
[data]
limit = 24
[sampler]
max_tokens = 16
[learner]
batch_size = 8
[runtime]
device = "cpu"
"""
FILES = {
    "good.toml": CONFIG,
    "broken.toml": "student = ",
    "unknown.toml": CONFIG.replace("updates", "upates"),
    "taken/config.toml": CONFIG,
    "stopped/config.toml": CONFIG,
    "finished/config.toml": CONFIG,
    "finished/final/config.json": "{}",
    "outdated/config.toml": CONFIG.replace("updates", "upates"),
    "rows.jsonl": '{"prompt": "1+1=", "answer": "2"}\n',
    "ungraded.jsonl": '{"prompt": "1+1="}\n',
    "mine.py": "def score(text, answer): return 1\n",
    "malformed.jsonl": '{"question": "1+1="}\n',
}
ANYWHERE = {
    "no file": (["no.toml"], "no.toml: no such file"),
    "not TOML": (["broken.toml"], "broken.toml: not valid TOML"),
    "unknown key": (["unknown.toml"], "unknown key 'upates'; did you mean 'updates'?"),
    "unknown override": (["good.toml", "--learner.learning_rte", "1"], "unknown key 'learner.learning_rte'"),
    "no value": (["good.toml", "--learner.lr"], "--learner.lr needs a value"),
    "wrong type": (["good.toml", "--updates", "many"], "updates: input should be a valid integer"),
    "out of range": (["good.toml", "--learner.lr", "-1"], "learner.lr: input should be greater than 0"),
    "unknown kind": (["good.toml", "--loss.kind", "reverse_kl_m"], "loss.kind: did you mean 'reverse_kl_mc'?"),
    "a rule between sections": (["good.toml", "--sampler.group", "3"], "batch_size = 8 is not a multiple of"),
}
"""Wrong for every command that reads a config."""
RL = ["good.toml", "--sampler.group", "4", "--task.reward", "exact"]
AT_A_GLANCE = {
    "a correction without effect": (["good.toml", "--correction.verl_compat", "true"], "verl_compat does nothing"),
    "unknown policy option": (
        [*RL, "--policy.options", "{clip_hi = 1.0}"],
        "unknown policy.options of vanilla 'clip_hi'",
    ),
    "unknown advantage option": (
        [*RL, "--policy.advantage_options", "{nrm = 1.0}"],
        "unknown policy.advantage_options of grpo 'nrm'",
    ),
    "no built-in model": (["good.toml", "--student", "builtin:studnt"], "did you mean 'student'?"),
    "no directory": (["good.toml", "--student", "./nowhere"], "./nowhere: no such directory"),
    "no directory of a teacher": (["good.toml", "--teachers.main.model", "/no/where"], "/no/where: no such directory"),
    "no data": (["good.toml", "--data.train", "no.jsonl"], "no.jsonl: cannot be read: No such file"),
    "no built-in task": (["good.toml", "--data.train", "builtin:arithmetics"], "did you mean 'arithmetic'?"),
    "no split": (["good.toml", "--data.split", "evl"], "has no split 'evl'; did you mean 'eval'?"),
    "a split of a file": (
        ["good.toml", "--data.train", "rows.jsonl", "--data.split", "test"],
        "rows.jsonl has no splits",
    ),
    "no held-out data": (
        ["good.toml", "--eval.every", "1", "--task.reward", "exact", "--data.eval", "no.parquet"],
        "no.parquet: cannot be read: No such file",
    ),
    "no reward": (["good.toml", "--task.reward", "exakt"], "'exakt' is no reward; did you mean 'exact'?"),
    "two rewards of one name": (["good.toml", "--task.reward", '["a:f", "b:f"]'], "two of these have one name"),
    "no file of a reward": (["good.toml", "--task.reward", "./none.py:score"], "there is no file none.py"),
    "no function in it": (["good.toml", "--task.reward", "mine:skore"], "no function 'skore' in it; did you mean"),
    "a reward that asks too much": (["good.toml", "--task.reward", "./mine.py:score"], "for its parameter 'answer'"),
    "no key": (
        [
            *("good.toml", "--teachers.main.model", "m", "--teachers.main.base_url", "http://nowhere:1/v1"),
            *(
                "--teachers.main.tokenizer",
                "builtin:teacher",
                "--teachers.main.api_key_env",
                "NO_SUCH_KEY",
                "--loss.m",
                "1",
            ),
        ],
        "'NO_SUCH_KEY': this environment variable is not set",
    ),
}
"""Wrong for every command that makes a plan."""
OWN = {
    "train into a run": (["train", "good.toml", "--output", "taken"], "taken already holds a run"),
    "resume nothing": (["resume", "nowhere"], "nowhere holds no run"),
    "resume what is finished": (["resume", "finished"], "finished is finished"),
    "resume without a checkpoint": (["resume", "stopped"], "stopped"),
    "resume with a config that is none": (["resume", "outdated"], "unknown key 'upates'"),
    "eval of nothing": (["eval", "./nowhere"], "./nowhere: no such directory"),
    "eval of no built-in": (["eval", "builtin:studnt"], "did you mean 'student'?"),
    "eval of a run that has not ended": (
        ["eval", "taken", "--split", "x", "--data", "rows.jsonl"],
        "--split x does nothing",
    ),
    "eval on no data": (["eval", "builtin:student", "--data", "no.jsonl"], "no.jsonl: cannot be read"),
    "eval on no split": (["eval", "builtin:student", "--split", "evl"], "did you mean 'eval'?"),
    "eval without answers": (
        ["eval", "builtin:student", "--data", "ungraded.jsonl"],
        "ungraded.jsonl:1: has no answer",
    ),
    "eval on malformed rows": (["eval", "builtin:student", "--data", "malformed.jsonl"], "malformed.jsonl:1: expected"),
    "eval of too few": (["eval", "builtin:student", "-k", "8"], "write -n 8"),
    "demo with an unknown key": (["demo", "--lr", "1"], "unknown key 'lr'"),
    "demo into a run": (["demo", "--schedule.kind", "sync", "--output", "taken"], "taken already holds a run"),
    "demo of two teachers": (
        ["demo", "--teachers.second.model", "builtin:teacher"],
        "the demo compares a student with one teacher, and [teachers] has 2",
    ),
    "demo of nothing": (["demo", "--student", "./nowhere"], "./nowhere: no such directory"),
    "check into a run": (["config", "good.toml", "--check", "--output", "taken"], "taken already holds a run"),
    "no command": ([], "the following arguments are required: COMMAND"),
    "unknown command": (["trian"], "invalid choice: 'trian'"),
}
CHECK = ["config", "--check"]
READERS, PLANNERS = (["train"], ["doctor"], ["config"], CHECK), (["train"], ["doctor"], CHECK)
MISTAKES: dict[str, tuple[list[str], str]] = OWN | {
    f"{' '.join(command)}: {name}": ([*command, *words], message)
    for commands, kinds in ((READERS, ANYWHERE), (PLANNERS, AT_A_GLANCE))
    for command in commands
    for name, (words, message) in kinds.items()
}
ANSWERS = {
    "--version": f"slipstream {__version__}",
    "--help": "usage: slipstream",
    **{
        f"{name} --help": f"usage: slipstream {name}"
        for name in ("demo", "train", "doctor", "resume", "eval", "config")
    },
    "config": "learner.batch_size: int = 64",
    "config good.toml": "batch_size = 8",
}

SHELL = """
import io, json, os, sys
from slipstream.cli import main
from slipstream.commands import demo, doctor, evaluate
from slipstream.runs import start as train
cases, heavy = json.load(sys.stdin)
for words in cases:
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        with open(read) as answer:
            print(answer.read(), flush=True)
        os.wait()
        continue
    sys.stdout = sys.stderr = said = io.StringIO()
    try:
        code = main(words)
    except SystemExit as left:
        code = left.code or 0
    with open(write, "w") as answer:
        json.dump([code, said.getvalue(), [name for name in heavy if name in sys.modules]], answer)
    os._exit(0)
"""
"""Runs every command in a fork of its own, of a process that has imported all commands and no more."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of every command: exit status, output, and the heavy libraries that it loaded."""
    home = tmp_path_factory.mktemp("home")
    for name, text in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    cases = {name: words for name, (words, _) in MISTAKES.items()} | {words: words.split() for words in ANSWERS}
    before = sorted(home.rglob("*"))
    asked = json.dumps([list(cases.values()), HEAVY])
    done = subprocess.run(
        [sys.executable, "-c", SHELL], cwd=home, input=asked, stdout=subprocess.PIPE, text=True, check=True
    )
    after = sorted(path for path in home.rglob("*") if path.name != "lock")
    assert after == before, "a mistake leaves nothing behind, but the lock of a run that there is"
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_before_anything_heavy_is_imported(told: dict[str, Any], mistake: str) -> None:
    code, said, heavy = told[mistake]
    words, message = MISTAKES[mistake]
    assert message in " ".join(said.split())
    assert code == 2 or (code == 1 and words[0] == "doctor")
    assert heavy == []


@pytest.mark.parametrize("words", ANSWERS)
def test_what_only_tells_imports_nothing_heavy(told: dict[str, Any], words: str) -> None:
    code, said, heavy = told[words]
    assert code == 0 and ANSWERS[words] in said
    assert heavy == []


@pytest.mark.processes
def test_who_coordinates_local_engines_never_imports_what_computes(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(CONFIG)
    code = "import sys\nfrom slipstream.cli import main\nassert main(['train', 'good.toml']) == 0\n"
    code += f"print('heavy:', *(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "heavy:"
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
