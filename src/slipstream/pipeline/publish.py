"""New weights into the samplers. Guarantor that what rolls out is what was learned: the fingerprints must agree."""

from __future__ import annotations

from slipstream.engines.base import Engines, Mode
from slipstream.errors import ModelError


async def publish(engines: Engines, version: int, mode: Mode) -> None:
    """Export, load, compare. The caller keeps the gate shut until this returns."""
    weights, expected = await engines.learner.export()
    found = await engines.sampler.publish(weights, version, mode)
    if found != expected:
        raise ModelError(
            f"publish of version {version}: the sampler runs weights {found}, the learner exported {expected}; "
            "its rollouts would be from another policy than recorded"
        )
