"""Small tasks in the forms of Harbor and Terminal-Bench."""

from pathlib import Path

HARBOR = {
    "task.toml": "[verifier]\ntimeout_sec = 20.0\n",
    "instruction.md": "Make /app/mean.py right.\n",
    "environment/Dockerfile": "FROM python:3.12\nWORKDIR /app\nCOPY mean.py \\\n  ./\nCOPY data /app/data\n",
    "environment/mean.py": "def mean(values):\n    return sum(values) / 2\n",
    "environment/data/a.txt": "1 2 6\n",
    "tests/test.sh": "cd /logs/verifier\npython3 /tests/check.py && echo 1 > reward.txt || echo 0 > reward.txt\n",
    "tests/check.py": "import sys\nsys.path.append('/app')\nfrom mean import mean\nassert mean([1, 2, 6]) == 3\n",
    "solution/solve.sh": "never shown",
}
BENCH = {
    "task.yaml": "instruction: |\n  Write hello.txt.\nmax_test_timeout_sec: 20\n",
    "Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
    "run-tests.sh": "test -f $TEST_DIR/expected && cmp $TEST_DIR/expected /app/hello.txt\n",
    "tests/expected": "hello\n",
}
FIX = "sed -i 's|/ 2|/ len(values)|' mean.py && cat data/a.txt; ls /tests /logs; true"


def written(place: Path, files: dict[str, str], **changed: str | None) -> Path:
    changes = {name.replace("__", "/").replace("_DOT_", "."): text for name, text in changed.items()}
    for name, text in {**files, **changes}.items():
        if text is not None:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
    return place
