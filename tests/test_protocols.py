"""A proxy has every method of its protocols, and sends each call on under the method's name."""

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from slipstream.protocols import Learner, MovingScorer, Proxy, Relabeller, Sampler
from slipstream.runtimes.exchange import Call, RemoteWorker
from slipstream.runtimes.ranked import RankedLearner


class Recorder(Proxy):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        self.calls.append((method, args, options))
        return method


class Scorers(Recorder, MovingScorer, Relabeller):
    pass


class OwnStep(Recorder, Learner):
    async def step(self, *args: Any) -> Any:
        return "own"


def methods(*protocols: type) -> set[str]:
    return {n for each in protocols for n, value in vars(each).items() if inspect.iscoroutinefunction(value)}


@pytest.mark.parametrize(("kind", "count"), [(Learner, 9), (Sampler, 3)])
def test_every_method_of_a_protocol_is_forwarded(kind: type, count: int) -> None:
    proxy = type("Made", (Recorder, kind), {})()
    assert len(methods(kind)) == count
    for name in methods(kind):
        assert asyncio.run(getattr(proxy, name)(1, two=2)) == name
        assert proxy.calls[-1] == (name, (1,), {"two": 2})


def test_methods_of_several_protocols_are_forwarded_also_inherited_ones() -> None:
    proxy = Scorers()
    for name in ("score", "probe", "publish", "relabel"):
        assert asyncio.run(getattr(proxy, name)()) == name


def test_an_own_method_is_not_replaced() -> None:
    proxy = OwnStep()
    assert asyncio.run(proxy.step()) == "own" and not proxy.calls
    assert asyncio.run(proxy.export()) == "export"  # type: ignore[comparison-overlap]


def test_ranks_keep_the_calls_that_each_rank_gets_in_its_own_form() -> None:
    own = {"prepare", "accumulate", "quote", "save"}
    assert own <= set(vars(RankedLearner)) and {"step", "weigh", "compare", "export", "restore"} <= set(
        dir(RankedLearner)
    )


def test_a_path_keeps_its_meaning_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sent = list[Call]()

    class Link:
        pid = exchanged = 0

        def attach(self, worker: RemoteWorker) -> None:
            self.worker = worker

        def send(self) -> None:
            for call in self.worker.take_outbox():
                sent.append(call)
                self.worker.waiting[call.id].set_result(None)

    async def main() -> None:
        worker = RemoteWorker("learner", Link())  # type: ignore[arg-type]
        await worker.call("restore", Path("runs/first"))
        worker.mark_gone("the test ends")

    asyncio.run(main())
    assert sent[0].args == (tmp_path / "runs" / "first",)
