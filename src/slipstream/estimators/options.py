"""Keyword-only parameters of an estimator as its options: which there are, and whether the ones given fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.estimators.numerics import unknown

REQUIRED: Any = inspect.Parameter.empty
"""Stands for the default of an option that has none."""

Options = dict[str, Any]


def options_of(*functions: Callable[..., object]) -> Options:
    """Every keyword-only parameter of the functions, with its default."""
    found: Options = {}
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        found |= {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    return found


def check_options(owner: str, given: Mapping[str, object], known: Options) -> None:
    """A ValueError for an option that `owner` does not know, or for one that it needs and is not given."""
    for name in given:
        if name not in known:
            raise unknown(f"option of {owner}", name, known) if known else ValueError(f"{owner} has no option {name!r}")
    for name, default in known.items():
        if default is REQUIRED and given.get(name) is None:
            raise ValueError(f"{owner} needs {name}=…")


def only(given: Options, function: Callable[..., object]) -> Options:
    """Those of the given options that the function takes."""
    return {name: value for name, value in given.items() if name in options_of(function)}
