"""Makers of rows that end in every way there is, for sources that tests add to the table of integrations."""

import os
from collections.abc import Iterator
from typing import Any

from slipstream.errors import DataError


def squares(name: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield rows in an order that depends on the hash seed."""
    letters = "".join({"a", "b", "c", "d", "e", "f"})
    for number in range(count):
        yield {"prompt": f"{name} {split} {letters} {number}^2", "answer": str(number**2)}


def refuses(name: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    raise DataError(f"there is no {name!r}")


def raises(name: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    yield {"prompt": "first", "answer": "1"}
    raise KeyError(name)


def leaves(name: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    yield {"prompt": "first", "answer": "1"}
    os._exit(3)


def says_nothing(name: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    yield from ()


def bad_row(name: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    yield {"prompt": " ", "answer": "1"}
