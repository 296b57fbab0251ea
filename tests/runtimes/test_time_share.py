"""Engines that take turns on one device: equal results, one engine there at a time, and refusals of what cannot work.

On a CPU both memory spaces are host memory, so these tests hold that values survive and who has them, not speed.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream import train
from slipstream.cli import main
from slipstream.config.file import parse
from slipstream.engines.native.resources import Offloading, Spaces, keep_on_host
from slipstream.errors import ConfigError, WorkerDied
from slipstream.plan.plan import fast_checks
from slipstream.run_dir.writing import read_lines
from slipstream.runtimes.time_share import Holder, TimeShare
from slipstream.runtimes.workers import Party
from support.slow_cases import with_slow

RUNTIME = {"kind": "inline", "device": "cpu", "time_share": True}
TREE: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 3,
    "teachers": {"main": {"model": "builtin:teacher"}},
    "data": {"eval": "builtin:arithmetic"},
    "eval": {"every": 1, "prompts": 4},
    "sampler": {"max_tokens": 8, "group": 2},
    "learner": {"batch_size": 8, "lr": 1e-3},
    "schedule": {"kind": "sync"},
    "policy": {"loss": "vanilla"},
    "reference": {"weight": 0.1},
    "task": {"reward": "exact"},
    "runtime": RUNTIME,
    "log": {"trace": False},
}
FOLLOWS: dict[str, Any] = {
    "teachers": {"main": {"model": "self", "context": "{prompt}", "follow": {"copy_every": 1}}},
}
WATCHED: dict[str, Any] = {
    "policy": None,
    "reference": None,
    "sampler": {"max_tokens": 8, "group": 2, "teacher_replaces": 4},
    "loss": {"kind": "forward_kl"},
}


def weights_of(path: Path) -> bytes:
    return (path / "final" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "change", with_slow([{}, FOLLOWS, WATCHED], quick=[FOLLOWS]), ids=["reference", "follows", "replaces"]
)
def test_a_run_in_turns_has_the_losses_and_weights_of_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    moves, offload = list[Offloading](), Offloading.offload

    async def counted(engine: Offloading) -> None:
        await offload(engine)
        moves.append(engine)

    monkeypatch.setattr(Offloading, "offload", counted)
    found = []
    for name, own in (("turns", True), ("together", False)):
        output = tmp_path / name
        tree = TREE | change | {"output": str(output), "runtime": RUNTIME | {"time_share": own}}
        train(parse({key: value for key, value in tree.items() if value is not None}))
        found.append(([line["loss"] for line in read_lines(output / "metrics.jsonl") if "loss" in line], output))
        assert len(moves) > 3 * 3, "every update moves three engines"
    (first, here), (second, there) = found
    assert len(first) == 3 and first == second
    assert weights_of(here) == weights_of(there)


def test_only_the_engine_that_works_has_tensors_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move, most = TimeShare._move, list[int]()

    def on_device(engine: Any) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in engine.on_device())

    async def watched(self: TimeShare, holder: Holder) -> None:
        await move(self, holder)
        most.extend(on_device(other) for other in self.holders if other is not holder)
        assert on_device(holder) > 0

    monkeypatch.setattr(TimeShare, "_move", watched)
    train(parse(TREE | {"output": str(tmp_path / "run")}))
    assert len(most) >= 2 * 3 * 3 and not any(most)


def test_values_survive_a_move_and_a_second_call_moves_nothing() -> None:
    first, second = torch.randn(3, 4, requires_grad=True), torch.arange(5)
    mapped, view = torch.from_numpy(np.arange(3.0)), first.detach()[1]
    shared: list[Tensor] = [first, second, torch.empty(0), mapped, view]
    before = [tensor.detach().clone() for tensor in shared]
    spaces = Spaces()
    spaces.to_host(shared)
    assert not any(tensor.untyped_storage().nbytes() for tensor in shared)
    spaces.to_host(shared)
    spaces.to_device()
    assert all(torch.equal(*pair) for pair in zip(shared, before, strict=True)) and first.requires_grad
    assert not spaces.offloaded and view.data_ptr() == first.data_ptr() + 16, "a view stays a view"


def test_hidden_states_are_copied_until_the_backward_pass_and_weights_are_not() -> None:
    hidden, weight = torch.randn(2, 3, requires_grad=True), torch.nn.Parameter(torch.randn(4, 3))
    before, other = hidden.detach().clone(), torch.randn(2, 4)
    with keep_on_host(3):
        loss = (hidden @ weight.T * other).sum()
    hidden.data.zero_()
    weight.data.fill_(2)
    loss.backward()
    assert torch.equal(weight.grad, other.T @ before), "the hidden states of the forward pass"
    assert torch.equal(hidden.grad, other @ torch.full((4, 3), 2.0)), "the weight itself"


def test_a_call_waits_for_the_calls_of_another_engine_and_joins_those_of_its_own() -> None:
    order, share = list[str](), TimeShare()

    async def call(holder: Holder, name: str, ends: asyncio.Event) -> None:
        async with share.turn(holder):
            order.append(f"{name} begins")
            await ends.wait()
            order.append(f"{name} ends")

    async def main() -> None:
        ends, other = asyncio.Event(), asyncio.Event()
        other.set()
        sampler, scorer = Party(share), Party(share)
        calls = [asyncio.create_task(call(sampler, "a", ends)), asyncio.create_task(call(sampler, "b", ends))]
        while len(order) < 2:
            await asyncio.sleep(0)
        calls.append(asyncio.create_task(call(scorer, "c", other)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert order == ["a begins", "b begins"]
        ends.set()
        await asyncio.gather(*calls)

    asyncio.run(main())
    assert order == [*(f"{name} begins" for name in "ab"), *(f"{name} ends" for name in "ab"), "c begins", "c ends"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runtime": RUNTIME | {"kind": "ray"}}, 'write runtime.kind = "local"'),
        (
            {"runtime": RUNTIME | {"kind": "local"}, "sampler": {"engine": "vllm", "max_tokens": 8, "group": 2}},
            'cannot move sampler.engine = "vllm" here',
        ),
        ({"runtime": RUNTIME | {"clock": "modelled"}}, "has no cost for runtime.time_share"),
        ({"schedule": {"kind": "async"}}, 'stages of schedule.kind = "async" overlap'),
        ({"sampler": {"engine": "vllm", "max_tokens": 8, "group": 2}}, 'sampler.engine = "vllm"'),
        ({"sampler": {"replicas": 2, "max_tokens": 8, "group": 2}}, "drop sampler.replicas"),
        (
            {"teachers": {"main": {"model": "m", "base_url": "http://127.0.0.1:1/v1"}}},
            "cannot move teachers.main, which is an endpoint",
        ),
    ],
)
def test_what_cannot_take_turns_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fast_checks(parse(TREE | change))


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_samplers_and_ranks_in_turn_train_the_weights_of_those_that_have_their_own_devices(tmp_path: Path) -> None:
    weights, losses = list[bytes](), list[list[float]]()
    for turns in (True, False):
        output = tmp_path / str(turns)
        runtime = {"kind": "local", "device": "cpu", "time_share": turns}
        sampler = {"max_tokens": 8, "group": 2, "replicas": 2}
        # no teacher, and a group for each sampler and rank: nothing depends on the order in which groups arrive
        learner = {"batch_size": 4, "lr": 1e-3, "ranks": 2}
        own = {"teachers": {}, "loss": {"weight": 0.0}, "sampler": sampler, "learner": learner, "runtime": runtime}
        train(parse(TREE | {"output": str(output)} | own))
        weights.append(weights_of(output))
        losses.append([line["loss"] for line in read_lines(output / "metrics.jsonl") if "loss" in line])
    assert weights[0] == weights[1] and losses[0] == losses[1] and len(losses[0]) == 3


class Engine:
    """A worker with a place for its tensors, and calls that it may lose."""

    def __init__(self, name: str, places: dict[str, str], *, dies: bool = False) -> None:
        self.name, self.places, self.dies, self.gone = name, places, dies, ""

    async def call(self, method: str) -> None:
        if self.dies:
            raise WorkerDied("its process has ended")
        self.places[self.name] = {"offload": "host", "reload": "device"}[method]


def test_all_workers_of_a_party_move_together_and_dead_ones_are_passed_over() -> None:
    places, share = dict[str, str](), TimeShare()
    ranks, samplers = Party(share), Party(share)
    ranks.workers += [Engine("rank 0", places), Engine("rank 1", places)]  # type: ignore[list-item]
    samplers.workers += [Engine("sampler 0", places, dies=True), Engine("sampler 1", places)]  # type: ignore[list-item]

    async def take_turns() -> None:
        async with samplers.turn():
            assert places == {"rank 0": "host", "rank 1": "host", "sampler 1": "device"}
        async with ranks.turn():
            assert places == {"rank 0": "device", "rank 1": "device", "sampler 1": "host"}

    asyncio.run(take_turns())


def test_the_synchronous_baseline_shares_seven_gpus_between_rollout_and_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "config configs/recipes/asyncopd_4b.toml --check --shapes --gpus 8x80 --schedule.kind sync"
    words += " --runtime.time_share true --sampler.replicas 7 --learner.ranks 7"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "8 GPUs are needed (learner and sampler in turn 7, teacher main 1), of 8" in printed
    assert "# turn of the learner: " in printed and "# turn of the samplers: " in printed
