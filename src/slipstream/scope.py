"""Scope of a loss: which tokens the loss of one token depends on, and so where a batch may be split (invariant 5)."""

from typing import Literal

Scope = Literal["token", "row", "batch"]
