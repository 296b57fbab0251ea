"""Engines in Ray actors: what travels, what stays, what comes back when something breaks, and that nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray._private.internal_api import node_stats
from transformers import PreTrainedTokenizerFast

from slipstream.config.schedule import Sync
from slipstream.config.schema import Config, LearnerConfig, RuntimeConfig, SamplerConfig, TaskConfig, TeacherConfig
from slipstream.engines import toy
from slipstream.engines.base import Engines, Fingerprint, Graded, Loaded, Mode, Sampling, TensorSpec, WeightsRef
from slipstream.errors import ConfigError, EngineError, NonFiniteError, WorkerDied
from slipstream.objective.method import method_of
from slipstream.pipeline.run import Run
from slipstream.plan.engines import EnginesPlan, engines_of
from slipstream.records import Batch, Counts, Group, Handle, Prompt, Rollout, header_of, one_turn, total
from slipstream.runlog import RunLog, read_lines
from slipstream.runtimes import ray as runtime
from slipstream.runtimes.exchange import Body, RemoteWorker
from slipstream.runtimes.places import Place, RemoteLearner, RemoteSampler, RemoteScorer, cpu_seconds, gpus_each
from slipstream.tasks.data import Prompts, Row

VOCAB = 6
SAMPLING = Sampling(max_tokens=4)
LARGE = 100_000
"""Tokens of a record that travels through the object store; small ones travel inside Ray's messages."""


def silent(_: str) -> None:
    pass


def settings(updates: int = 4, **changes: Any) -> Config:
    names = {"student": "toy", "teachers": {"main": TeacherConfig(model="toy")}}
    sizes = {"sampler": SamplerConfig(max_tokens=8, group=2), "learner": LearnerConfig(batch_size=8)}
    return Config(**(names | sizes | {"schedule": Sync(), "updates": updates} | changes))


def planned(config: Config) -> EnginesPlan:
    return engines_of(config, method_of(config))


def shipped(**changes: Any) -> EnginesPlan:
    teachers = {"main": TeacherConfig(model="builtin:teacher")}
    return planned(settings(student="builtin:student", teachers=teachers, **changes))


def prompts() -> Prompts:
    tokens = [np.array([1 + i % (VOCAB - 1)], np.int32) for i in range(10)]
    rows = [Row(id=str(i), prompt="x", ground_truth="y") for i in range(10)]
    return Prompts(rows, tokens, seed=0, shuffle=True)


def losses(path: Path, config: Config, engines: Engines) -> list[float]:
    with RunLog.create(config, path) as log:
        asyncio.run(Run(config, engines, prompts(), log, say=silent).train())
    return [line["loss"] for line in read_lines(path / "metrics.jsonl")]


# --- a Ray of its own, which goes with the run ------------------------------------------------------------------------


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


def test_a_real_run_whose_processes_all_end(
    tmp_path: Path, models_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = settings(
        updates=2,
        student=str(models_dir / "student"),
        teachers={"main": TeacherConfig(model=str(models_dir / "teacher"))},
        sampler=SamplerConfig(max_tokens=8, group=2, slots=8),
        task=TaskConfig(reward=("exact",)),
    )
    before, said = children(), list[str]()
    engines = runtime.open_engines(planned(config), tokenizer, say=said.append)
    try:
        assert ray.util.get_node_ip_address() == "127.0.0.1", "Ray's ports run code for whoever can reach them"
        assert said[0] == "starting Ray"
        found = losses(tmp_path / "run", config, engines)
        used = asyncio.run(cpu_seconds(engines))
        started = children() - before
    finally:
        engines.close()
    assert len(found) == 2 and np.isfinite(found).all()
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    assert used.keys() == {"learner", "sampler", "scorer"} and min(used.values()) > 0
    assert len(started) > 5 and not ray.is_initialized()
    deadline = time.monotonic() + 30
    while left := started & children():
        assert time.monotonic() < deadline, f"{left} are left"
        time.sleep(0.1)


def test_what_cannot_start_takes_its_ray_with_it(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="3 engines need a GPU each, there are 0"):
        runtime.open_engines(shipped(runtime=RuntimeConfig(device="cuda")), tokenizer, say=silent)
    assert not ray.is_initialized()


# --- one Ray for the rest ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    module = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(module)  # actors cannot import it
    runtime.start_here(cpus=1)
    yield
    ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def opened(cluster: None) -> Iterator[Callable[..., Any]]:
    """Puts an engine into an actor."""
    with ExitStack() as stack:

        def place(kind: type[RemoteWorker], build: Callable[[], Any], *, name: str = "w", threads: int = 1) -> Any:
            (worker,) = runtime.start([Place(kind, name, threads, build)], stack, cpus=0, say=silent)
            return worker

        yield place


def rollout(prompt: Prompt, tokens: int = 3) -> Rollout:
    ids, logp, versions = (
        np.full((tokens, 1), 2, np.int32),
        np.zeros((tokens, 1), np.float32),
        np.zeros(tokens, np.int32),
    )
    return one_turn(prompt, 0, actions=ids, action_logp=logp, versions=versions, finish="eos")


def prompt(number: int = 0) -> Prompt:
    return Prompt(id=str(number), number=number, tokens=np.array([1], np.int32))


class Maker:
    """Rollouts of a given length, at once."""

    def __init__(self, tokens: int = 3) -> None:
        self.tokens = tokens

    async def generate(self, prompt: Prompt, sampling: Sampling) -> list[Handle]:
        record = rollout(prompt, self.tokens)
        return [Handle(header_of(record), record) for _ in range(sampling.group)]

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        return Loaded(f"{weights.body.sum()} {weights.body.flags.writeable}")


class Reader:
    """Tells what it was given, as a fingerprint of sorts: teachers named after the sum of the tokens."""

    async def score(self, group: Group) -> list[Handle]:
        return [Handle(header_of(h.body, teacher=str(h.body.tokens.sum())), h.body) for h in group]


class Weigher:
    async def export(self) -> tuple[WeightsRef, Fingerprint]:
        spec = TensorSpec("w", "uint8", (LARGE * 10,), 0, LARGE * 10)
        return WeightsRef((spec,), np.ones(LARGE * 10, np.uint8), 1), "print"

    async def prepare(self, batch: Batch) -> list[Counts]:
        return [Counts(n_tokens=sum(len(handle.body.tokens) for handle in group)) for group in batch.groups]


class Patient:
    """Generates end after a publish, which says how many there were."""

    def __init__(self) -> None:
        self.published, self.running, self.aborted = asyncio.Event(), 0, 0

    async def generate(self, prompt: Prompt, sampling: Sampling) -> list[Handle]:
        self.running += 1
        try:
            await self.published.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        return []

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        running = self.running
        self.published.set()
        return Loaded(f"{running} running, {self.aborted} aborted")


class Own(Exception):
    """Cannot be pickled back: it wants two arguments, and hands one on."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(a + b)


class Broken:
    async def score(self, group: Group) -> list[Handle]:
        try:
            raise ValueError("deep down")
        except ValueError as error:
            raise NonFiniteError("a score is NaN") from error

    async def odd(self) -> None:
        raise Own("some ", "thing\nelse")

    async def ignore(self) -> None:
        raise asyncio.CancelledError

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def wait(self) -> None:
        await asyncio.sleep(3600)


def no_engine() -> None:
    raise ConfigError("sampler.slots = 0: write more")


def test_a_publish_is_heard_while_a_thousand_generates_wait(opened: Any) -> None:
    sampler = opened(RemoteSampler, Patient)

    async def main() -> Loaded:
        generates = [asyncio.create_task(sampler.generate(prompt(i), SAMPLING)) for i in range(1000)]
        await asyncio.sleep(0)
        loaded: Loaded = await sampler.call("publish", None, "keep")
        await asyncio.gather(*generates)
        return loaded

    assert asyncio.run(main()).fingerprint == "1000 running, 0 aborted"
    assert sampler.link.turn < 20, "calls that are made together travel together"


def test_cancelling_a_call_aborts_it_in_the_actor(opened: Any) -> None:
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

    assert asyncio.run(main()).fingerprint == "2 running, 2 aborted"
    assert not sampler.waiting and not sampler.outbox


def test_a_worker_serves_one_event_loop_after_another(opened: Any) -> None:
    sampler = opened(RemoteSampler, Patient)

    async def leaves() -> None:
        left = asyncio.create_task(sampler.generate(prompt(), SAMPLING))
        await asyncio.wait([left], timeout=0.2)

    asyncio.run(leaves())
    assert asyncio.run(sampler.call("publish", None, "keep")).fingerprint == "0 running, 1 aborted"


def test_an_error_comes_back_as_itself_with_what_happened_there(opened: Any) -> None:
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


def test_a_worker_that_died_fails_its_calls_now_and_later(opened: Any) -> None:
    victim, other = (opened(RemoteSampler, Broken, name=name) for name in ("sampler-0", "sampler-1"))

    async def main() -> list[Any]:
        calls = [victim.call("wait"), victim.call("wait"), victim.call("die")]
        return [*await asyncio.gather(*calls, return_exceptions=True)]

    for error in asyncio.run(main()):
        assert type(error) is WorkerDied
        assert str(error).startswith(f"sampler-0 (pid {victim.pid}) is gone: Worker unexpectedly exits")
    with pytest.raises(WorkerDied, match="sampler-0"):
        asyncio.run(victim.call("wait"))
    with pytest.raises(EngineError, match="Own"):
        asyncio.run(other.call("odd"))


def test_ctrl_c_does_not_reach_an_engine(opened: Any) -> None:
    scorer = opened(RemoteScorer, Reader)
    os.kill(scorer.pid, signal.SIGINT)
    assert asyncio.run(scorer.score([])) == []


@pytest.mark.parametrize("tokens", [3, LARGE])
def test_records_outlive_their_maker_and_never_come_here(opened: Any, tokens: int) -> None:
    sampler = opened(RemoteSampler, partial(Maker, tokens))
    scorer = opened(RemoteScorer, Reader)

    async def main() -> list[list[Handle]]:
        made = await asyncio.gather(*[sampler.generate(prompt(i), Sampling(4, group=2)) for i in range(3)])
        assert all(isinstance(handle.body, Body) and handle.header.tokens == tokens for g in made for handle in g)
        ray.kill(sampler.link.actor)
        with pytest.raises(WorkerDied):
            await sampler.generate(prompt(9), SAMPLING)
        return await asyncio.gather(*[scorer.score(group) for group in made])

    for number, group in enumerate(asyncio.run(main())):
        assert [(h.header.number, h.header.teacher) for h in group] == [(number, str(2 * tokens))] * 2
        assert all(isinstance(handle.body, Body) for handle in group)


def test_weights_are_put_once_and_read_in_place(opened: Any) -> None:
    learner = opened(RemoteLearner, Weigher)
    samplers = [opened(RemoteSampler, Maker) for _ in range(2)]

    async def main() -> tuple[int, list[Loaded]]:
        empty = stored()
        weights, fingerprint = await learner.export()
        assert fingerprint == "print" and isinstance(weights.body, Body)
        loaded = await asyncio.gather(*[sampler.publish(weights, "keep") for sampler in samplers])
        return stored() - empty, loaded

    size, loaded = asyncio.run(main())
    assert LARGE * 10 <= size < LARGE * 11
    assert [one.fingerprint for one in loaded] == [f"{LARGE * 10} False"] * 2


def stored() -> int:
    """Bytes in the object store."""
    (node,) = ray.nodes()
    used: int = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats.object_store_bytes_used
    return used


def settled(bound: int) -> int:
    """What the object store holds when it has had time to free what nobody names."""
    gc.collect()
    deadline = time.monotonic() + 10
    while (left := stored()) > bound and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_what_was_learned_from_leaves_the_object_store(opened: Any) -> None:
    sampler = opened(RemoteSampler, partial(Maker, LARGE))
    scorer, learner = opened(RemoteScorer, Reader), opened(RemoteLearner, Weigher)
    empty = stored()
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
                assert settled(empty + 5 * one) < empty + 5 * one, "no more than the batch at hand"

    asyncio.run(main())
    assert settled(empty) <= empty, "the actors hold nothing back"


class ToyRollouts(Graded):
    def __init__(self) -> None:
        super().__init__(toy.ToySampler(toy.random_table(VOCAB, seed=0)), toy.ToyGrader())


def toy_scorer() -> toy.ToyScorer:
    return toy.ToyScorer(toy.random_table(VOCAB, seed=1, scale=2.0))


def toy_learner() -> toy.ToyLearner:
    return toy.ToyLearner(toy.random_table(VOCAB, seed=0))


def test_a_run_over_ray_has_the_same_losses_as_in_one_process(opened: Any, tmp_path: Path) -> None:
    engines = Engines(
        samplers=tuple(opened(RemoteSampler, ToyRollouts) for _ in range(2)),
        scorers={"": (opened(RemoteScorer, toy_scorer),)},
        learner=opened(RemoteLearner, toy_learner),
        close=lambda: None,
    )
    here = Engines(samplers=(ToyRollouts(),), scorers={"": (toy_scorer(),)}, learner=toy_learner(), close=lambda: None)
    config = settings(updates=10)
    assert losses(tmp_path / "ray", config, engines) == losses(tmp_path / "here", config, here)


def threads_here() -> Any:
    class Threads:
        async def count(self) -> tuple[int, str | None]:
            return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")

    return Threads()


def test_every_actor_has_the_threads_it_was_given(opened: Any) -> None:
    assert asyncio.run(opened(RemoteWorker, threads_here, threads=2).call("count")) == (2, "2")


def test_what_ray_cannot_give_is_refused_at_once(cluster: None, tokenizer: PreTrainedTokenizerFast) -> None:
    assert gpus_each("auto", 3, 0, silent) == gpus_each("cpu", 3, 0, silent) == 0
    with pytest.raises(ConfigError, match="3 engines need a GPU each, there are 0"):
        gpus_each("cuda", 3, 0, silent)
    with pytest.raises(ConfigError, match="runtime.address = '127.0.0.1:9': no Ray cluster answers there"):
        runtime.start_there("127.0.0.1:9")
    with pytest.raises(ConfigError, match="ask Ray for 3 CPUs and it has 1"):
        runtime.open_engines(shipped(), tokenizer, say=silent)
