"""Print the options of `slipstream train` that choose the faster number format on this processor.

    slipstream train configs/real.toml $(python tools/fastest_format.py)

Processors with AMX or AVX512-BF16 multiply bfloat16 several times as fast as float32. Others multiply it several times
more slowly: for them nothing is printed, because float32 is the default.
"""

import torch

from slipstream.plan.facts import speed_of_bfloat16
from slipstream.plan.notes import FASTER

KEYS = "teachers.main.dtype", "sampler.dtype", "learner.compute_dtype"
SIZES = 576, 1536
"""Inputs and outputs of the matrix that is multiplied; the size is that of SmolLM2-135M's perceptrons."""


def fastest_format() -> str:
    """Return the name of the dtype in which one core of this processor multiplies fastest."""
    torch.set_num_threads(1)
    return "bfloat16" if speed_of_bfloat16(*SIZES) >= FASTER else "float32"


if __name__ == "__main__":
    if fastest_format() == "bfloat16":
        print(*(f"--{key} bfloat16" for key in KEYS))
