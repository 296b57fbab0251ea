"""Settings of a reward model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    path: str
    max_length: int
    """Largest number of tokens of a prompt with its response."""
    batch: int
    dtype: str
    device: str
    timeout: float
    """Maximum seconds for one response."""
    name: str = "model"

    def open(self) -> Any:
        """Start the process of the model."""
        from slipstream.engines.native.reward_model import RewardModelProcess

        return RewardModelProcess(self)
