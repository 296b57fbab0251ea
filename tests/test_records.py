"""A record that breaks alignment cannot be built; versions and seeds are exact."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.records import (
    Batch,
    Counts,
    Handle,
    Prompt,
    Rollout,
    Scored,
    counts_of,
    derive_seed,
    header_of,
    one_turn,
    repetition,
    version_runs,
)

Fields = dict[str, Any]
VOCAB = 50
ROLLOUT, SCORED = "rollout p/3", "scored p/3"


def rollout_fields(length: int = 4, draws: int = 3, seed: int = 0, mask: np.ndarray | None = None) -> Fields:
    """Tokens all differ, so that a shifted row is never the right one by chance."""
    rng = np.random.default_rng(seed)
    tokens = rng.permutation(VOCAB)[:length].astype(np.int32)
    actions = rng.integers(VOCAB, size=(length, draws), dtype=np.int32)
    action_logp = -rng.random((length, draws), dtype=np.float32)
    actions[:, 0] = tokens
    fields: Fields = {
        "prompt": Prompt(id="p", number=7, tokens=np.array([1, 2], np.int32), data_source="maths"),
        "index": 3,
        "episode": 2,
        "tokens": tokens,
        "versions": np.sort(rng.integers(3, size=length)),
        "logp": action_logp[:, 0].copy(),
        "turn": np.zeros(length, np.int32),
        "actions": actions,
        "action_logp": action_logp,
        "finish": "eos",
        "loss_mask": np.ones(length, np.bool_),
    }
    return with_mask(fields, rng.random(length) < 0.8 if mask is None else mask)


def with_mask(fields: Fields, mask: np.ndarray) -> Fields:
    """Fields of a rollout that is trained as a whole."""
    return fields | {"loss_mask": mask, **{name: fields[name][mask] for name in ("actions", "action_logp")}}


def scored_fields(
    cache: str = "none", length: int = 4, draws: int = 3, k: int = 2, seed: int = 0, mask: np.ndarray | None = None
) -> Fields:
    rollout = Rollout(**rollout_fields(length, draws, seed, mask))
    rng = np.random.default_rng(seed + 1)
    emitted, length = rollout.tokens[rollout.loss_mask], rollout.trained_tokens
    logp = -rng.random(length, dtype=np.float32)
    fields: Fields = {"rollout": rollout, "teacher": "main", "teacher_logp": logp}
    match cache:
        case "sampled":
            fields["teacher_action_logp"] = -rng.random((length, draws), dtype=np.float32)
            fields["teacher_action_logp"][:, 0] = logp
        case "teacher_topk":
            # the emitted token is among the teacher's best in every other row
            fields["teacher_ids"] = VOCAB + rng.integers(VOCAB, size=(length, k))
            fields["teacher_topk_logp"] = -rng.random((length, k), dtype=np.float32)
            fields["teacher_ids"][::2, -1] = emitted[::2]
            fields["teacher_topk_logp"][::2, -1] = logp[::2]
        case "hidden":
            fields["teacher_hidden"] = rng.integers(1 << 16, size=(length, 5), dtype=np.uint16)
    return fields


sizes = st.integers(1, 12)
seeds = st.integers(0, 1 << 20)


@given(
    length=sizes, draws=sizes, k=sizes, seed=seeds, cache=st.sampled_from(["none", "sampled", "teacher_topk", "hidden"])
)
def test_records_of_any_size_with_any_one_cache_can_be_built(
    length: int, draws: int, k: int, seed: int, cache: str
) -> None:
    scored = Scored(**scored_fields(cache, length, draws, k, seed))
    header = header_of(scored.rollout, teacher="main")
    assert (header.tokens, header.trained_tokens) == (length, int(scored.rollout.loss_mask.sum()))
    assert header.oldest in scored.rollout.versions


def test_a_prompt_without_tokens_is_rejected() -> None:
    for tokens in (np.zeros(0, np.int32), np.zeros((1, 2), np.int32)):
        with pytest.raises(ValueError, match=r"^prompt p: needs at least one token"):
            Prompt(id="p", number=0, tokens=tokens)


def per_row(fields: Fields) -> list[str]:
    return [name for name, value in fields.items() if isinstance(value, np.ndarray)]


SHAPE_CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "one row less": lambda array: array[:-1],
    "one row more": lambda array: np.concatenate([array, array[-1:]]),
    "one dimension more": lambda array: array[..., None],
    "no dimension": lambda array: array.ravel()[:1].reshape(()),
}


@pytest.mark.parametrize("change", SHAPE_CHANGES)
@pytest.mark.parametrize("field", per_row(rollout_fields()))
def test_a_rollout_whose_field_has_another_shape_is_rejected_by_name(field: str, change: str) -> None:
    fields = rollout_fields()
    fields[field] = SHAPE_CHANGES[change](fields[field])
    # another number of tokens makes the first field that is compared with them the odd one
    named = "tokens|versions" if field == "tokens" else field
    with pytest.raises(ValueError, match=rf"^{ROLLOUT}: .*({named})"):
        Rollout(**fields)


@pytest.mark.parametrize("change", SHAPE_CHANGES)
@pytest.mark.parametrize(
    ("cache", "field"),
    [(cache, field) for cache in ("sampled", "teacher_topk", "hidden") for field in per_row(scored_fields(cache))],
)
def test_a_scored_record_whose_field_has_another_shape_is_rejected_by_name(cache: str, field: str, change: str) -> None:
    fields = scored_fields(cache)
    fields[field] = SHAPE_CHANGES[change](fields[field])
    with pytest.raises(ValueError, match=rf"^{SCORED}: .*{field}"):
        Scored(**fields)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokens": np.zeros(0, np.int32)}, "tokens"),
        ({"actions": np.zeros((4, 0), np.int32), "action_logp": np.zeros((4, 0))}, "actions"),
        ({"action_logp": np.zeros((4, 2))}, "action_logp and actions"),
        ({"loss_mask": np.ones(4, np.int64)}, "loss_mask is int64"),
    ],
)
def test_a_rollout_with_nothing_in_it_or_the_wrong_type_is_rejected(changes: Fields, named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{ROLLOUT}: .*{re.escape(named)}"):
        Rollout(**rollout_fields(mask=np.ones(4, np.bool_)) | changes)


@pytest.mark.parametrize(
    ("field", "at", "value", "named"),
    [
        ("tokens", 2, -1, "tokens holds a negative id, which no sampler draws"),
        ("actions", (2, 1), -100, "actions holds a negative id, which no sampler draws"),
        ("action_logp", (2, 1), -np.inf, "actions holds [37], whose log-prob is -inf: no sampler draws it"),
    ],
)
def test_ids_that_no_sampler_can_draw_are_rejected(field: str, at: Any, value: float, named: str) -> None:
    fields = rollout_fields(mask=np.array([True, False, True, True]))
    fields["actions"][2, 1] = 37
    fields[field][at] = value
    fields["actions"][:, 0] = fields["tokens"][[0, 2, 3]]
    with pytest.raises(ValueError, match=f"^{ROLLOUT}: {re.escape(named)}$"):
        Rollout(**fields)


@pytest.mark.parametrize("field", ["tokens", "actions"])
def test_ids_are_integers(field: str) -> None:
    fields = rollout_fields()
    fields[field] = fields[field].astype(np.float32)
    with pytest.raises(ValueError, match=f"^{ROLLOUT}: {field} is float32, must be integers$"):
        Rollout(**fields)


def test_masked_rows_hold_anything() -> None:
    """But tokens, which the others see. Draws, and what a teacher says, have no such rows."""
    fields = rollout_fields(mask=np.array([True, False, True, False]))
    fields["logp"][1], fields["versions"][1], fields["turn"][1] = np.nan, -7, 9
    assert Rollout(**fields).trained_tokens == len(fields["actions"]) == 2


@pytest.mark.parametrize(
    ("turn", "named"),
    [
        ([0, 0, -1, 1], "turn is -1 at a trained token, which means that the token was not sampled"),
        ([1, 1, 0, 0], "turn decreases: calls must be numbered in their order"),
    ],
)
def test_turns_number_the_calls_that_sampled(turn: list[int], named: str) -> None:
    fields = rollout_fields(mask=np.array([True, False, True, True])) | {"turn": np.array(turn)}
    with pytest.raises(ValueError, match=f"^{ROLLOUT}: {named}$"):
        Rollout(**fields)
    observed = np.array([True, False, False, False])
    assert Rollout(**rollout_fields(mask=observed) | {"turn": np.array([turn[0], -1, -1, -1])})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_no_number_is_refused_by_name(value: float) -> None:
    fields = rollout_fields(mask=np.ones(4, np.bool_)) | {"rewards": {"exact": 1.0, "math": value}}
    with pytest.raises(ValueError, match=f"^{ROLLOUT}: reward 'math' is {value}: a reward must be a finite number$"):
        Rollout(**fields)


def test_a_response_of_one_call_is_an_episode_of_one_turn() -> None:
    fields = rollout_fields(mask=np.ones(4, np.bool_))
    asked = {name: fields[name] for name in ("prompt", "index", "actions", "action_logp", "versions", "finish")}
    rollout = one_turn(**asked)
    assert (rollout.index, rollout.episode, rollout.branch) == (3, 3, 0)
    for name in ("tokens", "logp", "turn", "loss_mask"):
        np.testing.assert_array_equal(getattr(rollout, name), fields[name])


@given(length=st.integers(2, 12), draws=sizes, seed=seeds, by=st.integers(1, 11))
def test_a_rollout_with_shifted_rows_is_rejected(length: int, draws: int, seed: int, by: int) -> None:
    fields = rollout_fields(length, draws, seed, np.ones(length, np.bool_))
    by = 1 + (by - 1) % (length - 1)
    shifted = np.roll(fields["actions"], by, axis=0)
    with pytest.raises(ValueError, match=rf"^{ROLLOUT}: actions\[:, 0\] is not the emitted token"):
        Rollout(**fields | {"actions": shifted})
    shifted = np.roll(fields["action_logp"], by, axis=0)
    with pytest.raises(ValueError, match=rf"^{ROLLOUT}: action_logp\[:, 0\] is not logp"):
        Rollout(**fields | {"action_logp": shifted})


@given(length=st.integers(2, 12), seed=seeds)
def test_teacher_log_probs_with_shifted_rows_are_rejected(length: int, seed: int) -> None:
    mask = np.ones(length, np.bool_)
    sampled = scored_fields("sampled", length, seed=seed, mask=mask)
    sampled["teacher_action_logp"] = np.roll(sampled["teacher_action_logp"], 1, axis=0)
    with pytest.raises(ValueError, match=rf"^{SCORED}: teacher_action_logp\[:, 0\] is not teacher_logp"):
        Scored(**sampled)
    topk = scored_fields("teacher_topk", length, seed=seed, mask=mask)
    topk["teacher_topk_logp"] = np.roll(topk["teacher_topk_logp"], 1, axis=0)
    with pytest.raises(ValueError, match=rf"^{SCORED}: teacher_topk_logp is not teacher_logp on the emitted token"):
        Scored(**topk)


def test_a_teacher_log_prob_of_minus_infinity_is_a_value_like_any_other() -> None:
    fields = scored_fields("sampled")
    fields["teacher_action_logp"][1, 0] = fields["teacher_logp"][1] = -np.inf
    assert Scored(**fields).teacher_logp[1] == -np.inf


@pytest.mark.parametrize("second", ["sampled", "teacher_topk", "hidden"])
@pytest.mark.parametrize("first", ["sampled", "teacher_topk", "hidden"])
def test_two_teacher_caches_at_once_are_rejected(first: str, second: str) -> None:
    both = scored_fields(first) | scored_fields(second)
    both["rollout"], both["teacher_logp"] = scored_fields(first)["rollout"], scored_fields(first)["teacher_logp"]
    if first == second:
        assert Scored(**both)
        return
    with pytest.raises(ValueError, match=f"^{SCORED}: holds more than one teacher cache"):
        Scored(**both)


@pytest.mark.parametrize("missing", ["teacher_ids", "teacher_topk_logp"])
def test_half_a_top_k_cache_is_rejected(missing: str) -> None:
    with pytest.raises(ValueError, match=f"^{SCORED}: teacher_ids and teacher_topk_logp need each other"):
        Scored(**scored_fields("teacher_topk") | {missing: None})


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=40))
def test_version_runs_decode_to_the_versions_of_the_trained_tokens(tokens: list[tuple[int, bool]]) -> None:
    versions = np.array([version for version, _ in tokens])
    mask = np.array([trained for _, trained in tokens])
    runs = version_runs(versions, mask)
    assert sum(count for _, count in runs) == mask.sum()
    decoded = np.repeat([version for version, _ in runs], [count for _, count in runs])
    np.testing.assert_array_equal(decoded, versions[mask])
    assert all(left[0] != right[0] for left, right in pairwise(runs)), "runs are as long as can be"


def test_version_runs_on_numbers() -> None:
    versions, mask = np.array([4, 4, 4, 5, 5, 6]), np.array([True, False, True, True, True, False])
    assert version_runs(versions, mask) == ((4, 2), (5, 2))
    assert version_runs(versions, np.zeros(6, bool)) == ((4, 0),)


def test_a_header_tells_what_the_coordinator_needs() -> None:
    fields = rollout_fields(mask=np.array([True, True, True, False])) | {
        "versions": np.array([2, 2, 3, 3]),
        "rewards": {"exact": 1.0},
    }
    header = header_of(Rollout(**fields), teacher="main")
    assert (header.prompt, header.number, header.index, header.episode) == ("p", 7, 3, 2)
    assert header.data_source == "maths"
    assert (header.prompt_tokens, header.tokens, header.trained_tokens, header.finish) == (2, 4, 3, "eos")
    assert (header.versions, header.oldest) == (((2, 2), (3, 1)), 2)
    assert (header.rewards, header.teacher) == ({"exact": 1.0}, "main")


def test_a_batch_lists_its_samples_in_the_order_of_its_groups() -> None:
    handles = [Handle(header_of(Rollout(**rollout_fields() | {"index": index})), None) for index in range(4)]
    batch = Batch((tuple(handles[:2]), tuple(handles[2:])), update=1)
    assert batch.handles == handles
    assert [header.index for header in batch.headers] == [0, 1, 2, 3]


def test_an_episode_is_one_sequence_however_many_branches_it_has() -> None:
    masks = [np.arange(4) < 2, np.arange(4) >= 2, np.zeros(4, np.bool_), np.ones(4, np.bool_)]
    group = [
        Handle(header_of(Rollout(**rollout_fields(mask=mask) | {"index": index, "episode": episode})), None)
        for index, (mask, episode) in enumerate(zip(masks, (0, 0, 1, 2), strict=True))
    ]
    assert counts_of(group) == Counts(n_tokens=8, n_sequences=2)
    assert counts_of(group, [2, 0, 0, 0]) == Counts(n_tokens=2, n_sequences=1)
    assert counts_of(group, [0, 0, 3, 1]) == Counts(n_tokens=4, n_sequences=2)


def test_a_seed_is_the_same_everywhere_and_for_ever() -> None:
    assert derive_seed(0, "epoch", 1) == 65714578822508956


def test_seeds_differ_for_whatever_differs() -> None:
    assert len({derive_seed(1), derive_seed("1"), derive_seed(1, 1), derive_seed(11), derive_seed()}) == 5


def test_seeds_spread_over_63_bits() -> None:
    seeds = np.array([derive_seed(seed, number) for seed in range(10) for number in range(1000)])
    assert len(set(seeds.tolist())) == 10_000
    bits = (seeds[:, None] >> np.arange(63)) & 1
    # a fair bit's mean over 10,000 draws has a standard deviation of 0.005; 63 bits stay within five of them
    assert np.abs(bits.mean(0) - 0.5).max() < 0.025
    assert seeds.min() >= 0


def test_repetition_is_the_share_of_n_grams_that_occurred_before() -> None:
    assert repetition(np.array([1, 2, 3]), 4) == 0.0
    assert repetition(np.arange(10), 4) == 0.0
    assert repetition(np.zeros(10, np.int32), 4) == pytest.approx(6 / 7)  # seven n-grams, all alike
    assert repetition(np.array([5, 6, 7, 8, 5, 6, 7, 8]), 4) == pytest.approx(1 / 5)  # 5678 6785 7856 8567 5678
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens = rng.integers(0, 3, size=rng.integers(4, 60))
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        assert repetition(tokens, 4) == pytest.approx(1 - len(set(grams)) / len(grams))
