"""Estimators by name, and checks of their options, which are keyword-only parameters. No tensors are used here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

REQUIRED: Any = inspect.Parameter.empty
"""Default value that stands for "this option has no default"."""

Options = dict[str, Any]
Function = Callable[..., Any]


def formula(name: str) -> Function:
    """Return an estimator function by module.name. Tables hold names, so that reading a table does not import torch."""
    module, _, function = name.rpartition(".")
    found: Function = getattr(import_module(f"slipstream.estimators.{module}"), function)
    return found


def options_of(*functions: Function) -> Options:
    """Return every keyword-only parameter of the functions, with its default."""
    found: Options = {}
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        found |= {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    return found


def check_options(owner: str, given: Options, called: Function, *others: Function | None) -> None:
    """Raise a ValueError for an unknown option, or if an option that `called` needs is missing."""
    needed = options_of(called)
    known = needed | options_of(*(other for other in others if other is not None))
    for name in given:
        if name not in known:
            raise unknown(f"option of {owner}", name, known) if known else ValueError(f"{owner} has no option {name!r}")
    for name, default in needed.items():
        if default is REQUIRED and given.get(name) is None:
            raise ValueError(f"{owner} needs {name}=…")


def only(given: Options, function: Function) -> Options:
    """Return only the given options that the function accepts."""
    known = options_of(function)
    return {name: value for name, value in given.items() if name in known}


def unknown(kind: str, name: str, choices: Iterable[str]) -> ValueError:
    names = list(choices)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}: choose one of {', '.join(names)}{hint}")
