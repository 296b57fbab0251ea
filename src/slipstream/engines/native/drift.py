"""How far the learner was from what drew its tokens, at the moment it learned from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.engines.base import Metrics
from slipstream.engines.native.frozen import padded
from slipstream.estimators.drift import offpolicy_metrics


@dataclass(frozen=True, slots=True)
class Seen:
    """A sample as the loss saw it: tensors over its T tokens."""

    logp_T: Tensor
    behavior_T: Tensor
    mask_T: Tensor
    version_T: Tensor

    def on_cpu(self) -> Seen:
        return Seen(self.logp_T.cpu(), self.behavior_T, self.mask_T, self.version_T)


def drift_metrics(samples: Sequence[Seen], *, version: int) -> Metrics:
    """The metrics of spec 3 for the current policy against the one that drew, by lag too."""
    if not samples:
        return {}
    lag_BT = (version - padded([sample.version_T for sample in samples])).clamp(min=0)
    found = offpolicy_metrics(
        padded([sample.logp_T for sample in samples]),
        padded([sample.behavior_T for sample in samples]),
        padded([sample.mask_T for sample in samples]),
        lag=lag_BT,
    )
    return {f"drift/{name}": value for name, value in found.items()}
