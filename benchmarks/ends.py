"""Change of the length of answers with a teacher that ends with another token, and with each of the two remedies.

    python benchmarks/ends.py [--updates 150] [--seeds 1]

The built-in student learns the built-in teacher's arithmetic. In the arms after the first, the tokens `<eos>` and
`<pad>` have changed places in the teacher's weights and files: it ends answers with `<pad>`. "refused" trains this pair
without start checks, and with files that still name `<eos>`.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from safetensors.numpy import load_file, save_file

import slipstream
from slipstream.models.resolve import model_path

LAST = 10
"""Number of updates at the end over which lengths are averaged."""
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "equal ends": ("builtin:teacher", {}),
    "refused": ("silent", {}),
    'ends = "map"': ("named", {"teachers.main.ends": "map"}),
    "sampler.stop": ("named", {"sampler.stop": ["<pad>"]}),
}


def plant(path: Path, *, named: bool) -> Path:
    """Write a teacher whose `<eos>` and `<pad>` have changed places in its weights and, if `named`, in its files."""
    shutil.copytree(model_path("builtin:teacher"), path)
    weights = load_file(path / "model.safetensors")
    for name in {"lm_head.weight", "model.embed_tokens.weight"} & weights.keys():
        weights[name][[0, 1]] = weights[name][[1, 0]]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    if named:
        config = path / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "<pad>", "pad_token": "<eos>"}))
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    for seed in range(args.seeds):
        for arm, (teacher, changes) in ARMS.items():
            with tempfile.TemporaryDirectory(prefix="ends-") as folder:
                path = Path(folder)
                if teacher in ("silent", "named"):
                    teacher = str(plant(path / "teacher", named=teacher == "named"))
                config = {
                    "student": "builtin:student",
                    "updates": args.updates,
                    "seed": seed,
                    "output": str(path / "run"),
                    "data": {"train": "builtin:arithmetic"},
                    "teachers": {"main": {"model": teacher, "ends": changes.get("teachers.main.ends", "same")}},
                    "sampler": {"max_tokens": 100, "stop": changes.get("sampler.stop", [])},
                    "learner": {"batch_size": 32, "lr": 2e-3, "warmup": 10},
                    "schedule": {"kind": "sync"},
                    "health": {"stop": False},
                    "task": {"reward": "exact"},
                    "runtime": {"kind": "inline", "device": "cpu"},
                }
                lines = slipstream.train(config, quiet=True, checks=arm != "refused").metrics
            first, last = lines[:LAST], lines[-LAST:]
            found = {name: fmean(line[name] for line in last) for name in ("length/mean", "truncated", "reward/exact")}
            early = fmean(line["length/mean"] for line in first)
            print(
                f"seed {seed}  {arm:14} length {early:6.1f} → {found['length/mean']:6.1f} tokens, truncated "
                f"{found['truncated']:6.1%}, right {found['reward/exact']:6.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
