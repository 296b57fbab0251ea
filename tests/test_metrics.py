"""Numbers worked out by hand, with the working shown."""

from dataclasses import replace
from itertools import combinations
from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.metric_names import describe
from slipstream.metrics import (
    avg_at_n,
    collapse,
    covered_seconds,
    digest,
    lag_metrics,
    mean_lag,
    over_steps,
    pass_at_k,
    peak_to_end,
    sample_metrics,
    summary,
    throughput,
    trend,
    usage,
)
from slipstream.pipeline import evaluate
from slipstream.pipeline.evaluate import correctness
from slipstream.records import Finish, Handle, Header


def header(
    *versions: tuple[int, int],
    episode: int = 0,
    tokens: int = 0,
    finish: Finish = "eos",
    rewards: dict[str, float] | None = None,
) -> Header:
    return Header(
        prompt="p",
        number=0,
        index=0,
        episode=episode,
        data_source="default",
        prompt_tokens=1,
        tokens=tokens or sum(count for _, count in versions),
        versions=versions,
        finish=finish,
        rewards=rewards or {},
    )


def test_the_trend_of_lengths_is_that_of_a_hundred_updates_or_of_all() -> None:
    assert trend([7.0] * 19) == {}
    assert trend([10.0] * 10 + [12.0] * 10) == {"length/trend": pytest.approx(1.2)}
    grown = [10.0] * 50 + [20.0 + i for i in range(10)] + [99.0] * 90 + [30.0] * 10
    # the last ten, over the ten that came a hundred before: 20 … 29
    assert trend(grown) == {"length/trend": pytest.approx(30 / 24.5)}


def test_a_collapse_lasts_and_the_fall_is_from_the_best_ten_updates() -> None:
    high, low = [0.6] * 40, [0.1] * 40
    # windows of 10: seven low of ten are 0.25 ≤ 0.42, six 0.3, four 0.4, three 0.45; the fourth low update decides
    assert collapse(high + low) == 44 and collapse(low + high) is None
    assert collapse(high + low + high) is None, "it came back"
    assert collapse([0.04] * 40 + [0.0] * 40) is None, "nothing that could fall"
    assert peak_to_end(high + low) == pytest.approx(0.5) and peak_to_end(low + high) == 0
    assert peak_to_end([1.0] * 9) is None
    for updates in range(1, 22):  # too few for the four updates of a collapse and the ten after them
        assert collapse([1.0] * 8 + [0.0] * (updates - 8)) is None


def test_lag_is_counted_token_by_token() -> None:
    # at version 5: six tokens of version 5 (lag 0), three of version 4 (lag 1), one of version 2 (lag 3)
    headers = [header((4, 2), (5, 2)), header((2, 1), (4, 1), (5, 4))]
    numbers = lag_metrics(headers, 5)
    assert numbers == {
        "lag/mean": (6 * 0 + 3 * 1 + 1 * 3) / 10,
        "lag/max": 3.0,
        "lag/tokens_0": 6.0,
        "lag/tokens_1": 3.0,
        "lag/tokens_3": 1.0,
    }


def test_tokens_that_are_not_trained_on_have_no_lag() -> None:
    # a response without trained tokens says (version, 0)
    assert lag_metrics([header((1, 0), tokens=4)], 5) == {"lag/mean": 0.0, "lag/max": 0.0}
    assert lag_metrics([header((1, 0), tokens=4), header((4, 2))], 5)["lag/mean"] == 1.0


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1), min_size=1), st.integers(5, 9))
def test_the_lag_histogram_has_every_trained_token_once(runs: list[list[tuple[int, int]]], version: int) -> None:
    headers = [header(*versions) for versions in runs]
    numbers = lag_metrics(headers, version)
    histogram = {int(name[11:]): count for name, count in numbers.items() if name.startswith("lag/tokens_")}
    total = sum(histogram.values())
    assert total == sum(h.trained_tokens for h in headers)
    assert numbers["lag/max"] == max(histogram) == version - min(h.oldest for h in headers)
    assert numbers["lag/mean"] == pytest.approx(sum(lag * count for lag, count in histogram.items()) / total)


def test_samples_are_summed_and_averaged() -> None:
    headers = [
        header((0, 2), rewards={"exact": 1.0}),
        header((0, 6), episode=1, finish="length", rewards={"exact": 0.0, "brevity": 1.0}),
        header((0, 4), episode=2, rewards={"exact": 0.0}),
        header((0, 4), episode=3, rewards={"exact": 1.0}),
    ]
    assert sample_metrics(headers) == {
        "samples": 4.0,
        "tokens": 16.0,
        "length/mean": 4.0,
        "length/max": 6.0,
        "truncated": 0.25,
        "student/repeated": 0.0,
        "student/distinct": 1.0,
        "reward/exact": 0.5,
        "reward/brevity": 0.25,
    }
    given = [replace(headers[0], repeated=0.5, distinct=0.25), replace(headers[1], repeated=1.0, source="data")]
    found = sample_metrics(given)  # answers of the data say nothing about the student
    assert (found["student/repeated"], found["student/distinct"]) == (0.5, 0.25)


def test_tool_calls_are_counted_by_teacher_if_there_are_several() -> None:
    """Branches of an episode count once: 3 and 1 calls of two episodes, and none of the third."""
    outcomes = [(0, "a", 3.0), (0, "a", 3.0), (1, "a", 1.0), (2, "b", 0.0)]
    headers = [
        replace(header((0, 2), episode=episode), teacher=teacher, outcome={"turns": 2.0, "calls": calls})
        for episode, teacher, calls in outcomes
    ]
    found = sample_metrics(headers)
    assert (found["teacher/a/calls"], found["teacher/b/calls"]) == (2.0, 0.0)
    assert found["episode/calls"] == pytest.approx(4 / 3)
    assert "teacher/a/calls" not in sample_metrics(headers[:3])
    alone = sample_metrics(headers[:3], several_teachers=True)
    assert (alone["teacher/a/calls"], alone["teacher/a/tokens"]) == (
        found["teacher/a/calls"],
        found["teacher/a/tokens"],
    )


def test_an_episode_has_one_reward_however_many_branches_it_has() -> None:
    headers = [header((0, 2), rewards={"exact": 1.0})] * 3 + [header((0, 2), episode=1, rewards={"exact": 0.0})]
    assert sample_metrics(headers)["reward/exact"] == 0.5
    assert correctness([[Handle(header, None) for header in headers]], "exact") == [[1.0, 0.0]]


def test_an_answer_without_a_reward_raises_no_mean() -> None:
    def graded(*rewards: float | None) -> list[Handle]:
        given = [{} if each is None else {"score": each} for each in rewards]
        return [Handle(header((0, 2), episode=i, rewards=each), None) for i, each in enumerate(given)]

    assert correctness([graded(-1.0, None), graded(0.5)], "score") == [[-1.0, -1.0], [0.5]]
    assert correctness([graded(0.5, None), graded(1.0)], "score") == [[0.5, 0.0], [1.0]]
    assert correctness([graded(None)], "score") == [[0.0]]


def test_a_held_out_reward_has_the_error_of_its_prompts_and_is_no_percentage_beyond_1() -> None:
    groups = [[Handle(header((0, 2), rewards={"score": each}), None)] for each in (8.0, 2.0, 5.0)]
    found = evaluate.summary(groups, "score")
    assert found["accuracy"] == 5.0 and found["accuracy_error"] == pytest.approx(3 / 3**0.5)
    assert "accuracy_error" not in evaluate.summary(groups[:1], "score")
    row = describe("accuracy")
    assert row is not None and [row.text(each) for each in (0.5, 7.5, -0.25)] == ["50.0%", "7.5", "-0.25"]


def test_throughput_leaves_the_warm_up_out() -> None:
    # updates 3, 4 and 5 made 30 + 40 + 50 tokens between t_2 = 20 and t_5 = 26
    tokens, finished = [1000.0, 20.0, 30.0, 40.0, 50.0], [10.0, 20.0, 21.0, 24.0, 26.0]
    assert throughput(tokens, finished, warmup=2) == 120 / 6
    assert throughput(tokens, finished, warmup=4) == 50 / 2


def test_throughput_of_a_steady_run_is_its_rate_whatever_the_warm_up() -> None:
    finished = [7.0 + 2.0 * update for update in range(20)]
    for warmup in range(1, 20):
        assert throughput([30.0] * 20, finished, warmup=warmup) == 15.0


def test_there_is_no_throughput_before_the_warm_up_is_over() -> None:
    assert isnan(throughput([1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]))
    assert isnan(throughput([1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0], warmup=0))
    with pytest.raises(ValueError, match="5 token counts for 4 times"):
        throughput([1.0] * 5, [1.0] * 4)


def test_avg_at_n_weighs_problems_alike() -> None:
    # 3 of 4 and 0 of 1: (3/4 + 0)/2, not 3/5
    assert avg_at_n([[1.0, 1.0, 0.0, 1.0], [0.0]]) == 0.375


def test_pass_at_k_by_hand() -> None:
    # 1 right of 4, two tries: C(3, 2)/C(4, 2) = 3/6 of the pairs miss it
    assert pass_at_k([[1.0, 0.0, 0.0, 0.0]], 2) == 0.5
    # with 3 right every pair has one; the mean over the two problems
    assert pass_at_k([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]], 2) == 0.75


samples = st.integers(1, 7).flatmap(
    lambda n: st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n), min_size=1, max_size=3)
)


@given(samples, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(correct: list[list[float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct[0])))

    def share(answers: list[float]) -> float:
        subsets = list(combinations(answers, k))
        return sum(1.0 in subset for subset in subsets) / len(subsets)

    assert pass_at_k(correct, k) == pytest.approx(sum(map(share, correct)) / len(correct))


def test_pass_at_1_is_avg_at_n_of_answers_that_are_right_or_wrong() -> None:
    correct = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert pass_at_k(correct, 1) == pytest.approx(avg_at_n(correct))


def test_pass_at_k_needs_k_samples_of_every_problem() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples of each problem, there are 2"):
        pass_at_k([[1.0, 1.0, 1.0], [1.0, 0.0]], 3)


def test_the_lag_of_a_sample_is_the_mean_over_its_tokens() -> None:
    # at version 5: one token 3 updates old, three that are 1 old
    assert mean_lag(header((2, 1), (4, 3)), 5) == (3 + 3 * 1) / 4


def test_busy_seconds_count_once_however_many_are_busy() -> None:
    # 0-3 and 2-5 overlap, 7-8 stands alone, 7.2-7.5 lies within: 5 + 1
    assert covered_seconds([(7, 8), (0, 3), (2, 5), (7.2, 7.5)]) == 6
    assert covered_seconds([]) == 0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)).map(lambda pair: (min(pair), max(pair)))))
def test_merged_intervals_are_no_longer_than_their_span_or_their_sum(intervals: list[tuple[float, float]]) -> None:
    seconds = covered_seconds(intervals)
    assert seconds <= sum(end - start for start, end in intervals) + 1e-6
    if intervals:
        span = max(end for _, end in intervals) - min(start for start, _ in intervals)
        assert max(end - start for start, end in intervals) - 1e-9 <= seconds <= span + 1e-9


def test_overlap_is_the_mean_of_the_samplers_and_the_union_of_the_others() -> None:
    # of 10 s: samplers busy 10 and 4 (mean 7), scorers 0-2 and 1-4 (union 4), learner 5; but 2 s of publishing on each
    # sampler, and 1 s of an export, are no rolling out and no learning
    busy = {
        "rollout": {"sampler-0": [(0.0, 10.0)], "sampler-1": [(0.0, 1.0), (5.0, 8.0)]},
        "score": {"scorer-0": [(0.0, 2.0)], "scorer-1": [(1.0, 4.0)]},
        "learn": {"learner": [(5.0, 10.0)]},
    }
    stages = busy | {
        "rollout": {"sampler-0": [(0.0, 6.0), (8.0, 10.0)], "sampler-1": [(0.0, 1.0), (5.0, 6.0)]},
        "learn": {"learner": [(5.0, 9.0)]},
    }
    assert usage(busy, stages, 10.0) == pytest.approx(
        {
            "overlap/stages": 0.5 + 0.4 + 0.4,
            "overlap/busy": 0.7 + 0.4 + 0.5,
            "stage/rollout": 0.5,
            "stage/score": 0.4,
            "stage/learn": 0.4,
            "busy/rollout": 0.7,
            "busy/score": 0.4,
            "busy/learn": 0.5,
            "idle/sampler-0": 0.0,
            "idle/sampler-1": 0.6,
            "idle/scorer-0": 0.8,
            "idle/scorer-1": 0.7,
            "idle/learner": 0.5,
        }
    )


def test_metrics_of_steps_are_means_and_extremes_and_say_how_the_drift_grew() -> None:
    steps = [{"loss": 6.0, "ratio_max": 2.0, "logp_min": -1.0}, {"loss": 2.0, "ratio_max": 3.0, "logp_min": -5.0}]
    assert over_steps(steps) == {"loss": 4.0, "ratio_max": 3.0, "logp_min": -5.0}
    assert over_steps([{"loss": 2.0, "drift/kl": 0.1}]) == {"loss": 2.0, "drift/kl": 0.1}
    grown = over_steps([{"drift/kl": 0.25}, {"drift/kl": 0.5}, {"drift/kl": 0.75}])
    assert grown == {"drift/kl": 0.5, "drift/kl_first": 0.25, "drift/kl_last": 0.75}
    mixed = over_steps([{"loss": 1.0}, {"loss": 2.0, "drift/kl": 0.5}, {"loss": 3.0, "drift/kl": 1.0}])
    assert mixed == {"loss": 2.0, "drift/kl": 0.75, "drift/kl_last": 1.0}, "the first step had groups of [mix] alone"


def test_the_end_of_a_run_is_summed_up_from_its_lines() -> None:
    """Four updates of 2 s; the first two are warm-up. Then 60 tokens in 4 s."""
    line = {
        "kind": "train",
        "seconds/update": 2.0,
        "busy/rollout": 0.9,
        "busy/score": 0.3,
        "busy/learn": 0.5,
        "overlap/busy": 1.7,
        "seconds/data": 0.5,
        "seconds/turn": 0.0,
        "seconds/weights": 0.25,
        "dropped": 1.0,
        "restarted": 0.0,
        "thrown_tokens": 7.0,
    }
    lines = [
        line
        | {"update": n, "samples": 4.0, "time": 2.0 * n, "tokens": 10.0 * n - 5, "lag/mean": n, "lag/max": 2.0 * n}
        | {"overlap/stages": 0.5 if n == 1 else 1.5}
        for n in range(1, 5)
    ]
    assert summary(digest([{"kind": "eval", "update": 1}, *lines])) == [
        "trained 15 tokens/s; busy: rollout 90%, scoring 30%, learner 50%",
        "overlap 1.25 of the three stages over the whole run, 1.70 of all work after warm-up",
        "lag 3.6 updates on average, 8 at most; the learner waited 25% of the time for data, 0% for its turn, 12% for "
        "publishes and evaluations",
        "groups dropped or restarted: 1, tokens thrown away: 7",
    ]
    assert summary(digest(lines) | {"lost": 0.0})[-1] == "groups dropped or restarted: 0, tokens thrown away: 7"
    assert len(summary(digest(lines) | {"lost": 0.0, "thrown_tokens": 0.0})) == 3
    later = digest(lines, since=1)
    assert later["overlap/stages"] == 1.5
    assert summary(later, resumed=True)[1].startswith("overlap 1.50 of the three stages since the resume, ")
    counted = [
        line | {"dropped": n, "thrown_tokens": 5 * n, "restarts/scorer": 2, "restarts/sampler": n}
        for n, line in enumerate(lines)
    ]
    later = digest(counted, since=2)
    assert (later["lost"], later["thrown_tokens"], later["restarts/sampler"]) == (2, 10, 2)
    assert "restarts/scorer" not in later and digest(counted)["restarts/scorer"] == 2
    assert digest(lines)["samples_per_s"] == 2 and digest(lines)["seconds"] == 8
    assert digest(lines, since=2)["tokens_per_s"] == 35 / 2, "a part that was gone on with is summed up by itself"
    assert summary(digest(lines[:1])) == []
