"""Settings of speculative sampling, `[sampler.speculation]`."""

from __future__ import annotations

from pydantic import Field

from slipstream.config.base import Section


class SpeculationConfig(Section):
    lookup: int = Field(3, ge=1, le=64)
    """Number of newest tokens that are looked up: the tokens after their latest earlier occurrence, in prompt or
    response, are proposed."""
    tokens: int = Field(4, ge=1, le=64)
    """Largest number of tokens that are proposed for a response, and verified in one pass."""
    least: float = Field(0.3, ge=0, lt=1)
    """Smallest share of the proposed tokens that must be accepted. Below it a sampler proposes tokens in few steps
    only, to notice when the share has risen. 0 always proposes them."""
