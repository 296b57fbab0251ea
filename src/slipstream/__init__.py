"""Slipstream: on-policy distillation with overlapped rollout, scoring and learning, and with bounded staleness.

Scripts and notebooks use the names below (docs/python.md). Each is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.api import Config, Run, SlipstreamError, resume, train

__version__ = "0.1.0"
__all__ = ["Config", "Run", "SlipstreamError", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    from slipstream import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
