"""Make the run directory that later versions must still read: `python tests/frozen.py` writes tests/fixtures/format_N.

A run of six updates that was stopped after the fourth, with all its files and one checkpoint. Its models are those of
`conftest.save_model`, which are made anew wherever they are needed. A directory that is there is left alone: what an
older version wrote is never written again.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from slipstream.config.file import load
from slipstream.run_dir.formats import FORMAT
from slipstream.runs.start import Caller, train
from support.model_directories import build_tokenizer, save_model

DATA = Path(__file__).parent / "fixtures"
CONFIG = """
student = "student"
updates = 6
output = "run"
[data]
train = "data.jsonl"
eval = "data.jsonl"
[teachers.main]
model = "teacher"
[sampler]
max_tokens = 6
group = 2
slots = 8
[learner]
batch_size = 4
[loss]
m = 2
[task]
reward = "exact"
[eval]
every = 2
prompts = 4
n = 2
[checkpoint]
every = 4
[runtime]
kind = "inline"
"""


def models(path: Path) -> None:
    """The student and the teacher of the run."""
    save_model(path / "student", build_tokenizer(), layers=1, seed=1)
    save_model(path / "teacher", build_tokenizer(), layers=2, seed=2, like=path / "student")


def make(path: Path) -> None:
    """Begin the run in this directory, and stop it after four updates."""
    models(path)
    rows = [{"prompt": f"{i} and {i}?", "answer": str(2 * i)} for i in range(20)]
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "run.toml").write_text(CONFIG)
    os.chdir(path)
    caller = Caller({"train": lambda line: caller.stop() if line["update"] == 4 else None})
    try:
        train(load("run.toml"), Console(quiet=True), name="run", checks=False, caller=caller)
    except KeyboardInterrupt:
        return
    raise AssertionError("the run was to be stopped")


def main() -> None:
    """Write the directory of the present format, unless there is one."""
    target = DATA / f"format_{FORMAT}"
    if target.exists():
        sys.exit(f"{target} is there, and stays as it is")
    with tempfile.TemporaryDirectory() as home:
        make(Path(home))
        shutil.copytree(Path(home) / "run", target / "run")
        shutil.copy(Path(home) / "data.jsonl", target)
    meta = json.loads((target / "run" / "meta.json").read_text())
    meta |= {"command": ["slipstream", "train", "run.toml"], "platform": "Linux", "git": None}  # wherever it was made
    (target / "run" / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    (target / "run" / "lock").unlink()
    for each in target.rglob("*"):  # as a repository keeps them
        each.chmod(0o755 if each.is_dir() else 0o644)


if __name__ == "__main__":
    main()
