"""A new user's first minute: the time that `slipstream --help`, the first update of `slipstream train` and
`slipstream demo` take, and what the demo reaches.

python benchmarks/first_minute.py [--repeats 3] [--no-demo]
"""

import argparse
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slipstream.models.resolve import DEMO

SLIPSTREAM = Path(sys.executable).parent / "slipstream"


def timed(*arguments: str) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run([str(SLIPSTREAM), *arguments], check=True, capture_output=True, text=True)
    return time.perf_counter() - began, done.stdout


def first_update(kind: str, scratch: Path) -> tuple[float, float]:
    """Seconds from the command to the first line of metrics, and CPU seconds of a run of one update."""
    metrics, before, began = scratch / "run" / "metrics.jsonl", cpu_seconds(), time.perf_counter()
    changes = ["--updates", "1", "--runtime.kind", kind, "--output", str(scratch / "run")]
    with subprocess.Popen([str(SLIPSTREAM), "train", str(DEMO), *changes], stdout=subprocess.DEVNULL):
        while not metrics.exists() or not metrics.read_text():
            time.sleep(0.01)
        seconds = time.perf_counter() - began
    return seconds, cpu_seconds() - before


def cpu_seconds() -> float:
    """Return the CPU seconds of child processes that ended, and of their children: not of Ray's daemons."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-demo", action="store_true", help="only what comes before it")
    args = parser.parse_args()
    helps = [timed("--help")[0] for _ in range(10)]
    print(f"--help: median {statistics.median(helps):.3f} s   [{min(helps):.3f} … {max(helps):.3f}]")
    found: dict[str, list[tuple[float, float]]] = {"inline": [], "local": [], "ray": []}
    for _ in range(args.repeats):
        for kind, times in found.items():
            with tempfile.TemporaryDirectory() as scratch:
                times.append(first_update(kind, Path(scratch)))
    for kind, times in found.items():
        wall, cpu = (sorted(values) for values in zip(*times, strict=True))
        print(
            f"first update, {kind}: median {statistics.median(wall):.1f} s [{wall[0]:.1f} … {wall[-1]:.1f}], "
            f"{statistics.median(cpu):.1f} CPU s [{cpu[0]:.1f} … {cpu[-1]:.1f}]",
            flush=True,
        )
    for seed in range(0 if args.no_demo else args.repeats):
        with tempfile.TemporaryDirectory() as scratch:
            seconds, output = timed("demo", "--seed", str(seed), "--output", f"{scratch}/run")
        rows = re.findall(
            r"│ (student before|student after \w+|teacher) +│ +([\d.]+)% │ +([\d.]+)% │ +(\d+)% │", output
        )
        reached = ", ".join(f"{name} {sampled} % sampled, {greedy} % greedy" for name, sampled, greedy, _ in rows)
        speeds = ", ".join(
            f"{name} {speed} samples/s" for name, speed in re.findall(r"│ (\w+) +│ +\d+ s │ +(\d+) │", output)
        )
        print(f"demo, seed {seed}: {seconds:.0f} s; {reached}; {rows[-2][3]} % of the teacher's; {speeds}", flush=True)


if __name__ == "__main__":
    main()
