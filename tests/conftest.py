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

PROOFS = {
    "test_decoding",
    "test_dropout",
    "test_head",
    "test_model_files",
    "test_model_runs",
    "test_moving_teachers",
    "test_packing",
}
PROOFS |= {"test_pretended_gpu", "test_ranks", "test_score_checks", "test_zoo"}
"""Tests of what engines prove about their models when they start."""

# a suite that was started by nohup, or in the background of a script, ignores these, and so would all that it starts
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)
gc.disable()  # a quarter of what it costs to load the libraries of models: all of it stays, see below
# Before Python 3.12, asyncio.run asks whether its handler of signals is a constant, and the answer quotes the handler,
# its task and all numbers of the tensors in its result: a fifth of the time of the tests of losses
_constant_of = signal._int_to_enum  # type: ignore[attr-defined]
_only_numbers = lambda value, kind: _constant_of(value, kind) if isinstance(value, int) else value  # noqa: E731
signal._int_to_enum = _only_numbers  # type: ignore[attr-defined]
settings.register_profile("same", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("same")


@pytest.fixture(scope="session", autouse=True)
def skip_fsync() -> Iterator[None]:
    """Do not wait for the disk: tests write thousands of tiny checkpoints, and none of them needs a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def prove_engines_once() -> Iterator[None]:
    """Start engines of one architecture with one proof: for tests that are about something else than these proofs."""
    from support.proofs import prove_once

    with pytest.MonkeyPatch.context() as patch:
        prove_once(patch)
        yield


@pytest.fixture(scope="module", autouse=True)
def start_engines_quickly(request: pytest.FixtureRequest) -> None:
    """Prove models anew at every start only in the tests of these proofs."""
    if request.path.stem not in PROOFS and "with_vllm" not in request.path.parts:
        request.getfixturevalue("prove_engines_once")


@pytest.fixture(scope="session", autouse=True)
def make_built_in_tasks_small() -> Iterator[None]:
    """Read a few hundred problems where a config sets no limit, since each plan reads them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slipstream.data.prompts.BUILT_IN_ROWS", 400)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a student, a teacher, and a stranger whose tokenizer has two characters swapped."""
    path = tmp_path_factory.mktemp("models")
    save_model(path / "student", build_tokenizer(), layers=1, seed=1)
    save_model(path / "teacher", build_tokenizer(), layers=2, seed=2, like=path / "student")
    swapped = string.printable.translate(str.maketrans("ab", "ba"))
    save_model(path / "stranger", build_tokenizer(alphabet=swapped), layers=1, seed=3)
    return path


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that need an environment of their own, by their folder."""
    for folder, marker in (("with_vllm", "vllm"), ("with_agents", "agents")):
        if folder in item.path.parts:
            item.add_marker(marker)


def pytest_collection_finish() -> None:
    """Keep everything loaded so far out of later garbage collections."""
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries that count what they leave behind would complain


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print at the very end which tests this machine cannot run."""
    skipped = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []) if report.longrepr]
    for reason in sorted({each.removeprefix("Skipped: ") for each in skipped if "NO SANDBOX IS TESTED HERE" in each}):
        terminalreporter.write_line(reason, red=True, bold=True)
