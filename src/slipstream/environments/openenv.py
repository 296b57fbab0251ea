"""Environments behind an OpenEnv server: `openenv:URL`. Each episode is a session of its own, over a WebSocket."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

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
    """Game whose moves are the actions of a server: a text, a number, or a JSON object, by the server's schema."""

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

    def reset(self, seed: int) -> str:
        self._disconnect()
        self.total, self.invalid, self.last_reward = 0.0, False, None
        self.socket = connect(self.url)
        answer = self._ask("reset", {"seed": seed})
        text = text_of(answer["observation"])
        return text if self.only_type == "string" else f"{text}\n{self.choices()}"

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
            answer = self._ask("step", self.action_of(move))
        except InvalidMove:
            self.invalid = True
            return self.choices(), False
        if answer.get("reward") is not None:
            self.last_reward = float(answer["reward"])
            self.total += self.last_reward
        return text_of(answer["observation"]), bool(answer["done"])

    def end(self) -> tuple[Any, dict[str, float]]:
        self._disconnect()
        return self.total, {"invalid_move": float(self.invalid)}

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
    """Return the text of an observation with one text, or its fields as JSON."""
    shown = {name: value for name, value in observation.items() if name not in BASE_FIELDS and value is not None}
    if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        return only
    return json.dumps(shown, ensure_ascii=False)
