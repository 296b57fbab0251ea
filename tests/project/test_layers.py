"""A file imports only from lines above its own; what must start instantly never imports torch."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "slipstream"

ROW = re.compile(r"^\| `([\w/.]+)` \|", re.M)


def order() -> list[str]:
    """Return the files of the table in docs/files.md, in its order."""
    table = (ROOT / "docs" / "files.md").read_text("utf-8")
    return [name.strip("/").replace("/", ".") for name in ROW.findall(table) if name != "examples/loop.py"]


ORDER = order()
LINE = {name: number for number, name in enumerate(ORDER)}

# Libraries, beside the standard library, that a part may import as it is loaded. A part not listed may import any.
LOADS = {
    "__init__": "",
    "errors": "",
    "console": "rich",
    "records": "numpy",
    "scope": "",
    "metric_names": "",
    "statistics": "",
    "metrics": "",
    "protocols": "",
    "processes": "",
    "config": "pydantic",
    "config.file": "pydantic pydantic_core",
    "run_dir": "",
    "user_code": "",
    "children": "",
    "sandbox": "",
    "sandbox.remote": "httpx2",
    "agents": "",
    "models": "",
    "models.gguf": "",
    "rewards": "",
    "data": "numpy",
    "environments": "numpy",
    "environments.forms": "numpy pydantic",
    "environments.tools": "pydantic",
    "environments.gateway.server": "uvicorn",
    "environments.gateway.web": "h11 uvicorn",
    "estimators": "torch numpy",
    "estimators.logprobs.tiles_triton": "torch triton",
    "estimators.options": "",
    "estimators.tables": "",
    "objective.coefficients": "",
    "objective.method": "",
    "engines.sampling_options": "",
    "engines.settings": "",
    "engines.native.config": "",
    "pipeline": "",
    "pipeline.control.canary": "numpy",
    "pipeline.canary_rounds": "numpy",
    "plan": "numpy",
    "studies": "",
    "studies.table": "pydantic pydantic_core",
    "studies.board": "rich",
    "planning": "",
    "config.costs": "pydantic",
    "planning.fit": "numpy",
    "planning.simulate": "numpy",
    "reporting": "",
    "reporting.terminal.charts": "rich",
    "reporting.terminal.panel": "rich",
    "reporting.report.page": "jinja2 markupsafe",
    "commands.advise": "rich",
    "runs.display": "rich",
    "commands.watch": "rich",
    "api": "rich",
    "cli": "",
}

# Libraries that it may also import inside a function.
LOADS_LATER = {
    "agents": "minisweagent verifiers",
    "config.file": "tomli_w",
    "run_dir": "torch wandb mlflow trackio",
    "models.gguf": "gguf torch transformers",
    "models": "huggingface_hub safetensors",
    "rewards": "math_verify reasoning_gym",
    "data": "transformers jinja2 pyarrow datasets reasoning_gym",
    "environments": "transformers jinja2 mcp textarena gymnasium yaml httpx2 websockets",
    "environments.tools": "jsonschema",
    "engines.native.config": "transformers",
    "plan": "torch lm_eval",
    "studies": "pyarrow tomli_w",
    "api": "pyarrow transformers",
    "cli": "rich",
}


def parts() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


PARTS = dict(parts())


@cache
def tree_of(part: str) -> ast.Module:
    return ast.parse(PARTS[part].read_text("utf-8"))


def place(part: str, table: Mapping[str, object]) -> str | None:
    """The longest name in a table that is this part or a package around it."""
    return max((name for name in table if f"{part}.".startswith(f"{name}.")), key=len, default=None)


def imports(tree: ast.AST, *, loaded_only: bool) -> Iterator[str]:
    """Full names of what is imported, `from a import b` as a.b."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0 and module, "imports are absolute"
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if loaded_only:
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) if loaded_only:
                pass
            case _:
                yield from imports(node, loaded_only=loaded_only)


@cache
def imported(part: str, *, loaded_only: bool) -> set[str]:
    return set(imports(tree_of(part), loaded_only=loaded_only))


def ours(names: Iterable[str]) -> set[str]:
    return {name.removeprefix("slipstream.") for name in names if name.startswith("slipstream.")}


def theirs(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"slipstream"}


def has_code(tree: ast.Module) -> bool:
    return ast.get_docstring(tree) is None or len(tree.body) > 1


def test_every_file_with_code_has_its_line() -> None:
    code = {part for part in PARTS if has_code(tree_of(part))}
    assert sorted(ORDER) == sorted(code - {"__init__"})


@pytest.mark.parametrize("part", ORDER)
def test_a_file_imports_only_from_lines_above_its_own(part: str) -> None:
    seen = {place(name, LINE) for name in ours(imported(part, loaded_only=False))}
    assert {name for name in seen if name is None or LINE[name] >= LINE[part]} == set()


@pytest.mark.parametrize("part", [part for part in PARTS if part.startswith("pipeline")])
def test_the_pipeline_sees_engines_through_their_protocols_only(part: str) -> None:
    seen = {place(name, LINE) for name in ours(imported(part, loaded_only=False))}
    assert not {name for name in seen if name and name.startswith(("engines.", "objective", "estimators"))} - {
        "engines.sampling_options"
    }


@pytest.mark.parametrize("part", [part for part in PARTS if part.startswith("pipeline")])
def test_the_pipeline_reads_time_through_the_event_loop_only(part: str) -> None:
    found = {name.partition(".")[0] for name in imported(part, loaded_only=False)}
    assert not found & {"time", "datetime", "threading"}


@pytest.mark.parametrize("part", [part for part in PARTS if place(part, LOADS) is not None])
def test_a_file_imports_only_the_libraries_of_its_layer(part: str) -> None:
    name = place(part, LOADS) or ""
    loads, later = set(LOADS[name].split()), set(LOADS_LATER.get(name, "").split())
    assert theirs(imported(part, loaded_only=True)) <= loads
    assert theirs(imported(part, loaded_only=False)) <= loads | later


def loaded(part: str) -> set[str]:
    """All files of ours that are there once this one is, packages around them included."""
    found, left = set[str](), [part]
    while left:
        each = left.pop()
        if each in PARTS and each not in found:
            found.add(each)
            names = ours(imported(each, loaded_only=True)) | {each}
            left += [name.rsplit(".", count)[0] for name in names for count in range(name.count(".") + 1)]
    return found


@pytest.mark.parametrize(
    "part", [part for part in PARTS if part in ("api", "cli") or part.startswith(("commands", "runs", "plan."))]
)
def test_a_command_begins_without_what_computes(part: str) -> None:
    """Mistakes are told at once, and the coordinator of local engines never has torch; they and the planner do."""
    heavy = {"torch", "transformers", "ray", "vllm", "datasets", "safetensors"}
    found = {each: theirs(imported(each, loaded_only=True)) & heavy for each in loaded(part)}
    assert {each: libraries for each, libraries in found.items() if libraries} == {}


def test_no_two_files_import_each_other_by_whatever_way() -> None:
    graph = {part: {place(name, PARTS) for name in ours(imported(part, loaded_only=False))} for part in PARTS}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("part", [part for part in PARTS if part.startswith("reporting")])
def test_who_reads_runs_takes_part_in_none(part: str) -> None:
    taking_part = {"engines", "pipeline", "runtimes", "commands"}
    assert taking_part.isdisjoint(name.partition(".")[0] for name in ours(imported(part, loaded_only=False)))


MAKES_CONFIG = {"config.schema.Config", "config.file.load", "config.file.parse"}


def has_config(tree: ast.AST) -> bool:
    """Return True if the config passes through a file: it names the class, reads one, or takes it from a plan."""
    from_plan = any(
        isinstance(node, ast.Attribute) and node.attr == "config" and ast.unparse(node.value) in ("made", "plan")
        for node in ast.walk(tree)
    )
    return from_plan or not MAKES_CONFIG.isdisjoint(ours(imports(tree, loaded_only=False)))


def test_the_config_goes_from_a_command_to_the_plan_and_no_further() -> None:
    """Facts, rules and decisions of the plan see it; studies read the configs of runs, and write them."""
    having = {part for part in PARTS if not part.startswith("config") and has_config(tree_of(part))}
    folders = "run_dir", "reporting", "studies", "planning", "plan"
    apart = {part for part in having if part.partition(".")[0] in folders}
    assert len(having - apart) <= 10, having - apart
    assert not {part for part in having if part.startswith(("engines.", "runtimes"))} - {"engines.sampling_options"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "plan").rglob("*.py")), ids=lambda path: path.stem)
def test_a_module_of_planning_imports_at_most_twenty_others(path: Path) -> None:
    nodes = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
    assert len([node for node in nodes if (node.module or "").startswith("slipstream")]) <= 20


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_class_has_at_most_350_lines(path: Path) -> None:
    classes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef)]
    assert [each.name for each in classes if (each.end_lineno or 0) - each.lineno >= 350] == []


def test_the_rules_see_what_they_forbid() -> None:
    code = """
import torch.nn as nn
if TYPE_CHECKING:
    import numpy
def later():
    from slipstream.engines.native import rows
"""
    tree = ast.parse(code)
    assert ours(imports(tree, loaded_only=False)) == {"engines.native.rows"}
    assert theirs(imports(tree, loaded_only=False)) == {"numpy", "torch"}
    assert ours(imports(tree, loaded_only=True)) == set()
    assert theirs(imports(tree, loaded_only=True)) == {"torch"}
    assert place("protocols.Handle", LINE) == "protocols"
    assert {"runs.start", "runtimes.launcher", "estimators", "errors"} <= loaded("runs.start")
    assert {"runtimes.build", "engines.weights"} <= loaded("runtimes.inline")
    assert has_config(ast.parse("from slipstream.config.schema import Config\nx = 1"))
    assert has_config(ast.parse("def f():\n    return made.config.learner"))
    assert not has_config(ast.parse("from slipstream.config.learner import LearnerConfig\nmodel.config"))
    parts = ["runtimes.build", "plan.plan", "pipeline.run", "objective.loss", "estimators.auxiliary", "protocols"]
    assert [LINE[part] for part in parts] == sorted({LINE[part] for part in parts}, reverse=True)
