"""Change one operator or constant at a time in the code that decides what is learned, and run its tests on each change.

`python tools/mutants.py` prints one line per mutant: killed if a test fails, else alive. A seed always picks the same
mutants of the same code: compare the lists before and after tests were removed or made cheaper. Some mutants live
because they change nothing that a caller can see, such as a default that every caller overrides.
"""

import argparse
import ast
import copy
import importlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ROOT = Path(__file__).parents[1]
TARGETS = {
    "estimators": ["tests/estimators"],
    "objective": [f"tests/objective/test_{name}.py" for name in ("method", "losses", "loss", "sampling_support")],
    "pipeline/admission.py": [f"tests/pipeline/test_{name}.py" for name in ("admission", "schedules")],
}
"""Mutated code, as a path in src/slipstream, and the tests that should notice."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    target: str
    path: Path
    line: int
    before: str
    after: str
    source: str
    """Text of the mutated module."""

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}  {self.before[:60]}  →  {self.after[:60]}"


def code_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute something: no annotations, no decorators, and not the `strict` of `zip`."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (isinstance(child, ast.keyword) and child.arg == "strict"):
                yield from code_nodes(child)


def mutation(node: ast.AST) -> dict[str, object]:
    """Return the one attribute of the node to change, and its new value; nothing for a node that stays."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            return {"ops": [SWAPS[type(op)]()]}
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            return {"op": SWAPS[type(op)]()}
        case ast.UnaryOp(op=ast.Not()):
            return {"operand": ast.UnaryOp(ast.Not(), node.operand)}
        case ast.UnaryOp(op=ast.USub()):
            return {"op": ast.UAdd()}
        case ast.Constant(value=bool(value)):
            return {"value": not value}
        case ast.Constant(value=int(value) | float(value)):
            return {"value": value + 1}
    return {}


def mutants_of(target: str, path: Path) -> Iterator[Mutant]:
    tree = ast.parse(path.read_text("utf-8"))
    for node in code_nodes(tree):
        if change := mutation(node):
            old = copy.copy(node)
            for name, value in change.items():
                setattr(node, name, value)
            yield Mutant(target, path, node.lineno, ast.unparse(old), ast.unparse(node), ast.unparse(tree))
            for name in change:
                setattr(node, name, getattr(old, name))


def sample(count: int, seed: int) -> list[Mutant]:
    """Draw the same number of mutants of each target."""
    drawn = []
    for number, target in enumerate(TARGETS):
        path = ROOT / "src/slipstream" / target
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        every = [mutant for file in files for mutant in mutants_of(target, file)]
        drawn += random.Random(f"{seed} {target}").sample(every, (count + number) // len(TARGETS))
    return drawn


def try_mutant(mutant: Mutant) -> str:
    """Run the tests on a copy of the package with the mutant, which this process loads; so it can try no other."""
    import pytest

    start, output = time.process_time(), os.open(os.devnull, os.O_WRONLY)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True)
        (Path(folder) / mutant.path.relative_to(ROOT / "src")).write_text(mutant.source, "utf-8")
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = folder
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(output, number)
        # what transformers imports is loaded before pytest could rewrite its assertions
        warned = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        options = [
            "-x",
            "-m",
            "not (slow or processes or browser)",
            "-p",
            "no:cacheprovider",
            "--timeout",
            "60",
            *warned,
        ]
        code = pytest.main([*options, *TARGETS[mutant.target]])
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
    if code not in (0, 1, 2):
        raise RuntimeError(f"pytest ended with {code} on {mutant}")
    return f"{'killed' if code else 'alive '} {time.process_time() - start:4.0f} s  {mutant}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="number of mutants (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="picks the mutants (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    arguments = parser.parse_args()
    chosen = sample(arguments.count, arguments.seed)
    if arguments.list:
        print(*chosen, sep="\n")
        return
    for name in ("torch", "transformers.modeling_utils"):  # loaded once, they are in every forked process
        importlib.import_module(name)
    os.chdir(ROOT)
    lines = []
    with get_context("fork").Pool(arguments.jobs, maxtasksperchild=1) as pool:
        for line in pool.imap_unordered(try_mutant, chosen):
            print(line, flush=True)
            lines.append(line)
    print(f"{sum(line.startswith('killed') for line in lines)} of {len(lines)} mutants were killed")


if __name__ == "__main__":
    main()
