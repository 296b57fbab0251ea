"""Grades of a response: its rewards by name, or the reason why there are none."""

from dataclasses import dataclass
from typing import Any

ENDPOINT_DOWN = "endpoint"
"""Cause if the endpoint of the judge gave no usable answer, and not because of what the request contains."""


@dataclass(frozen=True, slots=True)
class Ungraded:
    """Reason why a response has no reward: a cause for the counters, and a line of text for people."""

    cause: str
    """timeout, crash, error, nan, type, length, refused or ENDPOINT_DOWN."""
    text: str


Grades = dict[str, Any] | Ungraded
"""Rewards by name, or the text of a context function under the key `context`, or the reason why grading failed."""
