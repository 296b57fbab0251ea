"""Numbers of advice and of the last lines of a run: which updates, samples and tokens they are about."""

import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.file import parse
from slipstream.config.schema import Config
from slipstream.metrics import digest
from slipstream.pipeline.control.health import History, still_reward
from slipstream.reporting.advice import learning, running
from slipstream.reporting.advice.measurements import Case
from slipstream.reporting.report.runs import Reading, in_use
from slipstream.reporting.terminal.progress import from_to
from slipstream.run_dir.reading import RunDir

TEACHER = {"teachers": {"main": {"model": "builtin:teacher"}}}
SELF = {"teachers": {"main": {"model": "self", "context": "{prompt}{ground_truth}", "follow": {"ema": 0.99}}}}


def config(**sections: Any) -> Config:
    return parse({"student": "builtin:student", "task": {"reward": "exact"}, **TEACHER, **sections}, say=str)


def lines(count: int, **metrics: Any) -> list[dict[str, Any]]:
    """Updates of a run; a metric is a number, or a function of the update."""
    rng = random.Random(0)
    whole: dict[str, Any] = {"samples": 32.0, "tokens": 3000.0, "teacher/kl_error": 0.004}
    whole |= {"teacher/kl": lambda _: rng.gauss(0.5, 0.005)} | metrics
    return [
        {"kind": "train", "update": update}
        | {name: value(update) if callable(value) else value for name, value in whole.items()}
        for update in range(1, count + 1)
    ]


@pytest.mark.parametrize(("before", "after", "fell"), [(-1.0, -1.03, False), (-1.0, -1.2, True), (1.0, 0.8, True)])
def test_a_negative_reward_has_fallen_if_it_is_a_tenth_lower(before: float, after: float, fell: bool) -> None:
    rng = random.Random(1)
    course = lines(100, **{"reward/exact": lambda update: rng.gauss(before if update < 60 else after, 0.005)})
    assert (Case(config(), course).fall is not None) is fell


def test_a_penalty_that_is_never_needed_is_no_missing_reward() -> None:
    reward = {"reward": ["exact", "overlong"], "overlong": {"buffer": 8}}
    made = config(task=reward, sampler={"group": 4}, policy={})
    course = lines(60, **{"reward/exact": lambda update: update / 100, "reward/overlong": 0.0})
    assert learning.unrewarded(Case(made, course)) is None
    assert learning.unrewarded(Case(made, lines(60, **{"reward/exact": 0.0}))) is not None
    long = lines(made.health.reward, **{"reward/overlong": 0.0})
    assert still_reward(History((), long), made.health) is None
    long = lines(made.health.reward, **{"reward/overlong": -1.0})
    assert still_reward(History((), long), made.health) is not None


def test_a_teacher_that_follows_the_student_may_stay_as_far_from_it() -> None:
    assert learning.no_progress(Case(config(), lines(120))) is not None
    assert learning.no_progress(Case(config(**SELF), lines(120))) is None


def test_lost_work_is_a_share_of_new_work() -> None:
    reused = {"reuse/share": 0.75, "reuse/new_tokens": 750.0}
    lost = lines(60, thrown_tokens=lambda update: 500.0 * update, failed_samples=lambda update: 2.0 * update, **reused)
    found = running.discarded_tokens(Case(config(), lost)), running.failed_responses(Case(config(), lost))
    assert [each and round(each.value, 3) for each in found] == [0.4, 0.2]


def test_work_lost_in_the_supervised_stage_is_not_lost_by_the_updates_after_it() -> None:
    counters = {"thrown_tokens": 9000.0, "failed_samples": 100.0, "dropped": 30.0, "dropped/too old": 30.0}
    stage = {"update": 30, "sft": True, **counters}
    still = Case(config(), lines(60, **counters), supervised=stage)
    more = {name: lambda update, value=value: value * (1 + update) for name, value in counters.items()}
    worse = Case(config(), lines(60, **more), supervised=stage)
    for lost in running.discarded_tokens, running.failed_responses, running.dropped_groups:
        assert lost(still) is None and lost(worse) is not None


def test_the_mean_lag_of_a_run_is_that_of_tokens_which_the_student_drew() -> None:
    given = [line | {"lag/mean": 0.0, "lag/max": 0.0, "time": float(line["update"])} for line in lines(50)]
    drawn = [{**line, "update": line["update"] + 50, "time": line["time"] + 50.0} for line in given]
    drawn = [line | {"lag/mean": 2.0, "lag/max": 2.0, "lag/tokens_2": 3000.0} for line in drawn]
    assert digest([{**line, "seconds/update": 1.0} for line in given + drawn])["lag/mean"] == 2.0


def test_a_change_compares_only_updates_that_have_the_metric() -> None:
    course = [{"kind": "train", "update": update, "teacher/kl": 1.0} for update in range(1, 21)]
    for line in (course[0], course[-1]):
        line |= {"teacher/a/kl": 1.0}
    assert "KL to teacher a 1.000 → 1.000" in from_to(course)


def test_accuracy_on_a_set_that_has_left_the_config_has_no_error_bar(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    made = config(data={"eval": {"math": "m.jsonl"}}, eval={"every": 1, "n": {"math": 2}})
    evaluations = [{"set": name, "update": 0, "accuracy": 0.5, "samples": 8.0} for name in ("math", "code")]
    found = Reading("run", RunDir(tmp_path), made, {}, [], evaluations).held_out
    assert found["accuracy", "math"].errors == [0.25] and found["accuracy", "code"].errors == [0.0]


def test_sections_in_use_are_shown_with_their_defaults() -> None:
    assert "[reuse]" in in_use(config(reuse={}))
