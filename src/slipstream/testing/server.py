"""HTTP server on the loopback interface, for fakes: a context manager that answers each request in its own thread."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # more connections at once would be reset


class Loopback(ABC):
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


def handler_of(fake: Loopback) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            fake.get(self)

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            content = self.rfile.read(length)
            if len(content) < length:  # the client has disconnected
                self.close_connection = True
                return
            try:
                fake.post(self, json.loads(content or b"{}"))
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


def cut_off(to: BaseHTTPRequestHandler, begun: bytes) -> None:
    """Send the beginning of an answer and close the connection, as a failing server does."""
    to.send_response(200)
    to.send_header("Content-Length", str(len(begun) + 1000))
    to.end_headers()
    to.wfile.write(begun)
    to.close_connection = True
