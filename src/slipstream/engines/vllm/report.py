"""What vLLM's processes say of what goes wrong: one line is told, and the rest is kept in a file."""

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
"""The last line of a traceback that does not pass on another's, or that a process ended without one."""


class Report:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-vllm-"))
        self.path, self.config, self.asked = self.folder / "log.txt", self.folder / "logging.json", False
        self.path.touch()
        handler = {"class": "logging.FileHandler", "filename": str(self.path), "level": "ERROR"}
        logger = {"handlers": ["file"], "level": "ERROR", "propagate": False}
        written = {"version": 1, "disable_existing_loggers": False, "handlers": {"file": handler}}
        self.config.write_text(json.dumps({**written, "loggers": {"vllm": logger}}))

    @property
    def environment(self) -> dict[str, str]:
        """For vLLM's processes, unless somebody sees to their logging."""
        return {} if "VLLM_CONFIGURE_LOGGING" in os.environ else {"VLLM_LOGGING_CONFIG_PATH": str(self.config)}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Processes that begin here write their errors into the file, and so does this one meanwhile."""
        kept = os.dup(2)
        with self.path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)

    def cause(self, otherwise: str = "the reason is in what it printed") -> str:
        """What went wrong first, and where all of it is."""
        found = CAUSE.search(self.path.read_text())
        if found is None:
            return otherwise
        self.asked = True
        return f"{found[1].removesuffix('.')} (all of it is in {self.path})"

    def close(self) -> None:
        if not self.asked:
            shutil.rmtree(self.folder)
