"""Models whose layers are split over devices: who gets which layer, and scores and runs that are those of one device.

On the CPU all devices are one; test_pretended_gpu.py has two devices between which values must move.
"""

import asyncio
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import slipstream
from slipstream.engines.native.model import load_model, split
from slipstream.engines.native.over_devices import devices_from, fullest, moved, sizes_of, split_of
from slipstream.engines.weights import export_weights, fingerprint, load_weights
from slipstream.errors import ModelError
from slipstream.protocols import Sampling
from slipstream.records import Prompt
from support.engines import native_sampler, native_scorer
from support.tiny_models import make_model

RUN: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 2,
    "data": {"limit": 16},
    "sampler": {"max_tokens": 8},
    "learner": {"batch_size": 8, "lr": 1e-3},
    "runtime": {"kind": "inline", "device": "cpu"},
}


@given(
    outside=st.integers(0, 30), layers=st.lists(st.integers(1, 9), min_size=1, max_size=7), devices=st.integers(1, 4)
)
def test_no_other_split_has_a_less_full_device(outside: int, layers: list[int], devices: int) -> None:
    devices = min(devices, len(layers))
    split = split_of(outside, layers, devices)
    assert split == sorted(split) and set(split) == set(range(devices))

    def most(cuts: tuple[int, ...]) -> int:
        bounds = list(zip((0, *cuts), (*cuts, len(layers)), strict=True))
        return max(sum(layers[start:stop]) + outside * (start == 0) for start, stop in bounds)

    assert fullest(outside, layers, devices) == min(map(most, combinations(range(1, len(layers)), devices - 1)))


def test_the_sizes_of_a_model_are_counted_once() -> None:
    model = make_model("qwen3")  # its head is its embeddings
    outside, layers = sizes_of(model)
    buffers = sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    assert outside + sum(layers) == 4 * sum(each.numel() for each in model.parameters()) + buffers
    assert len(layers) == 2 and layers[0] == layers[1]


def test_devices_follow_the_first() -> None:
    cuda = torch.device("cuda")
    assert devices_from(cuda, 2) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert devices_from(torch.device("cuda", 3), 2) == [torch.device("cuda", 3), torch.device("cuda", 4)]
    assert devices_from(torch.device("cpu"), 2) == [torch.device("cpu")] * 2


def test_tensors_inside_of_arguments_are_moved() -> None:
    there = torch.device("meta")
    found = moved({"mask": None, "rope": (torch.ones(2), [torch.ones(1), 3])}, there)
    assert found["mask"] is None and found["rope"][1][1] == 3
    assert found["rope"][0].device == found["rope"][1][0].device == there


@pytest.mark.parametrize("cache", ["sampled", "student_topk", "teacher_topk", "hidden"])
def test_a_split_teacher_gives_the_scores_of_a_whole_one(cache: Any, tmp_path: Path) -> None:
    make_model("llama", seed=2).save_pretrained(tmp_path)
    student = split("student", make_model("llama"))
    sampler = native_sampler(student, slots=4, stop_ids={1})
    prompt = Prompt(id="p", number=0, tokens=np.arange(2, 9), seed=5)
    some = Sampling(max_tokens=9, group=4, draws=3, best=3)
    handles = asyncio.run(sampler.generate(prompt, some))
    sampler.close()
    one, two = (load_model(str(tmp_path), dtype="float32", device="cpu", devices=number) for number in (1, 2))
    new = export_weights(make_model("llama", seed=3), "float32", version=1)
    for _ in range(2):  # before and after new weights, as those of a teacher that follows the student
        expected, found = (native_scorer(lm, cache=cache, k=4)._score(handles) for lm in (one, two))
        for ours, theirs in zip(found, expected, strict=True):
            for name in ("teacher_logp", "teacher_action_logp", "teacher_best_logp", "teacher_ids", "teacher_hidden"):
                np.testing.assert_array_equal(getattr(ours.body, name), getattr(theirs.body, name))
        for lm in (one, two):
            load_weights(lm.model, new)
        assert fingerprint(one.model, "float32") == fingerprint(two.model, "float32")


def test_more_devices_than_layers_are_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="its 2 layers cannot be split over 3 devices"):
        load_model(str(tmp_path), dtype="float32", device="cpu", devices=3)


def test_a_run_with_a_split_teacher_trains_the_same_student(tmp_path: Path) -> None:
    found = []
    for devices in (1, 3):
        teacher = {"model": "builtin:teacher", "devices": devices}
        output = tmp_path / str(devices)
        slipstream.train(RUN | {"teachers": {"main": teacher}, "output": str(output)}, quiet=True)
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        found.append([(line["loss"], line["grad_norm"]) for line in lines if "loss" in line])
    assert len(found[0]) == 2
    for one, other in zip(*found, strict=True):  # the calls of a pass depend on the time, and rounding on them
        assert one == pytest.approx(other, rel=1e-4)
