"""Result rows of a study as files: CSV, and also Parquet if pyarrow is installed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.run_dir.atomic_files import beside_of, write_atomic, writing
from slipstream.studies.results import Sweep


def write_csv(sweep: Sweep) -> Path:
    path, rows = sweep.path / "results.csv", sweep.rows()
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: plain(value) for key, value in row.items()} for row in rows)
    with writing(path):
        write_atomic(path, text.getvalue())
    return path


def write_parquet(sweep: Sweep) -> Path | None:
    """Write the rows as Parquet and return the path; None if pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return None
    path, rows = sweep.path / "results.parquet", sweep.rows()
    columns = {key: column([row[key] for row in rows]) for key in rows[0]} if rows else {}
    with writing(path):
        pyarrow.parquet.write_table(pyarrow.table(columns), beside_of(path))
        beside_of(path).replace(path)
    return path


def plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict | bool) else value


def column(values: Sequence[Any]) -> list[Any]:
    """Return the values of a column; convert them to text if their types are mixed, which Parquet does not allow."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or (len(kinds) == 1 and not kinds & {list, dict}):
        return list(values)
    return [None if value is None else str(plain(value)) for value in values]
