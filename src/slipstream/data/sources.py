"""Readers of data sources: local files, saved datasets, and datasets on the hub. Each yields pairs of place and row.

Files are streamed and must be UTF-8; the extension selects the parser. An error message names file and line.
"""

import csv
import gzip
import json
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from slipstream.config.integrations import integration_of
from slipstream.errors import DataError, did_you_mean, first_line

Rows = Iterator[tuple[str, Any]]
"""Pairs of place and row; a place is FILE:LINE, or FILE:ROW for formats without lines."""


def rows_of(source: str, split: str) -> Rows:
    check_there(source)
    ending = ending_of(source)
    return READERS[ending](Path(source)) if ending else _hf_dataset(source, split)


def json_rows(source: str) -> Rows:
    """Read a file of JSON objects that are no rows of data: trajectories."""
    check_there(source)
    if READERS.get(ending_of(source)) is not _json:
        raise DataError(f"{source}: the name of a file of trajectories ends in .jsonl or .json, or that and .gz")
    return _json(Path(source))


def ending_of(source: str) -> str:
    """Return the extension of a file's format (`.jsonl` for `a.jsonl.gz`); empty if the source is a dataset."""
    path = Path(source)
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    return plain.suffix if plain.suffix in READERS else ""


def has_splits(source: str) -> bool:
    """Return True if a source may have splits: it is neither a file nor a dataset that was saved as one table."""
    if (integration := integration_of(source)) is not None:
        return integration.has_splits
    return not ending_of(source) and not (Path(source) / "state.json").exists()


def check_there(source: str) -> None:
    """Raise DataError if a source cannot exist. Contents are not read, and dataset names on the hub are not checked."""
    name, _, subset = source.rpartition(":")
    if not source.strip():
        raise DataError(f"{source!r} names no data: write a file ({', '.join(READERS)}) or a HF dataset")
    if ending_of(source):
        _check_file(Path(source))
    elif name and ending_of(name):
        raise DataError(f"{source}: {name} is one file, without subsets: drop {':' + subset!r}")
    elif source.startswith(("/", "./", "../")) and not Path(named(source)[0]).exists():
        raise DataError(f"{source}: no such file or directory")
    elif Path(source).exists() and not Path(source).is_dir():
        raise DataError(f"{source}: the name of a file of data ends in one of {', '.join(READERS)}, or that and .gz")


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {_why(error)}") from None
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise DataError(f"{path}: is {kind}, where a file is expected")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x}"
        raise DataError(f"{path}:{number}: not UTF-8 ({found}): save it with this encoding") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {_why(error)}") from None


def _json(path: Path) -> Rows:
    """Yield rows from a file that has one JSON object per line, or one JSON list of objects."""
    lines = ((number, line) for number, line in _lines(path) if line.strip())
    for before, (number, line) in enumerate(lines):
        if not before and line.lstrip().startswith("["):
            whole = "".join([line, *(rest for _, rest in lines)])
            yield from ((f"{path}:{row}", fields) for row, fields in enumerate(_parsed(str(path), whole, "list"), 1))
        else:
            yield f"{path}:{number}", _parsed(f"{path}:{number}", line, "object on one line")


def _parsed(where: str, text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not a JSON {expected}: {error}") from None
    except RecursionError:
        raise DataError(f"{where}: nested too deeply") from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise DataError(f"{where}: a number of more than {most} digits: write it as text") from None


def _csv(path: Path) -> Rows:
    """Yield the rows of a CSV file with a header line. Empty cells become None; unnamed columns are dropped."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    names: list[str] = []
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{where}: not CSV: {error}") from None
        if not names and cells:
            names = cells
            if twice := sorted({name for name in names if name and names.count(name) > 1}):
                raise DataError(f"{where}: two columns are named {twice[0]!r}: give each a name of its own")
        elif cells:
            if len(cells) != len(names):
                raise DataError(f"{where}: has {len(cells)} cells, and the header {len(names)}: quote commas in text")
            yield where, {name: cell or None for name, cell in zip(names, cells, strict=True) if name}


def without_fillers(value: Any, inside: bool = False) -> Any:
    """Remove the nulls in tools and in calls of tools: a table has them in place of the keys of other rows."""
    if isinstance(value, list):
        return [without_fillers(each, inside) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {key: each for key, each in value.items() if each is not None or not inside}
    return {key: without_fillers(each, inside or key in ("tools", "tool_calls")) for key, each in kept.items()}


def _parquet(path: Path) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("parquet needs pyarrow: pip install 'slipstream[data]'") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for fields in batch.to_pylist():
                    yield f"{path}:{(number := number + 1)}", without_fillers(fields)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        where = f" after row {number}" if number else ""
        raise DataError(f"{path}: cannot be read{where}: {first_line(error)}") from None


def _hf_dataset(source: str, split: str) -> Rows:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source}: HF datasets need the datasets library: pip install 'slipstream[data]'") from None
    name, subset = named(source)
    try:
        if (Path(name) / "dataset_dict.json").exists() or (Path(name) / "state.json").exists():
            if subset is not None:
                raise DataError(f"{source}: {name} was saved without subsets: write {name}")
            data = datasets.load_from_disk(name)
            if isinstance(data, datasets.DatasetDict):
                if split not in data:
                    raise DataError(f"{source} has no split {split!r}; {did_you_mean(split, data)}")
                data = data[split]
        else:
            data = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, LookupError, BadZipFile, datasets.exceptions.DatasetsError) as error:
        line = first_line(error)
        if subset is None and line.startswith("Config name is missing"):
            several = " ".join(str(error).splitlines()[1:2]).partition(": ")[2]
            line = f"it has the subsets {several}: name one of them, as in {name}:SUBSET"
        raise DataError(f"{source} (split {split!r}): cannot be loaded: {line}") from None
    for number, fields in enumerate(data):
        yield f"{source}[{split}]:{number + 1}", fields


def named(source: str) -> tuple[str, str | None]:
    """Split `openai/gsm8k:main` into dataset and subset; the subset is None without colon, or if the path exists."""
    name, colon, subset = source.rpartition(":")
    return (source, None) if not colon or Path(source).exists() else (name, subset)


def _why(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or first_line(error)


READERS: dict[str, Callable[[Path], Rows]] = {".jsonl": _json, ".json": _json, ".csv": _csv, ".parquet": _parquet}
