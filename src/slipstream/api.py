"""What a script or a notebook calls: to train, to resume, and to read what a run has written.

Nothing here computes. A run is what it is on the command line, with the same config, the same run directory and the
same errors, which are raised.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from slipstream.config.file import load, parse
from slipstream.config.schema import Config
from slipstream.console import Screen
from slipstream.data.tokenizers import load_tokenizer
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.pipeline.checkpoint import newest
from slipstream.run_dir.reading import Line, RunDir
from slipstream.runs import start as command
from slipstream.runs.start import Caller, Enough, saying

__all__ = ["Config", "Run", "SlipstreamError", "resume", "train"]

T = TypeVar("T")
Told = Callable[[Line], object] | None
"""Is told of a line of metrics.jsonl. What it raises ends the run, and so does False, without an error; both leave a
checkpoint to go on from."""
ONE = threading.Lock()
"""Held while there is a run: two in one process would share its file mode mask and its signals."""


def train(
    config: str | PathLike[str] | Mapping[str, Any] | Config,
    *,
    on_update: Told = None,
    on_eval: Told = None,
    quiet: bool = False,
    checks: bool = True,
) -> Run:
    """Train a student, as `slipstream train` does, and return when it is done.

    `config` is a TOML file, the same as a dict, or a Config. `on_update` and `on_eval` are called with every line of
    metrics as it is written, in the thread that trains. `quiet` prints nothing at all; without `checks` a run begins
    before it has tried its engines.
    """
    screen = screen_for(quiet)
    chosen, name = config_of(config, saying(screen))
    caller = Caller(heard(on_update, on_eval))
    return Run(here_or_beside(partial(command.train, chosen, screen, name=name, checks=checks, caller=caller), caller))


def resume(
    path: str | PathLike[str],
    *,
    updates: int | None = None,
    checkpoint: int | None = None,
    change: Sequence[str] = (),
    on_update: Told = None,
    on_eval: Told = None,
    quiet: bool = False,
) -> Run:
    """Go on with a run that was stopped, as `slipstream resume` does.

    `updates` is how many to make in all, also of a run that is finished; `checkpoint`, the one to go on from; `change`,
    the settings that its config.toml was edited in.
    """
    caller = Caller(heard(on_update, on_eval))
    given: Any = {"number": checkpoint, "updates": updates, "meant": tuple(change), "caller": caller}
    return Run(here_or_beside(partial(command.resume, Path(path), screen_for(quiet), **given), caller))


class Run(RunDir):
    """What a run has written, and the student that came of it."""

    @property
    def student(self) -> tuple[Any, Any]:
        """Model and tokenizer of transformers: the final ones, or those of the last checkpoint."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        where = self.path / "final" if self.finished else newest(self.path, say=lambda _: None).path
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            return AutoModelForCausalLM.from_pretrained(where), load_tokenizer(str(where))
        finally:
            if shown:
                logging.enable_progress_bar()


def config_of(given: object, say: Callable[[str], None]) -> tuple[Config, str]:
    """The config, and what its run is called."""
    match given:
        case Config():
            return given, "run"
        case Mapping():
            return parse(dict(given), say=say), "run"
        case str() | PathLike():
            path = Path(given)
            return load(path, say=say), path.stem
    raise ConfigError(f"config is a {type(given).__name__}: give the path of a TOML file, a dict, or a Config")


def screen_for(quiet: bool) -> Console:
    """Plain lines in a notebook, which says that it is a terminal and shows no live panel."""
    plain = quiet or Console().is_jupyter
    return Screen(quiet=quiet, force_jupyter=False, force_terminal=False if plain else None)


def heard(on_update: Told, on_eval: Told) -> dict[str, Callable[[Line], None]]:
    def until_enough(told: Callable[[Line], object], line: Line) -> None:
        if told(line) is False:
            raise Enough

    given = {"train": on_update, "eval": on_eval}
    return {kind: partial(until_enough, told) for kind, told in given.items() if told is not None}


def here_or_beside(work: Callable[[], T], caller: Caller) -> T:
    """In this thread; in one beside it, where an event loop is running in this one, as it is in a notebook.

    That one gets no signals: what stops this one, as the button of a notebook does, stops the run in order.
    """
    with only_one():
        if not in_a_loop():
            return work()
        with ThreadPoolExecutor(1, "slipstream") as thread:
            done = thread.submit(copy_context().run, work)  # what is printed there is this cell's
            while True:
                try:
                    return done.result()
                except BaseException:
                    if done.done():
                        raise
                    caller.stop()


def in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def only_one() -> Iterator[None]:
    if not ONE.acquire(blocking=False):
        raise SlipstreamError("a run goes on in this process: wait for it, or begin this one in a process of its own")
    try:
        yield
    finally:
        ONE.release()
