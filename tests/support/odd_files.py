"""Run directories with one odd line: what a person, a program or a disk may have changed."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

FILES = ("metrics.jsonl", "ledger.jsonl", "samples.jsonl", "trace.json", "eval.jsonl", "meta.json")
LINES: dict[str, bytes] = {
    "a list": b"[]",
    "null": b"null",
    "a text": b'"x"',
    "a number": b"7",
    "an empty object": b"{}",
    "an empty line": b"",
    "nested deeply": b"[" * 100_000,
    "nested deeply in an object": b'{"kind": ' + b"[" * 100_000,
    "half a line": b'{"kind": "tra',
    "no UTF-8": b'{"kind": "\xff\xfe"}',
    "zeros": b"\0" * 40,
    "UTF-16": '{"kind": "train"}'.encode("utf-16"),
    "a number of 5,000 digits": b'{"update": ' + b"9" * 5000 + b"}",
    "other keys": b'{"kind": "train", "update": 1, "end": "trained", "ph": "X"}',
}
"""In the place of a line."""
VALUES: dict[str, str] = {
    "null": "null",
    "true": "true",
    "a text": '"x\\u202e\\u001b[31m"',
    "an empty text": '""',
    "an empty list": "[]",
    "a list of lists": "[[]]",
    "a list of nulls": "[null, null]",
    "an empty object": "{}",
    "an object": '{"a": {"b": []}}',
    "zero": "0",
    "below zero": "-1",
    "a fraction": "0.5",
    "400 digits": "9" * 400,
    "huge": "1e308",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "half a character": '"\\ud800"',
}
"""In the place of a value."""


def variants(text: bytes, *, of_lines: bool, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Every odd line in the place of a line, and every odd value in the place of every value, some line's each time."""
    lines = text.splitlines() if of_lines else [text]
    objects = [i for i, line in enumerate(lines) if line.startswith(b"{")]
    for name, odd in LINES.items():
        at = rng.choice(objects)
        yield f"line {at + 1}: {name}", joined(lines, at, odd, of_lines)
    keys = sorted({key for i in objects for key in json.loads(lines[i].rstrip(b","))})
    for key in keys:
        having = [i for i in objects if key in json.loads(lines[i].rstrip(b","))]
        for name, value in [("missing", ""), *VALUES.items()]:
            at = rng.choice(having)
            said = json.loads(lines[at].rstrip(b","))
            del said[key]
            rest = json.dumps(said)[:-1]
            odd = f"{rest}{', ' if said else ''}{json.dumps(key)}: {value}}}" if value else rest + "}"
            yield f"line {at + 1}: {key} {name}", joined(lines, at, odd.encode(), of_lines)


def joined(lines: list[bytes], at: int, odd: bytes, of_lines: bool) -> bytes:
    comma = b"," if lines[at].endswith(b",") else b""
    return b"\n".join([*lines[:at], odd + comma, *lines[at + 1 :]]) + (b"\n" if of_lines else b"")


def put(run: Path, file: str, content: bytes) -> None:
    (run / file).write_bytes(content)
