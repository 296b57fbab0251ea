"""Advice on runs that are written by hand: each cause just beyond its threshold is named, and just within it is not."""

import json
import math
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from math import sin
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from slipstream.cli import main, split_overrides
from slipstream.config.file import parse, to_toml
from slipstream.metric_names import find, names
from slipstream.reporting.advice import drift, running
from slipstream.reporting.advice import measurements as readings
from slipstream.reporting.advice.drift import engines_differ as differs
from slipstream.reporting.advice.drift import rejection
from slipstream.reporting.advice.measurements import Case, Level, level
from slipstream.reporting.advice.tree import (
    ADVICE_RULES,
    RULES_BY_NAME,
    TESTS,
    Advice,
    advise,
    answer_of,
    changed_config,
    is_legal,
    read,
)
from support.advice_examples import (
    ALONE,
    EXAMPLES,
    FRESH,
    FRESHNESS,
    GETS_WORSE,
    HALF,
    POLICY,
    SYNC,
    Example,
    Value,
    after,
    config_of,
    drifting,
    engines,
    lines_of,
    rising,
    samples,
    worth,
)

ROOT = Path(__file__).parents[2]


def named(advice: Advice) -> list[str]:
    return [name for answer in advice.answers for name in (answer.name, *answer.explains)]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_cause_is_named_first_beyond_its_threshold_and_not_at_all_within(example: Example) -> None:
    sick = advise(example.sick)
    assert (sick.answers[0].name, sick.answers[0].weight) == (example.name, example.weight), named(sick)
    assert example.name not in named(advise(example.sound))


def test_every_answer_has_a_test_and_an_example() -> None:
    assert [rule.name for rule in ADVICE_RULES] == list(TESTS)
    assert set(TESTS) == {example.name for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_what_is_to_be_written_is_legal_in_this_run_and_does_something(example: Example) -> None:
    case = example.sick
    for answer in advise(case).answers:
        assert answer.change or answer.run or not RULES_BY_NAME[answer.name].change.startswith("`"), answer
        if not answer.change:
            continue
        _, overrides = split_overrides(["train", *shlex.split(answer.cli)])
        pasted = parse(tomllib.loads(to_toml(case.config)), overrides, say=str)
        assert pasted == changed_config(case.config, answer.change) != case.config
        assert tomllib.loads(answer.toml).keys() <= {key.partition(".")[0] for key in answer.change}


@pytest.mark.parametrize("freshness, keys", [
    ({}, {"freshness.threshold", "freshness.kappa_f"}),
    ({"refresh": "never"}, {"freshness.threshold"}),
    ({"weight": "lag"}, {"freshness.kappa_f"}),
    ({"weight": "equal", "refresh": "fixed"}, set()),
])  # fmt: skip
def test_of_thresholds_those_are_suggested_that_do_something(freshness: Mapping[str, Any], keys: set[str]) -> None:
    config = config_of({**FRESHNESS, "freshness": freshness})
    advice = advise(Case(config, lines_of({"freshness/buffer_f": 0.3}), ledger=worth(0.1)))
    found = [answer.change for answer in advice.answers if answer.name == "freshness thresholds"]
    assert [set(change) for change in found] == ([keys] if keys else [])


def test_coefficients_of_freshness_follow_from_the_measured_drift() -> None:
    """At √D = 0.2, alpha = ln 2 / 0.2 halves the weight of the median sample; the anchor is a tenth of the loss.

    The largest drift of ten updates counts. Thresholds are suggested only when the coefficients are right.
    """
    lines = lines_of({"freshness/roll": 0.04, "distill/loss": -0.8, "freshness/buffer_f": 0.05})
    config = config_of({"freshness": {}, "schedule": {"kind": "async", "tau": 2}})
    for ledger in (drifting(0.04), drifting(0.04, later=0.0004)):
        answers = advise(Case(config, lines, ledger=ledger)).answers
        [change] = [answer.change for answer in answers if answer.name.startswith("freshness")]
        assert change == {"freshness.alpha": 3.5, "freshness.anchor": 2.0, "freshness.cooldown": 6}
    assert not [answer for answer in advise(Case(config_of(SYNC), lines)).answers if "freshness" in answer.name]


# --- what is well, and what is young ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, SYNC, {"schedule": {"kind": "step_off", "k": 2}}, POLICY, HALF], ids=str)
def test_nothing_is_wrong_with_a_run_that_is_well(config: Mapping[str, Any]) -> None:
    metrics = (FRESH if config is SYNC else {}) | (ALONE if config is POLICY else {})
    assert advise(Case(config_of(config), lines_of(metrics), samples=samples(0.4, 0.5))).answers == ()


def test_a_threshold_is_not_crossed_by_noise() -> None:
    """The mean is beyond it, and the updates scatter so far that it might as well not be."""
    metrics: dict[str, Value] = {"drift/k3_kl": after(1, 0.06), **GETS_WORSE}
    sure = Case(config_of({}), lines_of(metrics, noise=0.002))
    noisy = Case(
        config_of({}), [line | {"drift/k3_kl": 0.06 + 0.05 * sin(9.0 * n)} for n, line in enumerate(sure.lines)]
    )
    assert named(advise(sure))[0] == "staleness"
    assert "staleness" not in named(advise(noisy))


@pytest.mark.parametrize("updates", range(1, 20))
def test_a_young_run_says_so_and_is_accused_of_nothing_that_takes_time(updates: int) -> None:
    advice = advise(Case(config_of({}), lines_of({}, updates)))
    assert not advice.enough and advice.answers == ()


def test_engines_that_differ_are_found_at_the_first_update() -> None:
    line = lines_of({"drift/kl": 0.03, "drift/k3_kl": 0.03, "drift/kl/lag_0": 0.03}, 1)
    assert named(advise(Case(config_of({}), line))) == ["engine mismatch"]


def test_a_run_without_updates_is_nothing_to_speak_of() -> None:
    assert advise(Case(config_of({}), [])) == Advice((), 0)


# --- upstream first ---------------------------------------------------------------------------------------------------


def test_a_mismatch_hides_what_it_looks_like_and_says_so() -> None:
    metrics: dict[str, Value] = {
        **engines(kl=0.2, k3_kl=0.2, probs_pearson=0.8),
        **GETS_WORSE,
        "drift/kl/lag_0": 0.2,
        "drift/kl/lag_1": 0.25,
        "drift/k3_kl": after(1, 0.3),
        "drift/chi2_token": 2.0,
        "drift/ess": 0.4,
        "distill/clip_fraction": 0.3,
    }
    (answer,) = advise(Case(config_of({}), lines_of(metrics))).answers
    assert answer.name == "engine mismatch"
    assert set(answer.explains) >= {"staleness", "step too large", "variance blow-up", "clip saturation"}


def test_one_update_that_goes_too_far_is_not_called_staleness() -> None:
    leaps = lines_of({"drift/k3_kl": after(1, 0.3), "drift/kl/lag_1": 0.1, **GETS_WORSE})
    creeps = lines_of({"drift/k3_kl": after(1, 0.3), "drift/kl/lag_1": 0.01, **GETS_WORSE})
    assert named(advise(Case(config_of({}), leaps)))[:2] == ["step too large", "staleness"]
    assert named(advise(Case(config_of({}), creeps)))[0] == "staleness"


@pytest.mark.parametrize(
    "metrics, config, lr",
    [
        # a step whose KL of 2 was measured is √(0.02 / 2) = 0.1 of its size
        ({"drift/kl/lag_1": 2.0, **GETS_WORSE}, {}, pytest.approx(1e-4, rel=0.05)),
        ({"drift/kl/lag_1": 0.08, **GETS_WORSE}, {}, pytest.approx(5e-4, rel=0.05)),
        ({**FRESH, **GETS_WORSE}, SYNC, pytest.approx(1e-4, rel=0.05)),
    ],
)
def test_a_step_that_is_too_large_is_aimed_at_by_what_was_measured(
    metrics: Mapping[str, Value], config: Mapping[str, Any], lr: Any
) -> None:
    answer = advise(Case(config_of(config), lines_of(metrics))).answers[0]
    assert answer.name == "step too large" and answer.change == {"learner.lr": lr}


def test_a_limit_is_one_that_was_crossed() -> None:
    """In so short a run there is no best KL, which must not make the limit NaN."""
    lines = lines_of({"teacher/kl": after(1, 3.0, 0.4), "reward/exact": None}, updates=6)
    answer = advise(Case(config_of({}), lines)).answers[0]
    assert answer.name == "step too large" and answer.limit == pytest.approx(0.8, rel=0.02)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_hides_nothing(value: float) -> None:
    lines = lines_of({"drift/kl": 0.03, "drift/k3_kl": 0.03, "drift/kl/lag_0": 0.03})
    broken = [line | {"teacher/kl": value, "grad_norm": value} for line in lines]
    assert named(advise(Case(config_of({}), broken)))[0] == "engine mismatch"


@pytest.mark.parametrize("device, written", [("cpu", False), ("auto", False), ("cuda", True)])
def test_bfloat16_is_for_gpus_only(device: str, written: bool) -> None:
    """Small products are not faster in bfloat16 on any CPU."""
    config = config_of({"runtime": {"device": device, "kind": "local"}})
    found = running.slow_learner(Case(config, lines_of({"seconds/data": 0.05, "groups/ready": 40})))
    assert found is not None and ({"learner.compute_dtype": "bfloat16"} in found.changes) == written


def test_a_slow_learner_of_a_large_student_on_a_cpu_gains_from_threads_and_perhaps_from_bfloat16() -> None:
    """The processor decides about bfloat16, so the answer is the command that measures it."""
    config = config_of({"runtime": {"device": "cpu", "kind": "local"}})
    case = Case(config, lines_of({"seconds/data": 0.05, "groups/ready": 40}), large=True)
    found = running.slow_learner(case)
    assert found is not None and list(found.changes) == [{"learner.threads": 2}]
    assert found.run == "slipstream config RUN/config.toml --check | grep bfloat16"


def test_a_student_that_ran_away_is_not_taken_for_a_wrong_teacher() -> None:
    ran = lines_of({"teacher/kl": lambda update: min(0.4 + 0.5 * update, 5.0)})
    case = Case(config_of({}), ran, samples=tuple(samples(0.5, 0.5, other=True)))
    assert "wrong teacher" not in named(advise(case))


def test_what_is_worth_an_eye_hides_nothing_that_is_wrong() -> None:
    advice = advise(Case(config_of({}), lines_of({"drift/kl/lag_1": 0.08, "truncated": 0.6})))
    assert [(answer.name, answer.weight) for answer in advice.answers] == [
        ("truncated answers", "wrong"),
        ("step too large", "watch"),
    ]


def test_no_setting_gets_two_values() -> None:
    """A step that is too large asks for a lower learning rate, and a student without progress for a higher one."""
    lines = lines_of({"drift/kl/lag_1": 0.08, "teacher/kl": 0.5, "reward/exact": 0.3})
    first, second = (
        answer for answer in advise(Case(config_of({}), lines)).answers if answer.name != "agreement unknown"
    )
    assert (first.name, second.name) == ("step too large", "no progress")
    assert first.change["learner.lr"] < 1e-3 and second.change == {}


def test_names_of_what_is_hidden_are_names_further_down() -> None:
    order = [rule.name for rule in ADVICE_RULES]
    for rule in ADVICE_RULES:
        assert {
            name for name in rule.hides if name not in order or order.index(name) <= order.index(rule.name)
        } == set()


def test_a_kl_that_rises_is_no_harm_where_it_is_not_what_is_minimised() -> None:
    rises: dict[str, Value] = {**FRESH, "teacher/kl": rising(0.4, 0.8), "reward/exact": 0.3}
    for changes, metrics in (
        ({"loss": {"kind": "forward_kl"}}, {"distill/loss": rising(0.4, 0.2)}),
        ({"teachers": {"main": {"model": "self", "context": "{prompt}", "follow": {"ema": 0.9}}}}, {}),
    ):
        assert named(advise(Case(config_of({**SYNC, **changes}), lines_of({**rises, **metrics})))) == []
    assert named(advise(Case(config_of(SYNC), lines_of(rises)))) == ["step too large"]


def test_a_student_that_becomes_sure_of_what_its_teacher_is_sure_of_does_not_collapse() -> None:
    lines = lines_of({"student/entropy": rising(0.5, 0.02), "teacher/kl": 0.5, "reward/exact": rising(0.3, 0.6)})
    assert advise(Case(config_of({}), lines)).answers == ()


def test_a_student_that_runs_away_at_once_is_not_taken_for_a_wrong_template() -> None:
    """Its answers are strange from the first token on; but at the first update they were not."""
    lines = lines_of({**FRESH, "teacher/kl": lambda update: min(1.0 + update, 6.0), "reward/exact": 0.1})
    case = Case(config_of(SYNC), lines, samples=samples(6.0, 3.0))
    assert named(advise(case))[0] == "step too large" and "wrong template" not in named(advise(case))


def test_weights_that_do_not_arrive_are_told_from_engines_that_never_agreed() -> None:
    never = advise(Case(config_of({}), lines_of({"drift/kl/lag_0": 0.1, "drift/k3_kl": 0.1}))).answers[0]
    later = advise(
        Case(config_of({}), lines_of({"drift/kl/lag_0": after(1, 0.1), "drift/k3_kl": after(1, 0.1)}))
    ).answers[0]
    assert never.name == later.name == "engine mismatch"
    assert "agree at the first update" in later.cause and "agree at the first update" not in never.cause


def test_keys_of_older_weights_are_no_bug_in_an_engine() -> None:
    lines = lines_of({"drift/kl/lag_0": 0.01})
    assert named(advise(Case(config_of({"sampler": {"on_publish": "reuse"}}), lines))) == []
    (answer,) = advise(Case(config_of({"sampler": {"on_publish": "reuse"}}), lines_of({"drift/kl/lag_0": 0.1}))).answers
    assert answer.change == {"sampler.on_publish": "rebuild"}


def test_accuracy_that_falls_while_the_teacher_comes_nearer_is_the_teacher() -> None:
    found = [0.5, 0.6, 0.3]
    evaluations = [{"kind": "eval", "update": 20 * n, "accuracy": a, "samples": 400} for n, a in enumerate(found)]
    (answer,) = advise(Case(config_of({}), lines_of({"reward/exact": None}), evaluations)).answers
    assert (answer.name, answer.metric, answer.value) == ("teacher lowers rewards", "accuracy", 0.3)


# --- the smallest change ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, change",
    [
        ({"kind": "async", "tau": 4}, {"schedule.tau": 2}),
        ({"kind": "async", "tau": 1}, {"schedule.tau": 0}),
        ({"kind": "async", "tau": 4, "publish_every": 4}, {"schedule.publish_every": 2}),
        ({"kind": "async", "tau": "auto"}, {"schedule.drift": 0.01}),
        ({"kind": "async", "tau": "auto", "publish_every": "auto"}, {"schedule.drift": 0.01}),
        ({"kind": "replay", "k": 8}, {"schedule.k": 4}),
        ({"kind": "step_off", "k": 1}, {"schedule.kind": "periodic"}),
    ],
    ids=str,
)
def test_staleness_is_halved_as_the_schedule_has_it(given: dict[str, Any], change: dict[str, Any]) -> None:
    lines = lines_of({"drift/k3_kl": after(1, 0.1), **GETS_WORSE})
    assert advise(Case(config_of({"schedule": given}), lines)).answers[0].change == change


@pytest.mark.parametrize(
    "given, change",
    [
        ({"tau": 4}, {"schedule.publish_every": 2}),
        ({"tau": 4, "on_publish": "drain"}, {"schedule.on_publish": "keep"}),
        ({"tau": "auto"}, {"schedule.publish_every": "auto"}),
        ({"tau": "auto", "publish_every": "auto"}, {}),
    ],
    ids=str,
)
def test_a_slow_publish_is_made_rarer_or_left_to_the_run(given: dict[str, Any], change: dict[str, Any]) -> None:
    case = Case(config_of({"schedule": {"kind": "async", **given}}), lines_of({"seconds/weights": 0.6}))
    assert [(answer.name, answer.change) for answer in advise(case).answers] == [("slow publish", change)]


ICEPOP = {"correction.preset": "decoupled_token_icepop"}
GSPO = {"policy.loss": "gspo", "policy.options": {"clip_low": 3e-4, "clip_high": 4e-4}}
PLAIN_GRADIENT = {"policy": {"loss": "reinforce"}}
NO_TAU: dict[str, Any] = {"schedule": {"kind": "async", "tau": 0}}


def rejects(low: float, high: float) -> dict[str, Any]:
    return {"correction.rs": {"seq_mean_k1": [low, high]}}


PLAIN = {"policy.loss": "reinforce", "policy.options": {}}


@pytest.mark.parametrize(
    ("given", "metrics", "change"),
    [
        # clip saturation: one epoch, smaller steps; far above the limit the unit of the objective
        ({"learner": {"epochs": 2}}, {"policy/clip_fraction": rising(0.1, 0.5)}, {"learner.epochs": 1}),
        ({}, {"policy/clip_fraction": rising(0.1, 0.3)}, {"learner.lr": 5e-4}),
        ({}, {"policy/clip_fraction": rising(0.1, 0.5)}, GSPO),
        (
            {"policy": {"loss": "gmpo"}},
            {"policy/clip_fraction": rising(0.1, 0.5)},
            {"correction.preset": "bypass_pg_geo_rs_token_tis", **PLAIN, **rejects(0.929, 1.076)},
        ),
        # responses that grow in spite of the guard
        (
            {"guards": {"length_surge": {}}},
            {"length/mean": rising(20, 30)},
            {"correction.preset": "bypass_pg_geo_rs", **PLAIN, **rejects(0.939, 1.064)},
        ),
        # staleness that no schedule can reduce: a correction, by age and length
        (
            {**NO_TAU, **PLAIN_GRADIENT},
            {"drift/k3_kl": after(1, 0.06), "lag/mean": 1, "length/max": 40},
            {"correction.preset": "bypass_pg_is", "correction.is_level": "token"},
        ),
        (
            {**NO_TAU, **PLAIN_GRADIENT},
            {"drift/k3_kl": after(1, 0.06), "drift/chi2_token": 0.2, "lag/mean": 1, "length/max": 90},
            {"correction.preset": "bypass_pg_geo_rs_token_tis", **rejects(0.754, 1.326)},
        ),
        (
            NO_TAU,
            {"drift/k3_kl": after(1, 0.06), "drift/chi2_token": 0.2, "lag/mean": 1, "length/max": 90},
            {"correction.preset": "bypass_ppo_clip_geo_rs", **rejects(0.754, 1.326)},
        ),
        (NO_TAU, {"drift/k3_kl": after(1, 0.06), "lag/mean": 1, "length/max": 40}, {"learner.lr": 5e-4}),
        ({"reuse": {"times": 4}}, {"drift/k3_kl": after(1, 0.06), "lag/mean": 1}, {"reuse.times": 2}),
    ],
)
def test_a_policy_loss_gets_smaller_steps_then_another_unit(
    given: dict[str, Any], metrics: dict[str, Value], change: dict[str, Any]
) -> None:
    answers = advise(
        Case(config_of({**POLICY, "learner": {"lr": 1e-3}, **given}), lines_of({**ALONE, **metrics}))
    ).answers
    assert answers[0].change == change


def test_experts_that_differ_get_a_band_on_the_ratio() -> None:
    for flips, change in ({}, {"correction.preset": "disabled"}), ({"router/flips": 0.1}, ICEPOP):
        config = config_of({**POLICY, "correction": {"preset": "decoupled_token_is"}})
        found = differs(Case(config, lines_of({**ALONE, **engines(kl=0.3, k3_kl=0.3), **flips})))
        assert found is not None and found.changes[0] == change


HELPED: dict[str, Any] = {"loss": {"kind": "forward_kl"}, "mix": {"source": "teacher"}, "sft": {"updates": 5}}


@pytest.mark.parametrize(
    ("given", "change"),
    [
        (HELPED, {"sampler.teacher_replaces": 25}),
        ({**HELPED, "sampler": {"top_p": 0.9}}, {"sampler.fusion.alpha": 0.5}),
    ],
)
def test_a_student_that_all_else_left_far_gets_help_in_its_rollouts(
    given: dict[str, Any], change: dict[str, Any]
) -> None:
    lines = lines_of({"truncated": 0.9, "teacher/kl": rising(3.0, 1.8)})
    first = advise(Case(config_of(given), lines)).answers[0]
    assert first.name == "student too far" and first.change.items() >= change.items()


def test_rollouts_that_cannot_be_faster_are_learned_from_twice() -> None:
    """With rewards alone a later use teaches nothing, and none is proposed."""
    lines = lines_of({"seconds/data": 0.6})
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {"reuse.times": 2}), (POLICY, {})]
    for given, change in cases:
        config = config_of({**given, "sampler": {**given.get("sampler", {}), "replicas": "auto"}})
        answers = {each.name: each.change for each in advise(Case(config, lines)).answers}
        assert answers["slow sampler"] == change


def test_a_change_that_the_config_refuses_is_passed_over() -> None:
    """With guards.kl tau may not be 0, and so the learning rate is halved."""
    config = config_of({"schedule": {"kind": "async", "tau": 1}, "guards": {"kl": {}}})
    assert not is_legal(config, {"schedule.tau": 0})
    lines = lines_of({"drift/k3_kl": after(1, 0.1), **GETS_WORSE})
    assert advise(Case(config, lines)).answers[0].change == {"learner.lr": 5e-4}


BAND = {"correction": {"preset": "bypass_pg_token_icepop"}}


@pytest.mark.parametrize(
    ("given", "metrics", "change"),
    [
        ({}, {"drift/chi2_token": 1.5}, {"correction.preset": "bypass_ppo_clip_geo_rs", **rejects(0.412, 2.426)}),
        (
            PLAIN_GRADIENT,
            {"drift/chi2_token": 1.5, "length/mean": 400},
            {"correction.preset": "bypass_pg_geo_rs", **rejects(0.574, 1.74)},
        ),
        (
            PLAIN_GRADIENT,
            {"drift/chi2_token": 2.5},
            {"correction.preset": "bypass_pg_geo_rs_token_tis", **rejects(0.324, 3.087)},
        ),
        (
            {**PLAIN_GRADIENT, "correction": {"preset": "bypass_pg_geo_rs"}},
            {"drift/chi2_token": 1.5, "correction/rollout_rs_masked_fraction": 0.05},
            {"correction.preset": "bypass_pg_token_icepop"},
        ),
        (
            {**PLAIN_GRADIENT, "correction": {"preset": "bypass_pg_geo_rs"}},
            {"drift/chi2_token": 1.5, "correction/rollout_rs_masked_fraction": 0.15},
            {"correction.preset": "bypass_pg_geo_rs_token_tis", **rejects(0.412, 2.426)},
        ),
        (
            {**PLAIN_GRADIENT, "correction": {"preset": "bypass_pg_geo_rs"}},
            {"drift/chi2_token": 1.5, "correction/rollout_rs_masked_fraction": 0.3},
            {"schedule.tau": 2},
        ),
        (
            {**PLAIN_GRADIENT, **BAND},
            {"drift/chi2_token": 1.5, "correction/rollout_is_ratio_fraction_high": 0.1}
            | {"correction/rollout_is_ratio_fraction_low": 0.2, "correction/rollout_rs_masked_fraction": 0.0},
            {"schedule.tau": 2},
        ),
        ({"policy": {"loss": "cispo"}}, {"drift/chi2_token": 1.5}, {"schedule.tau": 2}),
        ({"correction": {"preset": "bypass_ppo_clip_geo_rs"}}, {"drift/chi2_token": 2.5}, {"schedule.tau": 2}),
        (
            {"reuse": {"times": 2, "max_lag": 3}, "policy": {"loss": "cispo"}},
            {"drift/chi2_token": 1.5},
            {"schedule.tau": 2},
        ),
        ({}, {"drift/chi2_token": 4.5}, {"schedule.tau": 2}),
    ],
)
def test_variance_escalates_from_rejection_to_weights_to_the_cause(
    given: dict[str, Any], metrics: dict[str, Value], change: dict[str, Any]
) -> None:
    lines = lines_of({**ALONE, "reward/exact": 0.3, **metrics})
    config = config_of({**POLICY, "learner": {"batch_size": 32, "minibatches": 2}, **given})
    (answer,) = [each for each in advise(Case(config, lines)).answers if each.name == "variance blow-up"]
    assert answer.change == change


@pytest.mark.parametrize("preset", ["decoupled_token_is", "decoupled_seq_is", "decoupled_geo_rs"])
def test_a_correction_of_the_engines_hides_no_drift_of_stale_tokens(preset: str) -> None:
    """Its own effective sample size is 1 and it rejects nothing, because the engines agree."""
    config = config_of({**POLICY, "correction": {"preset": preset}})
    nothing = {"correction/ess": 1.0, "correction/rollout_rs_masked_fraction": 0.0, "reward/exact": 0.3}
    found = [each.name for each in advise(Case(config, lines_of({**ALONE, **nothing, "drift/ess": 0.3}))).answers]
    assert found == ["variance blow-up"]
    answers = advise(Case(config, lines_of({**ALONE, **nothing, "drift/chi2_token": 0.5}))).answers
    assert [each.name for each in answers] == ([] if preset == "decoupled_geo_rs" else ["moderate drift"])


@pytest.mark.parametrize("tokens", [16, 400, 16_000])
@pytest.mark.parametrize("chi2", [0.02, 0.3, 2.5])
def test_proposed_bounds_keep_19_of_20_responses(chi2: float, tokens: int) -> None:
    """Log-ratios of tokens are normal, with mean −σ²/2, so that ratios have mean 1 and variance chi2."""
    case = Case(config_of(POLICY), lines_of({"drift/chi2_token": chi2, "length/mean": tokens}))
    low, high = map(math.log, rejection(case)["correction.rs"]["seq_mean_k1"])
    variance = math.log1p(chi2)
    mean = NormalDist(-variance / 2, math.sqrt(variance / tokens))
    assert mean.cdf(high) - mean.cdf(low) > 0.95


def test_bounds_of_engines_come_from_the_difference_of_engines() -> None:
    rejected = {"correction/rollout_rs_masked_fraction": 0.4, "mismatch/chi2_token": 1e-4, "drift/chi2_token": 0.9}
    case = Case(config_of({**POLICY, "correction": {"preset": "decoupled_geo_rs"}}), lines_of({**ALONE, **rejected}))
    (answer,) = [each for each in advise(case).answers if each.name == "too much rejected"]
    assert answer.change == rejects(0.99, 1.011)


def test_a_change_reads_as_it_is_pasted() -> None:
    found = RULES_BY_NAME["length surge"].test(EXAMPLES[[e.name for e in EXAMPLES].index("length surge")].sick)
    assert found is not None
    answer = answer_of(RULES_BY_NAME["length surge"], found, config_of({}))
    assert answer.cli == "--learner.lr 0.0005 --guards.length_surge '{}'"
    assert answer.toml == "[learner]\nlr = 0.0005\n[guards]\nlength_surge = {}"


def test_answers_get_as_much_room_as_student_and_teacher_have() -> None:
    """A prompt has 49 tokens at the most: 129 − 80."""
    config = config_of({"sampler": {"max_tokens": 80, "max_length": 129}})
    case = Case(config, lines_of({"truncated": 0.3}), context=160)
    change = {"sampler.max_tokens": 111, "sampler.max_length": None}
    (answer,) = advise(case).answers
    assert answer.change == change and answer.cli == "--sampler.max_tokens 111 --sampler.max_length none"
    assert answer.toml == "[sampler]\nmax_tokens = 111\n# without max_length"
    assert advise(replace(case, context=129)).answers[0].change == {}, "there is no room"
    assert advise(replace(case, context=None)).answers[0].change["sampler.max_tokens"] == 160


def test_what_models_have_room_for_is_read_where_they_are(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {})
    assert (read(run).context, read(run).vocabulary) == (160, 39)
    text = (run / "config.toml").read_text().replace("builtin:student", "/gone/student").replace("builtin:t", "./t")
    (run / "config.toml").write_text(text)
    assert (read(run).context, read(run).vocabulary) == (None, None)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_levels_by_hand() -> None:
    """Ten numbers, half 1 and half 3: mean 2, standard deviation √(10/9), error √(1/9)."""
    found = level([1.0, 3.0] * 5)
    assert (found.mean, found.error) == (2.0, pytest.approx(1 / 3))
    assert found.over(0.99) and not found.over(1.01) and found.under(3.01)
    assert not Level(2.0).over(-1e9), "of one number nothing is known"
    assert readings.pooled_kl([(0.02, 100), (0.05, 200)]) == Level(
        pytest.approx(0.04), pytest.approx((0.08 / 300) ** 0.5)
    )
    assert not readings.pooled_kl([(0.5, 63)]).over(0), "too few tokens"


def test_accuracy_falls_by_a_tenth_and_beyond_chance_or_not_at_all() -> None:
    def fell(*found: float, samples: int = 1000) -> bool:
        evaluations = [{"accuracy": each, "samples": samples} for each in found]
        return Case(config_of({}), lines_of({}), evaluations).fall is not None

    assert fell(0.3, 0.6, 0.5) and not fell(0.3, 0.6, 0.56) and not fell(0.3, 0.6, 0.5, samples=50)


# --- the page ---------------------------------------------------------------------------------------------------------


def run_of(
    where: Path, metrics: Mapping[str, Value], config: Mapping[str, Any] | None = None, updates: int = 60
) -> Path:
    where.mkdir()
    (where / "config.toml").write_text(to_toml(config_of(config or {})))
    (where / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines_of(metrics, updates)))
    return where


class TextScores:
    """Output of `slipstream advise` about a run."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: object) -> None:
        self.code = main(["advise", *map(str, argv)])
        self.out, self.err = capsys.readouterr()


def test_a_person_is_told_what_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", {"drift/k3_kl": after(1, 0.1), **GETS_WORSE})
    said = TextScores(capsys, run)
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert lines[:2] == [f"{run}: 60 of 100 updates", "first problem to solve: staleness"]
    assert "  write    --schedule.tau 2" in lines
    assert any(line.startswith("  seen     drift/k3_kl = 0.") and line.endswith(", limit 0.05") for line in lines)


def test_a_run_that_is_well_and_one_that_is_young(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def verdict(name: str, updates: int) -> str:
        return TextScores(capsys, run_of(tmp_path / name, {}, updates=updates)).out.splitlines()[1]

    assert verdict("well", 60) == "nothing is wrong"
    assert verdict("young", 3).startswith("nothing is wrong; too few updates")
    assert verdict("unborn", 0) == "no advice yet: no update is finished"


def test_supervised_updates_are_finished_and_give_no_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", {"sft": 1.0}, updates=7)
    assert TextScores(capsys, run).out.splitlines()[:2] == [
        f"{run}: 7 of 100 updates",
        "no advice yet: only supervised updates are finished",
    ]
    assert json.loads(TextScores(capsys, run, "--json").out)["updates"] == 7


def test_resume_is_proposed_only_if_a_checkpoint_allows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", {"truncated": 0.6})

    def hint() -> str:
        return TextScores(capsys, run).out.splitlines()[-1]

    assert hint() == "Add the text after `write` to `slipstream train CONFIG`."
    (run / "checkpoints" / "60").mkdir(parents=True)
    (run / "checkpoints" / "60" / "state.json").touch()
    assert hint().endswith(f"continue the run with `slipstream resume {run} --change KEY`.")
    (run / "final").mkdir()
    assert hint().endswith(f"`slipstream resume {run} --change KEY --updates N`, with N above 100.")


def test_a_machine_is_told_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(TextScores(capsys, run_of(tmp_path / "run", {"truncated": 0.6}), "--json").out)
    (answer,) = found["answers"]
    assert (found["wrong"], found["updates"], answer["name"]) == (True, 60, "truncated answers")
    assert answer["cli"] == "--sampler.max_tokens 100" and answer["toml"] == "[sampler]\nmax_tokens = 100"


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = TextScores(capsys, tmp_path)
    assert (said.code, said.err) == (2, f"error: {tmp_path} holds no run: there is no config.toml in it\n")
    run = run_of(tmp_path / "run", {})
    (run / "metrics.jsonl").write_text("[\n[\n")
    said = TextScores(capsys, run)
    assert said.err.startswith(f"error: {run}/metrics.jsonl is damaged: ") and said.err.count("\n") == 1


def test_a_run_that_is_being_written_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "upd')
    assert len(read(run).lines) == 60


def test_metrics_that_are_read_exist() -> None:
    names = [
        name for rule in ADVICE_RULES for name in rule.reads.replace(";", "").split() if "/" in name or "_" in name
    ]
    known = {"teacher_logp"}
    assert {name.rstrip(",") for name in names if not is_known(name.rstrip(","))} <= known


def is_known(name: str) -> bool:
    return bool(find(name)) or name in names()


def test_examples_are_about_metrics_that_exist() -> None:
    assert {name for example in EXAMPLES for name in example.beyond if not is_known(name)} == set()


def test_a_curriculum_whose_kl_rises_is_no_wrong_direction() -> None:
    lines = lines_of({"teacher/kl": rising(1.0, 9.0), "distill/loss": rising(1.0, 9.0), "reward/exact": None}, 12)
    small = {"learner": {"lr": 1e-4}}
    assert drift.wrong_direction(Case(config_of(small), lines)) is not None
    harder = {"data": {"order": "curriculum", "curriculum": {"column": "level"}}}
    assert drift.wrong_direction(Case(config_of({**small, **harder}), lines)) is None


def test_of_workers_that_died_equally_often_the_first_by_name_is_shown() -> None:
    lines = lines_of({"restarts/sampler": 3.0, "restarts/learner": 3.0, "restarts/scorer": 3.0}, noise=0)
    found = running.restarted_workers(Case(config_of({}), lines))
    assert found is not None and found.metric == "restarts/learner"
