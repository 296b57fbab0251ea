"""Engines in processes of their own, local ones and Ray's: what travels, what stays, what comes back when something
breaks, and that nothing is left, however it ends."""

import asyncio
import gc
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import ray
from ray._private.internal_api import node_stats
from transformers import PreTrainedTokenizerFast

from slipstream.config.rewards import TaskConfig
from slipstream.config.running import RuntimeConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.shared_memory import Mapped, Records, empty
from slipstream.errors import ConfigError, EngineError, NonFiniteError, WorkerDied
from slipstream.objective.method import method_of
from slipstream.pipeline.run import Run
from slipstream.plan.engine_plans import EnginesPlan
from slipstream.plan.engines import engines_of
from slipstream.plan.gpus import Crew
from slipstream.plan.plan import plan
from slipstream.protocols import Engines, Loaded, Sampling
from slipstream.records import Batch, Handle, total, unfinished
from slipstream.run_dir.atomic_files import LOCK, directory_lock
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runs.planner_process import planned as planned_there
from slipstream.runtimes import inline, local
from slipstream.runtimes import ray as on_ray
from slipstream.runtimes.channel import Channel
from slipstream.runtimes.exchange import Body, RemoteWorker
from slipstream.runtimes.launcher import ProcessSettings
from slipstream.runtimes.local import ProcessLauncher
from slipstream.runtimes.workers import (
    RemoteLearner,
    RemoteSampler,
    RemoteScorer,
    WorkerManager,
    WorkerSpec,
    cpu_seconds,
    gpus_each,
)
from support.coordinators import open_files
from support.plain_engines import (
    LARGE,
    Broken,
    Busy,
    Environment,
    Keeper,
    Maker,
    Patient,
    Reader,
    Threads,
    Weigher,
    loads_for_long,
    no_engine,
    prompt,
    stops_while_it_loads,
)
from support.runtime_cases import RUNTIMES, SAMPLING, TESTS, Fate, losses, prompts, settings, silent
from support.slow_cases import with_slow
from support.tabular_workers import EndlessRollouts, ToyRollouts, toy_learner, toy_scorer

pytestmark = pytest.mark.processes


def planned(config: Config) -> EnginesPlan:
    return engines_of(config, method_of(config))


def shipped(**changes: Any) -> EnginesPlan:
    teachers = {"main": TeacherConfig(model="builtin:teacher")}
    return planned(settings(student="builtin:student", teachers=teachers, **changes))


def children() -> set[int]:
    """All processes below this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it has ended meanwhile
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)

    def below(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return {pid for pid in parents if below(pid)}


# --- a runtime that comes and goes with the run -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(models_dir: Path, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of models in one process."""
    config = settings(
        updates=2,
        student=str(models_dir / "student"),
        teachers={"main": TeacherConfig(model=str(models_dir / "teacher"))},
        sampler=SamplerConfig(max_tokens=8, group=2, slots=8),
        task=TaskConfig(reward=("exact",)),
    )
    engines = inline.open_engines(planned(config), tokenizer, say=silent)
    try:
        return SimpleNamespace(config=config, losses=losses(tmp_path_factory.mktemp("inline") / "run", config, engines))
    finally:
        engines.close()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_run_has_the_losses_of_one_process_and_all_its_processes_end(
    runtime: Any, real: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    before, said = children(), list[str]()
    engines = runtime.open_engines(planned(real.config), tokenizer, say=said.append)
    try:
        found = losses(tmp_path / "run", real.config, engines)
        used = asyncio.run(cpu_seconds(engines))
        started = children() - before
        if runtime is on_ray:
            assert said[0] == "starting Ray"
            assert ray.util.get_node_ip_address() == "127.0.0.1", "Ray's ports run code for whoever can reach them"
        else:
            assert len(said) == 1 and said[0].startswith("loading student")
            assert len(started) <= 5, "three engines, the launcher and a grader"
    finally:
        engines.close()
    assert found == pytest.approx(real.losses, rel=1e-5)
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    assert used.keys() == {"learner", "sampler", "scorer"} and min(used.values()) > 0
    assert not ray.is_initialized()
    until = time.monotonic() + 30 * (runtime is on_ray)
    while left := started & children():
        assert time.monotonic() < until, f"{left} are left"
        time.sleep(0.1)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_cannot_start_takes_all_with_it(runtime: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    before = children()
    with pytest.raises(ConfigError, match=r"3 GPUs are needed \(.*\), there are 0"):
        runtime.open_engines(shipped(runtime=RuntimeConfig(device="cuda")), tokenizer, say=silent)
    assert not ray.is_initialized()
    if runtime is local:
        plan = planned(settings(student="builtin:student", teachers={"main": TeacherConfig(model="nowhere/there")}))
        with pytest.raises(Exception, match="nowhere/there"):
            runtime.open_engines(plan, tokenizer, say=silent)
        assert children() == before


def test_inline_engines_are_closed_if_a_later_one_cannot_be_loaded(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = list[str](), NativeSampler.close
    monkeypatch.setattr(NativeSampler, "close", lambda sampler: (closed.append("sampler"), close(sampler)))
    plan = planned(settings(student="builtin:student", teachers={"main": TeacherConfig(model="nowhere/there")}))
    with pytest.raises(Exception, match="nowhere/there"):
        inline.open_engines(plan, tokenizer, say=silent)
    assert closed == ["sampler"]


def test_what_a_killed_run_left_of_ray_is_removed_by_the_next_and_what_is_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(on_ray, "MAX_DIRECTORY_LENGTH", 1000)
    for name in ("ray-killed", "ray-used", "ray-of-somebody-else"):
        (tmp_path / name / "session_1").mkdir(parents=True)
    (tmp_path / "ray-killed" / LOCK).write_text("1 on here")
    with directory_lock(tmp_path / "ray-used"), on_ray.directory() as path:
        assert {each.name for each in tmp_path.iterdir()} == {"ray-used", "ray-of-somebody-else", Path(path).name}
    assert {each.name for each in tmp_path.iterdir()} == {"ray-used", "ray-of-somebody-else"}, (
        "nor does a run leave any"
    )


# --- one launcher and one Ray for the rest ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launcher() -> Iterator[ProcessLauncher]:
    with ProcessLauncher() as made:
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, on_ray.directory() as path:
        patch.setenv("PYTHONPATH", TESTS)  # actors import their engines from there
        on_ray.start_here(1, path)
        yield
        ray.shutdown()


@dataclass
class Processes:
    """Puts engines into processes."""

    kind: str
    start: Callable[..., WorkerManager]

    def __call__(
        self, kind: type[RemoteWorker], build: Callable[[], Any], *, name: str = "w", threads: int = 1, **options: Any
    ) -> Any:
        (worker,) = self.start([WorkerSpec(kind, name, threads, build)], **options).specs
        return worker

    def stored(self) -> int:
        """Bytes of records and weights that the coordinator holds."""
        if self.kind == "ray":
            (node,) = ray.nodes()
            used: int = node_stats(
                node["NodeManagerAddress"], node["NodeManagerPort"]
            ).store_stats.object_store_bytes_used
            return used
        gc.collect()
        return sum(each.size for each in gc.get_objects() if isinstance(each, Mapped))

    def settled(self, bound: int) -> int:
        """Return the objects that it holds after it had time to free those that nobody names."""
        gc.collect()
        until = time.monotonic() + 10
        while (left := self.stored()) > bound and time.monotonic() < until:
            time.sleep(0.1)
        return left


@pytest.fixture(params=["local", "ray"])
def opened(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with ExitStack() as stack:
        if request.param == "local":
            launcher = request.getfixturevalue("launcher")
            yield Processes("local", partial(local.start, launcher=launcher, stack=stack, say=silent))
        else:
            request.getfixturevalue("cluster")
            yield Processes("ray", partial(on_ray.start, stack=stack, cpus=0, say=silent))


def test_a_publish_is_heard_while_a_thousand_generates_wait(opened: Processes) -> None:
    sampler = opened(RemoteSampler, Patient)

    async def main() -> Loaded:
        generates = [asyncio.create_task(sampler.generate(prompt(i), SAMPLING)) for i in range(1000)]
        await asyncio.sleep(0)
        loaded: Loaded = await sampler.call("publish", None, "keep")
        await asyncio.gather(*generates)
        return loaded

    assert asyncio.run(main()).fingerprint == "1000 running, 0 aborted"
    if opened.kind == "ray":
        assert sampler.link.turn < 20, "calls that are made together travel together"


def test_cancelling_a_call_aborts_it_in_its_process(opened: Processes) -> None:
    sampler = opened(RemoteSampler, Patient)

    async def main() -> Loaded:
        generates = [asyncio.create_task(sampler.generate(prompt(i), SAMPLING)) for i in range(3)]
        await asyncio.wait(generates, timeout=0.5)
        generates[1].cancel()
        late = asyncio.create_task(sampler.generate(prompt(3), SAMPLING))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.wait([generates[1], late])
        loaded: Loaded = await sampler.call("publish", None, "keep")
        await asyncio.gather(generates[0], generates[2])
        return loaded

    # one that is cancelled before it has begun never begins
    assert asyncio.run(main()).fingerprint in ("2 running, 1 aborted", "2 running, 2 aborted")
    assert not sampler.waiting and not sampler.outbox


def test_a_worker_serves_one_event_loop_after_another(opened: Processes) -> None:
    sampler = opened(RemoteSampler, Patient)

    async def leaves() -> None:
        left = asyncio.create_task(sampler.generate(prompt(), SAMPLING))
        await asyncio.wait([left], timeout=0.2)

    asyncio.run(leaves())
    assert asyncio.run(sampler.call("publish", None, "keep")).fingerprint == "0 running, 1 aborted"


def test_an_error_comes_back_as_itself_with_what_happened_there(opened: Processes) -> None:
    scorer = opened(RemoteScorer, Broken)
    with pytest.raises(NonFiniteError) as caught:
        asyncio.run(scorer.score([]))
    assert type(caught.value) is NonFiniteError and str(caught.value) == "a score is NaN"
    (note,) = caught.value.__notes__
    assert "ValueError: deep down" in note and "raise NonFiniteError" in note
    with pytest.raises(EngineError, match="^Own: some thing\n"):
        asyncio.run(scorer.call("odd"))
    with pytest.raises(EngineError, match="cancelled"):
        asyncio.run(scorer.call("ignore"))
    with pytest.raises(TypeError, match="pickle"):
        asyncio.run(scorer.call("score", (i for i in "ab")))
    with pytest.raises(ConfigError, match="^sampler.slots = 0: write more\n") as refused:
        opened(RemoteSampler, no_engine)
    assert type(refused.value) is ConfigError


def test_what_cannot_be_sent_fails_the_call_that_sends_it_and_no_other(launcher: ProcessLauncher) -> None:
    with ExitStack() as stack:
        worker: Any
        (worker,) = local.start([WorkerSpec(RemoteScorer, "w", 1, Broken)], launcher, stack, say=silent).specs

        async def main() -> list[Any]:
            calls = worker.call("count"), worker.call("score", (i for i in "ab")), worker.cpu_seconds()
            return [*await asyncio.gather(*calls, return_exceptions=True)]

        answer, argument, seconds = asyncio.run(main())
        assert "pickle" in str(answer) and isinstance(argument, TypeError) and seconds > 0


def test_a_worker_that_died_fails_its_calls_now_and_later(opened: Processes) -> None:
    victim, other = (opened(RemoteSampler, Broken, name=name) for name in ("sampler-0", "sampler-1"))

    async def main() -> list[Any]:
        calls = [victim.call("wait"), victim.call("wait"), victim.call("die")]
        return [*await asyncio.gather(*calls, return_exceptions=True)]

    how = {"ray": "Worker unexpectedly exits", "local": "killed by SIGKILL"}[opened.kind]
    for error in asyncio.run(main()):
        assert type(error) is WorkerDied
        assert str(error).startswith(f"sampler-0 (pid {victim.pid}) is gone: {how}")
    with pytest.raises(WorkerDied, match="sampler-0"):
        asyncio.run(victim.call("wait"))
    with pytest.raises(EngineError, match="Own"):
        asyncio.run(other.call("odd"))


def test_no_engine_inherits_the_key_of_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    monkeypatch.setenv("OTHER", "here")
    with ProcessLauncher(["TEACHER_KEY", "NOT_SET"]) as made, ExitStack() as stack:
        (worker,) = local.start([WorkerSpec(RemoteScorer, "w", 1, Environment)], made, stack, say=silent).specs
        assert asyncio.run(worker.call("read", "TEACHER_KEY")) is None
        assert asyncio.run(worker.call("read", "OTHER")) == "here"


def test_a_worker_that_hangs_is_killed_and_its_calls_fail(opened: Processes) -> None:
    victim = opened(RemoteSampler, Patient)
    victim.heartbeat = 5.0

    async def main() -> list[Any]:
        calls = [asyncio.create_task(victim.generate(prompt(i), SAMPLING)) for i in range(2)]
        await victim.cpu_seconds()
        os.kill(victim.pid, signal.SIGSTOP)
        return [*await asyncio.gather(*calls, return_exceptions=True)]

    for error in asyncio.run(main()):
        assert type(error) is WorkerDied
        assert str(error) == f"w (pid {victim.pid}) is gone: it has not answered for 5 s (runtime.heartbeat)"
    until = time.monotonic() + 60
    while victim.pid in children():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_worker_that_computes_for_long_does_not_hang(opened: Processes) -> None:
    worker = opened(RemoteWorker, Busy)
    worker.heartbeat = 5.0
    assert asyncio.run(worker.call("compute", 10.0)) == "done"


def test_a_worker_that_hangs_while_it_loads_is_killed_too(opened: Processes) -> None:
    why = r"^while it was loaded, w \(pid \d+\) is gone: it has not answered for 5 s \(runtime.heartbeat\)$"
    with pytest.raises(WorkerDied, match=why):
        opened(RemoteSampler, stops_while_it_loads, heartbeat=5.0)


def test_a_worker_that_loads_for_longer_than_a_heartbeat_does_not_hang(opened: Processes) -> None:
    # its imports alone keep a worker silent for more than five seconds on a busy machine
    worker = opened(RemoteWorker, loads_for_long, heartbeat=15.0)
    assert asyncio.run(worker.call("compute", 0.1)) == "done"


def test_a_coordinator_that_was_busy_itself_blames_nobody(opened: Processes) -> None:
    worker = opened(RemoteSampler, Patient)
    worker.heartbeat = 5.0

    async def main() -> Loaded:
        call = asyncio.create_task(worker.generate(prompt(), SAMPLING))
        await worker.cpu_seconds()
        time.sleep(7)
        loaded: Loaded = await worker.call("publish", None, "keep")
        await call
        return loaded

    assert asyncio.run(main()).fingerprint == "1 running, 0 aborted"


def test_another_takes_the_place_of_a_worker(opened: Processes) -> None:
    manager = opened.start([WorkerSpec(RemoteSampler, "sampler", 1, Maker)])
    (old,) = manager.specs

    async def main() -> Any:
        os.kill(old.pid, signal.SIGKILL)
        new = await manager.replace(old)
        assert len(await new.generate(prompt(), SAMPLING)) == 1
        with pytest.raises(WorkerDied):
            await old.generate(prompt(), SAMPLING)  # type: ignore[attr-defined]
        assert list(manager.specs) == [new] and new.pid != old.pid
        with pytest.raises(WorkerDied, match="another takes its place"):
            await asyncio.gather(new.generate(prompt(), SAMPLING), manager.replace(new))

    asyncio.run(main())


def test_workers_are_hired_and_dismissed_while_others_work(opened: Processes) -> None:
    manager = opened.start(
        [WorkerSpec(RemoteSampler, "sampler", 1, Patient), WorkerSpec(RemoteScorer, "scorer", 1, toy_scorer)]
    )
    one, scorer = manager.specs

    async def main() -> None:
        assert set(manager.kinds) == {"sampler"}, "a scorer of no teacher cannot be told from others"
        other: Any = await manager.replace(manager.hire("sampler", "sampler-1"))
        call = asyncio.create_task(other.generate(prompt(), SAMPLING))
        await other.cpu_seconds()
        leaving = asyncio.create_task(manager.dismiss(other))
        await one.cpu_seconds()
        assert not leaving.done() and other in manager.specs, "it still has something to do"
        await other.publish(None, "keep")
        assert await call == []
        await leaving
        assert list(manager.specs) == [one, scorer]
        with pytest.raises(WorkerDied, match=r"sampler-1 \(pid \d+\) is gone"):
            await other.generate(prompt(), SAMPLING)
        if opened.kind == "local":
            assert other.pid not in children()
        await manager.dismiss(scorer)  # which nobody has called yet
        dead = await manager.replace(manager.hire("sampler", "sampler-2"))
        os.kill(dead.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await dead.generate(prompt(), SAMPLING)
        await manager.dismiss(dead)
        assert list(manager.specs) == [one]

    asyncio.run(main())


def test_who_comes_gets_gpus_that_nobody_has(launcher: ProcessLauncher) -> None:
    places = [WorkerSpec(RemoteSampler, f"sampler-{i}", 1, Environment) for i in range(2)]

    async def main(manager: WorkerManager) -> list[str]:
        assert manager.free() == {"GPU": 1}
        hired = manager.hire("sampler", "sampler-2")
        assert manager.free() == {"GPU": 0}, "as it is nobody else's any more"
        worker = await manager.replace(hired)
        assert manager.free() == {"GPU": 0}
        first = await worker.call("read", "CUDA_VISIBLE_DEVICES")
        await manager.dismiss(next(iter(manager.specs)))
        assert manager.free() == {"GPU": 1}
        worker = await manager.replace(manager.hire("sampler", "sampler-3"))
        return [first, await worker.call("read", "CUDA_VISIBLE_DEVICES")]

    with ExitStack() as stack:
        manager = local.start(places, launcher, stack, gpus=["a", "b", "c"], say=silent)
        assert asyncio.run(main(manager)) == ["c", "a"]


@pytest.mark.parametrize("how", with_slow([signal.SIGKILL, signal.SIGSTOP], quick=[signal.SIGKILL]))
def test_a_run_whose_only_sampler_and_scorer_are_lost_trains_the_same(
    opened: Processes, how: signal.Signals, tmp_path: Path
) -> None:
    manager = opened.start(
        [
            WorkerSpec(RemoteLearner, "learner", 1, toy_learner),
            WorkerSpec(RemoteSampler, "sampler", 1, ToyRollouts),
            WorkerSpec(RemoteScorer, "scorer", 1, toy_scorer),
        ],
        heartbeat=30.0,  # a process that loads on a busy machine is silent for more than ten seconds
    )
    workers: Any = {place.name: worker for worker, place in manager.specs.items()}
    workers["sampler"].heartbeat = workers["scorer"].heartbeat = 5.0
    engines = Engines(
        (workers["sampler"],), {"": (workers["scorer"],)}, workers["learner"], lambda: None, replace=manager.replace
    )
    said = list[str]()

    def pids(name: str) -> int:
        return next(worker.pid for worker, place in manager.specs.items() if place.name == name)

    fates = {3: "sampler", 6: "scorer"} | ({8: "sampler"} if how == signal.SIGKILL else {})
    victims = list(fates.values())
    config = settings(updates=10)
    with RunLog.create(config, tmp_path / "there") as log:
        log.sinks.append(Fate(how, fates, pids))
        asyncio.run(Run(config, engines, prompts(), log, say=said.append).train())
    lines = read_lines(tmp_path / "there" / "metrics.jsonl")
    here = Engines(samplers=(ToyRollouts(),), scorers={"": (toy_scorer(),)}, learner=toy_learner(), close=lambda: None)
    assert [line["loss"] for line in lines] == losses(tmp_path / "here", config, here)
    assert "restarts/sampler" not in lines[2]
    assert (lines[-1]["restarts/sampler"], lines[-1]["restarts/scorer"]) == (victims.count("sampler"), 1)
    numbers = [
        entry["number"] for entry in read_lines(tmp_path / "there" / "ledger.jsonl") if entry["end"] == "trained"
    ]
    assert numbers == list(range(40))
    why = "it has not answered for 5 s" if how == signal.SIGSTOP else ""
    assert re.fullmatch(rf"sampler died and is started again: sampler \(pid \d+\) is gone: {why}.*", said[0])
    assert [line.split(" after ")[0] for line in said[1::2]] == [f"{name} is at work" for name in victims]
    events = json.loads((tmp_path / "there" / "trace.json").read_text().rstrip(",\n") + "]")
    gaps = [event for event in events if event["name"] == "gone"]
    assert len(gaps) == len(victims) and min(event["dur"] for event in gaps) > 1e6, "after a pause"


def test_a_worker_says_with_what_status_it_left(launcher: ProcessLauncher) -> None:
    with ExitStack() as stack:
        (worker,) = local.start([WorkerSpec(RemoteScorer, "w", 1, Broken)], launcher, stack, say=silent).specs
        with pytest.raises(WorkerDied, match=r"^w \(pid \d+\) is gone: exit status 3$"):
            asyncio.run(worker.call("leave"))
        assert worker.link.channel.socket.fileno() < 0, "nobody closes it later"


def test_a_launcher_that_hangs_is_killed_like_an_engine() -> None:
    with ProcessLauncher(heartbeat=0.5) as made:
        assert made.gpus() == []
        os.kill(made.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="which forks them, has not answered for 0.5 s and was killed"):
            made.gpus()
        assert made.gone


def test_a_launcher_that_was_stopped_ends_with_whoever_started_it() -> None:
    with ProcessLauncher() as made:
        link = made.start_engine(ProcessSettings("w", 1, str(Path.cwd()), ""))
        os.kill(made.pid, signal.SIGSTOP)
    link.channel.close()
    assert not Path(f"/proc/{made.pid}").exists()


def test_a_plan_is_made_in_another_launcher_when_one_is_killed(real: Any) -> None:
    with ProcessLauncher() as made:
        os.kill(made.pid, signal.SIGKILL)
        found = planned_there(partial(plan, real.config), made, say=silent)
        assert made.gone and found.method == plan(real.config).method


def test_how_a_process_ended_is_known_however_close_its_end_is_to_the_question(launcher: ProcessLauncher) -> None:
    for _ in range(40):
        link = launcher.start_engine(ProcessSettings("w", 1, str(Path.cwd()), ""))
        assert link.ended() == "killed by SIGKILL"
        link.channel.close()


def test_ctrl_c_does_not_reach_an_engine(opened: Processes) -> None:
    scorer = opened(RemoteScorer, Reader)
    os.kill(scorer.pid, signal.SIGINT)
    assert asyncio.run(scorer.score([])) == []
    if opened.kind == "local":
        assert os.getsid(scorer.pid) != os.getsid(0), "nor anything else that a terminal sends"


def memories(pid: int) -> int:
    """Return the number of shared memories that a process has open; one that is mapped is open."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the one by which we look
            found += "memfd:slipstream" in str(link.readlink())
    return found


def test_records_never_pass_through_the_coordinator(opened: Processes) -> None:
    """Per update 4 groups of one record of 25 bytes a token; the coordinator's messages have headers."""
    manager = opened.start(
        [
            WorkerSpec(RemoteSampler, "sampler", 1, partial(Maker, LARGE)),
            WorkerSpec(RemoteScorer, "scorer", 1, Reader),
            *[WorkerSpec(RemoteLearner, f"learner-{i}", 1, Weigher) for i in range(2)],
        ]
    )
    sampler, scorer, *ranks = cast("list[Any]", list(manager.specs))

    async def update() -> None:
        groups = [await scorer.score(await sampler.generate(prompt(number), SAMPLING)) for number in range(4)]
        parts = [Batch(tuple(groups[rank::2]), 1) for rank in range(2)]
        await asyncio.gather(*[rank.prepare(part) for rank, part in zip(ranks, parts, strict=True)])

    asyncio.run(update())
    traffic, size = manager.traffic(), 4 * 25 * LARGE
    assert traffic.get("coordinator", 0) < 0.01 * size
    assert size < traffic["rollouts"] < 1.01 * size and size < traffic["scores"] < 1.01 * size


def test_records_of_killed_processes_are_freed(launcher: ProcessLauncher) -> None:
    """A killed sampler's records live as long as the coordinator has them, and dropped ones as long as a reader."""
    with ExitStack() as stack:
        places = [
            WorkerSpec(RemoteSampler, "sampler", 1, partial(Maker, LARGE)),
            WorkerSpec(RemoteLearner, "learner", 1, Keeper),
        ]
        sampler, learner = cast("list[Any]", list(local.start(places, launcher, stack, say=silent).specs))

        gc.collect()
        before = memories(os.getpid())  # records that earlier tests still hold

        async def main() -> None:
            groups = [await sampler.generate(prompt(number), SAMPLING) for number in range(2)]
            await learner.prepare(Batch((groups[0],), 1))
            assert (memories(os.getpid()) - before, memories(learner.pid)) == (2, 1)
            os.kill(sampler.pid, signal.SIGKILL)
            with pytest.raises(WorkerDied):
                await sampler.generate(prompt(9), SAMPLING)
            assert memories(os.getpid()) - before == 2
            del groups
            gc.collect()
            assert (memories(os.getpid()) - before, memories(learner.pid)) == (0, 1), (
                "the learner reads its record in place"
            )
            os.kill(learner.pid, signal.SIGKILL)
            with pytest.raises(WorkerDied):
                await learner.prepare(Batch((), 2))

        asyncio.run(main())


@pytest.mark.parametrize("tokens", [3, LARGE])
def test_records_outlive_their_maker_and_are_never_opened_here(opened: Processes, tokens: int) -> None:
    sampler = opened(RemoteSampler, partial(Maker, tokens))
    scorer = opened(RemoteScorer, Reader)

    async def main() -> list[list[Handle]]:
        made = await asyncio.gather(*[sampler.generate(prompt(i), Sampling(4, group=2)) for i in range(3)])
        assert all(isinstance(handle.body, Body) and handle.header.tokens == tokens for g in made for handle in g)
        os.kill(sampler.pid, signal.SIGKILL)  # not `ray.kill`, which returns before the process has ended
        with pytest.raises(WorkerDied):
            await sampler.generate(prompt(9), SAMPLING)
        return await asyncio.gather(*[scorer.score(group) for group in made])

    for number, group in enumerate(asyncio.run(main())):
        assert [(h.header.number, h.header.teacher) for h in group] == [(number, str(2 * tokens))] * 2
        assert all(isinstance(handle.body, Body) for handle in group)


def test_rollouts_go_from_one_process_to_another_half_done(opened: Processes) -> None:
    one, other = (opened(RemoteSampler, EndlessRollouts, name=f"sampler-{i}") for i in range(2))
    scorer, sampling = opened(RemoteScorer, Reader), Sampling(max_tokens=400, group=2)

    async def main() -> tuple[list[list[Handle]], list[list[Handle]]]:
        calls = [asyncio.create_task(one.generate(prompt(i), sampling)) for i in range(3)]
        await one.generate(prompt(9), Sampling(max_tokens=2))
        await one.release()
        begun = await asyncio.gather(*calls)
        assert all(unfinished(group) and len(group) == 2 for group in begun)
        assert all(isinstance(handle.body, Body) for group in begun for handle in group)
        found = await asyncio.gather(*[other.generate(prompt(i), sampling, begun[i]) for i in range(3)])
        whole = await asyncio.gather(*[one.generate(prompt(i), sampling) for i in range(3)])
        assert all(handle.header.rewards == {"ended": 0.0} for group in found for handle in group)
        return [await scorer.score(group) for group in found], [await scorer.score(group) for group in whole]

    found, whole = asyncio.run(main())
    assert [[h.header for h in group] for group in found] == [[h.header for h in group] for group in whole]
    assert found[0][0].header.tokens == 400


def test_weights_are_put_once_and_read_in_place(opened: Processes) -> None:
    learner = opened(RemoteLearner, Weigher)
    samplers = [opened(RemoteSampler, Maker) for _ in range(2)]

    async def main() -> tuple[int, list[Loaded]]:
        empty = opened.stored()
        weights, fingerprint = await learner.export()
        assert fingerprint == "print" and isinstance(weights.body, Body)
        loaded = await asyncio.gather(*[sampler.publish(weights, "keep") for sampler in samplers])
        return opened.stored() - empty, loaded

    size, loaded = asyncio.run(main())
    assert LARGE * 10 <= size < LARGE * 11
    assert [one.fingerprint for one in loaded] == [f"{LARGE * 10} False"] * 2
    if opened.kind == "local":
        assert opened.stored() == 0
        assert not any("memfd:slipstream" in name for name in open_files(os.getpid()))


def test_what_was_learned_from_is_freed(opened: Processes) -> None:
    sampler = opened(RemoteSampler, partial(Maker, LARGE))
    scorer, learner = opened(RemoteScorer, Reader), opened(RemoteLearner, Weigher)
    empty = opened.stored()
    one = 25 * LARGE  # bytes of a record

    async def group(number: int) -> list[Handle]:
        made = await sampler.generate(prompt(number), SAMPLING)
        scored: list[Handle] = await scorer.score(made)
        return scored

    async def main() -> None:
        for update in range(20):
            groups = await asyncio.gather(*[group(number) for number in range(4)])
            counts = await learner.prepare(Batch(tuple(groups), update))
            assert total(counts).n_tokens == 4 * LARGE
            if update % 10 == 9:
                assert opened.settled(empty + 5 * one) < empty + 5 * one, "no more than the batch at hand"

    asyncio.run(main())
    assert opened.settled(empty) <= empty, "nobody holds anything back"


@pytest.mark.parametrize("opened", with_slow(["local", "ray"], quick=["local"]), indirect=True)
def test_a_run_of_several_samplers_has_the_losses_of_one_process(opened: Processes, tmp_path: Path) -> None:
    engines = Engines(
        samplers=tuple(opened(RemoteSampler, ToyRollouts) for _ in range(2)),
        scorers={"": (opened(RemoteScorer, toy_scorer),)},
        learner=opened(RemoteLearner, toy_learner),
        close=lambda: None,
    )
    here = Engines(samplers=(ToyRollouts(),), scorers={"": (toy_scorer(),)}, learner=toy_learner(), close=lambda: None)
    config = settings(updates=10)
    assert losses(tmp_path / "there", config, engines) == losses(tmp_path / "here", config, here)


def test_every_engine_has_the_threads_it_was_given(opened: Processes) -> None:
    assert asyncio.run(opened(RemoteWorker, Threads, threads=2).call("count")) == (2, "2")


class LoadsInTurn:
    """In place of a worker: it is loaded when so many lines were told."""

    turn = nullcontext

    def __init__(self, lines: int, told: list[str]) -> None:
        self.lines, self.told, self.link = lines, told, self

    async def start(self, worker: Any, build: Any) -> None:
        while len(self.told) < self.lines:
            await asyncio.sleep(0)


def test_whoever_waits_is_told_who_still_loads() -> None:
    told = list[str]()
    order = {"scorer": 1, "learner": 2, "sampler": 3}
    wanted = [WorkerSpec(RemoteWorker, name, 1, object) for name in ("learner", "sampler", "scorer")]
    manager = WorkerManager(lambda place: cast(RemoteWorker, LoadsInTurn(order[place.name], told)))
    manager.begin(wanted, lambda _: None, str, told.append)
    assert told == ["loading learner, sampler, scorer", "loading learner, sampler", "loading sampler"]


def test_gpus_are_shared_out_or_left_alone() -> None:
    said, crews = list[str](), [Crew("learner", 1, 1), Crew("teacher main", 1, 2)]
    assert gpus_each("auto", crews, [0], said.append) == gpus_each("cpu", crews, [8], said.append) == 0 and not said
    short = r"3 GPUs are needed (learner 1, teacher main 1 × 2 = 2), there are 2"
    assert gpus_each("auto", crews, [2], said.append) == 0 and short in said[0]
    assert gpus_each("auto", crews, [3], said.append) == gpus_each("cuda", crews, [8], said.append) == 1
    with pytest.raises(ConfigError, match="there are 0"):
        gpus_each("cuda", crews, [0], silent)


def test_what_ray_cannot_give_is_refused_at_once(cluster: None, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="runtime.address = '127.0.0.1:9': no Ray cluster answers there"):
        on_ray.start_there("127.0.0.1:9")
    with pytest.raises(ConfigError, match="ask Ray for 3 CPUs and it has 1"):
        on_ray.open_engines(shipped(), tokenizer, say=silent)


# --- messages ---------------------------------------------------------------------------------------------------------


def pair() -> tuple[Channel, Channel, list[Any]]:
    heard: list[Any] = []
    ours, theirs = socket.socketpair()
    return Channel(ours, lambda *_: None), Channel(theirs, lambda *message: heard.append(message)), heard


def test_a_message_larger_than_the_socket_takes_arrives_whole_and_in_order() -> None:
    ours, theirs, heard = pair()
    sent = os.urandom(3_000_000)
    ours.send(sent, [Mapped.of(np.frombuffer(b"abc", np.uint8))])
    ours.send("second")
    assert ours.unsent, "it does not fit"
    while ours.unsent:
        assert theirs.read()
        ours.write()
    assert theirs.read()
    (first, (memory,)), second = heard
    assert first == sent and bytes(memory.array()) == b"abc" and second == ("second", [])
    assert ours.exchanged == theirs.exchanged > len(sent)
    ours.close()
    assert not theirs.read()
    theirs.close()


def descriptors() -> int:
    gc.collect()  # what earlier tests left
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_without_a_name_is_read_in_place_and_freed_with_its_last_holder() -> None:
    ours, theirs, heard = pair()
    before = descriptors()
    written = empty(3000)
    written[:] = np.frombuffer(b"abc" * 1000, np.uint8)
    ours.send("weights", [Mapped.of(written), Mapped.of(np.frombuffer(b"d", np.uint8))])
    assert theirs.read()
    (_, (weights, more)), *_ = heard
    assert (bytes(weights.array()), bytes(more.array())) == (b"abc" * 1000, b"d")
    with pytest.raises(ValueError, match="read-only"):
        weights.array()[0] = 1
    written[0] = ord("x")
    assert weights.array()[0] == ord("x"), "it was sent without a copy"
    assert Mapped.of(written[1:]) is not Mapped.of(written) is Mapped.of(written)
    del written
    assert descriptors() == before + 2
    del weights, more
    heard.clear()
    gc.collect()
    assert descriptors() == before
    ours.close()
    theirs.close()


def test_more_memories_than_a_system_call_takes_arrive_in_order() -> None:
    ours, theirs, heard = pair()
    before = descriptors()
    ours.send("many", [Mapped.of(np.array([i % 256], np.uint8)) for i in range(600)])
    while len(heard) < 1:
        assert theirs.read()
        ours.write()
    ((_, memories),) = heard
    assert [int(memory.array()[0]) for memory in memories] == [i % 256 for i in range(600)]
    del memories
    heard.clear()
    assert descriptors() == before
    ours.close()
    theirs.close()


def test_records_are_read_in_place_and_freed_with_their_last_array() -> None:
    before = descriptors()
    long, flags = np.arange(100_000, dtype=np.float32), np.array([True, False, True])
    made = Records.of_values([{"long": long, "same": long, "empty": long[:0], "text": "x"}, flags, long[::2]])
    record, marks, strided = made.values()
    again = made.values()[0]
    del made
    assert record["long"].tobytes() == long.tobytes() and record["same"] is record["long"]
    assert (record["empty"].size, record["text"], marks.tolist()) == (0, "x", [True, False, True])
    assert strided.tobytes() == long[::2].tobytes()
    assert all(each.ctypes.data % 64 == 0 and not each.flags.owndata for each in (record["long"], marks))
    record["long"][0] = 7
    assert again["long"][0] == long[0], "a reader's change is its own"
    del record, again, strided
    assert descriptors() == before + 1, "one array of the first reading is left"
    del marks
    assert descriptors() == before


def test_what_is_sent_to_nobody_is_dropped() -> None:
    ours, theirs, _ = pair()
    theirs.close()
    ours.send(b"x" * 1_000_000, [Mapped.of(np.zeros(1, np.uint8))])
    assert not ours.unsent and not ours.read()
    ours.close()
