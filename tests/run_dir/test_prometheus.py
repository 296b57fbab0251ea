"""Metrics of a run in the text format of Prometheus, read by plain HTTP while the run is open."""

import http.client
import re
import socket
from pathlib import Path

import pytest

from slipstream.config.file import parse
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.run_dir.writing import RunLog

LINE = re.compile(r'slipstream_metric\{run="((?:[^"\\\n]|\\["\\n])*)",name="([^"]+)"\} (\S+)')


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


HAS_IPV6 = has_ipv6()


def config_of(address: str) -> Config:
    return parse({"student": "s", "teachers": {"main": {"model": "t"}}, "log": {"listen": address}})


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(host, port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, answer.headers["content-type"], answer.read().decode()
    connection.close()
    return found


def values(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found)
    return {match[2]: float(match[3]) for match in found if match}


def test_the_latest_metrics_are_served_until_the_run_is_closed(tmp_path: Path) -> None:
    port = free_port()
    with RunLog.create(config_of(f"127.0.0.1:{port}"), tmp_path / 'a "run"') as log:
        assert values(get(port, "/metrics")[2]) == {}
        log.metrics("train", {"loss": 0.5, "time/rollout": 2.0}, update=1)
        log.metrics("train", {"loss": 0.25, "time/rollout": 1e-9}, update=2)
        log.metrics("eval", {"accuracy": float("nan")}, update=2, of="math")
        log.samples([], update=1)
        status, kind, text = get(port, "/metrics")
        found = values(text)
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert str(found.pop("eval/math/accuracy")) == "nan"
        assert found == {"train/loss": 0.25, "time/rollout": 1e-9, "update": 2}
        assert 'run="a \\"run\\""' in text and text.startswith("# HELP slipstream_metric ")
        assert get(port, "/else")[0] == 404
    with pytest.raises(ConnectionRefusedError):
        get(port, "/metrics")


def test_an_address_in_use_is_one_line_and_leaves_no_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^log.listen: cannot listen at 127.0.0.1:{port}: .*in use"):
            RunLog.create(config_of(f"127.0.0.1:{port}"), tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:65536", "localhost:0", "[::1]:00000"])
def test_a_port_that_no_machine_has_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"^.*log.listen: '{re.escape(address)}' is no port of this machine"):
        config_of(address)


def test_labels_are_escaped(tmp_path: Path) -> None:
    port = free_port()
    with RunLog.create(config_of(f"127.0.0.1:{port}"), tmp_path / "a\\n\n") as log:
        log.metrics("train", {'reward/"a\\b"\n': 0.5}, update=1)
        line, _ = [each for each in get(port, "/metrics")[2].splitlines() if not each.startswith("#")]
    assert line == r'slipstream_metric{run="a\\n\n",name="reward/\"a\\b\"\n"} 0.5'


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no address ::1")
def test_an_address_may_be_one_of_ipv6(tmp_path: Path) -> None:
    port = free_port()
    with RunLog.create(config_of(f"[::1]:{port}"), tmp_path / "run") as log:
        log.metrics("train", {"loss": 0.5}, update=1)
        assert values(get(port, "/metrics", "::1")[2])["train/loss"] == 0.5
