"""Endpoint on the loopback interface that serves a model: `python -m slipstream.testing.endpoint builtin:teacher 8000`.

It answers as vLLM does: scores of a prompt, and completions. It serves until Ctrl-C, or until IDLE_SECONDS after the
last completion; without a port it uses a free one. For trying a config whose teacher or sampler is behind an endpoint.

Shapes: T tokens, V vocabulary.
"""

import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Scores = Callable[[Sequence[int]], NDArray[np.floating[Any]]]
"""Function from token ids to log-probs [T, V]: row t is the distribution of token t, and row 0 is unused."""
IDLE_SECONDS = 600.0
"""Seconds without a completion after which a server started from a terminal ends."""


# --- HTTP -------------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # more connections at once would be reset


class Loopback(ABC):
    """HTTP server on the loopback interface: a context manager that answers each request in its own thread."""

    def __init__(self, port: int = 0) -> None:
        self.over = threading.Event()
        """Set when the server ends; handlers wait on this event instead of sleeping."""
        self.server = Server(("127.0.0.1", port), handler_of(self))
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def get(self, to: BaseHTTPRequestHandler) -> None:
        send(to, 404, {"detail": "Not Found"})

    @abstractmethod
    def post(self, to: BaseHTTPRequestHandler, body: dict[str, Any]) -> None: ...

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


def handler_of(server: Loopback) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            server.get(self)

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            content = self.rfile.read(length)
            if len(content) < length:  # the client has disconnected
                self.close_connection = True
                return
            try:
                server.post(self, json.loads(content or b"{}"))
            except (BrokenPipeError, ConnectionResetError):  # the client has disconnected
                self.close_connection = True

    return Handler


def send(to: BaseHTTPRequestHandler, status: int, answer: Any, **headers: str) -> None:
    """Send an answer: text and bytes unchanged, any other value as JSON."""
    text = answer if isinstance(answer, str | bytes) else json.dumps(answer)
    content = text.encode() if isinstance(text, str) else text
    to.send_response(status)
    for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
        to.send_header(name, value)
    to.end_headers()
    to.wfile.write(content)


# --- the endpoint -----------------------------------------------------------------------------------------------------


class LocalEndpoint(Loopback):
    def __init__(
        self,
        scores: Scores,
        *,
        name: str = "teacher",
        vocabulary: int = 1 << 30,
        max_logprobs: int = 20,
        max_model_len: int | None = 4096,
        port: int = 0,
    ) -> None:
        super().__init__(port)
        self.scores, self.name, self.vocabulary = scores, name, vocabulary
        self.max_logprobs, self.max_model_len = max_logprobs, max_model_len
        self.last_completion = time.monotonic()

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

    def get(self, to: BaseHTTPRequestHandler) -> None:
        listed = {"id": self.name, "object": "model", "max_model_len": self.max_model_len}
        send(to, 200, {"object": "list", "data": [listed]})

    def post(self, to: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.last_completion = time.monotonic()
        if to.path != "/v1/completions":
            send(to, 404, {"detail": "Not Found"})
        elif problem := self.problem(body):
            send(to, *problem)
        else:
            send(to, 200, self.answer(body))

    def problem(self, body: dict[str, Any]) -> tuple[int, Any] | None:
        """Return status and content of the refusal of a request, or None if it can be answered."""
        tokens, k, message = body["prompt"], body.get("prompt_logprobs", 0), ""
        if body["model"] != self.name:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if self.max_model_len is not None and len(tokens) + body["max_tokens"] > self.max_model_len:
            message = f"This model's maximum context length is {self.max_model_len} tokens."
        elif k > self.max_logprobs:
            message = f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.max_logprobs}"
        elif max(tokens) >= self.vocabulary:
            message = f"Token id {max(tokens)} is out of vocabulary"
        return (400, {"error": {"message": message}}) if message else None

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        head = {"object": "text_completion", "model": self.name}
        if body.get("return_token_ids"):
            return head | completion(self.scores, body["prompt"], body)
        rows = prompt_logprobs(self.scores(body["prompt"]), body["prompt"], body.get("prompt_logprobs", 0))
        return head | {"choices": [{"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": rows}]}


def completion(scores: Scores, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
    """Return choices and usage of a completion that is drawn token by token; temperature 0 takes the best token."""
    drawn, random, finish = list[int](), np.random.default_rng(body["seed"]), "length"
    while len(drawn) < body["max_tokens"] and finish == "length":
        logp_V = scores([*prompt, *drawn, 0])[-1] / max(body["temperature"], 1e-4)
        drawn.append(int((logp_V + random.gumbel(size=len(logp_V))).argmax()))
        finish = "stop" if drawn[-1] in body["stop_token_ids"] else "length"
    choice = {"index": 0, "text": "", "finish_reason": finish, "token_ids": drawn}
    return {"choices": [choice], "usage": {"completion_tokens": len(drawn)}}


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


def model(name: str) -> Scores:
    import torch

    from slipstream.engines.native.model import load_model

    lm, lock = load_model(name, dtype="float32", device="cpu").model, threading.Lock()

    def scores(tokens: Sequence[int]) -> NDArray[np.floating[Any]]:
        with lock, torch.inference_mode():
            logp_TV = lm(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)
            return logp_TV.roll(1, 0).numpy()  # type: ignore[no-any-return]

    return scores


def main() -> None:
    name, port = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with LocalEndpoint(model(name), port=port) as endpoint:
        print(f'base_url = "{endpoint.url}"\nmodel = "{endpoint.name}"\ntokenizer = "{name}"', flush=True)
        try:
            while time.monotonic() - endpoint.last_completion < IDLE_SECONDS:
                time.sleep(0.5)
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
