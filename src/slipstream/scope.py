"""What the loss of one token may depend on besides that token, and so where a batch may be cut (invariant 5)."""

from __future__ import annotations

from typing import Literal

Scope = Literal["token", "row", "batch"]
