"""The wheel outside a checkout: it holds everything that the demo needs."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--updates", "2", "--learner.batch_size", "8", "--runtime.kind", "inline"]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_demo_runs_from_the_wheel(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    subprocess.run(["git", "clone", "--quiet", "--local", ROOT, source], check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--disable-pip-version-check", "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("slipstream-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    environment = os.environ | {"PYTHONPATH": str(installed)}

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert python("-c", "import slipstream; print(slipstream.__file__)").startswith(str(installed))
    script = tmp_path / "demo.py"
    script.write_text("from slipstream.cli import main\n\nif __name__ == '__main__':\n    raise SystemExit(main())\n")
    shown = python(str(script), "demo", *SMALL)
    assert "student before" in shown and "student after sync" in shown and "student after async" in shown
