"""Whether a student can act upon an environment: that it is there, and that the chat template can be gone on with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slipstream.engines.native.config import generation_of
from slipstream.plan.engines import EnvironmentPlan
from slipstream.tasks.chat import Tokenizer, stop_ids
from slipstream.tasks.environments.hosts import schemas

Tools = Sequence[dict[str, Any]] | None
"""Their JSON schemas; None where there is no environment."""


def tools_of(there: EnvironmentPlan | None, tokenizer: Tokenizer, model: str, say: Callable[[str], object]) -> Tools:
    """What chat templates are told of."""
    if there is None:
        return None
    from slipstream.tasks.renderer import Renderer

    found = schemas(there.wanted)
    ends = stop_ids(tokenizer, generation_of(model))
    for note in Renderer(tokenizer, stop_ids=ends, tools=found, **there.renderer).notes:
        say(note)
    return found
