"""Methods that would do nothing, count twice, or need what the schedule does not give are refused at the start."""

import inspect
import re
from itertools import product
from typing import Any, get_args

import pytest

from slipstream.config.file import parse
from slipstream.config.objective import CorrectionConfig, PolicyConfig
from slipstream.config.rewards import REWARDS
from slipstream.config.schema import Config
from slipstream.engines.sampling_options import eval_sampling, rollout_sampling
from slipstream.errors import ConfigError
from slipstream.estimators.options import options_of
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.tables.correction import PRESETS
from slipstream.estimators.tables.policy import POLICY_LOSSES
from slipstream.objective.columns import COLUMNS
from slipstream.objective.method import method_of
from slipstream.plan import engines
from slipstream.plan.facts import Facts
from slipstream.plan.notes import schedule_notes, whole_batch_reason
from slipstream.rewards.functions import BUILT_IN_REWARDS, MODEL_REWARDS

REQUIRED = inspect.Parameter.empty


def config(**sections: Any) -> Config:
    rl = {"student": "s", "sampler": {"group": 8}, "loss": {"weight": 0}, "policy": {}, "task": {"reward": "exact"}}
    return parse({name: value for name, value in (rl | sections).items() if value is not None})


DISTILLATION = {"loss": {}, "policy": None, "teachers": {"main": {"model": "t"}}}


def test_the_names_of_the_configuration_are_those_of_the_tables() -> None:
    for name, table in (("loss", POLICY_LOSSES), ("advantage", ADVANTAGES)):
        assert get_args(PolicyConfig.model_fields[name].annotation) == tuple(table)
    assert get_args(CorrectionConfig.model_fields["preset"].annotation) == tuple(PRESETS)
    assert {*BUILT_IN_REWARDS, *MODEL_REWARDS} == set(REWARDS)


def test_options_are_numbers_that_users_set_or_columns_that_the_program_computes() -> None:
    for name, each in ADVANTAGES.items():
        options = options_of(each.function)
        folded = {"weights"} if name.startswith("opob") else set()  # those of tokens are in its ‖g‖²
        assert set(options) == {*each.settings, *each.columns, *folded}, name
        assert {option for option, default in options.items() if default is REQUIRED} <= set(each.columns), name
    for name, loss in POLICY_LOSSES.items():
        options = options_of(loss.choose, loss.loss)
        assert {option for option, default in options.items() if default is not REQUIRED} == set(loss.settings), name
        assert set(options) - {"generator"} == {*loss.settings, *loss.columns}, name
    assert set().union(*(loss.columns for loss in POLICY_LOSSES.values())) <= COLUMNS.keys()
    assert set().union(*(each.columns.values() for each in ADVANTAGES.values())) <= COLUMNS.keys()


@pytest.mark.parametrize(
    ("loss", "preset"),
    [*product(POLICY_LOSSES, ["disabled"]), *product(sorted(set(POLICY_LOSSES) - {"oapl"}), ["decoupled_geo_rs"])],
)
def test_every_policy_loss_goes_without_rejection_and_all_but_one_with_it(loss: str, preset: str) -> None:
    method = method_of(config(policy={"loss": loss}, correction={"preset": preset}))
    assert f"1 · {loss} on grpo of exact; correction: {preset}" in str(method)


TWO_REWARDS = {"task": {"reward": ["exact", "math"]}}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "weights without a policy loss": (
        DISTILLATION | {"correction": {"preset": "decoupled_token_is"}},
        "correction.preset = 'decoupled_token_is' weighs a policy loss, and there is none",
    ),
    "a ratio that counts twice": (
        {"correction": {"preset": "bypass_pg_is"}},
        "correction.preset = 'bypass_pg_is': this correction is meant for loss reinforce or gpg, not vanilla",
    ),
    "a threshold of no weights": (
        {"correction": {"preset": "decoupled_geo_rs", "is_threshold": 3.0}},
        "correction.is_threshold does nothing: preset decoupled_geo_rs has no importance weights",
    ),
    "a bound of the wrong kind": (
        {"correction": {"preset": "decoupled_geo_rs", "rs": {"seq_mean_k3": [0.1, 0.2]}}},
        "correction: rs['seq_mean_k3'] must be one number above 0",
    ),
    "rejection by advantages that there are none of": (
        DISTILLATION | {"correction": {"preset": "decoupled_geo_rs", "rs": {"negative_seq": 0.1}}},
        "correction.rs.negative_seq rejects answers whose advantage is negative, and without [policy] there is none",
    ),
    "rejection by weights that are not kept": (
        {"correction": {"preset": "decoupled_geo_rs", "rs": {"seq_max_kl": 0.1}}, "learner": {"snapshots": 0}},
        "correction.rs.seq_max_kl compares with the weights that drew a token, and learner.snapshots = 0 keeps none",
    ),
    "rejection without a mode": (
        {"correction": {"rs": {"seq_mean_k3": 0.1}}},
        "correction: importance weights and rejection need a mode",
    ),
    "weights of no mode": (
        {"correction": {"is_level": "token"}},
        "correction: importance weights and rejection need a mode: choose a preset 'decoupled_…' or",
    ),
    "weights of rejection without a policy loss": (
        DISTILLATION | {"correction": {"preset": "decoupled_geo_rs", "is_level": "geometric"}},
        "correction.preset = 'decoupled_geo_rs' with is_level = 'geometric' weighs a policy loss, and there is none",
    ),
    "a level that counts a ratio twice": (
        {"correction": {"preset": "bypass_ppo_clip_geo_rs", "is_level": "turn"}},
        "correction.preset = 'bypass_ppo_clip_geo_rs' with is_level = 'turn': loss vanilla already holds the ratio",
    ),
    "a clip of no product": (
        {"correction": {"preset": "decoupled_token_is", "ctpo_clip": 0.1}},
        'correction.ctpo_clip does nothing: it is for correction.is_level = "cumulative"',
    ),
    "bounds with nothing to turn round": (
        {"correction": {"preset": "decoupled_seq_is_rs", "verl_compat": True}},
        "correction.verl_compat does nothing: it inverts bounds (L, U) of k1 rejection that are not (1/U, U)",
    ),
    "several rewards that are one": (
        {"policy": {"advantage": "gdpo"}},
        "policy.advantage = \"gdpo\" normalises each of several rewards by itself, and task.reward is 'exact' alone",
    ),
    "a KL in rewards that go nowhere": (
        TWO_REWARDS | {"policy": {"advantage": "gdpo"}, "reference": {"weight": 0.1, "into": "reward"}},
        'reference.into = "reward" would have no effect: write reference.into = "loss"',
    ),
    "weights of one reward": (
        {"policy": {"reward_weights": {"exact": 2.0}}},
        "policy.reward_weights weighs several rewards against each other, and task.reward is 'exact' alone",
    ),
    "weights of no reward": (
        TWO_REWARDS | {"policy": {"reward_weights": {"maths": 2.0}}},
        "policy.reward_weights: there is no reward 'maths'; did you mean 'math'?",
    ),
    "rewards that count nothing": (
        TWO_REWARDS | {"policy": {"reward_weights": {"exact": 0.0, "math": 0.0}}},
        "policy.reward_weights gives every reward weight 0",
    ),
    **{
        f"nothing for {advantage} to compare an answer with": (
            TWO_REWARDS | {"policy": {"advantage": advantage}, "sampler": {"group": 1}},
            f"policy.advantage = '{advantage}' compares the answers to one prompt, and sampler.group = 1",
        )
        for advantage in ("gdpo", "gpg", "opob", "optimal_token_baseline")
    },
    "evidence as an option": (
        {"policy": {"advantage": "remax", "advantage_options": {"greedy_rewards": 1.0}}},
        "policy.advantage_options of remax: it has none",
    ),
    "steps that could turn the sign of the KL": (
        {"reference": {"weight": 0.1, "control": "adaptive", "target": 0.1, "horizon": 12.8}},
        "reference.horizon = 12.8 is not above a fifth of learner.batch_size = 64",
    ),
    "an option of no loss": (
        {"policy": {"options": {"clip_hi": 0.3}}},
        "unknown policy.options of vanilla 'clip_hi'",
    ),
    "an option that is not the user's": (
        {"policy": {"loss": "topr", "options": {"positive": 1.0}}},
        "policy.options of topr: it has none",
    ),
    "an option of no advantage": (
        {"policy": {"advantage": "rloo", "advantage_options": {"norm": False}}},
        "policy.advantage_options of rloo: it has none",
    ),
    "an old policy of no ratio": (
        {"policy": {"loss": "reinforce", "old": "previous"}},
        'policy.old = "previous" does nothing: reinforce has no ratio to an old policy',
    ),
    "two old policies": (
        {"policy": {"old": "previous"}, "correction": {"preset": "decoupled_token_is"}},
        'policy.old = "previous" and correction.preset name two old policies',
    ),
    "a regression on the ratio to an old policy": (
        {"policy": {"loss": "oapl"}, "correction": {"preset": "decoupled_token_is"}},
        'policy.loss = "oapl" regresses the ratio to the policy that drew a row, and correction.preset = '
        '"decoupled_token_is" compares with another one: drop correction.preset',
    ),
    **{
        f"a regression on the ratio to an old policy, {old}": (
            {"policy": {"loss": "oapl", "old": old}},
            f'policy.loss = "oapl" regresses the ratio to the policy that drew a row, and policy.old = "{old}" '
            "compares with another one: drop policy.old",
        )
        for old in ("previous", "average")
    },
    "snapshots that nothing reads": (
        {"learner": {"snapshots": 3}},
        "learner.snapshots does nothing: neither a decoupled correction, seq_max_kl, exact_drift nor freshness.drift",
    ),
    "nothing to compare an answer with": (
        {"sampler": {"group": 1}},
        "policy.advantage = 'grpo' compares the answers to one prompt, and sampler.group = 1: write group = 8",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_would_be_wrong_is_refused_in_one_line(case: str) -> None:
    sections, message = WRONG[case]
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        config(**sections)
    assert "\n" not in str(caught.value)


DISTILLED = {"loss": {"weight": 1.0}, "teachers": {"main": {"model": "t"}}}
WHOLE: dict[str, tuple[dict[str, Any], str]] = {
    "token scope": ({}, ""),
    "a sum": ({"policy": {"aggregation": "token-sum"}}, 'policy.aggregation = "token-sum" is divided by nothing'),
    "a loss": ({"policy": {"loss": "m2po"}}, "policy.loss = m2po looks at the whole batch"),
    "an advantage": (
        {"policy": {"advantage": "reinforce_plus_plus"}},
        "policy.advantage = reinforce_plus_plus looks at the whole batch",
    ),
    "a correction": (
        {"correction": {"preset": "decoupled_token_is", "is_normalize": True}},
        "correction looks at the whole batch",
    ),
    "a guard": (
        {"correction": {"preset": "decoupled_token_is"}, "guards": {"ess": {}}},
        "guards.ess looks at the whole batch",
    ),
    "a guard of the lag": ({"guards": {"ess": {}}}, ""),
    "two denominators": (
        {**DISTILLED, "policy": {"loss": "gspo"}},
        "parts of the loss are divided by tokens, and others by sequences",
    ),
    "a mean weight": ({**DISTILLED, "freshness": {}}, "[freshness] divides by a mean over the weights of an update"),
    "several steps": ({"learner": {"minibatches": 2}}, "learner.minibatches and learner.epochs make several steps"),
    "several epochs": ({"learner": {"epochs": 2}}, "learner.minibatches and learner.epochs make several steps"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_periodic_waits_for_all_groups_where_the_method_needs_them(case: str) -> None:
    sections, reason = WHOLE[case]
    made = config(**sections, schedule={"kind": "periodic"})
    found = whole_batch_reason(made, method_of(made))
    assert found.startswith(reason) and bool(found) == bool(reason)
    notes = list(schedule_notes(made, Facts(made)))
    assert notes == [f"periodic: an update learns when all its groups are scored, because {found}"] * bool(reason)
    sync = config(**sections, schedule={"kind": "sync"})
    assert whole_batch_reason(sync, method_of(sync)) == ""


def test_bounds_of_a_covariance_may_be_negative() -> None:
    options = {"cov_low": -5.0, "cov_high": -1.0}
    assert method_of(config(policy={"loss": "clip_cov", "options": options})).policy.options == options  # type: ignore[union-attr]


KL_ONLY = {"preset": "decoupled_geo_rs", "rs": {"seq_max_kl": 0.1}}
REINFORCE = {"policy": {"loss": "reinforce"}}
HOLDS_A_RATIO: dict[str, tuple[dict[str, Any], str]] = {
    "distillation": (DISTILLATION, 'loss.kind = "reverse_kl_mc" weighs draws by'),
    "distillation beside a policy loss": (
        REINFORCE | {"loss": {"weight": 1.0}, "teachers": {"main": {"model": "t"}}},
        'loss.kind = "reverse_kl_mc" weighs draws by',
    ),
    **{
        f"{loss} to what drew": ({"policy": {"loss": loss}}, f'policy.loss = "{loss}" holds')
        for loss in sorted(set(POLICY_LOSSES) - {"reinforce", "gpg"})
    },
    "bypass": ({"correction": {"preset": "bypass_ppo_clip"}}, 'policy.loss = "vanilla" holds'),
    **{
        f"{preset} of vanilla": ({"correction": {"preset": preset}}, f'correction.preset = "{preset}" looks at')
        for preset in PRESETS
        if preset.startswith("decoupled")
    },
    **{
        f"{preset} of reinforce": (
            REINFORCE | {"correction": {"preset": preset}},
            f'correction.preset = "{preset}" looks at',
        )
        for preset in PRESETS
        if preset.startswith("bypass_pg")
    },
    "rejection alone": (
        {
            "loss": {"kind": "forward_kl"},
            "policy": None,
            "teachers": {"main": {"model": "t"}},
            "correction": {"preset": "decoupled_k3_rs"},
        },
        'correction.preset = "decoupled_k3_rs" looks at',
    ),
    "rejection by the current policy": (
        REINFORCE | {"correction": {"preset": "decoupled_geo_rs", "rs": {"negative_seq": 0.1}}},
        'correction.preset = "decoupled_geo_rs" looks at',
    ),
    "a KL in the loss": (REINFORCE | {"reference": {"weight": 0.1}}, 'reference.into = "loss" weighs its KL by'),
    "a KL in the reward": (
        REINFORCE | {"reference": {"weight": 0.1, "into": "reward"}},
        'reference.into = "reward" penalises',
    ),
}
HOLDS_NONE: dict[str, dict[str, Any]] = {
    "the teacher's top-k": {"loss": {"kind": "forward_kl"}, "policy": None, "teachers": {"main": {"model": "t"}}},
    **{
        f"hidden states, {kind}": {
            "loss": {"kind": kind, "cache": "hidden"},
            "policy": None,
            "teachers": {"main": {"model": "t"}},
        }
        for kind in ("forward_kl", "reverse_kl", "jsd")
    },
    "draws as they are": DISTILLATION | {"loss": {"importance": False}},
    "reinforce": REINFORCE,
    "gpg": {"policy": {"loss": "gpg", "advantage": "gpg"}},
    **{
        f"{loss} to the weights before": {"policy": {"loss": loss, "old": "previous"}}
        for loss in ("vanilla", "gspo", "m2po", "dro")
    },
    "a KL in the loss as it is": REINFORCE | {"reference": {"weight": 0.1, "importance": False}},
    "a KL of the weights before in the reward": {
        "policy": {"old": "previous"},
        "reference": {"weight": 0.1, "into": "reward"},
    },
    "an exact KL alone": {"correction": KL_ONLY},
    "exact drift": REINFORCE | {"learner": {"exact_drift": True}},
}


@pytest.mark.parametrize("case", HOLDS_A_RATIO)
def test_a_ratio_to_what_drew_needs_all_that_could_be_drawn(case: str) -> None:
    sections, who = HOLDS_A_RATIO[case]
    config(**sections)
    for name, value, whole in (("top_p", 0.9, 1.0), ("top_k", 20, 0), ("min_p", 0.05, 0.0)):
        with pytest.raises(ConfigError, match=re.escape(who)) as caught:
            config(**sections, sampler={"group": 8, name: value})
        said = str(caught.value)
        assert said.startswith(f"config: sampler.{name} = {value} leaves out tokens") and "\n" not in said
        assert f"write keep_mask = true, which records the sampling support, or {name} = {whole:g}" in said
        config(**sections, sampler={"group": 8, name: value, "keep_mask": True})


@pytest.mark.parametrize("case", HOLDS_NONE)
def test_what_holds_no_ratio_to_what_drew_may_leave_tokens_out(case: str) -> None:
    config(**HOLDS_NONE[case], sampler={"group": 8, "top_p": 0.9, "top_k": 20, "min_p": 0.05})


def test_every_cut_is_named() -> None:
    cut = {"group": 8, "top_p": 0.9, "top_k": 20}
    with pytest.raises(
        ConfigError, match=r"sampler.top_p = 0.9 and sampler.top_k = 20 leave out .* top_p = 1, top_k = 0"
    ):
        config(sampler=cut)


def test_a_mask_of_nothing_is_not_kept() -> None:
    assert rollout_sampling(config(sampler={"group": 8, "min_p": 0.1, "keep_mask": True})).keep_mask
    assert not eval_sampling(config(sampler={"group": 8, "min_p": 0.1, "keep_mask": True}), "").keep_mask
    with pytest.raises(ConfigError, match=r"sampler.keep_mask does nothing: top_p, top_k and min_p leave out no token"):
        config(sampler={"group": 8, "keep_mask": True})


def test_as_many_snapshots_are_kept_as_tokens_in_flight_have_versions() -> None:
    decoupled = {"correction": {"preset": "decoupled_token_is"}}

    def snapshots_of(settings: Config) -> int:
        return engines.snapshots_of(settings, method_of(settings))

    assert snapshots_of(config()) == 0
    assert snapshots_of(config(schedule={"kind": "sync"}, **decoupled)) == 1
    assert snapshots_of(config(schedule={"kind": "async", "tau": 4}, **decoupled)) == 5
    assert snapshots_of(config(schedule={"kind": "async", "tau": 4, "publish_every": 3}, **decoupled)) == 5
    assert snapshots_of(config(schedule={"kind": "replay", "k": 2}, **decoupled)) == 3
    assert snapshots_of(config(learner={"snapshots": 2}, **decoupled)) == 2
    by_kl = {"correction": {"preset": "bypass_ppo_clip_geo_rs", "rs": {"seq_max_kl": 0.1}}}
    assert snapshots_of(config(schedule={"kind": "step_off", "k": 2}, **by_kl)) == 3
    dropping = {"kind": "async", "tau": 2, "max_lag": 8, "on_old": "drop"}
    assert snapshots_of(config(schedule=dropping, **decoupled)) == 9


def test_a_level_takes_the_place_of_the_presets_own() -> None:
    made = method_of(config(correction={"preset": "decoupled_token_is", "is_level": "cumulative", "ctpo_clip": 0.1}))
    assert (made.correction.is_level, made.correction.ctpo_clip) == ("cumulative", 0.1)
    made = method_of(config(correction={"preset": "decoupled_geo_rs", "is_level": "turn", "is_threshold": 3.0}))
    assert made.correction.is_level == "turn" and made.correction.rs == PRESETS["decoupled_geo_rs"].rs
    rs = {"seq_mean_k1": [0.9, 1.3]}
    assert method_of(config(correction={"preset": "decoupled_geo_rs", "rs": rs, "verl_compat": True})).correction


def test_a_run_says_what_its_rewards_count_and_how_its_kl_is_steered() -> None:
    steered = {"weight": 0.1, "control": "adaptive", "target": 0.05, "horizon": 1000}
    policy = {"advantage": "gdpo", "reward_weights": {"math": 0.5}}
    said = str(method_of(config(**TWO_REWARDS, policy=policy, reference=steered)))
    assert said == (
        "loss: 1 · vanilla on gdpo of exact + 0.5 · math + 0.1 · KL to the reference in the loss, steered to 0.05; "
        "correction: disabled"
    )


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ({"m": 4}, "1 · reverse_kl_mc"),
        ({"advantage": "behavior", "clip": [0.1, 0.2]}, "1 · reverse_kl_mc (advantage behavior, clip [0.1, 0.2])"),
        ({"importance": False}, "1 · reverse_kl_mc (importance false)"),
        ({"kind": "k1", "use": "advantage", "policy": "cispo"}, "1 · k1 (use advantage, policy cispo)"),
        (
            {"kind": "forward_kl", "k": 4, "tokens": "first", "token_options": {"share": 0.1}},
            '1 · forward_kl (token_options {"share": 0.1}, k 4) on first tokens',
        ),
    ],
)
def test_a_run_says_which_estimate_of_the_divergence_it_minimises(loss: dict[str, Any], said: str) -> None:
    tree = {"student": "s", "teachers": {"main": {"model": "t"}}, "loss": loss}
    assert str(method_of(parse(tree))) == f"loss: {said}; correction: disabled"


REFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "a ratio in the reward": ({"into": "reward", "importance": False}, 'importance = false is for into = "loss"'),
    "a gradient in the reward": ({"into": "reward", "estimate": "k3+"}, 'the reward has no gradient: write "k3"'),
    "a second gradient": ({"estimate": "k1+"}, 'with importance has the gradient of the KL anyway: write "k1"'),
    "no gradient": ({"estimate": "k1", "importance": False}, "has a gradient without the reference in it"),
    "a target of nobody": ({"target": 0.1}, 'target is only for control = "adaptive"'),
    "a controller without a target": ({"control": "adaptive", "horizon": 1e4}, "needs target and horizon"),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_a_reference_that_would_do_nothing_is_refused_in_one_line(case: str) -> None:
    reference, message = REFERENCES[case]
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        config(reference={"weight": 0.1, **reference})
    assert "\n" not in str(caught.value)


def test_what_needs_a_critic_says_so() -> None:
    with pytest.raises(ConfigError, match=r'policy.advantage = "gae" needs values: add \[critic\]'):
        config(policy={"advantage": "gae"})


OWN_SPELLING = {"policy": None, "teachers": {"main": {"model": "t", "spelling": "own"}}}


@pytest.mark.parametrize(
    ("loss", "sampler", "instead"),
    [
        ({"kind": "gold_merged"}, {"temperature": 0.7}, 'write sampler.temperature = 1, or loss.kind = "gold"'),
        ({"kind": "gold_merged"}, {"top_p": 0.9, "top_k": 20}, 'write top_p = 1, top_k = 0, or loss.kind = "gold"'),
        ({"kind": "gold_merged"}, {"min_p": 0.05, "keep_mask": True}, 'write min_p = 0, or loss.kind = "gold"'),
        ({"kind": "k1", "use": "advantage"}, {"top_p": 0.9}, 'or top_p = 1, or loss.kind = "common_topk"'),
    ],
)
def test_what_an_own_spelling_cannot_compare_leads_to_a_loss_that_it_can(
    loss: dict[str, Any], sampler: dict[str, Any], instead: str
) -> None:
    """gold_merged multiplies probabilities of the learner, at temperature 1, by those that the sampler recorded."""
    config(**OWN_SPELLING, loss=loss)
    with pytest.raises(ConfigError, match=re.escape(instead)) as caught:
        config(**OWN_SPELLING, loss=loss, sampler=sampler)
    assert "\n" not in str(caught.value) and "forward_kl" not in str(caught.value)
    config(**OWN_SPELLING, loss={"kind": "gold"}, sampler=sampler)
