"""Functions that all stages of `benchmarks/gpu.py` share: device, timing, reports.

A stage reports one line of JSON per figure, on standard output, at the moment at which the figure is known. A line is
either a measurement, or a check: an error that must not exceed a limit.
"""

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from slipstream.engines.native.model import LanguageModel, split
from slipstream.engines.score_checks import scored
from slipstream.records import Handle, Prompt, header_of, one_turn

HERE = Path(__file__).parent
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.0}
"""Dense bfloat16 peak of a device by a part of its name, in TFLOP/s, from the vendors' data sheets."""
SHAPES = ("qwen3_0.6b", "qwen3_4b")
MINIATURE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""The settings that `--small` puts in place of a real shape, so that every stage runs on a CPU within seconds."""


@dataclass(frozen=True)
class Setting:
    """Where a stage runs and how large its problems are."""

    small: bool
    """True: a CPU and miniature shapes, to test the stage itself."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.small else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.small else torch.bfloat16

    def of(self, real: Any, miniature: Any) -> Any:
        """Choose between the size for a GPU and the one for a test."""
        return miniature if self.small else real

    def config(self, shape: str) -> Qwen3Config:
        """Return the configuration of a model of this shape."""
        written = json.loads((HERE / f"{shape}.json").read_text())
        return Qwen3Config(**written | (MINIATURE if self.small else {}), pad_token_id=0, eos_token_id=1)

    def model(self, shape: str, dtype: torch.dtype | None = None, *, seed: int = 0) -> LanguageModel:
        """Build a model of this shape with random weights on the device."""
        torch.manual_seed(seed)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(self.config(shape), dtype=dtype or self.dtype)
        return split(shape, model.eval())

    def synchronize(self) -> None:
        if not self.small:
            torch.cuda.synchronize()


class Report:
    """Prints the figures of one stage as they come."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def number(self, what: str, value: float, unit: str, *, goal: str = "", note: str = "") -> None:
        """Report a measurement; `goal` is what was hoped for, in words."""
        self._line(what=what, value=float(value), unit=unit, goal=goal, note=note, wrong=False)

    def check(self, what: str, error: float, limit: float, *, note: str = "") -> None:
        """Report an error; the stage is wrong if it exceeds the limit or is not a number."""
        wrong = not error <= limit
        self._line(what=what, value=float(error), unit="error", goal=f"≤ {limit:.2g}", note=note, wrong=wrong)

    def skip(self, what: str, why: str) -> None:
        self._line(what=what, value=None, unit="", goal="", note=f"not measured: {why}", wrong=False)

    def _line(self, *, value: float | None, **fields: Any) -> None:
        known = value if value is not None and math.isfinite(value) else None
        print(json.dumps({"stage": self.stage, "value": known, **fields}), flush=True)


def seconds_of(work: Callable[[], object], setting: Setting, *, repeats: int = 5, warm_up: int = 2) -> float:
    """Return the median wall time of one call, with the device idle before and after."""
    for _ in range(warm_up):
        work()
    found = []
    for _ in range(repeats):
        setting.synchronize()
        began = time.perf_counter()
        work()
        setting.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


@contextmanager
def peak_memory(setting: Setting) -> Iterator[list[int]]:
    """Append to the yielded list the bytes allocated at the peak beyond those allocated before; 0 on a CPU."""
    found: list[int] = []
    gc.collect()
    if setting.small:
        yield found
        found.append(0)
        return
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield found
    torch.cuda.synchronize()
    found.append(torch.cuda.max_memory_allocated() - before)


def relative(found: Tensor, expected: Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖ in float64."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-300))


def peak_tflops(setting: Setting) -> float:
    """Return the dense bfloat16 peak of the device; 0 if it is not in the table."""
    if setting.small:
        return 0.0
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), 0.0)


def samples(
    count: int, prompt: int, response: int, vocabulary: int, *, draws: int = 16, group: int = 1, hidden: int = 0
) -> list[Handle]:
    """Make scored responses of random tokens, `group` for each prompt; teacher rows hold draws, or hidden states."""
    rng = np.random.default_rng(0)
    handles = []
    for number in range(count // group):
        tokens = rng.integers(2, vocabulary, prompt)
        for index in range(group):
            rollout = one_turn(
                Prompt(id=str(number), number=number, tokens=tokens, seed=number),
                index,
                actions=rng.integers(2, vocabulary, (response, draws)),
                action_logp=np.full((response, draws), -np.log(vocabulary)),
                versions=np.zeros(response, np.int64),
                finish="length",
            )
            logp_NM = rng.normal(-np.log(vocabulary), 1.0, (response, draws)).clip(max=0).astype(np.float32)
            teacher: dict[str, Any] = {"teacher_logp": logp_NM[:, 0]}
            if hidden:
                bits = torch.from_numpy(rng.standard_normal((response, hidden), np.float32)).bfloat16()
                teacher["teacher_hidden"] = bits.view(torch.uint16).numpy()
            else:
                teacher["teacher_action_logp"] = logp_NM
            handles.append(scored(Handle(header_of(rollout), rollout), teacher="teacher", **teacher))
    return handles


def installed(name: str) -> bool:
    """Report whether a package can be imported, without importing it."""
    return find_spec(name) is not None
