"""Engines that take turns on one device: equal results, one engine there at a time, and refusals of what cannot work.

On a CPU both memory spaces are host memory, so these tests hold that values survive and who has them, not speed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import train
from slipstream.config.file import parse
from slipstream.engines.native.spaces import Spaces, keep_on_host
from slipstream.errors import ConfigError
from slipstream.plan.plan import fast_checks
from slipstream.run_dir.writing import read_lines
from slipstream.runtimes import turns
from slipstream.runtimes.turns import Seat

RUNTIME = {"kind": "inline", "device": "cpu", "turns": True}
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
    "sampler": {"max_tokens": 8, "group": 2, "interleave": 4},
    "loss": {"kind": "forward_kl"},
}


def weights_of(path: Path) -> bytes:
    return (path / "final" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("change", [{}, FOLLOWS, WATCHED], ids=["reference", "follows", "interleaved"])
def test_a_run_in_turns_has_the_losses_and_weights_of_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    moves, park = list[Seat](), Seat.park

    def counted(seat: Seat) -> None:
        park(seat)
        moves.append(seat)

    monkeypatch.setattr(turns.Seat, "park", counted)
    found = []
    for name, own in (("turns", True), ("together", False)):
        output = tmp_path / name
        tree = TREE | change | {"output": str(output), "runtime": RUNTIME | {"turns": own}}
        train(parse({key: value for key, value in tree.items() if value is not None}))
        found.append(([line["loss"] for line in read_lines(output / "metrics.jsonl") if "loss" in line], output))
        assert len(moves) > 3 * 3, "every update moves three engines"
    (first, here), (second, there) = found
    assert len(first) == 3 and first == second
    assert weights_of(here) == weights_of(there)


def test_only_the_engine_that_works_has_tensors_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move, most = turns.Turns._move, list[int]()

    def on_device(seat: Seat) -> int:
        return sum(tensor.numel() for tensor in seat.leave())

    async def watched(self: turns.Turns, seat: Seat) -> None:
        await move(self, seat)
        most.extend(on_device(other) for other in self.seats if other is not seat)
        assert on_device(seat) > 0

    monkeypatch.setattr(turns.Turns, "_move", watched)
    train(parse(TREE | {"output": str(tmp_path / "run")}))
    assert len(most) >= 2 * 3 * 3 and not any(most)


def test_values_survive_a_move_and_a_second_call_moves_nothing() -> None:
    first, second = torch.randn(3, 4, requires_grad=True), torch.arange(5)
    shared: list[Tensor] = [first, second, torch.empty(0)]
    before = [tensor.detach().clone() for tensor in shared]
    spaces = Spaces()
    spaces.to_host(shared)
    assert not any(tensor.numel() for tensor in shared)
    spaces.to_host(shared)
    spaces.to_device()
    assert all(torch.equal(*pair) for pair in zip(shared, before, strict=True)) and first.requires_grad
    assert not spaces.parked


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
    order = list[str]()

    async def call(seat: Seat, name: str, ends: asyncio.Event) -> None:
        async with seat.turn():
            order.append(f"{name} begins")
            await ends.wait()
            order.append(f"{name} ends")

    async def main() -> None:
        both, ends, other = turns.Turns(), asyncio.Event(), asyncio.Event()
        other.set()
        with turns.ThreadPoolExecutor(1) as thread:
            sampler, scorer = (Seat(both, thread, lambda: ()) for _ in range(2))
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
        ({"runtime": RUNTIME | {"kind": "local"}}, 'write runtime.kind = "inline"'),
        ({"runtime": RUNTIME | {"clock": "modelled"}}, "has no cost for runtime.turns"),
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
