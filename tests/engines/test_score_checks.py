"""Teachers that lie, by the number and by the run: each lie is found, and named with its cause."""

import asyncio
import io
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from slipstream.config.file import parse
from slipstream.config.running import HealthConfig
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts, Row
from slipstream.engines.native.learning.learner import scored as sample_of
from slipstream.engines.score_checks import FLOOR, rms_difference, scored
from slipstream.errors import EngineError, NonFiniteError, RunDirError, SlipstreamError, Unhealthy
from slipstream.metrics import trust_metrics
from slipstream.pipeline import checkpoint
from slipstream.pipeline.admission import AdmissionState
from slipstream.pipeline.checkpoint import Checkpoints, RunState, newest
from slipstream.pipeline.control.actions import Stop
from slipstream.pipeline.control.health import (
    Health,
    History,
    Line,
    Trouble,
    dead,
    exploding,
    find_troubles,
    idle,
    negative_kl,
    repeating,
    still_reward,
    unusable_scores,
)
from slipstream.pipeline.failures import ResponseWatch
from slipstream.pipeline.ledger import Ledger
from slipstream.pipeline.run import Run
from slipstream.pipeline.stages import is_rechecked
from slipstream.protocols import Engines, GradingSampler, Scorer
from slipstream.records import Batch, Group, Handle, Scored, header_of
from slipstream.reporting.terminal.watch import Watched
from slipstream.run_dir.formats import resumable
from slipstream.run_dir.reading import RunDir
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runs.start import print_resume_command
from slipstream.simulation import virtual_clock as virtual
from support import tabular_engines as toy
from support.tiny_models import make_prompts, masked, uniform

V = 6
TEACHER = toy.random_table(V, seed=1, scale=2.0)

# --- a number ---------------------------------------------------------------------------------------------------------


def response(*tokens: int) -> Handle:
    rollout = uniform(make_prompts(1)[0], 0, tokens)
    return Handle(header_of(rollout), rollout)


def told(logp: list[float], dtype: Any = np.float32) -> Handle:
    with np.errstate(over="ignore"):
        return scored(response(7, 8, 9), teacher="main", teacher_logp=np.array(logp, dtype))


@pytest.mark.parametrize(
    "value, dtype, cause",
    [
        (np.nan, np.float32, "a log-prob of nan, which is not a usable number"),
        (np.inf, np.float32, "a log-prob of inf, which is above 0"),
        (-np.inf, np.float32, "a log-prob of -inf, which is not a usable number"),
        (-1e300, np.float64, "a log-prob of -1e+300, which is not a usable number"),
        (0.01, np.float32, "a log-prob of 0.01, which is above 0"),
        (3.2, np.float32, "a log-prob of 3.2, which is above 0"),
        (-9999.0, np.float32, "a log-prob of -9999, which is a placeholder for an unknown log-prob"),
        (-999.0, np.float32, "a log-prob of -999, which is a placeholder for an unknown log-prob"),
    ],
)
def test_what_is_no_log_prob_makes_a_failed_member_with_its_cause(value: float, dtype: Any, cause: str) -> None:
    handle = told([-1.0, value, -1.0], dtype)
    assert handle.header.finish == "error"
    assert handle.header.cause == f"teacher main gives token 8 at position 1 of the response {cause}"


def test_what_is_tiny_ends_at_the_floor_and_is_counted() -> None:
    handle = told([-500.0, -1.0, 5e-4])
    assert handle.body.teacher_logp.tolist() == [FLOOR, -1.0, 0.0]
    assert handle.header.floored == 1 and handle.header.finish != "error"
    assert handle.header.gap == 101.0, "of what drew it with log-prob 0"


def test_a_token_is_on_the_floor_once_however_many_draws_of_it_are() -> None:
    logp_NM = np.array([[-200.0], [-300.0], [-1.0]])
    handle = scored(response(7, 8, 9), teacher="t", teacher_logp=logp_NM[:, 0], teacher_action_logp=logp_NM)
    assert handle.header.floored == 2
    assert np.array_equal(handle.body.teacher_action_logp[:, 0], handle.body.teacher_logp)


def test_probabilities_that_add_up_to_more_than_1_are_found() -> None:
    ids, logp = np.array([[7, 3]] * 3), np.log(np.array([[0.6, 0.4], [0.7, 0.5], [0.5, 0.1]]))
    found = {"teacher_logp": logp[:, 0].copy(), "teacher_topk_logp": logp, "teacher_ids": ids}
    found["teacher_logp"][1:] = -1.0
    assert (
        "probabilities at position 1 that add up to 1.200"
        in scored(response(7, 8, 9), teacher="t", **found).header.cause
    )


@pytest.mark.parametrize("bad", [np.array([[1.0], [np.nan], [1.0]]), np.array([[0x3F80], [0x7FC0], [0]], np.uint16)])
def test_hidden_states_are_numbers_too(bad: Any) -> None:
    fine = np.zeros(3, np.float32)
    handle = scored(response(7, 8, 9), teacher="t", teacher_logp=fine, teacher_hidden=bad)
    assert handle.header.cause == "teacher t gives hidden states that are not finite"
    bad[1] = 0
    assert scored(response(7, 8, 9), teacher="t", teacher_logp=fine, teacher_hidden=bad).header.finish != "error"


def test_a_response_of_which_nothing_is_trained_has_nothing_to_be_wrong() -> None:
    rollout = masked(response(7, 8).body, np.array([False, False]))
    handle = scored(Handle(header_of(rollout), rollout), teacher="t", teacher_logp=np.zeros(0, np.float32))
    assert handle.header.finish != "error" and handle.header.gap == 0


def test_who_scores_what_is_scored_says_how_far_the_answers_are_apart() -> None:
    first = told([-1.0, -2.0, -3.0])
    again = scored(first, teacher="main", teacher_logp=np.array([-1.0, -2.0, -3.5], np.float32))
    assert first.header.differs == 0 and again.header.differs == pytest.approx(0.5 / 3**0.5)
    assert rms_difference(first.body, again.body) == again.header.differs


def test_the_kl_to_a_teacher_and_its_error_by_hand() -> None:
    """Two responses: gaps of 3 over 2 tokens, and of 1 over 2. The mean is 1; they are off by 1 and −1."""
    header = header_of(response(7, 8).body, teacher="a")
    headers = [replace(header, gap=3.0), replace(header, gap=1.0, floored=1)]
    # √(2/1 · (1 + 1)) / 4 = 0.5
    assert trust_metrics(headers) == {"teacher/kl": 1.0, "teacher/kl_error": 0.5, "teacher/floored": 1.0}
    both = trust_metrics([*headers, replace(header, teacher="b", gap=-4.0)])
    assert (both["teacher/a/samples"], both["teacher/b/samples"]) == (2.0, 1.0)
    assert both["teacher/a/kl"] == 1.0 and (both["teacher/b/kl"], both["teacher/b/kl_error"]) == (-2.0, 2.0)
    assert trust_metrics([replace(header, teacher="")]) == {}
    alone = trust_metrics(headers, several_teachers=True)  # this update has responses to one of two teachers
    known = {"teacher/a/kl": 1.0, "teacher/a/kl_error": 0.5, "teacher/a/samples": 2.0, "teacher/floored": 1.0}
    assert alone == known


def test_faults_of_teachers_wait_for_the_next_metrics_of_teachers() -> None:
    """An update of given responses alone has none."""
    counts: Any = SimpleNamespace(unusable=Counter(main=3, b=2), again=[0.1], differed=1, several_teachers=False)
    drawn = Handle(header_of(response(7, 8).body, teacher="main"), None)
    assert Ledger._trust(counts, Batch(([drawn.with_header(source="data")],), 1)) == {}
    found = Ledger._trust(counts, Batch(([drawn],), 2))
    assert (found["teacher/invalid"], found["teacher/differed"], found["teacher/recheck_max"]) == (5, 1, 0.1)
    assert "teacher/b/invalid" not in found  # a single teacher needs no name
    assert (counts.unusable, counts.again, counts.differed) == (Counter(), [], 0)
    counts.unusable, counts.several_teachers = Counter(main=3, b=2), True
    found = Ledger._trust(counts, Batch(([drawn],), 3))
    assert [found[f"teacher/{name}invalid"] for name in ("main/", "b/", "")] == [3, 2, 5]


def test_a_drift_of_an_earlier_use_is_none() -> None:
    kl = np.array([0.1, 0.2], np.float32)
    handle = scored(response(7, 8), teacher="t", teacher_logp=np.zeros(2, np.float32), supervision_kl=kl)
    for header, known in (
        (handle.header, kl),
        (replace(handle.header, moved=None, aligned=1.0), None),
        (replace(handle.header, moved=0.0, aligned=1.0), None),
        (replace(handle.header, moved=0.0, aligned=0.0), kl),
    ):
        found = sample_of(Handle(header, handle.body)).supervision_kl
        np.testing.assert_equal(found, known)


# --- a run's own numbers ----------------------------------------------------------------------------------------------

HEALTH = HealthConfig(updates=3, window=20, idle=10, reward=30)
SOUND: dict[str, float] = {
    "grad_norm": 1.0,
    "samples": 64.0,
    "student/entropy": 1.0,
    "student/repeated": 0.02,
    "length/mean": 100.0,
    "teacher/kl": 0.3,
    "teacher/kl_error": 0.02,
    "teacher/invalid": 0.0,
    "teacher/rechecked": 1.0,
    "teacher/differed": 0.0,
}
Synthetic = Callable[[int], Line]


def run_of(late: Synthetic, *, sound: int = 30, then: int = 30) -> History:
    """So many sound updates with a little noise, and then others."""
    rng = np.random.default_rng(0)

    def reward() -> float:
        return 0.2 + 0.05 * rng.random()

    noisy = [SOUND | {"grad_norm": float(np.exp(rng.normal())), "reward/exact": reward()} for _ in range(sound)]
    lines = noisy + [{**SOUND, "reward/exact": reward(), **late(update)} for update in range(then)]
    return History(lines[: HEALTH.updates], lines)


Rule = Callable[[History, HealthConfig], Trouble | None]
MUST: dict[str, tuple[Rule, Synthetic, str]] = {
    "repeating, and nearer": (
        repeating,
        lambda n: {"student/repeated": 0.9, "teacher/kl": 0.1},
        "^the student repeats itself: 90% .* 2% at the start, while mean reverse KL went from 0.3 to 0.1",
    ),
    "below zero": (
        negative_kl,
        lambda n: {"teacher/kl": -0.8},
        "teacher: mean reverse KL is -0.80 ± 0.01 over the last 3",
    ),
    "one of two": (
        negative_kl,
        lambda n: {"teacher/a/kl": 0.1, "teacher/a/kl_error": 0.1, "teacher/b/kl": -1.0, "teacher/b/kl_error": 0.1},
        "^teacher/b: mean reverse KL",
    ),
    "unusable": (unusable_scores, lambda n: {"teacher/invalid": 8.0}, "for 160 of the last 1440 responses"),
    "one of many unusable": (
        unusable_scores,
        lambda n: {"teacher/invalid": 4.0, "teacher/b/invalid": 4.0, "teacher/a/samples": 64.0},
        "^teacher/b: its scores could not be used for 80 of the last 80 responses",
    ),
    "changing": (
        unusable_scores,
        lambda n: {"teacher/differed": 0.5},
        "10 of the last 20 groups that were scored twice",
    ),
    "exploding": (
        exploding,
        lambda n: {"grad_norm": 1e4 if n > 26 else 1.0},
        "the gradient norm of the last 3 updates was",
    ),
    "exploding again": (
        exploding,
        lambda n: {"grad_norm": 1e6 if n > 26 or n in (10, 20) else 1e-4},
        "the gradient norm of the last 3 updates was 1e.06, the usual one is 0.0001",
    ),
    "certain": (
        dead,
        lambda n: {"student/entropy": 0.01, "teacher/kl": 2.0},
        "the entropy fell from 1 to 0.01",
    ),
    "silent": (dead, lambda n: {"length/mean": 1.0, "teacher/kl": 2.0}, "the length of responses fell from 100 to 1"),
    "uniform": (dead, lambda n: {"student/entropy": 3.7, "teacher/kl": 9.0}, "mean reverse KL rose from 0.3 to 9"),
    "idle": (idle, lambda n: {"grad_norm": 0.0}, "gradient of the last 10 updates was 0: nothing is left"),
    "rejected": (
        idle,
        lambda n: {"grad_norm": 0.0, "correction/rollout_rs_masked_fraction": 1.0},
        "was 0: the correction rejects every token",
    ),
    "agreed": (
        idle,
        lambda n: {"grad_norm": 0.0, "policy/rows_moved": 0.0},
        "was 0: rewards within each group are equal",
    ),
    "still": (still_reward, lambda n: {"reward/exact": 0.0}, "reward/exact has been 0 for 30 updates"),
}
MUST_NOT: dict[str, tuple[Rule, Synthetic]] = {
    "by chance": (negative_kl, lambda n: {"teacher/kl": -0.3, "teacher/kl_error": 0.3}),
    "a little below": (negative_kl, lambda n: {"teacher/kl": -0.04, "teacher/kl_error": 0.001}),
    "twice only": (negative_kl, lambda n: {"teacher/kl": -0.2 if n >= 28 else 0.5}),
    "a few unusable": (unusable_scores, lambda n: {"teacher/invalid": float(n % 10 == 0)}),
    "two changed": (unusable_scores, lambda n: {"teacher/differed": float(n in (25, 26)), "teacher/rechecked": 0.1}),
    "one spike": (exploding, lambda n: {"grad_norm": 1e6 if n == 29 else 1.0}),
    "noise": (exploding, lambda n: {"grad_norm": 30.0}),
    "nothing to learn but a few answers": (exploding, lambda n: {"grad_norm": 1.0 if n % 8 == 0 or n > 26 else 1e-4}),
    "as at the start": (exploding, lambda n: {"grad_norm": 0.3 if n > 26 else 1e-4}),
    "sure, and right": (dead, lambda n: {"student/entropy": 0.01, "teacher/kl": 0.01}),
    "sure, and rewarded": (dead, lambda n: {"student/entropy": 0.01, "reward/exact": 1.0}),
    "far, and rewarded": (dead, lambda n: {"teacher/kl": 9.0, "reward/exact": 1.0}),
    "farther": (dead, lambda n: {"teacher/kl": 3.0}),
    "shorter": (dead, lambda n: {"length/mean": 20.0, "teacher/kl": 2.0}),
    "repeating, and rewarded": (repeating, lambda n: {"student/repeated": 0.9, "reward/exact": 1.0}),
    "repeating a little": (repeating, lambda n: {"student/repeated": 0.4}),
    "not for long": (idle, lambda n: {"grad_norm": float(n < 25)}),
    "nearly still": (still_reward, lambda n: {"reward/exact": float(n == 3) / 64}),
}


@pytest.mark.parametrize("case", MUST)
def test_a_run_that_goes_wrong_is_found_out(case: str) -> None:
    rule, late, said = MUST[case]
    trouble = rule(run_of(late), HEALTH)
    assert trouble is not None and re.search(said, trouble.message), trouble
    assert trouble.stops == (rule is not still_reward) and "\n" not in trouble.message


@pytest.mark.parametrize("case", MUST_NOT)
def test_a_run_that_only_looks_odd_goes_on(case: str) -> None:
    rule, late = MUST_NOT[case]
    assert rule(run_of(late), HEALTH) is None


@pytest.mark.parametrize("length", [1, 2, 3, 5, 30])
def test_a_sound_run_is_found_sound_however_short(length: int) -> None:
    assert list(find_troubles(run_of(lambda n: {}, sound=length, then=0), HEALTH)) == []


@pytest.mark.parametrize("before", [[50, 50, *[0.1] * 20], [50, *[0.1] * 10, 50, *[0.1] * 10]])
def test_two_large_norms_before_do_not_make_three_usual(before: list[float]) -> None:
    """The first updates count once, also while they are in the window."""
    lines = [{"grad_norm": float(norm)} for norm in [*before, 40, 40, 40]]
    assert exploding(History(lines[:3], lines), HealthConfig()) is not None
    more = [{"grad_norm": 50.0}, *lines]
    assert exploding(History(more[:3], more), HealthConfig()) is None


def test_a_teacher_that_lies_is_found_though_many_updates_lack_it() -> None:
    """Each third update has responses to teacher a alone, so that no three updates in a row have both teachers."""
    a, b = ({f"teacher/{name}/kl": kl, f"teacher/{name}/kl_error": 0.01} for name, kl in (("a", 0.1), ("b", -2.0)))
    lines = [a if update % 3 == 0 else a | b for update in range(1, 16)]
    found = [trouble.message for trouble in find_troubles(History(lines[:3], lines), HealthConfig())]
    assert [message.partition(" is ")[0] for message in found] == ["teacher/b: mean reverse KL"]


def test_a_kl_has_not_risen_if_the_first_updates_lack_the_teacher_with_the_larger_one() -> None:
    a, b = ({f"teacher/{name}/kl": kl, f"teacher/{name}/kl_error": 0.01} for name, kl in (("a", 0.1), ("b", 6.0)))
    lines = [*[a] * 5, *[b] * 15]
    assert not list(find_troubles(History(lines[:5], lines), HealthConfig()))
    risen = [
        trouble.message
        for trouble in find_troubles(History([a | b], [*lines, *[a | b | {"teacher/b/kl": 20.0}] * 5]), HealthConfig())
    ]
    assert "mean reverse KL rose from 6 to 20" in risen[0]


def test_a_run_that_goes_on_is_compared_with_its_own_beginning() -> None:
    """And not with how it was when it was resumed: nearly dead, which looks like a baseline to who saw nothing else."""
    sound = list(run_of(lambda n: {}, sound=10, then=0).recent)
    dying = [SOUND | {"student/entropy": 0.2, "length/mean": 30.0, "teacher/kl": 2.0}] * 4
    dead_now = SOUND | {"student/entropy": 0.04, "teacher/kl": 2.0}
    health = Health(HEALTH)
    health.recall([*sound, *dying])
    actions = [action for _ in range(HEALTH.updates) for action in health.on_update(dead_now)]
    assert isinstance(actions[-1], Stop) and "the entropy fell from 1 to 0.04" in actions[-1].message
    assert list(health.first) == sound[: HEALTH.updates]


def test_a_finding_that_stopped_a_run_does_not_stop_it_again_by_the_same_updates() -> None:
    """Scores that could not be used, and a teacher that was mended before the run went on."""
    failing = run_of(lambda n: {"teacher/invalid": 8.0})
    again = Health(HEALTH)
    again.recall(failing.recent)
    assert again.on_update(SOUND) == []
    assert list(again.first) == list(failing.first) and len(again.recent) == 1
    actions = [action for _ in range(10) for action in again.on_update(SOUND | {"teacher/invalid": 8.0})]
    assert isinstance(actions[-1], Stop) and "scores could not be used" in actions[-1].message


# --- in a run ---------------------------------------------------------------------------------------------------------


class Liar(toy.ToyScorer):
    """Says something else from a call on."""

    def __init__(self, lie: Callable[[np.ndarray], np.ndarray], *, after: int = 0) -> None:
        super().__init__(TEACHER)
        self.lie, self.calls = lie, -after

    async def score(self, group: Group) -> list[Handle]:
        self.calls += 1
        if self.calls <= 0:
            return await super().score(group)
        return [self._lied(handle, *await super(Liar, self).score([handle])) for handle in group]

    def _lied(self, handle: Handle, honest: Handle) -> Handle:
        logp_NM = self.lie(honest.body.teacher_action_logp.copy())
        return scored(handle, teacher="toy", teacher_logp=logp_NM[:, 0], teacher_action_logp=logp_NM)


def train(path: Path, *scorers: Scorer, said: list[str] | None = None, learner: Any = None, **tree: Any) -> Run:
    config = parse(
        {
            "student": "toy",
            "teachers": {"main": {"model": "t", "recheck": tree.pop("recheck", 0.0)}},
            "updates": 30,
            "sampler": {"max_tokens": 6, "group": 2},
            "learner": {"batch_size": 16},
            "schedule": {"kind": "sync"},
            **tree,
            "health": {"canary": 0} | tree.get("health", {}),  # tests/pipeline/test_canary.py has those
        },
        say=lambda _: None,
    )
    student = toy.random_table(V, seed=0)
    engines = Engines(
        samplers=(GradingSampler(toy.ToySampler(student), toy.ToyGrader()),),
        scorers={"main": scorers},
        learner=learner or toy.ToyLearner(student, lr=0.1),
        close=lambda: None,
    )
    tokens = [np.array([1 + i % (V - 1)], np.int32) for i in range(10)]
    rows = [Row(id=str(i), prompt="x") for i in range(10)]
    prompts = Prompts(rows, tokens, seed=0, shuffle=True, teachers=["main"] * 10)
    with RunLog.create(config, path) as log:
        made = Run(config, engines, prompts, log, say=(said if said is not None else []).append)
        virtual.run(made.train())
    return made


def test_a_teacher_that_begins_to_say_zero_stops_the_run_and_the_last_good_checkpoint_is_what_is_gone_on_from(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        Unhealthy, match=r"^teacher: mean reverse KL is -\d.* run `slipstream doctor`.*health.stop"
    ) as told:
        train(tmp_path, Liar(np.zeros_like, after=80), checkpoint={"every": 1, "keep": 1})
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    stopped = len(read_lines(tmp_path / "metrics.jsonl"))
    assert 10 < stopped < 15, "within a few updates of the first lie, in update 11"
    assert f"the weights of update {stopped} are in {tmp_path / 'checkpoints' / f'{stopped}.suspect'}" in str(
        told.value
    )
    assert stopped == 12 and kept == {"12.suspect", "7", "9", "11"}
    assert str(told.value).endswith(f", and sound ones in {tmp_path / 'checkpoints' / '9'}"), "the first lie came later"
    reasons = [entry.get("reason") for entry in read_lines(tmp_path / "ledger.jsonl")]
    assert set(reasons) == {None} and len(reasons) == 8 * stopped, "a synchronous run has nothing in flight then"
    proof = HealthConfig().updates
    assert newest(tmp_path, proof=proof).state.admission.version == 9, (
        "resume agrees with the line that stopped the run"
    )
    said = io.StringIO()
    print_resume_command(tmp_path, RunDir(tmp_path).config, Console(file=said, width=200))
    assert said.getvalue() == f"stopped; saved after update 9; continue with: slipstream resume {tmp_path}\n"
    assert Watched(tmp_path).state().doing == f"after update 12; slipstream resume {tmp_path} continues after update 9"


def interrupt(path: Path) -> None:
    raise KeyboardInterrupt


def test_a_run_that_has_gone_on_and_saves_is_no_longer_of_one_that_went_wrong(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every=1, keep=9, proof=3)
    learner = toy.ToyLearner(toy.random_table(V, seed=0))

    async def save(update: int, *, suspect: bool = False) -> None:
        state = RunState(AdmissionState(version=update))
        await checkpoints.save(learner, state, {"time": 0.0}, stopping=suspect, suspect=suspect)

    async def all_of_it() -> None:
        for update in (5, 6, 7, 8):
            await save(update)
        await save(9, suspect=True)
        assert resumable(tmp_path, 3) == [5, 6], "7 and 8 have not proven sound"
        assert resumable(tmp_path, 9) == [5, 6, 7, 8], "without any that has, all that are earlier"
        checkpoints.forget_after(6)
        assert [path.name for path in checkpoints.suspects()] == ["9.suspect"]
        await save(7)
        assert checkpoints.suspects() == [] and resumable(tmp_path, 3) == [5, 6, 7]
        await save(12, suspect=True)
        await save(8, suspect=True)
        assert resumable(tmp_path, 3) == [5], "what went wrong before is not what the course that went on is judged by"
        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "sync", interrupt)  # the new checkpoint has just taken its place
            await save(9)
        assert resumable(tmp_path, 3) == [5, 6, 7, 9], "killed while it saved: the newest one is gone on from"

    asyncio.run(all_of_it())


def test_it_is_only_said_where_that_is_asked_for(tmp_path: Path) -> None:
    said = list[str]()
    made = train(tmp_path, Liar(np.zeros_like, after=80), said=said, updates=15, health={"stop": False})
    assert made.admission.version == 15 and (tmp_path / "final").exists()
    (line,) = [line for line in said if line.startswith("health: ")]
    assert "mean reverse KL" in line


def clamped(logp_NM: np.ndarray) -> np.ndarray:
    logp_NM[-1] = -9999.0
    return logp_NM


def test_a_teacher_that_clamps_every_answer_stops_the_stage_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError,
        match="scoring failed at the last 15 .*a log-prob of -9999, which is a placeholder for an unknown log-prob$",
    ):
        train(tmp_path, Liar(clamped))


def test_a_teacher_that_clamps_many_answers_stops_the_run_and_the_others_are_trained_on(tmp_path: Path) -> None:
    class Often(Liar):
        def _lied(self, handle: Handle, honest: Handle) -> Handle:
            return super()._lied(handle, honest) if handle.header.index == 1 else honest

    with pytest.raises(Unhealthy, match=r"the teacher's scores could not be used for \d+ of the last \d+ responses"):
        train(tmp_path, Often(clamped))
    lines, ledger = read_lines(tmp_path / "metrics.jsonl"), read_lines(tmp_path / "ledger.jsonl")
    assert lines[0]["teacher/invalid"] == 8 and lines[0]["samples"] == 8
    assert all(entry["failed"] == [1] and len(entry["causes"]) == 1 for entry in ledger)
    assert (tmp_path / "checkpoints" / str(len(lines))).exists(), "the weights are as good as before"


def test_an_honest_teacher_is_asked_again_and_nothing_is_found(tmp_path: Path) -> None:
    said = list[str]()
    train(tmp_path, toy.ToyScorer(TEACHER), toy.ToyScorer(TEACHER), said=said, recheck=1.0, updates=4)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["teacher/rechecked"], line["teacher/differed"], line["teacher/recheck_max"]) for line in lines] == [
        (8.0, 0.0, 0.0)
    ] * 4
    assert said == []


def test_replicas_of_different_models_are_found_out_and_what_was_said_first_is_trained_on(tmp_path: Path) -> None:
    said = list[str]()
    with pytest.raises(Unhealthy, match="groups that were scored twice came back with other log-probs: replicas"):
        train(tmp_path, toy.ToyScorer(TEACHER), Liar(lambda logp: logp - 0.5), said=said, recheck=0.5)
    assert any(re.match(r"teacher toy scored group \d+ twice, and its log-probs are 0.5 apart", line) for line in said)


def test_a_second_answer_that_is_no_answer_differs(tmp_path: Path) -> None:
    class Twice(Liar):
        async def score(self, group: Group) -> list[Handle]:
            return await (super() if isinstance(group[0].body, Scored) else super(Liar, self)).score(group)

    with pytest.raises(Unhealthy, match="came back with other log-probs"):
        train(tmp_path, Twice(clamped), recheck=1.0)


def test_who_is_asked_again_follows_from_the_seed_and_the_share() -> None:
    chosen = [is_rechecked(number, 0.1, seed=0) for number in range(1000)]
    assert 70 < sum(chosen) < 130
    assert chosen == [is_rechecked(number, 0.1, seed=0) for number in range(1000)]
    assert chosen != [is_rechecked(number, 0.1, seed=1) for number in range(1000)]
    assert all(is_rechecked(number, 1.0, seed=0) for number in range(1000))


def test_what_rounds_is_promised_less() -> None:
    assert TeacherConfig(model="t").promised == 0.01
    for rounding in ({"dtype": "bfloat16"}, {"base_url": "http://host/v1"}):
        assert TeacherConfig(model="t", **rounding).promised == 0.25


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Diverging(toy.ToyLearner):
    """One step, and every loss after it is NaN: what a learning rate of 1e30 does to real weights."""

    async def accumulate(self, batch: Any, counts: Any) -> None:
        if self.made == 6:
            raise NonFiniteError("the loss of update 7 is nan")
        await super().accumulate(batch, counts)


@pytest.mark.parametrize("every", [1, 5])
def test_a_run_does_not_go_on_from_the_weights_that_an_update_destroyed(tmp_path: Path, every: int) -> None:
    learner = Diverging(toy.random_table(V, seed=0))
    said = r"update 7 is nan; the weights of update 6 are in .*/6.suspect, and (earlier|sound) ones in .*/[35]$"
    with pytest.raises(NonFiniteError, match=said):
        train(tmp_path, toy.ToyScorer(TEACHER), learner=learner, checkpoint={"every": every, "keep": 2})
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} >= {"5", "6.suspect"}
    assert newest(tmp_path).state.admission.version == 5
    with pytest.raises(RunDirError, match=r"6.suspect was saved when the run went wrong.*--from with one of .*5$"):
        newest(tmp_path, 6)
    Checkpoints(tmp_path / "checkpoints").forget_after(0)
    with pytest.raises(RunDirError, match=r"rename it to 6 to go on from it all the same, or begin a new run$"):
        newest(tmp_path)


def test_a_checkpoint_whose_place_a_killed_run_was_about_to_fill_is_there_again(tmp_path: Path) -> None:
    """The kill came between the two renames: the old one had given up its name, the new one had not got it."""
    train(tmp_path, toy.ToyScorer(TEACHER), checkpoint={"every": 3, "keep": 9})
    made = tmp_path / "checkpoints"
    last = newest(tmp_path).state.admission.version
    (made / str(last)).rename(made / f"{last}.old.tmp")
    for odd in ("²", "٣", "007", "1.old.tmp.txt"):
        (made / odd).mkdir()
    (made / "99").touch()
    assert newest(tmp_path).state.admission.version == last
    Checkpoints(made).forget_after(0)
    assert not Checkpoints(made).existing() and (made / "007").is_dir()


def test_old_checkpoints_go_but_the_last_that_has_proven_sound(tmp_path: Path) -> None:
    async def saved(every: int, keep: int, proof: int) -> list[int]:
        checkpoints = Checkpoints(tmp_path / f"{every} {keep} {proof}", every=every, keep=keep, proof=proof)
        learner = toy.ToyLearner(toy.random_table(V, seed=0))
        for update in range(every, 13, every):
            state = RunState(AdmissionState(version=update))
            await checkpoints.save(learner, state, {"time": 0.0})
        return checkpoints.existing()

    assert asyncio.run(saved(1, 2, 0)) == [11, 12]
    assert asyncio.run(saved(1, 2, 3)) == [9, 10, 11, 12], "9 has proven sound, 10 will be next"
    assert asyncio.run(saved(1, 1, 3)) == [9, 11, 12]
    assert asyncio.run(saved(4, 2, 3)) == [8, 12], "the one before is proven"


# --- silence ----------------------------------------------------------------------------------------------------------


def test_whoever_does_not_answer_is_named_after_ten_seconds_and_then_ever_more_seldom() -> None:
    said = list[tuple[float, str]]()

    async def work() -> None:
        clock = asyncio.get_running_loop().time
        silence = ResponseWatch("teacher main", lambda line: said.append((clock(), line)))

        async def ask(seconds: float) -> None:
            with silence.waiting():
                await asyncio.sleep(seconds)

        await asyncio.gather(ask(1), ask(9), ask(18))  # there is an answer every nine seconds
        assert said == []
        await asyncio.gather(ask(45), ask(45))
        await asyncio.sleep(100)

    virtual.run(work())
    assert said == [
        (28.0, "teacher main has given no scores for 10 s (2 requests are open)"),
        (38.0, "teacher main has given no scores for 20 s (2 requests are open)"),
        (58.0, "teacher main has given no scores for 40 s (2 requests are open)"),
        (63.0, "teacher main answers again after 45 s"),
    ]


def test_a_finding_is_an_error_of_ours() -> None:
    assert issubclass(Unhealthy, SlipstreamError) and Unhealthy("x", harmful=True).harmful
