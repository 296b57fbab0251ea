"""Environments behind an OpenEnv server: `openenv:URL`. Each episode is a session of its own, over a WebSocket."""

import json
import re
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from slipstream.environments.tools import ServedTool
from slipstream.errors import ConfigError, EnvironmentFailed, first_line

CONNECT_TIMEOUT = 30.0
"""Seconds in which a server must accept a connection."""
REPLY_TIMEOUT = 600.0
"""Seconds in which a server must answer a message."""
LARGEST_MESSAGE = 2**24
"""Largest size of an answer, in bytes."""
BASE_FIELDS = ("metadata", "done", "reward")
"""Fields of every action or observation, which are not for the student."""
MAX_DIGITS = 18
"""Largest number of digits of a move that is a number, so that it fits into 64 bits."""


class InvalidMove(Exception):
    """The move stands for no action, or the server refuses the action as invalid."""


def last_integer(move: str) -> int | None:
    """Return the last integer of a move; None if it has none, or too many digits."""
    numbers = re.findall(r"-?\d+", move)
    return int(numbers[-1]) if numbers and len(numbers[-1].lstrip("-")) <= MAX_DIGITS else None


class OpenEnvGame:
    """Game whose moves are the actions of a server: by its schema texts, numbers, JSON objects or calls of tools."""

    last_reward: float | None = None

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        schema = action_schema(self.url)
        properties, self.types = schema.get("properties", {}), schema.get("$defs", {})
        self.fields = {name: field for name, field in properties.items() if name not in BASE_FIELDS}
        self.socket: Any = None
        self.total, self.invalid = 0.0, False

    @property
    def only_type(self) -> str | None:
        """JSON type of the action's only field; None if it has several fields."""
        return next(iter(self.fields.values())).get("type") if len(self.fields) == 1 else None

    @property
    def calls_tools(self) -> bool:
        """Return whether an action calls a tool of an MCP server behind the game."""
        return {"tool_name", "arguments"} <= self.fields.keys()

    def reset(self, seed: int) -> str:
        self._connect()
        self.total, self.invalid, self.last_reward = 0.0, False, None
        answer = self._ask("reset", {"seed": seed})
        text = text_of(answer["observation"])
        return text if self.only_type == "string" or self.calls_tools else f"{text}\n{self.choices()}"

    def tools(self) -> list[ServedTool]:
        """Return the server's tools; raise EnvironmentFailed if it lists none."""
        self._connect()
        try:
            found = self._ask("step", {"type": "list_tools"})["observation"].get("tools")
        except InvalidMove:
            found = None
        finally:
            self._disconnect()
        if not found:
            raise EnvironmentFailed("error", f"the server at {self.url} lists no tools")
        return [ServedTool(tool["name"], tool["description"], tool["input_schema"]) for tool in found]

    def choices(self) -> str:
        if self.only_type == "integer":
            return "Answer with an integer."
        shown = self.fields | ({"$defs": self.types} if self.types else {})
        return f"Answer with a JSON object of this schema: {json.dumps(shown, ensure_ascii=False)}"

    def action_of(self, move: str) -> dict[str, Any]:
        """Return the action that a move stands for; raise InvalidMove if it stands for none."""
        if self.only_type == "string":
            return {next(iter(self.fields)): move.strip()}
        if self.only_type == "integer":
            if (number := last_integer(move)) is None:
                raise InvalidMove
            return {next(iter(self.fields)): number}
        try:
            action = json.loads(move[move.index("{") : move.rindex("}") + 1])
        except (ValueError, RecursionError):  # no braces, or no JSON between them
            raise InvalidMove from None
        return {name: value for name, value in action.items() if name != "metadata"}

    def act(self, move: str) -> tuple[str, bool]:
        self.last_reward = None
        try:
            answer = self._step(self.action_of(move))
        except InvalidMove:
            self.invalid = True
            return self.choices(), False
        return text_of(answer["observation"]), bool(answer["done"])

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Return what the student reads after a call of a tool, and True at the end of the game."""
        self.last_reward = None
        try:
            answer = self._step({"type": "call_tool", "tool_name": name, "arguments": arguments})
        except InvalidMove:
            self.invalid = True
            return f"error: the server refuses this call of {name}", False
        text, failed = text_of_call(name, answer["observation"])
        self.invalid |= failed
        return text, bool(answer["done"])

    def end(self) -> tuple[Any, dict[str, float]]:
        self._disconnect()
        return self.total, {"invalid_move": float(self.invalid)}

    def _step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Return the server's answer to an action, and add its reward."""
        answer = self._ask("step", action)
        if answer.get("reward") is not None:
            self.last_reward = float(answer["reward"])
            self.total += self.last_reward
        return answer

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the server; raise InvalidMove if it finds an action invalid."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            with suppress(ConnectionClosed):  # a server that refuses a session says why before it closes it
                self.socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self.socket.recv(timeout=REPLY_TIMEOUT))
        except (OSError, WebSocketException, TimeoutError) as error:
            self._disconnect()
            raise EnvironmentFailed("error", f"the server was lost in {kind}: {first_line(error)}") from None
        if answer["type"] != "error":
            found: dict[str, Any] = answer["data"]
            return found
        fault = answer["data"]
        if fault.get("code") == "VALIDATION_ERROR" and kind == "step":
            raise InvalidMove
        advice = ""
        if fault.get("code") == "CAPACITY_REACHED":
            advice = ": let it serve as many sessions as episodes run at once (max_concurrent_envs)"
        raise EnvironmentFailed("error", f"the server refused {kind}: {first_line(fault.get('message', ''))}{advice}")

    def _connect(self) -> None:
        self._disconnect()
        self.socket = connect(self.url)

    def _disconnect(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None


def connect(url: str) -> Any:
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect as open_socket

    address = f"{url.replace('http', 'ws', 1)}/ws"
    try:
        return open_socket(address, open_timeout=CONNECT_TIMEOUT, max_size=LARGEST_MESSAGE)
    except (OSError, WebSocketException, TimeoutError) as error:
        raise EnvironmentFailed("error", f"cannot connect to {address}: {first_line(error)}") from None


def action_schema(url: str) -> dict[str, Any]:
    """Return the JSON schema of the server's actions; raise ConfigError if there is no such server."""
    import httpx2

    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"{url!r} is no address of a server: write openenv:http://HOST:PORT")
    try:
        answer = httpx2.get(f"{url}/schema", timeout=CONNECT_TIMEOUT, follow_redirects=True)
        answer.raise_for_status()
        schema: dict[str, Any] = answer.json()["action"]
    except (httpx2.HTTPError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the schema of an OpenEnv server at {url}: {first_line(error)}") from None
    return schema


def text_of(observation: dict[str, Any]) -> str:
    """Return the text of an observation with one text, or its fields as JSON; nothing for no fields."""
    shown = {name: value for name, value in observation.items() if name not in BASE_FIELDS and value is not None}
    if not shown:
        return ""
    if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        return only
    return json.dumps(shown, ensure_ascii=False)


def text_of_call(name: str, observation: dict[str, Any]) -> tuple[str, bool]:
    """Return the text of a tool's result, and whether the call failed; raise EnvironmentFailed for an image."""
    if fault := observation.get("error"):
        return f"error: {fault['message']}", True
    match observation.get("result"):
        case {"content": list(parts), **others}:
            for part in parts:
                if part["type"] != "text":
                    what = f"the tool {name} returned {part['type']}, and a student reads only text"
                    raise EnvironmentFailed("error", what)
            return "\n".join(part["text"] for part in parts), bool(others.get("is_error"))
        case str(text):
            return text, False
        case None:
            return text_of(observation), False
        case result:
            return json.dumps(result, ensure_ascii=False), False
