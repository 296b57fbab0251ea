"""The writer of the run directory. Readers know a run only by these files. Guarantor of invariant 10.

config.toml    the resolved configuration          metrics.jsonl   one line per update (and per evaluation)
meta.json      versions, machine, git              ledger.jsonl    one line per submitted group: how it ended
checkpoints/N  HF directories to resume from       samples.jsonl   texts and tokens of some samples of every update
final/         the trained student, a HF directory trace.json      the busy times of every worker, in Chrome's format
eval.jsonl     results of `eval`, one line per set lock            the process that writes here, or wrote last
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count
from pathlib import Path
from typing import Any

from slipstream.config.file import differing, parse, to_toml
from slipstream.config.renamed_keys import DROPPED, with_new_keys
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, RunDirError, first_line
from slipstream.run_dir.atomic_files import Extent, Lines, begins_with, reading, write_atomic, writing
from slipstream.run_dir.formats import FORMAT, checked, format_of, object_of, parsed, upgraded
from slipstream.run_dir.trackers import Quotes, Sink, check_trackers, start_trackers

PACKAGES = ("slipstream", "torch", "transformers", "numpy")
META, METRICS, LEDGER, SAMPLES, TRACE = "meta.json", "metrics.jsonl", "ledger.jsonl", "samples.jsonl", "trace.json"
SOCKET = "scale.sock"
"""Socket by which `slipstream scale` changes the number of workers of a running run."""
EVALS = "eval.jsonl"
"""Results of `slipstream eval`, which may write while the run writes its own files."""
SUITE_SETTINGS = {"time", "model", "update", "seed", "dtype", "chat", "limit", "seconds", "suite", "prompts"}
"""Names in a line of a task of lm-evaluation-harness that are no scores."""
FILES_LOOKED_AT = (SAMPLES, TRACE)
"""Large files that only people look at; a user may delete them, and the run still resumes."""
AHEAD = 1 << 16
"""Bytes of the trace that are buffered before a write."""
FIXED = ("student", "seed", "sampler.group", "learner.batch_size", "learner.lora", "schedule.kind", "reuse")
"""Settings that cannot change within a run, because the meaning of its data depends on them."""
LogPosition = Mapping[str, Any]
"""The state of the log at a checkpoint: sizes and checksums of the files, and the last metrics."""


class RunLog(AbstractContextManager["RunLog"]):
    def __init__(
        self,
        path: Path,
        sinks: list[Sink],
        *,
        samples: bool = True,
        trace: bool = True,
        mark: LogPosition | None = None,
    ) -> None:
        """Open the files for writing; if `mark` is given, truncate them to their size at that checkpoint."""
        self.path, self.sinks = path, sinks
        before = mark or {}
        ends = ends_of(path, mark) if mark else {}
        self.say: Callable[[str], None] = print
        """Called with a warning about a problem that does not stop the run."""
        self.callbacks: Mapping[str, Callable[[dict[str, Any]], None]] = {}
        """Callbacks for metrics lines, by kind ("train" or "eval"); their exceptions stop the run."""
        self.last: Mapping[str, Any] = before.get("last", {})
        """The metrics of the last update."""
        self.evaluated: int | None = before.get("evaluated")
        """The update of the last evaluation; None before the first."""
        self.time: float = before.get("time", 0.0)
        """Seconds that the run had taken at the checkpoint; 0 for a new run."""
        optional = {SAMPLES: samples, TRACE: trace}
        names = METRICS, LEDGER, *(name for name, written in optional.items() if written or name in ends)
        with writing(path):
            self.files = {
                name: Lines(path / name, end=ends.get(name), ahead=AHEAD if name == TRACE else 0) for name in names
            }
        self.trace = self.files.get(TRACE) if trace else None
        if self.trace and not self.trace.size:
            self.trace.write("[\n")  # a list of events, one on each line, that need not be closed

    @classmethod
    def create(cls, config: Config, path: Path, *, prompts: str | None = None) -> RunLog:
        """Create a run directory; raise if the path already holds a run. `prompts` is the digest of the prompts."""
        check_free(path)
        check_trackers(config.log.to)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            write_atomic(path / "config.toml", to_toml(config))
            write_meta(path, meta := machine() | begun_with(config, prompts))
        try:
            sinks = started_trackers(config, path, meta)
        except ConfigError:
            for name in ("config.toml", META):  # the directory may contain files of the user
                (path / name).unlink()
            raise
        return cls(path, sinks, samples=config.log.samples > 0, trace=config.log.trace)

    @classmethod
    def reopen(cls, config: Config, path: Path, mark: LogPosition, *, prompts: str | None = None) -> RunLog:
        """Open a run directory to resume from a checkpoint; `final` of a finished run is renamed to `final-N`.

        If that name is taken, by a student after the same number of updates, it is `final-N.1`, `final-N.2`, and so on.
        """
        check_trackers(config.log.to)
        meta = read_meta(path)
        with writing(path):
            if (path / "final").exists():
                name = f"final-{meta['config']['updates']}"
                names = chain([name], (f"{name}.{number}" for number in count(1)))
                (path / "final").rename(next(path / each for each in names if not (path / each).exists()))
            write_atomic(path / "config.toml", to_toml(config))
            meta |= begun_with(config, prompts)
            write_meta(path, meta)  # last, so that a killed `resume` can be repeated
        sinks = started_trackers(config, path, meta)
        return cls(path, sinks, samples=config.log.samples > 0, trace=config.log.trace, mark=mark)

    def mark(self, *, time: float = 0.0, totals: Mapping[str, float] | None = None) -> LogPosition:
        """Sync all files to disk and return their state, which a checkpoint saves.

        `totals` are counts of the run until now. They replace those of the last metrics line.
        """
        ends = {name: file.end() for name, file in self.files.items()}
        return {"files": ends, "last": {**self.last, **(totals or {})}, "evaluated": self.evaluated, "time": time}

    def lines(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield all metrics lines of this kind so far, from which a resumed run rebuilds its decisions."""
        number = format_in(self.path)
        with reading(self.path / METRICS) as lines:
            for before, text in enumerate(lines):
                (line,) = parsed(self.path / METRICS, [text], partial(int, before), number=number)
                if line["kind"] == kind:
                    yield line

    def metrics(self, kind: str, numbers: Mapping[str, float], *, update: int, of: str = "") -> None:
        """Write the metrics of an update (kind "train") or of an evaluation (kind "eval") of the held-out set `of`."""
        line = {"kind": kind, "update": update, **({"set": of} if of else {}), **numbers}
        self.files[METRICS].write(as_lines([line]))
        if kind == "eval":
            self.evaluated = update
        else:
            self.last = line
        named = for_sinks(kind, numbers, of)
        self._for_each_sink(lambda sink: sink.log(named, update))
        if kind in self.callbacks:
            self.callbacks[kind](dict(line))

    def _for_each_sink(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            try:
                call(sink)
            except Exception as error:  # a tracker may raise anything, and must not stop the run
                self.sinks.remove(sink)
                failed = f"{type(sink).__name__} failed and gets no more metrics, metrics.jsonl has them all"
                self.say(f"{failed}: {first_line(error)}")

    def ledger(self, *entries: Mapping[str, Any]) -> None:
        self.files[LEDGER].write(as_lines(entries))

    def samples(self, quotes: Quotes, *, update: int) -> None:
        self.files[SAMPLES].write(as_lines(quotes))
        self._for_each_sink(lambda sink: sink.samples(quotes, update) if (update - 1) % sink.every == 0 else None)

    def __exit__(self, *error: object) -> None:
        with ExitStack() as each:
            for file in self.files.values():
                each.callback(file.close)
            self._for_each_sink(lambda sink: sink.close())


def run_path(config: Config, name: str) -> Path:
    return Path(config.output or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def check_free(path: Path) -> None:
    with writing(path):
        if any((path / name).exists() for name in ("config.toml", METRICS, LEDGER, "checkpoints", "final")):
            raise RunDirError(f"{path} already holds a run: choose another with --output, or remove it")
        if path.exists() and not path.is_dir():
            raise RunDirError(f"{path} is a file: choose another run directory with --output")
        above = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not above.is_dir():
        raise RunDirError(f"{path} cannot be written: {above} is a file; choose another run directory with --output")
    if not os.access(above, os.W_OK | os.X_OK):
        raise RunDirError(f"{path} cannot be written: no permission in {above}; choose another directory with --output")


def for_sinks(kind: str, numbers: Mapping[str, float], of: str = "") -> dict[str, float]:
    """Return the metrics for trackers, with names that distinguish training, evaluation and held-out sets."""
    prefix = f"{kind}/{of}" if of else kind
    return {name if kind == "train" and "/" in name else f"{prefix}/{name}": value for name, value in numbers.items()}


def check_lines(path: Path, mark: LogPosition) -> None:
    """Raise RunDirError if a file no longer begins with its content at the checkpoint."""
    for name, end in ends_of(path, mark).items():
        begins_with(path / name, end)


def ends_of(path: Path, mark: LogPosition) -> dict[str, Extent]:
    """Return size and checksum of each file at the checkpoint, except deleted files that are in `FILES_LOOKED_AT`."""
    return {name: end for name, end in mark["files"].items() if name not in FILES_LOOKED_AT or (path / name).exists()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines; a killed run may have left an incomplete one at the end."""
    with reading(path) as file:
        return parsed(path, file.read().split(b"\n")[:-1], number=format_in(path.parent))


def suite_lines(path: Path) -> list[dict[str, Any]]:
    """Return the results of tasks of lm-evaluation-harness in a run directory, the latest of each task and update."""
    lines = read_lines(path / EVALS) if (path / EVALS).exists() else []
    return list({(line["suite"], line.get("update")): line for line in lines if "suite" in line}.values())


def suite_scores(line: Mapping[str, Any]) -> dict[str, str]:
    """Return the scores of a task by name as texts, with their standard errors."""
    names = [name for name in line if name.partition("/")[0] not in SUITE_SETTINGS and not name.endswith("/error")]
    errors = {name: line.get(f"{name}/error") for name in names}
    return {name: f"{line[name]:.4g}" + (f" ± {e:.2g}" if (e := errors[name]) is not None else "") for name in names}


def as_lines(entries: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


# --- settings and machine at the start of a run ----------------------------------------------------------------------


def begun_with(config: Config, prompts: str | None) -> dict[str, Any]:
    return {"config": config.model_dump(mode="json", exclude_none=True), "prompts": prompts}


def started_trackers(config: Config, path: Path, meta: dict[str, Any]) -> list[Sink]:
    """Start the trackers, and write into meta.json by which names they find this run again."""
    known = meta.get("trackers", {})
    sinks, runs = start_trackers(config, path, known)
    if runs.items() - known.items():
        with writing(path):
            write_meta(path, meta | {"trackers": known | runs})
    return sinks


def write_meta(path: Path, meta: Mapping[str, Any]) -> None:
    write_atomic(path / META, json.dumps(meta, indent=2) + "\n")


def read_meta(path: Path) -> dict[str, Any]:
    where = path / META
    if not where.exists():
        raise RunDirError(f"{where} does not exist: it holds the settings that the run began with")
    try:
        with reading(where) as file:
            meta = object_of(file.read())
        return checked(META, upgraded(META, meta, format_of(where, meta)))
    except (ValueError, RecursionError) as error:
        raise RunDirError(f"{where} is damaged: {first_line(error)}") from None


def format_in(path: Path) -> int:
    """Return the format number of a run directory; if meta.json is missing, the current one."""
    return format_of(path / META, read_meta(path)) if (path / META).exists() else FORMAT


def check_unchanged(path: Path, config: Config, *, accepted: Iterable[str] = ()) -> None:
    """Raise RunDirError if config.toml differs from the run's start in settings that are not in `accepted`."""
    before = parse(with_new_keys(read_meta(path)["config"]), where=str(path / META), say=lambda _: None)
    changes = {
        name: f"{name} = {json.dumps(now)} (it was {json.dumps(then)})" for name, then, now in differing(before, config)
    }
    for name, text in changes.items():
        if any(within(name, each) for each in FIXED):
            raise RunDirError(f"{path / 'config.toml'}: {text} cannot change in a run: put it back, or begin a new run")
    for each in {*accepted} - {"updates", "data.train"}:
        if each in DROPPED:
            raise RunDirError(f"--change {each}: it was dropped: {DROPPED[each]}; leave it out")
        if not any(within(name, each) for name in changes):
            raise RunDirError(f"--change {each}: {path / 'config.toml'} does not change that; edit it there first")
    other = {name: text for name, text in changes.items() if not any(within(name, each) for each in accepted)}
    if other:
        raise RunDirError(
            f"{path / 'config.toml'} was changed: {', '.join(other.values())}; put it back, or confirm the change: "
            f"--change {' '.join(other)}"
        )


def check_prompts(path: Path, config: Config, prompts: str, *, accepted: Iterable[str] = ()) -> None:
    before = read_meta(path).get("prompts")
    if before is not None and before != prompts and "data.train" not in accepted:
        source = ", ".join(config.data.sources.values())
        raise RunDirError(
            f"{source} does not give the prompts that {path} began with; put it back, or confirm the "
            "change: --change data.train"
        )


def within(name: str, section: str) -> bool:
    """Return whether a setting is `section` or below it; `log` and `log.*` both name all settings below `log`."""
    return f"{name}.".startswith(section.removesuffix("*").rstrip(".") + ".")


@cache
def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    commit = None
    if shutil.which("git") is not None:
        git = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, check=False)
        commit = git.stdout.strip() or None
    return {
        "format": FORMAT,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": {package: installed_version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git": commit,
    }
