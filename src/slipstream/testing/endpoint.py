"""Fake endpoint on the loopback interface, with a real model and all faults that were observed at real endpoints.

    with FakeEndpoint(table(logq_VV)) as fake:       # or: model("builtin:teacher")
        fake.tell("cut", "busy", "shifted")          # faults of the next three completions
        ...                                          # base_url = fake.url, model = fake.name

The endpoint serves until the block ends. `python -m slipstream.testing.endpoint builtin:teacher 8000` serves from a
terminal until Ctrl-C, or until IDLE seconds after the last completion; without a port it uses a free one.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import gzip
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.testing.server import Loopback, cut_off, send

Fault = Literal["slow", "busy", "broken", "cut", "refused", "not json", "deep", "endless", "packed", "trickle",
                "no logprobs", "short", "few", "nan", "null", "positive", "clamp", "narrow", "shifted", "other ids",
                "no ids", "not tables", "bad rank"]  # fmt: skip
Scores = Callable[[Sequence[int]], NDArray[np.floating[Any]]]
"""Function from token ids to log-probs [T, V]: row t is the distribution of token t, and row 0 is unused."""
LOGPROBS = {"nan": float("nan"), "null": None, "positive": 0.5, "clamp": -9999.0, "narrow": -1e300}
"""Log-prob of the last token by fault; "narrow" is finite, but not in float32."""
CHAT = "/v1/chat/completions"
IDLE = 600.0
"""Seconds without a completion request after which a server started from a terminal ends."""


def table(logq_VV: NDArray[np.floating[Any]]) -> Scores:
    """Return the `Scores` function of a model whose next token depends only on the last token."""
    return lambda tokens: np.concatenate([np.zeros((1, logq_VV.shape[1])), logq_VV[list(tokens[:-1])]])


def model(name: str) -> Scores:
    import torch

    from slipstream.engines.native.model import load_model

    lm, lock = load_model(name, dtype="float32", device="cpu").model, threading.Lock()

    def scores(tokens: Sequence[int]) -> NDArray[np.floating[Any]]:
        with lock, torch.inference_mode():
            logp_TV = lm(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)
            return logp_TV.roll(1, 0).numpy()  # type: ignore[no-any-return]

    return scores


class FakeEndpoint(Loopback):
    def __init__(
        self,
        scores: Scores,
        *,
        name: str = "teacher",
        vocabulary: int = 1 << 30,
        max_logprobs: int = 20,
        max_model_len: int | None = 4096,
        key: str | None = None,
        lists: bool = True,
        says: Callable[[str], str] | None = None,
        port: int = 0,
    ) -> None:
        """Create an endpoint; if `lists`, also serve the list of models; clients must send `key` unless it is None.

        `says` answers the last message of a chat request; None serves no chat.
        """
        self.says = says
        super().__init__(port)
        self.scores, self.name, self.vocabulary, self.key, self.lists = scores, name, vocabulary, key, lists
        self.max_logprobs, self.max_model_len = max_logprobs, max_model_len
        self.faults: deque[Fault] = deque()
        self.always: Fault | None = None
        """Fault of every completion; None uses `faults`."""
        self.seconds = 0.05
        """Duration of the fault "slow", and seconds between two bytes of the fault "trickle"."""
        self.sent = 0
        """Bytes sent by the faults "endless" and "trickle"."""
        self.retry_after: str | None = "0.05"
        self.requests: list[dict[str, Any]] = []
        self.most, self.running = 0, 0
        """Highest and current number of concurrent requests."""
        self.asked = time.monotonic()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    def tell(self, *faults: Fault) -> None:
        self.faults.extend(faults)

    # --- answers ---------------------------------------------------------------------------------------------

    def get(self, to: BaseHTTPRequestHandler) -> None:
        if self._turned_away(to):
            return
        listed = {"id": self.name, "object": "model", "max_model_len": self.max_model_len}
        send(to, 200, {"object": "list", "data": [listed]})

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
            self.asked = time.monotonic()
            self.requests.append(body)
            fault = self.always or (self.faults.popleft() if self.faults else None)
        if fault == "slow":
            self.over.wait(self.seconds)
        if self._failed(to, fault) or self._turned_away(to):
            return
        if self.says is not None and to.path == CHAT:
            message = {"role": "assistant", "content": self.says(body["messages"][-1]["content"])}
            send(to, 200, {"object": "chat.completion", "choices": [{"index": 0, "message": message}]})
            return
        tokens, k = body["prompt"], body.get("prompt_logprobs", 0)
        if problem := self._problem(body, tokens, k):
            send(to, *problem)
            return
        answer: dict[str, Any] = {"object": "text_completion", "model": self.name}
        if body.get("return_token_ids"):
            answer |= completion(self.scores, tokens, body, fault)
        else:
            rows = prompt_logprobs(self.scores(tokens), tokens, k)
            choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": spoilt(rows, fault)}
            answer["choices"] = [choice]
        send(to, 200, answer)

    def _turned_away(self, to: BaseHTTPRequestHandler) -> bool:
        authorization = to.headers["Authorization"] or ""
        if self.key is not None and authorization != f"Bearer {self.key}":
            send(to, 401, {"error": {"message": f"Incorrect API key provided: {authorization}"}})
        elif to.path in ("/v1/completions", CHAT if self.says else "") or (to.path == "/v1/models" and self.lists):
            return False
        else:
            send(to, 404, {"detail": "Not Found"})
        return True

    def _problem(self, body: dict[str, Any], tokens: Sequence[int], k: int) -> tuple[int, Any] | None:
        message = ""
        if body["model"] != self.name:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if self.max_model_len is not None and len(tokens) + body["max_tokens"] > self.max_model_len:
            message = f"This model's maximum context length is {self.max_model_len} tokens."
        elif k > self.max_logprobs:
            message = f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.max_logprobs}"
        elif max(tokens) >= self.vocabulary:
            message = f"Token id {max(tokens)} is out of vocabulary"
        return (400, {"error": {"message": message}}) if message else None

    def _failed(self, to: BaseHTTPRequestHandler, fault: Fault | None) -> bool:
        """Send the answer if the fault affects all of it, and return true; return false for all other faults."""
        match fault:
            case "busy":
                after = {} if self.retry_after is None else {"Retry-After": self.retry_after}
                send(to, 429, {"error": {"message": "too many requests"}}, **after)
            case "broken":
                # some servers repeat the client's headers
                send(to, 500, {"error": {"message": f"internal error ({to.headers['Authorization']})"}})
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


def completion(scores: Scores, prompt: list[int], body: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
    """Return choices and usage of a completion that is drawn token by token; temperature 0 takes the best token."""
    drawn, random, finish = list[int](), np.random.default_rng(body["seed"]), "length"
    while len(drawn) < body["max_tokens"] and finish == "length":
        logp_V = scores([*prompt, *drawn, 0])[-1] / max(body["temperature"], 1e-4)
        drawn.append(int((logp_V + random.gumbel(size=len(logp_V))).argmax()))
        finish = "stop" if drawn[-1] in body["stop_token_ids"] else "length"
    choice = {"index": 0, "text": "", "finish_reason": finish, "token_ids": None if fault == "no ids" else drawn}
    return {"choices": [choice], "usage": {"completion_tokens": len(drawn) + (fault == "short")}}


def prompt_logprobs(logp_TV: NDArray[np.floating[Any]], tokens: Sequence[int], k: int) -> list[Any]:
    """Return rows in vLLM's format: None for the first token, else log-probs of the token and of the k best tokens."""
    rows: list[Any] = [None]
    for t in range(1, len(tokens)):
        best = np.argsort(-logp_TV[t], kind="stable")[:k].tolist()
        ids = dict.fromkeys([tokens[t], *best])
        ranks = {index: rank for rank, index in enumerate(best, 1)}
        rows.append({
            str(index): {"logprob": max(float(logp_TV[t, index]), -9999.0), "rank": ranks.get(index, k + 1),
                         "decoded_token": ""}
            for index in ids
        })  # fmt: skip
    return rows


def spoilt(rows: list[Any], fault: Fault | None) -> list[Any] | None:
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


def main() -> None:
    name, port = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with FakeEndpoint(model(name), port=port) as fake:
        print(f'base_url = "{fake.url}"\nmodel = "{fake.name}"\ntokenizer = "{name}"', flush=True)
        try:
            while time.monotonic() - fake.asked < IDLE:
                time.sleep(0.5)
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
