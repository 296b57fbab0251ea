"""The notebook that ships runs as it is shown: cell by cell, where an event loop is running already.

Its cells are executed here as a kernel does, in one namespace and with `await` where they like, but without a kernel:
that brings some thirty packages, and nothing that these cells use.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
KERNEL = """
import ast, asyncio, json, sys

async def execute(cells):
    names = {"__name__": "__main__"}
    for cell in cells:
        begun = eval(compile(cell, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if begun is not None:
            await begun

if __name__ == "__main__":
    asyncio.run(execute(json.load(sys.stdin)))
"""


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), "it was saved with outputs"
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    return ["".join(cell["source"]) for cell in code]


@pytest.mark.processes
def test_the_notebook_runs_and_says_no_more_than_it_prints(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], input=json.dumps(cells()), cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in said[:4]] == [f"update {number:2}" for number in (5, 10, 15, 20)]
    (run,) = (tmp_path / "runs").iterdir()
    assert said[4] == f"runs/{run.name} is finished: True"
    assert re.fullmatch(r"20 updates in [\d.]+ s, tokens [\d.]+ updates old on average", said[5])
    assert said[6].endswith("groups, of which 0 were dropped")
    assert all("= → " in line and "'digits'" in line for line in said[7:9])
    assert said[9].startswith("C3D8E5=") and len(said) == 10
