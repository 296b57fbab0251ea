"""Every name that a run writes is in the vocabulary once, and nothing is in it that no run writes."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream import metric_names as vocabulary
from slipstream.config.file import parse
from slipstream.data.prompts import Prompts, Row
from slipstream.environments.several import SeveralEnvironments
from slipstream.errors import WorkerDied
from slipstream.estimators.drift import DRIFT_METRICS
from slipstream.estimators.tables.correction import RS_MODES
from slipstream.grades import ENDPOINT_DOWN, Ungraded
from slipstream.pipeline.failures import GivenUp
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines, GradingSampler, Sampling
from slipstream.records import Group, Handle, Prompt
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from support import tabular_engines as toy
from support.metric_runs import TREE, native
from support.toy_episodes import World

ROOT = Path(__file__).parents[1]
TOY_VOCAB = 6

REWARDED = {"teachers": {}, "loss": {"kind": "reverse_kl_mc", "weight": 0.0}}
MINIATURES: dict[str, dict[str, Any]] = {
    "the default, beside an evaluation": {
        "schedule": {"kind": "async", "tau": 1.0},
        "eval": {"every": 1, "prompts": 2},
        "data": {"eval": "held-out"},
    },
    "two teachers, periodic": {
        "teachers": {"a": {"model": "tiny", "recheck": 1.0}, "b": {"model": "tiny"}},
        "schedule": {"kind": "periodic"},
    },
    "top-k, in several steps, drift measured exactly": {
        "loss": {"kind": "forward_kl", "k": 3},
        "learner": {"minibatches": 2, "exact_drift": True},
    },
    "draws around a proximal policy, in float16": {
        "loss": {"kind": "decoupled_ppo", "m": 2},
        "learner": {"compute_dtype": "float16"},
    },
    "draws within a budget, after parts of answers": {
        "loss": {"kind": "m2po", "m": 2},
        "mix": {"share": 0.9, "prefix": 0.9},
    },
    "the student's own best": {"loss": {"kind": "reverse_kl_topk", "k": 3}},
    "the emitted token as an advantage": {"loss": {"kind": "k1", "use": "advantage"}},
    "a teacher that follows": {
        "teachers": {
            "me": {"model": "self", "context": "{prompt}{ground_truth}", "follow": {"ema": 0.9}, "relabel": "always"}
        },
        "schedule": {"kind": "async", "tau": "auto", "publish_every": "auto"},
    },
    "answers first, then some beside": {
        "sft": {"updates": 1},
        "mix": {"share": 0.9},
        "loss": {"kind": "forward_kl", "k": 3},
        "sampler": {"group": 1},
    },
    "answers of the teacher first, and the KL to it on held-out prompts": {
        "mix": {"share": 0.9, "source": "teacher"},
        "loss": {"kind": "forward_kl", "k": 3},
        "sampler": {"group": 1},
        "task": {"reward": []},
        "eval": {"every": 1, "prompts": 2},
        "data": {"eval": "held-out"},
    },
    "hidden states, shared prompts, a teacher beside the sampler": {
        "loss": {"kind": "eopd"},
        "sampler": {"teacher_replaces": 5, "speculation": {"lookup": 1}},
    },
    "weights of stale answers": {
        **REWARDED,
        "policy": {"loss": "vanilla"},
        "correction": {"preset": "decoupled_token_is", "is_normalize": True, "rs": {"seq_mean_k1": [0.5, 2.0]}},
        "reference": {"weight": 0.1},
        "schedule": {"kind": "step_off"},
    },
    "rejection in bypass": {
        **REWARDED,
        "policy": {"loss": "reinforce", "centre": "draws"},
        "correction": {"preset": "bypass_pg_geo_rs", "rs": {"seq_max_kl": 9.0, "negative_seq": 9.0}},
    },
    "rewards against a greedy answer, a steered reference, and a bound on the ratio's variance": {
        **REWARDED,
        "policy": {"loss": "r2vpo", "advantage": "remax", "variance_target": 0.1},
        "task": {"reward": ["exact", "math"]},
        "reference": {"weight": 0.1, "control": "adaptive", "target": 0.1, "horizon": 100},
    },
    "freshness, and a refresh now and then": {
        "freshness": {"kappa_f": 0.9, "cooldown": 3, "measure": 1},
        "schedule": {"kind": "replay", "k": 2},
        "updates": 4,
    },
    "guarded": {
        "guards": {
            "length_surge": {},
            "ess": {},
            "entropy": {},
            "kl": {},
            "gac": {"every": 1, "below": 0.0, "limit": 0.5},
        },
        "schedule": {"kind": "async", "tau": 1.5},
        "updates": 4,
    },
    "a teacher with another tokenizer": {
        "teachers": {"main": {"model": "tiny", "spelling": "own"}},
        "loss": {"kind": "k1", "use": "advantage"},
    },
    "experts that the sampler chose": {"learner": {"router": "measure", "router_aux": "model"}},
    "prompts by their rewards, used twice": {"data": {"order": "adaptive"}, "reuse": {"times": 2}},
    "a choice with chance, noise on the layers": {
        **REWARDED,
        "policy": {"loss": "clip_cov"},
        "learner": {"perturbation": {"std": 0.01}},
    },
    "rewards that are all alike": {**REWARDED, "policy": {"refill": 2.0}, "task": {"reward": "math"}},
    "values": {**REWARDED, "policy": {"advantage": "gae"}, "critic": {}},
    "a choice by budget": {**REWARDED, "policy": {"loss": "m2po"}, "sampler": {"top_p": 0.9, "keep_mask": True}},
}


class Overtaxed(toy.ToyGrader):
    """Has no reward for an answer that did not end."""

    async def grade(self, group: Group) -> list[Handle]:
        late = Ungraded("timeout", "ended took more than 1 s")
        return [
            Handle(replace(h.header, ungraded=None if h.header.rewards["ended"] else late), h.body)
            for h in await super().grade(group)
        ]


class Failing(toy.ToySampler):
    """Cannot answer every fifth prompt, and does not survive the fourth one, if it may die."""

    mortal = True

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if prompt.number == 3 and self.mortal:
            raise WorkerDied("gone")
        if prompt.number % 5 == 1:
            raise GivenUp("not this one")
        return await super().generate(prompt, sampling, begun)


class OneOfTwo(toy.ToyScorer):
    """Scores the groups of its own prompts, and leaves their teacher's name."""

    async def score(self, group: Group) -> list[Handle]:
        name = group[0].header.teacher
        return [Handle(dataclasses.replace(h.header, teacher=name), h.body) for h in await super().score(group)]


def dropping(schedule: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """The lines of a run over toy engines on a virtual clock, in which groups fail and grow old, environments of two
    teachers, too, and a sampler dies."""
    teachers = {name: {"model": "tiny"} for name in "ab"}
    tree = {**TREE, "updates": 24, "schedule": schedule, "task": {}, "teachers": teachers}
    config, student = parse(tree), toy.random_table(TOY_VOCAB, seed=0)
    tokens = [np.array([1 + i % (TOY_VOCAB - 1)], np.int32) for i in range(8)]

    def in_worlds(policy: toy.ToySampler) -> SeveralEnvironments:
        return SeveralEnvironments(policy, {name: World(faults=0.5).sampler(policy) for name in ("a", "b")})

    async def replace(_: Any) -> Any:
        other = Failing(student, seconds=0.5)
        other.mortal = False
        return GradingSampler(in_worlds(other), toy.ToyGrader())

    engines = Engines(
        samplers=(GradingSampler(in_worlds(Failing(student, seconds=0.5)), Overtaxed()),),
        scorers={name: (OneOfTwo(toy.random_table(TOY_VOCAB, seed=1)),) for name in teachers},
        learner=toy.ToyLearner(student, cost=lambda _: 0.1),
        close=lambda: None,
        replace=replace,
        traffic=lambda: dict.fromkeys(("rollouts", "scores", "weights", "coordinator"), 1),
    )
    rows = [Row(id=str(i), prompt="x", environment="ab"[i % 2]) for i in range(8)]
    made = Prompts(rows, tokens, seed=0, shuffle=True, teachers=["ab"[i // 2 % 2] for i in range(8)])
    with RunLog.create(config, path) as log:
        virtual.run(Run(config, engines, made, log, say=lambda _: None).train())
    return read_lines(path / "metrics.jsonl")


def names_of(lines: list[dict[str, Any]]) -> set[str]:
    return {name for line in lines for name in line} - {"kind", "update"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names that every miniature writes."""
    path = tmp_path_factory.mktemp("runs")
    found = {name: names_of(native(changes, path / name)) for name, changes in MINIATURES.items()}
    late = {"kind": "async", "tau": 2.0, "max_lag": 1, "on_old": "drop"}
    return found | {"drops": names_of(dropping(late, path / "drops"))}


def test_no_other_name_is_ever_written(written: dict[str, set[str]]) -> None:
    assert {
        miniature: strange
        for miniature, names in written.items()
        if (strange := {name for name in names if len(vocabulary.find(name)) != 1})
    } == {}


def test_every_name_of_the_vocabulary_is_written_by_some_run(written: dict[str, set[str]]) -> None:
    names = set[str]().union(*written.values())
    assert [p.pattern for p, _ in vocabulary.patterns() if not any(p.fullmatch(name) for name in names)] == []


def test_what_is_computed_elsewhere_under_a_list_of_names_is_here() -> None:
    named = [f"{pair}/{name}" for pair in ("drift", "mismatch") for name in DRIFT_METRICS]
    named += [f"correction/rollout_rs_{mode}{rows}_masked_fraction" for mode in RS_MODES for rows in ("", "_seq")]
    assert [name for name in named if len(vocabulary.find(name)) != 1] == []


def test_every_term_says_what_it_means_and_where_it_is_from() -> None:
    for row in vocabulary.rows():
        assert row.meaning and row.healthy, row
        assert bool(row.title) == bool(row.unit) and (row.title or not row.section), row
        assert (ROOT / "src" / "slipstream" / row.source).is_file(), row


def described(name: str) -> vocabulary.Metric:
    (row,) = vocabulary.find(name)
    found = vocabulary.describe(name)
    assert found is not None and found.meaning == row.meaning
    return found


def test_the_row_of_a_name_has_its_title_its_label_and_its_unit() -> None:
    names = ("loss", "reward/math", "reward/mine/part", "teacher/main/kl", "guard/ess", "length/max")
    assert [(described(name).label, described(name).title) for name in names] == [
        ("loss", "Loss"), ("math", "Reward math"), ("mine/part", "Reward mine/part"),
        ("KL to teacher main", "KL to teacher main"), ("", "Guard ess"), ("length", ""),
    ]  # fmt: skip
    assert [described(f"reward/{name}").is_share for name in ("exact", "math", "mine")] == [True, True, False]
    assert [described(name).text(0.12345) for name in ("truncated", "loss", "reward/math", "reward/mine")] == [
        "12.3%", "0.1235", "12.3%", "0.123",
    ]  # fmt: skip
    assert vocabulary.describe("los") is None


def test_a_band_is_said_and_holds_the_numbers_that_it_says() -> None:
    kl, ess = described("mismatch/kl").band, described("drift/ess_row").band
    assert kl is not None and str(kl) == "below 0.02; investigate from 0.05 on"
    assert ess is not None and str(ess) == "above 0.5"
    assert [value in kl for value in (-0.1, 0.02, 0.021)] == [True, True, False]
    assert [value in ess for value in (0.49, 0.5, 2.0)] == [False, True, True]
    assert described("loss").band is None


def test_every_reason_for_a_missing_reward_is_in_the_vocabulary() -> None:
    code = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    causes = set(re.findall(r'Ungraded\(\s*"(\w+)"', code))
    assert causes >= {"timeout", "crash", "length"}
    assert [cause for cause in {"refused", ENDPOINT_DOWN, *causes} if not vocabulary.find(f"ungraded/{cause}")] == []
