"""Cost of stages on a GPU that is not here, from public figures: a model's weight, a device's speed of reading its
memory and of multiplying, and the share of either that programs reach.

The larger of reading and multiplying would be the roof of each kernel; sums are taken here, which is never faster.
"""

from dataclasses import dataclass

from slipstream.config.costs import Costs, DecodeCost, LearnCost, Lengths, PassCost, PublishCost, ScoreCost

BYTES = 2
"""Bytes of a number in bfloat16."""
RECOMPUTED = 8 / 6
"""Forward, backward and the forward pass once more, over the first two alone."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device by its data sheet: bytes of memory, bytes per second, and dense bfloat16 operations per second."""

    memory: float
    bandwidth: float
    flops: float


B200 = Device(memory=180e9, bandwidth=8.0e12, flops=2.25e15)
H100 = Device(memory=80e9, bandwidth=3.35e12, flops=0.989e15)


@dataclass(frozen=True, kw_only=True)
class Model:
    weights: float
    """Numbers that it consists of."""
    active: float
    """Those that a token is multiplied with; all of them but for a mixture of experts."""
    layers: int
    kv_width: int
    """Heads of keys and values times their width."""

    @property
    def kv_bytes(self) -> float:
        """Return the bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_width * BYTES


QWEN3_1_7B = Model(weights=1.7e9, active=1.7e9, layers=28, kv_width=8 * 128)
QWEN3_4B = Model(weights=4.0e9, active=4.0e9, layers=36, kv_width=8 * 128)
QWEN3_8B = Model(weights=8.2e9, active=8.2e9, layers=36, kv_width=8 * 128)
QWEN3_30B_A3B = Model(weights=30.5e9, active=3.3e9, layers=48, kv_width=4 * 128)


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Shares of a device that programs reach: assumptions, each of which may be another one."""

    bandwidth: float = 0.7
    """Share of the bandwidth, for reading weights, keys and values while decoding."""
    decode: float = 0.4
    """Share of the operations while decoding."""
    prefill: float = 0.4
    score: float = 0.1
    """A teacher that gives log-probs of many tokens at every position; with few experts in each batch."""
    learn: float = 0.25
    overhead: float = 3e-3
    """Seconds of a decoding step that are neither: scheduling, launches, sampling."""
    per_row: float = 1e-4
    """And of every row in it: 64 draws, whose log-probs go to the host. With one draw a tenth of that."""
    publish: float = 1.0
    """Seconds in which a sampler stands still for new weights."""


def costs_on(device: Device, student: Model, teacher: Model, lengths: Lengths, reached: Reached) -> Costs:
    read, multiply = device.bandwidth * reached.bandwidth, device.flops
    forward = 2 * student.active / multiply
    return Costs(
        decode=DecodeCost(
            step=reached.overhead + BYTES * student.weights / read,
            row=reached.per_row + forward / reached.decode,
            context=student.kv_bytes / read,
        ),
        read=PassCost(token=forward / reached.prefill),
        score=ScoreCost(token=2 * teacher.active / multiply / reached.score),
        learn=LearnCost(token=3 * forward * RECOMPUTED / reached.learn),
        publish=PublishCost(load=reached.publish),
        lengths=lengths,
    )


def room(device: Device, student: Model, *, context: float, share: float = 0.85) -> int:
    """Rows for whose keys and values there is memory, if each attends to so many tokens."""
    return int((share * device.memory - BYTES * student.weights) / (student.kv_bytes * context))
