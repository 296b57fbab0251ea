"""Rows whose environment always ends its process: exactly these are left out, whoever was in that process with them."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import slipstream
from slipstream.environments import Reply
from slipstream.environments.episodes import EPISODE_TRIES, Episodes, Limits
from slipstream.environments.pool import MAX_SUSPECTS, EnvironmentPool, EnvironmentProcess, EnvironmentSettings, Episode
from slipstream.errors import EngineError, EnvironmentFailed, Suspected
from slipstream.pipeline.failures import MAX_FAILED_TRIES, GivenUp, Retries
from slipstream.protocols import Sampling
from slipstream.records import Handle, Prompt, derive_seed
from slipstream.run_dir.writing import read_lines
from support import tabular_engines as toy
from support.toy_episodes import Numbers
from support.toy_runs import VOCAB

SOURCE = """
    import ctypes, os, signal, threading, time

    class Poison:
        def start(self, meta):
            self.how, self.said = meta["how"], 0
            if self.how == "start":
                os._exit(3)
            if self.how == "later":
                threading.Thread(target=self.later, daemon=True).start()

        def later(self):
            time.sleep(0.02)
            os._exit(4)

        def step(self, reply):
            self.said += 1
            if self.how == "exit":
                os._exit(5)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "segfault" and self.said == 2:
                ctypes.string_at(0)
            if self.how == "later":
                time.sleep(60)
            return "1 2" if self.said < 3 else None

        def close(self):
            if self.how == "close":
                os._exit(6)
            return 1.0
"""
LIMITS = Limits(turns=5, calls=100, turn_tokens=4, seconds=600, step_seconds=300)
SAMPLING = Sampling(max_tokens=40, group=2, draws=2)


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "poison.py").write_text(dedent(SOURCE))
    return f"{tmp_path / 'poison.py'}:Poison"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[EnvironmentProcess]:
    """All processes that were started, in their order."""
    found, init = list[EnvironmentProcess](), EnvironmentProcess.__init__

    def noted(self: EnvironmentProcess, wanted: EnvironmentSettings) -> None:
        found.append(self)
        init(self, wanted)

    monkeypatch.setattr(EnvironmentProcess, "__init__", noted)
    return found


def prompt(number: int, how: str) -> Prompt:
    tokens = np.array([1, 2 + number % 3], np.int32)
    return Prompt(id=f"row {number}", number=number, tokens=tokens, seed=derive_seed(0, number), meta={"how": how})


@contextmanager
def episodes(spec: str, processes: int) -> Iterator[Episodes]:
    hosts = EnvironmentPool(EnvironmentSettings(spec, None, 200), processes)
    made = Episodes(toy.ToySampler(toy.random_table(VOCAB, seed=0)), Numbers(), hosts, LIMITS)
    try:
        yield made
    finally:
        hosts.close()


def played(made: Episodes, prompts: list[Prompt]) -> list[list[Handle]]:
    async def work() -> list[list[Handle]]:
        return await asyncio.gather(*(made.generate(each, SAMPLING) for each in prompts))

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("hows", "processes"), [(("", "start", "later", ""), 1), (("exit", "kill", "segfault", "close"), 2)]
)
def test_exactly_the_rows_that_end_their_process_are_left_out(
    spec: str, started: list[EnvironmentProcess], hows: tuple[str, ...], processes: int
) -> None:
    """Play all at once: the other rows give what they give alone, and few processes are started."""
    with episodes(spec, processes) as made:
        found = played(made, [prompt(number, how) for number, how in enumerate(hows)])
        expected = played(made, [prompt(number, "") for number in range(4)])
    for how, group, other in zip(hows, found, expected, strict=True):
        assert [handle.header.finish for handle in group] == (["error"] * 2 if how else ["eos"] * 2)
        for handle, innocent in zip(group, other, strict=True):
            if how:
                assert "ended its process: " in handle.header.cause and "failed/crash" in handle.header.outcome
                assert handle.header.outcome["failures"] == EPISODE_TRIES
            else:
                np.testing.assert_array_equal(handle.body.tokens, innocent.body.tokens)
                assert handle.header.outcome["failures"] == 0 and handle.header.outcome["reward"] == 1.0
    culprits = 2 * sum(map(bool, hows))
    deaths = 2 * culprits  # of shared processes: each makes suspects of some of these, for good at the second
    assert len(started) <= processes + deaths * (1 + 8) + EPISODE_TRIES * culprits


def test_one_such_row_among_many_costs_few_processes(spec: str, started: list[EnvironmentProcess]) -> None:
    with episodes(spec, 1) as made:
        found = played(made, [prompt(number, "exit" if number == 3 else "") for number in range(8)])
        assert [number for number, group in enumerate(found) if group[0].header.finish == "error"] == [3]
        assert {handle.header.outcome["failures"] for handle in found[3]} == {float(EPISODE_TRIES)}
        assert not made.environments.suspects  # type: ignore[attr-defined]
    assert len(started) <= 1 + 2 * (1 + 16) + 2 * EPISODE_TRIES


def test_who_was_idle_when_the_process_ended_is_told_apart_from_who_was_at_work(spec: str) -> None:
    async def work(hosts: EnvironmentPool) -> None:
        culprit, innocent, _ = [await opened(hosts, how) for how in ("exit", "", "")]
        with pytest.raises(Suspected, match="exit status 5") as died:
            await culprit.step(Reply(""))
        assert died.value.acting
        with pytest.raises(Suspected, match="exit status 5") as noticed:
            await innocent.step(Reply(""))
        assert not noticed.value.acting
        alone, other = await opened(hosts, "exit", alone=True), await opened(hosts, "")
        assert alone.host.live == {alone.number} and other.host is not alone.host
        with pytest.raises(EnvironmentFailed, match="exit status 5") as proven:
            await alone.step(Reply(""))
        assert not isinstance(proven.value, Suspected)

    hosts = EnvironmentPool(EnvironmentSettings(spec, None, 200))
    try:
        asyncio.run(work(hosts))
    finally:
        hosts.close()


def test_suspects_wait_for_a_process_and_leave_none_behind(spec: str, started: list[EnvironmentProcess]) -> None:
    async def play(hosts: EnvironmentPool) -> None:
        episode = await opened(hosts, "", alone=True)
        assert len(episode.host.live) == 1 and len(hosts.suspects) <= MAX_SUSPECTS
        await episode.close()

    async def work(hosts: EnvironmentPool) -> None:
        first = [await opened(hosts, "", alone=True) for _ in range(MAX_SUSPECTS)]
        last = hosts.place(alone=True)
        waits = asyncio.create_task(last.ready())
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait([waits])
        last.drop()
        rest = asyncio.gather(*(play(hosts) for _ in range(3)))
        for episode in first:
            await episode.close()
        await rest
        assert not hosts.suspects

    hosts = EnvironmentPool(EnvironmentSettings(spec, None, 200))
    try:
        asyncio.run(work(hosts))
    finally:
        hosts.close()
    assert len(started) == 1 + MAX_SUSPECTS + 3
    assert not any(Path(f"/proc/{host.process.pid}").exists() for host in started)


def test_who_is_cancelled_while_its_process_starts_leaves_nothing_there(spec: str) -> None:
    async def work(hosts: EnvironmentPool) -> None:
        for alone in (False, True):
            episode = hosts.place(alone=alone)
            waits = asyncio.create_task(episode.ready())
            await asyncio.sleep(0)
            waits.cancel()
            await asyncio.wait([waits])
            episode.drop()
            await asyncio.gather(*hosts.leaving)
            assert not episode.host.live and not hosts.suspects and not hosts.retired
        await (await opened(hosts, "")).close()

    hosts = EnvironmentPool(EnvironmentSettings(spec, None, 200))
    try:
        asyncio.run(work(hosts))
    finally:
        hosts.close()


async def opened(hosts: EnvironmentPool, how: str, *, alone: bool = False) -> Episode:
    episode = hosts.place(alone=alone)
    await episode.ready()
    given = {"id": "a", "prompt": "", "ground_truth": 1, "meta": {"how": how}, "data_source": "x", "seed": 0}
    await episode.start(given)
    return episode


# --- in a run -------------------------------------------------------------------------------------------------------


def test_calls_that_began_before_a_success_do_not_say_that_the_stage_is_down() -> None:
    """Calls begin together, and the failing ones among them may all end last."""

    async def work() -> None:
        tries, held = Retries("rollout"), asyncio.Event()

        async def fail(waits: bool) -> None:
            if waits:
                await held.wait()
            raise GivenUp("its row ends the process")

        async def fine() -> None:
            pass

        late = [asyncio.create_task(tries.call(lambda: fail(True))) for _ in range(3 * MAX_FAILED_TRIES)]
        await asyncio.sleep(0)
        await tries.call(fine)
        held.set()
        found = await asyncio.gather(*late, return_exceptions=True)
        assert {type(each) for each in found} == {GivenUp}
        for n in range(MAX_FAILED_TRIES):
            with pytest.raises(GivenUp if n < MAX_FAILED_TRIES - 1 else EngineError):
                await tries.call(lambda: fail(False))

    asyncio.run(work())


SHOP = """
    import asyncio, os

    class Shop:
        def start(self, meta):
            self.kind = meta["kind"]
            if self.kind == "poison":
                os._exit(3)

        async def step(self, reply):
            if self.kind == "slow":
                await asyncio.sleep(10_000)

        def close(self):
            return {"poison": 0.0, "slow": 0.5, "": 1.0}[self.kind]
"""
RUN = """
    student = "builtin:tool_student"
    updates = 1
    output = "{here}/run"
    [data]
    train = "{here}/shop.jsonl"
    [environment]
    use = "{here}/shop.py:Shop"
    seconds = 3
    step_seconds = 300
    [task]
    reward = "environment"
    [policy]
    loss = "vanilla"
    [teachers.main]
    model = "builtin:tool_teacher"
    [sampler]
    max_tokens = 30
    group = 2
    [learner]
    batch_size = 8
    [loss]
    m = 2
    [schedule]
    kind = "sync"
    [runtime]
    kind = "inline"
    device = "cpu"
"""
KINDS = ("", "poison", "slow", "")


@pytest.mark.processes
def test_a_run_leaves_out_poisonous_rows_names_them_and_trains_slow_ones(tmp_path: Path) -> None:
    rows = [
        {"id": f"q{n}", "prompt": [{"role": "user", "content": "What is a+b?"}], "answer": "3", "kind": kind}
        for n, kind in enumerate(KINDS)
    ]
    (tmp_path / "shop.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "shop.py").write_text(dedent(SHOP))
    (tmp_path / "run.toml").write_text(dedent(RUN).format(here=tmp_path))
    slipstream.train(tmp_path / "run.toml")
    ledger = read_lines(tmp_path / "run" / "ledger.jsonl")
    dropped = [line for line in ledger if line.get("reason") == "rollout failed"]
    assert [line["prompt"] for line in dropped] == ["q1"]
    assert dropped[0]["row"].rpartition("/")[2] == "shop.jsonl:2"
    assert all("Shop ended its process: exit status 3" in line["cause"] for line in dropped)
    trained = {line["prompt"]: line for line in ledger if line["end"] == "trained"}
    assert set(trained) == {"q0", "q2", "q3"} and not any("failed" in e for e in trained.values())
    assert trained["q2"]["rewards"] == [{"environment": 0.5}] * 2
    (update,) = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "samples" in line]
    assert update["episode/out_of_time"] > 0 and update["samples"] == 6 and update["failed/crash"] == 2
