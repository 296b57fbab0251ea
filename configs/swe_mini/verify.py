"""Judge a patch by SWE-bench's own evaluation in the issue's container.

That evaluation reads the log of tests which ran beside the patched code. The patch cannot reach this program or its
verdict, but code that prints what a passing test prints can deceive SWE-bench.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def main() -> None:
    row = json.loads(Path(os.environ["SLIPSTREAM_TASK"]).read_text("utf-8"))
    issue, patch = row["meta"]["instance_id"], Path(os.environ["SLIPSTREAM_WORKSPACE"], "patch.diff")
    submitted = patch.read_text("utf-8", "replace") if patch.is_file() else ""  # it may have been out of time
    asked = {"problem_statement": Path(sys.argv[1]).read_text("utf-8"), "patch": row["ground_truth"]}
    said = {"instance_id": issue, "model_name_or_path": "student", "model_patch": submitted}
    Path("issue.json").write_text(json.dumps([row["meta"] | asked]), "utf-8")
    Path("predictions.json").write_text(json.dumps([said]), "utf-8")
    given = ["--dataset_name", "issue.json", "--predictions_path", "predictions.json", "--run_id", "one"]
    evaluation = [sys.executable, "-m", "swebench.harness.run_evaluation", *given, "--max_workers", "1"]
    subprocess.run(evaluation, check=False)
    report = Path("student.one.json")
    if not report.exists():
        os.abort()  # it could not be evaluated, which is no reward of 0
    resolved = issue in json.loads(report.read_text("utf-8"))["resolved_ids"]
    Path(os.environ["SLIPSTREAM_VERDICT"]).write_text(json.dumps(float(resolved)), "utf-8")


if __name__ == "__main__":
    main()
