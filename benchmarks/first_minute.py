"""What a new user meets first: how long `slipstream --help` and `slipstream demo` take, and what the demo reaches.

python benchmarks/first_minute.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLIPSTREAM = Path(sys.executable).parent / "slipstream"


def timed(*arguments: str) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run([str(SLIPSTREAM), *arguments], check=True, capture_output=True, text=True)
    return time.perf_counter() - began, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    helps = [timed("--help")[0] for _ in range(10)]
    print(f"--help: median {statistics.median(helps):.3f} s   [{min(helps):.3f} … {max(helps):.3f}]")
    for seed in range(args.repeats):
        with tempfile.TemporaryDirectory() as scratch:
            seconds, output = timed("demo", "--seed", str(seed), "--output", f"{scratch}/run")
        rows = re.findall(
            r"│ (student before|student after \w+|teacher) +│ +([\d.]+)% │ +([\d.]+)% │ +(\d+)% │", output
        )
        found = ", ".join(f"{name} {sampled} % sampled, {greedy} % greedy" for name, sampled, greedy, _ in rows)
        speeds = ", ".join(
            f"{name} {speed} samples/s" for name, speed in re.findall(r"│ (\w+) +│ +\d+ s │ +(\d+) │", output)
        )
        print(f"demo, seed {seed}: {seconds:.0f} s; {found}; {rows[-2][3]} % of the teacher's; {speeds}", flush=True)


if __name__ == "__main__":
    main()
