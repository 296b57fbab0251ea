"""Tools of a student: methods of a class, or tools of a server; their schemas, and the check of arguments."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError

FIELD_PREFIX = "slipstream_parameter_"
"""Beginning of the names of fields for parameters, because `json` or `model_config` alone is pydantic's own.

Pydantic removes it from the fields of a user's dataclass, too, so no user may have a field of such a name.
"""


@dataclass(frozen=True)
class Tool:
    """Tool that is a public method of a class."""

    name: str
    description: str
    arguments: type[BaseModel]

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self.arguments.model_json_schema()

    def bind(self, instance: Any, arguments: dict[str, Any]) -> Callable[[], Any]:
        """Return the call of an environment's method; raise InvalidArguments if arguments do not fit."""
        try:
            given = self.arguments.model_validate(arguments)
        except ValidationError as error:
            raise InvalidArguments(*((each["loc"], each["msg"]) for each in error.errors())) from None
        fields = {name.removeprefix(FIELD_PREFIX): getattr(given, name) for name in self.arguments.model_fields}
        return partial(getattr(instance, self.name), **fields)


@dataclass(frozen=True)
class ServedTool:
    """Tool of a server, which an environment calls by `call(name, arguments)`."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""

    def bind(self, instance: Any, arguments: dict[str, Any]) -> Callable[[], Any]:
        """Return the call of the server; raise InvalidArguments if arguments do not fit.

        The server alone checks arguments if its schema cannot be used here.
        """
        from jsonschema import validators

        try:
            found = validators.validator_for(self.parameters)(self.parameters).iter_errors(arguments)
            faults = [(each.absolute_path, each.message) for each in found]
        except Exception:  # the schema has patterns or references that only the server understands
            faults = []
        if faults:
            raise InvalidArguments(*faults)
        return partial(instance.call, self.name, arguments)


class InvalidArguments(Exception):
    """Arguments of a call do not fit the schema of its tool."""

    def __init__(self, *faults: tuple[Iterable[Any], str]) -> None:
        super().__init__("; ".join(f"{'.'.join(map(str, path)) or 'arguments'}: {fault}" for path, fault in faults))


def schema_of(tool: Tool | ServedTool) -> dict[str, Any]:
    """Return the JSON schema of a tool, in the form that chat templates expect."""
    parameters = without_titles(tool.parameters)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


VALUE_KEYS = ("const", "default", "enum", "examples")
"""Keys of a JSON schema that contain values of arguments, not schemas."""


def without_titles(schema: Any) -> Any:
    """Remove the keys of a JSON schema that pydantic adds and chat templates do not need."""
    if isinstance(schema, list):
        return [without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = dict[str, Any]()
    for name, value in schema.items():
        if name in VALUE_KEYS:
            kept[name] = value
        elif name == "properties":
            kept[name] = {key: without_titles(below) for key, below in value.items()}
        elif name not in ("title", "additionalProperties"):
            kept[name] = without_titles(value)
    return kept
