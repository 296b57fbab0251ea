"""Do canaries accuse an honest teacher or sampler? Runs in which nobody lies, and what was found in them.

    python benchmarks/canaries.py [runs]

Engines are tabular (`tests/support/tabular_engines.py`) on a virtual clock: 25 updates, two or three copies of the
teacher, two samplers, every schedule in turn. Log-probs of teachers are rounded or noisy, by 0 to 0.05 nats, and
teachers with much noise are configured as what has it, an endpoint.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from slipstream.config.file import parse
from slipstream.data.prompts import Prompts, Row
from slipstream.engines.score_checks import scored
from slipstream.errors import Unhealthy
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines, GradingSampler
from slipstream.records import Group, Handle
from slipstream.run_dir.writing import RunLog
from slipstream.simulation import virtual_clock as virtual
from support import tabular_engines as toy

VOCAB, EOS, ROWS = 6, 0, 10
NOISE = (0.0, 1e-6, 1e-3, 0.02, 0.05)
SCHEDULES: Sequence[dict[str, Any]] = (
    {"kind": "sync"},
    {"kind": "step_off", "k": 1},
    {"kind": "async", "tau": 1},
    {"kind": "async", "tau": 4},
)


class Noisy(toy.ToyScorer):
    def __init__(self, table: Any, *, noise: float, seed: int) -> None:
        super().__init__(table)
        self.noise, self.rng = noise, np.random.default_rng(seed)

    async def score(self, group: Group) -> list[Handle]:
        return [self._shaken(handle, true) for handle, true in zip(group, await super().score(group), strict=True)]

    def _shaken(self, handle: Handle, true: Handle) -> Handle:
        logp_NM = true.body.teacher_action_logp
        logp_NM = np.minimum(logp_NM + self.noise * self.rng.standard_normal(logp_NM.shape), 0.0)
        return scored(handle, teacher="toy", teacher_logp=logp_NM[:, 0], teacher_action_logp=logp_NM)


def one(path: Path, seed: int) -> list[str]:
    """Return the lines that accuse somebody in a run."""
    noise, said = NOISE[seed % len(NOISE)], list[str]()
    teacher = {"model": "t", "base_url": "http://host/v1", "tokenizer": "t"} if noise > 1e-3 else {"model": "t"}
    tree = {
        "student": "toy",
        "seed": seed,
        "updates": 25,
        "teachers": {"main": teacher | {"recheck": 0.0}},
        "loss": {"m": 1},
        "sampler": {"max_tokens": 6, "group": 2},
        "learner": {"batch_size": 16},
        "schedule": SCHEDULES[seed % len(SCHEDULES)],
    }
    config = parse(tree, say=lambda _: None)
    student, table = toy.random_table(VOCAB, seed=seed), toy.random_table(VOCAB, seed=seed + 1, scale=2.0)
    engines = Engines(
        samplers=tuple(GradingSampler(toy.ToySampler(student, seconds=0.1), toy.ToyGrader()) for _ in range(2)),
        scorers={"main": tuple(Noisy(table, noise=noise, seed=10 * seed + i) for i in range(2 + seed % 2))},
        learner=toy.ToyLearner(student, lr=0.3, cost=lambda _: 1.0),
        close=lambda: None,
    )
    rows = [Row(id=str(i), prompt="x") for i in range(ROWS)]
    tokens = [np.array([1 + i % (VOCAB - 1)], np.int32) for i in range(ROWS)]
    prompts = Prompts(rows, tokens, seed=seed, shuffle=True)
    with RunLog.create(config, path) as log:
        try:
            virtual.run(Run(config, engines, prompts, log, say=said.append, ends=(EOS,)).train())
        except Unhealthy as error:
            said.append(f"health: {error}")
    return [line for line in said if line.startswith("health: ") or "canary" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=int, nargs="?", default=200, help="number of runs (200)")
    runs, alarms = parser.parse_args().runs, 0
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(runs):
            for line in (said := one(Path(directory) / str(seed), seed)):
                print(f"run {seed}: {line}")
            alarms += bool(said)
    print(f"{alarms} of {runs} honest runs were accused")


if __name__ == "__main__":
    main()
