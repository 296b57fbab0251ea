"""What `pip install` brings is what the default path uses."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from slipstream.config.schema import Config

ROOT = Path(__file__).parents[1]


def test_every_dependency_is_loaded_by_an_ordinary_run(tmp_path: Path) -> None:
    code = f"""
import sys
from slipstream.cli import main
if __name__ == "__main__":
    arguments = ["--updates", "1", "--learner.batch_size", "2", "--runtime.kind", "inline"]
    arguments += ["--output", {str(tmp_path / "run")!r}]
    assert main(["train", {str(ROOT / "configs" / "forward_kl.toml")!r}, *arguments]) == 0
    print(*{{name.split(".")[0] for name in sys.modules}})
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[<>=]", dependency)[0] for dependency in project["dependencies"]}
    assert wanted - {"ray"} <= loaded, f"declared and not used: {wanted - loaded}"
    assert Config.model_fields["runtime"].default.kind == "ray", "which tests/test_ray.py runs"
    for extra, requirements in project["optional-dependencies"].items():
        names = {re.split(r"[<>=]", requirement)[0].replace("-", "_") for requirement in requirements}
        assert not names & loaded, f"an ordinary run needs {names & loaded} of the extra {extra}"
