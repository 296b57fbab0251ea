"""Estimators by name. Their options and descriptions are read from the source, so that no table imports torch.

A keyword-only parameter whose type is a number is a setting that users choose. All others are columns, which the
program computes (`objective/columns`).
"""

import ast
import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

Options = dict[str, Any]
Function = Callable[..., Any]


def formula(name: str) -> Function:
    """Return an estimator function by module.name."""
    module, _, function = name.rpartition(".")
    found: Function = getattr(import_module(f"slipstream.estimators.{module}"), function)
    return found


# --- from the source --------------------------------------------------------------------------------------------------


class Signature(NamedTuple):
    settings: tuple[str, ...]
    columns: tuple[str, ...]


@cache
def _functions(module: str) -> dict[str, ast.FunctionDef]:
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    return {node.name: node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}


def _function(name: str) -> ast.FunctionDef:
    module, _, function = name.rpartition(".")
    return _functions(module)[function]


def signature(*names: str) -> Signature:
    """Return the settings and the columns of estimators by module.name, each once."""
    options = dict[str, str]()
    for name in names:
        options |= {each.arg: ast.unparse(each.annotation or each) for each in _function(name).args.kwonlyargs}
    settings = tuple(name for name, kind in options.items() if kind in ("float", "bool"))
    return Signature(settings, tuple(name for name in options if name not in settings))


def description(name: str, *labels: str) -> list[str]:
    """Return the first line of a docstring, the text behind each label, and the advice; "–" for a missing text.

    A text such as `Cost: …` begins a line, and ends at the next label. The advice follows "Use this loss", "Use this
    advantage" or "Use this centre".
    """
    summary, _, rest = (ast.get_docstring(_function(name)) or "").partition("\n")
    texts, label = dict[str, list[str]](), ""
    for line in rest.split("\n"):
        before, colon, behind = line.partition(": ")
        if line.startswith("Use this "):
            label, line = "Use this", line.split(maxsplit=3)[-1]
        elif colon and before in labels:
            label, line = before, behind
        texts.setdefault(label, []).append(line.strip())
    return [summary, *(" ".join(texts.get(each, ["–"])).removesuffix(".") for each in (*labels, "Use this"))]


# --- options of a call ------------------------------------------------------------------------------------------------


def options_of(*functions: Function | None) -> Options:
    """Return every keyword-only parameter of the functions, with its default."""
    known = [inspect.signature(function).parameters.values() for function in functions if function is not None]
    return {each.name: each.default for parameters in known for each in parameters if each.kind is each.KEYWORD_ONLY}


def check_options(owner: str, given: Options, called: Function, *others: Function | None) -> None:
    """Raise a ValueError for an unknown option, or if an option that `called` needs is missing."""
    known = options_of(called, *others)
    for name in given:
        if name not in known:
            raise unknown(f"option of {owner}", name, known) if known else ValueError(f"{owner} has no option {name!r}")
    for name, default in options_of(called).items():
        if default is inspect.Parameter.empty and given.get(name) is None:
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
