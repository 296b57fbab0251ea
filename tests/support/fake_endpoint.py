"""Endpoint on the loopback interface, with a real model and all faults that were observed at real endpoints.

    with FakeEndpoint(table(logq_VV)) as fake:       # or: model("builtin:teacher")
        fake.tell("cut", "busy", "shifted")          # faults of the next three completions
        ...                                          # base_url = fake.url, model = fake.name

The endpoint serves until the block ends.

Shapes: T tokens, V vocabulary.
"""

import gzip
import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.testing.endpoint import LocalEndpoint, Scores, send

Fault = Literal["slow", "busy", "broken", "cut", "late", "moved", "empty", "refused", "not json", "deep", "endless",
                "packed", "trickle",
                "no logprobs", "short", "few", "nan", "null", "positive", "clamp", "narrow", "shifted", "other ids",
                "no ids", "not tables", "bad rank"]  # fmt: skip
LOGPROBS = {"nan": float("nan"), "null": None, "positive": 0.5, "clamp": -9999.0, "narrow": -1e300}
"""Log-prob of the last token by fault; "narrow" is finite, but not in float32."""
CHAT = "/v1/chat/completions"


def table(logq_VV: NDArray[np.floating[Any]]) -> Scores:
    """Return the `Scores` function of a model whose next token depends only on the last token."""
    return lambda tokens: np.concatenate([np.zeros((1, logq_VV.shape[1])), logq_VV[list(tokens[:-1])]])


class FakeEndpoint(LocalEndpoint):
    def __init__(
        self,
        scores: Scores,
        *,
        key: str | None = None,
        lists: bool = True,
        says: Callable[[str], str] | None = None,
        **options: Any,
    ) -> None:
        """Create an endpoint; if `lists`, also serve the list of models; clients must send `key` unless it is None.

        `says` answers the last message of a chat request; None serves no chat.
        """
        super().__init__(scores, **options)
        self.key, self.lists, self.says = key, lists, says
        self.faults: deque[Fault] = deque()
        self.always: Fault | None = None
        """Fault of every completion; None uses `faults`."""
        self.finish = "stop"
        """finish_reason of every answer to a chat."""
        self.seconds = 0.05
        """Duration of the fault "slow", and seconds between two bytes of the fault "trickle"."""
        self.sent = 0
        """Bytes sent by the faults "endless" and "trickle"."""
        self.retry_after: str | None = "0.05"
        self.requests: list[dict[str, Any]] = []
        self.most, self.running = 0, 0
        """Highest and current number of concurrent requests."""
        self.lock = threading.Lock()

    def tell(self, *faults: Fault) -> None:
        self.faults.extend(faults)

    def get(self, to: BaseHTTPRequestHandler) -> None:
        if not self._turned_away(to):
            super().get(to)

    def post(self, to: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            self._complete(to, body)
        finally:
            with self.lock:
                self.running -= 1

    def _complete(self, to: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self.lock:
            self.requests.append(body)
            fault = self.always or (self.faults.popleft() if self.faults else None)
        if fault == "slow":
            self.over.wait(self.seconds)
        if self._failed(to, fault) or self._turned_away(to):
            return
        if self.says is not None and to.path == CHAT:
            message = {"role": "assistant", "content": self.says(body["messages"][-1]["content"])}
            choice = {"index": 0, "message": message, "finish_reason": self.finish}
            send(to, 200, {"object": "chat.completion", "choices": [choice]})
        elif problem := self.problem(body):
            send(to, *problem)
        else:
            send(to, 200, spoilt(self.answer(body), fault))

    def _turned_away(self, to: BaseHTTPRequestHandler) -> bool:
        authorization = to.headers["Authorization"] or ""
        if self.key is not None and authorization != f"Bearer {self.key}":
            send(to, 401, {"error": {"message": f"Incorrect API key provided: {authorization}"}})
        elif to.path in ("/v1/completions", CHAT if self.says else "") or (to.path == "/v1/models" and self.lists):
            return False
        else:
            send(to, 404, {"detail": "Not Found"})
        return True

    def _failed(self, to: BaseHTTPRequestHandler, fault: Fault | None) -> bool:
        """Send the answer if the fault affects all of it, and return true; return false for all other faults."""
        match fault:
            case "busy":
                after = {} if self.retry_after is None else {"Retry-After": self.retry_after}
                send(to, 429, {"error": {"message": "too many requests"}}, **after)
            case "broken":
                # some servers repeat the client's headers
                send(to, 500, {"error": {"message": f"internal error ({to.headers['Authorization']})"}})
            case "late":
                send(to, 408, {"error": {"message": "the request took too long"}})
            case "moved":
                send(to, 307, {}, Location="https://elsewhere/v1/completions")
            case "empty":
                send(to, 200, "")
            case "refused":
                send(to, 400, {"error": {"message": "the server does not like it"}})
            case "not json":
                send(to, 200, "<html>It works!</html>")
            case "deep":
                send(to, 200, "[" * 100_000)
            case "endless":
                self._pour(to, b" " * (1 << 16), 0.0)
            case "trickle":
                self._pour(to, b" ", self.seconds)
            case "packed":
                bomb = gzip.compress(b" " * (1 << 24))
                send(to, 200, bomb, **{"Content-Encoding": "gzip"})
            case "cut":
                cut_off(to, b'{"choices": [')
            case _:
                return False
        return True

    def _pour(self, to: BaseHTTPRequestHandler, part: bytes, pause: float) -> None:
        to.send_response(200)
        to.send_header("Content-Type", "application/json")
        to.end_headers()
        while not self.over.wait(pause):
            to.wfile.write(part)
            self.sent += len(part)


def cut_off(to: BaseHTTPRequestHandler, begun: bytes) -> None:
    """Send the beginning of an answer and close the connection, as a failing server does."""
    to.send_response(200)
    to.send_header("Content-Length", str(len(begun) + 1000))
    to.end_headers()
    to.wfile.write(begun)
    to.close_connection = True


def spoilt(answer: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
    """Put a fault into an answer, and return the answer."""
    (choice,) = answer["choices"]
    if "prompt_logprobs" in choice:
        choice["prompt_logprobs"] = spoilt_rows(choice["prompt_logprobs"], fault)
    elif fault == "no ids":
        choice["token_ids"] = None
    elif fault == "short":
        answer["usage"]["completion_tokens"] += 1
    return answer


def spoilt_rows(rows: list[Any], fault: Fault | None) -> list[Any] | None:
    """Put a fault into the last row or all rows of an answer, and return the rows; None if the fault removes them."""
    last: dict[str, Any] = rows[-1]
    token = next(iter(last))
    match fault:
        case "no logprobs":
            return None
        case "short":
            return rows[:-1]
        case "shifted":
            return [None, *rows[2:], rows[1]]
        case "other ids":
            return [None] + [{str(int(index) + 1): entry for index, entry in row.items()} for row in rows[1:]]
        case "not tables":
            return [None, *([entry["logprob"] for entry in row.values()] for row in rows[1:])]
        case "few":
            last.pop(next(reversed(last)))
        case "nan" | "null" | "positive" | "clamp" | "narrow":
            last[token]["logprob"] = LOGPROBS[fault]
        case "no ids":
            last["-1"] = last[token]
        case "bad rank":
            for entry in last.values():
                entry["logprob"] = -0.1
    return rows
