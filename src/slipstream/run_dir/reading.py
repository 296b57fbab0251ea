"""What a run has written, for whoever reads it: read anew whenever it is asked for, also while the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from slipstream.config.file import parse, read
from slipstream.config.schema import Config
from slipstream.errors import RunDirError
from slipstream.run_dir.atomic_files import check_regular, reading
from slipstream.run_dir.formats import Line as Line
from slipstream.run_dir.formats import parsed, upgraded
from slipstream.run_dir.writing import LEDGER, METRICS, SAMPLES, TRACE, format_in, read_lines, read_meta

CONFIG = "config.toml"


class RunDir:
    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        check_regular(self.path / CONFIG)
        if not (self.path / CONFIG).exists():
            raise RunDirError(f"{path} holds no run: there is no config.toml in it")
        self.format = format_in(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> Config:
        """As it ran, with every default."""
        return self.config_with()

    def config_with(self, *overrides: tuple[str, str]) -> Config:
        """Return the config with these `(dotted key, text)` settings in place of its own."""
        tree = upgraded(CONFIG, read(self.path / CONFIG), self.format)
        return parse(tree, overrides, where=str(self.path / CONFIG), say=str)

    @property
    def meta(self) -> Mapping[str, Any]:
        """What it was begun with: versions, machine, command."""
        return read_meta(self.path)

    @property
    def finished(self) -> bool:
        """Whether all updates are made."""
        return (self.path / "final").exists()

    @property
    def metrics(self) -> list[Line]:
        """Of every update, by the names of docs/metrics.md."""
        return [line for line in self._lines(METRICS) if line["kind"] == "train"]

    @property
    def evaluations(self) -> list[Line]:
        """Of every evaluation on held-out prompts."""
        return [line for line in self._lines(METRICS) if line["kind"] == "eval"]

    @property
    def ledger(self) -> list[Line]:
        """How every group that was submitted ended."""
        return self._lines(LEDGER)

    @property
    def samples(self) -> list[Line]:
        """Some of what the student said at every update."""
        return self._lines(SAMPLES)

    @property
    def trace(self) -> list[Line]:
        """What every worker did when: events of Chrome's format."""
        return self.picked(TRACE, lambda number, _: number > 0)  # behind the bracket that opens the list

    def picked(self, name: str, wanted: Callable[[int, bytes], bool]) -> list[Line]:
        """Lines of one file that somebody wants by their number and a look at their bytes: the others, however many,
        cost no more than that."""
        path, found = self.path / name, list[Line]()
        if not path.exists():
            return found
        with reading(path) as file:
            for number, line in enumerate(file):
                if line.endswith(b"\n") and wanted(number, line):
                    found += parsed(path, [line.rstrip(b",\n")], partial(int, number), number=self.format)
        return found

    def _lines(self, name: str) -> list[Line]:
        return read_lines(self.path / name) if (self.path / name).exists() else []
