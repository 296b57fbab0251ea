"""Slipstream: on-policy distillation with rollout, scoring and learning overlapped, and staleness under control.

What scripts and notebooks call is here (docs/python.md), and is imported when it is first asked for.
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
