"""Which prompt comes next: mixtures, curricula, and an adaptive choice."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.choice import AdaptiveChoice, Choice
from slipstream.data.order import Epochs, Mixture, shares_of
from slipstream.data.prompts import Prompts, Row
from slipstream.records import Handle, Header

# --- mixtures ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(1, 300))
def test_of_the_first_prompts_every_source_has_its_share_rounded_down_or_up(shares: list[float], count: int) -> None:
    mixture = Mixture([Epochs([i], seed=0) for i in range(len(shares))], shares)
    found = Counter[int]()
    for number in range(count):
        found[mixture.at(number)] += 1
        for source, share in enumerate(shares):
            assert abs(found[source] - (number + 1) * share / sum(shares)) < 1 + 1e-9


def test_a_mixture_is_a_function_of_the_number_and_every_source_has_epochs_of_its_own() -> None:
    def mixture() -> Mixture:
        return Mixture([Epochs(range(4), seed=1, name="a"), Epochs(range(4, 10), seed=1, name="b")], [1, 3])

    forwards, backwards = mixture(), mixture()
    found = [forwards.at(number) for number in range(96)]
    assert found == [backwards.at(number) for number in reversed(range(96))][::-1]
    own = {name: [row for row in found if (row < 4) == (name == "a")] for name in "ab"}
    assert (len(own["a"]), len(own["b"])) == (24, 72)
    assert all(sorted(own["a"][i : i + 4]) == [0, 1, 2, 3] for i in range(0, 24, 4))
    assert all(sorted(own["b"][i : i + 6]) == [4, 5, 6, 7, 8, 9] for i in range(0, 72, 6))
    assert own["a"][:4] != own["a"][4:8] or own["a"][4:8] != own["a"][8:12], "epochs differ"


def test_temperature_makes_shares_more_equal() -> None:
    """Sizes 1 and 16: shares 1/17, at temperature 2 they are as 1 to 4, at 4 as 1 to 2."""
    assert shares_of([1, 16], 1.0) == pytest.approx([1 / 17, 16 / 17])
    assert shares_of([1, 16], 2.0) == pytest.approx([1 / 5, 4 / 5])
    assert shares_of([1, 16], 4.0) == pytest.approx([1 / 3, 2 / 3])
    assert shares_of([1e300, 1e-300], 0.01) == [1.0, 0.0]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=3),
    st.sampled_from([(), (1.0, 5.0, 2.0)]),
    st.booleans(),
)
def test_visits_count_how_often_a_row_came_before(
    sources: list[list[int]], shares: tuple[float, ...], curriculum: bool
) -> None:
    starts = [sum(map(len, sources[:i])) for i in range(len(sources) + 1)]
    orders = [
        Epochs(range(*ends), seed=1, difficulty=levels if curriculum else (), curriculum_epochs=1.5)
        for ends, levels in zip(pairwise(starts), sources, strict=True)
    ]
    mixture, seen = Mixture(orders, shares[: len(sources)]), Counter[int]()
    for number in range(60):
        assert mixture.visits(number) == seen[mixture.at(number)]
        seen[mixture.at(number)] += 1


# --- curriculum -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.sampled_from([0.3, 1.0, 2.0, 2.5]), st.integers())
def test_a_curriculum_goes_from_easy_to_hard_and_then_through_epochs(
    levels: list[int], epochs: float, seed: int
) -> None:
    order, rows = Epochs(range(len(levels)), seed=seed, difficulty=levels, curriculum_epochs=epochs), len(levels)
    length = max(round(epochs * rows), 1)
    first = [order.at(number) for number in range(length)]
    assert all(levels[a] <= levels[b] for a, b in pairwise(first))
    times = Counter(first)
    assert all(length // rows <= times[row] <= -(-length // rows) for row in range(rows)), "each as often as others"
    for begin in (length, length + rows):
        assert sorted(order.at(number) for number in range(begin, begin + rows)) == list(range(rows))
    again = Epochs(range(rows), seed=seed, difficulty=levels, curriculum_epochs=epochs)
    assert [again.at(number) for number in reversed(range(length))][::-1] == first


def test_rows_of_equal_difficulty_are_in_random_order() -> None:
    orders = [[Epochs(range(9), seed=s, difficulty=[0] * 9).at(n) for n in range(9)] for s in range(3)]
    assert len({tuple(order) for order in orders}) == 3


# --- adaptive ---------------------------------------------------------------------------------------------------------


def table(rows: int, sources: int = 1) -> Prompts:
    parts = np.array_split(np.arange(rows), sources)
    orders = [Epochs(part.tolist(), seed=0, name=str(i) if sources > 1 else "") for i, part in enumerate(parts)]
    tokens = [np.array([1], np.int32)] * rows
    return Prompts([Row(str(i), "x") for i in range(rows)], tokens, seed=0, shuffle=True, order=Mixture(orders))


def choice(prompts: Prompts, **settings: Any) -> AdaptiveChoice:
    return AdaptiveChoice(
        prompts, **{"weight_by": "reward", "reward": "r", "half_life": 20.0, "uniform_share": 0.1} | settings
    )


def group(number: int, *rewards: float, gap: float = 0.0) -> list[Handle]:
    return [
        Handle(
            Header(
                prompt="p",
                number=number,
                index=i,
                episode=i,
                data_source="",
                prompt_tokens=1,
                tokens=4,
                versions=((0, 4),),
                finish="eos",
                rewards={"r": reward},
                gap=gap,
            ),
            None,
        )
        for i, reward in enumerate(rewards)
    ]


def row(chooser: AdaptiveChoice, number: int) -> int:
    chooser.source(number)
    return int(chooser.prompt(number).id)


def answered(chooser: AdaptiveChoice, number: int, *rewards: float, **other: float) -> int:
    """Let the next prompt be answered, and finish an update; return its row."""
    found = row(chooser, number)
    chooser.note(group(number, *rewards, **other))
    chooser.update(())
    return found


def test_pass_rates_are_discounted_and_return_to_one_half() -> None:
    """One prompt, eight of eight answers right: p = (8 + ½)/(8 + 1), and after a half-life (4 + ½)/(4 + 1)."""
    chooser = choice(table(1), half_life=5.0)
    assert chooser.weights.tolist() == [0.25]
    answered(chooser, 0, *[1.0] * 8)
    assert chooser.weights == pytest.approx(8.5 / 9 * 0.5 / 9)
    for _ in range(5):
        chooser.update(())
    assert chooser.weights == pytest.approx(4.5 / 5 * 0.5 / 5)
    for _ in range(500):
        chooser.update(())
    assert chooser.weights == pytest.approx(0.25)


def test_prompts_that_are_sometimes_right_are_drawn_more_often_and_none_starves() -> None:
    """Row 0 is answered right half of the time, rows 1 to 9 always: weights ¼ and nearly 0. The share is ¼, so each of
    the others is drawn within 40 draws on average, where 0.25/10 is its least probability."""
    chooser, found = choice(table(10), uniform_share=0.25, half_life=1e6), Counter[int]()
    gaps, last = list[int](), dict[int, int]()
    for number in range(4000):
        drawn = row(chooser, number)
        chooser.note(group(number, *([1.0, 0.0] if drawn == 0 else [1.0, 1.0]) * 50))
        chooser.update(())
        found[drawn] += 1
        if drawn:
            gaps.append(number - last.get(drawn, -1))
            last[drawn] = number
    assert found[0] > 0.7 * 4000 and min(found[i] for i in range(1, 10)) > 50
    assert np.mean(gaps) <= 40


def test_every_row_has_at_least_its_part_of_the_uniform_share() -> None:
    """Weights 1 and 0, 0, 0: probabilities are u/4 + 1 − u, and u/4, for u = `uniform_share`."""
    found = Counter[int]()
    for number in range(8000):
        chooser = choice(table(4), uniform_share=0.4)
        chooser.weights = np.array([1.0, 0.0, 0.0, 0.0])
        found[row(chooser, number)] += 1
    error = 4 * np.sqrt(0.1 * 0.9 / 8000)
    assert [found[i] / 8000 for i in range(4)] == pytest.approx([0.7, 0.1, 0.1, 0.1], abs=error)


def test_a_prompt_is_not_chosen_twice_at_the_same_time_while_there_are_others() -> None:
    chooser = choice(table(6))
    assert sorted(row(chooser, number) for number in range(6)) == list(range(6))
    assert row(chooser, 6) in range(6)
    chooser.update({0, 1, 2})
    held = {chooser.chosen[number] for number in range(3)}
    assert {row(chooser, 7), row(chooser, 8), row(chooser, 9)} == set(range(6)) - held


def test_a_choice_sees_what_was_known_at_the_last_update() -> None:
    quiet, told = choice(table(50)), choice(table(50))
    for chooser in (quiet, told):
        for number in range(8):
            row(chooser, number)
    for number in range(8):
        told.note(group(number, 1.0, 1.0))
    assert [row(quiet, number) for number in range(8, 16)] == [row(told, number) for number in range(8, 16)]


@given(st.permutations(range(8)), st.lists(st.floats(0, 1), min_size=8, max_size=8))
def test_the_order_in_which_groups_end_changes_nothing(ends: list[int], rewards: list[float]) -> None:
    weights = []
    for order in (range(8), ends):
        chooser = choice(table(3))
        for number in range(8):
            row(chooser, number)
        for number in order:
            chooser.note(group(number, rewards[number], 0.3))
        chooser.update(())
        weights.append(chooser.weights.tolist())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("by", ["reward", "kl"])
def test_a_saved_choice_goes_on_exactly(by: str) -> None:
    whole = choice(table(20, sources=2), weight_by=by)
    for number in range(12):
        row(whole, number)
    for number in range(9):
        whole.note(group(number, 0.1 * number, 1.0, gap=0.1 * number))
        if number == 4:
            whole.update(range(5, 12))
    saved = json.loads(json.dumps(whole.state))
    again = choice(table(20, sources=2), weight_by=by, before=saved)
    for chooser in (whole, again):
        chooser.update({10, 11})
    assert whole.weights.tolist() == again.weights.tolist() and whole.state == again.state
    assert [row(whole, number) for number in range(12, 40)] == [row(again, number) for number in range(12, 40)]
    assert again.prompt(10).id == whole.prompt(10).id


def test_by_kl_prompts_far_from_the_teacher_come_more_often() -> None:
    """KL per token 0.5 of row a and 0.1 of row b, two answers each: with the mean, 0.3, as one more answer."""
    chooser = choice(table(2), weight_by="kl", half_life=1e9)
    assert chooser.weights.tolist() == [1.0, 1.0]
    first, second = answered(chooser, 0, 0.0, 0.0, gap=2.0), answered(chooser, 1, 0.0, 0.0, gap=0.4)
    if first != second:
        expected = {first: (1.0 + 0.3) / 3, second: (0.2 + 0.3) / 3}
        assert chooser.weights == pytest.approx([expected[0], expected[1]])
    assert chooser.metrics["prompts/tried"] == len({first, second})
    noted = group(2, 0.0, gap=2.0)  # two of its four tokens have no log-prob of the teacher
    chooser.note([Handle(replace(noted[0].header, left_out=(2, 0, 0, 0)), None)])
    assert chooser.noted[2] == (1.0, 1)


def test_sources_keep_their_shares_and_each_has_a_choice_of_its_own() -> None:
    chooser = choice(table(9, sources=3))
    parts = [row(chooser, number) // 3 for number in range(9)]
    assert sorted(parts[:3]) == sorted(parts[3:6]) == sorted(parts[6:9]) == [0, 1, 2]


def test_groups_in_flight_keep_their_prompts_when_the_order_changes_and_not_when_the_data_do() -> None:
    before = choice(table(20))
    rows = [row(before, number) for number in range(8)]
    saved = json.loads(json.dumps(before.state))
    fixed = Choice(table(20), saved)
    assert [int(fixed.prompt(number).id) for number in range(8)] == rows
    fixed.source(8)
    assert fixed.prompt(8).id == table(20).at(8).id
    other = Choice(table(21), saved)
    assert [other.prompt(number).id for number in range(8)] == [table(21).at(number).id for number in range(8)]
    again = choice(table(20), before=Choice(table(20), saved).state)
    assert [int(again.prompt(number).id) for number in range(8)] == rows
    assert choice(table(20), before={}).prompt(3).id == table(20).at(3).id
