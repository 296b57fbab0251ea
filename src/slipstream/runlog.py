"""The run directory: the only contract between a run and the tools that read it. Guarantor of invariant 10.

config.toml    the resolved configuration          metrics.jsonl   one line per update (and per evaluation)
meta.json      versions, machine, git              ledger.jsonl    one line per submitted group: how it ended
checkpoints/N  HF directories to go on from        trace.json      what every worker did when, in Chrome's format
final/         the trained student, a HF directory
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from slipstream.config.file import to_toml
from slipstream.config.schema import Config, Tracker
from slipstream.errors import ConfigError, RunDirError, first_line

PACKAGES = ("slipstream", "torch", "transformers", "numpy")


class Sink(Protocol):
    """Where metrics are also sent."""

    def log(self, numbers: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class RunLog:
    def __init__(
        self, path: Path, sinks: list[Sink], *, trace: bool = True, before: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """`before` are the lines that metrics.jsonl has already, if this goes on with a run."""
        self.path, self.sinks = path, sinks
        self.say: Callable[[str], None] = print
        """Told what the run survives."""
        self.last: Mapping[str, Any] = next((line for line in reversed(before) if line["kind"] == "train"), {})
        """The metrics of the last update."""
        self.evaluated = {line["update"] for line in before if line["kind"] == "eval"}
        """Updates after which there was an evaluation."""
        self._metrics: TextIO = (path / "metrics.jsonl").open("a")
        self._ledger: TextIO = (path / "ledger.jsonl").open("a")
        self.trace: TextIO | None = open_trace(path / "trace.json") if trace else None

    @classmethod
    def create(cls, config: Config, path: Path) -> RunLog:
        """A new run directory. One that already holds a run is left alone."""
        check_free(path)
        check_trackers(config.log.to)
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_atomic(path / "config.toml", to_toml(config))
        except OSError as error:
            raise RunDirError(f"{path} cannot be written: {error.strerror}") from None
        write_atomic(path / "meta.json", json.dumps(machine(), indent=2) + "\n")
        try:
            sinks = start_trackers(config, path)
        except ConfigError:
            for written in ("config.toml", "meta.json"):  # the directory may hold files of the user's own
                (path / written).unlink()
            raise
        return cls(path, sinks, trace=config.log.trace)

    @classmethod
    def reopen(cls, config: Config, path: Path, *, update: int, ended: Callable[[int], bool]) -> RunLog:
        """Go on after an update. What came later is forgotten: its lines, and those of groups that had not ended."""
        check_trackers(config.log.to)
        lines = [line for line in read_lines(path / "metrics.jsonl") if line["update"] <= update]
        time = max((line["time"] for line in lines if line["kind"] == "train"), default=0.0)
        write_atomic(path / "metrics.jsonl", as_lines(lines))
        ledger = read_lines(path / "ledger.jsonl")
        write_atomic(path / "ledger.jsonl", as_lines(entry for entry in ledger if ended(entry["number"])))
        if (path / "trace.json").exists():
            events = (path / "trace.json").read_text().splitlines(keepends=True)
            kept = [line for line in events if line.startswith("[") or _timestamp(line) <= time * 1e6]
            write_atomic(path / "trace.json", "".join(kept))
        return cls(path, start_trackers(config, path), trace=config.log.trace, before=lines)

    def metrics(self, kind: str, numbers: Mapping[str, float], *, update: int) -> None:
        _line(self._metrics, {"kind": kind, "update": update, **numbers})
        if kind == "eval":
            self.evaluated.add(update)
        names = {
            name if kind == "train" and "/" in name else f"{kind}/{name}": value for name, value in numbers.items()
        }
        for sink in list(self.sinks):
            try:
                sink.log(names, update)
            except Exception as error:  # a tracker fails in ways of its own, and none of them ends a run
                self.sinks.remove(sink)
                self._left_out(sink, error)

    def _left_out(self, sink: Sink, error: Exception) -> None:
        self.say(
            f"{type(sink).__name__} failed and is left out from now on, metrics.jsonl has it all: {first_line(error)}"
        )

    def ledger(self, *entries: Mapping[str, Any]) -> None:
        self._ledger.write(as_lines(entries))
        self._ledger.flush()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                self._left_out(sink, error)
        self._metrics.close()
        self._ledger.close()
        if self.trace is not None:
            self.trace.close()


def run_path(config: Config, name: str) -> Path:
    return Path(config.output or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def check_free(path: Path) -> None:
    if any((path / name).exists() for name in ("config.toml", "metrics.jsonl", "ledger.jsonl", "checkpoints", "final")):
        raise RunDirError(f"{path} already holds a run: choose another with --output, or remove it")
    if path.exists() and not path.is_dir():
        raise RunDirError(f"{path} is a file: choose another run directory with --output")


def write_atomic(path: Path, text: str) -> None:
    """Whoever reads sees the old file or the new one, whole."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, "utf-8")
    beside.replace(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a run that was killed may have left half of one at the end."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def as_lines(entries: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def _line(file: TextIO, entry: Mapping[str, Any]) -> None:
    file.write(json.dumps(entry) + "\n")
    file.flush()


def open_trace(path: Path) -> TextIO:
    """A list of events, one on each line, that need not be closed."""
    file = path.open("a")
    if file.tell() == 0:
        file.write("[\n")
    return file


def _timestamp(line: str) -> float:
    """Of one line of a trace; infinite where it was cut off, and 0 for what has none."""
    try:
        return float(json.loads(line.rstrip(",\n")).get("ts", 0))
    except json.JSONDecodeError:
        return float("inf")


def machine() -> dict[str, Any]:
    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    def commit() -> str | None:
        if shutil.which("git") is None:
            return None
        git = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, check=False)
        return git.stdout.strip() or None

    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": {package: installed(package) for package in PACKAGES},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git": commit(),
    }


# --- trackers: one config line each ----------------------------------------------------------------------


def check_trackers(names: Iterable[Tracker]) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"log.to = [{name!r}] needs {name}: pip install 'slipstream[{name}]'")


def start_trackers(config: Config, path: Path) -> list[Sink]:
    sinks: list[Sink] = []
    for name in config.log.to:
        try:
            sinks.append(SINKS[name](config, path))
        except Exception as error:  # a tracker may refuse for reasons of its own: no key, no server
            raise ConfigError(f"log.to = [{name!r}] cannot start: {first_line(error)}") from None
    return sinks


class TensorBoard:
    def __init__(self, config: Config, path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(path / "tensorboard"))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    def __init__(self, config: Config, path: Path) -> None:
        import wandb

        self.run = wandb.init(
            project=config.log.project, name=path.name, config=config.model_dump(mode="json"), dir=str(path.parent)
        )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    def __init__(self, config: Config, path: Path) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.set_experiment(config.log.project)
        mlflow.start_run(run_name=path.name)
        mlflow.log_text(to_toml(config), "config.toml")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self.mlflow.end_run()


class Trackio:
    def __init__(self, config: Config, path: Path) -> None:
        import trackio

        self.trackio = trackio
        trackio.init(project=config.log.project, name=path.name, config=config.model_dump(mode="json"))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.trackio.log(dict(numbers), step=step)

    def close(self) -> None:
        self.trackio.finish()


SINKS: dict[Tracker, Callable[[Config, Path], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}
