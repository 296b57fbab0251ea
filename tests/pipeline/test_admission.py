"""Admission as a state machine: every schedule, any legal order of events."""

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.schedule import Async, Periodic, Replay, StepOff, Sync
from slipstream.errors import ConfigError
from slipstream.metrics import NO_ADVANTAGE
from slipstream.pipeline.admission import Admission, AdmissionState
from slipstream.pipeline.schedules import Schedule, schedule_of
from slipstream.records import AGELESS

GROUPS = st.integers(1, 4)


@st.composite
def async_knobs(draw: Any) -> Async:
    every = draw(st.integers(1, 3))
    knobs: dict[str, Any] = {"tau": draw(st.sampled_from([0, 0.5, 1, 2, 4])), "publish_every": every}
    knobs["order"] = draw(st.sampled_from(["mixture", "completion", "submission"]))
    if knobs["order"] != "submission" and draw(st.booleans()):
        knobs["on_old"] = draw(st.sampled_from(["wait", "restart", "drop"]))
        reach = -(-(knobs["tau"] + 1) * every // 1) - 1
        least = int(reach) if knobs["on_old"] == "wait" else every - 1
        knobs["max_lag"] = least + draw(st.integers(0, 2))
    return Async(**knobs)


SETTINGS = st.one_of(
    st.builds(Sync),
    st.builds(Periodic),
    st.builds(StepOff, k=st.integers(1, 3)),
    st.builds(Replay, k=st.integers(0, 3)),
    async_knobs(),
)
SCHEDULES = st.builds(schedule_of, SETTINGS, GROUPS)


@given(
    schedule=SCHEDULES, sources=st.text("abc", min_size=1, max_size=9), most=st.sampled_from([0, 1, 5]), data=st.data()
)
def test_whatever_happens_credits_are_bounded_and_every_group_ends_once(
    schedule: Schedule, sources: str, most: int, data: Any
) -> None:
    """Any legal event in any order: the state machine gets to its end and keeps its promises on the way. Of every
    source so many groups are learned from as in the order of submission, but for those that were dropped."""

    def source(number: int) -> str:
        return sources[number % len(sources)]

    supervised = data.draw(st.integers(0, 3), label="supervised")
    off_policy = data.draw(st.sets(st.integers(0, 9)), label="numbers of groups that the student does not draw")
    admission = Admission(schedule, updates=4, supervised=supervised, source=source, most_refilled=most)
    ended: list[int] = []
    alike: set[int] = set()
    consumed: list[int] = []
    versions: dict[int, int] = {}
    drops = stops = refreshes = 0
    while not admission.finished:
        choices = ["submit"] if admission.quota() else []
        choices += ["rolled"] if admission.rolling else []
        choices += ["take"] if admission.scorable() else []
        choices += ["scored"] if admission.scoring else []
        choices += ["learn"] if admission.learnable() and not admission.full else []
        choices += ["train"] if admission.full and not admission.gated else []
        choices += ["publish"] if admission.gated else []
        choices += ["renew"] if admission.outdated() else []
        choices += ["allow"] if schedule.submit == "stream" else []
        choices += ["stop"] if admission.live and stops < 3 else []
        choices += ["refresh"] if admission.gated and refreshes < 2 else []
        undecided = admission.refilling.undecided and not (schedule.submit == "batch" and admission.gated)
        choices += ["refill"] if undecided else []
        on_the_way = [*admission.rolling, *admission.waiting, *admission.scoring]
        if drops < 6:
            choices += ["drop"] if on_the_way else []
        blocked = {"refill"} if admission.rolling else set()
        assert {*choices} - {"allow", "stop", "drop", "refresh"} - blocked, f"deadlock: {vars(admission)}"
        match data.draw(st.sampled_from(choices)):
            case "submit":
                if admission.published_version >= supervised > 0 and admission.submitted:
                    assert admission.version >= supervised, "supervised updates are published before anything starts"
                versions |= dict.fromkeys(admission.submit(), admission.published_version)
                if admission.supervising:
                    others = admission.submitted - admission.dropped.total()
                    assert others <= supervised * schedule.groups, "no group of a later update beside supervised ones"
            case "rolled":
                number = data.draw(st.sampled_from(list(admission.rolling)))
                if number % 10 in off_policy:
                    versions[number] = AGELESS
                equal = most > 0 and data.draw(st.booleans())
                alike = alike | {number} if equal else alike - {number}
                admission.finish_rollout(number, versions[number], zero_advantage=equal)
            case "refill":
                dropped, begun = admission.refill()
                versions |= dict.fromkeys(begun, admission.published_version)
                ended += dropped
                assert alike.issuperset(dropped)
                assert len(begun) == (len(dropped) if schedule.submit == "batch" else 0)
            case "allow":
                rarest = schedule.credits // schedule.groups
                if schedule.max_lag is not None:
                    rarest = min(rarest, schedule.max_lag + 1)
                every = data.draw(st.integers(1, rarest))
                admission.set_limits(data.draw(st.integers(every * schedule.groups, schedule.credits)), every)
            case "stop":
                admission = gone_on_with(admission, source, supervised)
                consumed = [number for number in consumed if number not in admission.live]
                stops += 1
            case "take":
                assert admission.refilling.undecided.keys().isdisjoint(admission.start_scoring())
            case "scored":
                admission.finish_scoring(data.draw(st.sampled_from(list(admission.scoring))))
            case "learn":
                for number in admission.learn():
                    consumed.append(number)
                    if schedule.bound is not None:
                        assert admission.version - versions[number] <= schedule.bound
            case "train":
                ended += admission.learning
                admission.train()
                assert not (admission.version == supervised and admission.live), "nothing is left over"
                if schedule.order != "completion":
                    found, due = Counter(map(source, consumed)), Counter(map(source, range(len(consumed))))
                    assert all(abs(found[s] - due[s]) <= admission.dropped.total() for s in sources)
            case "publish":
                admission.publish()
            case "refresh":
                begun = {
                    number for number in admission.live if number not in admission.rolling or data.draw(st.booleans())
                }
                again = admission.refresh(begun)
                assert {*again} == {
                    n for n in begun if versions[n] < admission.version and n not in admission.learning
                } and not admission.ready.keys() & again
                versions |= dict.fromkeys(again, admission.version)
                refreshes += 1
            case "renew":
                for number in admission.outdated():
                    if schedule.on_old == "drop":
                        admission.drop(number, "old")
                        ended.append(number)
                    else:
                        admission.restart(number)
                        versions[number] = admission.published_version
            case "drop":
                number = data.draw(st.sampled_from(on_the_way), label="dropped")
                admission.drop(number, "test")
                ended.append(number)
                drops += 1
        assert admission.submitted - admission.dropped.total() - admission.published == admission.in_use
        assert admission.in_use <= schedule.credits
        allowed = max(admission.credits, len(admission.trained) + schedule.groups)
        assert admission.quota() <= max(allowed - admission.in_use, 0) or schedule.submit == "batch"
        if admission.gated:
            assert admission.quota() == 0
    assert sorted(ended) == list(range(admission.submitted)), "each exactly once"
    assert len(consumed) == len(set(consumed)) == admission.submitted - admission.dropped.total()
    assert admission.dropped["test"] == drops and admission.version == 4
    if schedule.submit == "stream":
        assert len(consumed) == 4 * schedule.groups
    refilled = admission.dropped[NO_ADVANTAGE]
    assert refilled <= (4 + schedule.credits // schedule.groups) * most
    if schedule.order == "submission" or (schedule.submit == "batch" and not refilled):
        assert consumed == sorted(consumed), "in the order of submission"


def gone_on_with(before: Admission, source: Any, supervised: int = 0) -> Admission:
    """From a checkpoint: what was being scored or learned from is so anew, and what is trained has been published."""
    state = AdmissionState(**json.loads(json.dumps(asdict(before.state)), object_hook=with_numbers))
    assert state == before.state
    after = Admission(
        before.schedule,
        updates=before.updates,
        supervised=before.supervised,
        source=source,
        most_refilled=before.refilling.most,
        state=state,
    )
    assert after.live == before.live and after.batches == before.batches
    assert after.rolling.keys() == before.rolling.keys()
    assert list(after.waiting) == [*before.scoring, *before.waiting] and not after.scoring
    assert list(after.ready) == [*before.learning, *before.ready] and not after.learning
    assert (after.version, after.remaining, after.dropped) == (before.version, before.remaining, before.dropped)
    assert after.published == before.published + len(before.trained) and not after.gated
    assert after.state == before.state
    return after


def with_numbers(found: dict[str, Any]) -> dict[Any, Any]:
    return {int(name) if name.isdecimal() else name: value for name, value in found.items()}


def test_sync_takes_turns() -> None:
    admission = Admission(schedule_of(Sync(), 2), updates=2)
    assert admission.submit() == [0, 1]
    assert admission.quota() == 0
    admission.finish_rollout(1, 0)
    assert not admission.scorable(), "one still rolls out"
    admission.finish_rollout(0, 0)
    assert admission.start_scoring() == [1, 0]
    admission.finish_scoring(0)
    assert admission.learnable() == []
    admission.finish_scoring(1)
    assert admission.learn() == [0, 1]
    admission.train()
    assert admission.quota() == 0, "credits come back with the publish, not with the step"
    admission.publish()
    assert admission.submit() == [2, 3]


def test_a_batch_whose_members_drop_closes_short_and_is_an_update_like_others() -> None:
    admission = Admission(schedule_of(Sync(), 3), updates=2)
    admission.submit()
    admission.drop(1, "broken")
    admission.finish_rollout(0, 0)
    admission.finish_rollout(2, 0)
    admission.start_scoring()
    admission.finish_scoring(2)
    admission.finish_scoring(0)
    assert update(admission) == [0, 2]
    again = Admission(schedule_of(Sync(), 3), updates=2, state=admission.state)
    assert list(again.rolling) == [3, 4, 5] and again.quota() == 0
    admit(admission, 3)
    assert update(admission) == [3, 4, 5]
    assert admission.finished and admission.version == 2, "as many updates as were asked for"


def test_what_a_drop_leaves_over_does_not_start_beside_the_batch() -> None:
    """It would be rolled out under weights that are old when it is learned from."""
    admission = Admission(schedule_of(Sync(), 3), updates=1)
    admission.submit()
    admission.drop(1, "broken")
    assert admission.quota() == 0, "the other two still roll out"


def test_a_batch_that_drops_as_a_whole_makes_no_step() -> None:
    admission = Admission(schedule_of(Sync(), 2), updates=1)
    admission.submit()
    admission.drop(0, "broken")
    admission.drop(1, "broken")
    assert admission.learnable() == [] and admission.submit() == [2, 3]


def test_a_batch_that_can_never_fill_is_refused() -> None:
    knobs: Any = {"groups": 3, "submit": "stream", "stages": "overlap", "publish": "keep"}
    with pytest.raises(ValueError, match="2 credits can never fill the 1 batches of 3 groups"):
        Schedule(credits=2, **knobs)
    with pytest.raises(ValueError, match="5 credits can never fill the 2 batches of 3 groups"):
        Schedule(credits=5, publish_every=2, **knobs)


@pytest.mark.parametrize(
    ("schedule", "bound"),
    [
        (schedule_of(Sync(), 3), 0),
        (schedule_of(Periodic(), 3), 0),
        (schedule_of(StepOff(k=2), 3), 2),
        (schedule_of(Replay(k=4), 3), 4),
        (schedule_of(Async(tau=0), 3), 0),
        (schedule_of(Async(tau=4), 3), None),
        (schedule_of(Async(tau=4, order="submission"), 3), 4),
        (schedule_of(Async(tau=0.5, order="submission"), 3), 1),
        (schedule_of(Async(tau=1, publish_every=2, order="submission"), 3), 3),
        (schedule_of(Async(tau=4, max_lag=6), 3), 6),
    ],
)
def test_what_a_schedule_promises(schedule: Schedule, bound: int | None) -> None:
    assert schedule.bound == bound


def admit(admission: Admission, count: int) -> None:
    """The oldest groups that roll out are rolled out and scored."""
    for number in list(admission.rolling)[:count]:
        admission.finish_rollout(number, admission.live[number].version)
    for number in admission.start_scoring():
        admission.finish_scoring(number)


def update(admission: Admission) -> list[int]:
    numbers = admission.learn()
    admission.train()
    admission.publish()
    admission.submit()
    return numbers


def test_waiting_for_a_straggler_keeps_the_bound() -> None:
    """Group 0 never finishes. With tau = 1 and max_lag = 2, updates 0 and 1 may overtake it, update 2 may not."""
    admission = Admission(schedule_of(Async(tau=1, max_lag=2), 2), updates=9)
    admission.submit()
    for expected in ([1, 2], [3, 4]):
        for number in expected:
            admission.finish_rollout(number, admission.live[number].version)
        for number in admission.start_scoring():
            admission.finish_scoring(number)
        assert update(admission) == expected
    for number in (5, 6, 7):
        admission.finish_rollout(number, admission.live[number].version)
    for number in admission.start_scoring():
        admission.finish_scoring(number)
    assert admission.enough and admission.learnable() == [], "group 0 would be 3 updates old at the next"
    admission.finish_rollout(0, 0)
    admission.finish_scoring(*admission.start_scoring())
    assert admission.learn() == [0, 5]


def test_weights_may_be_published_less_often_from_now_on_and_each_time_again() -> None:
    admission = Admission(schedule_of(Async(tau="auto", publish_every="auto"), 1), updates=9)
    gated = []
    for publish_every in (1, 1, 2, 2, 4, 4, 4, 4, 1):
        admission.set_limits(6, publish_every)
        admission.submit()
        assert admission.publishes_next == ((admission.version + 1) % publish_every == 0)
        admit(admission, 1)
        admission.learn()
        admission.train()
        gated.append(admission.gated)
        if admission.gated:
            admission.publish()
    assert gated == [True, True, False, True, False, False, False, True, True]


def test_fewer_credits_than_unpublished_updates_hold_do_not_keep_the_next_one_from_coming_about() -> None:
    admission = Admission(schedule_of(Async(tau="auto", publish_every="auto"), 2), updates=9)
    admission.set_limits(8, 4)
    admission.submit()
    admit(admission, 6)
    for _ in range(3):
        admission.learn()
        admission.train()
    admission.set_limits(2, 1)
    for number in list(admission.live):
        admission.drop(number, "old")
    assert admission.submit() == [8, 9], "and no more"
    admit(admission, 2)
    admission.learn()
    admission.train()
    assert admission.gated


def test_fewer_may_be_in_flight_from_now_on_and_more_again() -> None:
    """τ of 2, then 0, then 1, of two groups each: what is there stays, and nothing starts until there is room."""
    admission = Admission(schedule_of(Async(tau=2, order="submission"), 2), updates=9)
    assert admission.submit() == [0, 1, 2, 3, 4, 5]
    admission.set_limits(2, 1)
    assert admission.quota() < 0 and admission.submit() == []
    admit(admission, 6)
    for expected in ([0, 1], [2, 3]):
        assert update(admission) == expected and admission.submitted == 6
    assert update(admission) == [4, 5] and list(admission.rolling) == [6, 7], "on-policy from here on"
    admission.set_limits(4, 1)
    assert admission.submit() == [8, 9]
    with pytest.raises(AssertionError):
        admission.set_limits(7, 1)
    with pytest.raises(AssertionError):
        admission.set_limits(1, 1)
    with pytest.raises(AssertionError):
        admission.set_limits(6, 4)


def test_a_restart_is_under_the_published_weights_and_on_the_same_credit() -> None:
    admission = Admission(schedule_of(Async(tau=1, max_lag=0, on_old="restart"), 1), updates=3)
    assert admission.submit() == [0, 1]
    admit(admission, 1)
    assert update(admission) == [0]
    assert admission.outdated() == [], "group 1 may not have a token yet"
    admission.finish_rollout(1, 0)
    assert admission.outdated() == [1]
    admission.restart(1)
    assert admission.outdated() == [] and admission.live[1].version == 1
    assert (admission.in_use, admission.restarted) == (2, 1)


def test_a_broken_promise_raises() -> None:
    admission = Admission(schedule_of(Async(tau=1, order="submission"), 1), updates=9)
    admission.submit()
    admission.version = 5
    admit(admission, 1)
    with pytest.raises(RuntimeError, match="group 0 is 5 updates old, the schedule promises at most 1"):
        admission.learn()


def test_admission_goes_on_from_where_it_stood() -> None:
    schedule = schedule_of(Async(tau=1), 2)
    admission = Admission(schedule, updates=3)
    admission.submit()
    admission.drop(1, "broken")
    admission.submit()
    admit(admission, 2)
    update(admission)
    standing = admission.state
    assert standing == AdmissionState(
        version=1,
        submitted=7,
        dropped={"broken": 1},
        restarted=0,
        in_flight={3: 0, 4: 4, 5: 5, 6: 5},
        versions={3: 0, 4: 0, 5: 1, 6: 1},
        sources=dict.fromkeys(range(3, 7), ""),
        turns=[""] * 4,
    )
    again = Admission(schedule, updates=3, state=standing)
    assert list(again.rolling) == [3, 4, 5, 6] and again.quota() == 0
    assert (again.remaining, again.in_use, again.version) == (admission.remaining, admission.in_use, 1)


def test_in_the_order_of_completion_who_is_scored_first_is_learned_from_first() -> None:
    admission = Admission(schedule_of(Async(tau=1), 2), updates=9)
    admission.submit()
    for number in (3, 0, 2, 1):
        admission.finish_rollout(number, 0)
    admission.start_scoring()
    for number in (2, 3, 1, 0):
        admission.finish_scoring(number)
    assert update(admission) == [2, 3] and update(admission) == [1, 0]


def two(schedule: Schedule) -> Admission:
    """Even groups are of the quick source, odd ones of the slow."""
    return Admission(schedule, updates=9, source=lambda number: ("quick", "slow")[number % 2])


def come(admission: Admission, *numbers: int) -> None:
    for number in numbers:
        admission.finish_rollout(number, admission.live[number].version)
    admission.start_scoring()
    for number in numbers:
        admission.finish_scoring(number)


def test_an_update_has_of_every_source_what_it_has_of_the_prompts() -> None:
    admission = two(schedule_of(Async(tau=2), 4))
    assert admission.submit() == list(range(12))
    come(admission, 4, 0, 2, 6, 8, 10)
    assert admission.enough and admission.learnable() == [], "no slow one is there"
    come(admission, 7)
    assert admission.learnable() == [], "and one is not enough"
    come(admission, 9)
    assert update(admission) == [4, 0, 7, 9], "the first that came, of both; 1, 3 and 5 hold nobody up"
    come(admission, 14, 11, 1)
    assert update(admission) == [2, 6, 11, 1]


@given(
    sources=st.lists(st.sampled_from("abcd"), min_size=1, max_size=40),
    groups=GROUPS,
    tau=st.sampled_from([0, 0.5, 1, 3]),
    max_lag=st.sampled_from([None, 4, 6]),
    data=st.data(),
)
def test_every_update_has_of_each_source_as_many_groups_as_the_order_of_submission(
    sources: list[str], groups: int, tau: float, max_lag: int | None, data: Any
) -> None:
    """Whichever groups come first: update u has the sources of the groups u·B to (u + 1)·B − 1, where none is dropped.
    A stop in between changes nothing."""

    def source(number: int) -> str:
        return sources[number % len(sources)]

    admission = Admission(schedule_of(Async(tau=tau, max_lag=max_lag), groups), updates=6, source=source)
    for update_number in range(6):
        admission.submit()
        while not admission.learnable():
            number = data.draw(st.sampled_from(list(admission.rolling)))
            come(admission, number)
        if data.draw(st.booleans()):
            admission = gone_on_with(admission, source)
        due = [source(number) for number in range(update_number * groups, (update_number + 1) * groups)]
        taken = [admission.live[number].source for number in admission.learn()]
        assert Counter(taken) == Counter(due)
        admission.train()
        admission.publish()


def test_who_comes_first_is_taken_whatever_the_mixture_if_that_is_asked_for() -> None:
    admission = two(schedule_of(Async(tau=2, order="completion"), 4))
    admission.submit()
    come(admission, 4, 0, 2, 6)
    assert update(admission) == [4, 0, 2, 6]


def test_who_is_dropped_leaves_the_next_updates_as_they_were() -> None:
    admission = two(schedule_of(Async(tau=1), 2))
    admission.submit()
    assert admission.turns == ["quick", "slow", "quick", "slow"]
    come(admission, 0, 2, 3)
    admission.drop(1, "broken")
    assert admission.turns == ["quick", "slow", "quick"]
    assert update(admission) == [0, 3]
    assert admission.turns == ["quick", "quick", "slow", "quick"], "the new ones are 4, 5 and 6"


def test_a_source_that_is_slow_grows_no_older_than_was_promised() -> None:
    """With tau = 1, max_lag = 2: group 1 may be overtaken by others of its source as long as all left are in time."""
    admission = two(schedule_of(Async(tau=1, max_lag=2), 2))
    admission.submit()
    come(admission, 0, 2, 3)
    assert update(admission) == [0, 3]
    come(admission, 4, 5)
    assert update(admission) == [2, 5]
    come(admission, 6, 7)
    assert admission.learnable() == [], "1 would be three updates old at the next"
    come(admission, 1)
    assert update(admission) == [1, 4], "the oldest first, where age has a bound"


def test_what_was_in_flight_keeps_its_source_when_the_data_has_changed() -> None:
    admission = two(schedule_of(Async(tau=1), 2))
    admission.submit()
    again = Admission(admission.schedule, updates=9, source=lambda _: "new", state=admission.state)
    come(again, 0, 2)
    assert again.learnable() == []
    come(again, 1, 3)
    assert update(again) == [0, 1] and update(again) == [2, 3]
    come(again, 5, 4)
    assert again.turns == ["new"] * 4 and update(again) == [5, 4]


def test_what_stood_must_fit_the_schedule_and_the_updates() -> None:
    standing = AdmissionState(
        version=2, submitted=16, dropped={}, restarted=0, in_flight=dict.fromkeys(range(4, 16), 0)
    )
    with pytest.raises(ConfigError, match="12 groups were in flight and this schedule has 4 credits"):
        Admission(schedule_of(Async(tau=1), 2), updates=9, state=standing)
    with pytest.raises(ConfigError, match="updates = 7: groups of later updates are in flight, write at least 8"):
        Admission(schedule_of(Async(tau=5), 2), updates=7, state=standing)
    again = Admission(schedule_of(Async(tau=5), 2), updates=8, state=standing)
    assert again.quota() == again.remaining == 0


# --- refill -----------------------------------------------------------------------------------------------------------


def batch_of(order: list[int], equal: set[int], most: int) -> tuple[list[int], list[int]]:
    """One synchronous batch of four groups that end in this order of their numbers; return what is trained, dropped."""
    admission = Admission(schedule_of(Sync(), 4), updates=1, most_refilled=most)
    admission.submit()
    dropped = list[int]()
    while admission.rolling:
        number = min(admission.rolling, key=order.index)
        admission.finish_rollout(number, 0, zero_advantage=number in equal)
        dropped += admission.refill()[0]
    for number in admission.start_scoring():
        admission.finish_scoring(number)
    return admission.learn(), dropped


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)), st.integers(1, 8))
def test_a_synchronous_batch_does_not_depend_on_which_answers_end_first(
    order: list[int], equal: set[int], most: int
) -> None:
    """Groups are replaced in the order of submission: the first four with an advantage, if so many may be replaced."""
    trained, dropped = batch_of(order, equal, most)
    assert (trained, dropped) == batch_of(list(range(12)), equal, most)
    assert len(trained) == 4 and len(dropped) <= most and equal.issuperset(dropped)
    if len(dropped) < most:
        assert trained == [number for number in range(12) if number not in equal][:4]
    assert sorted(trained + dropped) == list(range(4 + len(dropped)))


def test_groups_beyond_the_limit_are_learned_from() -> None:
    assert batch_of([*range(12)], {*range(12)}, 2) == ([2, 3, 4, 5], [0, 1])


def test_a_stream_replaces_groups_by_its_next_submission() -> None:
    admission = Admission(schedule_of(Async(tau=0), 2), updates=2, most_refilled=1)
    assert admission.submit() == [0, 1] and admission.submit() == []
    for number in (1, 0):
        admission.finish_rollout(number, 0, zero_advantage=True)
    assert admission.refill() == ([0], []), "1 is beyond the limit"
    assert admission.submit() == [2] and admission.start_scoring() == [1]
    assert admission.dropped == {NO_ADVANTAGE: 1}
