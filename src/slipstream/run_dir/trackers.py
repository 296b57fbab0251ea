"""Trackers that receive metrics and samples of a run while it writes its own files: one line of a config each."""

import importlib.util
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from textwrap import indent
from threading import Thread
from typing import Any, Protocol

from slipstream.config.file import to_toml
from slipstream.config.running import Tracker
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, first_line

Quotes = Sequence[Mapping[str, Any]]
"""Lines of samples.jsonl."""
TEXTS = 10
"""Interval in updates at which a tracker gets samples, because trackers store and draw each text separately."""
PROMETHEUS_NAME = "slipstream_metric"
"""Name of all metrics for Prometheus; their own names, which have slashes, are a label."""


class Sink(Protocol):
    """A receiver of all metrics, and of samples of some updates: a tracker or the display."""

    every: int
    """Interval in updates at which the sink gets samples, beginning with the first update."""

    def log(self, numbers: Mapping[str, float], step: int) -> None: ...
    def samples(self, quotes: Quotes, step: int) -> None: ...
    def close(self) -> None: ...


def check_trackers(names: Iterable[Tracker]) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"log.to = [{name!r}] needs {name}: pip install 'slipstream[{name}]'")


def start_trackers(config: Config, path: Path, known: Mapping[str, str]) -> tuple[list[Sink], dict[str, str]]:
    """Start the trackers of a config; those that have a run in `known` continue it. Return these runs, too."""
    sinks, runs = list[Sink](), dict[str, str]()
    for name in config.log.to:
        try:
            sink = SINKS[name](config, path, known.get(name))
        except Exception as error:  # a tracker may raise anything: no key, no server, no such run
            why = f"log.to = [{name!r}] cannot start: {first_line(error)}"
            if name in known:
                why += f"; to begin a new run there instead of {known[name]}, remove it from {path / 'meta.json'}"
            raise ConfigError(why) from None
        sinks.append(sink)
        if isinstance(sink, Wandb | MLflow):
            runs[name] = sink.identity
    if config.log.listen is not None:
        sinks.append(Prometheus(config, path))
    return sinks, runs


ENDED = {"eos": "ended", "length": "cut off", "turns": "out of turns", "time": "out of time"}
"""Text for each finish reason of a sample."""


def heading(quote: Mapping[str, Any]) -> str:
    lags = [quote["update"] - 1 - version for version, _ in quote["versions"]]
    lag = f", lag {min(lags)}" + (f" to {max(lags)}" if len(set(lags)) > 1 else "") if lags else ""
    rewards = "".join(f", {name} {value:.3g}" for name, value in quote["rewards"].items())
    ended = ENDED.get(quote["finish"], quote["finish"])
    return f"update {quote['update']}{lag}{rewards}, {len(quote['tokens'])} tokens, {ended}"


SAMPLE_TABLE_COLUMNS = ("sample", "prompt", "response")


def table_of(quotes: Quotes) -> list[list[str]]:
    return [[heading(quote), quote["prompt"], quote["response"]] for quote in quotes]


class TensorBoard:
    every = TEXTS

    def __init__(self, config: Config, path: Path, known: str | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(path / "tensorboard"))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def samples(self, quotes: Quotes, step: int) -> None:
        """Write samples as Markdown, where indented text is shown unchanged."""
        for number, (headline, *texts) in enumerate(table_of(quotes)):
            for name, text in zip(SAMPLE_TABLE_COLUMNS[1:], texts, strict=True):
                headline += f"\n\n{name}:\n\n{indent(text, ' ' * 4, bool)}"
            self.writer.add_text(f"samples/{number}", headline, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    every = TEXTS
    identity: str
    """Name by which the tracker finds this run again."""

    def __init__(self, config: Config, path: Path, known: str | None = None) -> None:
        import wandb

        continued = {} if known is None else {"id": known, "resume": "allow"}
        self.start(wandb, config, path.name, dir=str(path), **continued)
        self.identity = str(self.run.id)

    def start(self, library: Any, config: Config, name: str, **options: str) -> None:
        self.library = library
        settings = config.model_dump(mode="json")
        self.run = library.init(project=config.log.project, name=name, config=settings, **options)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.run.log(dict(numbers), step=step)

    def samples(self, quotes: Quotes, step: int) -> None:
        self.run.log(
            {"samples": self.library.Table(columns=list(SAMPLE_TABLE_COLUMNS), data=table_of(quotes))}, step=step
        )

    def close(self) -> None:
        self.run.finish()


class Trackio(Wandb):
    """A tracker with the interface of wandb, which finds runs by their names."""

    def __init__(self, config: Config, path: Path, known: str | None = None) -> None:
        import trackio

        self.identity = known or path.name
        self.start(trackio, config, self.identity, resume="never" if known is None else "allow")


class MLflow:
    every = TEXTS
    identity: str
    """Name by which the tracker finds this run again."""

    def __init__(self, config: Config, path: Path, known: str | None = None) -> None:
        import mlflow

        self.mlflow = mlflow
        if not mlflow.is_tracking_uri_set():
            mlflow.set_tracking_uri(f"sqlite:///{path.resolve() / 'mlflow.db'}")
            if mlflow.get_experiment_by_name(config.log.project) is None:
                mlflow.create_experiment(config.log.project, (path.resolve() / "mlflow").as_uri())
        mlflow.set_experiment(config.log.project)
        run = mlflow.start_run(run_id=known) if known else mlflow.start_run(run_name=path.name)
        self.identity = str(run.info.run_id)
        mlflow.log_text(to_toml(config), "config.toml")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.mlflow.log_metrics(dict(numbers), step=step)

    def samples(self, quotes: Quotes, step: int) -> None:
        texts = "\n\n".join("\n".join(row) for row in table_of(quotes))
        self.mlflow.log_text(texts, f"samples/update-{step:06d}.txt")

    def close(self) -> None:
        self.mlflow.end_run()


def escaped(label: str) -> str:
    """Escape the value of a label for the text format of Prometheus."""
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Prometheus:
    """A server of the latest metrics in the text format of Prometheus, at /metrics."""

    every = 1

    def __init__(self, config: Config, path: Path) -> None:
        host, _, port = str(config.log.listen).rpartition(":")
        self.numbers: dict[str, float] = {}
        self.run = path.name
        serve = type("Page", (_MetricsPage,), {"text": self.text})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("Server", (ThreadingHTTPServer,), {"address_family": family})
        try:
            self.server = server((host.strip("[]"), int(port)), serve)
        except OSError as error:
            raise ConfigError(f"log.listen: cannot listen at {config.log.listen}: {first_line(error)}") from None
        Thread(target=self.server.serve_forever, daemon=True, name="prometheus").start()

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.numbers = {**self.numbers, **numbers, "update": step}

    def samples(self, quotes: Quotes, step: int) -> None:
        """Serve no texts."""

    def text(self) -> str:
        name = PROMETHEUS_NAME
        start = f'{name}{{run="{escaped(self.run)}"'
        rows = [f'{start},name="{escaped(metric)}"}} {value}\n' for metric, value in self.numbers.items()]
        return f"# HELP {name} Latest value of a metric of a run.\n# TYPE {name} gauge\n{''.join(rows)}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _MetricsPage(BaseHTTPRequestHandler):
    text: Callable[[], str]

    def do_GET(self) -> None:
        if self.path != "/metrics":
            return self.send_error(404, "only /metrics is served")
        body = type(self).text().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


SINKS: dict[Tracker, Callable[[Config, Path, str | None], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}
