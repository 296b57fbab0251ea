"""Compare bfloat16 with float32 on this processor, for runs of large models on CPUs.

Processors with AMX or AVX512-BF16 multiply bfloat16 several times as fast as float32, others more slowly. The formats
of a run never depend on this measurement: it only advises, so that a resumed or repeated run computes the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from slipstream.engines.native.config import load_config
from slipstream.plan.placement import inner_width

LARGE = 1 << 18
"""Minimum number of weights of a perceptron's matrix for which formats are compared; smaller ones gain little."""
FASTER, SLOWER = 1.5, 0.8
"""Speeds of bfloat16, as multiples of that of float32, beyond which it is recommended or warned of."""
ROWS, SECONDS = 512, 0.2
"""Rows of the measured product, and minimum time for which each format is measured."""


def speed_of_bfloat16(inputs: int, outputs: int) -> float:
    """Return how many times as fast as float32 this processor multiplies by a weight of this size in bfloat16."""
    import torch

    from slipstream.estimators.products import linear

    seconds = list[float]()
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(ROWS, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
        linear(x, weight)  # the first product of a shape compiles its kernel
        begun, best = time.process_time(), float("inf")
        while time.process_time() - begun < SECONDS:
            before = time.process_time()
            linear(x, weight)
            best = min(best, time.process_time() - before)
        seconds.append(best)
    return seconds[0] / seconds[1]


def precision_advice(
    student: str, formats: Mapping[str, str], speed: Callable[[int, int], float] = speed_of_bfloat16
) -> tuple[list[str], list[str]]:
    """Return notes and warnings about number formats (of all matrix products, by key) that are slow here."""
    text = load_config(student).get_text_config()
    width, inner = int(text.hidden_size), inner_width(text)
    if width * inner < LARGE or not {"float32", "bfloat16"} & set(formats.values()):
        return [], []
    found = speed(width, inner)
    said = (
        f"on this processor bfloat16 is {found:.1f}× as fast as float32 in products with the student's matrices: write"
    )
    if found >= FASTER:
        keys = [key for key, dtype in formats.items() if dtype == "float32"]
        return [f"{said} {_listed(keys, 'bfloat16')} for speed"] if keys else [], []
    keys = [key for key, dtype in formats.items() if dtype == "bfloat16"]
    return [], [f"{said} {_listed(keys, 'float32')}"] if found < SLOWER and keys else []


def _listed(keys: list[str], dtype: str) -> str:
    return ", ".join(f'{key} = "{dtype}"' for key in keys)
