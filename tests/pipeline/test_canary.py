"""Canaries: a teacher or a sampler that changes while a run goes on is found within two periods, and named."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.config.file import parse
from slipstream.config.running import HealthConfig
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts, Row
from slipstream.engines.http.client import Endpoint
from slipstream.engines.http.scorer import HttpScorer
from slipstream.engines.score_checks import scored
from slipstream.errors import EndpointError, EngineError, RecordsLost, Unhealthy, WorkerDied
from slipstream.pipeline.canary_rounds import Canaries, Watched
from slipstream.pipeline.checkpoint import BEGINNING, newest
from slipstream.pipeline.control import canary
from slipstream.pipeline.control.canary import (
    difference,
    limit_of,
    noise_of,
    prompts_of,
    reference_of,
    sampler_fault,
    texts_of,
    worst,
)
from slipstream.pipeline.run import Run
from slipstream.pipeline.stages import Rollouts
from slipstream.protocols import Engines, Follower, GradingSampler, Loaded, Mode, Sampling, TextScores, WeightsRef
from slipstream.records import Batch, Group, Handle, Prompt, Rollout, graded, header_of, one_turn
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from support import tabular_engines as toy
from support.engines import scorer_settings
from support.fake_endpoint import FakeEndpoint, table

V, EOS = 6, 0
TEACHER, OTHER = toy.random_table(V, seed=1, scale=2.0), toy.random_table(V, seed=7, scale=2.0)
STUDENT = toy.random_table(V, seed=0)
EVERY = 5
ROWS = 10
PROMPTS = Prompts(
    [Row(id=str(i), prompt="x") for i in range(ROWS)],
    [np.array([1 + i % (V - 1)], np.int32) for i in range(ROWS)],
    seed=0,
    shuffle=True,
)

# --- fixed texts ------------------------------------------------------------------------------------------------------


def texts(sampling: Sampling | None = None, ends: Sequence[int] = (EOS,)) -> Any:
    return texts_of(prompts_of(PROMPTS, None, canary.CANARY_TEXTS), sampling or Sampling(max_tokens=8), ends)


def test_texts_are_the_same_in_every_run_and_hold_end_tokens() -> None:
    one, same = texts(), texts()
    assert [t.tokens.tolist() for t in one] == [t.tokens.tolist() for t in same] and len(one) == canary.CANARY_TEXTS
    for text in one:
        assert len(text.tokens) == 8 and text.tokens[3] == text.tokens[7] == EOS
    assert len({text.prompt.number for text in one}) == 4 and all(text.prompt.number < 0 for text in one)
    assert not any((text.tokens == EOS).any() for text in texts(ends=()))


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=3, draws=4), Sampling(max_tokens=99, best=5)])
def test_texts_have_what_the_loss_asks_of_a_sampler(sampling: Sampling) -> None:
    for text in texts(sampling):
        assert len(text.tokens) in (min(sampling.max_tokens, canary.CANARY_TOKENS), sampling.max_tokens)
        assert text.actions.shape[1] == sampling.draws
        assert text.best_ids is None if not sampling.best else text.best_ids.shape[1] == sampling.best


def test_one_text_is_as_long_as_a_response_may_be() -> None:
    assert [len(text.tokens) for text in texts(Sampling(max_tokens=24))] == [24] * 4
    *_, longest = found = texts(Sampling(max_tokens=99))
    assert [len(text.tokens) for text in found] == [24, 24, 24, 24, 99]
    assert longest.tokens[-1] == EOS and longest.tokens[:4].tolist() == [
        p.tokens[0] for p in prompts_of(PROMPTS, None, 4)
    ]
    assert len({text.prompt.number for text in found}) == 5


def test_only_prompts_of_the_teacher_are_taken() -> None:
    mixed = Prompts(PROMPTS.rows, PROMPTS.tokens, seed=0, shuffle=False, teachers=["a"] * 9 + ["b"])
    assert [prompt.id for prompt in prompts_of(mixed, "b", 4)] == ["9"]
    assert [prompt.id for prompt in prompts_of(mixed, "a", 2)] == ["0", "1"]
    assert prompts_of(mixed, "c", 4) == []


# --- how answers compare ----------------------------------------------------------------------------------------------


def said(*logps: float, cause: str = "") -> list[TextScores]:
    """One text of as many tokens."""
    return [TextScores(np.array([[x] for x in logps]), cause)]


TEXT = texts(Sampling(max_tokens=2))[:1]


def test_an_answer_is_compared_by_root_mean_square_and_the_worst_token_is_named() -> None:
    reference = reference_of([said(-1.0, -2.0), said(-1.0, -2.0), said(-1.0, -9.0)])
    assert reference[0] is not None and reference[0].tolist() == [[-1.0], [-2.0]], "the median"
    found = difference(TEXT, reference, said(-1.0, -6.0))
    assert found.apart == pytest.approx(4 / 2**0.5)
    assert found.said == f"token {TEXT[0].tokens[1]} at position 1 of text 0 had log-prob -2.00, now -6.00"


def test_what_cannot_be_scored_any_more_is_infinitely_far_and_what_never_could_is_left_out() -> None:
    fine, none = said(-1.0, -2.0), said(cause="teacher t gives nan")
    assert difference(TEXT, reference_of([fine]), none).apart == np.inf
    assert "teacher t gives nan" in difference(TEXT, reference_of([fine]), none).said
    assert reference_of([fine, none]) == [None] and difference(TEXT, [None], fine).apart == 0.0


def test_the_limit_is_what_rounding_explains_or_a_multiple_of_the_noise_at_the_start() -> None:
    same = [said(-1.0, -2.0)] * 3
    assert noise_of(TEXT, same).apart == 0.0
    assert limit_of(0.0, exact=True) == canary.EXACT_LIMIT and limit_of(0.0, exact=False) == canary.ROUNDED_LIMIT
    noisy = [said(-1.0, -2.0), said(-1.3, -2.0), said(-0.7, -2.0)]
    noise = noise_of(TEXT, noisy).apart
    assert noise == pytest.approx(0.3 / 2**0.5) and limit_of(noise, exact=True) == canary.NOISE_FACTOR * noise


def test_a_tail_decides_nothing_and_a_tail_that_becomes_likely_does() -> None:
    """Weights are 1 and exp(-24)/0.01 = 3.8e-9; then 1 and 1."""
    reference = reference_of([said(-1.0, -24.5)])
    assert difference(TEXT, reference, said(-1.0, -24.0)).apart < 1e-4
    found = difference(TEXT, reference, said(-1.0, -0.5))
    assert found.apart == pytest.approx(24 / 2**0.5) and "had log-prob -24.50, now -0.50" in found.said
    tails = reference_of([said(-24.0, -24.5)])
    assert difference(TEXT, tails, said(-23.0, -25.5)).apart < 1e-3, "also where all tokens are rare"


def test_one_wrong_token_of_a_long_text_is_as_far_as_a_fifth_of_it() -> None:
    """Its root mean square over 99 tokens is 0.06 / sqrt(99) = 0.006, below the limit of float32."""
    *_, long = texts(Sampling(max_tokens=99))
    was = [TextScores(np.full((99, 1), -1.0))]
    now = [TextScores(np.where(np.arange(99) == 98, -1.06, -1.0)[:, None])]
    found = difference([long], reference_of([was]), now)
    assert found.apart == pytest.approx(0.06 / canary.PEAK_FACTOR) and found.apart > limit_of(0.0, exact=True)
    assert "at position 98 of text 0 had log-prob -1.00, now -1.06" in found.said


@pytest.mark.parametrize(
    "noise, exact", [(0.0, True), (1e-6, True), (1e-3, True), (4e-3, True), (1e-3, False), (0.02, False), (0.1, False)]
)
def test_honest_noise_is_accepted_and_within_the_limit(noise: float, exact: bool) -> None:
    """200 starts of one replica, each followed by 20 answers. Accepted are 0.01 nats, and 0.2 from an endpoint."""
    rng = np.random.default_rng(0)
    some = texts(Sampling(max_tokens=24))
    honest = [rng.uniform(-4, 0, (24, 1)) for _ in some]

    def answer() -> list[TextScores]:
        return [TextScores(logp + noise * rng.standard_normal(logp.shape)) for logp in honest]

    for _ in range(200):
        asked = [answer() for _ in range(canary.FIRST_REQUESTS)]
        found = noise_of(some, asked).apart
        assert found <= TeacherConfig(model="t", **({} if exact else {"base_url": "http://h/v1"})).noise_limit
        reference, limit = reference_of(asked), limit_of(found, exact=exact)
        assert all(difference(some, reference, answer()).apart <= limit for _ in range(20))


GOOD = {"drift/k3_kl": 1e-6, "drift/ppl_ratio": 1.0}


@pytest.mark.parametrize(
    "numbers, versions, said",
    [
        (GOOD, {7}, ""),
        (GOOD, {6}, "its tokens name version 6, but only version 7 is possible"),
        (GOOD, {7, 6}, "its tokens name version 6, 7, but"),
        (GOOD, {8}, "its tokens name version 8, but"),
        (GOOD | {"drift/k3_kl": 0.01}, {7}, r"not the learner's: KL 0.01 \(limit 0.001\)"),
        (GOOD | {"drift/ppl_ratio": 1.5}, {7}, r"perplexity ratio 1.500"),
        (GOOD | {"drift/k3_kl": float("nan")}, {7}, "KL nan"),
        (GOOD | {"drift/k3_kl": float("inf")}, {7}, "KL inf"),
    ],
)
def test_a_sampler_is_judged_by_version_and_by_its_distance_to_the_learner(
    numbers: Any, versions: set[int], said: str
) -> None:
    found = sampler_fault(numbers, versions, version=7, rounding="exact")
    assert re.search(said, found) and bool(found) == bool(said)


def shifted(amount: float) -> dict[str, float]:
    """Return what a comparison finds if all log-probs of a sampler are shifted by this amount."""
    return {"drift/k3_kl": exp(amount) - 1 - amount, "drift/ppl_ratio": exp(amount)}


@pytest.mark.parametrize("amount", [-1.0, -0.6, -0.3, -0.17, 0.15, 0.2, 0.4, 0.7, 1.0])
def test_in_16_bits_no_shift_of_all_log_probs_is_taken_for_rounding(amount: float) -> None:
    assert sampler_fault(shifted(amount), {7}, version=7, rounding="half")


def test_a_quantised_sampler_may_be_too_coarse() -> None:
    numbers = GOOD | {"drift/k3_kl": 0.06}
    found = {kind: sampler_fault(numbers, {7}, version=7, rounding=kind) for kind in ("half", "int8", "fp8")}
    assert [("changes this student too much (learner.quantised" in each) for each in found.values()] == [
        False,
        True,
        True,
    ]


# --- in a run ---------------------------------------------------------------------------------------------------------

Lie = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""From log-probs [N, M] and their tokens [N, M], with the calls since it began, to what is said instead."""


class Liar(toy.ToyScorer):
    """Says something else from a call on; a little noise, if any, is honest."""

    def __init__(self, lie: Lie | None = None, *, after: int = 0, noise: float = 0.0, seed: int = 0) -> None:
        super().__init__(TEACHER)
        self.lie, self.calls, self.noise, self.rng = lie, -after, noise, np.random.default_rng(seed)

    async def score(self, group: Group) -> list[Handle]:
        self.calls += 1
        calls, honest = self.calls, await super().score(group)
        if not self.noise and (self.lie is None or calls <= 0):
            return honest
        return [self._lied(handle, true, calls) for handle, true in zip(group, honest, strict=True)]

    def _lied(self, handle: Handle, honest: Handle, calls: int) -> Handle:
        logp_NM = honest.body.teacher_action_logp + self.noise * self.rng.standard_normal(
            honest.body.teacher_action_logp.shape
        )
        if self.lie is not None and calls > 0:
            logp_NM = self.lie(logp_NM, graded(handle).actions, calls)
        logp_NM = np.minimum(logp_NM, 0.0)
        return scored(
            handle, teacher="toy", version=self.version, teacher_logp=logp_NM[:, 0], teacher_action_logp=logp_NM
        )


def settings(tree: dict[str, Any]) -> Any:
    return parse(
        {
            "student": "toy",
            "teachers": {"main": {"model": "t", "recheck": 0.0}},
            "updates": 30,
            "sampler": {"max_tokens": 6, "group": 2},
            "learner": {"batch_size": 16},
            "schedule": {"kind": "sync"},
            "loss": {"m": 2},
            **tree,
            "health": {"canary": EVERY, "kl": 1e9} | tree.get("health", {}),
        },
        say=lambda _: None,
    )


def train(
    path: Path,
    *scorers: Any,
    samplers: Sequence[Any] = (),
    learner: Any = None,
    told: list[str] | None = None,
    prompts: Prompts = PROMPTS,
    again: bool = False,
    **tree: Any,
) -> Run:
    """A run on a virtual clock; `again` goes on with the one that is there."""
    config = settings(tree)
    engines = Engines(
        samplers=tuple(GradingSampler(s, toy.ToyGrader()) for s in samplers or (toy.ToySampler(STUDENT),)),
        scorers={"main": scorers},
        learner=learner or toy.ToyLearner(STUDENT, lr=0.1),
        close=lambda: None,
    )
    state = BEGINNING

    async def go() -> None:
        await Run(
            config, engines, prompts, log, state=state, say=(told if told is not None else []).append, ends=(EOS,)
        ).train()

    if not again:
        with RunLog.create(config, path) as log:
            virtual.run(go())
    else:
        found = newest(path)

        async def resumed() -> None:
            nonlocal state
            state = await found.restore(engines.learner)
            await go()

        with RunLog.reopen(config, path, found.mark) as log:
            virtual.run(resumed())
    return engines  # type: ignore[return-value]


def hates(logp: np.ndarray, ids: np.ndarray, k: float) -> np.ndarray:
    return logp - k * (ids == EOS)


def other(logp: np.ndarray, ids: np.ndarray, calls: int) -> np.ndarray:
    """Another model behind the same address: its log-probs of these tokens, whatever came before them."""
    return OTHER.log_softmax(-1).numpy()[0][ids]


LIES: dict[str, Lie] = {
    "negated": lambda x, ids, n: np.minimum(-8.0 - x, 0.0),
    "constant": lambda x, ids, n: np.full_like(x, -1.5),
    "zero": lambda x, ids, n: np.zeros_like(x),
    "another model": other,
    "hates the end token": lambda x, ids, n: hates(x, ids, 5.0),
    "dislikes the end token": lambda x, ids, n: hates(x, ids, 0.5),
    "slow drift": lambda x, ids, n: x * (1 + 0.002 * n),
    "times 3": lambda x, ids, n: 3 * x,
    "divided by 3": lambda x, ids, n: x / 3,
    "plus 0.5": lambda x, ids, n: x + 0.5,
    "minus 0.5": lambda x, ids, n: x - 0.5,
    "shifted rows": lambda x, ids, n: np.roll(x, 1, 0),
    "shuffled": lambda x, ids, n: x[::-1].copy(),
}
UPDATE = 8
"""Groups of an update."""
START = 1 + (canary.FIRST_REQUESTS - 1) * canary.CANARY_TEXTS
"""Calls of the start: one for all texts, and then one for each text."""
BEGINS = 11
"""The update in which lies begin, after two canaries that were fine."""


def began_at(update: int, canaries: int) -> int:
    """After so many calls: those of the start, of the updates before, and of the canaries before."""
    return START + (update - 1) * UPDATE + canaries * canary.CANARY_TEXTS


@pytest.mark.parametrize("lie", LIES)
def test_a_teacher_that_changes_in_mid_run_is_found_within_two_periods(lie: str, tmp_path: Path) -> None:
    liar = Liar(LIES[lie], after=began_at(BEGINS, 2))
    with pytest.raises(Unhealthy, match=r"teacher main has changed: .*scorer.*no other replica is left") as stopped:
        train(tmp_path, liar, checkpoint={"every": 1, "keep": 1}, health={"invalid": 1.0})
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert BEGINS <= len(lines) <= BEGINS - 1 + 2 * EVERY
    assert "(found good after update 10)" in str(stopped.value)
    assert re.search(rf"groups of its answers are in updates 1[01] to {len(lines)}", str(stopped.value))
    assert re.search(r"/1?\d.suspect, and sound ones in .*/(10|[5-9])$", str(stopped.value)), "from before the lie"


def test_an_honest_teacher_is_asked_and_what_it_costs_is_known(tmp_path: Path) -> None:
    told, scorer = list[str](), Liar()
    train(tmp_path, scorer, told=told, updates=12)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert not [line for line in told if "health" in line]
    asked = [line["update"] for line in lines if "canary/teacher" in line]
    assert len(asked) == 3 and {line["canary/retired"] for line in lines} == {0.0}
    assert scorer.calls == START + 12 * UPDATE + 3 * canary.CANARY_TEXTS, "after updates 5 and 10, and after the last"


def test_nobody_is_asked_where_that_is_switched_off(tmp_path: Path) -> None:
    scorer = Liar()
    train(tmp_path, scorer, updates=6, health={"canary": 0})
    assert scorer.calls == 6 * UPDATE
    assert not [name for line in read_lines(tmp_path / "metrics.jsonl") for name in line if name.startswith("canary")]


def test_of_several_replicas_only_the_one_that_lies_is_stopped(tmp_path: Path) -> None:
    told, liar = list[str](), Liar(LIES["negated"], after=30)
    train(tmp_path, Liar(), liar, Liar(), told=told, updates=25)
    (line,) = [line for line in told if "has changed" in line]
    assert "by scorer-1 are" in line and line.endswith("; it gets no more work")
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert len(lines) == 25 and lines[-1]["canary/retired"] == 1.0 and (tmp_path / "final").exists()
    calls = liar.calls
    assert lines[-1]["canary/trained"] == int(re.findall(r"; (\d+) groups of its answers", line)[0])
    assert calls < 30 + 3 * EVERY * UPDATE, "it gets no more work"


def test_groups_that_it_answered_and_nobody_learned_from_are_scored_again(tmp_path: Path) -> None:
    told = list[str]()
    schedule = {"kind": "async", "tau": 4}
    slow = [toy.ToySampler(STUDENT, seconds=0.3)]
    learner = toy.ToyLearner(STUDENT, lr=0.1, cost=lambda _: 4.0)
    train(
        tmp_path, Liar(), Liar(LIES["constant"], after=60), told=told, updates=30, schedule=schedule, samplers=slow,
        learner=learner,
    )  # fmt: skip
    ledger, last = read_lines(tmp_path / "ledger.jsonl"), read_lines(tmp_path / "metrics.jsonl")[-1]
    redone = [entry for entry in ledger if entry.get("distrusted") == "scorer-1"]
    assert len(redone) == last["canary/redone"] > 0 and all(entry["end"] == "trained" for entry in redone)
    assert len({entry["number"] for entry in ledger}) == len(ledger) == 30 * UPDATE, "every group ends once"


def test_the_odd_one_of_three_is_found_at_the_start(tmp_path: Path) -> None:
    told = list[str]()
    train(tmp_path, Liar(LIES["plus 0.5"]), Liar(), Liar(), told=told, updates=2)
    (line,) = [line for line in told if "has changed" in line]
    assert "by scorer-0 are" in line


def test_of_two_that_differ_at_the_start_nobody_is_believed(tmp_path: Path) -> None:
    with pytest.raises(Unhealthy, match="no other replica is left.*the weights of update 0 are in .*/0$"):
        train(tmp_path, Liar(LIES["plus 0.5"]), Liar(), updates=2)


STARTS: dict[str, Lie] = {
    "noise": lambda x, ids, n: -np.random.default_rng(n).exponential(size=x.shape),
    "noise of one tenth": lambda x, ids, n: x + 0.1 * np.random.default_rng(n).standard_normal(x.shape),
    "every tenth call": lambda x, ids, n: x if n % 10 else x - 3.0,
}


@pytest.mark.parametrize("lie", STARTS)
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_a_teacher_that_is_inconsistent_at_the_start_does_not_set_its_own_limit(
    lie: str, copies: int, tmp_path: Path
) -> None:
    told = list[str]()
    liars = [Liar(STARTS[lie]), *(Liar() for _ in range(copies - 1))]
    if copies == 1:
        with pytest.raises(Unhealthy, match=r"teacher main is inconsistent: .* limit 0.01\).*no other replica is left"):
            train(tmp_path, *liars, told=told, updates=2)
        assert not read_lines(tmp_path / "metrics.jsonl")
        return
    train(tmp_path, *liars, told=told, updates=12)
    (line,) = [line for line in told if line.startswith("health: ")]
    assert (
        "teacher main is inconsistent" in line and "by scorer-0 are" in line and line.endswith("; it gets no more work")
    )


def behind(place: int) -> Lie:
    return lambda x, ids, n: np.concatenate([x[:place], x[place:] - 2.0])


LONG: dict[str, Any] = {"sampler": {"max_tokens": 40, "group": 2}}


def test_a_copy_that_is_wrong_behind_the_short_texts_is_found(tmp_path: Path) -> None:
    told = list[str]()
    train(tmp_path / "three", Liar(behind(30)), Liar(), Liar(), told=told, updates=2, **LONG)
    (line,) = [line for line in told if line.startswith("health: ")]
    assert re.search(r"has changed: .* by scorer-0 .* at position 3\d of text 4 had", line)
    with pytest.raises(Unhealthy, match="no other replica is left"):
        train(tmp_path / "two", Liar(behind(30)), Liar(), updates=2, **LONG)
    with pytest.raises(Unhealthy, match=r"at position 3\d of text 4 had .*found good after update 5"):
        train(tmp_path / "later", Liar(behind(30), after=80), updates=20, **LONG)


def test_it_is_only_said_once_where_that_is_asked_for(tmp_path: Path) -> None:
    told = list[str]()
    train(tmp_path, Liar(LIES["times 3"], after=60), told=told, updates=25, health={"stop": False})
    (line,) = [line for line in told if line.startswith("health: ")]
    assert "teacher main has changed" in line and len(read_lines(tmp_path / "metrics.jsonl")) == 25


@pytest.mark.parametrize("changed", [True, False])
def test_a_teacher_that_changes_between_stop_and_resume_is_found(tmp_path: Path, changed: bool) -> None:
    train(tmp_path, Liar(), updates=6, checkpoint={"every": 1})
    again = partial(train, tmp_path, Liar(LIES["plus 0.5"] if changed else None), updates=12, again=True)
    if not changed:
        again(checkpoint={"every": 1})
        assert len(read_lines(tmp_path / "metrics.jsonl")) == 12
        return
    with pytest.raises(Unhealthy, match=r"has changed.*found good after update 6.*weights of update 6 are in .*/6$"):
        again(checkpoint={"every": 1})
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 6


def test_200_honest_runs_alarm_nobody(tmp_path: Path) -> None:
    """A few of them here; all of them: python benchmarks/canaries.py."""
    for seed in range(6):
        told = list[str]()
        scorers = [Liar(noise=noise, seed=10 * seed + i) for i, noise in enumerate((0.0, 1e-3, 5e-3)[seed % 3 :])]
        train(tmp_path / str(seed), *scorers, told=told, updates=15, seed=seed)
        assert not told, told


def test_a_teacher_that_does_not_answer_its_canary_is_asked_again(tmp_path: Path) -> None:
    class Absent(Liar):
        async def probe(self, *given: Any) -> list[TextScores]:
            self.times = getattr(self, "times", 0) + 1
            if self.times == START + 1:
                raise EndpointError("teacher main at http://x answers 503")
            return await super().probe(*given)

    told = list[str]()
    train(tmp_path, scorer := Absent(), told=told, updates=7)
    assert told == [
        "scorer did not answer its canary request, which will be repeated: teacher main at http://x answers 503"
    ]
    assert scorer.times == START + 3 * canary.CANARY_TEXTS, (
        "at the start, after update 5, after update 6, and after the last"
    )


class AbsentAtLast(Liar):
    """Does not answer so many checks after the last of seven updates; there are checks at the start and at update 5."""

    times, checks = 0, 1

    async def probe(self, *given: Any) -> list[TextScores]:
        self.times += 1
        if 0 < self.times - START - canary.CANARY_TEXTS <= self.checks * canary.CANARY_TEXTS:
            raise EndpointError("teacher main at http://x answers 503")
        return await super().probe(*given)


def test_the_last_check_is_repeated_if_it_has_no_answer(tmp_path: Path) -> None:
    silent = "scorer did not answer its canary request, which will be repeated: teacher main at http://x answers 503"
    told = list[str]()
    train(tmp_path / "once", AbsentAtLast(), told=told, updates=7)
    assert told == [silent]
    with pytest.raises(Unhealthy, match="has changed"):
        train(tmp_path / "changed", AbsentAtLast(LIES["constant"], after=began_at(6, 1)), updates=7)
    twice = AbsentAtLast()
    twice.checks = 2
    train(tmp_path / "twice", twice, told=(told := []), updates=7)
    last = "scorer was not checked after the last update: its answers after update 5 may be those of a changed teacher"
    assert told == [silent, silent, last]


@pytest.mark.parametrize("answers", [1, 2])
def test_a_teacher_is_stopped_for_unusable_answers_only_if_it_repeats_them(tmp_path: Path, answers: int) -> None:
    """One answer in a thousand may be garbage, also from a healthy endpoint."""

    class Spoils(Liar):
        times = 0

        async def probe(self, *given: Any) -> list[TextScores]:
            self.times += 1
            spoiled = self.times - START in [1, 1 + canary.CANARY_TEXTS][:answers]
            return said(cause="no table of token ids") if spoiled else await super().probe(*given)

    if answers == 1:
        train(tmp_path, Spoils(), told=(told := list[str]()), updates=7)
        assert not told
    else:
        with pytest.raises(
            Unhealthy, match="gives unusable scores of fixed texts by scorer, at two requests: text 0: no"
        ):
            train(tmp_path, Spoils(), updates=7)


def test_a_teacher_that_comes_back_after_failing_is_asked_at_once(tmp_path: Path) -> None:
    """Another model answers at the address where one was gone for a while."""

    class Back(Liar):
        async def score(self, group: Group) -> list[Handle]:
            if self.calls == 0:
                self.calls = 1
                raise ConnectionError("refused")
            return await super().score(group)

    with pytest.raises(Unhealthy, match="has changed"):
        train(tmp_path, Back(LIES["constant"], after=began_at(7, 1)))
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 7, "and not only after update 10"


# --- workers that come ------------------------------------------------------------------------------------------------


def test_one_that_takes_the_place_of_another_is_asked_before_its_answers_are_believed(tmp_path: Path) -> None:
    class Dies(Liar):
        async def score(self, group: Group) -> list[Handle]:
            if self.calls >= 0:
                raise WorkerDied("gone")
            return await super().score(group)

    async def replace(worker: Any) -> Any:
        return Liar(LIES["minus 0.5"])

    config, told = settings({"updates": 12}), list[str]()
    made = Engines(
        samplers=(toy.ToySampler(STUDENT),),
        scorers={"main": (Liar(), Dies(after=30))},
        learner=toy.ToyLearner(STUDENT, lr=0.1, cost=lambda _: 2.0),
        close=lambda: None,
        replace=replace,
        dismiss=lambda worker: virtual_sleep(),
    )
    with RunLog.create(config, tmp_path) as log:
        virtual.run(Run(config, made, PROMPTS, log, say=told.append, ends=(EOS,)).train())
    said = "\n".join(told)
    assert re.search(r"scorer-1 died.*\n.*scorer-1 is at work.*\nhealth: teacher main has changed: .*scorer-1", said)
    assert said.endswith("scorer-1 has left")


async def virtual_sleep() -> None:
    return None


# --- teachers that move -----------------------------------------------------------------------------------------------

MOVES: dict[str, Any] = {
    "teachers": {"main": {"model": "self", "context": "{prompt}{ground_truth}", "follow": {"ema": 0.9}, "recheck": 0.0}}
}


class Follows(Liar):
    """The student as its own teacher, which sees what the student sees."""


def moving(**lie: Any) -> tuple[Follows, toy.ToyLearner]:
    learner = toy.ToyLearner(STUDENT, lr=0.1, follow={"main": Follower(decay=0.9, every=1, dtype="float64")})
    return Follows(**lie), learner


def test_a_moving_teacher_is_compared_with_what_the_learner_knows_of_its_version(tmp_path: Path) -> None:
    told = list[str]()
    scorer, learner = moving()
    train(tmp_path, scorer, learner=learner, told=told, updates=12, **MOVES)
    assert told == [] and scorer.version == 12
    assert max(line.get("canary/teacher", 0.0) for line in read_lines(tmp_path / "metrics.jsonl")) < 1e-6


@pytest.mark.parametrize("lie", ["negated", "constant", "slow drift", "plus 0.5"])
def test_a_moving_teacher_that_lies_from_an_update_on_is_found(tmp_path: Path, lie: str) -> None:
    scorer, learner = moving(lie=LIES[lie], after=began_at(BEGINS, 2))
    with pytest.raises(Unhealthy, match="teacher main lacks the exported weights: a log-prob by scorer is"):
        train(tmp_path, scorer, learner=learner, **MOVES)
    assert BEGINS <= len(read_lines(tmp_path / "metrics.jsonl")) <= BEGINS - 1 + 2 * EVERY


@pytest.mark.parametrize("lost", ["answers of a sampler", "scores of a teacher"])
def test_a_check_whose_records_are_lost_with_their_machine_is_repeated_at_the_next_update(
    tmp_path: Path, lost: str
) -> None:
    learner = moving()[1]
    compare, checked = learner.compare, list[int]()

    async def fails_once(batch: Any, teacher: str = "") -> Any:
        if bool(teacher) == (lost == "scores of a teacher"):
            checked.append(batch.update - 1)
            if len(checked) == 2:
                raise RecordsLost("the machine that held them is gone")
        return await compare(batch, teacher)

    learner.compare = fails_once  # type: ignore[method-assign]
    train(tmp_path, Follows(), learner=learner, updates=12, **MOVES)
    assert checked == [0, 5, 6, 11, 12]


# --- samplers ---------------------------------------------------------------------------------------------------------


class Wrong(toy.ToySampler):
    """Records other log-probs than those it draws by, from a version on."""

    def __init__(self, wrong: Callable[[np.ndarray], np.ndarray], after: int) -> None:
        super().__init__(STUDENT)
        self.wrong, self.after = wrong, after

    def _write(self, row: Any, prompt: Prompt, sampling: Sampling) -> None:
        super()._write(row, prompt, sampling)
        if self.version >= self.after:
            row.logps[-1] = self.wrong(row.logps[-1])


class Stale(toy.ToySampler):
    """Says that it has loaded what was published, and goes on with what it had."""

    def __init__(self, after: int) -> None:
        super().__init__(STUDENT)
        self.after = after

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        before = self.table
        loaded = await super().publish(weights, mode)
        if weights.version >= self.after:
            self.table = before
        return loaded


class Misdated(toy.ToySampler):
    """Writes an old version on its tokens."""

    def __init__(self, after: int) -> None:
        super().__init__(STUDENT)
        self.after = after

    def _write(self, row: Any, prompt: Prompt, sampling: Sampling) -> None:
        super()._write(row, prompt, sampling)
        if self.version > self.after:
            row.versions[-1] = self.after


BAD_SAMPLERS: dict[str, tuple[Callable[[], Any], str]] = {
    "log-probs too low": (lambda: Wrong(lambda x: x - 0.3, 7), "its log-probs are not the learner's"),
    "log-probs halved": (lambda: Wrong(lambda x: 0.5 * x, 7), "its log-probs are not the learner's"),
    "stale weights": (lambda: Stale(7), "stale weights, or log-probs of another distribution"),
    "wrong version": (lambda: Misdated(7), "its tokens name version 7, but only version 8 is possible"),
}


@pytest.mark.parametrize("case", BAD_SAMPLERS)
def test_only_the_sampler_that_is_wrong_is_stopped_and_what_it_drew_is_drawn_again(case: str, tmp_path: Path) -> None:
    made, why = BAD_SAMPLERS[case]
    told, bad = list[str](), made()
    train(
        tmp_path, Liar(), samplers=[toy.ToySampler(STUDENT), bad], told=told, updates=20,
        learner=toy.ToyLearner(STUDENT, lr=1.0),
    )  # fmt: skip
    (line,) = [line for line in told if "cannot be trusted" in line]
    assert line.startswith("health: sampler-1 cannot be trusted: ") and why in line
    assert "(found good after update 5)" in line and line.endswith("it gets no more work")
    assert not bad.running and len(read_lines(tmp_path / "metrics.jsonl")) == 20


@pytest.mark.parametrize("case", BAD_SAMPLERS)
def test_the_last_sampler_ends_the_run(case: str, tmp_path: Path) -> None:
    made, why = BAD_SAMPLERS[case]
    with pytest.raises(Unhealthy, match=rf"sampler cannot be trusted: .*{why}.*no other replica is left"):
        train(tmp_path, Liar(), samplers=[made()], learner=toy.ToyLearner(STUDENT, lr=1.0))
    assert len(read_lines(tmp_path / "metrics.jsonl")) == (8 if case == "wrong version" else 10)


def test_in_an_async_run_half_rolled_out_groups_of_a_wrong_sampler_begin_again(tmp_path: Path) -> None:
    told, bad = list[str](), Wrong(lambda x: x - 0.3, 12)
    good = toy.ToySampler(STUDENT)
    good.seconds = bad.seconds = 0.4
    train(
        tmp_path, Liar(), samplers=[good, bad], told=told, updates=25, schedule={"kind": "async", "tau": 4},
        learner=toy.ToyLearner(STUDENT, lr=0.1, cost=lambda _: 1.0),
    )  # fmt: skip
    ledger, last = read_lines(tmp_path / "ledger.jsonl"), read_lines(tmp_path / "metrics.jsonl")[-1]
    assert last["canary/retired"] == 1.0 and last["canary/redone"] == last["restarted"] > 0
    assert len({entry["number"] for entry in ledger}) == len(ledger) == 25 * UPDATE
    assert sum(entry.get("distrusted") == "sampler-1" for entry in ledger) == last["canary/redone"]


def test_a_group_that_a_wrong_sampler_has_begun_before_begins_again_once() -> None:
    """The call that finds the fault repeats its own group, so that no second rollout of it may start."""
    prompt, asked = PROMPTS.at(5), list[bool]()
    begun, rolled = (drawn_by_version(prompt, version, count) for version, count in ((8, 2), (99, 4)))

    class Engine:
        async def generate(self, *args: Any) -> Any:
            return rolled

    def distrust(worker: Any, wrong: str) -> None:
        asked.append(5 in worker.since)
        samplers.retired.add(worker)

    ledger, samplers = SimpleNamespace(counts=Counter()), SimpleNamespace(version=8, retired=set())
    live = {5: SimpleNamespace(version=8)}
    groups: Any = SimpleNamespace(
        admission=SimpleNamespace(live=live, schedule=SimpleNamespace(publish="keep")),
        ledger=ledger,
        responses={5: begun},
        paused=False,
        progress=SimpleNamespace(changed=asyncio.Event()),
    )
    canaries: Any = SimpleNamespace(distrust=distrust)
    sampling = Sampling(max_tokens=4)
    rollouts = Rollouts(groups, samplers, {}, sampling, lambda _: sampling, canaries, None, lambda _: False)  # type: ignore[arg-type]
    worker: Any = Hashed(engine=Engine(), since={5: 0, 6: 0})
    assert asyncio.run(rollouts._generate(prompt, worker)) == ()
    assert asked == [False] and not groups.responses and ledger.counts["thrown_tokens"] == 4 and worker.since == {6: 0}


def test_a_sampler_that_is_retired_while_it_answers_costs_tokens_and_counts_nothing_else() -> None:
    """Another sampler answers the same group from where it was begun, and that answer is counted."""
    prompt = PROMPTS.at(5)
    begun, rolled = drawn_by_version(prompt, 8, 2), drawn_by_version(prompt, 8, 6)
    ledger, samplers = SimpleNamespace(counts=Counter()), SimpleNamespace(version=8, retired=set())
    groups: Any = SimpleNamespace(
        admission=SimpleNamespace(live={5: SimpleNamespace(version=8)}, schedule=SimpleNamespace(publish="keep")),
        ledger=ledger,
        responses={5: begun},
        paused=False,
        progress=SimpleNamespace(changed=asyncio.Event()),
    )

    class Engine:
        async def generate(self, *args: Any) -> Any:
            samplers.retired.add(worker)
            return rolled

    canaries: Any = None
    sampling = Sampling(max_tokens=4)
    rollouts = Rollouts(groups, samplers, {}, sampling, lambda _: sampling, canaries, None, lambda _: False)  # type: ignore[arg-type]
    worker: Any = Hashed(engine=Engine(), since={})
    assert asyncio.run(rollouts._generate(prompt, worker)) == ()
    assert groups.responses == {5: begun} and ledger.counts["thrown_tokens"] == 4


def drawn_by_version(prompt: Prompt, version: int, tokens: int) -> list[Handle]:
    ids, logp = np.ones((tokens, 1), np.int32), np.zeros((tokens, 1), np.float32)
    versions = np.full(tokens, version, np.int32)
    rollout = one_turn(prompt, 0, actions=ids, action_logp=logp, versions=versions, finish="length")
    return [Handle(header_of(rollout), rollout)]


class Hashed(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize("value", [-9999.0, float("nan")])
def test_what_is_no_log_prob_ends_the_run_before_any_canary(value: float, tmp_path: Path) -> None:
    def lie(logp: np.ndarray, ids: np.ndarray, calls: int) -> np.ndarray:
        return np.full_like(logp, value)

    with pytest.raises(EngineError, match="scoring failed at the last 15 tries"):
        train(tmp_path, Liar(lie, after=began_at(BEGINS, 2)))
    assert len(read_lines(tmp_path / "metrics.jsonl")) == BEGINS - 1


# --- behind an endpoint -----------------------------------------------------------------------------------------------


def test_another_model_behind_the_endpoint_is_found(tmp_path: Path) -> None:
    """A real endpoint on loopback, whose model is changed in the middle of the run."""

    class Swaps(HttpScorer):
        asked = 0

        async def score(self, group: Group) -> list[Handle]:
            self.asked += 1
            if self.asked > began_at(7, 1):
                fake.scores = table(OTHER.log_softmax(-1).numpy())
            return await super().score(group)

    with FakeEndpoint(table(TEACHER.log_softmax(-1).numpy()), vocabulary=V) as fake:
        config = settings(
            {"loss": {"m": 1}, "teachers": {"main": {"model": "t", "base_url": fake.url, "recheck": 0.0}}}
        )
        scorer = Swaps(Endpoint("main", fake.url, fake.name), scorer_settings())
        made = Engines(
            samplers=(toy.ToySampler(STUDENT),),
            scorers={"main": (scorer,)},
            learner=toy.ToyLearner(STUDENT, lr=0.1),
            close=lambda: None,
        )
        with (
            RunLog.create(config, tmp_path) as log,
            pytest.raises(Unhealthy, match=r"teacher main has changed.*limit 0.1.*found good after update 5"),
        ):
            asyncio.run(Run(config, made, PROMPTS, log, say=lambda _: None, ends=(EOS,)).train())
    assert len(read_lines(tmp_path / "metrics.jsonl")) <= 6 + 2 * EVERY


def test_limits_follow_from_the_worst_of_all_answers_at_the_start() -> None:
    found = worst(
        [{"drift/k3_kl": k3, "drift/ppl_ratio": ratio} for k3, ratio in ((0.1, 1.02), (0.2, 1.0), (0.1, 0.9))]
    )
    assert found == {"drift/k3_kl": 0.2, "drift/ppl_ratio": 0.9}


@pytest.mark.parametrize(
    "start, k3, ratio, trusted",
    [
        (None, 0.25, 1.1, True),  # the start itself: up to the largest limits
        (None, 0.35, 1.0, False),
        (None, 0.05, 1.35, False),
        ({"drift/k3_kl": 0.001, "drift/ppl_ratio": 1.0}, 0.06, 1.0, False),  # a student that 16 bits hardly change
        ({"drift/k3_kl": 0.001, "drift/ppl_ratio": 1.0}, 0.04, 1.14, True),  # 32 tokens with this KL vary as much
        ({"drift/k3_kl": 0.001, "drift/ppl_ratio": 1.0}, 0.04, 1.16, False),
        (None, 0.11, 1.159, True),  # the first answers of an honest student without fifteen layers
        (None, 0.11, 1.25, False),
        ({"drift/k3_kl": 0.05, "drift/ppl_ratio": 1.02}, 0.14, 0.95, True),
        ({"drift/k3_kl": 0.2, "drift/ppl_ratio": 1.1}, 0.35, 1.0, False),  # the limit is bounded
    ],
)
def test_in_16_bits_limits_of_samplers_follow_from_the_start(
    start: Any, k3: float, ratio: float, trusted: bool
) -> None:
    numbers = {"drift/k3_kl": k3, "drift/ppl_ratio": ratio}
    said = sampler_fault(numbers, {1}, version=1, rounding="half", start=start)
    assert (said == "") is trusted and (trusted or "or 16 bits are too few for this student" in said)
    assert sampler_fault(numbers, {1}, version=1, rounding="exact", start=start), "float32 is exact"


@pytest.mark.parametrize(
    "rounding, kls, asked, trusted",
    [
        ("half", [0.0, 0.0, 0.0, 0.0, {"exact/k3_kl": 0.0}], 5, True),  # all of it is the learner's own rounding
        ("half", [0.0, 0.0, 0.0, 0.0, *[{"exact/k3_kl": 0.1}] * 4], 8, False),
        ("half", [0.0, 0.0, 0.0, 0.0, *[{"exact/ppl_ratio": 2.0}] * 4], 8, False),
        ("half", [0.01, 0.02, 0.01, 0.01, 0.04], 5, True),  # four times at the start, and once later
        ("half", [0.01, 0.02, 0.01, 0.01, 0.3, 0.01], 6, True),  # one token had the KL: the next answer decides
        ("half", [0.01, 0.02, 0.01, 0.01, 0.3, 0.3, 0.2, 0.3], 8, False),
        ("half", [0.01, 0.02, 0.01, 0.01, np.nan, 0.01, 0.01, 0.01], 8, False),
        ("exact", [0.0, 0.01], 2, False),
    ],
)
def test_a_single_answer_in_16_bits_does_not_accuse_a_sampler(
    rounding: Any, kls: list[Any], asked: int, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, said, waiting, seeds = Prompt(id="p", number=-1, tokens=np.array([2], np.int32), seed=5), [], [*kls], []

    class Drawing:
        async def generate(self, prompt: Prompt, sampling: Sampling) -> Group:
            seeds.append(prompt.seed)
            logp = np.zeros((1, 1), np.float32)
            versions, ids = np.zeros(1, np.int32), np.ones((1, 1), np.int32)
            rollout = one_turn(prompt, 0, actions=ids, action_logp=logp, versions=versions, finish="eos")
            return (Handle(header_of(rollout), rollout),)

    class Comparing:
        async def compare(self, batch: Batch, teacher: str = "") -> dict[str, float]:
            if isinstance(found := waiting.pop(0), dict):
                return {"drift/k3_kl": 1.0, "drift/ppl_ratio": 1.0} | found
            return {"drift/k3_kl": found, "drift/ppl_ratio": 1.0}

    worker: Any = SimpleNamespace(engine=Drawing(), since={}, name="sampler", good=0, unproven=True)
    parts: Any = {"groups": None, "pools": [], "teachers": [], "samplers": SimpleNamespace(workers=[worker])}
    canaries = Canaries(
        HealthConfig(canary=1),
        Comparing(),  # type: ignore[arg-type]
        updates=9,
        questions=[prompt],
        sampling=Sampling(max_tokens=4),
        rounding=rounding,
        last={},
        say=said.append,
        **parts,
    )
    monkeypatch.setattr(canaries, "distrust", lambda worker, wrong: said.append(wrong))

    async def both() -> None:
        await canaries._draw_all(0)
        worker.unproven = True
        await canaries._draw_all(0)

    asyncio.run(both())
    assert len(seeds) == asked and (said == []) is trusted and worker.unproven is not trusted
    assert len(set(seeds[:4])) == (4 if rounding == "half" else 1), "four different answers"


@pytest.mark.parametrize(
    "exact, url, shifts, asked, trusted",
    [
        (False, None, [0.0] * 4 + [0.09], 5, True),
        (False, None, [0.0] * 4 + [0.15] + [0.02, 0.12, 0.01, 0.03], 9, True),  # rounding: the median is near
        (False, None, [0.0] * 4 + [0.15] * 5, 9, False),  # a change of this size stays
        (False, None, [0.0] * 4 + [0.5], 5, False),  # rounding does not explain it
        (False, "http://t", [0.0] * 4 + [0.15], 5, False),  # one of several servers behind it may be wrong
        (True, None, [0.0] * 4 + [0.02], 5, False),
    ],
)
def test_a_single_answer_in_16_bits_that_rounding_may_explain_does_not_accuse_a_teacher(
    exact: bool, url: str | None, shifts: list[float], asked: int, trusted: bool
) -> None:
    waiting, found = [*shifts], list[str]()

    class Scoring:
        async def probe(self, texts: Sequence[Rollout], attempts: Any = None) -> list[TextScores]:
            shift = waiting.pop(0)
            return [TextScores(np.full((6, 1), -1.0 - shift)) for _ in texts]

    class Answering:
        engine, since, name, good, unproven = Scoring(), dict[int, int](), "scorer", 0, True

    pool: Any = SimpleNamespace(workers=[Answering()], tries=SimpleNamespace(recovered=False))
    teacher: Any = SimpleNamespace(name="main", pool=pool, shows=False, follows=False)
    teacher.settings = SimpleNamespace(base_url=url)
    (text,) = texts_of([Prompt(id="p", number=-1, tokens=np.arange(2, 8, dtype=np.int32))], Sampling(max_tokens=6), ())
    parts: Any = {"groups": None, "pools": [], "samplers": None, "learner": None}
    canaries = Canaries(
        HealthConfig(canary=1),
        teachers=[Watched(teacher, [text], exact, noise=0.3)],
        updates=9,
        questions=[],
        sampling=Sampling(max_tokens=6),
        rounding="exact" if exact else "half",
        last={},
        say=found.append,
        **parts,
    )

    def accuse(pool: Any, worker: Any, wrong: str, **how: Any) -> None:
        found.append(wrong)

    canaries._bad = accuse  # type: ignore[method-assign]

    async def both() -> None:
        await canaries._ask_all(0, 4)
        await canaries._ask_all(1, 1)

    asyncio.run(both())
    assert len(shifts) - len(waiting) == asked == len(shifts)
    assert (found == []) is trusted and all("teacher main has changed" in each for each in found)
