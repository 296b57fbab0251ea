"""Dynamic loss scale for passes in float16, which round gradients below 6e-8 to 0 and overflow above 65504.

The loss is multiplied by the scale before the backward pass; gradients are divided by it before the step. A step with
gradients that are not finite is skipped, and the scale is halved. It is doubled after `GROWTH` steps in a row without
an overflow.  (Micikevicius et al., 1710.03740)
"""

from __future__ import annotations

GROWTH = 100
"""Number of steps in a row without overflow after which the scale is doubled."""
START, LOWEST = 2.0**16, 1.0
"""First scale, and smallest scale: gradients that are not finite at it are an error."""
OF_SUMS = 2.0**-16
"""Further factor if the loss is a sum over an update's tokens whose gradients are divided by a count at the step."""


class LossScale:
    def __init__(self, *, on: bool) -> None:
        self.on, self.value, self.steps = on, START if on else 1.0, 0
        self.applied = 1.0
        """Factor of the gradients since the last step."""

    def apply(self, *, summed: bool) -> float:
        """Return the factor of the losses until the next step."""
        self.applied = self.value * (OF_SUMS if summed and self.on else 1.0)
        return self.applied

    def overflowed(self) -> bool:
        """Halve the scale after gradients that are not finite; return False if it is already the smallest."""
        if not self.on or self.value <= LOWEST:
            return False
        self.value, self.steps = self.value / 2, 0
        return True

    def succeeded(self) -> None:
        self.steps += 1
        if self.on and self.steps == GROWTH:
            self.value, self.steps = self.value * 2, 0
