"""Tools of a server, without a server: the check of arguments by a schema, and commands that cannot be read."""

from typing import Any

import pytest

from slipstream.environments.mcp import kind_of
from slipstream.environments.tools import InvalidArguments, ServedTool
from slipstream.errors import ConfigError


class Shop:
    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return name, arguments


def tool(**item: Any) -> ServedTool:
    return ServedTool("sell", "Sell an item.", {"type": "object", "properties": {"item": item}})


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidArguments, match="^item: 3 is not of type 'string'$"):
        tool(type="string").bind(Shop(), {"item": 3})


@pytest.mark.parametrize(
    "item",
    [
        {"pattern": r"^\p{L}+$"},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "urn:nowhere"},
        {"type": "text"},
        {"minLength": "3"},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_used_here_leaves_the_check_to_the_server(item: dict[str, Any]) -> None:
    assert tool(**item).bind(Shop(), {"item": "cup"})() == ("sell", {"item": "cup"})


@pytest.mark.parametrize("prefix", ["mcp", "mcp_shared"])
def test_a_quote_that_is_not_closed_is_one_line(prefix: str) -> None:
    with pytest.raises(ConfigError, match="^the command cannot be split into words: No closing quotation$"):
        kind_of(f'{prefix}:python "x')
