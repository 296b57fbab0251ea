"""Python interface for scripts and notebooks: train, resume, and read the files of a run.

A run behaves as on the command line: it has the same config and run directory. Errors are raised as exceptions.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console

from slipstream.config.file import load, parse
from slipstream.config.schema import Config
from slipstream.console import Screen
from slipstream.data.tokenizers import load_tokenizer
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.pipeline.checkpoint import newest
from slipstream.run_dir.reading import Line, RunDir
from slipstream.runs import start as command
from slipstream.runs.start import Caller, Enough, line_printer

__all__ = ["Config", "Run", "SlipstreamError", "resume", "train"]

T = TypeVar("T")
Callback = Callable[[Line], object] | None
"""Callback for a line of metrics.jsonl. False stops the run without error, an exception stops it with that error."""
RUN_LOCK = threading.Lock()
"""Lock of the only active run: two runs in one process would share the file mode mask and the signal handlers."""


def train(
    config: str | PathLike[str] | Mapping[str, Any] | Config,
    *,
    on_update: Callback = None,
    on_eval: Callback = None,
    quiet: bool = False,
    checks: bool = True,
) -> Run:
    """Train a student, as `slipstream train` does, and return when it is done.

    `config` is the path of a TOML file, its content as a dict, or a Config. `on_update` and `on_eval` are called with
    every line of metrics when it is written, in the thread that trains. `quiet` prints nothing. `checks=False` starts
    training without testing the engines.
    """
    screen = screen_for(quiet)
    chosen, name = config_of(config, line_printer(screen))
    caller = Caller(callbacks_by_kind(on_update, on_eval))
    return Run(run_in_thread(partial(command.train, chosen, screen, name=name, checks=checks, caller=caller), caller))


def resume(
    path: str | PathLike[str],
    *,
    updates: int | None = None,
    checkpoint: int | None = None,
    change: Sequence[str] = (),
    on_update: Callback = None,
    on_eval: Callback = None,
    quiet: bool = False,
) -> Run:
    """Continue a stopped run, as `slipstream resume` does.

    `updates` is the total number of updates; it also extends a finished run. `checkpoint` is the number of the
    checkpoint to start from, by default the last one. `change` lists the settings that were edited in config.toml.
    """
    caller = Caller(callbacks_by_kind(on_update, on_eval))
    options: Any = {
        "number": checkpoint,
        "updates": updates,
        "accepted": (change,) if isinstance(change, str) else tuple(change),
        "caller": caller,
    }
    return Run(run_in_thread(partial(command.resume, Path(path), screen_for(quiet), **options), caller))


class Run(RunDir):
    """Files of a run, and its trained student."""

    def table(self, name: Literal["metrics", "evaluations", "ledger", "samples"]) -> Any:
        """Return the lines as a table of pyarrow, which pandas and polars take over; absent values are null."""
        try:
            import pyarrow
        except ImportError:
            raise ConfigError("Run.table needs pyarrow: pip install 'slipstream[data]'") from None
        lines: list[Line] = getattr(self, name)
        keys = dict.fromkeys(chain.from_iterable(lines))
        return pyarrow.table({key: [line.get(key) for line in lines] for key in keys})

    @property
    def student(self) -> tuple[Any, Any]:
        """Student model and tokenizer (transformers), from `final`, or the last checkpoint of an unfinished run."""
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
    """Return a console; in a notebook it prints plain lines, as a notebook cannot show a live panel."""
    plain = quiet or Console().is_jupyter
    return Screen(quiet=quiet, force_jupyter=False, force_terminal=False if plain else None)


def callbacks_by_kind(on_update: Callback, on_eval: Callback) -> dict[str, Callable[[Line], None]]:
    def until_enough(callback: Callable[[Line], object], line: Line) -> None:
        if callback(line) is False:
            raise Enough

    callbacks = {"train": on_update, "eval": on_eval}
    return {kind: partial(until_enough, callback) for kind, callback in callbacks.items() if callback is not None}


def run_in_thread(work: Callable[[], T], caller: Caller) -> T:
    """Call `work` in this thread, or in a new thread if this thread runs an event loop (notebook); return its result.

    The new thread gets no signals. So an exception in this thread, as from a notebook's stop button, stops the run.
    """
    with single_run():
        if not in_a_loop():
            return work()
        with ThreadPoolExecutor(1, "slipstream") as thread:
            done = thread.submit(copy_context().run, work)  # so output appears in this notebook cell
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
def single_run() -> Iterator[None]:
    if not RUN_LOCK.acquire(blocking=False):
        raise SlipstreamError("this process already has an active run: wait for its end, or use another process")
    try:
        yield
    finally:
        RUN_LOCK.release()
