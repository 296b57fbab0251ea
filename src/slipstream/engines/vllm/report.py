"""Error output of vLLM's processes: a file keeps the whole output, and error messages quote one line of the file."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ELSEWHERE = r"CalledProcessError|RuntimeError: Error raised in subprocess"
CAUSE = re.compile(rf"^(?:\w+\.)*(?!{ELSEWHERE})(\w+(?:Error|Exception)\b.*|Worker proc .* died.*)$", re.MULTILINE)
"""Pattern of a traceback's last line that does not repeat another process's error, or of a dead worker's line."""


class Report:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-vllm-"))
        self.path, self.config, self.quoted = self.folder / "log.txt", self.folder / "logging.json", False
        self.path.touch()
        handler = {"class": "logging.FileHandler", "filename": str(self.path), "level": "ERROR"}
        logger = {"handlers": ["file"], "level": "ERROR", "propagate": False}
        written = {"version": 1, "disable_existing_loggers": False, "handlers": {"file": handler}}
        self.config.write_text(json.dumps({**written, "loggers": {"vllm": logger}}))

    @property
    def environment(self) -> dict[str, str]:
        """Return variables that configure the logging of vLLM's processes; empty if the user configures it."""
        return {} if "VLLM_CONFIGURE_LOGGING" in os.environ else {"VLLM_LOGGING_CONFIG_PATH": str(self.config)}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Redirect standard error of this process, and of processes started meanwhile, into the file."""
        original = os.dup(2)
        with self.path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original, 2)
            os.close(original)

    def cause(self, otherwise: str = "its output shows the reason") -> str:
        """Return the first error and the path of the file, or `otherwise` if the file holds no error."""
        found = CAUSE.search(self.path.read_text())
        if found is None:
            return otherwise
        self.quoted = True
        return f"{found[1].removesuffix('.')} (full output: {self.path})"

    def close(self) -> None:
        if not self.quoted:
            shutil.rmtree(self.folder)
