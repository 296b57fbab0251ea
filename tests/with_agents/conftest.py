"""Packages of .venv-agents for runs of this process: the last place in which they and their children look."""

import sys
from pathlib import Path

import pytest
from dictation import ROOT, save_models


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = (ROOT / ".venv-agents" / "lib").glob("python3*/site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, str(found)])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a student and a teacher with room for long prompts."""
    return save_models(tmp_path_factory.mktemp("models"))
