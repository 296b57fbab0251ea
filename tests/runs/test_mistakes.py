"""Whole commands with one mistake each, as a person would type them, through the real entry point.

The law for all: exit status 2, one line on stderr that begins with `error:`, nothing on disk that was not there or is
another than before, no process left, no traceback, no hang; and for what can be seen at a glance: no torch.

Every kind of mistake has a table: the command line (CLI), what it calls a config (CONFIG), where it writes (OUTPUT),
data, models, runs that shall go on, teachers behind endpoints, and signals while a command still loads. Configs that
are wrong by themselves are tested in tests/plan/test_plan.py, bad rows in tests/data, bad endpoints in
tests/engines/test_http.py, and files of a run that were changed by hand in tests/run_dir.
"""

import gzip
import os
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from slipstream.models.resolve import model_path
from slipstream.run_dir.atomic_files import directory_lock
from slipstream.testing.endpoint import model
from support.fake_endpoint import FakeEndpoint, Fault
from support.illegal_configs import BASE, ILLEGAL, SCHEMA
from support.model_files import FAULTS
from support.typed_commands import Outcome, Typed

File = str | bytes | Callable[[Path], object]


def directory(path: Path) -> None:
    path.mkdir()


def table(text: str) -> dict[str, str]:
    """`command | what it says`, line by line."""
    return {command.strip(): says.strip() for command, says in (line.split(" | ") for line in text.strip().split("\n"))}


# --- what is seen at a glance -----------------------------------------------------------------------------------------

CLI = table("""
slipstream | the following arguments are required: COMMAND; see slipstream --help
trian run.toml | argument COMMAND: invalid choice: 'trian' (choose from 'demo', 'init', 'train',
'' | argument COMMAND: invalid choice: ''
--verbose | the following arguments are required: COMMAND
train | the following arguments are required: config; see slipstream train --help
train run.toml again.toml | unrecognized arguments: again.toml
train run.toml -x | unrecognized arguments: -x
train run.toml --check | unrecognized arguments: --check
train run.toml --updates | --updates needs a value
train run.toml --skip-cheks | --skip-cheks needs a value; did you mean '--skip-checks'?
train run.toml -- x | unrecognized arguments: x
train nowhere.toml | nowhere.toml: no such file
eval builtin:studnt | no built-in model 'studnt'; did you mean 'student'?
eval ./nowhere/at/all | ./nowhere/at/all: no such directory
eval builtin:student --data nowhere.jsonl | nowhere.jsonl: cannot be read: No such file or directory
train . | .: is a directory; name its config.toml
train pipe.toml/x | pipe.toml/x: cannot be read: Not a directory
train latin.toml | latin.toml: not valid TOML: 'utf-8' codec can't decode byte 0xe9
train broken.toml | broken.toml: not valid TOML: Expected '=' after a key in a key/value pair (at line 2, column 9)
train twice.toml | twice.toml: not valid TOML: Cannot overwrite a value (at line 2
train deep.toml | deep.toml: nested too deeply: no setting is more than a few tables or lists deep; take the brackets
config deep.toml --check | deep.toml: nested too deeply: no setting is more than a few tables or lists deep; take the
train dotted.toml | dotted.toml: nested too deeply: no setting is more than a few tables or lists deep; take the brack
train data.json | data.json: not valid TOML: Invalid statement (at line 1, column 1)
train empty.toml | empty.toml: 'student' is missing: 
config --check | name a config file: slipstream config CONFIG
config --updates 3 | name a config file: slipstream config CONFIG
config nowhere.toml | nowhere.toml: no such file
config nowhere.toml --check | nowhere.toml: no such file
config broken.toml | broken.toml: not valid TOML: Expected '=' after a key in a key/value pair (at line 2, column 9)
config run.toml run.toml | unrecognized arguments: run.toml
config run.toml --chek | --chek needs a value; did you mean '--check'?
demo now | unrecognized arguments: now
demo --updates 0 | updates: input should be greater than or equal to 1, got 0
demo --uptades 10 | unknown key 'uptades'; did you mean 'updates'?
doctor nowhere.toml | nowhere.toml: no such file
doctor run.toml --updates none | run.toml: updates: input should be a valid integer, got None
doctor run.toml --learner.speed 1 | run.toml: unknown key 'learner.speed'; known: 
resume | the following arguments are required: RUN
resume nowhere | nowhere holds no run: there is no config.toml in it
resume run.toml | run.toml holds no run: there is no config.toml in it
resume . | . holds no run: there is no config.toml in it
resume . --from | argument --from: expected one argument
resume . --from last | argument --from: 'last' is not a whole number of at least 0
resume . --from -1 | argument --from: '-1' is not a whole number of at least 0
resume . --updates 0 | argument --updates: '0' is not a whole number of at least 1
resume . --updates 1e3 | argument --updates: '1e3' is not a whole number of at least 1
resume . --change | argument --change: expected at least one argument
resume . --learner.lr 1 | unrecognized arguments: --learner.lr 1
resume run.toml more | unrecognized arguments: more
samples | the following arguments are required: RUN
samples nowhere | nowhere holds no run: there is no config.toml in it
samples run.toml | run.toml holds no run
samples . -n 0 | argument -n: '0' is not a whole number of at least 1
samples . -n two | argument -n: 'two' is not a whole number of at least 1
samples . --update 0 | argument --update: '0' is not a whole number of at least 1
samples . --last | unrecognized arguments: --last
advise | the following arguments are required: RUN
advise nowhere | nowhere holds no run: there is no config.toml in it
advise . --jsonl | unrecognized arguments: --jsonl
scale | the following arguments are required: RUN
scale nowhere sampler=+1 | nowhere holds no run: there is no config.toml in it
scale . sampler=+1 | . holds no run: there is no config.toml in it
estimators k1 k2 | unrecognized arguments: k2
estimators --all | unrecognized arguments: --all
eval | the following arguments are required: model
eval builtin:student again | unrecognized arguments: again
eval builtin:student -n | argument -n/--eval.n: expected one argument
eval builtin:student -n 0 | argument -n/--eval.n: '0' is not a whole number of at least 1
eval builtin:student -n 1.5 | argument -n/--eval.n: '1.5' is not a whole number of at least 1
eval builtin:student -k 0 | argument -k: '0' is not a whole number of at least 1
eval builtin:student -k | argument -k: expected at least one argument
eval builtin:student --limit all | argument --limit/--eval.prompts: 'all' is not a whole number of at least 1
eval builtin:student --max-tokens -5 | argument --max-tokens/--sampler.max_tokens: '-5' is not a whole number of at lea
eval builtin:student --temperature -1 | argument --temperature/--eval.temperature: -1 is neither 0, which is
eval builtin:student --temperature 1e-300 | argument --temperature/--eval.temperature: 1e-300 is neither 0, which
eval builtin:student --temperature 1e300 | argument --temperature/--eval.temperature: 1e300 is neither 0, which
eval builtin:student --temperature nan | argument --temperature/--eval.temperature: nan is neither 0, which is greedy
eval builtin:student --temperature hot | argument --temperature/--eval.temperature: invalid temperature value: 'hot'
eval builtin:student --seed x | argument --seed: invalid int value: 'x'
eval builtin:student --dtype float8 | argument --dtype/--sampler.dtype: invalid choice: 'float8' (choose
eval builtin:student --reward vibes | argument --reward/--task.reward: 'vibes' is no reward; known: 
eval builtin:student --reward ./own.py | argument --reward/--task.reward: './own.py' is no reward; known:
eval builtin:student --learner.lr 1 | unrecognized arguments: --learner.lr 1
""")

CONFIG = table("""
--bogus 1 | run.toml: unknown key 'bogus'; known: checkpoint, correction, critic, data,
--data.limt 3 | run.toml: unknown key 'data.limt'; did you mean 'limit'?
--lr 1e-5 | run.toml: unknown key 'lr': write learner.lr = 
--learner.learning_rate 1 | run.toml: unknown key 'learner.learning_rate': write learner.lr = 1
--learner.lr fast | run.toml: learner.lr: input should be a valid number, got 'fast'
--learner.lr= | run.toml: learner.lr: input should be a valid number, got ''
--learner.lr nan | run.toml: learner.lr: input should be a 
--learner 3 | run.toml: learner: input should be an object, got 3
--updates.x 3 | --updates.x: updates is a value, not a section
--updates 1.5 | run.toml: updates: input should be a valid integer, got 1.5
--updates true | run.toml: updates: input should be a valid integer, got True
--.a 3 | run.toml: unknown key ''; known: 
--teachers {} | run.toml: 
--teachers.main.modle builtin:teacher | run.toml: unknown key 'teachers.main.modle'; did you mean 'model'?
--loss.kind kl1 | run.toml: loss.kind: did you mean 
--schedule.kind asynch | run.toml: schedule.kind: did you mean 'async'?
--task.reward vibes | run.toml: task.reward: 'vibes' is no reward; known: environment, exact, format, judge
--task.reward environment | run.toml: task.reward = "environment" is the reward of an environment: add [environment]
--environment.use shop | run.toml: environment.use: 'shop' is no environment; known: doors, lookup, python, table
--environment.turns 3 | run.toml: environment: needs use, an environment, or [environment.gateway], an agent
--environment.use verifiers: | run.toml: environment: use = 'verifiers:' names nothing: write verifiers:NAME
--environment.use verifiers:sums | environment.use = 'verifiers:sums' needs verifiers: pip install 'slipstream
--environment.use table --environment.turn_tokens 999 | run.toml: environment.turn_tokens = 999 does nothing: samp
--environment.use table --environment.sandbox docker | run.toml: environment.sandbox: 'docker' is no sandbox: write "b
--log.to excel | run.toml: log.to: 
--log.to mlflow | log.to = ['mlflow'] needs mlflow: pip install 'slipstream[mlflow]'
--sampler.slots 0 | run.toml: sampler.slots: input should be greater than or equal to 1, got 0
--sampler.temperature 1e-9 | run.toml: sampler.temperature: input should be greater than or equal to 0.001, got 1e-09
--sampler.replicas 1000000 | 1000002 engines are more than 
--runtime.threads 100000 | run.toml: runtime.threads: input should be less than or equal to 1024, got 100000
--loss.m 100000 | run.toml: loss.m: input should be less than or equal to 10000, got 100000
--updates 100000000000000000000000 | run.toml: updates: input should be less than or equal to 1000000000, got 1000000
--seed -1 | run.toml: seed: input should be greater than or equal to 0, got -1
--data.eval x --task.reward exact --eval.every 1 --eval.n 65000000 | run.toml: eval.n = 65000000 needs sampler.slots of
--task.reward ./constant.py:score | task.reward = './constant.py:score': no parameter is known, so all responses would
--data.train pipe.jsonl | pipe.jsonl: is a pipe or a device, where a file is expected
--runtime.kind slurm | run.toml: runtime.kind: input should be 'local', 'ray' or 'inline', got 'slurm'
--student '' | '' names no model: write an HF directory or a hub name
--student builtin:studnet | no built-in model 'studnet'; did you mean 'student'?
--student ./nowhere | ./nowhere: no such directory
--student /nowhere/at/all | /nowhere/at/all: no such directory
--student run.toml | run.toml: is a file; a model is a directory, or a name on the hub
--teachers.main.model ../nowhere | ../nowhere: no such directory
--data.train '' | '' names no data: write a file (.jsonl, .json, .csv, .parquet) or a HF dataset
--data.train builtin:arithmetik | no built-in task 'arithmetik'; did you mean 'arithmetic'?
--data.train nowhere.jsonl | nowhere.jsonl: cannot be read: No such file or directory
--data.train ./nowhere | ./nowhere: no such file or directory
--data.train run.toml | run.toml: the name of a file of data ends in one of .jsonl, .json, .csv, .parquet
--data.train https://x.y/a.jsonl | /x.y/a.jsonl: cannot be read: No such file or directory
--data.train *.jsonl | *.jsonl: cannot be read: No such file or directory
--data.split test | no split 'test'; known: eval, train
""")
"""Behind `train run.toml` and `config run.toml --check`, which say the same."""

OUTPUT = {
    "a run is there": ("taken", "taken already holds a run: choose another with --output, or remove it"),
    "it is the config": ("run.toml", "run.toml is a file: choose another run directory with --output"),
    "below a file": ("run.toml/run", "run.toml is a file; choose another run directory with --output"),
    "far below a file": ("run.toml/a/b", "run.toml is a file; choose another run directory with --output"),
    "no name": ("", "run.toml: output: string should have at least 1 character, got ''"),
    "a name too long": ("a" * 300, " cannot be written: File name too long"),
    "a pipe": ("pipe", "pipe is a file: choose another run directory with --output"),
}
GLANCE = {
    **{f"{command}": (command.removeprefix("slipstream"), says) for command, says in CLI.items()},
    **{
        f"{before} {words}": (f"{before} {words}", says)
        for words, says in CONFIG.items()
        for before in ("train run.toml", "config run.toml --check")
    },
    **{
        f"output, {name}, {before}": (f"{before} --output '{path}'", says)
        for name, (path, says) in OUTPUT.items()
        for before in ("train run.toml", "config run.toml --check")
    },
    "output of the demo": ("demo --output run.toml", "run.toml is a file; choose another run directory"),
}
BESIDE: Mapping[str, File] = {
    "run.toml": BASE,
    "broken.toml": 'student = "x"\nupdates 3\n',
    "deep.toml": "x = " + "[" * 20_000 + "]" * 20_000,
    "dotted.toml": f"[{'.'.join('a' * 3000)}]",
    "constant.py": "def score():\n    return 1.0\n",
    "twice.toml": "updates = 3\nupdates = 4\n",
    "latin.toml": 'student = "é"\n'.encode("latin-1"),
    "data.json": '{"prompt": "a"}',
    "empty.toml": "",
    "pipe.toml": "",
    "taken/config.toml": "precious",
    "pipe": os.mkfifo,
    "pipe.jsonl": os.mkfifo,
}

# --- data -------------------------------------------------------------------------------------------------------------

ROW = '{"prompt": "A1B2=", "answer": "1"}\n'
NO_PROMPT = "expected 'prompt' (text or a list of messages) or 'messages'"
NO_MESSAGE = f"a message must have 'role' and 'content', both text; {NO_PROMPT}"


def deep(levels: int) -> str:
    return ROW.replace('"1"', f'"1", "x": {"[" * levels}{"]" * levels}')


DATA: dict[str, tuple[str, File | None, str]] = {
    "missing": ("a.jsonl", None, "a.jsonl: cannot be read: No such file or directory"),
    "a directory": ("a.jsonl", directory, "a.jsonl: is a directory, where a file is expected"),
    "a pipe": ("a.jsonl", os.mkfifo, "a.jsonl: is a pipe or a device, where a file is expected"),
    "a device": ("a.csv", lambda path: path.symlink_to("/dev/zero"), "a.csv: is a pipe or a device, where a file"),
    "a link to itself": ("a.csv", lambda path: path.symlink_to(path), "a.csv: cannot be read: Too many levels of sym"),
    "an unknown ending": ("a.txt", ROW, "a.txt: the name of a file of data ends in one of .jsonl, .json, .csv, .parq"),
    "no ending": ("a", ROW, "a: the name of a file of data ends in one of .jsonl, .json, .csv, .parquet, or that and"),
    "packed otherwise": ("a.jsonl.bz2", ROW, "a.jsonl.bz2: the name of a file of data ends in one of .jsonl, .json"),
    "an empty directory": ("a", directory, "): cannot be loaded: The directory at "),
    "not on the hub": ("nowhere/at-all:main", None, "): cannot be loaded: Couldn't reach 'nowhere/at-all' on the Hub"),
    "a subset of a file": ("a.jsonl:main", None, "a.jsonl:main: a.jsonl is one file, without subsets: drop ':main'"),
    "empty": ("a.jsonl", "", "a.jsonl: no rows"),
    "blank lines": ("a.jsonl", "\n\n \n", "a.jsonl: no rows"),
    "an empty list": ("a.json", "[]", "a.json: no rows"),
    "an empty table": ("a.csv", "", "a.csv: no rows"),
    "a header alone": ("a.csv", "prompt,answer\n", "a.csv: no rows"),
    "no header": ("a.csv", "A1=,1\nB1=,2\n", f"a.csv:2: {NO_PROMPT}; found 'A1=', '1'"),
    "semicolons": ("a.csv", "prompt;answer\nA1=;1\n", f"a.csv:2: {NO_PROMPT}; found 'prompt;answer'"),
    "a column twice": ("a.csv", "prompt,prompt\nA1=,1\n", "a.csv:1: two columns are named 'prompt': give each a name"),
    "a cell too few": ("a.csv", "prompt,answer\nA1=\n", "a.csv:2: has 1 cells, and the header 2: quote commas in"),
    "a cell too many": ("a.csv", "prompt,answer\nA,1,2\n", "a.csv:2: has 3 cells, and the header 2: quote commas in"),
    "an open quote": ("a.csv", 'prompt,answer\n"A1=,1\n', "a.csv:2: not CSV: unexpected end of data"),
    "a blank cell": ("a.csv", "prompt,answer\n,1\n", f"a.csv:2: {NO_PROMPT}; found "),
    "not packed": ("a.jsonl.gz", ROW, "a.jsonl.gz: cannot be read: Not a gzipped file"),
    "cut off": ("a.jsonl.gz", gzip.compress(ROW.encode())[:-12], "a.jsonl.gz: cannot be read: Compressed file ended"),
    "packed and damaged": (
        "a.jsonl.gz",
        gzip.compress(ROW.encode())[:10] + b"\xff" * 60,
        "a.jsonl.gz: cannot be read: Error -3 while decompressing data",
    ),
    "no parquet": ("a.parquet", "PAR", "a.parquet: cannot be read: "),
    "an empty parquet": ("a.parquet", "", "a.parquet: cannot be read: "),
    "no JSON": ("a.jsonl", "prompt: A1=\n", "a.jsonl:1: not a JSON object on one line: Expecting value: line 1"),
    "half a line": ("a.jsonl", ROW + ROW[:12], "a.jsonl:2: not a JSON object on one line: Unterminated string"),
    "over several lines": ("a.jsonl", '{\n"prompt": "A1="\n}\n', "a.jsonl:1: not a JSON object on one line: Expecting"),
    "numbers": ("a.jsonl", ROW + "7\n", f"a.jsonl:2: a row must be an object; {NO_PROMPT}"),
    "lists": ("a.json", '["A1="]', f"a.json:1: a row must be an object; {NO_PROMPT}"),
    "rows under a name": ("a.json", '{"data": [{"prompt": "A1="}]}', f"a.json:1: {NO_PROMPT}; found 'data'"),
    "Latin-1": ("a.jsonl", ROW.replace("A", "é").encode("latin-1"), "a.jsonl:1: not UTF-8 (byte 0xe9): save it with"),
    "UTF-16": ("a.jsonl", ROW.encode("utf-16"), "a.jsonl:1: not UTF-8 (byte 0xff): save it with this encoding"),
    "BOM in the middle": (
        "a.jsonl",
        ROW + "\ufeff" + ROW,
        "a.jsonl:2: not a JSON object on one line: Unexpected UTF-8",
    ),
    "half a pair": (
        "a.jsonl",
        ROW.replace("A", "\\ud800"),
        "a.jsonl:1: 'prompt' holds half of a surrogate pair, which",
    ),
    "NUL": ("a.jsonl", ROW.replace("A", "\\u0000"), "a.jsonl:1: 'prompt' holds a NUL character"),
    "nested": ("a.jsonl", ROW + deep(60), "a.jsonl:2: 'x' is nested deeper than 50 levels"),
    "nested beyond reading": ("a.jsonl", ROW + deep(100_000), "a.jsonl:2: nested too deeply"),
    "a huge number": ("a.jsonl", ROW.replace('"1"', "9" * 5000), "a.jsonl:1: a number of more than 4300 digits: write"),
    "another column": (
        "a.jsonl",
        '{"question": "A1="}\n',
        """a.jsonl:1: expected 'prompt' (text or a list of messages) \
or 'messages'; found 'question': if 'question' is the prompt, write data.prompt = "question\"""",
    ),
    "an empty row": ("a.jsonl", "{}\n", f"a.jsonl:1: {NO_PROMPT}; found nothing"),
    "a blank prompt": ("a.jsonl", ROW + '{"prompt": "  "}\n', f"a.jsonl:2: the prompt is empty; {NO_PROMPT}"),
    "no prompt": ("a.jsonl", ROW + '{"prompt": null}\n', f"a.jsonl:2: {NO_PROMPT}"),
    "a number for a prompt": ("a.jsonl", '{"prompt": 3}\n', f"a.jsonl:1: the prompt is 3; {NO_PROMPT}"),
    "NaN for a prompt": ("a.jsonl", '{"prompt": NaN}\n', f"a.jsonl:1: the prompt is nan; {NO_PROMPT}"),
    "no messages": ("a.jsonl", '{"messages": []}\n', f"a.jsonl:1: the prompt is empty; {NO_PROMPT}"),
    "a message without text": ("a.jsonl", '{"prompt": [{"role": "user"}]}\n', f"a.jsonl:1: {NO_MESSAGE}"),
    "text for a message": ("a.jsonl", '{"messages": ["A1="]}\n', f"a.jsonl:1: {NO_MESSAGE}"),
    "an answer alone": (
        "a.jsonl",
        '{"messages": [{"role": "assistant", "content": "1"}]}\n',
        f"a.jsonl:1: the prompt is empty; {NO_PROMPT}",
    ),
    "messages without a template": (
        "a.jsonl",
        '{"prompt": [{"role": "user", "content": "A1="}], "answer": "1"}\n',
        "student has no chat template, and a.jsonl:1 holds messages: use text prompts",
    ),
    "tools beside text": ("a.jsonl", ROW.replace('"1"', '"1", "tools": [{}]'), "a.jsonl:1: 'tools' are for a chat tem"),
    "letters that have no token": ("a.jsonl", ROW.replace("A", "ü"), "a.jsonl:1: "),
    "longer than the context": ("a.jsonl", ROW.replace("A1", "A1" * 100), "exceed the context of 160 of builtin:stud"),
    "no answer": ("a.jsonl", ROW + '{"prompt": "A1="}\n', "a.jsonl:2: has no answer, which the reward 'exact' needs"),
    "NaN for an answer": ("a.jsonl", ROW.replace('"1"', "NaN"), "a.jsonl:1: the reward 'exact' cannot compare the ans"),
    "a blank answer": ("a.jsonl", ROW.replace('"1"', '" "'), "a.jsonl:1: the reward 'exact' cannot compare the answe"),
    "no right answer": ("a.jsonl", ROW.replace('"1"', "[]"), "a.jsonl:1: the reward 'exact' cannot compare the answ"),
    "an object for an answer": ("a.jsonl", ROW.replace('"1"', '{"x": 1}'), "cannot compare the answer: it is {'x': 1}"),
    "true for an answer": ("a.jsonl", ROW.replace('"1"', "true"), "True may be written in several ways: make it text"),
}
READERS = {
    "train": "train run.toml --task.reward exact --policy.loss vanilla --sampler.group 2 --data.train",
    "eval": "eval builtin:student --data",
}

# --- evaluations that cannot be ---------------------------------------------------------------------------------------

EVAL = table("""
eval '' | '' names no model: write an HF directory or a hub name
eval ./nowhere | ./nowhere: no such directory
eval nowhere/at-all | nowhere/at-all: cannot load a tokenizer there: 
eval run.toml | run.toml: is a file; a model is a directory, or a name on the hub
eval . | .: no model there: the directory has no config.json
eval builtin:studnet | no built-in model 'studnet'; did you mean 'student'?
eval builtin:student -k 8 | pass@8 needs at least 8 samples of each prompt: write -n 8
eval builtin:student -n 100000000 | lower -n or --max-tokens
eval builtin:student --max-tokens 5000 | prompt and --max-tokens exceed the context of 160 of builtin:student
eval builtin:student --device abacus | --device = 'abacus' cannot be used: 
eval builtin:student --reward ./own.py:score | task.reward = './own.py:score': there is no file own.py
eval builtin:student --data a=x.jsonl a=y.jsonl | --data: give each of several sets a name of its own, as in math=
eval builtin:student --data x.jsonl y.jsonl | --data: give each of several sets a name of its own, as in math=
eval builtin:student --split tset | builtin:arithmetic has no split 'tset'; known: eval, train
eval builtin:student --data rows.jsonl --split test | --split test does nothing: rows.jsonl has no splits; drop it
eval builtin:student --data rows.jsonl --data.prompt q | rows.jsonl:1: has no 'q' (data.prompt)
eval builtin:student --data rows.jsonl --data.answer q | rows.jsonl:1: has no 'q' (data.answer)
eval builtin:student --data rows.jsonl --data.template A1= | data.template: would be the same for every prompt
eval builtin:student --data rows.jsonl --data.template {q} | 
eval builtin:student --data.prompt question | data.prompt does nothing: builtin:arithmetic has no columns; drop it
eval builtin:student --system-prompt Hello | data.system_prompt needs prompts that are messages; these are plain text
estimators k9 | 'k9'
eval builtin:student --data.chat | builtin:student has no chat template, and data.chat needs one: drop it
""")

# --- runs -------------------------------------------------------------------------------------------------------------


def lost(*names: str) -> Callable[[Path], object]:
    def remove(run: Path) -> None:
        for name in names:
            shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    return remove


def rewritten(name: str, old: str, new: str) -> Callable[[Path], object]:
    def rewrite(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return rewrite


def none_whole(run: Path) -> None:
    for number in ("1", "2"):
        os.truncate(run / "checkpoints" / number / "learner.safetensors", 100)


def unchanged(run: Path) -> None:
    pass


def without_text(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text("")


RUNS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "finished": (unchanged, "resume run", "run is finished: the student is in run/final; to extend, write --updat"),
    "no more updates": (unchanged, "resume run --updates 2", "write --updates above 2"),
    "fewer updates": (unchanged, "resume run --updates 1", "write --updates above 2"),
    "too many updates": (
        unchanged,
        "resume run --updates 100000000000000000000000",
        "run/config.toml: updates: input should be less than or equal to 1000000000, got 1000000",
    ),
    "no such checkpoint": (unchanged, "resume run --from 7", "run has no checkpoint 7: write --from with one of 1, 2"),
    "nothing changed": (
        unchanged,
        "resume run --updates 3 --change learner.lr",
        "does not change that; edit it there",
    ),
    "no checkpoint": (
        lost("checkpoints"),
        "resume run --updates 3",
        "run has no checkpoint to go on from: it was stop",
    ),
    "no whole one": (
        none_whole,
        "resume run --updates 3",
        "run has no undamaged checkpoint to go on from: begin a new run",
    ),
    "that is not whole": (none_whole, "resume run --from 1", "checkpoint 1 of run is damaged: leave --from away"),
    "no config": (lost("config.toml"), "resume run", "run holds no run: there is no config.toml in it"),
    "no meta": (lost("meta.json"), "resume run --updates 3", "meta.json does not exist: it holds the settings"),
    "no metrics": (lost("metrics.jsonl"), "resume run --updates 3", "metrics.jsonl was changed: "),
    "an empty ledger": (without_text("ledger.jsonl"), "resume run --updates 3", "ledger.jsonl was changed: "),
    "a broken config": (
        rewritten("config.toml", "seed = 0", "seed"),
        "resume run",
        "run/config.toml: not valid TOML: ",
    ),
    "a misspelt config": (rewritten("config.toml", "seed = 0", "sed = 0"), "resume run", "run/config.toml: unknown ke"),
    "an empty config": (without_text("config.toml"), "resume run", "run/config.toml: 'student' is missing: "),
    "a newer version": (
        rewritten("config.toml", "seed = 0", "seed = 0\nfuture = 1"),
        "resume run --updates 3",
        "run/config.toml: unknown key 'future'; known: ",
    ),
    "a changed config": (
        rewritten("config.toml", "batch_size = 8", "batch_size = 4"),
        "resume run --updates 3",
        "learner.batch_size = 4 (it was 8) cannot change in a run: put it back, or begin a new run",
    ),
    "a change that is not said": (
        rewritten("config.toml", "max_tokens = 16", "max_tokens = 8"),
        "resume run --updates 3",
        "was changed: sampler.max_tokens = 8 (it was 16); put it back, or confirm the change: --change sampler.max_t",
    ),
    "another student": (
        rewritten("config.toml", "builtin:student", "builtin:teacher"),
        "resume run --updates 3 --change student",
        'student = "builtin:teacher" (it was "builtin:student") cannot change in a run: ',
    ),
    "samples of another update": (
        unchanged,
        "samples run --update 7",
        "run has no samples of update 7: it has samples of updates 1",
    ),
    "no samples": (lost("samples.jsonl"), "samples run", "run has no samples yet: log.samples sets how many samples"),
    "samples without a config": (lost("config.toml"), "samples run", "run holds no run: there is no config.toml in it"),
    "samples that are none": (rewritten("samples.jsonl", "{", "["), "samples run", "run/samples.jsonl is damaged: "),
    "scaled when it has ended": (
        unchanged,
        "scale run sampler=+1",
        "run: no run is active there, or it is loading",
    ),
    "scaled by nonsense": (unchanged, "scale run sampler", "run: no run is active there, or it is loading"),
    "trained again": (
        unchanged,
        "train run.toml",
        "run already holds a run: choose another with --output, or remove it",
    ),
    "checked again": (unchanged, "config run.toml --check", "run already holds a run: choose another with --output"),
    "evaluated without a reward": (
        unchanged,
        "eval run",
        "has no task.reward, which grading needs: write --rew",
    ),
    "evaluated without a student": (
        lost("final", "checkpoints"),
        "eval run",
        "run has no student to evaluate, neither",
    ),
    "evaluated without a config": (lost("config.toml"), "eval run", "run holds no run: there is no config.toml in it"),
    "a misspelt run": (unchanged, "eval ./rum --reward exact", "./rum: no such directory"),
}

# --- endpoints --------------------------------------------------------------------------------------------------------

REMOTE = "--teachers.main.base_url {url} --teachers.main.model teacher --teachers.main.tokenizer builtin:teacher"
TRAIN = "train run.toml --loss.kind k1 --loss.use advantage"
ENDPOINT: dict[str, tuple[str, Fault | None, str]] = {
    "another model": (
        REMOTE.replace("model teacher", "model teacherr") + " --teachers.main.api_key_env KEY",
        None,
        "teachers.main.model = 'teacherr': {url} does not serve it; write one of its models: 'teacher'",
    ),
    "a wrong path": (REMOTE.replace("{url}", "{url}/chat"), None, "{url}/chat"),
    "https at a plain port": (REMOTE.replace("{url}", "{https}"), None, "{https}"),
    "no key": (REMOTE, None, "teachers.main.api_key_env: the endpoint wants a key: name its variable"),
    "another key": (f"{REMOTE} --teachers.main.api_key_env OTHER", None, "the endpoint wants another key "),
    "a key that is not set": (f"{REMOTE} --teachers.main.api_key_env NONE", None, "environment variable is not set"),
    "nobody listens": (REMOTE.replace("{url}", "{nobody}"), None, "{nobody}"),
    "no such host": (REMOTE.replace("{url}", "http://no.such.host.invalid/v1"), None, "no.such.host.invalid"),
    **{
        f"an answer that is {fault}": (f"{REMOTE} --teachers.main.api_key_env KEY", fault, "teacher main at {url}")
        for fault in ("broken", "refused", "not json", "packed", "cut", "nan", "short", "shifted", "no logprobs")
    },
}

# --- how they are tried -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare() -> Iterator[Typed]:
    typed = Typed("--bare")
    yield typed
    typed.close()


@pytest.fixture(scope="module")
def typed() -> Iterator[Typed]:
    typed = Typed()
    yield typed
    typed.close()


@pytest.fixture(scope="module")
def finished(typed: Typed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two updates with a checkpoint after each, and its config beside it."""
    home = laid_out(tmp_path_factory.mktemp("finished"), {})
    done = typed(["train", "run.toml", "--checkpoint.every", "1", "--checkpoint.keep", "9"], home, {})
    assert done.code == 0, done.err
    return home


def laid_out(home: Path, files: Mapping[str, File | None]) -> Path:
    for name, content in {"run.toml": BASE, **files}.items():
        path = home / name
        path.parent.mkdir(exist_ok=True)
        match content:
            case str():
                path.write_text(content)
            case bytes():
                path.write_bytes(content)
            case None:
                pass
            case _:
                content(path)
    return home


def held(home: Path) -> dict[str, bytes]:
    """Everything in it. A lock stays when it is let go."""
    paths = [path for path in home.rglob("*") if path.name != "lock"]
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}


def one_line(typed: Typed, home: Path, command: str, says: str, **environment: str) -> Outcome:
    """The law."""
    before = held(home)
    outcome = typed(shlex.split(command), home, environment)
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1 and outcome.err.endswith("\n"), (
        outcome.err
    )
    assert says in outcome.err, outcome.err
    assert "Traceback" not in outcome.out and not outcome.left
    assert held(home) == before
    return outcome


def test_there_are_many() -> None:
    here = [GLANCE, DATA, DATA, EVAL, FAULTS, RUNS, ENDPOINT]
    assert sum(map(len, here)) >= 300
    assert len(ILLEGAL) + len(SCHEMA) >= 300


@pytest.mark.parametrize("name", GLANCE)
def test_what_is_seen_at_a_glance_costs_one_line_and_no_import(bare: Typed, name: str, tmp_path: Path) -> None:
    command, says = GLANCE[name]
    assert not one_line(bare, laid_out(tmp_path, BESIDE), command, says).torch


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", DATA)
def test_bad_data_costs_one_line_whoever_reads_it(typed: Typed, name: str, reader: str, tmp_path: Path) -> None:
    source, content, says = DATA[name]
    one_line(typed, laid_out(tmp_path, {source: content}), f"{READERS[reader]} {source}", says)


@pytest.mark.parametrize("command", EVAL)
def test_an_evaluation_that_cannot_be_costs_one_line(typed: Typed, command: str, tmp_path: Path) -> None:
    one_line(typed, laid_out(tmp_path, {"rows.jsonl": ROW}), command, EVAL[command])


DOCTOR = table("""
doctor run.toml --student ./nowhere | ./nowhere: no such directory
doctor run.toml --student builtin:studnet | no built-in model 'studnet'; did you mean 'student'?
doctor run.toml --data.train nowhere.jsonl | nowhere.jsonl: cannot be read: No such file or directory
doctor run.toml --data.train rows.jsonl --data.prompt q | rows.jsonl:1: has no 'q' (data.prompt)
doctor run.toml --data.split tset | builtin:arithmetic has no split 'tset'; known: eval, train
doctor run.toml --log.to mlflow | log.to = ['mlflow'] needs mlflow: pip install 'slipstream[mlflow]'
""")


@pytest.mark.parametrize("command", DOCTOR)
def test_a_doctor_reports_what_stops_it_as_a_finding(typed: Typed, command: str, tmp_path: Path) -> None:
    home = laid_out(tmp_path, {"rows.jsonl": ROW})
    before, outcome = held(home), typed(shlex.split(command), home, {})
    assert (outcome.code, outcome.err, outcome.left) == (1, "", [])
    assert f"FAIL stopped: {DOCTOR[command]}" in outcome.out and outcome.out.endswith("1 of 1 checks failed\n")
    assert held(home) == before


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_model_costs_whoever_evaluates_it_one_line(typed: Typed, name: str, tmp_path: Path) -> None:
    damage, says = FAULTS[name]
    shutil.copytree(model_path("builtin:student"), tmp_path / "model")
    damage(tmp_path / "model")
    one_line(typed, tmp_path, "eval model --limit 4", says)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_cannot_go_on_or_be_shown_costs_one_line(
    typed: Typed, name: str, finished: Path, tmp_path: Path
) -> None:
    harm, command, says = RUNS[name]
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    harm(tmp_path / "run")
    one_line(typed, tmp_path, command, says)


def test_a_run_that_goes_on_costs_who_would_go_on_with_it_too_one_line(
    typed: Typed, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    with directory_lock(tmp_path / "run"):
        one_line(typed, tmp_path, "resume run --updates 3", f"run is in use by process {os.getpid()} on ")


def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/v1"


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeEndpoint]:
    with FakeEndpoint(model("builtin:teacher"), vocabulary=39, key="sk-right") as endpoint:
        yield endpoint


@pytest.mark.parametrize("name", ENDPOINT)
def test_an_endpoint_that_cannot_teach_costs_one_line(
    typed: Typed, name: str, fake: FakeEndpoint, tmp_path: Path
) -> None:
    words, fake.always, says = ENDPOINT[name]
    known = {"url": fake.url, "https": fake.url.replace("http", "https"), "nobody": nobody()}
    command = f"{TRAIN} {words}".format(**known)
    one_line(typed, laid_out(tmp_path, {}), command, says.format(**known), KEY="sk-right", OTHER="sk-wrong")


@pytest.mark.parametrize("runtime", ["inline", "local"])
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "hung up")],
)
def test_a_command_that_is_stopped_while_it_loads_says_so_in_one_line(
    typed: Typed, number: signal.Signals, code: int, said: str, runtime: str, fake: FakeEndpoint, tmp_path: Path
) -> None:
    """Wait like the client of an endpoint that is slow to answer."""
    home = laid_out(tmp_path, {"run.toml": BASE.replace("inline", runtime)})
    before, fake.always, asked, fake.seconds = held(home), "slow", len(fake.requests), 30.0
    words = f"{TRAIN} {REMOTE} --teachers.main.api_key_env KEY".format(url=fake.url)
    try:
        pid = typed.begin(shlex.split(words), home, {"KEY": "sk-right"})
        until = time.monotonic() + 60
        while len(fake.requests) == asked and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(pid, number)
        outcome = typed.end()
    finally:
        fake.always, fake.seconds = None, 0.05
    assert (outcome.code, outcome.err, outcome.left) == (code, f"{said}\n", [])
    assert held(home) == before
