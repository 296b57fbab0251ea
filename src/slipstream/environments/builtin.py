"""Environments of the built-in tool tasks. Their models were trained with the tools' docstrings: do not edit these."""

from __future__ import annotations

from typing import Any


def value_of(table: dict[str, Any], key: str) -> str:
    return str(table[key]) if key in table else f"no key {key}"


class Table:
    """Numbers behind keys, and a calculator."""

    def start(self, meta: dict[str, Any]) -> None:
        self._numbers: dict[str, int] = meta["table"]

    def get(self, key: str) -> str:
        """The number behind a key."""
        return value_of(self._numbers, key)

    def add(self, a: int, b: int) -> str:
        """a + b."""
        return str(a + b)

    def subtract(self, a: int, b: int) -> str:
        """a - b."""
        return str(a - b)


class Lookup:
    """Chain of keys: every key names the next one."""

    def start(self, meta: dict[str, Any]) -> None:
        self._after: dict[str, str] = meta["table"]

    def look(self, key: str) -> str:
        """The key that comes after a key."""
        return value_of(self._after, key)


class Doors:
    """Row of doors: behind each one lies the key of the next. A wrong key locks all doors for good."""

    def start(self, meta: dict[str, Any]) -> None:
        self._ahead = list(meta["table"].items())

    def get(self, key: str) -> str:
        """The key or number behind the next door."""
        if not self._ahead or key != self._ahead[0][0]:
            self._ahead = []
            return "locked"
        return str(self._ahead.pop(0)[1])
