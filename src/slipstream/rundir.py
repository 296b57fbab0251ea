"""What a run has written, for whoever reads it: read anew whenever it is asked for, also while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from slipstream.config.file import load
from slipstream.config.schema import Config
from slipstream.errors import RunDirError, first_line
from slipstream.runlog import LEDGER, METRICS, SAMPLES, TRACE, read_lines, read_meta

Line = dict[str, Any]


class RunDir:
    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        if not (self.path / "config.toml").exists():
            raise RunDirError(f"{path} holds no run: there is no config.toml in it")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> Config:
        """As it ran, with every default."""
        return load(self.path / "config.toml", say=str)

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
        return self._read(TRACE, lambda path: [json.loads(line.rstrip(",\n")) for line in events(path)])

    def picked(self, name: str, wanted: Callable[[int, bytes], bool]) -> list[Line]:
        """Lines of one file that somebody wants by their number and a look at their bytes: the others, however many,
        cost no more than that."""

        def read(path: Path) -> list[Line]:
            with path.open("rb") as file:
                return [
                    json.loads(line.rstrip(b",\n"))
                    for number, line in enumerate(file)
                    if line.endswith(b"\n") and wanted(number, line)
                ]

        return self._read(name, read)

    def _lines(self, name: str) -> list[Line]:
        return self._read(name, read_lines)

    def _read(self, name: str, read: Callable[[Path], list[Line]]) -> list[Line]:
        path = self.path / name
        try:
            return read(path) if path.exists() else []
        except ValueError as error:
            raise RunDirError(f"{path} is damaged: {first_line(error)}") from None


def events(path: Path) -> list[str]:
    """Whole lines between the bracket that opens the list and whatever a killed run left at the end."""
    text = path.read_text("utf-8")
    return text[: text.rfind("\n") + 1].splitlines()[1:]
