"""Advice about number formats on a CPU, given how fast it multiplies in bfloat16."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.config.file import parse
from slipstream.config.schema import Config
from slipstream.plan.facts import Facts, speed_of_bfloat16
from slipstream.plan.notes import precision_advice


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 4}
    path = tmp_path_factory.mktemp("models") / "wide"
    LlamaForCausalLM(LlamaConfig(vocab_size=50, **size)).save_pretrained(path)
    return str(path)


def config(student: str, **changes: Any) -> Config:
    tree = {"student": student, "teachers": {"main": {"model": student}, "far": {"model": "x", "base_url": "http://x"}}}
    return parse(tree | {"runtime": {"device": "cpu"}} | changes)


def advise(config: Config, speed: Callable[[int, int], float]) -> tuple[list[str], list[str]]:
    class Measured(Facts):
        def speed_of_bfloat16(self, inputs: int, outputs: int) -> float:
            return speed(inputs, outputs)

    return precision_advice(config, Measured(config))


def told(speed: float) -> Callable[[int, int], float]:
    def measured(inputs: int, outputs: int) -> float:
        assert (inputs, outputs) == (256, 1024)
        return speed

    return measured


def test_a_faster_format_is_a_note_with_the_keys_to_write(wide: str) -> None:
    notes, warnings = advise(config(wide), told(4.0))
    assert notes == [
        "on this processor bfloat16 is 4.0× as fast as float32 in products with the student's matrices: write "
        'sampler.dtype = "bfloat16", teachers.main.dtype = "bfloat16", learner.compute_dtype = "bfloat16" for speed'
    ]
    assert not warnings
    partly = config(wide, sampler={"dtype": "bfloat16"}, learner={"compute_dtype": "bfloat16"})
    assert advise(partly, told(2.0))[0][0].endswith('write teachers.main.dtype = "bfloat16" for speed')
    assert advise(config(wide), told(1.4)) == ([], [])


def test_a_slower_format_is_a_warning(wide: str) -> None:
    slow = config(wide, sampler={"dtype": "bfloat16"})
    notes, warnings = advise(slow, told(0.3))
    assert not notes and warnings == [
        "on this processor bfloat16 is 0.3× as fast as float32 in products with the student's matrices: write "
        'sampler.dtype = "float32"'
    ]
    assert advise(slow, told(0.9)) == advise(config(wide), told(0.3)) == ([], [])


def test_small_models_are_not_measured() -> None:
    assert advise(config("builtin:student"), told(4.0)) == ([], [])


def test_the_measurement_is_a_ratio() -> None:
    assert speed_of_bfloat16(32, 64) > 0
