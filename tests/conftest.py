"""Fixtures that all tests share, and what every test process sets up."""

from __future__ import annotations

import os
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(Path(__file__).parents[1] / ".pytest_cache" / "huggingface"),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import atexit
import gc
import signal
import string
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from support.model_directories import build_tokenizer, save_model

if TYPE_CHECKING:  # the process that only distributes tests does not load the libraries of models
    from transformers import PreTrainedTokenizerFast

HAS_AGENTS = (Path(__file__).parents[1] / ".venv-agents" / "ready").exists()
collect_ignore = ([] if find_spec("vllm") else ["with_vllm"]) + ([] if HAS_AGENTS else ["with_agents"])
"""`make test-vllm` has an environment with vLLM, `make test-agents` makes one with agents."""

# a suite that was started by nohup, or in the background of a script, ignores these, and so would all that it starts
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)
gc.disable()  # a quarter of what it costs to load the libraries of models: all of it stays, see below
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


@pytest.fixture(scope="session", autouse=True)
def nobody_waits_for_the_disk() -> Iterator[None]:
    """Thousands of checkpoints of toys are told to be on disk, of which no test sees more than that they are told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """student and teacher, and a stranger whose tokenizer has two characters swapped."""
    path = tmp_path_factory.mktemp("models")
    save_model(path / "student", build_tokenizer(), layers=1, seed=1)
    save_model(path / "teacher", build_tokenizer(), layers=2, seed=2, like=path / "student")
    swapped = string.printable.translate(str.maketrans("ab", "ba"))
    save_model(path / "stranger", build_tokenizer(alphabet=swapped), layers=1, seed=3)
    return path


def pytest_collection_finish() -> None:
    """What was loaded up to here stays: no collection need look through it again."""
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries that count what they leave behind would complain


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What a machine cannot try is the last that is seen of a run."""
    skipped = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []) if report.longrepr]
    for reason in sorted({each.removeprefix("Skipped: ") for each in skipped if "NO SANDBOX IS TESTED HERE" in each}):
        terminalreporter.write_line(reason, red=True, bold=True)
