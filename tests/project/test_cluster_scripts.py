"""Scripts for clusters: the Slurm job starts Ray on its nodes, trains, and collects the logs of all nodes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.run_dir.writing import read_lines

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "cluster" / "slurm.sh"
FAKES = {
    # one machine stands for both nodes; a job runs until it ends, as with sbatch --wait
    "sbatch": 'while [ "${1#-}" != "$1" ]; do shift; done; exec bash "$@"',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": "printf 'one\\ntwo\\n'",
}
RUN = """
student = "builtin:student"
updates = 4

[teachers.main]
model = "builtin:teacher"

[sampler]
max_tokens = 12

[learner]
batch_size = 8
"""


def test_the_scripts_are_valid_shell() -> None:
    for path in SCRIPT.parent.glob("*.sh"):
        subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_slurm_job_trains_and_collects_logs(tmp_path: Path) -> None:
    """sbatch, srun and scontrol are fakes; Ray and the run are real."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in FAKES.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "train.toml").write_text(RUN)
    run = tmp_path / "run"
    environment = os.environ | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": f"test-{os.getpid()}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_ON_NODE": "2",
        "RAY_PORT": str(20000 + os.getpid() % 20000),
    }

    command = ["sbatch", "--nodes=2", SCRIPT, "train.toml", run, "--learner.lr", "1e-4"]
    with (tmp_path / "said.txt").open("w") as said:  # no pipe: a process that stays would hold it open
        done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=said, stderr=said, check=False)
    assert done.returncode == 0, (tmp_path / "said.txt").read_text()[-3000:]
    assert len(read_lines(run / "metrics.jsonl")) >= 4 and (run / "final" / "model.safetensors").exists()
    logs = sorted(path.name for path in (run / "logs").iterdir())
    assert logs == ["one", "two"] and any((run / "logs" / "one").glob("raylet*"))
