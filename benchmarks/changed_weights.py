"""Share of weights whose bf16 value an update changes: would a publish of changed weights only be smaller?

    python benchmarks/changed_weights.py [--updates 15] [--lr 1e-6 3e-6 1e-5 2e-5 5e-5]

Runs of the built-in student with float32 weights and a checkpoint after every update. Consecutive checkpoints are
compared after conversion to bf16, as samplers get them. `bytes` is what would travel, as a share of all: one bit for
every weight, and two bytes for each changed one. The first five updates, in which AdamW's moments settle, do not count.
`seconds` is CPU time on one core to find and pack the changes of 1 GiB of weights, of which this share changes.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from slipstream import train
from slipstream.config.file import parse

SETTLED = 5
"""Number of first updates that are not counted."""


def weights(path: Path) -> torch.Tensor:
    return torch.cat([weight.to(torch.bfloat16).flatten() for _, weight in sorted(load_file(path).items())])


def changed(lr: float, updates: int, output: Path) -> list[float]:
    tree = {
        "student": "builtin:student",
        "updates": updates,
        "output": str(output),
        "data": {"train": "builtin:arithmetic"},
        "teachers": {"main": {"model": "builtin:teacher"}},
        "sampler": {"max_tokens": 8},
        "learner": {"batch_size": 32, "lr": lr},
        "schedule": {"kind": "sync"},
        "checkpoint": {"every": 1, "keep": updates + 1, "minutes": 0},
        "health": {"canary": 0},
        "runtime": {"kind": "inline", "device": "cpu"},
        "log": {"samples": 0, "trace": False},
    }
    train(parse(tree))
    numbers = sorted(int(path.name) for path in (output / "checkpoints").iterdir() if path.name.isdigit())
    found = [weights(output / "checkpoints" / str(number) / "model.safetensors") for number in numbers]
    pairs = itertools.pairwise(found)
    return [(before.view(torch.int16) != after.view(torch.int16)).double().mean().item() for before, after in pairs]


def packing_seconds(share: float) -> float:
    """CPU seconds per GiB to compare two versions of weights, and to write a bit for each and the changed values."""
    count, step = 2**27, 2**22
    before = torch.randn(count).to(torch.bfloat16).view(torch.int16)
    after = before ^ (torch.rand(count) < share)
    began = time.process_time()
    for old, new in zip(before.split(step), after.split(step), strict=True):
        changes = old != new
        np.packbits(changes.numpy())
        new[changes]
    return (time.process_time() - began) * 2**30 / (2 * count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=15)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5, 2e-5, 5e-5])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| lr | changed bf16 values | range | bytes | seconds |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for lr in args.lr:
            shares = changed(lr, args.updates, Path(folder, f"{lr:g}"))[SETTLED:]
            mean = statistics.fmean(shares)
            low, high = min(shares), max(shares)
            print(
                f"| {lr:g} | {mean:.1%} | {low:.1%} … {high:.1%} | {1 / 16 + mean:.2f} | {packing_seconds(mean):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
