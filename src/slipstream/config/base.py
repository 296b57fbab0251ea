"""What every section of the configuration is made of."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Dtype = Literal["float32", "bfloat16", "float64"]
Beta = Annotated[float, Field(ge=0, lt=1)]
OWN = re.compile(r"(?:.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
"""A function of the user's own: `./file.py:function` or `package.module:function`."""
GREEDY = 1e-3
"""A temperature below which every draw is the likeliest token."""
Temperature = Annotated[float, Field(ge=GREEDY, le=100)]
Epsilon = Annotated[float, Field(gt=0)]
Replicas = Annotated[int, Field(ge=1)] | Literal["auto"]
THREADS = 1024
"""Most threads of one engine: a machine may refuse to start more, which ends a process at once."""
DRAWS = 10_000
"""Most draws at one position: beyond that an exact loss over the vocabulary costs less."""


def at_first(replicas: Replicas) -> int:
    """How many workers a run begins with."""
    return 1 if replicas == "auto" else replicas


def as_tuple(given: Any) -> Any:
    """What a file may write as one name or as a list of them."""
    names = [given] if isinstance(given, str) else given
    return tuple(names) if isinstance(names, list) else names


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, serialize_by_alias=True
    )

    @classmethod
    def settings(cls) -> dict[str, FieldInfo]:
        """By the names that a config has for them."""
        return {info.alias or name: info for name, info in cls.model_fields.items()}

    @classmethod
    def kinds(cls) -> tuple[str, ...]:
        """The values of `kind` that it is the section of; none where there is no choice."""
        kind: Any = cls.model_fields.get("kind")
        return get_args(kind.annotation) if kind else ()
