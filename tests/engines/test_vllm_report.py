"""Reports from the logs of vLLM's processes, and the logs that are kept."""

import json
import logging
import logging.config
import subprocess
import sys

import pytest

from slipstream.engines.vllm.core import Report

LOGS = {
    "the innermost error, whatever others made of it": (
        """WorkerProc hit an exception.
Traceback (most recent call last):
  File "layer.py", line 9, in forward
    raise ValueError(f"Head dimension {size} is not supported.")
ValueError: Head dimension 48 is not supported.
EngineCore encountered a fatal error.
Traceback (most recent call last):
RuntimeError: Worker failed with error 'Head dimension 48 is not supported.'
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
""",
        "ValueError: Head dimension 48 is not supported",
    ),
    "an error of a library": ("a.b.exceptions.OddError: it is odd\n", "OddError: it is odd"),
    "an error without words": ("    assert group\n           ^^^^^\nAssertionError\n", "AssertionError"),
    "an error in a process of its own": (
        """subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1.
RuntimeError: Error raised in subprocess:
Traceback (most recent call last):
ModuleNotFoundError: No module named 'torchvision'
""",
        "ModuleNotFoundError: No module named 'torchvision'",
    ),
    "a crash": (
        "Worker proc VllmWorker-0 died unexpectedly (exit code: -11)\nRuntimeError: cancelled\n",
        "Worker proc VllmWorker-0 died unexpectedly (exit code: -11)",
    ),
}


@pytest.mark.parametrize("log", LOGS)
def test_the_cause_is_one_line_and_the_rest_is_kept(log: str) -> None:
    written, cause = LOGS[log]
    report = Report()
    report.path.write_text(written)
    assert report.cause() == f"{cause} (full output: {report.path})"
    report.close()
    assert report.path.read_text() == written
    report.asked = False
    report.close()


def test_bytes_that_are_no_text_hide_no_cause() -> None:
    report = Report()
    report.path.write_bytes(b"\xff\xfe\nValueError: it is odd\n")
    assert report.cause() == f"ValueError: it is odd (full output: {report.path})"
    report.asked = False
    report.quoted = False
    report.close()


def test_what_nobody_asked_for_is_gone_and_what_went_elsewhere_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report()
    assert report.cause() == "its output shows the reason"
    assert report.environment == {"VLLM_LOGGING_CONFIG_PATH": str(report.config)}
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    assert not report.environment, "vLLM refuses both"
    report.close()
    assert not report.folder.exists()


def test_errors_that_vllm_logs_are_what_it_tells() -> None:
    report, logger = Report(), logging.getLogger("vllm")
    logging.config.dictConfig(json.loads(report.config.read_text()))
    try:
        logger.getChild("layers").warning("this is slow")
        logger.getChild("worker").error("a worker has failed", exc_info=KeyError("bias"))
    finally:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
    assert report.cause().startswith("KeyError: 'bias' (full output")
    assert "slow" not in report.path.read_text()


def test_what_processes_write_that_begin_meanwhile_goes_into_the_file(capfd: pytest.CaptureFixture[str]) -> None:
    report, program = Report(), "import sys; print(1, file=sys.stderr); sys.exit(KeyError('bias'))"
    with pytest.raises(subprocess.CalledProcessError), report.listening():
        subprocess.run([sys.executable, "-c", program], check=True)
    subprocess.run([sys.executable, "-c", "import sys; print(2, file=sys.stderr)"], check=True)
    assert capfd.readouterr().err == "2\n"
    assert report.path.read_text() == "1\n'bias'\n"
    report.close()
