"""The reader of a run directory; each access reads the files again, so it also works while the run continues."""

from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from slipstream.config.file import parse, read
from slipstream.config.renamed_keys import with_new_keys
from slipstream.config.schema import Config
from slipstream.errors import RunDirError
from slipstream.run_dir.atomic_files import check_regular, reading
from slipstream.run_dir.formats import Line as Line
from slipstream.run_dir.formats import parsed, upgraded
from slipstream.run_dir.writing import LEDGER, METRICS, SAMPLES, TRACE, format_in, read_lines, read_meta

CONFIG_FILE = "config.toml"


class RunDir:
    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        check_regular(self.path / CONFIG_FILE)
        if not (self.path / CONFIG_FILE).exists():
            raise RunDirError(f"{path} holds no run: there is no config.toml in it")
        self.format = format_in(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> Config:
        """The config of the run, with all defaults."""
        return self.config_with()

    def config_with(self, *overrides: tuple[str, str]) -> Config:
        """Return the config with these `(dotted key, text)` settings in place of its own."""
        tree = with_new_keys(upgraded(CONFIG_FILE, read(self.path / CONFIG_FILE), self.format))
        return parse(tree, overrides, where=str(self.path / CONFIG_FILE), say=str)

    @property
    def meta(self) -> Mapping[str, Any]:
        """Versions, machine and command at the start of the run."""
        return read_meta(self.path)

    @property
    def finished(self) -> bool:
        """Return whether all updates are made."""
        return (self.path / "final").exists()

    @property
    def metrics(self) -> list[Line]:
        """Metrics of every update, by the names of docs/metrics.md."""
        return [line for line in self._lines(METRICS) if line["kind"] == "train"]

    @property
    def evaluations(self) -> list[Line]:
        """Metrics of every evaluation on held-out prompts."""
        return [line for line in self._lines(METRICS) if line["kind"] == "eval"]

    @property
    def ledger(self) -> list[Line]:
        """One entry for every submitted group: how it ended."""
        return self._lines(LEDGER)

    @property
    def samples(self) -> list[Line]:
        """Some samples of every update, with texts and tokens."""
        return self._lines(SAMPLES)

    @property
    def trace(self) -> list[Line]:
        """Busy times of all workers, as events of Chrome's format."""
        return self.picked(TRACE, lambda number, _: number > 0)  # line 0 is the bracket that opens the list

    def picked(self, name: str, wanted: Callable[[int, bytes], bool]) -> list[Line]:
        """Return the parsed lines of a file for which `wanted(number, bytes)` is true; other lines are not parsed."""
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
