"""Every schedule under a virtual clock: who overlaps whom, how old tokens get, and that nothing is ever lost."""

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config.data import DataConfig
from slipstream.config.objective import PolicyConfig
from slipstream.config.rewards import TaskConfig
from slipstream.config.running import EvalConfig
from slipstream.config.schedule import Async, Periodic, Replay, StepOff, Sync
from slipstream.data.prompts import Prompts, Row
from slipstream.errors import RecordsLost, Stalled, WorkerDied
from slipstream.pipeline.checkpoint import BEGINNING, Checkpoints, newest
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines, Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Group, Handle, Prompt
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.timed_engines import SleepLearner, SleepSampler, SleepScorer
from support.simulated_runs import PROMPTS, TWO, Simulated, config, engines, long_tailed

RARE = Prompts(
    [Row(id=str(i), prompt="x") for i in range(20)],
    [np.array([1 + (i % 5 == 0)], np.int32) for i in range(20)],
    seed=0,
    shuffle=True,
    sources=["slow" if i % 5 == 0 else "quick" for i in range(20)],
)
"""One teacher; a fifth of the rows have long answers, and a column says which: their token is 2."""


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_synchronous_update_takes_the_sum_of_its_stages(tmp_path: Path) -> None:
    """Rollouts of 2 s at the same time, then four scores of ¼ s, then 3 s of learning: 200 times 6 s, in no time."""
    run = Simulated(tmp_path, Sync(), engines(), updates=200)
    assert run.seconds == pytest.approx(1200)
    for line in run.lines:
        assert line["time"] == pytest.approx(6 * line["update"])
        assert (line["seconds/data"], line["seconds/learn"]) == (pytest.approx(3), pytest.approx(3))
        assert line["samples_per_s"] == pytest.approx(4 / 6)
        busy = [line[f"busy/{stage}"] for stage in ("rollout", "score", "learn")]
        assert busy == pytest.approx([1 / 3, 1 / 6, 1 / 2]) and line["overlap/stages"] == pytest.approx(1)


def test_asynchrony_hides_everything_behind_the_slowest_stage(tmp_path: Path) -> None:
    """The learner needs 3 s for an update, so 200 updates take 600 s and the time of the first rollout and scores."""
    run = Simulated(tmp_path, Async(tau=1), engines(), updates=200)
    assert run.seconds == pytest.approx(600 + 3)
    assert run.lines[-1]["busy/learn"] == pytest.approx(1) and run.lines[-1]["idle/learner"] == pytest.approx(0)
    assert run.lines[100]["overlap/stages"] > 1.5


def test_periodic_learns_while_it_rolls_out(tmp_path: Path) -> None:
    """Responses end after 1, 2, 3 and 4 s; each is scored and learned from at once: 4 s and the last one's ¼ + 1 s."""
    lengths = engines(lambda prompt, _: 5 * (1 + prompt.number % 4), learn=1.0)
    run = Simulated(tmp_path, Periodic(), lengths, updates=10)
    assert run.seconds == pytest.approx(10 * (4 + 0.25 + 1))
    assert run.lags == [(0, 0)] * 10


def test_time_that_is_not_in_a_stage_is_waiting(tmp_path: Path) -> None:
    run = Simulated(tmp_path, StepOff(k=1), engines(learn=0.5, load=0.25), updates=20)
    for line in run.lines[2:]:
        waits = sum(line[f"seconds/{name}"] for name in ("data", "turn", "weights", "learn"))
        assert waits == pytest.approx(line["seconds/update"])
        assert line["publish/load"] == pytest.approx(0.25)


@pytest.mark.parametrize("schedule", [Sync(), StepOff(k=2), Async(tau=4)])
def test_the_growth_of_lengths_is_known_twenty_updates_after_the_pipeline_has_filled(
    schedule: Any, tmp_path: Path
) -> None:
    """Until then all groups have the first weights, and only short responses have finished."""
    lines = Simulated(tmp_path, schedule, engines(long_tailed(0)), updates=40).lines
    filling = [line for line in lines if line["lag/max"] == line["update"] - 1]
    first = next(line for line in lines if "length/trend" in line)
    assert filling and first["update"] == len(filling) + 20


# --- age --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [Sync(), Periodic(), Async(tau=0)], ids=lambda s: s.kind)
def test_on_policy_schedules_have_no_lag(tmp_path: Path, schedule: Any) -> None:
    run = Simulated(tmp_path, schedule, engines(long_tailed(0), samplers=2))
    assert run.lags == [(0, 0)] * 8


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", [StepOff, Replay])
def test_lag_is_exactly_k_once_k_updates_are_made(tmp_path: Path, kind: Any, k: int) -> None:
    for seed, speed in enumerate((0.01, 1.0, 100.0)):
        made = engines(long_tailed(seed), learn=speed, samplers=2, load=0.5)
        run = Simulated(tmp_path / str(seed), kind(k=k), made)
        assert run.lags == [(min(update, k), min(update, k)) for update in range(8)]
        assert run.trained() == list(range(32)), "in the order of submission"


def test_replay_takes_turns(tmp_path: Path) -> None:
    """The first two batches roll out at the same time; then each update costs what a synchronous one costs."""
    run = Simulated(tmp_path, Replay(k=1), engines(), updates=5)
    assert run.seconds == pytest.approx((2 + 2 + 3) + 3 * (2 + 1 + 3) + 3)


def straggler(prompt: Prompt, _: int) -> int:
    """Group 3 takes two hundred times as long as the others."""
    return 2000 if prompt.number == 3 else 10


def test_in_the_order_of_completion_a_straggler_grows_old(tmp_path: Path) -> None:
    run = Simulated(tmp_path, Async(tau=2), engines(straggler), updates=200)
    (late,) = [entry for entry in run.ledger if entry["number"] == 3]
    assert late["lag"][0] > 100 and 0 < late["mean_lag"][0] < late["lag"][0], "its later tokens are younger"
    assert max(lag for _, lag in run.lags) == late["lag"][0]


@pytest.mark.parametrize(
    ("schedule", "bound"),
    [
        (Async(tau=2, order="submission"), 2),
        (Async(tau=2, max_lag=2), 2),
        (Async(tau=2, max_lag=5), 5),
        (Async(tau=2, max_lag=2, on_old="restart"), 2),
        (Async(tau=2, max_lag=2, on_old="drop"), 2),
        (Async(tau=1, publish_every=2, order="submission"), 3),
        (Async(tau=1, publish_every=2, max_lag=4), 4),
    ],
)
def test_a_promised_bound_holds_against_a_straggler(tmp_path: Path, schedule: Async, bound: int) -> None:
    run = Simulated(tmp_path, schedule, engines(straggler, learn=1.0), updates=250)
    assert max(lag for _, lag in run.lags) <= bound
    ends = {entry["number"]: entry["end"] for entry in run.ledger}
    if schedule.on_old == "drop":
        assert ends[3] == "dropped" and run.run.admission.dropped == {"older than max_lag": 1}
        assert run.lines[-1]["thrown_tokens"] == 2000
    elif schedule.on_old == "restart":
        assert run.run.admission.restarted > 0, "it begins again, until nothing overtakes it"
        assert run.lines[-1]["thrown_tokens"] == 2000 * run.run.admission.restarted
        assert ends[3] == "trained"
    else:
        assert ends[3] == "trained"
        held = [line["seconds/turn"] for line in run.lines]
        assert max(held) > 100 and run.lines[int(np.argmax(held))]["groups/ready"] > 0


def test_versions_change_in_the_middle_of_a_response_and_are_counted(tmp_path: Path) -> None:
    run = Simulated(tmp_path, Async(tau=2), engines(lambda prompt, _: 20 + 7 * (prompt.number % 5)), updates=20)
    for line in run.lines[5:]:
        histogram = {name: value for name, value in line.items() if name.startswith("lag/tokens_")}
        assert sum(histogram.values()) == line["tokens"] and len(histogram) > 1


def test_draining_and_restarting_leave_one_version_in_a_response(tmp_path: Path) -> None:
    for mode in ("drain", "restart"):
        made = engines(lambda prompt, _: 5 + prompt.number % 7, learn=1.3)
        run = Simulated(tmp_path / mode, Async(tau=1, on_publish=mode), made, updates=20)  # type: ignore[arg-type]
        for entry in run.ledger:
            assert entry["lag"] == entry["mean_lag"]
        assert (run.lines[-1]["thrown_tokens"] > 0) == (mode == "restart")


def test_credits_come_back_with_the_publish(tmp_path: Path) -> None:
    run = Simulated(tmp_path, Async(tau=1, publish_every=3), engines(long_tailed(1)), updates=9)
    published = [line["update"] for line in run.lines if "seconds/publish" in line]
    assert published == [4, 7], "told with the update that came after"
    assert max(line["credits"] for line in run.lines) == 2 * 3 * 4


def test_who_queues_in_a_sampler_does_not_grow_old(tmp_path: Path) -> None:
    """Nothing is older than its first token: with four slots most groups wait long, and none is dropped for it."""
    made = engines(slots=4, score=0.0, learn=0.1)
    run = Simulated(tmp_path, Async(tau=4, max_lag=2, on_old="drop"), made, updates=50)
    assert {lag for _, lag in run.lags} == {0} and run.run.admission.dropped == {}


def test_a_synchronous_learner_waits_for_the_publish(tmp_path: Path) -> None:
    run = Simulated(tmp_path, Sync(), engines(load=10.0), updates=5)
    for line in run.lines[1:]:
        assert (line["seconds/weights"], line["seconds/data"]) == (pytest.approx(10), pytest.approx(3))


def test_a_run_in_which_nothing_moves_is_stopped_and_says_who_waits_for_whom(tmp_path: Path) -> None:
    made = engines(lambda prompt, _: 10 if prompt.number else 1_000_000)
    with RunLog(tmp_path, []) as log:
        run = Run(config(Sync()), made, PROMPTS, log, patience=30)
        with pytest.raises(Stalled, match=r"nothing has moved for 30 s.*\n.*\n(.*\n)*sampler works on group 0 for"):
            virtual.run(run.train())
    assert (tmp_path / "checkpoints" / "0").exists()


def test_a_run_that_goes_on_has_all_its_patience_for_its_start(tmp_path: Path) -> None:
    """The first publish takes 10 seconds, a third of the patience; the clock is that of the whole run."""
    with RunLog(tmp_path, [], mark={"time": 1000.0, "files": {}, "last": {}}) as log:
        run = Run(config(Sync(), updates=2), engines(load=10.0), PROMPTS, log, patience=30)
        virtual.run(run.train())
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("accumulate", "no checkpoint could be saved: Stalled: the learner has not finished saving after 60 s"),
        ("step", "no checkpoint is saved: the current update may have made only some of its optimizer steps"),
    ],
)
def test_a_learner_that_hangs_does_not_hold_up_the_end(tmp_path: Path, where: str, says: str) -> None:
    """In a step, its weights may be those of the next update: they are of no version."""

    class Hangs(SleepLearner):
        async def accumulate(self, *args: Any) -> None:
            await asyncio.sleep(1e9 * (where == "accumulate"))

        async def step(self, *args: Any) -> dict[str, float]:
            await asyncio.sleep(1e9 * (where == "step"))
            return {}

        async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
            await asyncio.sleep(1e9)

    said: list[str] = []
    with RunLog(tmp_path, []) as log:
        made = replace(engines(), learner=Hangs(lambda _: 1.0))
        run = Run(config(Sync()), made, PROMPTS, log, patience=30, say=said.append)

        async def main() -> float:
            with pytest.raises(Stalled):
                await run.train()
            return asyncio.get_running_loop().time()

        assert virtual.run(main())[0] < 200
    assert said[0].startswith(says)


@pytest.mark.parametrize("until", [10.0, None], ids=["stopped", "finished"])
def test_no_end_waits_longer_than_patience(tmp_path: Path, until: float | None) -> None:
    """For a learner that hangs in writing a checkpoint, with an event loop that answers."""

    class Hangs(SleepLearner):
        async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
            await asyncio.sleep(1e9)

    async def main(run: Run) -> float:
        task = run.task = asyncio.create_task(run.train())
        await asyncio.wait([task], timeout=until)
        if until:
            run.stop()
        await asyncio.wait([task])
        assert task.cancelled() if until else isinstance(task.exception(), Stalled)
        return asyncio.get_running_loop().time()

    said: list[str] = []
    with RunLog(tmp_path, []) as log:
        made = replace(engines(), learner=Hangs(lambda _: 1.0))
        run = Run(config(Sync(), updates=3), made, PROMPTS, log, patience=30, say=said.append)
        assert virtual.run(main(run))[0] < 200
    assert said[0].startswith("no checkpoint could be saved: Stalled: the learner has not finished saving after ")


def test_an_update_that_is_interrupted_in_its_step_is_whole(tmp_path: Path) -> None:
    class Slow(SleepLearner):
        async def step(self, *args: Any) -> dict[str, float]:
            await asyncio.sleep(5)
            return await super().step(*args)

    with RunLog(tmp_path, []) as log:
        made = replace(engines(), learner=Slow(lambda _: 1.0))
        run = Run(config(Sync()), made, PROMPTS, log)

        async def main() -> None:
            task = asyncio.create_task(run.train())
            await asyncio.sleep(6)  # 2 s of rollout, 1 s of scores, 1 s of gradients, and 2 s into the step
            task.cancel()
            await asyncio.wait([task])

        virtual.run(main())
    assert run.admission.version == 1 and (tmp_path / "checkpoints" / "1" / "steps").read_text() == "1"
    ends = [(entry["end"], entry["number"]) for entry in read_lines(tmp_path / "ledger.jsonl")]
    assert ends == [("trained", number) for number in range(4)]


def test_a_run_that_is_told_twice_to_stop_leaves_nothing_behind(tmp_path: Path) -> None:
    """In a step that never ends: the first time it waits for that."""

    class Hangs(SleepLearner):
        async def step(self, *args: Any) -> dict[str, float]:
            await asyncio.sleep(1e9)
            return {}

    with RunLog(tmp_path, []) as log:
        run = Run(config(Sync()), replace(engines(), learner=Hangs(lambda _: 1.0)), PROMPTS, log)

        async def main() -> None:
            run.task = task = asyncio.create_task(run.train())
            for seconds in (9, 1):
                await asyncio.wait([task], timeout=seconds)
                assert not task.done()
                run.stop()
                run.at_once = True
            await asyncio.wait([task])
            assert asyncio.all_tasks() == {asyncio.current_task()}

        assert virtual.run(main())[1] < 20


def test_an_evaluation_is_of_one_version_and_shuts_the_gate(tmp_path: Path) -> None:
    """Held-out prompts of 10 s: while they run, no other weights are published, and nothing is submitted."""
    settings = config(Async(tau=1), updates=6).model_copy(
        update={"eval": EvalConfig(every=2), "task": TaskConfig(reward=("exact",))}
    )
    held_out = [PROMPTS.at(number) for number in range(1000, 1003)]
    seen: list[tuple[float, int]] = []

    class Watched(SleepSampler):
        async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
            group = await super().generate(prompt, sampling, begun)
            rewarded = [Handle(replace(handle.header, rewards={"exact": 1.0}), None) for handle in group]
            if prompt.number >= 1000:
                seen.append(group[0].header.versions[0] if len(group[0].header.versions) == 1 else (-1, -1))
            return rewarded

    made = replace(
        engines(), samplers=(Watched(lambda prompt, _: 50 if prompt.number >= 1000 else 10, step=lambda _: 0.2),)
    )
    with RunLog(tmp_path, []) as log:
        virtual.run(Run(settings, made, PROMPTS, log, held_out={"": held_out}).train())
    told = list(read_lines(tmp_path / "metrics.jsonl"))
    lines = [line for line in told if line["kind"] == "eval"]
    assert [(line["update"], line["accuracy"]) for line in lines] == [(0, 1.0), (2, 1.0), (4, 1.0), (6, 1.0)]
    held = {line["update"]: line["seconds/eval"] for line in told if "seconds/eval" in line}
    assert held == {update: pytest.approx(10.0, abs=0.5) for update in (1, 3, 5)}, "said of the update after it"
    assert [version for version, _ in seen] == [0] * 3 + [2] * 3 + [4] * 3 + [6] * 3


def test_held_out_answers_that_are_lost_with_a_worker_are_drawn_again(tmp_path: Path) -> None:
    """A teacher scores if there are no rewards. The third one's records are lost once; only it is drawn again."""
    settings = config(Async(tau=1), updates=2).model_copy(update={"eval": EvalConfig(every=2)})
    drawn, lost = list[int](), list[int]()

    class Watched(SleepSampler):
        async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
            drawn.extend([prompt.number] if prompt.number >= 1000 else [])
            return await super().generate(prompt, sampling, begun)

    class Loses(SleepScorer):
        async def score(self, group: Group) -> list[Handle]:
            if (number := group[0].header.number) == 1002 and not lost:
                lost.append(number)
                raise RecordsLost("the machine of the answers is gone")
            return [handle.with_header(gap=2.0 * handle.header.tokens) for handle in await super().score(group)]

    made = replace(
        engines(),
        samplers=(Watched(lambda prompt, _: 10, step=lambda _: 0.2),),
        scorers={"main": (Loses(lambda _: 0.1),)},
    )
    with RunLog(tmp_path, []) as log:
        held_out = {"": [PROMPTS.at(number) for number in range(1000, 1003)]}
        virtual.run(Run(settings, made, PROMPTS, log, held_out=held_out).train())
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if line["kind"] == "eval"]
    assert [(line["update"], line["samples"], line["kl"], line["kl_error"]) for line in lines] == [
        (0, 3, 2.0, 0.0),
        (2, 3, 2.0, 0.0),
    ]
    assert lost == [1002] and Counter(drawn) == {1000: 2, 1001: 2, 1002: 3}


def test_every_held_out_set_has_its_own_cadence_and_samples(tmp_path: Path) -> None:
    each = EvalConfig(every={"often": 2, "seldom": 3}, n={"often": 1, "seldom": 4})
    settings = config(Async(tau=1), updates=7, group=4).model_copy(
        update={
            "eval": each,
            "task": TaskConfig(reward=("exact",)),
            "data": DataConfig(eval={"often": "builtin:arithmetic", "seldom": "builtin:arithmetic"}),
        }
    )
    held_out = {"often": [PROMPTS.at(1000)], "seldom": [PROMPTS.at(1001)]}
    with RunLog(tmp_path, []) as log:
        virtual.run(Run(settings, engines(), PROMPTS, log, held_out=held_out).train())
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if line["kind"] == "eval"]
    found = [(line["update"], line["set"], line["samples"]) for line in lines]
    both = [("often", 1), ("seldom", 4)]
    assert found == [
        *((0, *of) for of in both),
        (2, "often", 1),
        (3, "seldom", 4),
        (4, "often", 1),
        *((6, *of) for of in both),
        *((7, *of) for of in both),  # the final student
    ]


# --- several teachers -------------------------------------------------------------------------------------------------


def uneven(prompt: Prompt, index: int) -> int:
    """Answers that the slow teacher scores are twenty times as long."""
    return (1 if prompt.teacher == "quick" else 20) * long_tailed(3)(prompt, index)


def mixtures(run: Simulated, groups: int) -> list[int]:
    """Return the number of groups of every update that the quick teacher scored."""
    taken = [TWO.source(number) for number in run.trained()]
    return [taken[i : i + groups].count("quick") for i in range(0, len(taken), groups)]


@pytest.mark.parametrize(
    "schedule",
    [
        *(Async(tau=4), Async(tau=0.5), Async(tau=2, publish_every=2), Async(tau=2, on_publish="restart")),
        *(Async(tau=4, max_lag=6), Async(tau=4, max_lag=2, on_old="restart"), Async(tau=4, order="submission")),
        *(Sync(), Periodic(), StepOff(k=2), Replay(k=2)),
    ],
    ids=str,
)
def test_updates_keep_the_mixture_of_the_prompts_however_uneven_answers_are(tmp_path: Path, schedule: Any) -> None:
    run = Simulated(tmp_path, schedule, engines(uneven), prompts=TWO, updates=30, groups=8)
    due = [TWO.source(number) for number in range(30 * 8)]
    assert mixtures(run, 8) == [due[i : i + 8].count("quick") for i in range(0, 240, 8)]


def test_in_the_order_of_completion_updates_are_of_one_teacher_or_the_other(tmp_path: Path) -> None:
    """And keeping the mixture waits less than the order of submission, where stragglers hold up the others."""
    seconds = {}
    for order in ("completion", "mixture", "submission"):
        schedule = Async(tau=4, order=order)  # type: ignore[arg-type]
        run = Simulated(tmp_path / order, schedule, engines(uneven), prompts=TWO, updates=30, groups=8)
        seconds[order] = run.seconds
        if order == "completion":
            assert [quick in (0, 8) for quick in mixtures(run, 8)].count(True) >= 5
    assert seconds["completion"] < seconds["mixture"] < seconds["submission"]


def rare(prompt: Prompt, index: int) -> int:
    """Answers to slow rows are twenty times as long."""
    return (20 if prompt.tokens[0] == 2 else 1) * long_tailed(3)(prompt, index)


def slow_rows(run: Simulated) -> list[int]:
    """Return the number of slow rows in each of 33 updates of 32 groups."""
    taken = [RARE.source(number) for number in run.trained()]
    return [taken[i : i + 32].count("slow") for i in range(0, 33 * 32, 32)]


def test_slow_rows_of_one_teacher_are_held_to_their_share_where_the_mixture_follows_their_column(
    tmp_path: Path,
) -> None:
    """If no column is named, all rows are of one source: the first updates have no slow row, the last only those."""
    due = [[RARE.source(32 * u + i) for i in range(32)].count("slow") for u in range(33)]
    followed = Simulated(tmp_path / "followed", Async(tau=4), engines(rare), prompts=RARE, updates=33, groups=32)
    assert slow_rows(followed) == due and 4 <= min(due) <= max(due) <= 9

    unknown = Prompts(RARE.rows, [RARE.tokens[i] for i in range(20)], seed=0, shuffle=True)
    left = Simulated(tmp_path / "left", Async(tau=4), engines(rare), prompts=unknown, updates=33, groups=32)
    found = slow_rows(left)
    assert sum(found) == sum(due) and found[:3] == [0, 0, 0] and found[-1] == 32
    assert followed.seconds < 1.1 * left.seconds, "it waits for slow rows, and for no slow row in particular"


def test_a_stop_in_between_changes_no_mixture(tmp_path: Path) -> None:
    settings = config(Async(tau=3), updates=20, groups=8)
    for part in range(3):
        made, state = engines(uneven), BEGINNING
        if part:
            state = asyncio.run(newest(tmp_path).restore(made.learner))
            Checkpoints(tmp_path / "checkpoints").forget_after(state.admission.version)
        mark = newest(tmp_path).mark if part else None
        with RunLog(tmp_path, [], mark=mark) as log:
            run = Run(settings, made, TWO, log, state=state, say=lambda _: None)

            async def main(run: Run = run, until: float | None = None if part == 2 else 45.0) -> None:
                task = run.task = asyncio.create_task(run.train())
                await asyncio.wait([task], timeout=until)
                run.stop()
                await asyncio.wait([task])

            virtual.run(main())
    ledger = read_lines(tmp_path / "ledger.jsonl")
    taken = [TWO.source(entry["number"]) for entry in ledger if entry["end"] == "trained"]
    due = [TWO.source(number) for number in range(160)]
    counts = [[each[i : i + 8].count("slow") for i in range(0, 160, 8)] for each in (taken, due)]
    assert len(taken) == 160 and counts[0] == counts[1]


# --- refill -----------------------------------------------------------------------------------------------------------

LEVELS = Prompts(
    [Row(id=str(i), prompt="x", meta={"alike": i % 3 != 0}) for i in range(30)],
    [np.array([1], np.int32)] * 30,
    seed=0,
    shuffle=True,
)
"""Answers to two thirds of the rows all have the same reward."""


class Rewarded(SleepSampler):
    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        group = await super().generate(prompt, sampling, begun)
        rewards = [0.0 if prompt.meta["alike"] else float(index) for index in range(len(group))]
        return [h.with_header(rewards={"own": reward}) for h, reward in zip(group, rewards, strict=True)]


def refilled(path: Path, schedule: Any, length: Any, *, factor: float = 6.0, samplers: int = 2) -> Simulated:
    made = replace(
        engines(learn=1.0, score=0.0),
        samplers=tuple(Rewarded(length, step=lambda _: 0.1) for _ in range(samplers)),
    )
    sections = {"policy": PolicyConfig(refill=factor), "task": TaskConfig(reward=("./a.py:own",))}
    return Simulated(path, schedule, made, prompts=LEVELS, updates=8, groups=4, group=2, **sections)


def slow(prompt: Prompt, index: int) -> int:
    """Answers to every second row with an advantage are thirty times as long."""
    return (30 if int(prompt.id) % 6 == 0 else 1) * long_tailed(5)(prompt, index)


REFILLED = [Sync(), Periodic(), StepOff(k=1), Replay(k=2), Async(tau=0), Async(tau=3), Async(tau=3, order="completion")]


@pytest.mark.parametrize("schedule", [*REFILLED, Async(tau=2, order="submission"), Async(tau=2, max_lag=4)], ids=str)
def test_only_groups_without_advantage_are_replaced_however_long_answers_are(tmp_path: Path, schedule: Any) -> None:
    """Every group with an advantage is trained, and every other one is dropped: no length is preferred."""
    run = refilled(tmp_path, schedule, slow)
    alike = {number for number in range(len(run.ledger)) if LEVELS.at(number).meta["alike"]}
    assert sorted(entry["number"] for entry in run.ledger) == list(range(len(run.ledger)))
    dropped = [entry for entry in run.ledger if entry["end"] == "dropped"]
    assert {entry["number"] for entry in dropped} == alike and {e["reason"] for e in dropped} == {"no advantage"}
    assert len(run.trained()) == 32 and alike.isdisjoint(run.trained())
    assert run.lines[-1]["dropped/no advantage"] == run.lines[-1]["dropped"] == len(dropped)
    assert run.lines[-1]["refilled_tokens"] == run.lines[-1]["thrown_tokens"] > 0
    assert max(line["credits"] for line in run.lines) <= run.run.admission.schedule.credits
    bound = run.run.admission.schedule.bound
    assert bound is None or max(lag for _, lag in run.lags) <= bound


def test_tokens_that_a_publish_throws_away_are_not_those_of_refill(tmp_path: Path) -> None:
    run = refilled(tmp_path, Async(tau=3, on_publish="restart"), slow)
    lines = [(line["refilled_tokens"], line["thrown_tokens"]) for line in run.lines if "refilled_tokens" in line]
    assert lines == sorted(lines) and 0 < lines[-1][0] < lines[-1][1]


@pytest.mark.parametrize("factor", [1.5, 2.0, 6.0])
def test_what_a_synchronous_run_trains_on_does_not_depend_on_time(tmp_path: Path, factor: float) -> None:
    """Neither on lengths nor on the number of samplers: the same groups are in the same updates, in the same order."""
    lengths = [slow, lambda *_: 10, lambda prompt, _: 500 // (1 + prompt.number)]
    runs = [
        refilled(tmp_path / str(i), Sync(), length, factor=factor, samplers=1 + i) for i, length in enumerate(lengths)
    ]
    assert runs[0].trained() == runs[1].trained() == runs[2].trained()
    lost = [line["dropped"] for line in runs[0].lines]
    assert max(np.diff([0.0, *lost])) <= (factor - 1) * 4, "in every update"
    assert lost[-1] > 0


@pytest.mark.parametrize("schedule", [Sync(), Periodic(), Async(tau=2)], ids=str)
def test_a_run_whose_answers_are_all_alike_ends_all_the_same(tmp_path: Path, schedule: Any) -> None:
    made = replace(engines(score=0.0), samplers=(Rewarded(lambda *_: 5, step=lambda _: 0.1),))
    rows = [Row(id="0", prompt="x", meta={"alike": True})]
    sections = {"policy": PolicyConfig(refill=3.0), "task": TaskConfig(reward=("./a.py:own",))}
    prompts = Prompts(rows, [np.array([1], np.int32)], seed=0, shuffle=True)
    run = Simulated(tmp_path, schedule, made, prompts=prompts, updates=5, groups=4, group=2, **sections)
    ends = Counter(entry["end"] for entry in run.ledger)
    in_flight = run.run.admission.schedule.credits
    assert ends["trained"] == 20 and 0 < ends["dropped"] <= 2 * (5 * 4 + in_flight)


# --- workers ----------------------------------------------------------------------------------------------------------


def test_groups_go_to_the_sampler_with_least_to_do(tmp_path: Path) -> None:
    made = engines(long_tailed(2), samplers=3, learn=0.1)
    Simulated(tmp_path, Async(tau=2), made, updates=30)
    counts = [sampler.seated for sampler in made.samplers]  # type: ignore[attr-defined]
    assert sum(counts) == 120 and min(counts) > 25


class Dies(SleepSampler):
    """At its twentieth prompt, with all that is in it."""

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if self.seated >= 20:
            raise WorkerDied("its process is gone")
        return await super().generate(prompt, sampling, begun)

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        if self.seated >= 20:
            raise WorkerDied("its process is gone")
        return await super().publish(weights, mode)


def test_when_a_sampler_dies_its_groups_go_to_the_others(tmp_path: Path) -> None:
    made = engines(samplers=1)
    made = replace(made, samplers=(Dies(lambda *_: 10, step=lambda _: 0.2), *made.samplers))
    run = Simulated(tmp_path, Async(tau=1), made, updates=20)
    assert sorted(run.trained()) == list(range(80))
    assert run.lines_said == ["sampler-0 died and its groups go to others: its process is gone"]


@pytest.mark.parametrize("schedule", [Sync(), StepOff(k=1), Async(tau=2), Async(tau=2, on_publish="restart")], ids=str)
def test_what_a_sampler_hands_over_goes_to_another_and_nothing_is_drawn_twice(tmp_path: Path, schedule: Any) -> None:
    """A sampler leaves again and again: every response has the tokens that it would have had."""
    made = engines(lambda prompt, _: 3 + prompt.number * 7 % 40, samplers=3, slots=4)
    drawn: list[int] = []
    with RunLog(tmp_path, []) as log:
        run = Run(config(schedule, updates=20), made, PROMPTS, log)

        async def main() -> None:
            task, turns = asyncio.create_task(run.train()), random.Random(0)
            while not task.done():
                await asyncio.wait([task], timeout=turns.random() * 3)
                await turns.choice(made.samplers).release(drawn[-2:])
                drawn.extend(run.pipeline.rollouts.generating if run.pipeline else ())
            await task

        virtual.run(main())
    ledger = read_lines(tmp_path / "ledger.jsonl")
    assert sorted(entry["number"] for entry in ledger) == list(range(80))
    assert all(entry["tokens"] == [3 + entry["number"] * 7 % 40] for entry in ledger)
    assert all((sampler.count, len(sampler.waiting)) == (0, 0) for sampler in made.samplers)
    assert run.pipeline and not run.responses
    assert not (run.pipeline.groups.tasks or run.pipeline.rollouts.generating)


def test_a_stuck_run_says_who_waits_for_whom(tmp_path: Path) -> None:
    made = engines(lambda prompt, _: 10 if prompt.number else 1_000_000)
    with RunLog(tmp_path, []) as log:
        run = Run(config(Sync()), made, PROMPTS, log)
        report: list[str] = []

        async def main() -> None:
            task = asyncio.create_task(run.train())
            await asyncio.sleep(50)
            report.extend(run.report().splitlines())
            task.cancel()
            await asyncio.wait([task])

        virtual.run(main())
    assert report == [
        "after 50.0 s, 48.0 s after the last change, at version 0",
        "groups: 1 rolling, 3 waiting, 0 scoring, 0 ready, 0 learning, 0 trained; 4 of 4 credits in use",
        "learner waits for scored groups, for 50.0 s",
        "sampler works on group 0 for 50.0 s",
        "scorer is idle",
        "learner is idle",
    ]


# --- anything may happen ----------------------------------------------------------------------------------------------


class Chaos:
    """Calls that fail, each with its own luck."""

    def __init__(self, seed: int, rate: float) -> None:
        self.random, self.rate = random.Random(seed), rate

    def strike(self) -> bool:
        return self.random.random() < self.rate


class ChaoticSampler(SleepSampler):
    def __init__(self, chaos: Chaos, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.chaos = chaos

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if self.chaos.strike():
            raise OSError("crash before")
        group = await super().generate(prompt, sampling, begun)
        if self.chaos.strike():
            raise OSError("crash after")
        if self.chaos.strike():
            return [Handle(replace(handle.header, finish="error"), None) for handle in group]
        if self.chaos.strike():
            return [*group[:-1], Handle(replace(group[-1].header, finish="error"), None)]
        return group


class ChaoticScorer(SleepScorer):
    def __init__(self, chaos: Chaos, *args: Any) -> None:
        super().__init__(*args)
        self.chaos = chaos

    async def score(self, group: Group) -> list[Handle]:
        if self.chaos.strike():
            raise OSError("crash")
        return await super().score(group)


def asynchronous() -> st.SearchStrategy[Async]:
    usual: Any = {
        "tau": st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        "publish_every": st.integers(1, 2),
        "on_publish": st.sampled_from(["keep", "drain", "restart"]),
    }
    return st.one_of(
        st.builds(Async, **usual, order=st.sampled_from(["mixture", "completion", "submission"])),
        st.builds(Async, **usual, max_lag=st.integers(7, 9)),
        st.builds(Async, **usual, max_lag=st.integers(1, 3), on_old=st.sampled_from(["restart", "drop"])),
    )


def schedules() -> st.SearchStrategy[Any]:
    k = st.integers(1, 3)
    return st.one_of(
        st.just(Sync()), st.just(Periodic()), st.builds(StepOff, k=k), st.builds(Replay, k=k), asynchronous()
    )


@settings(max_examples=200)
@given(
    schedule=schedules(),
    seed=st.integers(0, 2**16),
    rate=st.sampled_from([0.0, 0.02, 0.2]),
    groups=st.integers(1, 5),
    group=st.integers(1, 3),
    samplers=st.integers(1, 3),
    slots=st.sampled_from([3, 8, 1000]),
    score=st.sampled_from([0.0, 0.1, 2.0]),
    learn=st.sampled_from([0.0, 0.5, 5.0]),
    load=st.sampled_from([0.0, 0.7]),
    prompts=st.sampled_from([PROMPTS, TWO, RARE]),
)
def test_whatever_happens_a_run_ends_and_keeps_its_promises(
    schedule: Any, seed: int, rate: float, groups: int, group: int, samplers: int, prompts: Prompts, **times: float
) -> None:
    chaos = Chaos(seed, rate)
    made = Engines(
        samplers=tuple(
            ChaoticSampler(
                chaos, long_tailed(seed), step=lambda rows: 0.1 + 0.01 * rows, slots=times["slots"], load=times["load"]
            )
            for _ in range(samplers)
        ),
        scorers={"": tuple(ChaoticScorer(chaos, lambda _: times["score"]) for _ in range(2))},
        learner=SleepLearner(lambda _: times["learn"]),
        close=lambda: None,
    )
    with tempfile.TemporaryDirectory() as path:
        run = Simulated(Path(path), schedule, made, prompts=prompts, updates=5, groups=groups, group=group)
    admission = run.run.admission
    assert sorted(entry["number"] for entry in run.ledger) == list(range(admission.submitted)), "each ends exactly once"
    ends = Counter(entry["end"] for entry in run.ledger)
    assert admission.version == 5 and ends["dropped"] == admission.dropped.total()
    assert ends["trained"] == 5 * groups or (schedule.kind in ("sync", "step_off", "replay") and ends["dropped"])
    assert admission.in_use == 0 and not admission.gated
    if admission.schedule.order != "completion" and not ends["dropped"]:
        trained_of = [prompts.source(number) for number in run.trained()]
        for i in range(0, 5 * groups, groups):
            assert sorted(trained_of[i : i + groups]) == sorted(prompts.source(i + j) for j in range(groups))
    assert max(line["credits"] for line in run.lines) <= admission.schedule.credits
    length = long_tailed(seed)
    trained = [entry for entry in run.ledger if entry["end"] == "trained"]
    for entry in trained:
        prompt = Prompt(id="", number=entry["number"], tokens=np.array([1]))
        left = [index for index in range(group) if index not in entry.get("failed", [])]
        assert entry["tokens"] == [length(prompt, index) for index in left]
    assert sum(line["tokens"] for line in run.lines) == sum(sum(entry["tokens"]) for entry in trained)
    if admission.schedule.bound is not None:
        assert max(line["lag/max"] for line in run.lines) <= admission.schedule.bound
    for line in run.lines:
        assert sum(v for name, v in line.items() if name.startswith("lag/tokens_")) == line["tokens"]
    for sampler in made.samplers:
        assert isinstance(sampler, SleepSampler) and not sampler.running and not sampler.waiting
        assert sampler.count == 0
