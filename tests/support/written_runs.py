"""Run directories and studies as a run would have written them: what reads them needs no training."""

import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from slipstream.config.file import parse, to_toml
from slipstream.studies.results import CELLS, DONE, STUDY_FILE
from slipstream.studies.study import Study

TREE: dict[str, Any] = {
    "student": "student",
    "teachers": {"main": {"model": "teacher"}},
    "data": {"eval": "held-out"},
    "eval": {"every": 10},
    "task": {"reward": "exact"},
}
EVALUATIONS = ((0, 0.1), (10, 0.3), (20, 0.5), (30, 0.6))
QUOTE: dict[str, Any] = {
    "update": 1, "number": 0, "index": 0, "prompt_id": "p", "prompt": "1+1=", "response": "2.", "turns": None,
    "finish": "eos", "rewards": {"exact": 1.0}, "teacher": "main", "teacher_version": 0, "attempts": None,
    "context_id": "prefix", "context": None, "versions": [[0, 2]], "tokens": ["2", "."], "logp": [-0.5, -1.0],
    "teacher_logp": [-0.1, -6.0],
}  # fmt: skip


def metrics(update: int, rng: random.Random, **more: float) -> dict[str, Any]:
    """A line of an asynchronous run that learns."""
    far = math.exp(-update / 40)
    noise = rng.gauss(0, 0.02)
    return {
        "kind": "train", "update": update, "version": update, "time": 0.5 * update, "loss": far + noise, "lr": 1e-3,
        "grad_norm": 1 + far, "student/entropy": 0.2 + 0.1 * far, "teacher/kl": far + noise, "teacher/kl_error": 0.02,
        "reward/exact": 0.8 - 0.6 * far + noise, "samples": 32.0, "tokens": 1000.0, "length/mean": 31.0 + noise,
        "length/max": 60.0, "truncated": 0.0, "lag/mean": 2.0 + noise, "lag/max": 3.0, "lag/tokens_1": 250.0,
        "lag/tokens_2": 500.0, "lag/tokens_3": 250.0, "drift/k3_kl": 0.01 + noise / 4, "drift/chi2_token": 0.2,
        "drift/ess": 0.9 + noise, "drift/probs_pearson": 0.995, "drift/kl/lag_1": 0.01,
        "drift/kl/lag_2-3": 0.02 + noise / 9,
        "gradient/signal": 1.0, "gradient/power": 17.0, "gradient/noise": 0.5 + noise, "seconds/update": 0.5,
        "seconds/data": 0.1, "seconds/turn": 0.0, "seconds/learn": 0.3, "seconds/weights": 0.05,
        "seconds/publish": 0.02,
        "samples_per_s": 64.0, "tokens_per_s": 2000.0 + 100 * noise, "overlap/stages": 1.8 + noise, "overlap/busy": 2.0,
        "busy/rollout": 1.0, "busy/score": 0.4, "busy/learn": 0.6, "stage/rollout": 0.9, "stage/score": 0.4,
        "stage/learn": 0.5, "idle/sampler": 0.0, "idle/scorer": 0.6, "idle/learner": 0.4, "groups/rolling": 60.0,
        "groups/waiting": 0.0, "groups/scoring": 3.0, "groups/ready": 10.0, "dropped": 0.0, "restarted": 0.0,
        "thrown_tokens": 0.0, **more,
    }  # fmt: skip


def evaluation(update: int, accuracy: float) -> dict[str, Any]:
    return {"kind": "eval", "update": update, "accuracy": accuracy, "samples": 100.0, "tokens": 900.0}


def write_run(
    path: Path,
    updates: int = 30,
    *,
    changes: Mapping[str, Any] | None = None,
    seed: int = 0,
    more: Mapping[str, float] | None = None,
    evaluations: Iterable[tuple[int, float]] = EVALUATIONS,
    samples: Iterable[Mapping[str, Any]] = (QUOTE,),
    ledger: Iterable[Mapping[str, Any]] = (),
    trace: bool = True,
    finished: bool = True,
) -> Path:
    path.mkdir(parents=True)
    config = parse({**TREE, "updates": max(updates, 1), "seed": seed, **(changes or {})}, say=str)
    path.joinpath("config.toml").write_text(to_toml(config), "utf-8")
    dumped = config.model_dump(mode="json", exclude_none=True)
    meta = {
        "started": "2026-01-02T03:04:05+0000",
        "cpus": 2,
        "command": ["/bin/slipstream", "train", "a b.toml"],
        "python": "3.11",
    }
    path.joinpath("meta.json").write_text(json.dumps({**meta, "packages": {"torch": "2"}, "config": dumped}))
    rng = random.Random(seed)
    lines = [metrics(update, rng, **(more or {})) for update in range(1, updates + 1)]
    told = [evaluation(update, accuracy) for update, accuracy in evaluations]
    write_lines(path / "metrics.jsonl", sorted([*lines, *told], key=lambda line: line["update"]))
    write_lines(path / "samples.jsonl", samples)
    write_lines(path / "ledger.jsonl", ledger)
    if trace:
        path.joinpath("trace.json").write_text("[\n" + "".join(json.dumps(e) + ",\n" for e in events(updates)))
    if finished:
        path.joinpath("final").mkdir()
    return path


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def events(updates: int) -> Iterable[dict[str, Any]]:
    """A sampler that is always busy, a scorer for two fifths of an update's half second, a learner for three."""
    for tid, name in enumerate(("sampler", "scorer", "learner"), 1):
        yield {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
    for update in range(updates):
        at = 500_000 * update
        yield {"ph": "X", "pid": 1, "tid": 1, "ts": at, "dur": 500_000, "name": f"rollout v{update}"}
        yield {"ph": "X", "pid": 1, "tid": 2, "ts": at, "dur": 200_000, "name": "score"}
        yield {"ph": "X", "pid": 1, "tid": 3, "ts": at + 200_000, "dur": 300_000, "name": f"update {update + 1}"}


STUDY: dict[str, Any] = {
    **{key: value for key, value in TREE.items() if key not in ("data", "eval")},
    "updates": 30,
    "schedule": {"kind": "replay"},
    "sweep": {
        "title": "Forward against reverse KL",
        "seeds": [1, 2, 3],
        "measure": ["reward/exact", "teacher/kl"],
        "last": 10,
        "x": "schedule.k",
        "grid": {"schedule.k": [0, 1, 16]},
        "arms": {"reverse": {"loss.kind": "reverse_kl_mc"}, "forward": {"loss.kind": "forward_kl", "loss.k": 8}},
        "claims": [
            {"says": "reverse KL starts higher", "less": "forward", "than": "reverse", "at": 0},
            {"says": "reverse KL falls faster", "slope": True, "less": "reverse", "than": "forward"},
        ],
    },
}


def write_study(path: Path, tree: Mapping[str, Any] = STUDY, *, left_out: int = 0) -> Path:
    """With a finished run for every cell but the last few: reverse KL loses by age, forward KL less."""
    study = Study(tree)
    path.mkdir(parents=True)
    path.joinpath(STUDY_FILE).write_text(tomli_w.dumps(study.tree), "utf-8")
    cells = study.cells
    for cell in cells[: len(cells) - left_out]:
        age = math.log2((cell.point.x or 0) + 1)
        reward = 0.6 - 0.08 * age if cell.point.arm == "reverse" else 0.5 - 0.01 * age
        run = path / CELLS / cell.folder
        reward += 0.01 * cell.seed + (0.0002 * (cell.seed - 2) * (1 + age) if cell.point.arm == "forward" else 0.0)
        more = {"reward/exact": reward, "teacher/kl": 0.3 + 0.02 * age + 0.001 * cell.seed}
        told = EVALUATIONS if cell.config.eval.every else ()
        write_run(run, 30, changes=changes_of(cell.config), seed=cell.seed, more=more, evaluations=told, trace=False)
        done = {"seconds": 60.0, "cpu_seconds": 90.0, "updates": 30, "tokens": 30000.0, "version": "0"}
        config = cell.config.model_dump(mode="json", exclude_none=True)
        run.joinpath(DONE).write_text(json.dumps({**done, "finished": "2026-01-02", "config": config}))
    return path


def changes_of(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    return {key: found[key] for key in ("loss", "schedule", "data", "eval")}
