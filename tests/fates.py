"""Runs on a virtual clock to which anything may happen: `python tests/fates.py 10000`, or one of them, `--seed 17`.

All that a coordinator does is the real thing, down to the client that calls an engine and the host that answers it.
Engines only take time, and the way to their processes is the one made here: it loses records and answers, doubles and
delays these, and the processes end, stop for a while, or cannot start. Workers are hired and dismissed. Runs are
stopped, killed, and gone on with from any of their checkpoints. Whatever happens, the laws in `check` hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.config.freshness import FreshnessConfig
from slipstream.config.running import CheckpointConfig, LogConfig
from slipstream.config.schedule import Async, Periodic, Replay, StepOff, Sync
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, EngineError, RecordsLost, RunDirError, Stalled, WorkerDied
from slipstream.pipeline.checkpoint import BEGINNING, Checkpoints, newest
from slipstream.pipeline.ending import with_timeout
from slipstream.pipeline.failures import Restarts
from slipstream.pipeline.pool import names
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runtimes.exchange import NO_CALLER, Answer, Call, EngineServer, RemoteWorker
from slipstream.runtimes.workers import (
    RemoteLearner,
    RemoteSampler,
    RemoteScorer,
    WorkerManager,
    WorkerSpec,
)
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.timed_engines import SleepLearner, SleepSampler, SleepScorer
from support.simulated_runs import PROMPTS, TWO, config, long_tailed

UPDATES, HEARTBEAT, PATIENCE = 5, 5.0, 300.0
FOREVER = 30_000.0
SHARED = Path("/dev/shm")
"""Files that are synced to a disk take their real time."""


@dataclass
class Life:
    """A run and the faults that may happen to it; all of it follows from the seed."""

    seed: int
    random: random.Random = field(init=False)
    said: list[str] = field(default_factory=list)
    lost: int = 0
    """Answers that never came."""

    def __post_init__(self) -> None:
        r = self.random = random.Random(self.seed)
        self.schedule = drawn(r)
        self.groups, self.group = r.randint(1, 4), r.randint(1, 2)
        self.samplers, self.scorers = r.randint(1, 3), r.randint(1, 2)
        self.slots, self.load = r.choice([3, 1000]), r.choice([0.0, 0.7])
        self.score, self.learn = r.choice([0.0, 2.0]), r.choice([0.0, 0.5, 5.0])
        self.restarts = r.choice([0, 1, 3, 10**6])
        self.between = r.choice([1.0, 5.0, 20.0, 60.0])
        """Seconds between two faults of a process, on average."""
        self.part = r.choice([5.0, 20.0, 1000.0])
        """Seconds until the whole run is stopped, on average."""
        self.faults = r.choice([0, 5, 25])
        """No more of them than that, or a run would never end."""
        kinds = [Process.crash, Process.hang, Process.slow, Process.lose, Process.double, Process.forget]
        self.kinds = r.sample(kinds, r.randint(1, len(kinds)))
        self.mortal_learner = r.random() < 0.5
        self.scaled = r.random() < 0.5
        """Workers are hired and dismissed, every few seconds."""
        self.prompts = r.choice([PROMPTS, TWO])
        often = FreshnessConfig(
            kappa_f=r.choice([0.4, 1.0]), cooldown=r.choice([0, 3]), estimate=r.choice(["modelled", "measured"])
        )
        self.freshness = r.choice([None, None, often])
        """All that is in flight begins again, every now and then."""

    def strikes(self) -> bool:
        self.faults -= 1
        return self.faults >= 0

    def say(self, line: str) -> None:
        with contextlib.suppress(RuntimeError):
            line = f"{asyncio.get_running_loop().time():9.3f}  {line}"
        self.said.append(line)

    @property
    def settings(self) -> Config:
        made = config(self.schedule, updates=UPDATES, groups=self.groups, group=self.group)
        often = CheckpointConfig(every=2, keep=9)
        return made.model_copy(update={"checkpoint": often, "log": LogConfig(trace=False), "freshness": self.freshness})

    def sampler(self) -> SleepSampler:
        made = SleepSampler(
            long_tailed(self.seed), step=lambda rows: 0.1 + 0.01 * rows, slots=self.slots, load=self.load
        )
        made.version = -1000  # whoever works under the weights it came with is found out
        return made

    def specs(self) -> list[WorkerSpec]:
        return [
            WorkerSpec(RemoteLearner, "learner", 1, lambda: SleepLearner(lambda _: self.learn)),
            *(WorkerSpec(RemoteSampler, name, 1, self.sampler) for name in names("sampler", self.samplers)),
            *(
                WorkerSpec(RemoteScorer, name, 1, lambda: SleepScorer(lambda _: self.score))
                for name in names("scorer", self.scorers)
            ),
        ]


def drawn(r: random.Random) -> Any:
    """A schedule."""
    usual: Any = {
        "tau": r.choice([0.0, 0.5, 1.0, 3.0]),
        "publish_every": r.randint(1, 2),
        "on_publish": r.choice(["keep", "drain", "restart"]),
    }
    k = r.randint(1, 3)
    return r.choice([
        Sync(),
        Periodic(),
        StepOff(k=k),
        Replay(k=k),
        Async(**usual),
        Async(**usual, order="completion"),
        Async(**usual, order="submission"),
        Async(**usual, max_lag=r.randint(7, 9)),
        Async(**usual, max_lag=k, on_old=r.choice(["restart", "drop"])),
    ])  # fmt: skip


class Process:
    """A host, and the link to it: what is carried between the two arrives in order, but for what happens to it."""

    def __init__(self, name: str, life: Life) -> None:
        self.life, self.pid, self.exchanged, self.host = life, 0, 0, EngineServer(name, self.tell)
        self.dead, self.stopped, self.delay, self.losing, self.doubling = False, False, 0.0, 0, 0
        self.forgetting = 0
        self.carried: deque[Callable[[], None]] = deque()
        """In both directions."""
        self.timers: list[asyncio.TimerHandle] = []

    async def start(self, worker: RemoteWorker, build: Callable[[], Any]) -> None:
        self.worker = worker
        await asyncio.sleep(self.life.random.expovariate(1 / 3.0))
        if self.life.random.random() < 0.1 and self.life.strikes():
            self.life.say(f"{worker.name} cannot start")
            raise OSError("no memory")
        self.host.engine = build()
        if self.life.mortal_learner or not isinstance(self.host.engine, SleepLearner):
            self.next_fault()

    def attach(self, worker: RemoteWorker) -> None:
        assert worker is self.worker

    def send(self) -> None:
        for call in self.worker.take_outbox():
            if self.forgetting and takes_records(call):
                self.forgetting -= 1
                self.worker.fail([call.id], RecordsLost("gone with their machine"))
            else:
                self.carry(partial(self.host.accept, call))

    def tell(self, answer: Answer, bodies: list[Any]) -> None:
        settle = partial(self.worker.settle, answer, bodies.__getitem__)
        if answer.id == NO_CALLER or not self.losing:
            self.carry(settle)
        else:
            self.losing -= 1
            self.life.lost += 1
        if self.doubling:
            self.doubling -= 1
            self.carry(settle)

    def carry(self, deliver: Callable[[], None]) -> None:
        self.carried.append(deliver)
        asyncio.get_running_loop().call_later(self.delay, self.arrive)

    def arrive(self) -> None:
        while self.carried and not self.stopped:
            self.carried.popleft()()

    async def leave(self, worker: RemoteWorker) -> None:
        worker.end("it was dismissed")

    def kill(self) -> None:
        self.dead = True
        self.carried.clear()
        for timer in self.timers:
            timer.cancel()
        for task in self.host.running.values():
            task.cancel()

    # --- what happens to it --------------------------------------------------------------------------------------

    def later(self, mean: float, what: Callable[[], None]) -> None:
        seconds = self.life.random.expovariate(1 / mean)
        self.timers.append(asyncio.get_running_loop().call_later(seconds, what))

    def next_fault(self) -> None:
        self.later(self.life.between, self.suffer)

    def suffer(self) -> None:
        if not self.dead and self.life.strikes():
            what = self.life.random.choice(self.life.kinds)
            self.life.say(f"{self.host.name}: {what.__name__}")
            what(self)
            self.next_fault()

    def crash(self) -> None:
        self.kill()
        self.worker.mark_gone("killed by SIGKILL")

    def hang(self) -> None:
        """Until it goes on, or is killed for that."""
        self.stopped = True
        self.later(HEARTBEAT, self.wake)

    def wake(self) -> None:
        self.stopped = False
        self.arrive()

    def slow(self) -> None:
        self.delay = self.life.random.expovariate(1 / 2.0)
        self.later(10.0, self.quick)

    def quick(self) -> None:
        self.delay = 0.0

    def lose(self) -> None:
        self.losing += 1

    def double(self) -> None:
        self.doubling += 2

    def forget(self) -> None:
        """Lose the record that is to be sent."""
        self.forgetting += 1


def takes_records(call: Call) -> bool:
    return call.method in ("score", "prepare") or (call.method in ("generate", "save") and bool(call.args[-1]))


@contextlib.asynccontextmanager
async def opened(life: Life) -> Any:
    """A coordinator's processes; when it is gone, so are they."""
    processes: list[Process] = []

    def born(spec: WorkerSpec) -> RemoteWorker:
        processes.append(Process(spec.name, life))
        return spec.kind(spec.name, processes[-1], HEARTBEAT)

    manager = WorkerManager(born)
    manager.kinds = {"sampler": life.specs()[1], "teacher.": life.specs()[-1]}
    try:
        manager.specs = {born(spec): spec for spec in life.specs()}
        for worker, spec in manager.specs.items():
            await manager.wait_until_started(worker, spec)
        learner, *others = manager.specs
        yield Engines(
            samplers=tuple(worker for worker in others if isinstance(worker, RemoteSampler)),
            scorers={"": tuple(worker for worker in others if isinstance(worker, RemoteScorer))},
            learner=learner,  # type: ignore[arg-type]
            close=lambda: None,
            replace=manager.replace,
            hire=manager.hire,
            dismiss=manager.dismiss,
            takes={kind: {"CPU": 1.0} for kind in manager.kinds} if life.scaled else {},
            free=lambda: {"CPU": 5.0},
        )
    finally:
        await asyncio.sleep(0)
        for process in processes:
            process.kill()
        await asyncio.sleep(0)


async def lived(path: Path, life: Life) -> Run:
    """A run to its end, through all its parts: when the learner is gone it goes back to its last checkpoint, when it
    was stopped or has failed to any of them; it begins again where there is none."""
    restarts, any_checkpoint = Restarts(life.restarts), False
    while True:
        try:
            async with opened(life) as engines:
                run = await part(path, life, engines, restarts, any_checkpoint)
                await run.task
                assert quiet(engines), "somebody waits for an answer after the end of the run"
                return run
        except (WorkerDied, OSError) as error:
            if isinstance(error, RunDirError):
                raise
            life.say(f"part ends: {error}")
            restarts.grant("learner", asyncio.get_running_loop().time())
            any_checkpoint = False
        except (Stopped, Stalled, EngineError) as error:
            assert not isinstance(error, Stalled) or life.lost, f"{error}\nand no answer was lost"
            life.say(f"run ends: {type(error).__name__} {error}")
            restarts, any_checkpoint = Restarts(life.restarts), True


class Stopped(Exception):
    """End of a run, as by a signal; at once, as by a kill."""


async def part(path: Path, life: Life, engines: Engines, restarts: Restarts, any_checkpoint: bool) -> Run:
    state = BEGINNING
    try:
        checkpoint = newest(path, say=life.say)
        if any_checkpoint and life.random.random() < 0.3:
            number = life.random.choice(Checkpoints(path / "checkpoints").existing())
            checkpoint = newest(path, number, say=life.say)
    except RunDirError:
        for left in ("metrics.jsonl", "ledger.jsonl"):
            (path / left).unlink(missing_ok=True)
        log = RunLog(path, [], trace=False)
    else:
        life.say(f"goes on from {checkpoint.path.name}: {checkpoint.state.admission}")
        state = await with_timeout(checkpoint.restore(engines.learner), PATIENCE, "reading a checkpoint")
        Checkpoints(path / "checkpoints").forget_after(state.admission.version)
        log = RunLog(path, [], trace=False, mark=checkpoint.mark)
    patience = PATIENCE if Process.lose in life.kinds else None
    run = Run(
        life.settings, engines, life.prompts, log, state=state, restarts=restarts, patience=patience, say=life.say
    )

    async def all_of_it() -> None:
        with log:
            await run.train()

    run.task = asyncio.create_task(all_of_it())

    def stop() -> None:
        if run.task and not run.task.done() and life.strikes():
            run.at_once = life.random.random() < 0.5
            life.say("killed" if run.at_once else "stopped")
            run.stop()

    def scale() -> None:
        nonlocal scaling
        scaling = later(life.random.expovariate(1 / 3.0), scale)
        change = life.random.choice(["sampler=+1", "sampler=-1", "teacher.=+1", "teacher.=-1"])
        with contextlib.suppress(ConfigError):
            life.say(f"{change}: {run.scale([change], lambda sizes: None)}")

    later = asyncio.get_running_loop().call_later
    timer = later(life.random.expovariate(1 / life.part), stop)
    scaling = later(1.0, scale) if life.scaled else timer
    await asyncio.wait([run.task])
    timer.cancel()
    scaling.cancel()
    if run.task.cancelled():
        raise Stopped
    run.task.result()
    return run


def quiet(engines: Engines) -> bool:
    workers: Sequence[Any] = [*engines.samplers, *engines.scorers[""], engines.learner]
    return not any(worker.waiting for worker in workers if not worker.gone)


async def alone(path: Path, life: Life) -> Run:
    """Run; fail if a task is forgotten, or goes on after the end."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    task = asyncio.create_task(lived(path, life))
    done, _ = await asyncio.wait([task], timeout=FOREVER)
    assert done, "it never ends"
    run = task.result()
    for _ in range(5):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks are left: {left}"
    assert not complaints, f"asyncio complains: {complaints}"
    return run


def check(path: Path, life: Life, run: Run) -> None:
    """The laws."""
    ledger, lines = read_lines(path / "ledger.jsonl"), read_lines(path / "metrics.jsonl")
    admission, pipeline = run.admission, run.pipeline
    assert (path / "final" / "steps").read_text() == str(UPDATES), "each update is made once, of what survived"
    assert [line["update"] for line in lines] == list(range(1, UPDATES + 1)), "and told once"
    assert sorted(entry["number"] for entry in ledger) == list(range(admission.submitted)), "each ends once"
    ends = Counter(entry["end"] for entry in ledger)
    assert ends["trained"] == UPDATES * life.groups and ends["dropped"] == admission.dropped.total()
    assert admission.in_use == 0 and not admission.gated, "credits are back"
    assert max(line["credits"] for line in lines) <= admission.schedule.credits
    assert pipeline is not None and not (run.responses or pipeline.groups.tasks), "nothing is left"
    assert not (pipeline.rollouts.generating or pipeline.progress.waits), "nothing is left"
    assert not any(worker.load for pool in pipeline.pools for worker in pool.workers), "nobody has anything to do"
    bound, length = admission.schedule.bound, long_tailed(life.seed)
    for entry in ledger:
        if entry["end"] == "trained":
            assert 0 <= min(entry["lag"]) <= max(entry["lag"]) <= entry["update"] - 1
            assert bound is None or max(entry["lag"]) <= bound
            tokens = [length(PROMPTS.at(entry["number"]), index) for index in range(life.group)]
            assert entry["tokens"] == tokens, "no token is missing or drawn twice, however often it was handed over"
    if not life.mortal_learner:
        assert "restarts/learner" not in run.restarts.metrics or life.said


def live(seed: int) -> Life:
    life = Life(seed)
    with tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as spec:
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                run, _ = virtual.run(alone(Path(spec), life))
            assert not warned, f"Python warns: {[str(warning.message) for warning in warned]}"
            check(Path(spec), life, run)
        except BaseException as error:
            error.add_note(f"once more, with all that happened: python tests/fates.py --seed {seed}")
            error.life = life  # type: ignore[attr-defined]
            raise
    return life


def all_of(seeds: Sequence[int]) -> Iterator[tuple[int, Exception]]:
    """Those that break a law."""
    for seed in seeds:
        try:
            live(seed)
        except Exception as error:
            yield seed, error


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("count", type=int, nargs="?", default=10_000, help="how many runs")
    options.add_argument("--first", type=int, default=0, help="seed of the first")
    options.add_argument("--seed", type=int, help="live this one, and say all that happens")
    given = options.parse_args()
    if given.seed is not None:
        try:
            life = live(given.seed)
        except BaseException as error:
            life = error.life  # type: ignore[attr-defined]
            raise
        finally:
            print(life.schedule, *life.said, sep="\n")
        return 0
    began, failed = time.monotonic(), 0
    for _, error in all_of(range(given.first, given.first + given.count)):
        failed += 1
        print(f"{type(error).__name__}: {error}", *error.__notes__, sep="\n", flush=True)
    print(f"{given.count} runs in {time.monotonic() - began:.0f} s, {failed} of them broke a law")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
