"""Write a student that knows almost nothing: builtin:student with noise on all its matrices.

`python tools/cold_student.py build/cold` is the student of the study configs/lab/warm_start.toml.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.models.resolve import model_path

NOISE = 0.6
"""Standard deviation of the noise, relative to that of each matrix."""


def write(path: str, seed: int) -> None:
    source, generator = model_path("builtin:student"), torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight += NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(source).save_pretrained(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.path, given.seed)
